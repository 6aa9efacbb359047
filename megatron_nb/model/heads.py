"""What happens to the last hidden states. Megatron-core calls a head as `output_processor` of GPTModel.forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from nb_kernels.linear_logprob import linear_logprob

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
