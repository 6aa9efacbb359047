"""What the tests of evaluation tasks share: a model that plays a script, and an endpoint whose replies a function chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from megatron_nb.asking.askers import Answer
from megatron_nb.evals.harness import attempt
from megatron_nb.evals.kinds import make_task
from megatron_nb.evals.task import Outcome
from megatron_nb.rollout.calls import Call
from megatron_nb.rollout.engine import Sampling
from tests.search.stub import Stub


class ScriptedAsker:
    """say(messages, tools) -> the turn: a text, or a list of calls (name, arguments). Keeps what it was asked."""

    told = "script"

    def __init__(self, say: Callable[[list[dict], list[dict] | None], Any]):
        self.say, self.asked, self.tools, self.seeds = say, [], [], []

    async def ask(self, conversation, name, seed, sampling=None) -> Answer:
        self.asked.append([dict(message) for message in conversation.messages])
        self.tools.append([tool["function"]["name"] for tool in conversation.tools or []])
        self.seeds.append(seed)
        turn = self.say(conversation.messages, conversation.tools)
        if isinstance(turn, str):
            return Answer(turn, True, len(turn.split()), 10)
        calls = [Call(name, arguments, f"call_{number}") for number, (name, arguments) in enumerate(turn)]
        return Answer("(calls)", True, 5, 10, calls, said="")


def endpoint(say: Callable[[list[dict]], Any]) -> Stub:
    """`with` it: chat completions whose reply is say(messages): a text, or a whole message."""

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        said = say(body["messages"]) if body.get("max_tokens") != 1 else ""
        message = said if isinstance(said, dict) else {"role": "assistant", "content": said}
        used = {"prompt_tokens": 3, "completion_tokens": 2}
        return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": used}

    return Stub({"/v1/chat/completions": reply})


def bodies(stub: Stub) -> list[dict[str, Any]]:
    """What it was asked, without the question whether it is there."""
    return [body for body in stub.bodies if body.get("max_tokens") != 1]


def told(url: str) -> dict[str, Any]:
    """An endpoint's settings that do not wait long."""
    return {"base_url": url, "model": "m", "retries": 1, "pause_s": 0.01, "timeout_s": 10}


def task_of(kind: str, **settings):
    """A task as the job makes it."""
    return make_task("t", {"kind": kind, **settings}, Sampling(max_tokens=256, temperature=0.7))


def outcomes(task, asker, samples: int = 1) -> list[Outcome]:
    """Every item, attempted as the harness does, one after the other."""

    async def all_of_them():
        await task.ready()
        return [await attempt(task, item, asker, index) for item in task.items() for index in range(samples)]

    try:
        return asyncio.run(all_of_them())
    finally:
        task.close()
