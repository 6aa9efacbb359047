"""The Llama-shaped decoder on megatron-core: one spec for CPU and GPU, packed and context-parallel by construction.

Llama, Qwen2/2.5 (bias on q, k, v) and Qwen3 (norm on q and k per head) are settings of ModelConfig. With backend `te`
the linear and norm modules are Transformer Engine's; attention stays ours, whose split is over the whole pack.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_nb.model.shape import ModelConfig
from megatron_nb.model.sharding import cut_dimension, named_parameters, shard
from megatron_nb.parallel.topology import ON_CPU, ParallelConfig  # installs the CPU layer before core is used

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_nb.model.attention import Norm, PackAttention, PackRotary, SwiGlu, inverse_frequencies
from megatron_nb.model.heads import ScoreHead

logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)  # GPTModel announces HybridModel

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
RECOMPUTE = {
    "none": {},
    # attention keeps only (q, k, v, out, lse), so what is worth recomputing is the MLP
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


@dataclass
class CoreConfig(TransformerConfig):
    """megatron-core's configuration and what our attention needs beside it."""

    context_method: str = "ring"
    kernels: str = "auto"
    inverse_frequencies: torch.Tensor | None = None  # [D / 2], of the rotary embedding


def check_layout(model: ModelConfig, parallel: ParallelConfig) -> None:
    """ValueError when this model cannot be cut this way."""
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        if getattr(model, name) % parallel.tensor:
            raise ValueError(
                f"model.{name}={getattr(model, name)} must be divisible by parallel.tensor={parallel.tensor}: "
                "every tensor rank holds an equal part"
            )
    stages = parallel.pipeline * parallel.virtual_pipeline
    if model.num_layers % stages:
        raise ValueError(
            f"model.num_layers={model.num_layers} must be divisible by pipeline * virtual_pipeline = "
            f"{parallel.pipeline} * {parallel.virtual_pipeline} = {stages}: every stage holds equally many layers"
        )
    if parallel.offload_activations and ON_CPU:
        raise ValueError("parallel.offload_activations=true moves activations from GPU to host memory: there is no GPU here")
    te = importlib.util.find_spec("transformer_engine") is not None
    if model.backend == "te" and not te:
        raise ValueError(
            "model.backend=te needs Transformer Engine, which is not installed: "
            "pip install megatron_nb[gpu], or set model.backend=local"
        )
    if parallel.offload_activations and not te:  # core asks it for its switch, whatever the backend
        raise ValueError(
            "parallel.offload_activations=true needs Transformer Engine, which is not installed: "
            "pip install megatron_nb[gpu], or set parallel.recompute=full"
        )


def core_config(model: ModelConfig, parallel: ParallelConfig) -> CoreConfig:
    """ModelConfig and ParallelConfig in core's terms."""
    check_layout(model, parallel)
    dtype = DTYPES[model.dtype]
    virtual = parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
    offload = {"fine_grained_activation_offloading": True, "offload_modules": ["attn_norm", "core_attn", "mlp_norm"]}
    return CoreConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=bool(parallel.sequence_parallel),
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        microbatch_group_size_per_vp_stage=parallel.pipeline if virtual else None,
        context_parallel_size=parallel.context,
        context_method=parallel.context_method,
        kernels=model.kernels,
        inverse_frequencies=inverse_frequencies(model),
        calculate_per_token_loss=True,  # sum and count; divided once by the global count
        # core's default True trains silently wrong with an interleaved schedule on gloo, and is not needed elsewhere
        batch_p2p_comm=False,
        cross_entropy_loss_fusion=False,  # core's casts the logits' gradient to bf16; ours never forms logits
        gradient_accumulation_fusion=False,  # needs apex; our weight gradients go through autograd
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        use_te_activation_func=True,  # core's door for an activation module: ours, SwiGlu
        apply_rope_fusion=False,
        use_cpu_initialization=ON_CPU,
        perform_initialization=False,  # `initialize_weights` draws by name, equal at every topology
        **RECOMPUTE[parallel.recompute],
        **(offload if parallel.offload_activations else {}),
    )


def _block_spec(config: CoreConfig, model: ModelConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    if model.backend == "te":
        from megatron.core.extensions.transformer_engine import TENorm

        layer, norm = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_norm), TENorm
    else:
        layer, norm = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=model.qk_norm), Norm
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        if model.qk_norm:
            layer.submodules.self_attention.submodules.q_layernorm = Norm
            layer.submodules.self_attention.submodules.k_layernorm = Norm
    layer.submodules.self_attention.submodules.core_attention = PackAttention
    layer.submodules.mlp.keywords["submodules"].activation_func = SwiGlu
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)


def build(model: ModelConfig, parallel: ParallelConfig) -> list[GPTModel]:
    """This rank's model chunks (one per virtual stage), weights not yet drawn. Call after topology.initialize."""
    config = core_config(model, parallel)
    virtual = parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
    chunks = []
    for stage in range(parallel.virtual_pipeline):
        vp_stage = stage if virtual else None
        chunk = GPTModel(
            config,
            _block_spec(config, model, vp_stage),
            model.padded_vocab(parallel.tensor),
            model.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=model.tied_embeddings and model.head == "vocabulary",
            position_embedding_type="rope",
            rotary_base=model.rope_theta,
            vp_stage=vp_stage,
        )
        chunk.rotary_pos_emb.__class__ = PackRotary
        chunk.rotary_pos_emb.inv_freq = config.inverse_frequencies.clone()
        chunk.settings = model, parallel  # what trainer and export need to know of the live model
        if model.head == "score" and chunk.post_process:  # the vocabulary's output layer is freed before anything is trained
            chunk.output_layer = ScoreHead(model.hidden_size, config.params_dtype, chunk.output_layer.tp_group)
        chunks.append(chunk if ON_CPU else chunk.cuda(torch.cuda.current_device()))
    return chunks


@torch.no_grad()
def initialize_weights(
    chunks: list[GPTModel], model: ModelConfig, seed: int, std: float = 0.02, only: str | None = None
) -> None:
    """Draw fresh weights (`only` this one), each from a generator seeded by (seed, name): equal at every topology.

    Normal with `std`; projections back into the residual stream by std / sqrt(2 * layers) (GPT-2); norms 1, biases 0,
    padding rows of the vocabulary 0.
    """
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in named_parameters(chunks):
        if only not in (None, name):
            continue
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        dimension = cut_dimension(parameter)
        shape = list(parameter.shape)
        if dimension is not None:
            shape[dimension] *= size
        vocabulary = name in ("embedding.word_embeddings.weight", "output_layer.weight")
        if vocabulary:
            shape[0] = model.vocab_size  # padding depends on the topology, the draw must not
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        scale = std / (2 * model.num_layers) ** 0.5 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else std
        full = torch.randn(shape, generator=generator) * scale
        if vocabulary:
            padding = torch.zeros(model.padded_vocab(size) - model.vocab_size, shape[1])
            full = torch.cat([full, padding])
        parameter.copy_(shard(name, full, dimension, size, rank))
