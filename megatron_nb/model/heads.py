"""What happens to the last hidden states. Megatron-core calls a head as `output_processor` of GPTModel.forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from nb_kernels.linear_logprob import linear_logprob

from megatron_nb.parallel.context import sum_over
from megatron_nb.records import Batch

IGNORE = -100


@dataclass
class LogprobRequest:
    """targets [t], IGNORE where nothing is wanted; coefficient as in linear_logprob; temperature of the policy."""

    targets: torch.Tensor
    vocab_size: int
    coefficient: torch.Tensor | Callable | None = None
    temperature: float = 1.0
    entropy: bool = False


@dataclass
class ScoreRequest:
    """index [t] pack positions of the local tokens, ascending; cu_seqlens [S + 1] of the whole pack."""

    index: torch.Tensor
    cu_seqlens: torch.Tensor


def whole_hidden(hidden: torch.Tensor, config, group, partial: bool = True) -> torch.Tensor:
    """[t, H] hidden states of this context rank, gathered over tensor ranks when they are scattered.

    hidden [t or t / tensor, 1, H]. partial: what follows is cut over tensor ranks (the vocabulary), so the gather's
    backward sums their gradients; otherwise every rank computes the same and keeps its own rows.
    """
    if config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=partial, group=group)
    return hidden[:, 0]


def logprob_head(*, hidden_states, output_layer, output_weight, context: LogprobRequest, config, **unused):
    """[t] log-probability of each target (0 where IGNORE), and [t] entropy when asked for."""
    group = output_layer.tp_group
    weight = output_layer.weight if output_weight is None else output_weight
    return linear_logprob(
        whole_hidden(hidden_states, config, group),
        weight,
        context.targets,
        temperature=context.temperature,
        vocab_size=context.vocab_size,
        group=group if group.size() > 1 else None,
        reduce_hidden_grad=not config.sequence_parallel,
        ignore_index=IGNORE,
        entropy=context.entropy,
        coefficient=context.coefficient,
        implementation=config.kernels,
    )


class ScoreHead(torch.nn.Module):
    """One row [1, H], the same on every tensor rank, in the place of the vocabulary's output layer."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, group):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, hidden_size, dtype=dtype))
        self.tp_group = group

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, H] -> [S] in fp32."""
        return hidden.float() @ self.weight[0].float()

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """As core's modules; stored as `score.weight`, which no vocabulary head can be taken for."""
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        state = make_sharded_tensors_for_checkpoint({"weight": self.weight}, prefix, {}, sharded_offsets, **groups)
        state[f"{prefix}weight"].key = "score.weight"
        return state


def score_head(*, hidden_states, output_layer, context: ScoreRequest, config, **unused):
    """[S] score of each document: of the hidden state at its last token, on every context rank, whichever holds it."""
    hidden = whole_hidden(hidden_states, config, output_layer.tp_group, partial=False)
    last = context.cu_seqlens[1:] - 1
    row = torch.searchsorted(context.index, last).clamp(max=len(context.index) - 1)
    here = context.index[row] == last
    scores = torch.where(here, output_layer.scores(hidden[row]), 0.0)
    return sum_over(scores, parallel_state.get_context_parallel_group())


def head_for(loss: Any, batch: Batch, vocab_size: int) -> tuple[Callable, Any]:
    """(head, its request): what GPTModel shall do with its last hidden states for this loss, which names its `output`."""
    if loss.output == "score":
        return score_head, ScoreRequest(batch.index, batch.cu_seqlens)
    assert loss.output == "logprob", f"{type(loss).__name__}.output={loss.output!r} is no head"
    return logprob_head, LogprobRequest(
        torch.where(batch.loss_weight != 0, batch.targets, IGNORE),
        vocab_size,
        coefficient=loss.coefficient(batch) if torch.is_grad_enabled() else None,
        temperature=loss.temperature,
        entropy=loss.entropy,
    )
