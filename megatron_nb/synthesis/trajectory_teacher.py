"""Who teaches: a model behind any OpenAI-compatible endpoint, one for all roles or one each; or the scripted oracle."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_nb.client import Client, ClientConfig
from megatron_nb.rollout.agent import seed_of
from megatron_nb.synthesis.oracle import Oracle
from megatron_nb.synthesis.trajectories import ROLES, Teacher


@dataclass
class TeacherConfig:
    """The teacher. kind=oracle walks the path that the question's row records, with the real tools."""

    kind: Literal["endpoint", "oracle"] = "endpoint"
    endpoint: ClientConfig | None = None  # plays every role that has none of its own
    roles: dict[str, ClientConfig] = field(default_factory=dict)  # planner | searcher | writer
    temperature: float = 0.8  # (own)
    max_tokens: int = 4096  # of one reply

    def validate(self) -> None:
        """Raises ValueError for what no job could use."""
        if self.max_tokens < 1 or self.temperature < 0:
            raise ValueError(
                f"teacher.max_tokens={self.max_tokens} must be at least 1, teacher.temperature={self.temperature} at least 0"
            )
        if unknown := set(self.roles) - set(ROLES):
            raise ValueError(f"teacher.roles={sorted(unknown)} must be some of {', '.join(ROLES)}")
        missing = [role for role in ROLES if role not in self.roles]
        if self.kind == "endpoint" and self.endpoint is None and missing:
            raise ValueError(
                f"teacher.endpoint is not set and {', '.join(missing)} has no endpoint in teacher.roles: set "
                "teacher.endpoint.base_url=http://HOST:PORT teacher.endpoint.model=NAME, or teacher.kind=oracle"
            )
        for name, one in [("endpoint", self.endpoint), *((f"roles.{role}", one) for role, one in self.roles.items())]:
            if one is not None and not one.model:
                raise ValueError(f"teacher.{name}.model is not set: name the model that {one.base_url} serves")
        if self.kind == "oracle" and (self.endpoint or self.roles):
            raise ValueError("teacher.kind=oracle needs no endpoint: leave teacher.endpoint and teacher.roles out")

    @property
    def told(self) -> str:
        """Who it is, for the card and the name of the ledger."""
        if self.kind == "oracle":
            return "oracle"
        served = {role: self.roles.get(role) or self.endpoint for role in ROLES}
        return "; ".join(f"{role}: {one.model} at {one.base_url}" for role, one in served.items())


class Teachers:
    """Makes the teacher of each attempt; holds the connections."""

    def __init__(self, config: TeacherConfig, seed: int):
        self.config, self.seed = config, seed
        shared = Client(config.endpoint) if config.endpoint else None
        self.clients = {role: Client(config.roles[role]) if role in config.roles else shared for role in ROLES}

    def __call__(self, row: dict[str, Any], number: int) -> Teacher:
        seed = seed_of(self.seed, row["id"], number)
        if self.config.kind == "oracle":
            return Oracle(row, seed)
        return EndpointTeacher(self.config, self.clients, seed)


class EndpointTeacher:
    """A model in all roles. RequestFailed after the client's retries."""

    def __init__(self, config: TeacherConfig, clients: dict[str, Client | None], seed: int):
        self.config, self._clients, self._seed, self._asked = config, clients, seed, 0

    async def reply(self, role: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        client = self._clients[role]
        self._asked += 1
        body = {
            "model": client.config.model, "messages": [_sent(message) for message in messages],
            "temperature": self.config.temperature, "max_tokens": self.config.max_tokens,
            "seed": seed_of(self._seed, self._asked) % 2**31,  # a repeated prompt is not to get the same reply
        }  # fmt: skip
        if tools:
            body["tools"] = tools
        return await client.post("/v1/chat/completions", body, _message)


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message as every server takes it: reasoning within the content, arguments as JSON text."""
    sent = {key: message[key] for key in ("role", "tool_call_id") if key in message}
    sent["content"] = "\n\n".join(part for part in (message.get("reasoning_content"), message.get("content")) if part)
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}} for call in calls
        ]
    if message["role"] == "tool" and "tool_call_id" not in message:
        sent["role"] = "user"  # the answer to a call that could not be read
    return sent


def _message(answer: Any) -> dict[str, Any]:
    """The message of a reply; what follows is read by trajectories.py. Raises for another form, so that it is asked again."""
    # half a surrogate pair, as a cut answer may end, could be written to no file
    message = json.loads(json.dumps(answer["choices"][0]["message"], ensure_ascii=False).encode("utf-8", "replace"))
    for key in ("content", "reasoning_content", "reasoning"):
        if message.get(key) is not None and not isinstance(message[key], str):
            raise ValueError(f"message.{key} is {str(message[key])[:80]!r}, not text")
    if not isinstance(message.get("tool_calls") or [], list):
        raise ValueError("message.tool_calls is no list")
    if not any(message.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls")):
        raise ValueError("the message is empty")
    return {
        "role": "assistant", "content": message.get("content") or "",
        "reasoning_content": message.get("reasoning_content") or message.get("reasoning") or "",
        "tool_calls": message.get("tool_calls") or [],
    }  # fmt: skip
