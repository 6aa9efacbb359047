"""Samples -> Batch: documents laid end to end, filled up, and shifted. The only place that shifts.

T tokens of a pack, S documents in it. The numpy half (`lay_out`, `join`) runs in worker processes, which never load torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_nb.records import STREAMS, Batch, Sample

if TYPE_CHECKING:
    import torch

FILL = {"turn_id": -1}  # of a stream where there is no target; 0 for the others
TENSORS = ("ids", "targets", "loss_weight", "index", "start", "cu_seqlens")  # of a Batch
Arrays = dict[str, np.ndarray]


def pack(
    samples: Sequence[Sample], length: int | None = None, multiple: int = 1, streams: Sequence[str] | None = None
) -> Batch:
    """One pack of these samples, each a document of its own, filled up with one document of weight 0.

    length: T; None: the smallest multiple of `multiple` that holds the samples.
    streams: what to carry besides loss_weight; None: what the first sample has. A value that is not finite is replaced by
    the fill where its weight is 0. Raises ValueError where the weight is not 0, and for samples that do not fit.
    """
    arrays = lay_out(samples, length, multiple, streams)
    packed = batch(arrays, names(samples, arrays))
    if any(sample.count is not None for sample in samples):
        packed.count = sum(trained(sample) if sample.count is None else sample.count for sample in samples)
    packed.shared = shared_prefixes(samples, arrays["cu_seqlens"].tolist())
    return packed


def shared_prefixes(samples: Sequence[Sample], bounds: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Batch.shared of samples at these bounds: each run of documents that go on from the one before the run."""
    runs, of, end = [], 0, 0
    for sample, first, stop in zip(samples, bounds, bounds[1:]):
        if not sample.prefix:
            of, end = first, stop
            continue
        assert sample.prefix == end - of, f"sample {sample.sample_id} goes on from {sample.prefix} tokens, found {end - of}"
        if runs and runs[-1][1:] == (first, of, end):
            first = runs.pop()[0]
        runs.append((first, stop, of, end))
    return runs


def trained(sample: Sample) -> int:
    """Targets of the sample that are trained: its first token is never one."""
    return int(np.count_nonzero(sample.loss_weight[1:]))


def names(samples: Sequence[Sample], arrays: Arrays) -> list[str]:
    """Sample ids by document, "" for the fill."""
    return [sample.sample_id for sample in samples] + [""] * (len(arrays["cu_seqlens"]) - 1 - len(samples))


def lay_out(
    samples: Sequence[Sample], length: int | None = None, multiple: int = 1, streams: Sequence[str] | None = None
) -> Arrays:
    """The arrays of `pack`: TENSORS and the streams by name, all [T] but cu_seqlens [S + 1]."""
    used = sum(map(len, samples))
    if length is None:
        length = max(-(-used // multiple), 1) * multiple
    if length % multiple:
        raise ValueError(
            f"seq_len={length} must be a multiple of {multiple}: context and tensor parallelism cut every pack evenly"
        )
    if used > length:
        raise ValueError(
            f"{len(samples)} samples of {used} tokens do not fit a pack of {length}: a sample is never split; plan by length"
        )
    if streams is None:
        streams = [name for name in STREAMS[1:] if samples and getattr(samples[0], name) is not None]
    lengths = [len(sample) for sample in samples] + [length - used] * (used < length)
    cu_seqlens = np.cumsum([0, *lengths])
    ids, targets, weight = np.zeros(length, np.int64), np.zeros(length, np.int64), np.zeros(length, np.float32)
    carried = {name: np.full(length, FILL.get(name, 0), np.int32 if name == "turn_id" else np.float32) for name in streams}
    for sample, begin in zip(samples, cu_seqlens):
        end = begin + len(sample)
        ids[begin:end] = sample.ids
        targets[begin : end - 1] = sample.ids[1:]  # the last token has no target: not the next document's first
        weight[begin : end - 1] = _weight(sample)[1:]
        for name, stream in carried.items():
            stream[begin : end - 1] = _stream(sample, name)[1:]
    start = np.repeat(cu_seqlens[:-1], lengths)
    fixed = {"ids": ids, "targets": targets, "loss_weight": weight, "index": np.arange(length), "start": start}
    return fixed | {"cu_seqlens": cu_seqlens} | carried


def _weight(sample: Sample) -> np.ndarray:
    weight = np.asarray(sample.loss_weight, np.float32)
    if len(weight) != len(sample):
        raise ValueError(
            f"sample {sample.sample_id}: loss_weight has {len(weight)} values for {len(sample)} tokens: both are equally long"
        )
    if len(broken := np.flatnonzero(~np.isfinite(weight))):
        at = broken[0]
        raise ValueError(
            f"sample {sample.sample_id}: loss_weight[{at}]={weight[at]}: weights must be finite; mend what wrote them"
        )
    return weight


def _stream(sample: Sample, name: str) -> np.ndarray:
    """[L] the stream, finite: values that are not are dropped where untrained and refused where trained."""
    values = getattr(sample, name)
    if values is None or len(values) != len(sample):
        have = "is missing" if values is None else f"has {len(values)} values"
        raise ValueError(
            f"sample {sample.sample_id}: {name} {have} for {len(sample)} tokens: the samples of a pack carry the same streams"
        )
    values = np.asarray(values)
    broken = ~np.isfinite(values)
    if len(trained := np.flatnonzero(broken & (np.asarray(sample.loss_weight) != 0))):
        at = trained[0]
        raise ValueError(
            f"sample {sample.sample_id}: {name}[{at}]={values[at]} on a trained token: it must be finite; the step is refused"
        )
    return np.where(broken, FILL.get(name, 0), values)


def join(packs: Sequence[Arrays]) -> Arrays:
    """Packs one after another: positions and bounds move on, everything else is concatenated."""
    assert all(arrays.keys() == packs[0].keys() for arrays in packs), "packs of one micro-batch carry the same streams"
    shift = np.cumsum([0] + [len(arrays["ids"]) for arrays in packs])
    moved = {name: [arrays[name] + by for arrays, by in zip(packs, shift)] for name in ("index", "start", "cu_seqlens")}
    moved["cu_seqlens"][1:] = [bounds[1:] for bounds in moved["cu_seqlens"][1:]]
    return {name: np.concatenate(moved.get(name) or [arrays[name] for arrays in packs]) for name in packs[0]}


def batch(arrays: Arrays, sample_ids: list[str]) -> Batch:
    """The arrays as tensors that share their memory."""
    import torch

    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return assemble(tensors, int(np.count_nonzero(arrays["loss_weight"])), sample_ids)


def assemble(tensors: dict[str, torch.Tensor], count: int, sample_ids: list[str]) -> Batch:
    """A Batch of TENSORS and streams by name."""
    streams = {name: tensor for name, tensor in tensors.items() if name not in TENSORS}
    return Batch(**{name: tensors[name] for name in TENSORS}, count=count, sample_ids=sample_ids, streams=streams)


def collate(batches: Sequence[Batch]) -> Batch:
    """Whole packs on the host, one after another as one micro-batch: [sum of T]."""
    arrays = [
        {name: getattr(part, name).numpy() for name in TENSORS}
        | {name: stream.numpy() for name, stream in part.streams.items()}
        for part in batches
    ]
    return batch(join(arrays), [name for part in batches for name in part.sample_ids])
