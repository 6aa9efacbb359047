"""The policy-gradient losses of RL: a Batch's streams mapped onto nb_kernels.grpo_loss, which states the mathematics.

One class serves GRPO, Dr.GRPO, DAPO, GSPO, CISPO, RLOO and REINFORCE++: `credit` writes advantages and weights, PolicyConfig
names the rest. Streams: advantage, behaviour_logprob (of the engine), old_logprob (absent: on-policy, the ratio is 1),
ref_logprob (with `kl`). GSPO's sequence is one training row.

Formed once or twice: the logits are formed once where a token's gradient is known before the backward pass (`coefficient`):
the first update on a batch, token ratios, no KL or entropy term. Otherwise, and in the Triton kernels, the backward pass
forms them again (8 instead of 6 T V H).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from nb_kernels.grpo_loss import LIMIT, Objective, grpo_loss

from megatron_nb.records import Batch

OF_KERNEL = ("loss", "tokens", "ratio", "ratio_squared", "clip_low", "clip_high", "clip_dual", "kl", "kl_old", "entropy",
             "importance_capped")  # fmt: skip


@dataclass
class PolicyConfig:
    """The loss of a policy update; names and formulas are those of nb_kernels.grpo_loss."""

    objective: str = "clip"  # clip | cispo
    ratio: str = "token"  # token | sequence (GSPO)
    old: str = "policy"  # of the ratio: policy (the trainer's, before the first update on a batch) | behaviour (the engine's)
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    importance_cap: float | None = 2.0  # truncated importance sampling, engine to `old`; null: none
    kl: str | None = None  # k1 | k2 | k3: KL term against the reference
    kl_coefficient: float = 0.0
    kl_grad: str = "plain"  # plain | unbiased
    entropy_coefficient: float = 0.0
    temperature: float = 1.0  # of the sampling: logits are divided by it here too

    def __post_init__(self):
        if self.old not in ("policy", "behaviour"):
            raise ValueError(f"policy.old={self.old!r} must be policy or behaviour")
        if not self.temperature > 0:
            raise ValueError(f"policy.temperature={self.temperature} must be above 0: greedy decoding has no gradient")
        try:
            self.terms()
        except ValueError as error:
            raise ValueError(f"policy.{error}") from None

    def terms(self) -> Objective:
        """What grpo_loss takes. Against the engine's own log-probs the ratio is the importance weight already."""
        names = {name: value for name, value in asdict(self).items() if name not in ("old", "temperature")}
        if self.old == "behaviour":
            names["importance_cap"] = None
        return Objective(**names)


class PolicyGradient:
    """Sum over tokens of weight times the clipped, importance-weighted policy term, the KL term and the entropy term.

    context_group: ranks that share the packs' tokens; None without context parallelism.
    """

    output = "logprob"
    entropy = True  # always measured: a collapse must be seen

    def __init__(self, config: PolicyConfig, context_group: dist.ProcessGroup | None = None) -> None:
        self.config, self.terms = config, config.terms()
        self.group = context_group if context_group is not None and context_group.size() > 1 else None
        self.temperature = config.temperature

    def coefficient(self, batch: Batch) -> torch.Tensor | Callable | None:
        """[t] d sum / d logprob, or its law (linear_logprob), where it is known before the backward pass; else None."""
        t = self.terms
        plain = t.ratio == "token" and t.kl_coefficient == 0 and t.entropy_coefficient == 0
        if not plain or self.config.old == "behaviour" or "old_logprob" in batch.streams:
            return None
        slope = -batch.loss_weight * batch.streams["advantage"]  # ratio 1: inside every clip
        if t.importance_cap is None:
            return slope
        behaviour = batch.streams["behaviour_logprob"]

        def weighted(logprob: torch.Tensor, rows) -> torch.Tensor:
            drift = (logprob - behaviour[rows]).clamp(-LIMIT, LIMIT)
            return slope[rows] * drift.exp().clamp(max=t.importance_cap)

        return weighted

    def __call__(
        self, output: tuple[torch.Tensor, torch.Tensor], batch: Batch
    ) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
        """(logprob [t], entropy [t]) -> sum [], count, metrics as sums over tokens (divide by "tokens").

        A log-prob that is not finite on a trained token makes the sum NaN: the trainer refuses the step on every rank and
        names the sample, where an exception here would leave the other ranks waiting.
        """
        logprob, entropy = output
        kept = batch.loss_weight != 0
        broken = (kept & ~(logprob.isfinite() & entropy.isfinite())).any()
        logprob, entropy = (torch.where(x.isfinite(), x, torch.zeros_like(x)) for x in (logprob, entropy))
        streams = batch.streams
        behaviour = streams["behaviour_logprob"]
        old = behaviour if self.config.old == "behaviour" else streams.get("old_logprob")
        result = grpo_loss(
            logprob,
            streams["advantage"],
            batch.loss_weight,
            old=old,
            behaviour=behaviour,
            ref=streams.get("ref_logprob"),
            entropy=entropy if self.terms.entropy_coefficient else entropy.detach(),
            cu_seqlens=local_bounds(batch),
            group=self.group,
            options=self.terms,
        )
        metrics = {name: result.metrics[name] for name in OF_KERNEL}
        metrics |= mismatch(logprob.detach() if "old_logprob" not in streams else streams["old_logprob"], behaviour, kept)
        return result.loss * torch.where(broken, torch.nan, 1.0), batch.count, metrics


def local_bounds(batch: Batch) -> torch.Tensor:
    """[S + 1] bounds of the pack's documents within this rank's tokens, which a split keeps in the order of the pack."""
    return torch.searchsorted(batch.index, batch.cu_seqlens)


def mismatch(trainer: torch.Tensor, engine: torch.Tensor, kept: torch.Tensor) -> dict[str, torch.Tensor]:
    """How far the engine's log-probs [t] are from the trainer's of the same weights; sums over kept tokens.

    importance: the ratio trainer / engine; mismatch_kl: KL(engine || trainer) by k3; exponents clamped as in grpo_loss.
    """
    x = torch.where(kept, (trainer - engine).double(), 0.0)
    drift = x.clamp(-LIMIT, LIMIT)
    ratio = drift.exp()
    return {
        "mismatch_abs": x.abs().sum(),
        "mismatch_kl": (ratio - 1 - drift).sum(),
        "importance": ratio.where(kept, 0.0).sum(),
        "importance_squared": (ratio * ratio).where(kept, 0.0).sum(),
    }
