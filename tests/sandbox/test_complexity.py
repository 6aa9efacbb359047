"""The class found is the class of the program, and programs that try to look better than they are do not."""

from __future__ import annotations

import asyncio
import math

import pytest

from megatron_nb.sandbox.complexity import assess, estimate
from megatron_nb.sandbox.ladder import UNKNOWN, rank
from megatron_nb.sandbox.measure_costs import Counter
from megatron_nb.sandbox.measure_fit import FUNCTIONS, fit
from megatron_nb.sandbox.measure_rewrite import rewrite

INTS = "import random\ndef make(n):\n    return [[random.randrange(10**6) for _ in range(n)]]\n"
NUMBER = "def make(n):\n    return [n]\n"
QUADRATIC = """
def slow(a):
    c = 0
    for i in range(len(a)):
        for j in range(i):
            c += a[j] < a[i]
    return c
"""
DOUBLING = [11 * 2**k for k in range(12)]


def measured(pool, source, generator=INTS, function="f", **options):
    return asyncio.run(estimate(pool, source, function, generator, **{"budget_s": 1.0, "seed": 5, **options}))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("constant", [0, 50])
def test_counts_that_follow_a_class_are_given_that_class(name, constant):
    sizes = DOUBLING if name not in ("n^3", "n^k") else range(8, 60, 4)
    found = fit([(n, round(constant + 3 * FUNCTIONS[name](n) + (2 * n if rank(name) > rank("n") else 0))) for n in sizes])
    assert found.complexity == name, found


@pytest.mark.parametrize(
    ("name", "cost"), [("2^n", lambda n: 2**n), ("2^n", lambda n: n * 2**n), ("2^n", lambda n: 1.6**n), ("n!", math.factorial)]
)
def test_exponential_and_factorial_counts_are_told_from_powers(name, cost):
    assert fit([(n, 5 + cost(n)) for n in range(3, 9 if name == "n!" else 20)]).complexity == name


def test_a_large_constant_does_not_hide_the_growth():
    assert fit([(n, 2_000_000 + n * n) for n in DOUBLING[:8]]).complexity == "n^2"
    assert fit([(n, 2_000_000 + n) for n in DOUBLING]).complexity == "n"


def test_costs_of_no_class_too_few_sizes_and_a_narrow_range_are_unknown():
    jump = fit([(n, n if n < 300 else n * n) for n in DOUBLING])
    assert jump.complexity is None and "no class fits" in jump.reason
    assert "only 4 sizes" in fit([(n, n) for n in DOUBLING[:4]]).reason
    assert "too near" in fit([(n, n) for n in range(100, 120)]).reason


@pytest.mark.parametrize(
    ("line", "least", "most"),
    [
        ("sorted(a)", 1000 * 9, 1000 * 11), ("a.insert(0, 1)", 1000, 1010), ("a.append(1)", 0, 5), ("a[:500]", 500, 505),
        ("5 in a", 1000, 1005), ("5 in set(a)", 1000, 2100), ("a.pop(0)", 990, 1010), ("a.pop()", 0, 5), ("sum(a)", 1000, 1010),
        ("sum(x for x in a)", 1000, 2100), ("[x for x in a]", 1000, 1010), ("a + a", 2000, 2010), ("len(a)", 0, 5),
        ("''.join(map(str, a))", 1000, 7000), ("(1 << 64000) | 1", 1000, 2100), ("a.index(a[-1])", 1000, 1010),
        ("heapq.heappush(a, 5)", 9, 15), ("bisect.bisect_left(a, 5)", 9, 15), ("list(zip(a, a))", 1000, 2100),
        ("exec('for x in range(1000): pass')", 1000, 1100), ("set([1] * 1000)", 2000, 2100), ("a == list(a)", 2000, 3100),
    ],
)  # fmt: skip
def test_hidden_work_of_an_expression_is_charged(line, least, most):
    counter = Counter()
    space = {f"_x_{name}": f for name, f in counter.operations().items()}
    exec(rewrite(f"import heapq, bisect\ndef f(a):\n    return {line}\n", "_x_"), space)
    counter.units[0] = 0
    if "exec" in line:
        import sys

        counter.foreign()
        try:
            space["f"](list(range(1000)))
        finally:
            sys.monitoring.set_events(sys.monitoring.PROFILER_ID, 0)
            sys.monitoring.free_tool_id(sys.monitoring.PROFILER_ID)
    else:
        space["f"](list(range(1000)))
    assert least <= counter.units[0] <= most, counter.units


def test_a_rewritten_program_answers_as_the_program():
    source = '''
"""Doc."""
from __future__ import annotations
import functools
class Box:
    """A box."""
    def __init__(self, v): self.v = v
    def __lt__(self, o): return self.v < o.v
class Sub(Box):
    def __init__(self, v):
        super().__init__(v)
        self.__hidden = v * 2
    def get(self): return self.__hidden
@functools.lru_cache(maxsize=None)
def fib(n: int | None) -> int:
    return n if n < 2 else fib(n - 1) + fib(n - 2)
def gen(n):
    for i in range(n):
        got = yield i
        if got: yield got
def f(a):
    it = iter(a)
    pairs = list(zip(it, it))
    g = gen(3)
    first, sent = next(g), g.send(7)
    b = a[:]
    b[1:1] = [9, 9]
    del b[0], b[-1:]
    b += (1,)
    s = "x"
    s = s + "y" * 3 + f"{len(b):>4}"
    t = (1, *a[:2])
    t += (5,)
    d = {k: v for k, v in zip("abc", a)}
    d["a"] += 5
    walrus = [y for x in a if (y := x * 2) > 4]
    try:
        raise ValueError("v")
    except ValueError as e:
        s += str(e)
    boxes = sorted([Sub(3), Sub(1)])
    low, *rest = a
    return (pairs, first, sent, b, s, t, d, walrus, fib(20), boxes[0].v, boxes[0].get(), sorted(a, key=lambda x: -x),
            not 3 in a, 1 < 2 < 3, {1, 2} | {3}, {1, 2} - {1}, 2 ** 10, 7 & 3, any(x > 3 for x in a), low, rest, -5 % 3)
'''  # fmt: skip
    plain: dict = {}
    exec(source, plain)
    counter = Counter()
    space = {f"_x_{name}": f for name, f in counter.operations().items()}
    exec(rewrite(source, "_x_"), space)
    assert repr(space["f"]([1, 2, 3, 4, 5, 6])) == repr(plain["f"]([1, 2, 3, 4, 5, 6]))
    assert counter.units[0] > 0


