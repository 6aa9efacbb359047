"""Answers to prompts by a model: a checkpoint sampled through a rollout engine, or an OpenAI-compatible endpoint.

Every finished answer is on disk before the next one is counted; a resumed job asks only for what is missing. What an endpoint
does not answer after its retries is left out, and asked for again by the next attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megatron_nb.client import Client, ClientConfig
from megatron_nb.data.preferences import final_answer
from megatron_nb.data.prompts import prompt_ids
from megatron_nb.data.turns import Template
from megatron_nb.records import Conversation, Prompt
from megatron_nb.rollout.agent import episode, seed_of
from megatron_nb.rollout.engine import Engine, Sampling
from megatron_nb.synthesis.ledger import Ledger, Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass
class AnswererConfig:
    """A model and how it is sampled. Exactly one of checkpoint and endpoint."""

    checkpoint: str | None = None  # Hugging Face folder, run, or step folder
    endpoint: ClientConfig | None = None  # an OpenAI-compatible server
    chat_template: str | None = None  # of the checkpoint: a Jinja file, or chatml (built in); None: the tokenizer's own
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 2048  # of one answer
    samples: int = 1  # answers to every prompt

    def validate(self, name: str) -> None:
        """Raises ValueError for what no job could use."""
        if (self.checkpoint is None) == (self.endpoint is None):
            given = "neither" if self.checkpoint is None else "both"
            raise ValueError(f"{name}.checkpoint and {name}.endpoint: {given} given; one of them says who answers")
        if self.samples < 1:
            raise ValueError(f"{name}.samples={self.samples} must be at least 1")
        self.sampling(())

    def sampling(self, stop_ids: Iterable[int]) -> Sampling:
        return Sampling(self.max_tokens, self.temperature, self.top_p, stop_ids=tuple(stop_ids))

    @property
    def told(self) -> str:
        """Who answers, for the provenance of a pair."""
        return self.checkpoint or f"{self.endpoint.base_url} {self.endpoint.model}".strip()


@dataclass
class Question:
    """A conversation up to the turn to be answered. A user turn right after a user turn waits for an answer between them."""

    id: str
    conversation: Conversation
    data: dict[str, Any] = field(default_factory=dict)  # the row's other fields: what a judge compares with
    adversarial: str = ""  # the kind of its transform

    def with_messages(self, messages: list[dict[str, Any]]) -> Question:
        said = Conversation(messages, self.conversation.sample_id, self.conversation.source, self.conversation.tools)
        return Question(self.id, said, self.data, self.adversarial)


@dataclass
class Answer:
    text: str  # thinking included
    whole: bool  # False: cut off at max_tokens
    tokens: int
    prompt_tokens: int = 0  # what the question cost; 0: not told


class TooLong(ValueError):
    """The model can never be asked this."""


class Asker(Protocol):
    async def ask(self, conversation: Conversation, name: str, seed: int) -> Answer:
        """One answer. OSError when there was none after all retries, TooLong when there can be none."""


class EngineAsker:
    """A checkpoint behind a rollout engine. max_prompt: tokens of a prompt at most."""

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase, config: AnswererConfig, max_prompt: int):
        self.engine, self.tokenizer, self.template, self.max_prompt = engine, tokenizer, Template(tokenizer), max_prompt
        self.sampling = config.sampling([tokenizer.convert_tokens_to_ids(self.template.end)])

    async def ask(self, conversation: Conversation, name: str, seed: int) -> Answer:
        ids = prompt_ids(conversation, self.template)
        if len(ids) > self.max_prompt:
            raise TooLong(f"{len(ids)} tokens of prompt, {self.max_prompt} are allowed")
        (rollout,) = await episode(
            self.engine, Prompt(conversation, ids), self.sampling, group_id=name, index=0, seed=seed, tokenizer=self.tokenizer
        )
        return Answer(rollout.text, rollout.status == "done", len(rollout.ids), len(ids))


class EndpointAsker:
    """A model behind an OpenAI-compatible server."""

    def __init__(self, config: AnswererConfig):
        self.config, self.client = config, Client(config.endpoint)

    async def ask(self, conversation: Conversation, name: str, seed: int) -> Answer:
        body = {
            "model": self.config.endpoint.model, "messages": conversation.messages, "temperature": self.config.temperature,
            "top_p": self.config.top_p, "max_tokens": self.config.max_tokens, "seed": seed % 2**31,
        }  # fmt: skip
        if conversation.tools:
            body["tools"] = conversation.tools
        return await self.client.post("/v1/chat/completions", body, _read)


def _read(reply: dict[str, Any]) -> Answer:
    choice = reply["choices"][0]
    text = choice["message"].get("content") or ""
    if thought := choice["message"].get("reasoning_content"):
        text = f"<think>\n{thought}\n</think>\n\n{text}"
    used = reply.get("usage") or {}
    whole = choice.get("finish_reason") != "length"
    return Answer(text, whole, used.get("completion_tokens", 0), used.get("prompt_tokens", 0))


async def answer_all(
    asker: Asker, questions: list[Question], ledger: Ledger, side: str, samples: int, seed: int, concurrency: int
) -> None:  # fmt: skip
    """Ask every question whose answers are not in the ledger; rows are {"answers": [...], "messages"?} or {"dropped": why}.

    Answers that a conversation lacks before its last user turn are asked for first and kept as row["messages"].
    """
    open_ = [question for question in questions if question.id not in ledger]
    progress, room = Progress(f"answers of the {side} model", len(questions), len(questions) - len(open_)), None
    room = asyncio.Semaphore(concurrency)

    async def one(question: Question) -> None:
        async with room:
            try:
                ledger[question.id] = await _answers(asker, question, side, samples, seed)
            except TooLong as error:
                ledger[question.id] = {"dropped": "too_long", "reason": str(error)}
            except OSError as error:
                log.warning("%s: no answer of the %s model: %s", question.id, side, error)
            progress.tick()

    async with asyncio.TaskGroup() as group:
        for question in open_:
            group.create_task(one(question))


async def _answers(asker: Asker, question: Question, side: str, samples: int, seed: int) -> dict[str, Any]:
    said, filled = question.conversation, 0
    messages: list[dict[str, Any]] = []
    for message in said.messages:
        if message["role"] == "user" and messages and messages[-1]["role"] == "user":
            so_far = question.with_messages(messages).conversation
            name = f"{question.id}/{side}/turn{len(messages)}"
            text = final_answer((await asker.ask(so_far, name, seed_of(seed, name))).text)
            if not text:
                return {"dropped": "empty_turn", "reason": f"turn {len(messages)} of the history was answered with nothing"}
            messages.append({"role": "assistant", "content": text})
            filled += 1
        messages.append(message)
    said = question.with_messages(messages).conversation
    names = [f"{question.id}/{side}/{number}" for number in range(samples)]
    answers = await asyncio.gather(*(asker.ask(said, name, seed_of(seed, name)) for name in names))
    row: dict[str, Any] = {"answers": [vars(answer) for answer in answers]}
    return row | {"messages": messages} if filled else row
