"""What a program costs: jumps, branches and calls of its own code, and operations on the numbers that it is given.

The numbers count comparisons, sums, products and hashes, so sorting, heaps, sets, sum and max are seen too.
"""

from __future__ import annotations

import math
import sys

from megatron_nb.sandbox.ladder import LADDER

FILE = "<counted program>"
TOOL = sys.monitoring.PROFILER_ID
EVENTS = [getattr(sys.monitoring.events, name) for name in ("JUMP", "BRANCH", "PY_START")]
COUNT = [0]


def _counting(name):
    plain = getattr(int, name)

    def operation(self, *others):
        COUNT[0] += 1
        result = plain(self, *others)
        return Counted(result) if name == "__neg__" else result

    return operation


NAMES = ("lt", "le", "gt", "ge", "eq", "hash", "add", "radd", "mul", "rmul", "mod", "neg")
Counted = type("Counted", (int,), {f"__{name}__": _counting(f"__{name}__") for name in NAMES})


def cost_of(source: str, function: str, generator: str, n: int) -> int:
    """Operations of function(*make(n))."""
    made: dict = {}
    exec(generator, made)
    arguments = [[Counted(x) for x in given] if isinstance(given, list) else given for given in made["make"](n)]
    program: dict = {"__name__": "program"}
    exec(compile(source, FILE, "exec"), program)

    def happened(code, *_):
        if code.co_filename != FILE:
            return sys.monitoring.DISABLE
        COUNT[0] += 1
        return None

    sys.monitoring.use_tool_id(TOOL, "count")
    for event in EVENTS:
        sys.monitoring.register_callback(TOOL, event, happened)
    limit, COUNT[0] = sys.getrecursionlimit(), 0
    try:
        sys.setrecursionlimit(20_000)
        sys.monitoring.set_events(TOOL, sum(EVENTS))
        program[function](*arguments)
    finally:
        sys.monitoring.set_events(TOOL, 0)
        sys.monitoring.free_tool_id(TOOL)
        sys.setrecursionlimit(limit)
    return COUNT[0]


GROWTH = {  # class -> the ways in which such a program may grow
    "1": [lambda n: 1.0], "log n": [math.log], "sqrt n": [math.sqrt], "n": [float], "n log n": [lambda n: n * math.log(n)],
    "n sqrt n": [lambda n: n**1.5], "n^2": [lambda n: n**2], "n^2 log n": [lambda n: n**2 * math.log(n)],
    "n^3": [lambda n: n**3], "n^k": [lambda n: n**4, lambda n: n**5],
    "2^n": [lambda n: 2.0**n, lambda n: n * 2.0**n], "n!": [math.factorial, lambda n: n * math.factorial(n)],
}  # fmt: skip
SIZES = {  # class -> three sizes at which it shows, and that do not take long
    "1": (100, 1000, 4000), "log n": (2**6, 2**10, 2**14), "sqrt n": (100, 2500, 40_000), "n": (64, 256, 1024),
    "n log n": (64, 512, 4096), "n sqrt n": (36, 256, 1024), "n^2": (32, 96, 256), "n^2 log n": (16, 64, 256),
    "n^3": (9, 25, 64), "n^k": (5, 9, 16), "2^n": (8, 11, 14), "n!": (5, 6, 7),
}  # fmt: skip


def class_by_count(sizes, costs) -> str:
    """The class whose growth explains the costs at three sizes best, a constant aside."""
    low, middle, high = costs
    if high - low < 0.02 * low:
        return "1"
    ratio = math.log((high - middle) / (middle - low)) if middle > low and high > middle else 0.0

    def distance(growth):
        try:
            a, b, c = (float(growth(n)) for n in sizes)
        except OverflowError:  # far from it
            return math.inf
        return abs(ratio - math.log((c - b) / (b - a)))

    return min((name for name in LADDER if name != "1"), key=lambda name: min(map(distance, GROWTH[name])))
