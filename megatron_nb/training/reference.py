"""A frozen copy of the weights on the host, which takes the place of the live ones for the length of a pass.

The copy and the live weights change places parameter by parameter, so the device holds one parameter more, the host nothing.
Optimizer state and fp32 copies are not touched: after the exchange back everything is as before, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_nb.model.sharding import named_parameters
from megatron_nb.training.optimizer import sync_parameters


class Reference:
    """The weights that `modules` have when it is made, on the host; each rank keeps its own part.

    Load the reference's checkpoint into the modules, make the Reference, then load the policy's.
    """

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self.frozen = [
            torch.empty_like(p, device="cpu", pin_memory=p.is_cuda).copy_(p.detach()) for _, p in named_parameters(modules)
        ]

    @contextmanager
    def in_place(self, chunks: list[torch.nn.Module]) -> Iterator[None]:
        """Within the block the trainer's chunks hold the reference's weights. Never update them there."""
        sync_parameters(chunks)  # the live weights must be whole before they leave
        self._exchange(chunks)
        try:
            yield
        finally:
            self._exchange(chunks)

    @torch.no_grad()
    def _exchange(self, chunks: list[torch.nn.Module]) -> None:
        live = [parameter for _, parameter in named_parameters(chunks)]
        assert [p.shape for p in live] == [p.shape for p in self.frozen], "a reference of another model or layout"
        for parameter, frozen in zip(live, self.frozen):
            kept = parameter.detach().clone()
            parameter.copy_(frozen)  # in place: the wrapper's parameters are views of its buffer
            frozen.copy_(kept)
