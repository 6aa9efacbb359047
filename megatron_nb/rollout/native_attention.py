"""Attention and the paged cache of the native engine: core's scheduling and bookkeeping, our rotary and kernels.

Core's dynamic engine calls flash-attn. Where that is missing the same entry point goes to nb_kernels.attention_paged on a
GPU and to torch's fused attention on a CPU, one batch for all sequences that decode. Queries and keys are turned by
nb_kernels.rotary with explicit positions, as in training.

Legend: T tokens of a step, S sequences, N query heads, G key/value heads, D head size, B tokens of a cache block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_nb.parallel.topology import ON_CPU  # installs the CPU layer before core is used

# isort: split
import megatron.core.transformer.attention as core_attention
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from nb_kernels.attention_paged import attention_paged
from nb_kernels.rotary import rotary

FLASH = not ON_CPU and (
    core_attention.HAVE_FA4
    or core_attention.HAVE_FA3
    # core asks the package for its release, and fails where there is none
    or (core_attention.flash_attn_varlen_func is not None and core_attention.is_fa_min_version("2.7.3"))
)
if not FLASH:  # core asserts flash-attn's release before it comes to the entry point that RolloutAttention serves
    core_attention.is_fa_min_version = lambda version: True
if core_attention.rearrange is None:  # einops is missing; core's one use of it in dynamic batching joins heads
    core_attention.rearrange = lambda x, pattern: x.flatten(2)


@dataclass
class CpuStep:
    """Where the tokens of one step lie in the flattened cache; built once, used by every layer.

    decoding: buckets of sequences with one new token. Others: (rows of q, slots of all their keys), one by one.
    """

    positions: torch.Tensor  # [T]
    written: torch.Tensor  # [T] slots of the new tokens
    decoding: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]  # rows [s], slots [s, keys], mask or None
    prefilling: list[tuple[int, int, torch.Tensor]]  # first row, last row + 1, slots [keys]


BUCKET = 0.7  # sequences at least this share of the longest one's length are read together, padded to it


def cpu_step(positions, written, table, bounds: list[int], lengths: list[int], block: int) -> CpuStep:
    """table [S, M] blocks of each sequence; bounds [S + 1] its rows; lengths [S] its keys, the new ones included."""
    decoding, prefilling = [], []
    longest = max(lengths, default=0)
    place = torch.arange(longest)
    slots = table[:, place // block].long() * block + place % block  # [S, longest]
    single = sorted((n, s) for s, n in enumerate(lengths) if bounds[s + 1] - bounds[s] == 1)
    while single:
        most = single[-1][0]
        cut = next(i for i, (n, _) in enumerate(single) if n >= BUCKET * most)
        bucket, single = single[cut:], single[:cut]
        index = torch.tensor([s for _, s in bucket])
        known = torch.tensor([n for n, _ in bucket])
        hidden = place[:most] >= known[:, None]
        # beyond its length a row of the table holds anything, and so do slots that were never written: NaN times 0 is NaN
        read = torch.where(hidden, slots[index, :1], slots[index, :most])
        mask = None if bucket[0][0] == most else ~hidden[:, None, None]
        decoding.append((torch.tensor(bounds)[index], read, mask))
    for s, n in enumerate(lengths):
        if bounds[s + 1] - bounds[s] > 1:
            prefilling.append((bounds[s], bounds[s + 1], slots[s, :n]))
    return CpuStep(positions, written, decoding, prefilling)


def attention_cpu(q, keys, values, step: CpuStep, scale: float):
    """q [T, N, D] against caches [slots, G, D] -> [T, N, D]."""
    (_, N, D), G = q.shape, keys.shape[1]
    out = torch.empty_like(q)
    for rows, slots, mask in step.decoding:
        # a group's heads are its queries: keys and values are read once for all of them
        x = q.index_select(0, rows).view(-1, G, N // G, D)
        k, v = (c.index_select(0, slots.view(-1)).view(*slots.shape, G, D).transpose(1, 2) for c in (keys, values))
        y = F.scaled_dot_product_attention(x, k, v, attn_mask=mask, scale=scale)
        out[rows] = y.reshape(-1, N, D)
    for a, b, slots in step.prefilling:
        k, v = (c.index_select(0, slots).transpose(0, 1)[None] for c in (keys, values))
        x, old = q[a:b].transpose(0, 1)[None], len(slots) - (b - a)
        mask = torch.ones(b - a, len(slots), dtype=torch.bool).tril_(old) if old else None
        y = F.scaled_dot_product_attention(x, k, v, attn_mask=mask, is_causal=not old, scale=scale, enable_gqa=N != G)
        out[a:b] = y[0].transpose(0, 1)
    return out


class RolloutAttention(core_attention.SelfAttention):
    """Self-attention whose dynamic batching goes to flash-attn where it is installed, to ours elsewhere."""

    def flash_decode_and_prefill(
        self, q, k, v, max_seqlen_q, max_seqlen_k, cu_seqlens_q, cu_seqlens_k, seqlens_k, block_table, is_decode_only,
        softmax_offset=None,
    ):  # fmt: skip
        """q [T, 1, N, D] -> [T, 1, N, D]."""
        scale = q.shape[-1] ** -0.5
        if isinstance(block_table, CpuStep):
            return attention_cpu(q[:, 0], k.flatten(0, 1), v.flatten(0, 1), block_table, scale)[:, None]
        # flash-attn takes a prefill step of one query per sequence for decoding, and fails
        if FLASH and (is_decode_only or max_seqlen_q > 1):
            return super().flash_decode_and_prefill(
                q, k, v, max_seqlen_q, max_seqlen_k, cu_seqlens_q, cu_seqlens_k, seqlens_k, block_table, is_decode_only,
                softmax_offset,
            )  # fmt: skip
        out = attention_paged(
            q[:, 0], k, v, block_table, seqlens_k, cu_seqlens_q,
            scale=scale, longest=max_seqlen_q, implementation=self.config.kernels,
        )  # fmt: skip
        return out[:, None]


class RolloutRotary(RotaryEmbedding):
    """Hands the frequencies through core's layers to RolloutContext, which knows the positions."""

    def get_rotary_seq_len(self, *args, **kwargs):
        return None

    def forward(self, length, *args, **kwargs):
        """[D / 2] radians per position."""
        return self.inv_freq


