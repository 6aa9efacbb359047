"""An episode as the critic reads it: the question, and step by step what was thought, called and answered.

Steps come from messages (SFT rows, both wire formats) or from the token ids of a rollout's rows; the critic sees no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megatron_nb.data import schemas
from megatron_nb.records import Rollout
from megatron_nb.rewards.text import spellings
from megatron_nb.rollout.calls import Call, parse, results
from megatron_nb.rollout.context_policy import REQUEST

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CRITERIA = ("logic", "tools", "gain")


@dataclass(frozen=True)
class Step:
    """One assistant turn and what the tools answered to it."""

    thinking: str = ""
    text: str = ""  # what it says besides thinking and calls: in the last step the answer
    calls: tuple[Call, ...] = ()
    problems: tuple[str, ...] = ()  # of calls that cannot be read
    results: tuple[str, ...] = ()  # in the order of the calls; fewer where the episode ended before
    summary: bool = False  # it was asked for a summary, with which the context begins anew

    @property
    def answers(self) -> bool:
        """Whether it ends the search."""
        return not (self.calls or self.problems or self.summary)


@dataclass(frozen=True)
class Task:
    """What was asked, and what is known of the way to the answer; empty where it is not known."""

    question: str
    schemas: tuple[dict[str, Any], ...] = ()  # of the tools, OpenAI functions
    references: tuple[str, ...] = ()  # spellings of the right answer
    path: tuple[str, ...] = ()  # titles of the pages that lead to it, in order
    evidence: tuple[str, ...] = ()  # sentences of those pages

    @classmethod
    def of(cls, question: str, tools: Iterable[dict[str, Any]] | None, row: dict[str, Any]) -> Task:
        """The task of a question row (synthesize_questions); row may hold answer, aliases, path and answer_evidence."""
        path = [hop for hop in row.get("path") or [] if isinstance(hop, dict)]
        evidence = [*(hop.get("evidence") for hop in path), row.get("answer_evidence")]
        return cls(
            question, tuple(tools or ()), tuple(spellings(row)),
            tuple(hop["title"] for hop in path if hop.get("title")), tuple(one for one in evidence if one),
        )  # fmt: skip

    def without_reference(self) -> Task:
        """The task as the agent knows it."""
        return Task(self.question, self.schemas)


@dataclass(frozen=True)
class Verdict:
    """What the critic says of one step: each criterion 0 or 1, and why it is 0 (or what speaks for it)."""

    logic: int
    tools: int
    gain: int
    reasons: dict[str, str] = field(default_factory=dict)
    invalid: bool = False  # a call that cannot be read, or that no tool takes

    @property
    def good(self) -> bool:
        return bool(self.logic and self.tools and self.gain)

    @property
    def reward(self) -> float:
        """Of the turn in reinforcement learning: the mean of the three, -1 for an invalid call."""
        return -1.0 if self.invalid else (self.logic + self.tools + self.gain) / 3

    def as_row(self) -> dict[str, Any]:
        """Plain JSON values."""
        row = {name: getattr(self, name) for name in CRITERIA} | {"reasons": self.reasons}
        return row | {"invalid": True} if self.invalid else row


# ------------------------------------------------------------------ from messages
def steps_of(messages: Sequence[dict[str, Any]], wire: str = "hermes") -> list[Step]:
    """One step for every assistant message. Calls stand in tool_calls or, in the wire format, in the text."""
    found: list[Step] = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            found.append(_step(message, _answers_after(messages, number, wire), wire))
    return found


def _step(message: dict[str, Any], answers: list[str], wire: str) -> Step:
    content = message.get("content") or ""
    read = parse(content, wire)
    thinking = "\n".join(part for part in (message.get("reasoning_content") or "", read.thinking) if part)
    calls, problems = list(read.calls), list(read.problems)
    for item in message.get("tool_calls") or []:
        try:
            function = schemas.call(item)["function"]
            calls.append(Call(function["name"], function["arguments"], str(item.get("id") or "")))
        except ValueError as error:
            problems.append(str(error))
    return Step(thinking, read.answer, tuple(calls), tuple(problems), tuple(answers))


def _answers_after(messages: Sequence[dict[str, Any]], number: int, wire: str) -> list[str]:
    """The texts of the tool results right after a message."""
    found: list[str] = []
    for message in messages[number + 1 :]:
        if message["role"] == "tool":
            found.append(message["content"] or "")
        elif message["role"] == "user" and not found:
            return results(message["content"] or "", wire)
        else:
            break
    return found


# ------------------------------------------------------------------ from token ids
def steps_of_rows(rows: Sequence[Rollout], tokenizer: PreTrainedTokenizerBase, wire: str) -> list[Step]:
    """One step for every assistant turn of an episode, over its rows in the order of their segments."""
    found: list[Step] = []
    summary = False
    for row in rows:
        for turn in row.turns:
            text = tokenizer.decode(row.ids[turn.start : turn.stop])
            if turn.kind == "assistant":
                read = parse(_without_end(text, tokenizer), wire)
                step = Step(read.thinking, read.answer, tuple(read.calls), tuple(read.problems))
                # what a summary writes as a call is words: it is never made
                found.append(Step(step.thinking, step.text, summary=True) if summary else step)
                summary = False
            elif turn.kind == "tool" and found:
                said = results(text, wire)
                summary = said[-1:] == [REQUEST]
                found[-1] = replace(found[-1], results=(*found[-1].results, *(said[:-1] if summary else said)))
    return found


def _without_end(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    for end in (tokenizer.eos_token, "<|im_end|>"):
        text = text.removesuffix(end) if end else text
    return text
