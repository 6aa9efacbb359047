"""One table of names and layouts between megatron-core's tensors and Hugging Face's, used in both directions.

Every layout here is a permutation of rows, so it is written down as row spans: "these rows of ours are those rows of that
tensor of theirs". Import copies along the spans, export copies back, and a rank that holds a box of a tensor copies only
the spans that meet it.

Legend: H hidden, F MLP width, V vocabulary, N query heads, G key/value heads, D head size, L layers.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_nb.model.shape import ModelConfig


class Span(NamedTuple):
    """`count` rows of ours beginning at `row` are the rows of theirs[part] beginning at `their_row`."""

    row: int
    part: int
    their_row: int
    count: int


def _one(rows: Callable[[ModelConfig], int]) -> Callable[[ModelConfig], list[Span]]:
    return lambda c: [Span(0, 0, 0, rows(c))]


def _gate_up(c: ModelConfig) -> list[Span]:
    return [Span(0, 0, 0, c.ffn_hidden_size), Span(c.ffn_hidden_size, 1, 0, c.ffn_hidden_size)]


def _qkv(c: ModelConfig) -> list[Span]:
    """Per key/value head: its query heads, the key head, the value head."""
    queries = c.num_attention_heads // c.num_query_groups * c.head_dim
    spans: list[Span] = []
    row = 0
    for group in range(c.num_query_groups):
        for part, count in ((0, queries), (1, c.head_dim), (2, c.head_dim)):
            spans.append(Span(row, part, group * count, count))
            row += count
    return spans


@dataclass(frozen=True)
class Entry:
    """A line of the table. `*` in a name is the layer. `when` says for which shapes the tensor exists."""

    ours: str
    theirs: tuple[str, ...]
    spans: Callable[[ModelConfig], list[Span]]
    columns: Callable[[ModelConfig], int] | None = None  # None: a vector
    when: Callable[[ModelConfig], bool] = lambda c: True

    @property
    def per_layer(self) -> bool:
        return "*" in self.ours

    @property
    def key(self) -> str:
        """Name of the global tensor in a checkpoint: core stacks its equal layers into one tensor [L, ...]."""
        return self.ours.replace(".*.", ".")

    @property
    def padded(self) -> bool:
        """Whether rows are added to divide the vocabulary over ranks."""
        return self.spans is _VOCABULARY

    def shape(self, c: ModelConfig) -> tuple[int, ...]:
        """Of ours, one layer, without padding rows."""
        rows = sum(span.count for span in self.spans(c))
        return (rows, self.columns(c)) if self.columns else (rows,)

    def their_shapes(self, c: ModelConfig, layer: int | None) -> dict[str, tuple[int, ...]]:
        rows = [0] * len(self.theirs)
        for span in self.spans(c):
            rows[span.part] += span.count
        return {
            name.replace("*", str(layer)): (count, self.columns(c)) if self.columns else (count,)
            for name, count in zip(self.theirs, rows)
        }

    def split(self, ours: torch.Tensor, c: ModelConfig, layer: int | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield theirs from one whole tensor of ours (padding rows beyond the spans are left out)."""
        spans = self.spans(c)
        for part, name in enumerate(self.theirs):
            rows = [ours[span.row : span.row + span.count] for span in spans if span.part == part]
            yield name.replace("*", str(layer)), rows[0] if len(rows) == 1 else torch.cat(rows)


def _hidden(c: ModelConfig) -> int:
    return c.hidden_size


def _vocabulary(c: ModelConfig) -> int:
    return c.vocab_size


_VOCABULARY = _one(_vocabulary)


def _head(c: ModelConfig) -> int:
    return c.head_dim


def _attention(c: ModelConfig) -> int:
    return c.num_attention_heads * c.head_dim


def _mlp(c: ModelConfig) -> int:
    return c.ffn_hidden_size


_L, _T = "decoder.layers.*.", "model.layers.*."
_QKV = tuple(f"{_T}self_attn.{name}_proj" for name in "qkv")
TABLE = (
    Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), _VOCABULARY, _hidden),
    Entry(f"{_L}self_attention.linear_qkv.layer_norm_weight", (f"{_T}input_layernorm.weight",), _one(_hidden)),
    Entry(f"{_L}self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in _QKV), _qkv, _hidden),
    Entry(f"{_L}self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in _QKV), _qkv, when=lambda c: c.qkv_bias),
    Entry(f"{_L}self_attention.q_layernorm.weight", (f"{_T}self_attn.q_norm.weight",), _one(_head), when=lambda c: c.qk_norm),
    Entry(f"{_L}self_attention.k_layernorm.weight", (f"{_T}self_attn.k_norm.weight",), _one(_head), when=lambda c: c.qk_norm),
    Entry(f"{_L}self_attention.linear_proj.weight", (f"{_T}self_attn.o_proj.weight",), _one(_hidden), _attention),
    Entry(f"{_L}mlp.linear_fc1.layer_norm_weight", (f"{_T}post_attention_layernorm.weight",), _one(_hidden)),
    Entry(f"{_L}mlp.linear_fc1.weight", (f"{_T}mlp.gate_proj.weight", f"{_T}mlp.up_proj.weight"), _gate_up, _hidden),
    Entry(f"{_L}mlp.linear_fc2.weight", (f"{_T}mlp.down_proj.weight",), _one(_hidden), _mlp),
    Entry("decoder.final_layernorm.weight", ("model.norm.weight",), _one(_hidden)),
    Entry("output_layer.weight", ("lm_head.weight",), _VOCABULARY, _hidden, when=lambda c: c.vocabulary_head),
    Entry("score.weight", ("score.weight",), _one(lambda c: 1), _hidden, when=lambda c: c.head == "score"),
)
BY_KEY = {entry.key: entry for entry in TABLE}


def tensors_of(config: ModelConfig) -> Iterator[tuple[Entry, int | None]]:
    """Every (entry, layer) of a model, in Hugging Face's order."""
    entries = [entry for entry in TABLE if entry.when(config)]
    first = next(index for index, entry in enumerate(entries) if entry.per_layer)
    last = max(index for index, entry in enumerate(entries) if entry.per_layer) + 1
    yield from ((entry, None) for entry in entries[:first])
    yield from ((entry, layer) for layer in range(config.num_layers) for entry in entries[first:last])
    yield from ((entry, None) for entry in entries[last:])


def hf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor with its shape, in order."""
    return {name: shape for entry, layer in tensors_of(config) for name, shape in entry.their_shapes(config, layer).items()}
