"""Walks over the wiki graph from time-aware heads, many at once.

A head is drawn among the pages whose date lies within a window before the cutoff and whose degree lies in a band, with weight
exp(-age / tau). Each step follows a link with weight 1 / log(2 + degree of its target) and never visits a page twice.
Disambiguation pages, lists and calendar pages (a year, a century) are neither heads nor steps; links that stand in no sentence
are not followed. n pages, m links, B walks,
L steps at most.
"""

from __future__ import annotations

import datetime
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_nb.search.dates import MONTH
from megatron_nb.search.pages import KINDS, LINK_KINDS

if TYPE_CHECKING:
    from megatron_nb.search.graph import Graph

CALENDAR = re.compile(rf"\d{{1,4}}s?( (AD|BC|BCE|CE))?|\d+(st|nd|rd|th) (century|millennium)\b.*|({MONTH})( \d+)?")
QUOTABLE = ("infobox", "lead", "text")  # links that stand in a sentence or in a field with a name
REDRAWS = 8  # of a step that would come back, before its links are weighed one by one
EPOCH = datetime.date(1970, 1, 1)


@dataclass
class WalkConfig:
    """Where walks begin and how far they go."""

    min_steps: int = 5  # links of a walk; 2 to 9
    max_steps: int = 9
    cutoff: str = "latest"  # ISO day; latest: the day that 99 % of the dated pages do not pass; none: dates do not matter
    window_days: float = 730.0  # (own) a head's date lies at most so long before the cutoff
    tau_days: float = 180.0  # (own) a head's weight is exp(-age / tau)
    min_degree: int = 8  # (own) of a head
    max_degree: int = 300  # (own)

    def __post_init__(self):
        if not 1 <= self.min_steps <= self.max_steps:
            raise ValueError(f"min_steps={self.min_steps} and max_steps={self.max_steps} must satisfy 1 <= min <= max")
        if not 0 <= self.min_degree <= self.max_degree:
            raise ValueError(f"min_degree={self.min_degree} and max_degree={self.max_degree} must satisfy 0 <= min <= max")
        if self.window_days <= 0 or self.tau_days <= 0:
            raise ValueError(f"window_days={self.window_days} and tau_days={self.tau_days} must be more than 0")
        if self.cutoff not in ("latest", "none"):
            try:
                datetime.date.fromisoformat(self.cutoff)
            except ValueError as error:
                raise ValueError(f"cutoff={self.cutoff!r} must be an ISO day such as 2025-06-30, latest or none") from error


