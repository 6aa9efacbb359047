"""One object that answers: a checkpoint behind a rollout engine, or a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from megatron_nb.client import Client, ClientConfig
from megatron_nb.data.prompts import prompt_ids
from megatron_nb.data.turns import Template
from megatron_nb.records import Conversation, Prompt
from megatron_nb.rollout.agent import episode
from megatron_nb.rollout.calls import Call, parse, split_thinking
from megatron_nb.rollout.engine import Engine, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
class Answer:
    """One turn of the model."""

    text: str  # thinking included; calls too, where the model wrote them as text
    whole: bool  # False: cut off at max_tokens
    tokens: int
    prompt_tokens: int = 0  # what the question cost; 0: not told
    calls: list[Call] = field(default_factory=list)  # of tools, where the conversation has any
    problems: list[str] = field(default_factory=list)  # calls that cannot be read, each a sentence for the model
    said: str | None = None  # without thinking and calls

    def message(self) -> dict[str, Any]:
        """The turn as a message of the conversation that goes on; without its thinking, as templates leave it out."""
        said = split_thinking(self.text)[1].strip() if self.said is None else self.said
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        return {"role": "assistant", "content": said} | ({"tool_calls": calls} if calls else {})


class TooLong(ValueError):
    """The model can never be asked this."""


class Asker(Protocol):
    """Who answers. told: its name for files and tables."""

    told: str

    async def ask(self, conversation: Conversation, name: str, seed: int, sampling: Sampling | None = None) -> Answer:
        """One answer; sampling=None: as configured. OSError when there was none after all retries, TooLong for ever."""


class EngineAsker:
    """A checkpoint behind a rollout engine. max_prompt: tokens of a prompt at most; wire: how it writes calls."""

    def __init__(
        self, engine: Engine, tokenizer: PreTrainedTokenizerBase, config: AnswererConfig, max_prompt: int, wire: str = "hermes"
    ):
        self.engine, self.tokenizer, self.template, self.max_prompt = engine, tokenizer, Template(tokenizer), max_prompt
        self.sampling = config.sampling([tokenizer.convert_tokens_to_ids(self.template.end)])
        self.told, self.wire = config.told, wire

    async def ask(self, conversation: Conversation, name: str, seed: int, sampling: Sampling | None = None) -> Answer:
        ids = prompt_ids(conversation, self.template)
        if len(ids) > self.max_prompt:
            raise TooLong(f"{len(ids)} tokens of prompt, {self.max_prompt} are allowed")
        wanted = replace(sampling, stop_ids=self.sampling.stop_ids) if sampling else self.sampling
        (rollout,) = await episode(
            self.engine, Prompt(conversation, ids), wanted, group_id=name, index=0, seed=seed, tokenizer=self.tokenizer
        )
        answer = Answer(rollout.text, rollout.status == "done", len(rollout.ids), len(ids))
        if conversation.tools:
            said = parse(rollout.text, self.wire)
            answer.calls, answer.problems, answer.said = said.calls, said.problems, said.answer
        return answer


class EndpointAsker:
    """A model behind an OpenAI-compatible server."""

    def __init__(self, config: AnswererConfig):
        self.config, self.client, self.told = config, Client(config.endpoint), config.told

    async def ask(self, conversation: Conversation, name: str, seed: int, sampling: Sampling | None = None) -> Answer:
        wanted = sampling or self.config.sampling(())
        body = {
            "model": self.config.endpoint.model, "messages": [_sent(message) for message in conversation.messages],
            "temperature": wanted.temperature, "top_p": wanted.top_p, "max_tokens": wanted.max_tokens, "seed": seed % 2**31,
        }  # fmt: skip
        if conversation.tools:
            body["tools"] = conversation.tools
        return await self.client.post("/v1/chat/completions", body, _read)


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message as servers want it: the arguments of calls are text there."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": _utf8(arguments)}})
    return message | {"tool_calls": calls}


def _utf8(text: str) -> str:
    """Half of a surrogate pair, which JSON can name, becomes a question mark: it could be neither sent nor written."""
    return text.encode("utf-8", "replace").decode()


def _read(reply: dict[str, Any]) -> Answer:
    choice = reply["choices"][0]
    said = text = _utf8(choice["message"].get("content") or "")
    if thought := _utf8(choice["message"].get("reasoning_content") or ""):
        text = f"<think>\n{thought}\n</think>\n\n{text}"
    used = reply.get("usage") or {}
    whole = choice.get("finish_reason") != "length"
    answer = Answer(text, whole, used.get("completion_tokens") or 0, used.get("prompt_tokens") or 0)
    for number, call in enumerate(choice["message"].get("tool_calls") or []):
        name, arguments = call["function"]["name"], call["function"].get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(arguments, dict):
                raise ValueError("they are no object")
        except ValueError as error:
            answer.problems.append(f"The arguments of call {number + 1} ({name}) cannot be read: {error}.")
            continue
        answer.calls.append(Call(name, arguments, call.get("id") or f"call_{number}"))
    if answer.calls or answer.problems:
        answer.said = split_thinking(said)[1].strip()
    return answer
