"""Labelled programs that the complexity witness is measured on: one half to develop it by, one written after it was frozen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Labelled:
    """A program whose class is known: source with a function `function`, and the source of its make(n)."""

    name: str
    truth: str
    source: str
    generator: str
    function: str = "f"


INTS = "import random\ndef make(n):\n    return [[random.randrange(10**6) for _ in range(n)]]\n"
SORTED = (
    "import random\ndef make(n):\n    a = sorted(random.randrange(10**6) for _ in range(n))\n"
    "    return [a, random.randrange(10**6)]\n"
)
DISTINCT = "import random\ndef make(n):\n    return [random.sample(range(10 * n), n)]\n"
NUMBER = "def make(n):\n    return [n]\n"
TEXT = "import random\ndef make(n):\n    return [''.join(random.choices('abcdefgh', k=n))]\n"
TEXTS = "import random\ndef make(n):\n    return [''.join(random.choices('abcd', k=n)), ''.join(random.choices('abcd', k=n))]\n"
MATRIX = "import random\ndef make(n):\n    return [[[random.randrange(100) for _ in range(n)] for _ in range(n)]]\n"
GRAPH = (
    "import random\ndef make(n):\n    return [n, [[i, random.randrange(i)] for i in range(1, n)]"
    " + [[random.randrange(n), random.randrange(n)] for _ in range(n)]]\n"
)