class Walker:
    """Draws walks. ValueError when no page can be a head."""

    def __init__(self, graph: Graph, config: WalkConfig, without: Iterable[int] = ()):
        """without: pages that are neither heads nor steps."""
        self.graph, self.config = graph, config
        usable = np.asarray(graph.kind) == KINDS.index("article")
        usable &= np.fromiter((CALENDAR.fullmatch(title) is None for title in graph.titles), bool, len(graph.titles))
        usable[np.fromiter(without, np.int64)] = False
        targets = np.asarray(graph.out.targets)
        sources = np.repeat(np.arange(len(usable), dtype=np.int32), np.diff(graph.out.offsets))
        kept = usable[sources] & usable[targets] & np.isin(graph.out.types, [LINK_KINDS.index(name) for name in QUOTABLE])
        self.targets = targets[kept]  # [m]
        self.offsets = np.concatenate([[0], np.cumsum(np.bincount(sources[kept], minlength=len(usable)))])  # [n + 1]
        self.weight = 1 / np.log(2 + graph.degree[self.targets].astype(np.float64))  # [m]
        self.total = np.concatenate([[0], np.cumsum(self.weight)])  # [m + 1] weight of all links before this one
        self.heads, self.chance, self.cutoff = self._heads(usable)

    def _heads(self, usable: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """(pages, their probabilities, the cutoff in days since 1970 or nan)"""
        graph, config = self.graph, self.config
        fits = usable & (graph.degree >= config.min_degree) & (graph.degree <= config.max_degree)
        fits &= np.diff(self.offsets) > 0
        band, cutoff = int(fits.sum()), np.nan
        age = np.zeros(len(fits))
        if config.cutoff != "none":
            dated = np.asarray(graph.date, np.float64)
            if config.cutoff != "latest":
                cutoff = float((datetime.date.fromisoformat(config.cutoff) - EPOCH).days)
            elif np.isfinite(dated[usable]).any():
                cutoff = float(np.nanpercentile(dated[usable], 99, method="higher"))  # a few name a year to come
            age = cutoff - dated
            fits &= (age >= 0) & (age <= config.window_days)  # false for nan
        heads = np.flatnonzero(fits)
        if not len(heads):
            dates, remedy = "", "widen walk.min_degree or max_degree"
            if config.cutoff != "none":
                day = "" if np.isnan(cutoff) else f" ({day_of(cutoff)})"
                dates = f", none of them a date within {config.window_days:g} days before cutoff={config.cutoff}{day}"
                remedy = "widen walk.min_degree, max_degree or window_days, or give cutoff=none"
            raise ValueError(
                f"no page can be a head: {band} of {len(fits)} have {config.min_degree} to {config.max_degree} links and one "
                f"that can be followed{dates}: {remedy}"
            )
        weight = np.exp(-(age[heads] - age[heads].min()) / config.tau_days)
        return heads, weight / weight.sum(), cutoff

    def draw(self, count: int, seed: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """(pages [B, L + 1] filled up with -1, steps [B]); a walk ends early where no link leads to a new page."""
        config, rng = self.config, np.random.default_rng(list(seed))
        wanted = rng.integers(config.min_steps, config.max_steps, size=count, endpoint=True)
        pages = np.full((count, config.max_steps + 1), -1, np.int32)
        pages[:, 0] = rng.choice(self.heads, size=count, p=self.chance)
        steps = np.zeros(count, np.int64)
        alive = np.arange(count)
        for step in range(config.max_steps):
            alive = alive[wanted[alive] > step]
            pages[alive, step + 1] = self._next(pages[alive, : step + 1], rng)
            alive = alive[pages[alive, step + 1] >= 0]
            steps[alive] += 1
        return pages, steps

    def _next(self, walked: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The next page of every walk, -1 where each link leads back. walked: [B, steps so far + 1]."""
        found = np.full(len(walked), -1, np.int32)
        here = walked[:, -1]
        open_ = np.flatnonzero(self.offsets[here + 1] > self.offsets[here])
        for _ in range(REDRAWS):  # a draw that is not taken leaves the chances of the others as they are
            begin, end = self.offsets[here[open_]], self.offsets[here[open_] + 1]
            at = rng.uniform(self.total[begin], self.total[end])
            link = np.clip(np.searchsorted(self.total, at, side="right") - 1, begin, end - 1)
            page = self.targets[link]
            new = (walked[open_] != page[:, None]).all(1)
            found[open_[new]] = page[new]
            open_ = open_[~new]
            if not len(open_):
                return found
        for row in open_:
            links = slice(self.offsets[here[row]], self.offsets[here[row] + 1])
            weight = np.where(np.isin(self.targets[links], walked[row]), 0.0, self.weight[links])
            if weight.any():
                found[row] = rng.choice(self.targets[links], p=weight / weight.sum())
        return found


def neighbourhood(walker: Walker, share: float, seed: int) -> np.ndarray:
    """[n] bool: some pages and what is around them, breadth first, up to `share` of the pages that have links."""
    count, rng = len(walker.offsets) - 1, np.random.default_rng(seed)
    sources = np.repeat(np.arange(count), np.diff(walker.offsets))
    pairs = np.concatenate([np.stack([sources, walker.targets], 1), np.stack([walker.targets, sources], 1)])
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    first = np.searchsorted(pairs[:, 0], np.arange(count + 1))
    order = rng.permutation(np.unique(pairs[:, 0])).tolist()
    inside, taken, wanted = np.zeros(count, bool), 0, round(share * len(order))
    for start in order:
        waiting = deque([start])
        while waiting and taken < wanted:
            page = waiting.popleft()
            if not inside[page]:
                inside[page], taken = True, taken + 1
                waiting.extend(rng.permutation(pairs[first[page] : first[page + 1], 1]).tolist())
    return inside


def day_of(days: float) -> str | None:
    """The ISO day so many days after 1970 began; None for nan."""
    return None if np.isnan(days) else (EPOCH + datetime.timedelta(days=int(days))).isoformat()
