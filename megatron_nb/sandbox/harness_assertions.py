"""Runs inside the sandbox of a test's code: statements that assert; the program's names are references."""

from __future__ import annotations

import ast
import builtins
import os
import sys

from megatron_nb.sandbox.harness_peer import Ended, Peer, Remote, Unsendable
from megatron_nb.sandbox.harness_program import channel, end_after, write_all
from megatron_nb.sandbox.harness_wire import decode, encode


class Names(dict):
    """The test's globals; what neither it nor Python defines is the program's."""

    def __init__(self, peer: Peer, modules: set[str]) -> None:
        super().__init__(__name__="test", __builtins__=builtins)
        self.peer, self.modules = peer, modules

    def __missing__(self, name: str) -> object:
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in self.modules:
            value = __import__(name)
        else:
            try:
                value = self.peer.ask("find", name)
            except AttributeError as error:
                self.peer.raised = NameError(str(error))
                raise self.peer.raised from None
        self[name] = value
        return value


class Rewrite(ast.NodeTransformer):
    """`assert a == b` shows both sides; the arguments of a call whose result nobody reads take over changes made to them.

    That is for the call alone: inside of a `check(candidate)` a program must not empty the list that it is compared with.
    """

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        test = node.test
        if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)) or node.msg:
            return node
        sides = ast.Tuple([test.left, test.comparators[0]], ast.Load())
        keep = ast.Assign([ast.Name("__sides__", ast.Store())], sides)
        equal = ast.parse("__sides__[0] == __sides__[1]", mode="eval").body
        checked = ast.Assert(equal, ast.parse("__shown__(*__sides__)", mode="eval").body)
        return [ast.fix_missing_locations(ast.copy_location(one, node)) for one in (keep, checked)]

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        self.generic_visit(node)
        if not isinstance(node.value, ast.Call):
            return node
        node.value.func = ast.Call(ast.Name("__changing__", ast.Load()), [node.value.func], [])
        return ast.fix_missing_locations(node)


def shown(found: object, expected: object) -> str:
    texts = [repr(value) for value in (expected, found)]
    return "expected {}, found {}".format(*(text if len(text) <= 160 else text[:160] + "..." for text in texts))


def modules_in(tree: ast.Module) -> set[str]:
    """Names used as `name.attribute` that are modules of the standard library: a program's own `math` is not asked for."""
    dotted = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {name.id for name in dotted if isinstance(name, ast.Name)} & sys.stdlib_module_names


def run_assertions() -> None:
    """Reads {"code", "entry", "cpu_s"}; relays calls; last writes "!" and {"verdict", "detail", "uses"} on a line."""
    get, put = channel()
    peer = Peer(get, put)
    task = decode(peer.lines.readline())
    end_after(task["cpu_s"])
    told = judge(peer, task)
    write_all(put, "!" + encode({**told, "uses": peer.uses}))
    os._exit(0)


def judge(peer: Peer, task: dict) -> dict:
    """passed | failed (an assertion) | raised (by the program) | error (in the test) | broken (the test)."""
    try:
        tree = ast.parse(task["code"])
        names, code = Names(peer, modules_in(tree)), compile(Rewrite().visit(tree), "test.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return {"verdict": "broken", "detail": f"{type(error).__name__}: {error}"}
    names.update(__changing__=peer.changing, __shown__=shown)  # such names are the same within classes
    try:
        entry = peer.ask("find", task["entry"]) if task["entry"] else None
        if entry is not None:
            names[task["entry"]] = entry
        exec(code, names)
        if entry is not None:
            names[task["entry"]] = entry
            if "check" in names and type(names["check"]) is not Remote:
                names["check"](entry)
    except Ended:
        return {"verdict": "ended", "detail": ""}
    except Unsendable as error:
        return {"verdict": "broken", "detail": str(error)}
    except BaseException as error:  # also what the program's answers make the test raise
        kind = "raised" if error is peer.raised else "failed" if isinstance(error, AssertionError) else "error"
        detail = f"{type(error).__name__}: {error}" if kind != "failed" else str(error)
        return {"verdict": kind, "detail": f"line {line_of(error)}: {detail}"[:400]}
    return {"verdict": "passed", "detail": ""}


def line_of(error: BaseException) -> int:
    """Of the test's code, the innermost."""
    line, trace = 0, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == "test.py":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
