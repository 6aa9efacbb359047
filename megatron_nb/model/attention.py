"""How a packed batch reaches megatron-core's layers: document bounds, rotary positions, norms, attention.

Core hands `packed_seq_params` to the rotary embedding and to core attention itself, so the bounds travel with the
micro-batch: safe under pipelining and under activation recompute, which a side attribute would not be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from nb_kernels.rms_norm import rms_norm
from nb_kernels.rotary import rotary
from nb_kernels.swiglu import swiglu

from megatron_nb.model.shape import ModelConfig
from megatron_nb.model.shared_prefix import shared_prefix_attention
from megatron_nb.parallel.context import context_attention
from megatron_nb.records import Batch


@dataclass
class PackBounds(PackedSeqParams):
    """Where this rank's tokens sit in the pack and where their documents begin.

    `qkv_format="sbhd"` keeps core out of its own per-document code, whose split wants document lengths that divide.
    """

    positions: torch.Tensor = None  # [t] position in the document
    start: torch.Tensor = None  # [t] position in the pack where the document begins
    cu_seqlens: torch.Tensor = None  # [S + 1] of the whole pack
    shared: list[tuple[int, int, int, int]] = field(default_factory=list)  # as in Batch


def bounds(batch: Batch) -> PackBounds:
    """The bounds of one (split) batch, in the form core passes through its layers."""
    places = {"positions": batch.positions, "start": batch.start, "cu_seqlens": batch.cu_seqlens}
    return PackBounds(qkv_format="sbhd", **places, shared=batch.shared)


def inverse_frequencies(model: ModelConfig) -> torch.Tensor:
    """[D / 2] radians per position in fp32, rounded as transformers rounds them.

    With llama3 scaling wavelengths beyond the original context are stretched by `factor`, those within it are kept, and
    the band between is interpolated (the Llama 3.1 release).
    """
    powers = torch.arange(0, model.head_dim, 2, dtype=torch.int64).float() / model.head_dim
    frequencies = 1.0 / (model.rope_theta**powers)
    if model.rope_scaling is None:
        return frequencies
    s = model.rope_scaling
    wavelengths = 2 * math.pi / frequencies
    longest = s["original_max_position_embeddings"] / s["low_freq_factor"]
    shortest = s["original_max_position_embeddings"] / s["high_freq_factor"]
    keep = (s["original_max_position_embeddings"] / wavelengths - s["low_freq_factor"]) / (
        s["high_freq_factor"] - s["low_freq_factor"]
    )
    stretched = frequencies / s["factor"]
    between = (1 - keep) * stretched + keep * frequencies
    return torch.where(wavelengths > longest, stretched, torch.where(wavelengths < shortest, frequencies, between))


class PackRotary(RotaryEmbedding):
    """Leaves packed batches to PackAttention, which knows the positions; anything else (decoding) takes core's own path."""

    def get_rotary_seq_len(
        self, inference_context, transformer, transformer_input, transformer_config, packed_seq_params=None, **kwargs
    ):
        if isinstance(packed_seq_params, PackBounds):
            return None
        return super().get_rotary_seq_len(
            inference_context, transformer, transformer_input, transformer_config, packed_seq_params, **kwargs
        )

    def forward(self, length, offset=0, packed_seq=False, cp_group=None):
        if length is None:
            return None  # core turns nothing then
        return super().forward(length, offset, packed_seq=packed_seq, cp_group=cp_group)


class PackAttention(MegatronModule):
    """Rotary embedding and core attention over a packed, context-parallel batch.

    Positions restart in every document and are explicit, so nothing of the table is sliced by context or tensor rank.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type,
        attention_dropout=None, softmax_scale=None, cp_comm_type=None, pg_collection=None, **kwargs,
    ):  # fmt: skip
        super().__init__(config=config)
        assert pg_collection is not None, "PackAttention needs the process groups that SelfAttention passes"
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.group, self.method, self.kernels = pg_collection.cp, config.context_method, config.kernels
        self.register_buffer("frequencies", config.inverse_frequencies, persistent=False)

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        """query [t, 1, N, D]; key, value [t, 1, G, D] -> [t, 1, N * D]."""
        pack = packed_seq_params
        assert isinstance(pack, PackBounds), "PackAttention needs the bounds of its pack: pass bounds(batch)"
        assert query.shape[1] == 1, f"one pack per micro-batch, found {query.shape[1]}"
        query, key = (rotary(x[:, 0], pack.positions, self.frequencies, implementation=self.kernels) for x in (query, key))
        # value is a view of the whole q, k, v projection: kept as it is for the backward pass, it would keep all of that
        value = value[:, 0].contiguous()
        if pack.shared:
            out = shared_prefix_attention(query, key, value, pack.start, pack.shared, self.scale, self.kernels)
        else:
            out = context_attention(
                query, key, value, pack.start, pack.cu_seqlens, self.group, self.scale, self.method, self.kernels
            )
        return out.reshape(out.shape[0], 1, -1)


class Norm(torch.nn.Module):
    """RMSNorm of the local layer spec. Core's wrapper refuses sequence parallelism for want of the tag set here."""

    def __init__(self, config, hidden_size, eps=1e-5, **kwargs):
        super().__init__()
        self.eps, self.kernels = eps, config.kernels
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # each tensor rank sees a part of the tokens: core sums this gradient over them
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H] -> the same shape."""
        return rms_norm(x, self.weight, eps=self.eps, implementation=self.kernels)


class SwiGlu(torch.nn.Module):
    """The MLP's activation: gate and up beside each other -> silu(gate) * up."""

    def __init__(self, config):
        super().__init__()
        self.kernels = config.kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., 2F] -> [..., F]."""
        return swiglu(x, implementation=self.kernels)
