"""The judge against programs whose verdict is known: HumanEval and MBPP solutions, whole and with one operator changed.

Prints every whole solution that is not accepted and every changed one that is (a survivor: the tests cannot tell it from the
solution, or the change does not matter). --data names a folder with HumanEval.jsonl.gz and sanitized-mbpp.json.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import copy
import gzip
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megatron_nb.sandbox.execution import Limits
from megatron_nb.sandbox.judge import Judge, Verdict
from megatron_nb.sandbox.pool import Pool
from megatron_nb.sandbox.tests import Program, Test

LIMITS = Limits(time_s=3.0)
CHANGED = Limits(time_s=1.0)  # many changed ones never end
CHANGES = """Add Sub, Sub Add, Mult Add, Div Mult, FloorDiv Mult, Mod Mult, Pow Mult, BitAnd BitOr, BitOr BitAnd, BitXor BitOr,
And Or, Or And, Lt LtE, LtE Lt, Gt GtE, GtE Gt, Eq NotEq, NotEq Eq, In NotIn, NotIn In, Is IsNot, IsNot Is, USub UAdd"""
INSTEAD = {getattr(ast, old): getattr(ast, new) for old, new in (pair.split() for pair in CHANGES.split(","))}


def humaneval(folder: Path) -> Iterator[tuple[str, str, str, Test]]:
    """(name, head, solution, test): the prompt stands before the test, so its helper functions are the test's own."""
    with gzip.open(folder / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            test = Test(code=row["prompt"] + "    pass\n" + row["test"], entry=row["entry_point"])
            yield row["task_id"], row["prompt"], row["canonical_solution"], test


def mbpp(folder: Path) -> Iterator[tuple[str, str, str, Test]]:
    for row in json.loads((folder / "sanitized-mbpp.json").read_text(encoding="utf-8")):
        called = {node.func.id for node in ast.walk(ast.parse(row["test_list"][0])) if isinstance(node, ast.Call)
                  and isinstance(node.func, ast.Name)}  # fmt: skip
        entry = next(node.name for node in parsed(row["code"]).body if getattr(node, "name", None) in called)
        code = "\n".join(row["test_imports"] + row["test_list"])
        yield f"MBPP/{row['task_id']}", "", row["code"], Test(code=code, entry=entry)


def parsed(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of the data
        return ast.parse(source)


def changed(head: str, solution: str) -> Iterator[tuple[str, str]]:
    """(what was changed where, the program) for every operator of the solution, one at a time."""
    tree, first = parsed(head + solution), head.count("\n") + 1
    for number, node in enumerate(ast.walk(tree)):
        if getattr(node, "lineno", 0) < first:
            continue
        for name, at, operator in operators(node):
            other = copy.deepcopy(tree)
            place = next(one for i, one in enumerate(ast.walk(other)) if i == number)
            new = INSTEAD[type(operator)]
            if at is None:
                setattr(place, name, new())
            else:
                getattr(place, name)[at] = new()
            line = ast.unparse(node).partition("\n")[0]
            yield f"line {node.lineno - first + 1}, {type(operator).__name__} -> {new.__name__}: {line}", ast.unparse(other)


def operators(node: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    """(field, index in it, operator) of a node."""
    if isinstance(node, ast.Compare):
        yield from (("ops", i, one) for i, one in enumerate(node.ops) if type(one) in INSTEAD)
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign, ast.UnaryOp)) and type(node.op) in INSTEAD:
        yield "op", None, node.op


async def judge_all(judge: Judge, work: list[tuple[str, Program, Test, Limits]]) -> list[tuple[str, Verdict]]:
    """(name, verdict) of each, in order."""
    gate = asyncio.Semaphore(4 * judge.pool.workers)

    async def one(name: str, program: Program, test: Test, limits: Limits) -> tuple[str, Verdict]:
        async with gate:
            return name, (await judge.judge(program, [test], limits))[0]

    return await asyncio.gather(*(one(*job) for job in work))


def whole(rows: list[tuple[str, str, str, Test]]) -> list[tuple[str, Program, Test, Limits]]:
    return [(name, Program(head + solution), test, LIMITS) for name, head, solution, test in rows]


def mutants(rows: list[tuple[str, str, str, Test]]) -> list[tuple[str, Program, Test, Limits]]:
    return [
        (f"{name}, {what}", Program(source), test, CHANGED)
        for name, head, solution, test in rows
        for what, source in changed(head, solution)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--only", type=int, help="the first so many problems of each set")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    asked = parser.parse_args()
    sets = {"HumanEval": list(humaneval(asked.data))[: asked.only], "MBPP": list(mbpp(asked.data))[: asked.only]}
    numbers: dict[str, float] = {}
    with Pool(asked.workers) as pool:
        judge = Judge(pool)
        for name, rows in sets.items():
            start = time.monotonic()
            found = asyncio.run(judge_all(judge, whole(rows)))
            good = sum(verdict.verdict == "accepted" for _, verdict in found)
            print(f"{name}: {good} of {len(found)} solutions accepted, {time.monotonic() - start:.1f} s")
            for title, verdict in found:
                if verdict.verdict != "accepted":
                    print(f"  {title}: {verdict.verdict}: {verdict.detail}")
            numbers |= {f"{name.lower()}_accepted": good, f"{name.lower()}_total": len(found)}
        start = time.monotonic()
        found = asyncio.run(judge_all(judge, mutants(sets["HumanEval"])))
        judge.close()
    counts = Counter(verdict.verdict for _, verdict in found)
    print(f"HumanEval with one operator changed: {len(found)} programs, {time.monotonic() - start:.1f} s: {dict(counts)}")
    for title, verdict in found:
        if verdict.verdict in ("accepted", "infrastructure"):
            print(f"  {verdict.verdict}: {title} {verdict.detail}")
    numbers |= {"changed_total": len(found), "changed_rejected": len(found) - counts["accepted"] - counts["infrastructure"]}
    numbers["infrastructure"] = counts["infrastructure"]
    print(json.dumps(numbers))
    if asked.json:
        asked.json.write_text(json.dumps(numbers) + "\n", encoding="utf-8")
    return int(numbers["humaneval_accepted"] < numbers["humaneval_total"] or counts["infrastructure"] > 0)


if __name__ == "__main__":
    sys.exit(main())
