"""Faults of megatron-core 0.19.2 that our use meets, mended in place. Each has a test that fails without its mend.

All three come from paths that only run without Transformer Engine and apex, on a GPU as well as on a CPU.
"""

from __future__ import annotations

import torch


def _recompute_without_te() -> None:
    """`CheckpointWithoutOutput` computes `fp8 is not None`, so its default False asks for TE's fp8 state manager."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    init = CheckpointWithoutOutput.__init__

    def mended(self, fp8=False):
        init(self, fp8)
        self.fp8 = bool(fp8)

    CheckpointWithoutOutput.__init__ = mended


def _optimizer_state_without_step() -> None:
    """Loading a fully reshardable optimizer indexes `tensors["step"]`, which is saved once per group, not per tensor."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    inner = DistributedOptimizer._set_main_param_and_optimizer_states

    def mended(self, model_param, tensors, *args, **kwargs):
        return inner(self, model_param, {"step": None, **tensors}, *args, **kwargs)

    DistributedOptimizer._set_main_param_and_optimizer_states = mended


def _one_step_tensor_per_parameter() -> None:
    """After a load all parameters share one `step` tensor; torch's Adam adds to it once per parameter: wrong from step 2 on."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    inner = DistributedOptimizer.load_state_dict

    def mended(self, state_dict, *args, **kwargs):
        result = inner(self, state_dict, *args, **kwargs)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
        return result

    DistributedOptimizer.load_state_dict = mended


def mend() -> None:
    """Apply every mend once."""
    if not getattr(mend, "done", False):
        _recompute_without_te()
        _optimizer_state_without_step()
        _one_step_tensor_per_parameter()
        mend.done = True
