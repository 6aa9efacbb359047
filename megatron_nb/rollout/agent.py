"""One episode: a prompt, turns sampled by the engine and answered by tools, rows of token ids. Without tools it has one turn.

Ids are never decoded and encoded again: what was sampled is what is trained, and a turn costs the tokens that are new in it.
A completion that was aborted (by a weight update, say) goes on from where it stopped, and every token keeps the version of
the weights that sampled it.

    how it ends   done     a turn without a call: the answer
                  turns    the last turn that is permitted still calls a tool
                  length   a turn or the row is full
                  invalid  a tool failed for no fault of the model
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from megatron_nb.records import Prompt, Rollout, Score
from megatron_nb.rollout.calls import WIRES, Parsed, parse, split_thinking
from megatron_nb.rollout.context_policy import Context
from megatron_nb.rollout.engine import Engine, Sampling, Stop
from megatron_nb.rollout.frame import Frame
from megatron_nb.rollout.rows import Rows
from megatron_nb.rollout.toolbox import ERROR, Result, Toolbox
from megatron_nb.rollout.tools import ToolsConfig
from megatron_nb.rollout.trace import Trace
from megatron_nb.rollout.turn import end_session, sample_turn, seed_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Agent", "AgentConfig", "episode", "failed", "recorded", "seed_of"]

@dataclass
class AgentConfig:
    """An agent with tools. The cap of one turn is sampling.max_tokens."""

    max_turns: int = 600  # of the model, summaries included
    max_tokens: int = 262144  # of a row, prompt included
    wire: Literal["hermes", "mcp"] = "hermes"  # how calls are written, see rollout/calls.py
    context: Literal["keep_all", "keep_last", "summarise"] = "keep_all"  # see rollout/context_policy.py
    keep_last: int = 8  # results of tools that stay
    clear_every: int = 8  # further results until the older ones are removed, which begins a new row
    summary_tokens: int = 2048
    # where the template strips thinking from history: keep | strip (a row for every turn); null refuses such a template
    thinking: Literal["keep", "strip"] | None = None
    calls: int = 8  # of one turn that are answered
    tools: ToolsConfig = field(default_factory=ToolsConfig)

    def __post_init__(self):
        for name in ("max_turns", "max_tokens", "keep_last", "clear_every", "summary_tokens", "calls"):
            if getattr(self, name) < 1:
                raise ValueError(f"agent.{name}={getattr(self, name)} must be at least 1")
        contexts = ("keep_all", "keep_last", "summarise")
        for name, known in (("wire", WIRES), ("context", contexts), ("thinking", ("keep", "strip", None))):
            if getattr(self, name) not in known:
                raise ValueError(f"agent.{name}={getattr(self, name)!r} must be one of {', '.join(map(str, known))}")


class Agent:
    """What the episodes of a job share: tools, and the frame of the template. ValueError for a template that does not do."""

    def __init__(
        self, config: AgentConfig, tokenizer: PreTrainedTokenizerBase, toolbox: Toolbox | None = None,
        keep_all_think: bool = False,
    ):  # fmt: skip
        self.config, self.tokenizer = config, tokenizer
        self.frame = Frame(tokenizer, config.wire, keep_all_think)
        if self.frame.strips and config.thinking is None:
            raise ValueError(
                f"the chat template leaves thinking out of earlier turns when agent.wire={config.wire}, so a row that keeps "
                "what was sampled would not be its rendering: set agent.thinking=keep (rows keep it), agent.thinking=strip (a "
                "row for every turn, history as the template writes it), or prompts.keep_all_think=true where it is known"
            )
        self.toolbox = toolbox or Toolbox(config.tools, tokenizer)

    def context(self, prompt: Prompt, rows: Rows) -> Context:
        """The context of a new episode. ValueError for a prompt that leaves no room."""
        c = self.config
        context = Context(
            prompt, rows, self.frame, policy=c.context, keep_last=c.keep_last, clear_every=c.clear_every,
            max_tokens=c.max_tokens, summary_tokens=c.summary_tokens, strip=c.thinking == "strip" and self.frame.strips,
        )  # fmt: skip
        if context.room < 1:
            raise ValueError(
                f"a prompt of {len(prompt.ids)} tokens leaves no room for a turn in agent.max_tokens={c.max_tokens}, of which "
                f"{context.reserve} are kept for a summary: raise it or lower prompts.max_tokens"
            )
        return context

    async def answer(self, said: Parsed) -> list[Result]:
        """The results of a turn's calls, in their order, then a correction for each that could not be read."""
        called, surplus = said.calls[: self.config.calls], said.calls[self.config.calls :]
        results = list(await asyncio.gather(*(self.toolbox.call(call) for call in called)))
        told = [f"at most {self.config.calls} calls of a turn are answered, so this one was not."] * len(surplus)
        # problems quote the model: its words are data like those of any tool
        return results + [Result(self.toolbox.as_data(ERROR + text), "error") for text in (*told, *said.problems)]

    def close(self) -> None:
        self.toolbox.close()


