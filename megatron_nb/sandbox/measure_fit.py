"""Which class of the ladder the operation counts of a program follow. Pure arithmetic on (n, cost) points.

Counts are exact, so a class is told by what is left over: c(n) = a + b g(n) + d f(n) with f the class and at most one lower
term g is fitted by least squares of relative errors; the lowest class that leaves no more than the best one does is taken.
Exponential and factorial growth are told first, from the ratio of neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FUNCTIONS = {
    "1": lambda n: 1.0,
    "log n": lambda n: math.log2(n),
    "sqrt n": lambda n: math.sqrt(n),
    "n": lambda n: float(n),
    "n log n": lambda n: n * math.log2(n),
    "n sqrt n": lambda n: n * math.sqrt(n),
    "n^2": lambda n: float(n) ** 2,
    "n^2 log n": lambda n: float(n) ** 2 * math.log2(n),
    "n^3": lambda n: float(n) ** 3,
    "n^k": lambda n: float(n) ** 4,
}
LOWER = {  # the one lower term that may stand beside each class; its sign is free (n(n-1)/2)
    "log n": [], "sqrt n": ["log n"], "n": ["log n", "sqrt n"], "n log n": ["n"], "n sqrt n": ["n", "n log n"],
    "n^2": ["n", "n log n"], "n^2 log n": ["n^2"], "n^3": ["n^2", "n"], "n^k": ["n^3"],
}  # fmt: skip
MOST_POINTS = 12  # the largest sizes
FEWEST_POINTS = 5
FLOOR = 0.004  # relative error that says nothing: rounding of sizes, halves and logarithms
POOR = 0.12  # relative error beyond which no class was found
SHARE = 0.06  # of the cost at the largest size that the class's own term must make up
CLEAR = 0.2  # confidence below which two classes fit alike
NARROW = 4.0  # the sizes must span at least this factor
MOST_TAKEN = 0.5  # a negative lower term may take away this much of the class's own term at the largest size
SLACK = 1.6  # a lower class may leave this many times what the best one leaves


@dataclass
class Fit:
    """The class found (None: none fits), its relative error, and how clearly (0..1) it was told from the next ones."""

    complexity: str | None
    error: float
    confidence: float
    reason: str = ""


def fit(points: Sequence[tuple[float, float]], noise: float = 0.0) -> Fit:
    """The class of costs at growing sizes: [(n, cost)] with n rising. noise: relative error that inputs of one size leave."""
    points = [(n, c) for n, c in points if n >= 3]
    if len(points) < FEWEST_POINTS:
        return Fit(None, math.inf, 0.0, f"only {len(points)} sizes could be measured, {FEWEST_POINTS} are needed")
    steep = _exponential(points)
    if steep:
        return steep
    if points[-1][0] < NARROW * points[0][0]:
        return Fit(None, math.inf, 0.0, f"the sizes from {points[0][0]} to {points[-1][0]} are too near to each other")
    used, floor = _spread(points), max(FLOOR, noise / 2)
    costs = [c for _, c in used]
    if max(costs) - min(costs) <= 1.0:
        return Fit("1", 0.0, 1.0)
    if costs[-1] < 2 * costs[0]:  # a constant hides the growth: look at what grows
        if _trend(costs) < 0.5:
            return Fit("1", (max(costs) - min(costs)) / max(costs), 0.5)
        used = [(n, max(c - costs[0], 0.0) + 1.0) for n, c in used]
    errors = {}
    for name in LOWER:
        tried = [_solve(used, [name, *([lower] if lower else [])]) for lower in (None, *LOWER[name])]
        errors[name] = min((error for error, share in tried if share >= SHARE), default=math.inf)
    best = min(errors.values())
    chosen = next(name for name, error in errors.items() if max(error, floor) <= SLACK * max(best, floor))
    if best > POOR + 3 * noise:
        return Fit(None, best, 0.0, f"no class fits the counts: the best, {chosen}, leaves {best:.0%}")
    others = {other: max(error, floor) for other, error in errors.items() if other != chosen and not _nests(other, chosen)}
    second = min(others, key=others.__getitem__)
    confidence = round(max(0.0, 1 - max(errors[chosen], floor) / others[second]), 3)
    if confidence < CLEAR:
        return Fit(None, errors[chosen], confidence, f"{chosen} and {second} fit the counts alike")
    return Fit(chosen, errors[chosen], confidence)


def _spread(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The larger sizes: at most MOST_POINTS, no two nearer than the range asks for, none under 8 where there are others."""
    large = [p for p in points if p[0] >= 8]
    points = large if len(large) >= FEWEST_POINTS and large[-1][0] >= 6 * large[0][0] else points
    ratio = min(2.0, (points[-1][0] / points[0][0]) ** (1 / MOST_POINTS)) * 0.99
    kept = [points[-1]]
    for point in reversed(points[:-1]):
        if kept[-1][0] / point[0] >= ratio:
            kept.append(point)
    return kept[MOST_POINTS::-1]


