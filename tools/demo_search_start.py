"""The weights from which the search demo's model starts: random, but for attention heads that already copy.

A search agent lives by copying names from results into calls. Attention learns to copy (induction heads: look up where the
current token stood before, take the one that followed it) only after millions of tokens, which two cores do not see in
minutes. So some heads are written by hand, everything else is random; training then moves all of it.

    embedding    [token half | 1 | room for the token before]; a word with and without a space before it differ by SPACE alone
    layer 0      head 0 looks one place back, by rotary angle alone, and writes that token's half into the room
    layer 1      heads 0 and 1 look for places whose room holds the current token, and write the token that stands there
                 heads 2 and 3 do so, where an argument begins, for places whose room holds a mark of a result: MARKS

Only rotary pairs that hardly turn within the longest row take part in that look-up, so rope_theta is large.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

BLANK = "Ġ"  # a space, as byte-level tokenizers write it
LAYERS, HIDDEN, HEADS, HEAD, MLP, THETA, POSITIONS = 3, 192, 4, 64, 512, 1e6, 1024
HALF = HIDDEN // 2
BACK_PAIRS, BACK_LOGIT = 4, 24.0  # rotary pairs that tell the place before from others, and its attention logit
MATCH_LOGIT = 20.0  # of a place whose room holds the current token
COPIED = 4.0  # how strongly a found token is written
SPACE = 0.3  # distance of a word behind a space from the same word elsewhere
BEGINS = BLANK + '"'  # the token before an argument
MARKS = {"]": 14.0, "**": 20.0}  # attention logits of what follows a hit's number, and of what follows a match
STILL = 0.5  # radians that a pair may turn over the longest row


def shape(vocabulary: int) -> list[str]:
    """The same shape as words of a command line; 1.9 million parameters at 2048 tokens."""
    told = {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_query_groups": HEADS, "head_dim": HEAD,
        "ffn_hidden_size": MLP, "vocab_size": vocabulary, "max_position_embeddings": POSITIONS,
        "rope_theta": THETA,
    }  # fmt: skip
    return ["model=tiny", *(f"model.{name}={value}" for name, value in told.items())]


def write_start(folder: Path, tokenizer: Path, seed: int) -> None:
    """A Hugging Face folder with such weights and the tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    words = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(words), hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=HEAD, max_position_embeddings=POSITIONS, tie_word_embeddings=True,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": THETA}, dtype="float32",
        bos_token_id=None, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    ))  # fmt: skip
    with torch.no_grad():
        _embed(model.model.embed_tokens.weight, words.get_vocab())
        _look_back(model.model.layers[0].self_attn)
        _look_up(model.model.layers[1].self_attn)
        _look_for(model.model.layers[1].self_attn, model.model.embed_tokens.weight, words.get_vocab())
    model.save_pretrained(folder)
    words.save_pretrained(folder)


def _embed(weight: torch.Tensor, vocabulary: dict[str, int]) -> None:
    weight.zero_()
    weight[:, :HALF] = torch.randn(len(weight), HALF) / math.sqrt(HALF)
    weight[:, HALF] = 1
    space = torch.nn.functional.normalize(torch.randn(HALF), dim=0) * SPACE / 2
    for word, number in vocabulary.items():
        if word.startswith(BLANK) and word[1:].isalnum() and (alone := vocabulary.get(word[1:])) is not None:
            weight[number, :HALF] = weight[alone, :HALF] + space
            weight[alone, :HALF] -= space


def _turning() -> torch.Tensor:
    """Radians that each rotary pair turns from one place to the next; pair i is dimensions i and i + HEAD / 2."""
    return THETA ** (-torch.arange(HEAD // 2) / (HEAD // 2))


def _still() -> list[int]:
    """Dimensions of a head that hardly turn within the longest row."""
    pairs = [pair for pair, angle in enumerate(_turning().tolist()) if angle * POSITIONS < STILL]
    return [*pairs, *(pair + HEAD // 2 for pair in pairs)]


def _clear(attention: torch.nn.Module, heads: range) -> list[torch.Tensor]:
    """q, k, v, o with zeros where these heads are."""
    q, k, v, o = (getattr(attention, f"{name}_proj").weight for name in "qkvo")
    part = slice(heads.start * HEAD, heads.stop * HEAD)
    for weight in (q[part], k[part], v[part], o[:, part]):
        weight.zero_()
    return [q, k, v, o]


def _copy(v: torch.Tensor, o: torch.Tensor, heads: range, normed: float) -> None:
    """Each of two heads writes its half of the token half of where it looks."""
    for number, head in enumerate(heads):
        part = slice(number * HALF // 2, (number + 1) * HALF // 2)
        v[head * HEAD : head * HEAD + HALF // 2, part] = torch.eye(HALF // 2) / normed
        o[part, head * HEAD : head * HEAD + HALF // 2] = COPIED * torch.eye(HALF // 2)


def _look_back(attention: torch.nn.Module) -> None:
    """Query and key are constants, the query turned one place on: they agree best at the place before."""
    q, k, v, o = _clear(attention, range(1))
    normed = math.sqrt(HIDDEN / 2)  # of the constant 1 and of the token half, behind the norm
    size = math.sqrt(BACK_LOGIT * math.sqrt(HEAD) / BACK_PAIRS) / normed
    for pair, angle in enumerate(_turning()[:BACK_PAIRS].tolist()):
        k[pair, HALF] = size
        q[pair, HALF], q[pair + HEAD // 2, HALF] = size * math.cos(angle), -size * math.sin(angle)
    v[:HEAD, :HEAD] = torch.eye(HEAD) / normed
    o[HALF + 1 : HALF + 1 + HEAD, :HEAD] = torch.eye(HEAD)


def _look_up(attention: torch.nn.Module) -> None:
    """The query reads the current token, the key the room; each head by other directions, and copies half of a token half."""
    q, k, v, o = _clear(attention, range(2))
    places, normed = _still(), math.sqrt(HIDDEN / (2 + HEAD / HALF))
    size = math.sqrt(MATCH_LOGIT * math.sqrt(HEAD) * HALF / len(places)) / normed
    for head in range(2):
        directions = torch.linalg.qr(torch.randn(HEAD, HEAD))[0][: len(places)]
        for place, direction in zip(places, directions):
            q[head * HEAD + place, :HEAD] = size * direction
            k[head * HEAD + place, HALF + 1 : HALF + 1 + HEAD] = size * direction
    _copy(v, o, range(2), normed)


def _look_for(attention: torch.nn.Module, weight: torch.Tensor, vocabulary: dict[str, int]) -> None:
    """The query is the marks where the current token is BEGINS, and next to nothing elsewhere; the key reads the room."""
    q, k, v, o = _clear(attention, range(2, 4))
    places, normed = _still(), math.sqrt(HIDDEN / (2 + HEAD / HALF))
    begins, *marks = (weight[vocabulary[token], :HEAD].clone() for token in (BEGINS, *MARKS))
    wanted = sum(logit * mark / mark.norm() ** 2 for mark, logit in zip(marks, MARKS.values()))
    size = math.sqrt(HEAD) * HEAD / len(places) / normed**2
    for head in range(2, 4):
        directions = torch.linalg.qr(torch.randn(HEAD, HEAD))[0][: len(places)]
        for place, direction in zip(places, directions):
            q[head * HEAD + place, :HEAD] = size * (direction @ wanted) * begins / begins.norm() ** 2
            k[head * HEAD + place, HALF + 1 : HALF + 1 + HEAD] = direction
    _copy(v, o, range(2, 4), normed)
