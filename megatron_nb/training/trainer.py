"""The update: packs -> megatron-core's schedule -> gradients -> optimizer. Blind to the algorithm: the loss is an argument.

Every rank of a model copy passes the same whole packs; the split over context ranks happens here. A loss object says what
it wants of the model (see losses/) and is called as `loss(output, batch) -> (sum, integer count, metrics)`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_nb.model.attention import bounds
from megatron_nb.model.heads import head_for
from megatron_nb.model.hf import LiveWeights
from megatron_nb.model.sharding import bare
from megatron_nb.parallel.context import split
from megatron_nb.parallel.topology import Topology, everywhere
from megatron_nb.records import Batch
from megatron_nb.training.optimizer import OptimizerConfig, optimize, sync_parameters, update

log = logging.getLogger(__name__)


@dataclass
class StepResult:
    """What one update did. Sums are over the whole world; `skipped` names the samples of a refused step."""

    loss: float  # sum / count
    count: int
    metrics: dict[str, float]  # every metric's sum / count
    grad_norm: float
    lr: float
    skipped: list[str] | None = None
    layer_norms: dict[str, float] = field(default_factory=dict)  # gradient norm by layer, on request


def check_loss_result(result: Any) -> None:
    """A loss that returns (sum, metrics) makes core divide by micro-batches and see no tokens at all: refuse it."""
    if not isinstance(result, tuple) or len(result) != 3:
        found = len(result) if isinstance(result, tuple) else type(result).__name__
        raise ValueError(
            f"a loss must return (sum, count, metrics), found {found}: with two values megatron-core counts zero tokens"
        )
    if not isinstance(result[1], int):
        raise ValueError(f"a loss must return an integer count, found {result[1]!r}: fractions belong into loss_weight")


def culprits(batch: Batch, output: Any) -> list[str]:
    """Samples with a trained token whose output [t] is not finite; all samples of the pack when that does not tell."""
    values = output[0] if isinstance(output, tuple) else output
    if values.shape == batch.loss_weight.shape:
        at = batch.index[(batch.loss_weight != 0) & ~values.isfinite()]
        documents = torch.searchsorted(batch.cu_seqlens, at, right=True) - 1
        if len(documents):
            return [batch.sample_ids[d] for d in documents.unique().tolist()]
    return batch.sample_ids


class Trainer:
    """Owns the model chunks of this rank and their optimizer."""

    def __init__(
        self, chunks: list, config: OptimizerConfig, topology: Topology, num_steps: int, *, distributed_optimizer: bool = True
    ):
        self.topology = topology
        self.chunks, self.optimizer, self.scheduler = optimize(
            chunks, config, num_steps=num_steps, distributed_optimizer=distributed_optimizer
        )
        self.model, self.parallel = bare(self.chunks[0]).settings

    # ------------------------------------------------------------------ one pass over packs
    def _forward(self, loss: Any, found: list, iterator, chunk):
        """Forward of one micro-batch on one chunk; core calls the returned function on the last stage only."""
        batch: Batch = next(iterator)
        head, request = head_for(loss, batch, self.model.vocab_size)
        output = chunk(
            batch.ids[None], None, None,
            labels=batch.targets[None], packed_seq_params=bounds(batch),
            output_processor=head, output_processor_context=request,
        )  # fmt: skip

        def reduce(values):
            result = loss(values, batch)
            check_loss_result(result)
            total, count, metrics = result
            found.append((batch, total.detach(), count, metrics, values))
            return total, torch.tensor(count, dtype=torch.int, device=total.device), metrics

        return output, reduce

    def _run(self, packs: list[Batch], loss: Any, forward_only: bool) -> list:
        """Core's schedule over this data rank's packs. Returns the last stage's findings (empty elsewhere)."""
        t, found = self.topology, []
        local = [split(pack, t.context_size, t.context_rank).to(t.device) for pack in packs]
        lengths = {pack.pack_length for pack in packs}
        assert len(lengths) == 1, f"packs of one step must be equally long, found {sorted(lengths)}"
        iterators = [iter(local) for _ in self.chunks]  # every stage and virtual chunk reads its own copy
        one = len(self.chunks) == 1
        get_forward_backward_func()(
            forward_step_func=partial(self._forward, loss, found),
            data_iterator=iterators[0] if one else iterators,
            model=self.chunks[0] if one else self.chunks,
            num_microbatches=len(packs),
            seq_length=lengths.pop(),  # the whole pack: core divides by context, then by tensor ranks
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return found

    def _totals(self, found: list) -> tuple[float, int, dict[str, float], bool]:
        """World-wide loss sum, count, metric sums, and whether every micro-batch's loss was finite; on every rank."""
        names: list = [sorted(found[0][3]) if found else None]
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        stages = parallel_state.get_pipeline_model_parallel_group()
        if self.topology.pipeline_size > 1:
            dist.broadcast_object_list(names, src=source, group=stages)
        row = torch.zeros(3 + len(names[0]), dtype=torch.float64, device=self.topology.device)
        for _, total, count, metrics, _ in found:
            finite = bool(torch.isfinite(total))
            row[0] += total if finite else 0.0
            row[1] += count
            row[2] += not finite
            for column, name in enumerate(names[0], 3):
                row[column] += torch.nan_to_num(metrics[name].double())
        dist.all_reduce(row, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        if self.topology.pipeline_size > 1:
            dist.broadcast(row, src=source, group=stages)
        values = row.tolist()
        return values[0], round(values[1]), dict(zip(names[0], values[3:])), values[2] == 0

    # ------------------------------------------------------------------ what jobs call
    def gradients(self, packs: list[Batch], loss: Any) -> tuple[float, int, dict[str, float], list, bool]:
        """Forward and backward of one global batch: gradients of sum / count lie in the buffers afterwards."""
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        found = self._run(packs, loss, forward_only=False)
        total, count, metrics, finite = self._totals(found)
        return total, count, metrics, found, finite

    def step(self, packs: list[Batch], loss: Any, layer_norms: bool = False) -> StepResult:
        """One update. A step whose loss or gradient is not finite changes nothing and names its samples."""
        total, count, metrics, found, finite = self.gradients(packs, loss)
        lr = self.optimizer.param_groups[0]["lr"]
        divisor = max(count, 1)
        if count == 0:
            log.warning("no trained token in this step: every target of %s ... is masked", self._samples(packs)[:8])
        means = {name: value / divisor for name, value in metrics.items()}
        done = update(self.optimizer, self.scheduler, self.chunks, layer_norms) if finite else None
        if done is None or not done.applied:
            broken = [finding for finding in found if not torch.isfinite(finding[1])]
            named = self._everywhere([i for batch, *_, output in broken for i in culprits(batch, output)])
            return StepResult(
                total / divisor, count, means, float("nan"), lr, skipped=named or self._everywhere(self._samples(packs))
            )
        return StepResult(total / divisor, count, means, done.grad_norm, lr, layer_norms=done.layer_norms)

    @staticmethod
    def _samples(packs: list[Batch]) -> list[str]:
        return [sample_id for pack in packs for sample_id in pack.sample_ids if sample_id]

    def _everywhere(self, named: list[str]) -> list[str]:
        """The union over all ranks, sorted."""
        return sorted({i for part in everywhere(named) for i in part if i})

    def weights(self) -> LiveWeights:
        """The weights after the last update, for an engine or an export; they follow later updates."""
        sync_parameters(self.chunks)
        return LiveWeights([bare(chunk) for chunk in self.chunks], self.model)

    def _ready_for_reading(self) -> None:
        sync_parameters(self.chunks)
        for chunk in self.chunks:
            chunk.eval()

    @torch.no_grad()
    def evaluate(self, packs: list[Batch], loss: Any) -> tuple[float, int]:
        """Loss sum and count over the world, without gradients."""
        self._ready_for_reading()
        total, count, _, _ = self._totals(self._run(packs, loss, forward_only=True))
        return total, count

    @torch.no_grad()
    def logprobs(self, packs: list[Batch], loss: Any) -> list[torch.Tensor]:
        """[T] log-probability of every trained target of every pack (0 elsewhere), in pack order, on every rank."""
        self._ready_for_reading()
        found = self._run(packs, loss, forward_only=True)
        whole = torch.zeros(len(packs), packs[0].pack_length, device=self.topology.device)
        for row, (batch, *_, logprob) in zip(whole, found):
            row[batch.index] = (logprob[0] if isinstance(logprob, tuple) else logprob).float()
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        if self.topology.pipeline_size > 1:
            dist.broadcast(
                whole,
                src=parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        return list(whole)
