"""Where the inputs of growing size come from: a problem's own tests, scaled, or a generator that a served model wrote.

A generator is Python source with make(n): the list of arguments, or the text of stdin for programs of stdin and stdout. It
is run in the sandbox only. `from_tests` scales the largest test and says None where it cannot keep the structure; `PROMPT`
and `parse` are the two ends of asking a model; `validated` lets the reference solution run on what a generator makes.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megatron_nb.sandbox.complexity import run_once
from megatron_nb.sandbox.execution import Job, Limits
from megatron_nb.sandbox.pool import Pool

SIZES = (8, 16, 64, 256)  # that a generator is tried at
TRIES = 3  # answers asked of a model
PROMPT = """Write a Python function `make(n)` that makes an input for this problem, to measure the running time of solutions.

{problem}

Rules:
- {form}
- The input is valid, random, and of size n: n is the length of the main list or string, or the value of the main number where
  the input is only numbers. Other sizes grow with n as the constraints allow.
- It is a hard case: no solution may stop early, answers such as "not found" are preferred.
- Only the standard library; making an input of size 100000 takes well under a second.
Answer with one Python code block that defines make(n), and nothing else.
"""
FORMS = {
    True: "make(n) returns the list of arguments for `{function}`.",
    False: "make(n) returns the text that is given to the program as standard input.",
}
SCALED = '''
import random

SHAPES = {shapes}

def numbers(shape, n):
    if shape["distinct"]:
        low, high = shape["low"], max(shape["high"], shape["low"] + 2 * n)
        made = random.sample(range(low, high + 1), n)
    elif shape["index"]:
        made = [random.randrange(n) for _ in range(n)]
    else:
        made = [random.randint(shape["low"], shape["high"]) for _ in range(n)]
    return sorted(made) if shape["sorted"] else made

def grow(shape, n):
    kind = shape["kind"]
    if kind == "numbers":
        return numbers(shape, n)
    if kind == "text":
        return "".join(random.choices(shape["letters"], k=n))
    if kind == "items":
        return [grow_item(random.choice(shape["items"])) for _ in range(n)]
    if kind == "grid":
        return [[random.choice(shape["values"]) for _ in range(n)] for _ in range(n)]
    if kind == "size":
        return n
    return shape["value"]

def grow_item(item):
    if isinstance(item, list) and all(type(x) is int for x in item):
        moved = random.randrange(max(1, max(map(abs, item), default=1)))
        return [x + moved for x in item]
    return item

def make(n):
    return [grow(shape, n) for shape in SHAPES]
'''
LINES = '''
def make(n, arguments=make):
    made = arguments(n)
    return "\\n".join(write(x) for x in made) + "\\n"

def write(x):
    if isinstance(x, list):
        return "\\n".join(map(write, x)) if x and isinstance(x[0], list) else " ".join(map(str, x))
    return str(x)
'''
CHECK = """
import json, sys
task = json.load(sys.stdin)
space = {"__name__": "generator"}
exec(compile(task["generator"], "<generator>", "exec"), space)
sizes = []
for n in task["sizes"]:
    made = space["make"](n)
    if not isinstance(made, str if task["stdin"] else (list, tuple)):
        raise TypeError(f"make({n}) gives {type(made).__name__}")
    sizes.append(len(made) if task["stdin"] else len(json.dumps(made)) + sum(abs(x) for x in made if type(x) is int))
    if n == task["sizes"][0]:
        first = made
