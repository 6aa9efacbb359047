"""Python programs whose time complexity is known by construction, to train and to judge a model that names it.

A program has a main part of its class and up to two smaller ones. A part nests loops around a leaf (see complexity_pieces.py):
the product of their costs is its class, the largest part that of the program. Around it lie comments, docstrings and names
that may claim anything, code that never runs, and one of three forms: a function, class Solution, or a program that
reads stdin. Templates are split: those of held-out programs, a nest with a held piece or one of every few nests of seen
pieces, are in no training program.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_nb.rewards.witness import question
from megatron_nb.sandbox.ladder import LADDER, rank
from megatron_nb.synthesis.complexity_pieces import INDEX_STEPS, LEAVES, LIST_STEPS, LOOPS, STEPS, Piece, product

SPLITS = ("train", "heldout")
HELD_NESTS = 5  # of nests of seen pieces one in this many is held out (own)
FORMS = ("function", "function", "function", "Solution", "stdin")
NAMES = {  # what stands for a name in the pieces -> what it may be called
    "i": "i idx p left pos a1 step", "j": "j q right other b1", "k": "k m depth size rest", "x": "x v item value num",
    "y": "y w second last", "z": "z third u", "t": "t out tmp cache rows acc", "c": "c ch sign", "lo": "lo low start",
    "hi": "hi high end", "mid": "mid middle half", "b": "b part sub block", "g": "go helper rec walk solve_part fast_sum",
    "n": "n n n size_n total length", "a": "a nums arr data values xs", "s": "s res ans count score",
    "f": "solve run f compute process scan linear_time get_best check log_sum",
}  # fmt: skip
CLAIMS = ("runs in O(1)", "O(n) time", "O(n log n)", "quadratic, sorry", "fast path", "TODO: make it O(log n)", "exponential",
          "main part", "keep the result", "see above")  # fmt: skip
MAKE = {  # what a program takes -> the source of make(n)
    "number": "def make(n):\n    return [n]\n",
    "list": "import random\n\n\ndef make(n):\n    rng = random.Random(n)\n"
            "    return [[rng.randrange(9 * n + 9) for _ in range(n)]]\n",
}


@dataclass(frozen=True)
class Nest:
    """Loops, the outermost first, around a leaf; without a leaf around a step."""

    loops: tuple[Piece, ...]
    leaf: Piece | None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self.loops + ((self.leaf,) if self.leaf else ())

    @property
    def cost(self) -> str | None:
        return product([piece.cost for piece in self.pieces])

    @property
    def name(self) -> str:
        return ">".join(piece.name for piece in self.pieces)

    @property
    def split(self) -> str:
        """The split whose programs may have it as a part."""
        if any(piece.held for piece in self.pieces):
            return "heldout"
        place = hashlib.blake2b(self.name.encode(), digest_size=2).digest()[0]
        return "heldout" if len(self.pieces) > 1 and place % HELD_NESTS == 0 else "train"

    @property
    def told(self) -> str:
        """The costs in words, such as: n times log n is n log n."""
        words = [piece.said or piece.cost for piece in self.pieces]
        return words[0] if len(words) == 1 else f"{' times '.join(words)} is {self.cost}"


@dataclass
class Program:
    """A labelled program."""

    source: str  # as it is shown
    plain: str  # its function alone, to run it
    function: str
    generator: str  # source of make(n), which returns the arguments for size n
    complexity: str
    template: str  # the nest of its main part
    reasoning: str

    def row(self, name: str) -> dict[str, Any]:
        """A conversation to train on; what else is known of the program stands beside it."""
        said = {"user": question(self.source), "assistant": f"{self.reasoning}\nComplexity: O({self.complexity})"}
        return {
            "id": name, "messages": [{"role": role, "content": text} for role, text in said.items()],
            "complexity": self.complexity, "template": self.template, "program": self.source, "plain": self.plain,
            "function": self.function, "generator": self.generator,
        }  # fmt: skip


# ------------------------------------------------------------------ nests
def nests(cost: str, split: str, rng: random.Random, count: int) -> list[Nest]:
    """`count` nests of this class that programs of this split may have as their main part."""
    found: list[Nest] = []
    while len(found) < count:
        costs = rng.choice(rng.choice(_products(cost)))
        ends_in_leaf = rng.random() < (0.5 if len(costs) == 1 else 0.25)
        nest = _nest(costs[:-1], costs[-1], rng) if ends_in_leaf else _nest(costs, None, rng)
        if nest is not None and nest.split == split:
            found.append(nest)
    return found


def _nest(costs: Sequence[str], last: str | None, rng: random.Random) -> Nest | None:
    """Loops that run so often around a leaf of cost `last`; None where there are no such pieces."""
    loops: list[Piece] = []
    for cost in costs:
        index = bool(loops) and loops[-1].index
        choices = [loop for loop in LOOPS if loop.cost == cost and (index or "$up" not in loop.text)]
        if not choices:
            return None
        loops.append(rng.choice(choices))
    # a function that is called in a loop is short
    leaves = [leaf for leaf in LEAVES if leaf.cost == last and not (loops and leaf.helper and last not in ("log n", "n"))]
    if last and not leaves:
        return None
    return Nest(tuple(loops), rng.choice(leaves) if last else None)


@functools.cache
def _products(cost: str) -> list[list[tuple[str, ...]]]:
    """The ways to write a class as a product of up to four others, by their number; 1 is a factor of nothing else."""
    factors, ways = [one for one in LADDER if one not in ("1", "2^n", "n!")], [[(cost,)]]
    for many in (2, 3, 4):
        found = [way for way in itertools.product(factors, repeat=many) if product(way) == cost]
        ways.append([way for way in found if way.count("log n") < 2 and (way.count("sqrt n") < 2 or cost == "n")])
    return [found for found in ways if found]


# ------------------------------------------------------------------ text
class Writer:
    """The names and the text of one program."""

    def __init__(self, rng: random.Random):
        self.rng, self.taken, self.helpers, self.uses_list = rng, set(), [], False
        self.fixed = {name: self.fresh(name) for name in "nasf"}

    def fresh(self, kind: str) -> str:
        """A name of this kind that nothing else has."""
        pool = NAMES[kind].split()
        name = self.rng.choice(pool)
        while name in self.taken:
            name = self.rng.choice(pool) + str(self.rng.randrange(2, 30))
        self.taken.add(name)
        return name

    def fill(self, text: str, own: dict[str, str]) -> str:
        self.uses_list = self.uses_list or "$a" in re.findall(r"\$\w+", text)

        def name(found: re.Match) -> str:
            key = found[1]
            if key not in own:
                own[key] = self.fixed.get(key) or self.fresh(key)
            return own[key]

        return re.sub(r"\$(?!BODY)(\w+)", name, text)

    def part(self, nest: Nest) -> str:
        """The text of a nest."""
        shells, up = [], ""
        for loop in nest.loops:
            own = {"up": up}
            shells.append(self.fill(loop.text, own))
            up = own["i"] if loop.index else ""
        if nest.leaf:
            own = {"up": up}
            if nest.leaf.helper:
                self.helpers.append(self.fill(nest.leaf.helper, own))
                own = {key: own[key] for key in ("g", "up")}
            text = self.fill(nest.leaf.text, own)
        else:
            kinds = [STEPS, *([INDEX_STEPS] if up else []), *([LIST_STEPS] if self.uses_list else [])]
            text = self.fill(self.rng.choice(self.rng.choice(kinds)), {"up": up})
        for shell in reversed(shells):
            text = re.sub(r"^( *)\$BODY$", lambda found, text=text: textwrap.indent(text, found[1]), shell, flags=re.MULTILINE)
        return text


def program(cost: str, split: str, rng: random.Random, extras: int = 2) -> Program:
    """A program of this class for this split, with at most `extras` further parts."""
    return compose(nests(cost, split, rng, 1)[0], rng, extras)


def compose(main: Nest, rng: random.Random, extras: int = 2) -> Program:
    """A program around this main part. Further parts are smaller or alike, and of seen pieces alone."""
    writer, costs = Writer(rng), LADDER[: rank(main.cost) + 1]
    smaller = [nests(rng.choice(costs[:8]), "train", rng, 1)[0] for _ in range(rng.choice((0, 0, 1, extras)) if extras else 0)]
    parts = [main, *smaller]
    rng.shuffle(parts)
    blocks, told = [], []
    for number, nest in enumerate(parts, 1):
        blocks.append(writer.part(nest))
        told.append(f"Part {number}: {nest.told}.")
    if rng.random() < 0.12:  # code that never runs
        dead = nests(rng.choice(LADDER[3:9]), "train", rng, 1)[0]
        at = rng.randrange(len(blocks) + 1)
        blocks.insert(at, f"if {writer.fixed['n']} < 0:\n{textwrap.indent(writer.part(dead), '    ')}")
    told.append(f"Largest: {main.cost}.")
    plain = _function(writer, blocks, rng)
    kind = "list" if writer.uses_list else "number"
    source = _shown(plain, writer.fixed["f"], kind, rng)
    return Program(source, plain, writer.fixed["f"], MAKE[kind], main.cost, main.name, " ".join(told))


def _function(writer: Writer, blocks: list[str], rng: random.Random) -> str:
    """The imports, helpers and the function itself, with comments and sometimes a docstring and annotations."""
    n, a, s, f = (writer.fixed[name] for name in "nasf")
    hint = rng.random() < 0.3
    given = a if writer.uses_list else n
    kind = ("list[int]" if writer.uses_list else "int") if hint else ""
    lines = [f"def {f}({given}{': ' + kind if kind else ''}){' -> int' if hint else ''}:"]
    if rng.random() < 0.2:
        lines.append(f'    """{rng.choice(CLAIMS)}"""')
    lines += [f"    {n} = len({a})"] if writer.uses_list else []
    lines.append(f"    {s} = {rng.choice('0011')}")
    for block in blocks:
        if rng.random() < 0.2:
            lines.append(f"    # {rng.choice(CLAIMS)}")
        lines.append(textwrap.indent(block, "    "))
    lines.append(f"    return {s}")
    text = "\n\n\n".join([*writer.helpers, "\n".join(lines)]) + "\n"
    modules = [name for name in ("bisect", "collections", "heapq", "itertools", "math") if f"{name}." in text]
    return "".join(f"import {name}\n" for name in modules) + ("\n\n" if modules else "") + text


def _shown(plain: str, function: str, kind: str, rng: random.Random) -> str:
    """The program in one of three forms."""
    form = rng.choice(FORMS)
    if form == "Solution":
        start = plain.index(f"def {function}(")
        method = plain[start:].replace(f"def {function}(", f"def {function}(self, ", 1)
        return f"{plain[:start]}class Solution:\n{textwrap.indent(method, '    ')}"
    if form == "stdin":
        read = "list(map(int, input().split()))" if kind == "list" else "int(input())"
        return f"{plain}\n\nprint({function}({read}))\n"
    return plain
