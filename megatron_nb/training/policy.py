"""The policy update: rows of one batch of rollouts -> several updates, and what happened in them.

    samples -> old and reference log-probs -> mini-batches of whole rollouts -> balanced packs -> trainer.step

Every rank passes the same samples. With one update a batch the ratio is 1 and nothing is recomputed; with more, the trainer's
log-probs before the first of them are taken once and reused. Mini-batches are the same whatever the layout.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_nb.data.balance import balanced
from megatron_nb.losses.next_token import NextToken
from megatron_nb.losses.policy_gradient import PolicyConfig, PolicyGradient
from megatron_nb.records import Batch, Sample
from megatron_nb.training.reference import Reference
from megatron_nb.training.trainer import StepResult, Trainer

log = logging.getLogger(__name__)

MEANS = {  # our name -> the loss's sum, to be divided by its tokens
    "ratio_mean": "ratio",
    "clip_low": "clip_low",
    "clip_high": "clip_high",
    "clip_dual": "clip_dual",
    "kl_ref": "kl",
    "kl_old": "kl_old",
    "entropy": "entropy",
    "importance_mean": "importance",
    "importance_capped": "importance_capped",
    "mismatch_abs": "mismatch_abs",
    "mismatch_kl": "mismatch_kl",
}
SPREADS = {"ratio_std": ("ratio", "ratio_squared"), "importance_std": ("importance", "importance_squared")}


@dataclass
class UpdateConfig:
    """How one batch of rollouts is used."""

    epochs: int = 1  # passes over the batch
    mini_batches: int = 1  # updates in a pass
    pack_tokens: int = 32768  # of a micro-batch at most; a row must fit
    share_prompts: bool = True  # a group's prompt is computed once a pack, not once an answer; not under context parallelism
    entropy_floor: float | None = 0.05  # nats a token; below it a warning, and entropy_collapsed = 1 in the log

    def __post_init__(self):
        for name in ("epochs", "mini_batches", "pack_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"update.{name}={getattr(self, name)} must be at least 1")

    @property
    def updates(self) -> int:
        """Updates of a batch: what the learning-rate schedule counts."""
        return self.epochs * self.mini_batches


class Policy:
    """The model as it is trained by rollouts."""

    def __init__(
        self, trainer: Trainer, loss: PolicyConfig, config: UpdateConfig, reference: Reference | None = None
    ) -> None:
        if (loss.kl is None) != (reference is None):
            found = "without a reference" if reference is None else "with a reference"
            raise ValueError(f"policy.kl={loss.kl} {found}: the KL term needs one, nothing else reads it")
        self.trainer, self.config, self.reference = trainer, config, reference
        self.loss = PolicyGradient(loss, parallel_state.get_context_parallel_group())
        self._reading = NextToken()

    # ------------------------------------------------------------------ what jobs call
    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """All updates of one batch; means over its trained tokens. Refused updates are counted and their samples logged."""
        if not samples:
            log.warning("no rollout of this step trains anything: no update")
            return {"updates": 0.0}
        self._complete(samples)
        results = []
        for _ in range(self.config.epochs):
            for part in mini_batches(samples, self.config.mini_batches):
                result = self.trainer.step(self.packs(part), self.loss)
                if result.skipped:
                    log.error("an update was refused: not finite; samples %s", ", ".join(result.skipped[:32]))
                results.append(result)
        return self._told(results)

    def logprobs(self, samples: Sequence[Sample], stream: str = "old_logprob", temperature: float | None = None) -> None:
        """Write the log-prob of every trained token, by the live weights, onto the samples; at the sampling temperature."""
        packs = self.packs(samples)
        self._reading.temperature = self.loss.config.temperature if temperature is None else temperature
        place = {sample.sample_id: i for i, sample in enumerate(samples)}
        assert len(place) == len(samples), "sample ids of a batch are unique"
        ends = np.cumsum([0, *map(len, samples)])
        flat = torch.zeros(int(ends[-1]), device=self.trainer.topology.device)
        for batch, row in zip(packs, self.trainer.logprobs(packs, self._reading)):
            bounds = batch.cu_seqlens.tolist()
            for sample_id, start, stop in zip(batch.sample_ids, bounds, bounds[1:]):
                if sample_id:  # a pack's position t is about the token after it; a shared prompt is not in the document
                    end, tokens = ends[place[sample_id] + 1], stop - start - 1
                    flat[end - tokens : end] = row[start : stop - 1]
        dist.all_reduce(flat, group=parallel_state.get_data_parallel_group())
        values = flat.cpu().numpy()
        for sample, begin, end in zip(samples, ends, ends[1:]):
            setattr(sample, stream, values[begin:end].copy())

    def probe(self, ids: list[int], start: int, temperature: float) -> list[float]:
        """Log-probs of ids[start:] by the live weights: what an engine's are compared with. Collective."""
        sample = Sample(np.asarray(ids, np.int64), (np.arange(len(ids)) >= start).astype(np.float32), "probe")
        self.logprobs([sample], temperature=temperature)
        return sample.old_logprob[start:].tolist()

    def packs(self, samples: Sequence[Sample]) -> list[Batch]:
        """This data rank's balanced micro-batches."""
        t = self.trainer
        return balanced(
            samples,
            data_rank=t.topology.data_rank,
            data_size=t.topology.data_size,
            max_tokens=self.config.pack_tokens,
            attention_length=12 * t.model.hidden_size,
            multiple=t.parallel.pack_multiple,
            micro_multiple=t.topology.pipeline_size,
            share_prefixes=self.config.share_prompts and t.topology.context_size == 1,
        )

    # ------------------------------------------------------------------ inside
    def _complete(self, samples: Sequence[Sample]) -> None:
        """Log-probs that the updates will need, before the first of them moves a weight."""
        if self.reference is not None:
            with self.reference.in_place(self.trainer.chunks):
                self.logprobs(samples, "ref_logprob")
        if self.config.updates > 1 and self.loss.config.old == "policy":
            self.logprobs(samples, "old_logprob")

    def _told(self, results: list[StepResult]) -> dict[str, float]:
        """Metrics of a batch from the sums of its updates."""
        sums: dict[str, float] = {}
        for result in results:
            for name, value in result.metrics.items():
                sums[name] = sums.get(name, 0.0) + value * max(result.count, 1)
        tokens = max(sums["tokens"], 1.0)
        told = {name: sums[source] / tokens for name, source in MEANS.items()}
        for name, (mean, square) in SPREADS.items():
            told[name] = math.sqrt(max(sums[square] / tokens - (sums[mean] / tokens) ** 2, 0.0))
        applied = [result for result in results if not result.skipped]
        told["loss"] = float(np.mean([result.loss for result in results]))
        if applied:
            told["grad_norm"] = float(np.mean([result.grad_norm for result in applied]))
        told |= {"lr": results[-1].lr, "tokens": sums["tokens"] / self.config.epochs, "updates": float(len(results))}
        told["skipped"] = float(len(results) - len(applied))
        floor = self.config.entropy_floor
        told["entropy_collapsed"] = float(floor is not None and told["entropy"] < floor)
        if told["entropy_collapsed"]:
            log.warning("entropy %.4f is below update.entropy_floor=%g: the policy has collapsed", told["entropy"], floor)
        return told


def mini_batches(samples: Sequence[Sample], number: int) -> list[list[Sample]]:
    """At most `number` parts of equally many whole rollouts (one more in the first ones), in the order of the samples."""
    rollouts: dict[str, list[Sample]] = {}
    for sample in samples:
        rollouts.setdefault(sample.rollout_id or sample.sample_id, []).append(sample)
    rows = list(rollouts.values())
    parts = np.array_split(np.arange(len(rows)), min(number, len(rows)))
    return [[sample for i in part for sample in rows[i]] for part in parts]
