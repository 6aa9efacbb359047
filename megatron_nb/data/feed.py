"""The worker's half of the loader: micro-batches by number, as numpy arrays. Never loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_nb.data.dataset import Dataset
from megatron_nb.data.packing import TENSORS, Arrays, join, lay_out
from megatron_nb.data.plan import Plan
from megatron_nb.data.spawn import die_with_parent

STREAMS = ("turn_id",)  # what supervised samples carry besides loss_weight
FILL_DRAW = -1  # stands for the document that fills a pack


@dataclass
class Layout:
    """How the packs of a step fall to the data ranks and their micro-batches."""

    packs: int  # per step, over all ranks
    micro_batch_size: int = 1  # packs per micro-batch
    data_rank: int = 0
    data_size: int = 1
    multiple: int = 1  # that a pack's length is a multiple of
    micro_multiple: int = 1  # that the number of micro-batches is a multiple of (pipeline stages, when interleaved)

    def micro_batches(self) -> int:
        """Per rank: the same on every rank, the last ones filled up with packs of weight 0."""
        needed = -(-self.packs // (self.data_size * self.micro_batch_size))
        return -(-needed // self.micro_multiple) * self.micro_multiple

    def places(self, micro: int) -> list[int | None]:
        """Packs (counted within the step) of one micro-batch of this rank; None for fill."""
        first = (micro * self.data_size + self.data_rank) * self.micro_batch_size
        return [place if place < self.packs else None for place in range(first, first + self.micro_batch_size)]


class Feed:
    """Micro-batches of one data rank. Pickles small: a worker process opens the caches and plans for itself."""

    def __init__(self, dataset: Dataset, plan: Plan, layout: Layout, first_step: int = 0):
        self.dataset, self.plan, self.layout, self.first_step = dataset, plan, layout, first_step
        self._arrived = False

    def micro_batch(self, step: int, micro: int) -> tuple[Arrays, np.ndarray]:
        """The arrays of a micro-batch and the draw of each of its documents; `step` counts from the order's beginning."""
        packs, draws = [], []
        for place in self.layout.places(micro):
            drawn = [] if place is None else self.plan.pack(step * self.layout.packs + place)
            packs.append(lay_out(self.dataset.samples(drawn), self.dataset.seq_len, self.layout.multiple, STREAMS))
            draws += drawn + [FILL_DRAW] * (len(packs[-1]["cu_seqlens"]) - 1 - len(drawn))
        return join(packs), np.array(draws, np.int64)

    def names(self, draws: np.ndarray) -> list[str]:
        """Sample ids by document, "" for fill."""
        found = iter(self.dataset.names(draws[draws != FILL_DRAW].tolist()))
        return ["" if draw == FILL_DRAW else next(found) for draw in draws]

    def __call__(self, info: Any) -> tuple[np.ndarray, ...]:
        """DALI's source: arrays of the micro-batch with this running number, its count, its draws."""
        if self._arrived:
            die_with_parent()
            self._arrived = False
        step, micro = divmod(info.idx_in_epoch, self.layout.micro_batches())
        arrays, draws = self.micro_batch(self.first_step + step, micro)
        return *(arrays[name] for name in (*TENSORS, *STREAMS)), np.array([np.count_nonzero(arrays["loss_weight"])]), draws

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_arrived": True}  # in another process
