"""The shape of a model: what must be known to build it, to count it and to cut it over ranks. No torch here.

Legend: H hidden, F MLP width, V vocabulary, N query heads, G key/value heads, D head size, L layers.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

# megatron-core lets only `factor` vary; every published Llama 3.x has these values
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass
class ModelConfig:
    """A Llama-shaped decoder; the defaults are the 3.93B recipe at 256k. ValueError names the field that cannot be."""

    num_layers: int = 32
    hidden_size: int = 2560
    num_attention_heads: int = 20
    num_query_groups: int = 4  # G: key/value heads
    head_dim: int = 128
    ffn_hidden_size: int = 10496
    vocab_size: int = 166144  # the true one; padding to the tensor-parallel size is a matter of layout
    norm_epsilon: float = 1e-5
    rope_theta: float = 7e7
    rope_scaling: dict[str, Any] | None = None  # None or {"rope_type": "llama3", ...}
    max_position_embeddings: int = 262144
    tied_embeddings: bool = False
    qkv_bias: bool = False  # Qwen2, Qwen2.5
    qk_norm: bool = False  # Qwen3
    head: str = "vocabulary"  # vocabulary | score: one number per document, of a reward model
    dtype: str = "bf16"  # bf16 | fp32
    backend: str = "local"  # local | te: whose linear and norm modules
    kernels: str = "auto"  # auto (triton on CUDA, torch elsewhere) | torch | triton: attention, norms, rotary, SwiGLU, loss

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "head_dim", "ffn_hidden_size",
                     "vocab_size", "max_position_embeddings"):  # fmt: skip
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"model.{name}={value} must be at least 1")
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"model.num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_query_groups={self.num_query_groups}: every key/value head serves equally many query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim} must be even: rotary embedding turns pairs")
        if self.norm_epsilon <= 0 or self.rope_theta <= 0:
            raise ValueError(f"model.norm_epsilon={self.norm_epsilon} and rope_theta={self.rope_theta} must be positive")
        choices_of = {"dtype": ("bf16", "fp32"), "backend": ("local", "te"), "kernels": ("auto", "torch", "triton"),
                      "head": ("vocabulary", "score")}  # fmt: skip
        for name, choices in choices_of.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"model.{name}={getattr(self, name)!r} must be one of {', '.join(choices)}")
        if self.rope_scaling is not None:
            self._check_rope_scaling()

    def _check_rope_scaling(self) -> None:
        scaling = dict(self.rope_scaling)
        kind = scaling.pop("rope_type", None)
        if kind != "llama3":
            raise ValueError(
                f"model.rope_scaling.rope_type={kind!r}: only 'llama3' can be represented; "
                "use rope_scaling=null and a larger rope_theta, or a checkpoint without scaling"
            )
        factor = scaling.pop("factor", None)
        if not isinstance(factor, (int, float)) or factor < 1 or scaling != LLAMA3_ROPE:
            raise ValueError(
                f"model.rope_scaling={self.rope_scaling} cannot be represented: llama3 needs a factor >= 1 and exactly "
                f"{LLAMA3_ROPE}; use a checkpoint with these values"
            )

    @classmethod
    def from_dict(cls, section: dict[str, Any]) -> ModelConfig:
        """The `model:` section of a saved configuration; an unknown key is an error."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(section) - known)
        if unknown:
            raise ValueError(f"model section has unknown keys {unknown}; known are {sorted(known)}")
        return cls(**section)

    def padded_vocab(self, tensor: int, multiple: int = 128) -> int:
        """Rows of the embedding as stored over `tensor` ranks: the smallest multiple of tensor * multiple that holds V."""
        block = tensor * multiple
        return -(-self.vocab_size // block) * block

    @property
    def vocabulary_head(self) -> bool:
        """Whether there is an output table [V, H] of its own."""
        return self.head == "vocabulary" and not self.tied_embeddings

    @property
    def layer_matmul_parameters(self) -> int:
        """Weights of one layer that a token is multiplied with."""
        attention = (2 * self.num_attention_heads + 2 * self.num_query_groups) * self.head_dim * self.hidden_size
        return attention + 3 * self.hidden_size * self.ffn_hidden_size

    @property
    def num_parameters(self) -> int:
        """All trained numbers, without padding rows; a tied head counts once."""
        vectors = 2 * self.hidden_size
        if self.qkv_bias:
            vectors += (self.num_attention_heads + 2 * self.num_query_groups) * self.head_dim
        if self.qk_norm:
            vectors += 2 * self.head_dim
        tables = self.vocab_size * self.hidden_size * (1 + self.vocabulary_head) + self.hidden_size * (self.head == "score")
        return tables + self.num_layers * (self.layer_matmul_parameters + vectors) + self.hidden_size

    def train_flops(self, tokens: int, squared_lengths: int) -> float:
        """Floating-point operations of one forward and backward pass.

        tokens: real tokens, no padding; squared_lengths: sum of len_i^2 over the documents. Causal attention counts the
        pairs it needs, len^2 / 2. Recomputation is not counted. A multiply-add is two operations, the backward pass twice
        the forward.
        """
        head = self.vocab_size * self.hidden_size if self.head == "vocabulary" else 0  # a score is one row per document
        weights = self.num_layers * self.layer_matmul_parameters + head
        pairs = self.num_layers * self.num_attention_heads * self.head_dim * squared_lengths / 2
        return 6.0 * weights * tokens + 12.0 * pairs

    def flops_per_token(self, length: int) -> float:
        """`train_flops` of a token in a document of `length` tokens, on average."""
        return self.train_flops(length, length * length) / length


# what a stage may set anew when it takes over weights
HAND_OVER = frozenset({"rope_theta", "rope_scaling", "max_position_embeddings", "dtype", "backend", "kernels"})


def hand_over(ours: ModelConfig) -> frozenset[str]:
    """Fields in which the model that `ours` begins from may differ: a score head can be put onto a language model."""
    return HAND_OVER | {"head"} if ours.head == "score" else HAND_OVER


def differences(theirs: ModelConfig, ours: ModelConfig, may_differ: frozenset[str] = HAND_OVER) -> list[str]:
    """"FIELD is A there, B here" for every field that differs and may not.

    Floats are compared in single precision: a norm_epsilon of 1e-5 comes out of a GGUF file as 9.99999975e-06.
    """
    pairs = {field.name: (getattr(theirs, field.name), getattr(ours, field.name)) for field in fields(ModelConfig)}
    return [f"{name} is {a} there, {b} here" for name, (a, b) in pairs.items() if name not in may_differ and not _same(a, b)]


def _same(a: Any, b: Any) -> bool:
    return math.isclose(a, b, rel_tol=1e-6) if isinstance(a, float) and isinstance(b, float) else a == b
