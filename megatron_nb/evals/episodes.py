"""An episode with tools in an evaluation: rollout/agent.py over an engine, the same loop in messages over an endpoint.

Over an engine the episode is the one that reinforcement learning trains on: token ids, both wires, every context policy.
Servers render the conversation themselves, so there a context is kept whole, or older results are replaced by a fixed line.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from megatron_nb.asking.askers import Asker, TooLong
from megatron_nb.data.prompts import prompt_ids, with_tools
from megatron_nb.evals.task import Talk
from megatron_nb.records import Conversation, Prompt
from megatron_nb.rollout.agent import Agent, AgentConfig, episode
from megatron_nb.rollout.calls import describe
from megatron_nb.rollout.context_policy import REMOVED
from megatron_nb.rollout.toolbox import ERROR, Toolbox
from megatron_nb.rollout.turn import seed_of


@dataclass
class Ended:
    """How an episode ended: done with an answer, turns (none left), length."""

    text: str  # of the last turn, thinking included
    status: str
    messages: list[dict[str, Any]]
    calls: int


class Episodes:
    """The agent of a task. ValueError for a configuration that cannot be used."""

    def __init__(self, config: AgentConfig):
        self.config, self.toolbox = config, Toolbox(config.tools)
        self._agent: Agent | None = None

    async def ready(self) -> None:
        """Raises OSError when the tools do not work."""
        await self.toolbox.ready()

    def close(self) -> None:
        self.toolbox.close()

    async def play(self, talk: Talk, messages: list[dict[str, Any]]) -> Ended:
        """One episode. Raises OSError for trouble outside the model, TooLong."""
        if getattr(talk.asker, "engine", None) is None:
            return await self._with_messages(talk, messages)
        return await self._with_ids(talk, messages)

    # ------------------------------------------------------------------ over an engine
    async def _with_ids(self, talk: Talk, messages: list[dict[str, Any]]) -> Ended:
        asker, task = talk.asker, talk.task
        agent, template = self._agent_for(asker), asker.template
        tools = self.toolbox.schemas
        said = Conversation(messages, talk.name, task.name)
        said = with_tools(said, tools, describe(tools, self.config.wire))
        ids = prompt_ids(said, template)
        if len(ids) > asker.max_prompt:
            raise TooLong(f"{len(ids)} tokens of prompt, {asker.max_prompt} are allowed")
        sampling = replace(task.sampling, stop_ids=asker.sampling.stop_ids)
        traces: list[dict[str, Any]] = []
        rows = await episode(
            asker.engine, Prompt(said, ids), sampling, group_id=talk.name, index=talk.index,
            seed=seed_of(task.config.seed, talk.name), tokenizer=asker.tokenizer, agent=agent, trace=traces.append,
        )  # fmt: skip
        last = rows[-1]
        if last.status == "invalid":
            raise OSError(last.score.reason)
        turns = [turn for row in rows for turn in row.turns if turn.kind == "assistant"]
        talk.turns, talk.whole = len(turns), last.status != "length"
        talk.tokens_in += len(ids) + sum(not mine for row in rows for mine in row.sampled_mask)
        talk.tokens_out += sum(mine for row in rows for mine in row.sampled_mask)
        talk.texts.append(last.text)
        return Ended(last.text, last.status, messages + _messages(traces[0]), sum(turn.calls for turn in turns))

    def _agent_for(self, asker: Asker) -> Agent:
        """Made once: every attempt of a job is made by one model."""
        if self._agent is None:
            room = asker.max_prompt + asker.sampling.max_tokens
            config = replace(self.config, max_tokens=min(self.config.max_tokens, room))
            self.toolbox.close()
            self.toolbox = Toolbox(config.tools, asker.tokenizer)  # which knows the tokenizer's own markers
            self._agent = Agent(config, asker.tokenizer, self.toolbox)
        return self._agent

    # ------------------------------------------------------------------ over an endpoint
    async def _with_messages(self, talk: Talk, messages: list[dict[str, Any]]) -> Ended:
        said, calls = list(messages), 0
        for _ in range(self.config.max_turns):
            answer = await talk.say(self._shortened(said), self.toolbox.schemas)
            said.append(answer.message())
            calls += len(answer.calls)
            if not answer.whole:
                return Ended(answer.text, "length", said, calls)
            if not answer.calls and not answer.problems:
                return Ended(answer.text, "done", said, calls)
            said += await self._results(answer)
        return Ended(answer.text, "turns", said, calls)

    async def _results(self, answer: Any) -> list[dict[str, Any]]:
        called, surplus = answer.calls[: self.config.calls], answer.calls[self.config.calls :]
        results = await asyncio.gather(*(self.toolbox.call(call) for call in called))
        if failed := [result.text for result in results if result.status == "failed"]:
            raise OSError(f"tools: {failed[0].removeprefix(ERROR)}")
        texts = [result.text for result in results]
        texts += [f"{ERROR}at most {self.config.calls} calls of a turn are answered, so this one was not."] * len(surplus)
        told = [{"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
                for call, text in zip(answer.calls, texts)]  # fmt: skip
        return told + [{"role": "user", "content": ERROR + problem} for problem in answer.problems]

    def _shortened(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """With older results replaced, `clear_every` at a time, so that servers can keep what they have read."""
        config = self.config
        places = [place for place, message in enumerate(messages) if message["role"] == "tool"]
        over = len(places) - config.keep_last
        if config.context != "keep_last" or over <= 0:
            return messages
        removed = set(places[: over // config.clear_every * config.clear_every])
        return [message | {"content": REMOVED} if place in removed else message for place, message in enumerate(messages)]


def _messages(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The turns of a trace as messages, without what only traces need."""
    shown: list[dict[str, Any]] = []
    for turn in trace["turns"]:
        if turn["kind"] == "assistant":
            shown.append(turn["message"])
        else:
            kept = ("role", "tool_call_id", "name", "content")
            shown += [{key: result[key] for key in kept} for result in turn["results"]]
    return shown
