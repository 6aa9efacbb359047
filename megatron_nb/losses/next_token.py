"""The loss of supervised fine-tuning."""

from __future__ import annotations

import torch

from megatron_nb.records import Batch


class NextToken:
    """- sum over tokens of weight * log p(target)."""

    output = "logprob"
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
