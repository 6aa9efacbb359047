"""Steps of micro-batches for one data-parallel rank, read and packed ahead by NVIDIA DALI.

Everything is a function of the step: the plan says which draws form pack k, step s takes packs s * global_batch_size and
following, and rank and micro-batch divide them. So the saved state is the consumed position (what is prefetched is
simply made again), any step can be replayed, and the number of ranks may change on resume.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from megatron_nb.data import packing
from megatron_nb.data.dataset import Dataset
from megatron_nb.data.feed import STREAMS, Feed, Layout
from megatron_nb.data.fingerprint import same_data
from megatron_nb.data.packing import TENSORS
from megatron_nb.data.plan import Plan
from megatron_nb.data.sources import DataConfig
from megatron_nb.data.spawn import light_start
from megatron_nb.records import Batch


@dataclass
class Seen:
    """What one source has given to the steps so far."""

    samples: int = 0
    tokens: int = 0
    trained: int = 0


@dataclass
class StepSize:
    """Size of one global step without any fill: what throughput is counted in."""

    samples: int
    tokens: int
    squares: int  # sum of len_i^2, which attention is proportional to
    trained: int


class Loader:
    """Iterator over the training steps: `next(loader)` is the list of this rank's micro-batches.

    device: a CUDA device to have the batches prefetched to, through pinned memory; None leaves them on the host.
    state: of `state()`, to continue right after the step it was taken at. Raises ValueError when the data changed since,
    unless config.changed is "restart".
    """

    def __init__(
        self,
        dataset: Dataset,
        config: DataConfig,
        *,
        global_batch_size: int,
        micro_batch_size: int = 1,
        data_rank: int = 0,
        data_size: int = 1,
        multiple: int = 1,
        micro_multiple: int = 1,
        device: torch.device | None = None,
        state: dict[str, Any] | None = None,
    ):
        self.dataset, self.device, self.workers = dataset, device, config.loader_workers
        self.layout = Layout(global_batch_size, micro_batch_size, data_rank, data_size, multiple, micro_multiple)
        self.fingerprint = dataset.fingerprint() | {"global_batch_size": str(global_batch_size), "packing": str(config.packing)}
        self.fingerprint |= {"lookahead": str(config.lookahead)} if config.packing else {}
        self.step, self.origin = 0, 0  # next step; step at which the order of the data began
        self.seen = {name: Seen() for name in dataset.caches}
        snapshot = self._restore(state, config.changed) if state else None
        self.plan = Plan(dataset.lengths, dataset.seq_len, None, config.packing, config.lookahead, snapshot)
        self._feed = Feed(dataset, self.plan, self.layout, self.step - self.origin)
        self._pipeline: Any = None

    def _restore(self, state: dict[str, Any], changed: str) -> Any:
        """Takes over a saved position; the plan's snapshot, or None where the order begins anew."""
        self.step, self.origin = state["step"], state["origin"]
        if not same_data(self.step, state["data"], self.fingerprint, changed):
            self.origin = self.step
            return None
        self.seen |= {name: Seen(**seen) for name, seen in state["seen"].items()}
        return state["plan"]

    def state(self) -> dict[str, Any]:
        """The consumed position (never the prefetched one), as plain values."""
        return {
            "step": self.step,
            "origin": self.origin,
            "data": self.fingerprint,
            "seen": {name: asdict(seen) for name, seen in self.seen.items()},
            "plan": self.plan.snapshot((self.step - self.origin) * self.layout.packs),
        }

    @property
    def micro_batches(self) -> int:
        """Micro-batches a step and rank."""
        return self.layout.micro_batches()

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        if self._pipeline is None:
            self._pipeline = _pipeline(self._feed, self.workers, self.device)
        outputs = self._pipeline.run()
        batches = [self._batch([column[micro] for column in outputs]) for micro in range(self.micro_batches)]
        self._count()
        self.step += 1
        return batches

    def batch(self, step: int) -> list[Batch]:
        """The micro-batches of any step since the order began, made again on the host."""
        return [_on_host(self._feed, step - self.origin, micro) for micro in range(self.micro_batches)]

    def size(self, step: int) -> StepSize:
        """Size of this step over all data ranks."""
        _, tokens, trained = self.dataset.sizes(self._draws(step))
        return StepSize(len(tokens), int(tokens.sum()), int((tokens**2).sum()), int(trained.sum()))

    def close(self) -> None:
        """Ends the worker processes."""
        self._pipeline = None
        gc.collect()  # DALI ends them when it is collected

    def _draws(self, step: int) -> list[int]:
        first = (step - self.origin) * self.layout.packs
        return [draw for number in range(first, first + self.layout.packs) for draw in self.plan.pack(number)]

    def _count(self) -> None:
        sources, tokens, trained = self.dataset.sizes(self._draws(self.step))
        for number, seen in enumerate(self.seen[name] for name in self.dataset.caches):
            mine = sources == number
            seen.samples += int(mine.sum())
            seen.tokens += int(tokens[mine].sum())
            seen.trained += int(trained[mine].sum())

    def _batch(self, columns: list[Any]) -> Batch:
        """DALI's outputs for one micro-batch, copied out of the buffers it will use again."""
        *arrays, count, draws = columns
        tensors = [torch.from_dlpack(array).clone() if self.device else torch.from_numpy(np.array(array)) for array in arrays]
        named = dict(zip((*TENSORS, *STREAMS), tensors, strict=True))
        return packing.assemble(named, int(np.array(count)[0]), self._feed.names(np.array(draws)))


