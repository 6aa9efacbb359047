"""How a packed batch reaches megatron-core's layers: document bounds, rotary positions, norms, attention.

Core hands `packed_seq_params` to the rotary embedding and to core attention itself, so the bounds travel with the
micro-batch: safe under pipelining and under activation recompute, which a side attribute would not be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel.context import context_attention
from megatron_nb.records import Batch


@dataclass
class PackBounds(PackedSeqParams):
    """Where this rank's tokens sit in the pack and where their documents begin.

    `qkv_format="sbhd"` keeps core out of its own per-document code, whose split wants document lengths that divide.
    """

    index: torch.Tensor = None  # [t] position in the pack
    start: torch.Tensor = None  # [t] position in the pack where the document begins
    cu_seqlens: torch.Tensor = None  # [S + 1] of the whole pack


def bounds(batch: Batch) -> PackBounds:
    """The bounds of one (split) batch, in the form core passes through its layers."""
    return PackBounds(qkv_format="sbhd", index=batch.index, start=batch.start, cu_seqlens=batch.cu_seqlens)


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
    """Rotary table by explicit positions, which restart in every document.

    GPTModel asks for a length and passes it to `forward`; here the "length" is the positions of the local tokens, so
    nothing is sliced by context or tensor rank. Overriding `forward` also drops core's lru_cache on it. With an int
    (decoding) core's own path runs.
    """

    def get_rotary_seq_len(
        self, inference_context, transformer, transformer_input, transformer_config, packed_seq_params=None, **kwargs
    ):
        if isinstance(packed_seq_params, PackBounds):
            return packed_seq_params.index - packed_seq_params.start
        return super().get_rotary_seq_len(
            inference_context, transformer, transformer_input, transformer_config, packed_seq_params, **kwargs
        )

    def forward(self, length, offset=0, packed_seq=False, cp_group=None):
        if not torch.is_tensor(length):
            return super().forward(length, offset, packed_seq=packed_seq, cp_group=cp_group)
        # angle = position * inverse frequency in fp32, exactly core's table row by row: [t, 1, 1, D]
        inverse_frequency = self.inv_freq = self.inv_freq.to(length.device)
        angles = length.to(inverse_frequency.dtype)[:, None] * inverse_frequency[None, :]
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class PackAttention(MegatronModule):
    """Core attention over a packed, context-parallel batch."""

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type,
        attention_dropout=None, softmax_scale=None, cp_comm_type=None, pg_collection=None, **kwargs,
    ):  # fmt: skip
        super().__init__(config=config)
        assert pg_collection is not None, "PackAttention needs the process groups that SelfAttention passes"
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.group, self.method = pg_collection.cp, config.context_method

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        """query [t, 1, N, D]; key, value [t, 1, G, D] -> [t, 1, N * D]."""
        assert isinstance(packed_seq_params, PackBounds), "PackAttention needs the bounds of its pack: pass bounds(batch)"
        assert query.shape[1] == 1, f"one pack per micro-batch, found {query.shape[1]}"
        # value is a view of the whole q, k, v projection: kept as it is for the backward pass, it would keep all of that
        out = context_attention(
            query[:, 0], key[:, 0], value[:, 0].contiguous(),
            packed_seq_params.start, packed_seq_params.cu_seqlens, self.group, self.scale, self.method,
        )  # fmt: skip
        return out.reshape(out.shape[0], 1, -1)


class Norm(torch.nn.Module):
    """RMSNorm of the local layer spec. Core's wrapper refuses sequence parallelism for want of the tag set here."""

    def __init__(self, config, hidden_size, eps=1e-5, **kwargs):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # each tensor rank sees a part of the tokens: core sums this gradient over them
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H] -> the same shape."""
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
