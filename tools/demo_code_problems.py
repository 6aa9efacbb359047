"""The problems of the code demo: each with descriptions, solutions of its optimal class, slower ones, wrong ones, and inputs.

The argument is written x in programs and {arg} in descriptions. A generator makes the worst input of a size: one that lets
no program stop early.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-4, 6) for _ in range(rng.randint(2, 8))]


def small(rng: random.Random) -> int:
    return rng.randint(1, 40)


@dataclass(frozen=True)
class Problem:
    """One problem; every program defines solve."""

    name: str
    best: str  # optimal class, of the ladder
    phrasings: tuple[str, ...]
    optimal: tuple[str, ...]
    slow: tuple[str, ...]
    wrong: tuple[str, ...]
    generator: str  # source of make(n)
    draw: Callable[[random.Random], Any] = numbers  # an argument for a test
    args: tuple[str, ...] = ("nums", "values", "data")


DISTINCT = "def make(n):\n    return [list(range(n))]"
RISING = "def make(n):\n    return [list(range(11, n + 11))]"
MIXED = "def make(n):\n    return [[(i * 7919 + 13) % 10007 - 5000 for i in range(n)]]"
EQUAL = "def make(n):\n    return [[7] * n]"
NUMBER = "def make(n):\n    return [n]"

PROBLEMS = (
    Problem(
        "total", "n",
        ("the sum of {arg}", "all numbers of {arg} added up", "the total of the list {arg}", "what {arg} adds up to",
         "the sum of all values in {arg}"),
        ("def solve(x):\n    return sum(x)",
         "def solve(x):\n    t = 0\n    for a in x:\n        t += a\n    return t"),
        ("def solve(x):\n    t = 0\n    for i in range(len(x)):\n        t = 0\n        for a in x:\n            t += a\n    return t",),
        ("def solve(x):\n    return len(x)", "def solve(x):\n    return sum(x[1:])"),
        DISTINCT,
    ),
    Problem(
        "duplicates", "n",
        ("whether {arg} has duplicates", "True if a number occurs twice in {arg}", "if any value of {arg} repeats",
         "whether two entries of {arg} are equal", "True when {arg} contains a repeated number"),
        ("def solve(x):\n    return len(set(x)) < len(x)",
         "def solve(x):\n    s = set()\n    for a in x:\n        if a in s:\n            return True\n        s.add(a)\n    return False"),
        ("def solve(x):\n    for i in range(len(x)):\n        for j in range(i):\n            if x[i] == x[j]:\n"
         "                return True\n    return False",),
        ("def solve(x):\n    return len(set(x)) == len(x)",
         "def solve(x):\n    for i in range(1, len(x)):\n        if x[i] == x[i - 1]:\n            return True\n    return False"),
        DISTINCT,
    ),
    Problem(
        "equal_pairs", "n",
        ("how many pairs of {arg} are equal", "the number of equal pairs in {arg}", "the count of pairs in {arg} with one value",
         "how many pairs in {arg} have the same value", "the number of pairs of equal entries of {arg}"),
        ("def solve(x):\n    c, d = 0, {}\n    for a in x:\n        c += d.get(a, 0)\n        d[a] = d.get(a, 0) + 1\n    return c",),
        ("def solve(x):\n    c = 0\n    for i in range(len(x)):\n        for j in range(i):\n            c += x[i] == x[j]\n    return c",),
        ("def solve(x):\n    return len(x) - len(set(x))",
         "def solve(x):\n    c = 0\n    for i in range(1, len(x)):\n        c += x[i] == x[i - 1]\n    return c"),
        DISTINCT,
    ),
    Problem(
        "best_slice", "n",
        ("the largest sum of neighbours in {arg}", "the maximum subarray sum of {arg}", "the best sum of a slice of {arg}",
         "the biggest sum of consecutive numbers of {arg}", "the largest sum of a part of {arg}"),
        ("def solve(x):\n    b = t = x[0]\n    for a in x[1:]:\n        t = max(t + a, a)\n        b = max(b, t)\n    return b",),
        ("def solve(x):\n    b = x[0]\n    for i in range(len(x)):\n        t = 0\n        for a in x[i:]:\n            t += a\n"
         "            b = max(b, t)\n    return b",),
        ("def solve(x):\n    b = t = 0\n    for a in x:\n        t = max(t + a, 0)\n        b = max(b, t)\n    return b",
         "def solve(x):\n    return max(sum(x), max(x))"),
        MIXED, lambda rng: numbers(rng) if rng.random() < 0.6 else [-abs(a) - 1 for a in numbers(rng)],
    ),
    Problem(
        "pair_of_ten", "n",
        ("whether two entries of {arg} add up to 10", "True if a pair in {arg} sums to 10", "if {arg} holds a pair with sum 10",
         "whether 10 is the sum of a pair of {arg}", "True when two values of {arg} give 10"),
        ("def solve(x):\n    s = set()\n    for a in x:\n        if 10 - a in s:\n            return True\n        s.add(a)\n    return False",),
        ("def solve(x):\n    for i in range(len(x)):\n        for j in range(i):\n            if x[i] + x[j] == 10:\n"
         "                return True\n    return False",),
        ("def solve(x):\n    for a in x:\n        if 10 - a in x:\n            return True\n    return False",
         "def solve(x):\n    return sum(x) == 10"),
        RISING, lambda rng: [rng.choice((1, 2, 5, 8, 9, 12, 20)) for _ in range(rng.randint(2, 4))],
    ),
    Problem(
        "most_common", "n",
        ("how often the most common number of {arg} occurs", "the highest count of a value in {arg}",
         "how many times the mode of {arg} occurs", "the count of the most frequent entry of {arg}",
         "the largest frequency in {arg}"),
        ("def solve(x):\n    d = {}\n    for a in x:\n        d[a] = d.get(a, 0) + 1\n    return max(d.values())",),
        ("def solve(x):\n    b = 0\n    for a in x:\n        c = 0\n        for e in x:\n            c += a == e\n        b = max(b, c)\n    return b",
         "def solve(x):\n    return max(x.count(a) for a in x)"),
        ("def solve(x):\n    return len(set(x))", "def solve(x):\n    return x.count(x[0])"),
        DISTINCT,
    ),
    Problem(
        "prefix_sums", "n",
        ("the prefix sums of {arg}", "the running totals of {arg}", "the list of sums of the first entries of {arg}",
         "the cumulative sums of {arg}", "a list of partial sums of {arg}"),
        ("def solve(x):\n    t, r = 0, []\n    for a in x:\n        t += a\n        r.append(t)\n    return r",),
        ("def solve(x):\n    return [sum(x[: i + 1]) for i in range(len(x))]",
         "def solve(x):\n    r = []\n    for i in range(len(x)):\n        t = 0\n        for a in x[: i + 1]:\n            t += a\n"
         "        r.append(t)\n    return r"),
        ("def solve(x):\n    return [sum(x[:i]) for i in range(len(x))]", "def solve(x):\n    return [sum(x) for a in x]"),
        DISTINCT,
    ),
    Problem(
        "distinct", "n",
        ("how many different numbers {arg} has", "the number of distinct values in {arg}", "the count of unique numbers of {arg}",
         "how many values of {arg} are different", "the number of different entries of {arg}"),
        ("def solve(x):\n    return len(set(x))",
         "def solve(x):\n    s = set()\n    for a in x:\n        s.add(a)\n    return len(s)"),
        ("def solve(x):\n    r = []\n    for a in x:\n        if a not in r:\n            r.append(a)\n    return len(r)",),
        ("def solve(x):\n    return len(x)", "def solve(x):\n    return len(x) - len(set(x))"),
        DISTINCT,
    ),
    Problem(
        "rise", "n",
        ("the biggest rise from an entry of {arg} to a later one", "the best profit with prices {arg}",
         "the most that {arg} rises", "the largest rise within {arg}", "the largest later minus earlier value of {arg}"),
        ("def solve(x):\n    m, b = x[0], x[1] - x[0]\n    for a in x[1:]:\n        b = max(b, a - m)\n        m = min(m, a)\n    return b",),
        ("def solve(x):\n    b = x[1] - x[0]\n    for i in range(len(x)):\n        for j in range(i):\n            b = max(b, x[i] - x[j])\n"
         "    return b",),
        ("def solve(x):\n    return max(x) - min(x)", "def solve(x):\n    return x[-1] - x[0]"),
        MIXED,
    ),
    Problem(
        "records", "n",
        ("how many entries of {arg} beat all before", "the number of records in {arg}", "the count of new highs in {arg}",
         "how often {arg} reaches a new maximum", "how many values of {arg} exceed all earlier ones"),
        ("def solve(x):\n    c, m = 1, x[0]\n    for a in x:\n        if a > m:\n            c, m = c + 1, a\n    return c",),
        ("def solve(x):\n    c = 0\n    for i in range(len(x)):\n        k = 0\n        for j in range(i):\n            k += x[j] < x[i]\n"
         "        c += k == i\n    return c",),
        ("def solve(x):\n    c = 1\n    for i in range(1, len(x)):\n        c += x[i] > x[i - 1]\n    return c",
         "def solve(x):\n    return x.count(max(x))"),
        MIXED,
    ),
    Problem(
        "is_sorted", "n",
        ("whether {arg} is sorted", "True if {arg} never falls", "if {arg} is in ascending order",
         "whether the numbers of {arg} are in order", "True when no entry of {arg} is below an earlier one"),
        ("def solve(x):\n    for i in range(1, len(x)):\n        if x[i] < x[i - 1]:\n            return False\n    return True",),
        ("def solve(x):\n    for i in range(len(x)):\n        for j in range(i):\n            if x[i] < x[j]:\n"
         "                return False\n    return True",),
        ("def solve(x):\n    for i in range(1, len(x)):\n        if x[i] <= x[i - 1]:\n            return False\n    return True",
         "def solve(x):\n    return x[0] <= x[-1]"),
        DISTINCT, lambda rng: sorted(numbers(rng)) if rng.random() < 0.5 else numbers(rng),
    ),
    Problem(
        "longest_run", "n",
        ("the longest run of equal numbers in {arg}", "how long the longest run in {arg} is",
         "the length of the longest streak of {arg}", "the most equal neighbours in {arg}", "the longest block of one value in {arg}"),
        ("def solve(x):\n    b = c = 1\n    for i in range(1, len(x)):\n        c = c + 1 if x[i] == x[i - 1] else 1\n"
         "        b = max(b, c)\n    return b",),
        ("def solve(x):\n    b = 0\n    for i in range(len(x)):\n        c = 0\n        for a in x[i:]:\n            if a != x[i]:\n"
         "                break\n            c += 1\n        b = max(b, c)\n    return b",),
        ("def solve(x):\n    return max(x.count(a) for a in x)", "def solve(x):\n    return len(x) - len(set(x))"),
        EQUAL, lambda rng: [rng.randint(0, 2) for _ in range(rng.randint(2, 9))],
    ),
    Problem(
        "spread", "n",
        ("the spread of {arg}", "the largest minus the smallest of {arg}", "the range of the values {arg}",
         "the largest difference in {arg}", "how far apart the extremes of {arg} are"),
        ("def solve(x):\n    return max(x) - min(x)",
         "def solve(x):\n    m = k = x[0]\n    for a in x:\n        m, k = max(m, a), min(k, a)\n    return m - k"),
        ("def solve(x):\n    b = 0\n    for a in x:\n        for c in x:\n            b = max(b, a - c)\n    return b",),
        ("def solve(x):\n    return x[-1] - x[0]", "def solve(x):\n    return max(x)"),
        MIXED,
    ),
    Problem(
        "up_to", "1",
        ("the sum of 1 to {arg}", "1 + 2 + ... + {arg}", "the sum of the numbers up to {arg}", "all numbers from 1 to {arg} added",
         "the sum of the first {arg} numbers"),
        ("def solve(x):\n    return x * (x + 1) // 2",),
        ("def solve(x):\n    return sum(range(x + 1))",
         "def solve(x):\n    t = 0\n    for i in range(x + 1):\n        t += i\n    return t"),
        ("def solve(x):\n    return x * x // 2", "def solve(x):\n    return sum(range(x))"),
        NUMBER, small, ("n", "k", "m"),
    ),
    Problem(
        "evens_up_to", "1",
        ("how many numbers up to {arg} are even", "the count of even numbers from 1 to {arg}", "the number of evens up to {arg}",
         "how many even numbers 1 to {arg} has", "the count of evens in 1 to {arg}"),
        ("def solve(x):\n    return x // 2",),
        ("def solve(x):\n    c = 0\n    for i in range(1, x + 1):\n        c += i % 2 == 0\n    return c",),
        ("def solve(x):\n    return x % 2", "def solve(x):\n    return (x + 1) // 2"),
        NUMBER, small, ("n", "k", "m"),
    ),
)  # fmt: skip
