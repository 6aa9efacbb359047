"""A model behind an OpenAI-compatible endpoint that is asked about answers, and what tasks that have one begin with."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_nb.client import Client, ClientConfig
from megatron_nb.data.preferences import final_answer
from megatron_nb.evals.task import Task, TaskConfig

T = TypeVar("T")
DASHES = re.compile(r"-{4,}")


class Judge:
    """One judge, for all attempts of a task."""

    def __init__(self, config: ClientConfig, max_tokens: int):
        self._client, self._max_tokens = Client(config), max_tokens

    async def ask(self, template: str, read: Callable[[str], T], **fields: Any) -> T:
        """`read` of what the judge says after its thinking; what it raises ValueError on is asked for again.

        Fields stand as {NAME}. They are data: all are filled in at once, and lines of dashes, which frame them, are shortened.
        Raises OSError (RequestFailed) when there is no verdict.
        """
        texts = {name: DASHES.sub("---", str(value)) for name, value in fields.items()}
        asked = re.sub(r"\{(\w+)\}", lambda found: texts.get(found[1], found[0]), template)
        sent = {"max_tokens": self._max_tokens, "temperature": 0.0}
        return await self._client.chat([{"role": "user", "content": asked}], lambda said: read(final_answer(said)), **sent)


@dataclass(kw_only=True)
class JudgedConfig(TaskConfig):
    """A task's own Config derives from it."""

    judge: ClientConfig
    judge_tokens: int = 4096  # of one verdict

    def __post_init__(self):
        super().__post_init__()
        if self.judge_tokens < 1:
            raise ValueError(f"judge_tokens={self.judge_tokens} must be at least 1")


class JudgedTask(Task):
    """A task that asks `self._judge` about answers."""

    Config = JudgedConfig

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._judge = Judge(self.config.judge, self.config.judge_tokens)

    async def ready(self) -> None:
        await reach(self.config.judge)


async def reach(config: ClientConfig) -> None:
    """Ask an endpoint for one token. OSError when it does not answer: better now than after the first answers are there."""
    asked = [{"role": "user", "content": "Hello"}]
    body = {"model": config.model, "messages": asked, "max_tokens": 1}
    await Client(config).post("/v1/chat/completions", body, lambda answer: answer["choices"][0])


def transcript(messages: list[dict[str, Any]]) -> str:
    """A conversation as text, without thinking."""
    said = ((message["role"], message.get("content") or "") for message in messages)
    return "\n\n".join(f"[{role}]\n{final_answer(text) if role == 'assistant' else text}" for role, text in said)
