"""Prompts for sampling: which rows become prompts, which are short enough, and the order in which steps take them.

A row is a conversation up to the turn to be sampled ({"messages": [...]} or "conversations"), or a "prompt", "question" or
"problem", as a string or as messages. Its other fields stay with the prompt: rewards compare with them. A conversation that
ends with an answer gives the prompt before it; that answer stays as "reference".

The order is a pure function of seed and position: epoch after epoch, each shuffled anew; a position is all a resume needs.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_nb.data.formats import KEYS, parse
from megatron_nb.data.rows import BadRow, data_files, decode, raw_rows
from megatron_nb.data.split import held_out
from megatron_nb.data.turns import Template
from megatron_nb.records import Conversation, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

ASKING = ("prompt", "question", "problem")


@dataclass
class PromptSource:
    """One source of prompts."""

    path: str  # a file, a folder or a glob of .jsonl, .json, .parquet, plain or .gz


@dataclass
class PromptConfig:
    """The prompts of a job of reinforcement learning."""

    sources: dict[str, PromptSource] = field(default_factory=dict)
    heldout: dict[str, PromptSource] = field(default_factory=dict)  # never trained on; answered and judged every so often
    heldout_share: float = 0.0  # of `sources` to hold out by a fixed split of the prompts' text
    heldout_limit: int = 128  # held-out prompts that are answered at most; the first ones of a fixed shuffle
    max_tokens: int = 1024  # longer prompts are left out; counted with template, tools and generation header
    tokenizer: str | None = None  # folder of a Hugging Face model or checkpoint; None: that of init_from
    chat_template: str | None = None  # a Jinja file, or chatml (built in); None: the tokenizer's own
    keep_all_think: bool = False  # thinking of earlier turns stays in the context (if the template knows it)
    bad_rows: str = "error"  # a row that cannot be read or rendered: error | skip

    def __post_init__(self):
        if self.max_tokens < 1 or self.heldout_limit < 1:
            raise ValueError(
                f"prompts.max_tokens={self.max_tokens} and heldout_limit={self.heldout_limit} must be at least 1"
            )
        if not 0 <= self.heldout_share < 1:
            raise ValueError(f"prompts.heldout_share={self.heldout_share} must be in [0, 1): what is left is trained on")
        if self.bad_rows not in ("error", "skip"):
            raise ValueError(f"prompts.bad_rows={self.bad_rows!r} must be one of error, skip")


class PromptSet:
    """The prompts of a job: those to train on, in an endless order, and those held out."""

    def __init__(self, training: list[Prompt], heldout: list[Prompt], seed: int):
        self.training, self.heldout, self.seed = training, heldout, seed
        self._order = lru_cache(maxsize=4)(self._permutation)

    def __len__(self) -> int:
        return len(self.training)

    def at(self, position: int) -> Prompt:
        """The prompt at this place of the endless order."""
        epoch, place = divmod(position, len(self.training))
        return self.training[self._order(epoch)[place]]

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.training))

    def only(self, kept: Sequence[int]) -> PromptSet:
        """The set with these training prompts alone."""
        return PromptSet([self.training[index] for index in kept], self.heldout, self.seed)

    @property
    def digest(self) -> str:
        """Of what decides the order and what is sampled after: a resume compares it."""
        digest = hashlib.blake2b(str(self.seed).encode(), digest_size=8)
        for prompt in self.training:
            digest.update(np.asarray(prompt.ids, np.int64).tobytes() + b"|")
        return digest.hexdigest()


def open_prompts(
    config: PromptConfig, tokenizer: PreTrainedTokenizerBase, seed: int,
    tools: list[dict[str, Any]] | None = None, told: str = "",
) -> PromptSet:  # fmt: skip
    """Read, render, filter and split. Raises ValueError, and BadRow unless bad rows are to be skipped.

    tools: of an agent, in the place of a row's own; told: what the system message says of them where the template does not.
    """
    if not config.sources:
        raise ValueError("prompts.sources is empty: sampling needs prompts; set prompts.sources.NAME.path=FILE")

    def short(rows: list[tuple[Conversation, dict[str, Any]]]) -> list[Prompt]:
        said = [with_tools(conversation, tools, told) for conversation, _ in rows]
        data = [data | ({"tools": tools} if told else {}) for _, data in rows]  # a critic wants to know them
        return filter_prompts(said, tokenizer, config.max_tokens, config.keep_all_think, data, config.bad_rows == "skip")[0]

    training, apart = [], []
    for row in _rows(config.sources, config):
        (apart if held_out(_said(row[0]), config.heldout_share) else training).append(row)
    apart += _rows(config.heldout, config)
    order = np.random.default_rng(seed).permutation(len(apart))[: config.heldout_limit]
    return PromptSet(short(training), short([apart[index] for index in order]) if apart else [], seed)


def read_prompt(row: dict[str, Any], where: str, source: str) -> tuple[Conversation, dict[str, Any]]:
    """(conversation up to the turn to be sampled, the row's other fields). Raises BadRow."""
    used = {"tools", "system", "id"}
    key = next((key for key in (KEYS["messages"], KEYS["sharegpt"], *ASKING) if row.get(key) is not None), None)
    if key is None:
        raise BadRow.at(where, f"keys are {', '.join(map(str, row)) or 'none'}", "a prompt needs messages, conversations, "
                        f"{', '.join(ASKING)}", "rename the key")  # fmt: skip
    asked = row[key]
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    shape = {name: row[name] for name in used if name in row}
    conversation = parse({**shape, "messages": asked}, where, source, "messages", answers=False)
    data = {name: value for name, value in row.items() if name not in used | {key}}
    if conversation.messages[-1]["role"] == "assistant":
        answer = conversation.messages.pop()
        data.setdefault("reference", answer["content"])
    if not conversation.messages or conversation.messages[-1]["role"] == "system":
        raise BadRow.at(where, "nothing is asked", "a prompt ends with a user's or a tool's message")
    return conversation, data


def with_tools(conversation: Conversation, tools: list[dict[str, Any]] | None, told: str) -> Conversation:
    """The conversation with an agent's tools: for the template to write, or at the end of the system message as `told`."""
    if not tools:
        return conversation
    if not told:
        return replace(conversation, tools=tools)
    system = [message for message in conversation.messages[:1] if message["role"] == "system"]
    told = "\n\n".join([*(message["content"] for message in system), told])
    messages = [{"role": "system", "content": told}, *conversation.messages[len(system) :]]
    return replace(conversation, tools=None, messages=messages)


def prompt_ids(conversation: Conversation, template: Template) -> list[int]:
    """Tokens of the conversation with its tools and the generation header. Raises BadRow when the template refuses it."""
    text = template.write(conversation, conversation.messages, header=True)
    return template.tokenizer(text, add_special_tokens=False).input_ids


def filter_prompts(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    keep_all_think: bool = False,
    data: Sequence[dict[str, Any]] | None = None,
    skip: bool = False,
) -> tuple[list[Prompt], dict[str, int]]:
    """(prompts of at most max_tokens, counts). data: the other fields of each row; skip: leave out what cannot be rendered.

    Raises ValueError when none is left, and BadRow.
    """
    template, prompts, refused = Template(tokenizer, keep_all_think), [], 0
    for conversation, fields in zip(conversations, data or [{} for _ in conversations], strict=True):
        try:
            prompts.append(Prompt(conversation, prompt_ids(conversation, template), fields))
        except BadRow as error:
            if not skip:
                raise
            refused += 1
            log.warning("left out: %s", error)
    kept = [prompt for prompt in prompts if len(prompt.ids) <= max_tokens]
    counts = {"prompts": len(conversations), "kept": len(kept), "too_long": len(prompts) - len(kept)}
    counts |= {"refused": refused} if refused else {}
    longest = max((len(prompt.ids) for prompt in prompts), default=0)
    log.info("%(prompts)d prompts, %(kept)d kept, %(too_long)d too long", counts)
    if not kept:
        raise ValueError(
            f"none of {len(conversations)} prompts has at most max_tokens={max_tokens} tokens with template, tools and "
            f"generation header (longest {longest}): sampling needs prompts; raise the limit or check the data"
        )
    return kept, counts


def _rows(sources: dict[str, PromptSource], config: PromptConfig) -> Iterator[tuple[Conversation, dict[str, Any]]]:
    for source, given in sources.items():
        for where, raw in _raw(given.path):
            try:
                yield read_prompt(decode(where, raw), where, source)
            except BadRow as error:
                if config.bad_rows == "error":
                    raise
                log.warning("left out: %s", error)


def _raw(path: str) -> Iterable[tuple[str, bytes | dict[str, Any]]]:
    for file in data_files(path):
        yield from raw_rows(file)


def _said(conversation: Conversation) -> str:
    """What decides the split: the same question stays on one side, wherever it stands."""
    return json.dumps([[message["role"], message["content"]] for message in conversation.messages], ensure_ascii=False)