print(json.dumps([sizes, first]))
"""


def from_tests(tests: Sequence[dict[str, Any]]) -> str | None:
    """A generator that scales these tests ({"args": [...]} of calls, or {"stdin": text}); None when they show no scale.

    Lists of numbers keep whether they are sorted, distinct or indices; a number that equals the length of a list in every
    test follows it; square grids grow both ways; other lists are drawn from the examples' items; other numbers stay.
    """
    if all("args" in test and test["args"] is not None for test in tests) and tests:
        shapes = _shapes([test["args"] for test in tests])
        return SCALED.replace("{shapes}", repr(shapes)).lstrip() if shapes else None
    if all(isinstance(test.get("stdin"), str) for test in tests) and tests:
        read = [_read_lines(test["stdin"]) for test in tests]
        if None in read:
            return None
        shapes = _shapes(read)
        return SCALED.replace("{shapes}", repr(shapes)).lstrip() + LINES if shapes else None
    return None


def _read_lines(text: str) -> list[Any] | None:
    """A stdin of numbers as arguments: lines of one number, one line of many, and a last block of rows; None for others."""
    rows = [line.split() for line in text.strip().splitlines()]
    if not rows or not all(rows) or not all(re.fullmatch(r"-?\d+", word) for row in rows for word in row):
        one = len(rows) == 1 and len(rows[0]) == 1
        return [text.strip()] if one and len(text.strip()) > 1 else None
    numbers = [[int(word) for word in row] for row in rows]
    head = numbers[0]
    if len(head) == 1 and len(numbers) == head[0] + 1 and len({len(row) for row in numbers[1:]}) == 1 and len(numbers) > 2:
        body = numbers[1:]
        return [head[0], body if len(body[0]) > 1 else [[row[0]] for row in body]]
    if len(numbers) <= 3 and all(len(row) == 1 or at == len(numbers) - 1 for at, row in enumerate(numbers)):
        last = numbers[-1]
        return [row[0] for row in numbers[:-1]] + [last if len(numbers) > 1 else last[0] if len(last) == 1 else last]
    return None


def _shapes(calls: list[list[Any]]) -> list[dict[str, Any]] | None:
    """What each argument is made like, from its values in all calls; None when none of them can grow."""
    if len({len(call) for call in calls}) != 1 or not calls[0]:
        return None
    columns = list(zip(*calls))
    shapes = [_shape(column) for column in columns]
    if None in shapes:
        return None
    long = [at for at, shape in enumerate(shapes) if shape["kind"] in ("numbers", "text", "items", "grid")]
    for column, shape in zip(columns, shapes):
        if shape["kind"] == "number":
            follows = any(all(value == len(call[at]) for value, call in zip(column, calls)) for at in long)
            shape["kind"] = "size" if follows or (not long and len(set(column)) > 1 and max(column) > 1) else "value"
    return shapes if any(shape["kind"] not in ("value", "number") for shape in shapes) else None


def _shape(values: Sequence[Any]) -> dict[str, Any] | None:
    largest = max(values, key=lambda v: len(v) if isinstance(v, (list, str)) else 0)
    if all(type(v) is int for v in values):
        return {"kind": "number", "value": values[-1]}
    if all(isinstance(v, str) for v in values):
        letters = sorted({c for v in values for c in v})
        return {"kind": "text", "letters": letters} if letters else None
    if not all(isinstance(v, list) for v in values):
        return {"kind": "value", "value": largest} if all(isinstance(v, (bool, float)) for v in values) else None
    items = [item for v in values for item in v]
    full = [v for v in values if len(v) > 1]
    if not items or not full:
        return None
    if all(type(item) is int for item in items):
        return {
            "kind": "numbers", "low": min(items), "high": max(items), "sorted": all(v == sorted(v) for v in full),
            "distinct": all(len(set(v)) == len(v) for v in full),
            "index": all(0 <= item < len(v) for v in values for item in v) and max(map(len, full)) > 3,
        }  # fmt: skip
    square = all(all(isinstance(row, list) and len(row) == len(v) for row in v) for v in full)
    cells = [cell for row in items if isinstance(row, list) for cell in row]
    if square and any(len(v) > 2 for v in full) and not any(isinstance(cell, list) for cell in cells):
        return {"kind": "grid", "values": cells[:1000]}
    flat = all(isinstance(item, (str, float, bool)) for item in items) or all(
        isinstance(item, list) and not any(isinstance(x, list) for x in item) for item in items
    )
    return {"kind": "items", "items": items[:200]} if flat else None


def parse(answer: str) -> str | None:
    """The generator in a model's answer: its last code block that defines make(n) of one required argument; None without."""
    blocks = re.findall(r"```(?:[Pp]ython3?|py)?[ \t]*\n(.*?)```", answer, re.DOTALL) or [answer]
    for block in reversed(blocks):
        try:
            tree = ast.parse(block)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in tree.body:
            given = node.args if isinstance(node, ast.FunctionDef) and node.name == "make" else None
            if given and len(given.args) - len(given.defaults) == 1 and not given.posonlyargs:
                return block.strip() + "\n"
    return None


async def validated(pool: Pool, generator: str, reference: str, function: str, limits: Limits | None = None) -> str:
    """Why a generator is no good: "" when make(n) grows with n and the reference solution runs on it at every size tried."""
    limits = limits or Limits()
    task = {"generator": generator, "sizes": SIZES, "stdin": not function}
    made = await pool.run(Job(CHECK, stdin=json.dumps(task).encode(), limits=limits))
    if made.status != "ok":
        return f"make(n) fails: {made.status} {_last_line(made.stderr)}"
    try:
        sizes, _ = json.loads(made.stdout)
    except ValueError:
        return "make(n) prints to stdout"
    if any(after <= before for before, after in zip(sizes, sizes[1:])):
        return f"the input does not grow with n: sizes {sizes} at n={list(SIZES)}"
    for n in SIZES:
        run = await run_once(pool, reference, function, generator, n, limits)
        if run.status == "time limit" and n > SIZES[0]:
            return ""  # a slow reference: 2^n does not reach 64
        if run.status != "ok":
            return f"the reference solution fails at n={n}: {run.status} {_last_line(run.stderr)}"
    return ""


def _last_line(stderr: bytes) -> str:
    return "".join(stderr.decode(errors="replace").strip().splitlines()[-1:])[:200]


async def written(
    ask: Callable[[str], Awaitable[str]], pool: Pool, problem: str, function: str, reference: str
) -> tuple[str | None, str]:
    """(generator or None, why not) written by a model: `ask` sends it a prompt. What fails is told to it in the next try."""
    prompt = PROMPT.format(problem=problem.strip(), form=FORMS[bool(function)].format(function=function))
    reason = ""
    for _ in range(TRIES):
        answer = await ask(prompt + (f"\nAn earlier answer was refused: {reason}\n" if reason else ""))
        generator = parse(answer)
        reason = await validated(pool, generator, reference, function) if generator else "no code block defines make(n)"
        if generator and not reason:
            return generator, ""
    return None, reason
