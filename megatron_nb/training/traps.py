"""Settings of megatron-core that train silently wrong or fail late: found here before the first step.

Each was seen on release 0.19.2. Our own configuration sets none of them; the asserts hold for whoever changes that.
"""
from __future__ import annotations

import importlib.util

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_nb.parallel.topology import ON_CPU


def refuse_traps(core: TransformerConfig, optimizer: OptimizerConfig, ddp: DistributedDataParallelConfig) -> None:
    """AssertionError when the three core configurations meet a known trap."""
    assert core.calculate_per_token_loss, (
        "calculate_per_token_loss=False averages per micro-batch and rank: losses are sums, divided once by the global count"
    )
    assert not (core.virtual_pipeline_model_parallel_size and core.batch_p2p_comm), (
        "batch_p2p_comm=True with an interleaved pipeline trains silently wrong (loss off by 0.067): set it to False"
    )
    assert not (core.cross_entropy_loss_fusion and core.cross_entropy_fusion_impl == "native"), (
        "native cross-entropy fusion casts the logits' gradient to bf16, in fp32 training too: switch it off"
    )
    has_apex_kernel = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    assert not core.gradient_accumulation_fusion or has_apex_kernel, (
        "gradient_accumulation_fusion=True needs apex's fused_weight_gradient_mlp_cuda, which is not installed: set it to False"
    )
    assert not core.variable_seq_lengths or core.moe_token_dispatcher_type in ("alltoall", "flex"), (
        "variable_seq_lengths=True is refused by core's default token dispatcher, in dense models too: "
        "set moe_token_dispatcher_type='alltoall'"
    )
    assert not (optimizer.optimizer_cpu_offload and ON_CPU), (
        "optimizer_cpu_offload=True moves optimizer state from GPU to host memory and fails without a GPU: set it to False"
    )
    assert not optimizer.fp16 and not core.fp16, "fp16 needs loss scaling, which update() does not do: use bf16 or fp32"
    assert optimizer.overlap_param_gather == ddp.overlap_param_gather, "overlap_param_gather differs: core reads both"