class RolloutContext(DynamicInferenceContext):
    """Core's cache and scheduling without padding to fixed sizes (that is for CUDA graphs), and with training's rotary."""

    kernels = "auto"
    step: CpuStep | None = None

    @classmethod
    def round_up_tokens(cls, value, tp_size=None):
        return int(value)

    @classmethod
    def round_up_requests(cls, value, tp_size=None):
        return int(value)

    def initialize_attention_state(self, **options):
        result = super().initialize_attention_state(**options)
        if ON_CPU:
            mha, tokens = self.active_attn_metadata["mha_metadata"].state_data, self.active_token_count
            view = self.gpu_view
            written = view.token_to_block_idx[:tokens].long() * self.block_size_tokens
            written += view.token_to_local_position_within_kv_block[:tokens]
            with torch.inference_mode(False):  # the tables of nb_kernels.rotary are cached by the version of `positions`
                positions = view.token_to_pos_ids[:tokens].clone()
            self.step = cpu_step(
                positions, written, mha["block_table"],
                mha["cu_query_seq_lengths"].tolist(), mha["kv_seq_lengths"].tolist(), self.block_size_tokens,
            )  # fmt: skip
        return result

    def _turned(self, x, frequencies):
        n = self.padded_active_token_count
        positions = self.step.positions if self.step else self.gpu_view.token_to_pos_ids[:n]
        return rotary(x[:n, 0], positions, frequencies, implementation=self.kernels)[:, None]

    def apply_rotary_emb_query(self, query, query_emb, config, cu_seqlens_q, cp_group, mscale=1.0):
        return self._turned(query, query_emb)

    def apply_rotary_emb_key(self, key, key_emb, config, cp_group, mscale=1.0):
        return self._turned(key, key_emb)

    def append_key_value_cache(self, layer_number, key, value):
        if not self.step:
            super().append_key_value_cache(layer_number, key, value)
            return
        for cache, new in zip(self.memory_buffer[:, self.layer_map[layer_number - 1]], (key, value)):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, self.step.written, new[:, 0])

    def key_value_cache(self, layer_number):
        keys, values, table = super().key_value_cache(layer_number)
        return keys, values, self.step or table

    def deallocate_inference_state_buffers(self):
        self.step = None
        self._input_position_views.clear()
        super().deallocate_inference_state_buffers()
