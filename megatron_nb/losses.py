"""Losses: each returns (sum, count, metrics); the division by the global count happens once, in the trainer.

A gradient then depends neither on data, context or tensor ranks, nor on micro-batches, nor on packing. `count` is an
integer held by context rank 0; fractions live in loss_weight.
"""

from __future__ import annotations

import torch

from megatron_nb.records import Batch


class NextToken:
    """- sum over tokens of weight * log p(target). Supervised fine-tuning."""

    temperature = 1.0
    entropy = False

    def coefficient(self, batch: Batch) -> torch.Tensor:
        """[t] d sum / d logprob, known before the forward pass, so logits need to be formed only once."""
        return -batch.loss_weight

    def __call__(self, logprob: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
        """logprob [t] -> sum [], count, metrics as sums over tokens."""
        # where, not multiply: whatever stands at a masked position must change nothing, NaN included
        trained = torch.where(batch.loss_weight != 0, logprob * batch.loss_weight, torch.zeros_like(logprob))
        total = -trained.sum()
        return total, batch.count, {"loss": total.detach()}
