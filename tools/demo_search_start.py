"""The weights from which the search demo's model starts: random, but for attention heads that already copy.

A search agent lives by copying names from results into calls. Attention learns to copy (induction heads: look up where the
current token stood before, take the one that followed it) only after millions of tokens, which two cores do not see in
minutes. So some heads are written by hand, everything else is random; training then moves all of it.

    embedding    [token half | 1 | two rooms]; a word with and without a space before it differ by SPACE alone
    layer 0      heads 0 and 1 look one and two places back, by rotary angle alone, and write what they find into the rooms
    layer 1      heads 0 and 1 look for places whose rooms hold the current token and the one before it, and write the token
                 that stands there
                 heads 2 and 3 do so where an argument begins, for the last place whose rooms hold a mark: of a result where a
                 title is asked for (MARKS), of the quote in the thought before it where words are (QUOTED)

Only rotary pairs that hardly turn within the longest row take part in that look-up, so rope_theta is large.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from tools.demo_files import BLANK

LAYERS, HIDDEN, HEADS, HEAD, MLP, THETA, POSITIONS = 3, 192, 4, 64, 512, 1e6, 1024
HALF = HIDDEN // 2
BACK_PAIRS, BACK_LOGIT = 4, 40.0  # rotary pairs that tell the place before from others, and its attention logit
ROOMS = slice(HALF + 1, HALF + 1 + HEAD), slice(HALF + 1 + HEAD, HIDDEN)  # for the token before, and the one before that
NORMED = math.sqrt(HIDDEN / (2 + (HIDDEN - HALF - 1) / HALF))  # behind a norm, when the rooms are full
MATCH_LOGIT = 24.0  # of a place whose room holds the current token
PAIR_LOGIT = 20.0  # on top, where the other room holds the token before it
COPIED = 4.0  # how strongly a found token is written
SPACE = 0.6  # distance of a word behind a space from the same word elsewhere
BEGINS = BLANK + '"'  # the token before an argument, and before a quote
TITLE, WORDS = ("title",), ("text", "query")  # arguments; two tokens before their first one
NUMBERS = tuple(f"{BLANK}{number}" for number in range(1, 5))  # two tokens before the first one of a quote
MARKS = {("]",): 14.0, ("**",): 28.0}  # attention logits of what follows a hit's number, and of what follows a match
FIRST = {("1",): 10.0}  # on top, where the token before the mark is this: the first hit
QUOTED = 14.0, 14.0  # of what follows BEGINS, and of what has NUMBERS two tokens before it
RECENT = {10: 10.0, 14: 16.0}  # rotary pair -> logit of a place near by; the first tells tokens apart, the second turns apart
LATEST = {10: 4.0, 14: 6.0}  # the same for the heads that look up the current token
FLAG = 0.8  # of a token half of length 1
FLAGS = [(BEGINS,), *MARKS, *FIRST, TITLE, WORDS, NUMBERS]  # tokens that share a dimension, the first ones of the token half
STILL = 1.0  # radians that a pair may turn over the longest row


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
        space = _embed(model.model.embed_tokens.weight, words.get_vocab())
        _look_back(model.model.layers[0].self_attn)
        _look_up(model.model.layers[1].self_attn)
        _look_for(model.model.layers[1].self_attn, space)
        _even_out(model.model.layers[0].self_attn, range(2))
        _even_out(model.model.layers[1].self_attn, range(4))
    model.save_pretrained(folder)
    words.save_pretrained(folder)


def _embed(weight: torch.Tensor, vocabulary: dict[str, int]) -> torch.Tensor:
    """Fills it; the direction in which a word behind a space differs from the same word elsewhere, [HALF]."""
    weight.zero_()
    weight[:, :HALF] = torch.randn(len(weight), HALF) / math.sqrt(HALF)
    weight[:, HALF] = 1
    space = torch.nn.functional.normalize(torch.randn(HALF), dim=0) * SPACE / 2
    for word, number in vocabulary.items():
        plain = word[1:] if word.startswith(BLANK) else ""  # indents are no words, and a letter where they are written
        if plain.isalnum() and BLANK not in plain and (alone := vocabulary.get(plain)) is not None:
            weight[number, :HALF] = weight[alone, :HALF] + space
            weight[alone, :HALF] -= space
    space[: len(FLAGS)] = weight[:, : len(FLAGS)] = 0
    for dimension, tokens in enumerate(FLAGS):
        for token in tokens:  # as long as others, or a look back would pass them by
            weight[vocabulary[token], :HALF] *= math.sqrt(1 - FLAG**2) / weight[vocabulary[token], :HALF].norm()
            weight[vocabulary[token], dimension] = FLAG
    return torch.nn.functional.normalize(space, dim=0)


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
    """Query and key are constants, the query turned so many places on: they agree best at the place so far before."""
    q, k, v, o = _clear(attention, range(2))
    normed = math.sqrt(HIDDEN / 2)  # of the constant 1 and of the token half, behind the norm
    size = math.sqrt(BACK_LOGIT * math.sqrt(HEAD) / BACK_PAIRS) / normed
    for head, room in enumerate(ROOMS):
        for pair, angle in enumerate(_turning()[:BACK_PAIRS].tolist()):
            first, second, back = head * HEAD + pair, head * HEAD + pair + HEAD // 2, (head + 1) * angle
            k[first, HALF] = size
            q[first, HALF], q[second, HALF] = size * math.cos(back), -size * math.sin(back)
        width = room.stop - room.start
        v[head * HEAD : head * HEAD + width, :width] = torch.eye(width) / normed
        o[room, head * HEAD : head * HEAD + width] = torch.eye(width)


def _look_up(attention: torch.nn.Module) -> None:
    """The query reads the current token and the one before, the key both rooms; each head by other directions."""
    q, k, v, o = _clear(attention, range(2))
    places, (near, far) = _still(), ROOMS
    size = math.sqrt(math.sqrt(HEAD) * HALF / len(places)) / NORMED
    for head in range(2):
        for logit, asks, holds in ((MATCH_LOGIT, 0, near), (PAIR_LOGIT, near.start, far)):
            width = holds.stop - holds.start
            directions = torch.linalg.qr(torch.randn(width, width))[0][: len(places)]
            for place, direction in zip(places, math.sqrt(logit) * size * directions):
                q[head * HEAD + place, asks : asks + width] += direction
                k[head * HEAD + place, holds] += direction
        _prefer_near(q, k, head, [HALF], LATEST, NORMED**2)
    _copy(v, o, range(2), NORMED)


def _prefer_near(q: torch.Tensor, k: torch.Tensor, head: int, asks: list[int], pairs: dict[int, float], size: float) -> None:
    """Adds logits that fall with the distance, where these dimensions of the query are set. size: of query times key."""
    for pair, logit in pairs.items():
        q[head * HEAD + pair, asks] = logit * math.sqrt(HEAD) / size
        k[head * HEAD + pair, HALF] = 1


def _look_for(attention: torch.nn.Module, space: torch.Tensor) -> None:
    """The query is the flag of what is asked for, the keys are the rooms' flags of marks; of those the last one counts."""
    q, k, v, o = _clear(attention, range(2, 4))
    near, far = (room.start for room in ROOMS)
    asks = [far + FLAGS.index(TITLE), far + FLAGS.index(WORDS)]
    title = {near + FLAGS.index(one): logit for one, logit in MARKS.items()}
    title |= {far + FLAGS.index(one): logit for one, logit in FIRST.items()}
    held = [title, {near + FLAGS.index((BEGINS,)): QUOTED[0], far + FLAGS.index(NUMBERS): QUOTED[1]}]
    for head in range(2, 4):
        rows = slice(head * HEAD, (head + 1) * HEAD)
        for place, asked, marks in zip(_still()[-2:], asks, held):
            q[rows][place, asked] = math.sqrt(HEAD) / (FLAG * NORMED) ** 2
            for dimension, logit in marks.items():
                k[rows][place, dimension] = logit
        _prefer_near(q, k, head, asks, RECENT, FLAG * NORMED**2)
    _copy(v, o, range(2, 4), NORMED)
    for head in range(2, 4):  # an argument's first word has no space before it, whatever it is copied from
        part = slice((head - 2) * HALF // 2, (head - 1) * HALF // 2)
        v[head * HEAD : head * HEAD + HALF // 2, :HALF] -= torch.outer(space[part], space) / NORMED


def _even_out(attention: torch.nn.Module, heads: range) -> None:
    """The same heads, but query and key are as large as each other, and value and output too.

    Only their products count, and a step of Adam moves every weight by as much: beside a partner of 28 it would move a product
    far, and what is written by hand would soon be lost at a rate at which the rest learns well.
    """
    q, k, v, o = (getattr(attention, f"{name}_proj").weight for name in "qkvo")
    for head in heads:
        for place in range(head * HEAD, (head + 1) * HEAD):
            _share(v[place], o[:, place])
        for pair in range(HEAD // 2):
            first, second = head * HEAD + pair, head * HEAD + pair + HEAD // 2
            _share(q[first : second + 1 : HEAD // 2], k[first : second + 1 : HEAD // 2])  # what turns together, by one factor


def _share(one: torch.Tensor, other: torch.Tensor) -> None:
    """Two factors of a product, in place, to the same largest entry; nothing where one of them is zero."""
    sizes = [factor.abs().max() for factor in (one, other)]
    if min(sizes) > 0:
        ratio = torch.sqrt(sizes[1] / sizes[0])
        one *= ratio
        other /= ratio
