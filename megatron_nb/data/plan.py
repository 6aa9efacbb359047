"""Which samples share a pack: never split, nearly full, nearly in the order of the mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

BLOCK = 256  # packs between two remembered states of a Plan
Snapshot = tuple[int, list[int]]  # (next draw to fetch, draws fetched and not packed yet)


def choose(lengths: Sequence[int], cap: int) -> list[int]:
    """Positions of the samples of one pack, at most `cap` tokens, from samples in the order in which they should go.

    The first always goes in, the next ones follow in order while they leave room for one of mean length; that last
    stretch takes the single sample or the pair that fills it best, the oldest among equals. (An own rule: best fit
    over pairs passes 99 % at 16 times the median length, and a sample that is passed over stays first in line.)
    """
    room, chosen = cap - lengths[0], [0]
    assert room >= 0, f"a sample of {lengths[0]} tokens in a plan for {cap}"
    reserve = sum(lengths) / len(lengths)
    for place, size in enumerate(lengths[1:], 1):
        if room <= reserve:
            break
        if room - size >= reserve:
            room -= size
            chosen.append(place)
    sizes = np.asarray(lengths)
    free = np.ones(len(sizes), bool)
    free[chosen] = False
    while len(fitting := np.flatnonzero(free & (sizes <= room))):
        best = _best(sizes, fitting, room)
        chosen += best
        free[best] = False
        room -= int(sizes[best].sum())
    return sorted(chosen)


def _best(sizes: np.ndarray, fitting: np.ndarray, room: int) -> list[int]:
    """The one or two of `fitting` whose sizes come closest to `room` from below."""
    order = fitting[np.lexsort((-fitting, sizes[fitting]))]  # by size; among equals the oldest last
    ascending = sizes[order]
    partner = np.searchsorted(ascending, room - ascending, "right") - 1  # the largest that still fits beside it
    partner = np.where(partner == np.arange(len(order)), partner - 1, partner)
    pair = np.where(partner >= 0, ascending + ascending[partner], 0)
    if ascending[-1] >= pair.max():
        return [int(order[-1])]
    ties = np.flatnonzero(pair == pair.max())
    tie = ties[np.maximum(order[ties], order[partner[ties]]).argmin()]
    return [int(order[tie]), int(order[partner[tie]])]


class Plan:
    """Which draws form pack k, for an order of draws given by their lengths. The same for every rank and every resume.

    lengths: (start, stop) -> [stop - start] tokens of these draws, each at most `cap`.
    total: number of draws, None for an endless order.
    lookahead: samples beyond those that fill the pack in order, to choose its last ones from.
    snapshot: of an earlier Plan over the same draws; without it, pack k is reached by planning all packs before it.
    """

    def __init__(
        self,
        lengths: Callable[[int, int], np.ndarray],
        cap: int,
        total: int | None = None,
        packing: bool = True,
        lookahead: int = 512,
        snapshot: tuple[int, Snapshot] | None = None,
    ):
        self._lengths, self._cap, self._total, self._packing, self._lookahead = lengths, cap, total, packing, lookahead
        self._states: dict[int, Snapshot] = {0: (0, [])}  # before each block
        self._blocks: dict[int, list[list[int]]] = {}
        if snapshot:
            block, (following, waiting) = snapshot
            self._states[block] = (following, list(waiting))

    def pack(self, number: int) -> list[int]:
        """Draws of this pack in order; [] past the end."""
        if not self._packing:
            return [number] if self._total is None or number < self._total else []
        packs = self._block(number // BLOCK)
        return packs[number % BLOCK] if number % BLOCK < len(packs) else []

    def snapshot(self, number: int) -> tuple[int, Snapshot]:
        """(block, state before it) of the last remembered state up to this pack."""
        block = max(known for known in self._states if known <= number // BLOCK)
        return block, self._states[block]

    def __len__(self) -> int:
        """Packs of a finite order."""
        assert self._total is not None, "an endless plan has no length"
        if not self._packing:
            return self._total
        block = 0
        while len(self._block(block)) == BLOCK:
            block += 1
        return block * BLOCK + len(self._block(block))

    def _block(self, number: int) -> list[list[int]]:
        if number not in self._blocks:
            begin = max(known for known in self._states if known <= number)
            for block in range(begin, number + 1):
                self._blocks[block], self._states[block + 1] = self._plan(*self._states[block])
                self._blocks.pop(block - 2, None)  # steps are asked for nearly in order: the latest are enough
        return self._blocks[number]

    def _window(self, sizes: list[int]) -> int:
        """Samples to choose from: as many as fill a pack in order, and `lookahead` more."""
        return int(np.searchsorted(np.cumsum(sizes), self._cap)) + self._lookahead

    def _plan(self, following: int, waiting: list[int]) -> tuple[list[list[int]], Snapshot]:
        """The packs of one block and the state after it."""
        waiting = list(waiting)
        sizes = self._lengths(waiting[0], waiting[-1] + 1)[np.subtract(waiting, waiting[0])].tolist() if waiting else []
        packs: list[list[int]] = []
        while len(packs) < BLOCK:
            while len(waiting) < (window := self._window(sizes)) and following != self._total:
                stop = following + window
                stop = stop if self._total is None else min(stop, self._total)
                sizes += self._lengths(following, stop).tolist()
                waiting += range(following, stop)
                following = stop
            if not waiting:
                break
            chosen = choose(sizes[:window], self._cap)
            packs.append([waiting[place] for place in chosen])
            for place in reversed(chosen):
                del waiting[place], sizes[place]
        return packs, (following, waiting)
