"""Rewrites the tree of a program so that it counts: see measure_costs, whose operations the new tree calls.

Runs inside the sandbox, beside measure_costs (both are sent there as source).
"""

from __future__ import annotations

import ast

from megatron_nb.sandbox.measure_costs import BINARY, FILENAME, UNTOUCHED


def rewrite(source: str, prefix: str):
    """The compiled program that calls the operations of measure_costs under names that begin with `prefix`. SyntaxError."""
    tree = ast.parse(source, FILENAME)
    tree = ast.fix_missing_locations(_Rewriter(prefix, _own_functions(tree)).visit(tree))
    return compile(tree, FILENAME, "exec")


def _own_functions(tree: ast.Module) -> set[str]:
    """Names that only ever mean a function of the program: their calls need no look at what is called."""
    defined = [n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and not n.decorator_list]
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    stored |= {a.arg for n in ast.walk(tree) if isinstance(n, ast.arguments) for a in (*n.args, *n.kwonlyargs, *n.posonlyargs)}
    return set(defined) - stored


def _is_number(node) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def _extends_itself(node: ast.Assign) -> bool:
    target, value = node.targets[0], node.value
    if len(node.targets) > 1 or not isinstance(target, ast.Name) or not isinstance(value, ast.BinOp):
        return False
    if not isinstance(value.op, ast.Add) or _is_number(value.right):
        return False
    return isinstance(value.left, ast.Name) and value.left.id == target.id


class _Rewriter(ast.NodeTransformer):
    def __init__(self, prefix: str, own: set[str]):
        self.prefix, self.own = prefix, own

    def op(self, name: str, *args) -> ast.Call:
        return ast.Call(ast.Name(self.prefix + name, ast.Load()), list(args), [])

    def tick(self) -> ast.stmt:
        units = ast.Subscript(ast.Name(self.prefix + "units", ast.Load()), ast.Constant(0), ast.Store())
        return ast.AugAssign(units, ast.Add(), ast.Constant(1))

    def visit_FunctionDef(self, node):
        node.body = [self.visit(s) for s in node.body]
        node.body = _flat(node.body)
        documented = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
        node.body.insert(1 if documented else 0, self.tick())
        node.args.defaults = [self.visit(d) for d in node.args.defaults]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node):
        node.body = self.visit(node.body)
        node.body = ast.Subscript(ast.Tuple([self.op("count"), node.body], ast.Load()), ast.Constant(1), ast.Load())
        return node

    def _loop(self, node):
        self.generic_visit(node)
        node.body.insert(0, self.tick())
        return node

    visit_For = visit_While = visit_AsyncFor = _loop

    def _comprehension(self, node, operation="items_of"):
        self.generic_visit(node)
        for part in node.generators:
            if not part.is_async:
                part.iter = self.op(operation, part.iter)
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = _comprehension

    def visit_GeneratorExp(self, node):
        return self._comprehension(node, "each")

    def visit_BinOp(self, node):
        self.generic_visit(node)
        name = BINARY.get(type(node.op))
        either = _is_number(node.left) or _is_number(node.right)
        if name is None or (either and name in ("add", "sub", "and_", "rshift")):
            return node
        if name == "mult" and either and not any(isinstance(side, ast.List | ast.Name | ast.Constant) and not _is_number(side)
                                                 for side in (node.left, node.right)):  # fmt: skip
            return node
        return self.op(name, node.left, node.right)

    def visit_AugAssign(self, node):
        self.generic_visit(node)
        if _is_number(node.value) or not isinstance(node.op, ast.Add | ast.Mult | ast.BitOr | ast.BitAnd | ast.Sub):
            return node
        now = ast.Name(node.target.id, ast.Load()) if isinstance(node.target, ast.Name) else ast.Constant(None)
        node.value = self.op("grow", now, node.value)
        return node

    def visit_Assign(self, node):
        if _extends_itself(node):
            node.value.right = self.op("joined", ast.Name(node.targets[0].id, ast.Load()), self.visit(node.value.right))
            return node
        self.generic_visit(node)
        for place in node.targets:
            if isinstance(place, ast.Subscript) and isinstance(place.slice, ast.Slice):
                node.value = self.op("made", node.value)
        return node

    def visit_AnnAssign(self, node):
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Compare(self, node):
        self.generic_visit(node)
        if len(node.ops) > 1:
            return node
        left, right = node.left, node.comparators[0]
        if isinstance(node.ops[0], ast.In | ast.NotIn):
            found = self.op("within", left, right)
            return found if isinstance(node.ops[0], ast.In) else ast.UnaryOp(ast.Not(), found)
        if isinstance(node.ops[0], ast.Eq | ast.NotEq) and not isinstance(right, ast.Constant) and not _is_number(left):
            return self.op("same" if isinstance(node.ops[0], ast.Eq) else "differ", left, right)
        return node

    def visit_Subscript(self, node):
        self.generic_visit(node)
        sliced = isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Slice)
        return self.op("made", node) if sliced else node

    def visit_JoinedStr(self, node):
        return self.op("made", node)  # its parts are left alone: format specifications are trees of their own

    def _display(self, node):
        self.generic_visit(node)
        spread = isinstance(getattr(node, "ctx", ast.Load()), ast.Load) and any(isinstance(e, ast.Starred) for e in node.elts)
        return self.op("made", node) if spread else node

    visit_List = visit_Tuple = visit_Set = _display

    def visit_Delete(self, node):
        plain = ast.Name | ast.Constant | ast.UnaryOp
        before = [
            ast.Expr(self.op("removed", ast.Name(t.value.id, ast.Load()), t.slice))
            for t in node.targets
            if isinstance(t, ast.Subscript) and isinstance(t.value, ast.Name) and isinstance(t.slice, plain)
        ]
        return [*before, node]

    def visit_Call(self, node):
        named = node.func.id if isinstance(node.func, ast.Name) else None
        self.generic_visit(node)
        if named in UNTOUCHED or named in self.own:
            return node
        node.args.insert(0, node.func)
        node.func = ast.Name(self.prefix + "call", ast.Load())
        return node

    def visit_ClassDef(self, node):
        node.body = _flat([self.visit(s) for s in node.body])
        return node


def _flat(statements) -> list:
    return [s for item in statements for s in (item if isinstance(item, list) else [item])]
