"""The native engine's forward pass on a CPU rank that holds the whole model in fp32: core's schedule and cache, our arithmetic.

A decoding step multiplies few rows by every weight, and torch's product of 16 rows takes twice the time of oneDNN's with
weights in its own blocked layout. Such a copy of the weights is made after every change of theirs; the layers around the
products are one function without core's modules, which cost a tenth of a step. Chosen by `fits`: tensor-parallel replicas,
bf16 and GPUs keep core's modules.

Legend: T tokens of a step, H hidden size, N query heads, G key/value heads, D head size, F feed-forward size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel.topology import ON_CPU  # installs the CPU layer before core is used
from megatron_nb.rollout.native_attention import attention_cpu

# isort: split
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper

ROWS = 64  # for which oneDNN chooses its layout; it serves fewer and more as well
linear = torch.ops.mkldnn._linear_pointwise
PLAIN = ("none", [], "")  # nothing after the product


def fits(model: ModelConfig, tensor: int) -> bool:
    """Whether this machine and layout take the pass below."""
    plain = model.dtype == "fp32" and model.backend == "local"
    return ON_CPU and tensor == 1 and plain and torch.backends.mkldnn.is_available()


class _Layer(NamedTuple):
    """Weights; the matrices in oneDNN's layout."""

    before: torch.Tensor  # [H]
    qkv: torch.Tensor  # [G * (N / G + 2) * D, H]: every group's queries, key and value
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None
    proj: torch.Tensor  # [H, N * D]
    after: torch.Tensor  # [H]
    fc1: torch.Tensor  # [2 F, H]: gate, up
    fc2: torch.Tensor  # [H, F]


class CpuWrapper(GPTInferenceWrapper):
    """Core's wrapper round its model, of which only the weights are used."""

    _layers: list[_Layer] | None = None

    def pack(self) -> None:
        """Copy the model's weights into oneDNN's layout; nothing when that is done already."""
        if self._layers is not None:
            return
        module, self._layers = self.model, []
        for layer in module.decoder.layers:
            attention, mlp = layer.self_attention, layer.mlp
            self._layers.append(
                _Layer(
                    layer.input_layernorm.weight, _packed(attention.linear_qkv), attention.linear_qkv.bias,
                    getattr(attention.q_layernorm, "weight", None), getattr(attention.k_layernorm, "weight", None),
                    _packed(attention.linear_proj), layer.pre_mlp_layernorm.weight, _packed(mlp.linear_fc1),
                    _packed(mlp.linear_fc2),
                )
            )  # fmt: skip
        embedding = module.embedding.word_embeddings
        self._head = _packed(embedding if module.share_embeddings_and_output_weights else module.output_layer)

    def drop(self) -> None:
        """Free the copy: the model's weights change, or memory is wanted."""
        self._layers = self._head = None

    def _forward(self, inference_input: dict) -> torch.Tensor:
        """tokens [1, T] -> logits [sequences, 1, V] at each one's last token, as core's model."""
        module, context, config = self.model, self.inference_context, self.config
        step, caches = context.step, context.memory_buffer.flatten(2, 3)  # [2, layers, slots, G, D]
        G, D, eps = config.num_query_groups, config.kv_channels, config.layernorm_epsilon
        R, scale = config.num_attention_heads // G, D**-0.5
        angle = step.positions[:, None] * module.rotary_pos_emb.inv_freq
        cos, sin = angle.cos().repeat(1, 2), torch.cat([-angle.sin(), angle.sin()], 1)
        cos, sin = cos[:, None, None], sin[:, None, None]  # [T, 1, 1, D]
        x = F.embedding(inference_input["tokens"][0], module.embedding.word_embeddings.weight)
        H = x.shape[-1:]
        for number, layer in enumerate(self._layers):
            qkv = linear(F.rms_norm(x, H, layer.before, eps), layer.qkv, layer.qkv_bias, *PLAIN).view(-1, G, R + 2, D)
            if layer.q_norm is not None:
                qkv[:, :, :R] = F.rms_norm(qkv[:, :, :R], (D,), layer.q_norm, eps)
                qkv[:, :, R] = F.rms_norm(qkv[:, :, R], (D,), layer.k_norm, eps)
            turned = qkv[:, :, : R + 1]
            turned = torch.addcmul(turned * cos, turned.roll(D // 2, -1), sin)
            keys, values = caches[0, number], caches[1, number]
            keys.index_copy_(0, step.written, turned[:, :, R])
            values.index_copy_(0, step.written, qkv[:, :, R + 1])
            y = attention_cpu(turned[:, :, :R].flatten(1, 2), keys, values, step, scale)
            x = x.add_(linear(y.flatten(1), layer.proj, None, *PLAIN))
            gate, up = linear(F.rms_norm(x, H, layer.after, eps), layer.fc1, None, *PLAIN).chunk(2, -1)
            x = x.add_(linear(F.silu(gate).mul_(up), layer.fc2, None, *PLAIN))
        x = F.rms_norm(context.last_token_logits(x[None]), H, module.decoder.final_layernorm.weight, eps)
        return linear(x, self._head, None, *PLAIN)[None]


def _packed(module: torch.nn.Module) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), ROWS)
