"""The pieces that labelled programs are composed of: loops, statements and functions with a known cost in n.

A piece begins with `## NAME, COST[, index][, held][: the cost in words]`. In its text `$n` is the size, `$a` a list of n
numbers in random order, `$s` the number that the program returns, `$up` the index of the loop around (from 0 to n), `$BODY`
what a loop repeats; other `$names` are fresh in every use. Functions that it calls stand above a line `--`. `index`: the loop's
`$i` runs from 0 to n. `held`: kept from training programs, for the held-out ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_nb.synthesis.complexity_leaves import LEAVES as QUICK_TEXT
from megatron_nb.synthesis.complexity_loops import LOOPS as LOOP_TEXT
from megatron_nb.synthesis.complexity_slow import SLOW as SLOW_TEXT


@dataclass(frozen=True)
class Piece:
    """See the head of the file."""

    name: str
    cost: str  # a class of the ladder; of a loop: how often it runs
    text: str
    helper: str = ""
    said: str = ""
    index: bool = False
    held: bool = False


def pieces_of(text: str) -> list[Piece]:
    """The pieces that a text describes."""
    found = []
    for part in text.strip().removeprefix("## ").split("\n## "):
        head, _, body = part.partition("\n")
        told, _, said = head.partition(": ")
        name, cost, *flags = told.split(", ")
        helper, _, text = body.rpartition("\n--\n")
        found.append(Piece(name, cost, text.strip("\n"), helper, said, "index" in flags, "held" in flags))
    return found


LOOPS, LEAVES = pieces_of(LOOP_TEXT), pieces_of(QUICK_TEXT) + pieces_of(SLOW_TEXT)
STEPS = [  # what a loop repeats
    "$s += 1", "$s = ($s * 31 + 7) % 10007", "$s ^= $n", "if $s % 3 == 0:\n    $s += 2", "$s += $n % 5", "$s = max($s - 1, $n)",
    "if $s > 1000:\n    $s -= 1000\n$s += 3", "$s = $s + 2 if $s % 2 else $s + 1", "$t = $n * 2\n$s += $t % 7",
    "$s = min($s + 4, 9999)", "$x, $y = $s, $n\n$s = ($x + $y) % 4001",
]  # fmt: skip
INDEX_STEPS = [  # what a loop with an index repeats too
    "$s += $up", "$s ^= $up", "if $up % 2:\n    $s += 1", "$s = max($s, $up * 3 % 17)", "$s += $up * $up % 11",
]  # fmt: skip
LIST_STEPS = [  # what a program with a list does too
    "$s += len($a)", "$s += $a[0]", "$s += $a[-1] - $a[0]", "$a[0], $a[-1] = $a[-1], $a[0]", "$s += $a[len($a) // 2]",
]  # fmt: skip
POWERS = {  # class -> exponents of n and of log n
    "1": (0, 0), "log n": (0, 1), "sqrt n": (0.5, 0), "n": (1, 0), "n log n": (1, 1), "n sqrt n": (1.5, 0), "n^2": (2, 0),
    "n^2 log n": (2, 1), "n^3": (3, 0), "n^k": (4, 0),
}  # fmt: skip


def product(costs: Sequence[str]) -> str | None:
    """The class of loops within each other; None where it is not on the ladder."""
    if len(costs) == 1 or any(cost in ("2^n", "n!") for cost in costs):
        return costs[0] if len(costs) == 1 else None
    n, log = (sum(POWERS[cost][at] for cost in costs) for at in (0, 1))
    return next((cost for cost, powers in POWERS.items() if powers == (n, log)), "n^k" if n == 5 and not log else None)