async def episode(
    engine: Engine, prompt: Prompt, sampling: Sampling, *, group_id: str, index: int, seed: int,
    tokenizer: PreTrainedTokenizerBase, agent: Agent | None = None, trace: Callable[[dict[str, Any]], None] | None = None,
) -> list[Rollout]:  # fmt: skip
    """The rows of one episode. Errors of the engine pass through; a cancelled episode aborts its request first.

    trace: is given the trace of the episode, once, however it ended; not without an agent.
    """
    rows = Rows(prompt.ids, recorded(sampling, agent), seed, group_id, index)
    if agent is None:
        stop = await sample_turn(engine, rows, sampling, tokenizer)
        return rows.end("done" if stop is Stop.EOS else "length")
    notes, status, reason = Trace(prompt, group_id, index, seed), "stopped", ""
    try:
        status, reason = await _turns(engine, rows, agent.context(prompt, rows), sampling, agent, notes)
    except asyncio.CancelledError:
        raise
    except Exception as error:
        status, reason = "invalid", f"{type(error).__name__}: {error}"
        raise
    finally:
        if trace is not None:
            trace(notes.row(status, reason))
        await end_session(engine, rows.row.rollout_id)
    done = rows.end(status)
    if status == "invalid":
        for row in done:
            row.score = Score(None, reason=reason)
    return done


async def _turns(
    engine: Engine, rows: Rows, context: Context, sampling: Sampling, agent: Agent, notes: Trace
) -> tuple[str, str]:  # fmt: skip
    """Turn after turn until the episode ends; (status, reason)."""
    calls = 0  # of the episode so far
    while True:
        capped = replace(sampling, max_tokens=min(sampling.max_tokens, context.room))
        stop = await sample_turn(engine, rows, capped, agent.tokenizer, shared=True)
        turn, tokens, segment = rows.row.turns[-1], rows.turn_ids, rows.row.segment
        said = parse(rows.row.text, agent.config.wire, calls)
        turn.calls = len(said.calls)
        calls += turn.calls
        if stop is Stop.EOS and said.problems:
            turn.status = "malformed"
        notes.said(segment, len(tokens), turn.status, said)
        if stop is not Stop.EOS:
            return "length", ""
        if not said.calls and not said.problems:
            return "done", ""
        if rows.sampled_turns >= agent.config.max_turns:
            return "turns", ""
        context.said(tokens, rows.row.text)
        results = await agent.answer(said)
        if failed := [result.text for result in results if result.status == "failed"]:
            notes.answered(segment, 0, "failed", said.calls, results)
            return "invalid", f"tools: {failed[0].removeprefix(ERROR)}"
        status = "error" if any(result.status == "error" for result in results) else "ok"
        texts = [result.text for result in results]
        if context.wants_summary(texts, sampling.max_tokens):
            context.ask_summary(texts, status)
            notes.answered(segment, len(rows.turn_ids), status, said.calls, results)
            ended = await _summarise(engine, rows, context, sampling, agent, notes)
            if ended:
                return ended, ""
        elif not context.answer(texts, status):
            notes.answered(segment, 0, status, said.calls, results)
            return "length", ""
        else:
            notes.answered(rows.row.segment, len(rows.turn_ids), status, said.calls, results)


async def _summarise(
    engine: Engine, rows: Rows, context: Context, sampling: Sampling, agent: Agent, notes: Trace
) -> str:  # fmt: skip
    """Let the model write its summary and begin a row with it; how the episode ended, or "" when it goes on."""
    capped = replace(sampling, max_tokens=context.summary_tokens)
    stop = await sample_turn(engine, rows, capped, agent.tokenizer, shared=True)
    said = parse(rows.row.text, agent.config.wire)
    notes.said(rows.row.segment, len(rows.turn_ids), rows.row.turns[-1].status, said, summary=True)
    if stop is not Stop.EOS:
        return "length"
    if rows.sampled_turns >= agent.config.max_turns:
        return "turns"
    # what the model wrote becomes a part of the task: its markers are data now, and a call in it is words
    summary = agent.toolbox.as_data(split_thinking(rows.row.text)[1].strip()) or "(none was written)"
    return "" if context.restart(summary) else "length"


def recorded(sampling: Sampling, agent: Agent | None = None) -> dict[str, Any]:
    """The sampling, and the agent's settings, as they are kept with every rollout: plain JSON values."""
    told = {**asdict(sampling), "stop_ids": list(sampling.stop_ids)}
    if agent is not None:
        told["agent"] = json.loads(json.dumps(asdict(agent.config), default=str))
    return told


def failed(
    prompt: Prompt, sampling: Sampling, *, group_id: str, index: int, seed: int, reason: str, agent: Agent | None = None
) -> Rollout:  # fmt: skip
    """What stands for an episode that did not come to its end: invalid, and it says why."""
    return Rollout(
        list(prompt.ids), [], [], [], [], [], [], "invalid", recorded(sampling, agent), seed, group_id, index,
        score=Score(None, reason=reason),
    )  # fmt: skip
