"""The memory plan beside what a training step really holds: tensor bytes counted one by one, and the process's memory.

    python tools/plan_measure.py [--model tiny] [--length 2048] [--recompute none] [--set num_layers=8 ...]

One process on a CPU builds the model and its optimizer and makes two updates of one pack. `counted` is the most bytes of
tensors alive at once, from every operator's outputs; `resident` the growth of the process (VmHWM) over its size before the
model was built. What operators allocate inside themselves and hand back before they return is in `resident` only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import re
import sys
import weakref
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron_nb.losses.next_token import NextToken
from megatron_nb.model.gpt import build, initialize_weights
from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel.topology import ParallelConfig, destroy, initialize
from megatron_nb.records import Batch
from megatron_nb.training import memory
from megatron_nb.training.optimizer import OptimizerConfig
from megatron_nb.training.trainer import Trainer

WARM_UP = dict(num_layers=1, hidden_size=32, num_attention_heads=2, num_query_groups=1, head_dim=16, ffn_hidden_size=64,
               vocab_size=128, max_position_embeddings=64, dtype="fp32")  # fmt: skip

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of mallopt(3)


class LiveBytes(TorchDispatchMode):
    """Bytes of the distinct storages that operators made and that are still alive; `peak` is the most so far."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self.note(value)
        return result

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes or storage.device.type == "meta":
            return
        self.sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


@dataclasses.dataclass
class Measured:
    """Bytes of one rank."""

    counted: float  # most tensor bytes alive at once
    held: float  # tensor bytes alive between two updates: weights, gradients, optimizer
    resident: float  # growth of the process's memory at its peak
    planned: memory.MemoryPlan


def one_document(length: int) -> Batch:
    """A pack that is one document, every token of it trained."""
    ids = torch.arange(length) % 97
    start, bounds = torch.zeros(length, dtype=torch.long), torch.tensor([0, length])
    return Batch(ids, ids.roll(-1), torch.ones(length), torch.arange(length), start, bounds, length, ["a"])


def measure(model: ModelConfig, parallel: ParallelConfig, length: int, micro_batches: int, updates: int = 2) -> Measured:
    """Run `updates` steps of `micro_batches` packs of `length` on this rank. torch.distributed may be up already."""
    place = initialize(parallel, seed=1)
    before = _status("VmRSS")
    _forget_peak()
    with LiveBytes() as live:
        chunks = build(model, parallel)
        initialize_weights(chunks, model, seed=1)
        gc.collect()
        _forget_peak()  # drawing weights is no part of training
        live.peak = live.now
        trainer = Trainer(chunks, OptimizerConfig(), place, num_steps=30, distributed_optimizer=parallel.distributed_optimizer)
        del chunks
        packs = [one_document(length)] * micro_batches
        for _ in range(updates):
            trainer.step(packs, NextToken())
        gc.collect()
    planned = memory.plan(model, parallel, place.world, length)
    return Measured(live.peak, live.now, _status("VmHWM") - before, planned)


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024


def give_back_what_is_free() -> None:
    """glibc keeps freed blocks of up to 32 MB for later; from here on it maps every tensor alone and hands it back."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        for name in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            ctypes.CDLL("libc.so.6").mallopt(name, 128 << 10)


def _forget_peak() -> None:
    """Set VmHWM back to VmRSS, where the kernel lets a process do that."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def shape_of(name: str, length: int, changes: list[str]) -> ModelConfig:
    """The model of hydra_conf/model/NAME.yaml with KEY=VALUE changes, long enough for `length`."""
    from tools.plan import model_named

    found = dataclasses.asdict(model_named(name))
    for change in changes:
        key, _, value = change.partition("=")
        if key not in found or not value:
            raise ValueError(f"--set {change}: must be KEY=VALUE with a key of the model section: {', '.join(found)}")
        found[key] = yaml.safe_load(value)
    return ModelConfig.from_dict({**found, "max_position_embeddings": max(length, found["max_position_embeddings"])})


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a file of hydra_conf/model")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the pack")
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes of the model")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    give_back_what_is_free()
    measure(ModelConfig(**WARM_UP), ParallelConfig(), 64, 1)  # loads what the first step loads, which is no tensor
    destroy()
    model = shape_of(options.model, options.length, options.set)
    found = measure(model, ParallelConfig(recompute=options.recompute), options.length, 1)
    print(f"planned\n{found.planned.table()}")
    total = found.planned.total
    print(f"counted  {found.counted / 1e9:.3f} GB, {found.counted / total - 1:+.1%} of the plan")
    print(f"resident {found.resident / 1e9:.3f} GB, {found.resident / total - 1:+.1%} of the plan")
    return 0


if __name__ == "__main__":
    sys.exit(main())
