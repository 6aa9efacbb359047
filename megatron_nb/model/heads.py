"""What happens to the last hidden states. Megatron-core calls a head as `output_processor` of GPTModel.forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from nb_kernels.linear_logprob import linear_logprob

from megatron_nb.records import Batch

IGNORE = -100


@dataclass
class LogprobRequest:
    """targets [t], IGNORE where nothing is wanted; coefficient [t] as in linear_logprob; temperature of the policy."""

    targets: torch.Tensor
    vocab_size: int
    coefficient: torch.Tensor | None = None
    temperature: float = 1.0
    entropy: bool = False


def whole_hidden(hidden: torch.Tensor, config, group) -> torch.Tensor:
    """[t, H] hidden states of this context rank, gathered over tensor ranks when they are scattered.

    hidden [t or t / tensor, 1, H]. The gather's backward sums the partial gradients of the vocabulary shards.
    """
    if config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
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


def head_for(loss: Any, batch: Batch, vocab_size: int) -> tuple[Callable, Any]:
    """(head, its request): what GPTModel shall do with its last hidden states for this loss, which names its `output`."""
    assert loss.output == "logprob", f"{type(loss).__name__}.output={loss.output!r} is no head"
    return logprob_head, LogprobRequest(
        torch.where(batch.loss_weight != 0, batch.targets, IGNORE),
        vocab_size,
        coefficient=loss.coefficient(batch) if torch.is_grad_enabled() else None,
        temperature=loss.temperature,
        entropy=loss.entropy,
    )
