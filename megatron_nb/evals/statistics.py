"""Numbers that evaluations are reported in: unbiased pass@k and pass^k, majority votes, means with confidence bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z95 = 1.959963984540054  # of a normal distribution: 95 % lie within
DRAWS = 2000  # of a bootstrap


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that one of k of the n attempts, c of them right, is right (arXiv 2107.03374).

    Exact integers, divided once. ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    _check(n, c, k)
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """C(c, k) / C(n, k): the chance that all of k of the n attempts are right (arXiv 2406.12045). ValueError as pass_at_k."""
    _check(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def _check(n: int, c: int, k: int) -> None:
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"k={k} of n={n} attempts with c={c} right: 0 <= c <= n and 1 <= k <= n are needed; raise samples")


def mean_with_bounds(name: str, by_item: Sequence[Sequence[float]]) -> dict[str, float]:
    """NAME, NAME_low, NAME_high: the mean over items of their attempts' means, with 95 % bounds; {} for no item.

    With one attempt of 0 or 1 each it is Wilson's interval; else 1.96 standard errors over the items, which are what is drawn
    (attempts at one item are not independent; arXiv 2411.00640). Where the items do not differ, a standard error of 0 would
    promise certainty: values within 0..1 then have Wilson's interval, which is at least as wide, others have no bounds.
    """
    if not by_item:
        return {}
    means = np.array([np.mean(its) for its in by_item])
    mean = float(means.mean())
    share = bool(means.min() >= 0 and means.max() <= 1)
    if share and (means.min() == means.max() or all(len(its) == 1 and its[0] in (0, 1) for its in by_item)):
        low, high = wilson(float(means.sum()), len(means))
    elif means.min() == means.max():
        return {name: mean}
    else:
        error = Z95 * float(means.std(ddof=1)) / math.sqrt(len(means))
        low, high = mean - error, mean + error
        if share:
            low, high = max(low, 0.0), min(high, 1.0)
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def ratio_with_bounds(name: str, by_item: Sequence[tuple[float, float]]) -> dict[str, float]:
    """NAME, NAME_low, NAME_high: the share of all parts of all items that are right, with 95 % bounds; {} for no item.

    by_item: (right, of how many), over an item's attempts. Bounds are over the items, as in mean_with_bounds: neither parts
    of one item nor attempts at it are independent. They are 1.96 standard errors of the ratio of two sums, linearised, or
    Wilson's interval where the items do not differ or are one yes or no each.
    """
    if not by_item:
        return {}
    right, of = np.array(by_item, dtype=float).T
    share, items = float(right.sum() / of.sum()), len(of)
    off = (right - share * of) / of.mean()  # [items]
    if of.max() == 1 or np.abs(off).max() < 1e-9:
        low, high = wilson(share * items, items)
    else:
        error = Z95 * float(off.std(ddof=1)) / math.sqrt(items)
        low, high = max(share - error, 0.0), min(share + error, 1.0)
    return {name: share, f"{name}_low": low, f"{name}_high": high}


def wilson(right: float, total: int) -> tuple[float, float]:
    """95 % bounds of a share (Wilson 1927)."""
    share, z2 = right / total, Z95**2
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))  # rounding must not leave the share out


def bootstrap(values: Sequence[float], statistic: object = np.mean, seed: int = 0) -> tuple[float, float]:
    """95 % bounds of statistic(values) over DRAWS draws of as many values with replacement."""
    rng, values = np.random.default_rng(seed), np.asarray(values)
    found = [statistic(values[rng.integers(0, len(values), len(values))]) for _ in range(DRAWS)]
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)
