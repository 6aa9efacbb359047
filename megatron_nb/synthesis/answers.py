"""Answers to prompts by a model: a checkpoint sampled through a rollout engine, or an OpenAI-compatible endpoint.

Every finished answer is on disk before the next one is counted; a resumed job asks only for what is missing. What an endpoint
does not answer after its retries is left out, and asked for again by the next attempt.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from megatron_nb.asking.askers import Answer, Asker, TooLong
from megatron_nb.asking.ledger import Ledger, Progress
from megatron_nb.data.preferences import final_answer
from megatron_nb.records import Conversation
from megatron_nb.rollout.agent import seed_of

log = logging.getLogger(__name__)


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
    row: dict[str, Any] = {"answers": [_row(answer) for answer in answers]}
    return row | {"messages": messages} if filled else row


def _row(answer: Answer) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in ("text", "whole", "tokens", "prompt_tokens")}