def test_a_measurement_that_did_not_end_is_unknown_whatever_it_said():
    rest = {"digits": 0, "noise": 0, "load_units": 0, "cpu": 0.1}
    lines = [{"load": 0.001}, *({"count": n, "units": n, **rest} for n in DOUBLING)]
    assert assess(lines).complexity == UNKNOWN
    assert assess([*lines, {"spent": 1.0}]).complexity == "n"


@pytest.mark.parametrize(
    ("truth", "source", "generator"),
    [
        ("log n", "def f(n):\n    c = 0\n    while n:\n        n //= 2\n        c += 1\n    return c\n", NUMBER),
        ("n", "def f(a):\n    return sum(a) + len(set(a))\n", INTS),
        ("n log n", "class Solution:\n    def f(self, a: List[int]):\n        return sorted(a)[len(a) // 2]\n", INTS),
        ("n^2", QUADRATIC + "f = slow\n", INTS),
        ("2^n", "def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)\n", NUMBER),
    ],
)
def test_programs_are_given_their_class(shared_pool, truth, source, generator):
    found = measured(shared_pool, source, generator)
    assert found.complexity == truth, found


def test_a_program_that_does_not_parse_is_told_why(shared_pool):
    assert "SyntaxError: '(' was never closed" in measured(shared_pool, "def f(a):\n    return sum(a").reason


def test_a_program_of_stdin_and_stdout_is_measured(shared_pool):
    source = "n = int(input())\na = list(map(int, input().split()))\nprint(sorted(a)[0])\nif n < 0:\n    exit(1)\n"
    generator = "def make(n):\n    return f'{n}\\n' + ' '.join(str(i * 7919 % 100003) for i in range(n)) + '\\n'\n"
    assert measured(shared_pool, source, generator, function="").complexity == "n log n"


HACKS = {  # name: (source, classes that are no better than what it does)
    "switches above small n": (QUADRATIC + "def f(a):\n    return sum(a) if len(a) < 200 else slow(a)\n", {"n^2"}),
    "starts slowly": (QUADRATIC + "def f(a):\n    for _ in range(300000): pass\n    return slow(a)\n", {"n^2"}),
    "table made on import": ("T = [i * i for i in range(300000)]\ndef f(a):\n    return T[len(a)]\n", set()),
    "sets its own count": (
        QUADRATIC + "def f(a):\n    r = slow(a)\n    for v in globals().values():\n"
        "        if type(v) is list and len(v) == 1: v[0] = len(a)\n    return r\n",
        {"n^2"},
    ),
    "is fast while it is counted": (
        QUADRATIC + "def f(a):\n    return sum(a) if any(k.endswith('units') for k in globals()) else slow(a)\n",
        {"n^2"},
    ),
    "leaves when it is measured": ("import os\ndef f(a):\n    os._exit(0)\n", set()),
    "fails on large inputs": ("def f(a):\n    if len(a) > 100: raise ValueError('large')\n    return sum(a)\n", set()),
    "ends the measuring process": ("import os\ndef f(a):\n    os.kill(os.getppid(), 9)\n", set()),
    "works in a process nobody waits for": (
        QUADRATIC + "import os\ndef f(a):\n    if os.fork() == 0:\n        slow(a)\n        os._exit(0)\n    return 0\n",
        {"n^2"},
    ),
    "keeps its answers in a file": (
        QUADRATIC + "import os\ndef f(a):\n    name = f'/tmp/{len(a)}'\n"
        "    if os.path.exists(name): return int(open(name).read())\n"
        "    r = slow(a)\n    with open(name, 'w') as file: file.write(str(r))\n    return r\n",
        {"n^2"},
    ),
    "hides work in a regular expression": (
        "import re\ndef f(a):\n    return re.match('a*a*b', 'a' * len(a))\n", {"n^2"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HACKS)
def test_a_program_cannot_look_better_than_it_is(shared_pool, name):
    source, allowed = HACKS[name]
    found = measured(shared_pool, source, budget_s=2.5 if "regular" in name else 1.0)
    assert found.complexity in {UNKNOWN, *allowed}, (found.complexity, found.reason)
    assert found.reason


def test_sleeping_programs_end_and_are_not_timed_by_the_clock(shared_pool):
    found = measured(shared_pool, "import time\ndef f(a):\n    time.sleep(0.01)\n    return sum(a)\n")
    assert found.complexity in ("n", UNKNOWN)


def test_wrong_answers_on_large_inputs_are_found_by_a_reference(shared_pool):
    cheat = QUADRATIC + "def f(a):\n    return sum(x & 1 for x in a) if len(a) > 50 else slow(a)\n"
    found = measured(shared_pool, cheat, reference=QUADRATIC + "def f(a):\n    return slow(a)\n")
    assert found.complexity == UNKNOWN and "reference" in found.reason
