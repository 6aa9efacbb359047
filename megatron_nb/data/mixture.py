"""The order of the data: draw i is a pure function of (seed, i), so any step can be found again.

With weights, draws come in blocks of BLOCK. A block takes BLOCK equally spaced points of [0, 1), shifted by an offset of
its own, in random order; a point belongs to the source in whose share of [0, 1) it falls. Every block thus holds the
weights to one draw, and the count of a source before a block is a sum that needs no replay. The k-th draw of a source
is row k of its own endless sequence of epochs, each a fresh permutation.

Without weights all rows of all sources form one sequence: every row once per epoch.
"""

from __future__ import annotations

import difflib
import math

import numpy as np

BLOCK = 256
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it spread evenly over [0, 1), so rounding averages out over the blocks


def check_weights(weights: dict[str, float | None], names: list[str]) -> dict[str, float] | None:
    """The weights normalised to sum 1, or None when none is given. Raises ValueError for weights that mean nothing."""
    for name in weights:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            raise ValueError(
                f"weight for unknown source {name!r}: sources are {', '.join(names)}"
                + (f"; did you mean {near[0]!r}?" if near else "; remove it")
            )
    given = {name: weights.get(name) for name in names}
    missing = [name for name, weight in given.items() if weight is None]
    if len(missing) == len(names):
        return None
    if missing:
        raise ValueError(
            f"sources {', '.join(missing)} have no weight, others have: give every source a weight (0 leaves it out), or none"
        )
    for name, weight in given.items():
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(
                f"weight of source {name!r} is {weight}: weights are finite and not negative; 0 leaves a source out"
            )
    total = sum(given.values())
    if total <= 0:
        raise ValueError(f"weights of {', '.join(names)} sum to 0: at least one must be positive")
    return {name: weight / total for name, weight in given.items()}


class Mixture:
    """The endless order over sources of the given sizes.

    sizes: rows by source name. Raises ValueError for an empty source that would be drawn, and for wrong weights.
    """

    def __init__(
        self, sizes: dict[str, int], weights: dict[str, float | None] | None = None, seed: int = 1234, shuffle: bool = True
    ):
        self.names = list(sizes)
        self.sizes = np.array([sizes[name] for name in self.names], np.int64)
        self.seed, self.shuffle = seed, shuffle
        self._permutations: dict[int, dict[int, np.ndarray]] = {}
        self.weights = check_weights(weights or {}, self.names)
        for name, size in sizes.items():
            if not size and (self.weights is None or self.weights[name]):
                raise ValueError(
                    f"data source {name!r} has no rows left: it cannot be drawn; check its filters, or give it weight 0"
                )
        if self.weights:
            self._edges = np.cumsum([0.0] + [self.weights[name] for name in self.names])
            self._edges[-1] = 1.0
            self._before = np.zeros((1, len(self.names)), np.int64)  # [blocks + 1, sources] draws before each block

    def draws(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(source numbers, rows) of draws start .. stop - 1, both [stop - start] int64."""
        if not self.weights:
            flat = self._rows(-1, np.arange(start, stop), int(self.sizes.sum()))
            first = np.cumsum(self.sizes) - self.sizes
            sources = np.searchsorted(first + self.sizes, flat, "right")
            return sources, flat - first[sources]
        blocks = [self._block(number) for number in range(start // BLOCK, -(-stop // BLOCK))]
        skip = start % BLOCK
        sources = np.concatenate([block[0] for block in blocks] or [np.empty(0, np.int64)])[skip : skip + stop - start]
        turns = np.concatenate([block[1] for block in blocks] or [np.empty(0, np.int64)])[skip : skip + stop - start]
        rows = np.empty_like(turns)
        for source in np.unique(sources):
            mine = sources == source
            rows[mine] = self._rows(int(source), turns[mine], int(self.sizes[source]))
        return sources, rows

    def _block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, how often it was drawn before) of every draw of a block."""
        self._count_until(number)
        points = (self._generator(-2, number).permutation(BLOCK) + self._offset(number)) / BLOCK
        sources = np.searchsorted(self._edges, points, "right") - 1
        turns = np.empty(BLOCK, np.int64)
        for source in np.unique(sources):
            mine = sources == source
            turns[mine] = self._before[number, source] + np.arange(mine.sum())
        return sources, turns

    def _count_until(self, number: int) -> None:
        known = len(self._before) - 1
        if number < known:
            return
        blocks = np.arange(known, 2 * number + 1)  # doubled, so that growing by one block at a time stays cheap
        points = (np.arange(BLOCK) + self._offset(blocks)[:, None]) / BLOCK
        counts = np.stack([np.searchsorted(row, self._edges[1:]) for row in points])
        counts = np.diff(counts, axis=1, prepend=0)
        self._before = np.concatenate([self._before, self._before[-1] + np.cumsum(counts, axis=0)])

    def _offset(self, block: np.ndarray | int) -> np.ndarray:
        return (np.asarray(block) * GOLDEN + self._generator(-3, 0).random()) % 1

    def _rows(self, stream: int, turns: np.ndarray, size: int) -> np.ndarray:
        if not self.shuffle:
            return turns % size
        rows = np.empty(len(turns), np.int64)
        for epoch in np.unique(turns // size):
            mine = turns // size == epoch
            rows[mine] = self._permutation(stream, int(epoch), size)[turns[mine] % size]
        return rows

    def _permutation(self, stream: int, epoch: int, size: int) -> np.ndarray:
        """[size] the order of one epoch; of each sequence the latest two are kept."""
        kept = self._permutations.setdefault(stream, {})
        if epoch not in kept:
            if len(kept) == 2:
                del kept[min(kept)]
            kept[epoch] = self._generator(stream, epoch).permutation(np.arange(size, dtype=np.uint32))
        return kept[epoch]

    def _generator(self, stream: int, number: int) -> np.random.Generator:
        """A generator of its own for every (seed, stream, number); negative streams are the mixture's, others the sources'."""
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, stream + 3, number])))