def _on_host(feed: Feed, step: int, micro: int) -> Batch:
    arrays, draws = feed.micro_batch(step, micro)
    return packing.batch(arrays, feed.names(draws))


def _pipeline(feed: Feed, workers: int, device: torch.device | None) -> Any:
    """A DALI pipeline whose run() gives the micro-batches of one step. (The device branch needs CUDA; not run without.)"""
    from nvidia.dali import fn, pipeline_def, types

    special = {"loss_weight": types.FLOAT, "turn_id": types.INT32}
    kinds = [special.get(name, types.INT64) for name in (*TENSORS, *STREAMS, "count", "draws")]
    parallel = {"parallel": True, "prefetch_queue_depth": 2} if workers else {}

    @pipeline_def(
        batch_size=feed.layout.micro_batches(),
        num_threads=1,
        device_id=None if device is None else device.index or 0,
        prefetch_queue_depth=2,
        py_num_workers=max(workers, 1),
        py_start_method="spawn",
    )
    def steps() -> tuple[Any, ...]:
        outputs = fn.external_source(
            source=feed, num_outputs=len(kinds), batch=False, dtype=kinds, ndim=[1] * len(kinds), **parallel
        )
        if device is None:
            return tuple(outputs)
        return (*(output.gpu() for output in outputs[:-2]), *outputs[-2:])  # count and draws are read on the host

    built = steps()
    with light_start():
        built.build()
    return built


class Validation:
    """One pass over a finite data set: every item once, the tail too. Iterates over this rank's micro-batches."""

    def __init__(
        self,
        dataset: Dataset,
        config: DataConfig,
        *,
        micro_batch_size: int = 1,
        data_rank: int = 0,
        data_size: int = 1,
        multiple: int = 1,
        micro_multiple: int = 1,
    ):
        plan = Plan(dataset.lengths, dataset.seq_len, dataset.size, config.packing, config.lookahead)
        self.layout = Layout(len(plan), micro_batch_size, data_rank, data_size, multiple, micro_multiple)
        self._feed = Feed(dataset, plan, self.layout)

    def __len__(self) -> int:
        return self.layout.micro_batches()

    def __iter__(self) -> Iterator[Batch]:
        return (_on_host(self._feed, 0, micro) for micro in range(len(self)))