def _trend(costs: Sequence[float]) -> float:
    """Kendall's rank correlation of the costs with their order: 1 when every larger size costs more."""
    pairs = [(a, b) for i, a in enumerate(costs) for b in costs[i + 1 :]]
    return sum((b > a) - (b < a) for a, b in pairs) / len(pairs)


def _nests(name: str, chosen: str) -> bool:
    """Whether a fit of `name` may hold `chosen` as its lower term, so that it always leaves as little."""
    return chosen in LOWER.get(name, [])


def _solve(points: Sequence[tuple[float, float]], names: Sequence[str]) -> tuple[float, float]:
    """(relative error, share of names[0] at the largest size) of the least squares fit of a constant and the named terms.

    Larger sizes weigh more: they are nearer to the limit that the class speaks of.
    """
    weights = [(i + 1) / len(points) for i in range(len(points))]
    top = points[-1][0]
    scale = [FUNCTIONS[name](top) for name in names]
    rows = [[w / c, *(w * FUNCTIONS[name](n) / s / c for name, s in zip(names, scale))] for w, (n, c) in zip(weights, points)]
    size = len(rows[0])
    matrix = [[sum(r[i] * r[j] for r in rows) for j in range(size)] for i in range(size)]
    right = [sum(r[i] * w for r, w in zip(rows, weights)) for i in range(size)]
    found = _gauss(matrix, right)
    if found is None:
        return math.inf, 0.0
    if len(found) > 2 and found[2] < -MOST_TAKEN * found[1]:
        return math.inf, 0.0
    left = sum((sum(x * y for x, y in zip(r, found)) - w) ** 2 for r, w in zip(rows, weights))
    return math.sqrt(left / sum(w * w for w in weights)), found[1] / points[-1][1]


def _gauss(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    size = len(right)
    rows = [[*row, r] for row, r in zip(matrix, right)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-300:
            return None
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i])]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))) / rows[i][i]
    return found


def _exponential(points: Sequence[tuple[float, float]]) -> Fit | None:
    """A fit of 2^n or n!, when the costs of neighbouring sizes grow as those do and not as a power of n."""
    top = points[-8:]
    steps = [
        ((n0 + n1) / 2, (math.log(c1) - math.log(c0)) / (n1 - n0)) for (n0, c0), (n1, c1) in zip(top, top[1:]) if c1 > c0 > 0
    ]
    if top[-1][0] > 64 or len(steps) < 4 or steps[-1][0] * steps[-1][1] < 4.5:  # the last: the power of n it would be
        return None
    shapes = {
        "n^k": _variation([middle * rate for middle, rate in steps]),
        "2^n": _variation([rate for _, rate in steps]),
        "n!": _variation([rate / math.log(middle + 0.5) for middle, rate in steps]),
    }
    name = min(shapes, key=shapes.__getitem__)
    if name == "n^k":
        return None
    second = sorted(shapes.values())[1]
    return Fit(name, shapes[name], round(max(0.0, 1 - shapes[name] / max(second, 1e-9)), 3))


def _variation(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / len(values)) / max(mean, 1e-9)
