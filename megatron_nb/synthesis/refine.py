"""Refinement of solutions and reconstruction of the reasoning that leads to them.

    checklist   is written for the task, without sight of an answer
    round 0     the draft is critiqued: a verdict for every item
    round n     the best answer so far is rewritten by its failed items, and critiqued in turn
    end         every item passes; or the rewriting changes nothing, or does not pass more items; or the rounds are used up
    reasoning   a chain-of-thought model writes what leads to the best answer; accepted by the rules below, or written again

An answer with more than `open_items` failed items gets no reasoning. Rules, by which a record is rejected (all that apply):
failed items, and leaks in the answer itself; of the reasoning: unreadable, cut off, its final answer another one than the
refined one's, leaks (refine_leaks.py), too short, too long; and, where `require_reference` is set, a refined answer that is
not the row's reference.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_nb.asking.askers import TooLong
from megatron_nb.data.preferences import final_answer
from megatron_nb.data.prompts import PromptSource, read_prompt
from megatron_nb.data.rows import BadRow, data_files, decode, raw_rows
from megatron_nb.records import Conversation
from megatron_nb.synthesis.refine_calls import Calls, Unreadable
from megatron_nb.synthesis.refine_leaks import LeakConfig, leaks_in, phrases_in
from megatron_nb.synthesis.refine_wording import (
    Verdict,
    Wording,
    asked,
    conclusion,
    numbered,
    question_text,
    read_checklist,
    read_critique,
    read_reasoning,
    read_revision,
)


@dataclass
class TaskConfig:
    """The tasks, and which fields of their rows hold what."""

    sources: dict[str, PromptSource] = field(default_factory=dict)
    limit: int | None = None  # tasks that are taken at most: the first ones of each source
    draft: str = "draft"  # the field with an answer to be refined; an assistant message at the end is one too
    reference: str = "answer"  # the field with what is known to be right

    def __post_init__(self):
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"prompts.limit={self.limit} must be at least 1")


@dataclass
class LengthConfig:
    """How long a reasoning may be."""

    min_chars: int = 40
    max_chars: int = 120_000

    def __post_init__(self):
        if not 0 < self.min_chars <= self.max_chars:
            raise ValueError(f"length.min_chars={self.min_chars} and max_chars={self.max_chars} must be above 0 and in order")


@dataclass
class Rules:
    """What decides a refinement, apart from the models."""

    wording: Wording
    leaks: LeakConfig
    length: LengthConfig
    rounds: int
    most_items: int
    open_items: int
    require_reference: bool
    reasonings: int  # written at most, until one is accepted


@dataclass
class Task:
    """A conversation up to the turn to be answered, with what its row brought."""

    id: str
    conversation: Conversation
    draft: str | None
    reference: str | None

    @functools.cached_property
    def question(self) -> str:
        return question_text(self.conversation.messages)


@dataclass
class Round:
    """One answer and what the critique says of it."""

    answer: str
    verdicts: list[Verdict]

    @property
    def passed(self) -> int:
        return sum(verdict.passed for verdict in self.verdicts)

    @property
    def failed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if not verdict.passed]


@dataclass
class Refined:
    """A task's answer after refinement. final None: there is none that was critiqued, for the reason in `ended`."""

    ended: str  # passed | not_better | unchanged | rounds | unreadable_STEP | too_long
    draft: str | None = None
    checklist: list[str] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    best: int = 0  # the round whose answer is kept
    correct: dict[str, bool | None] = field(default_factory=dict)  # draft, final -> is the reference; none without one

    @property
    def final(self) -> str | None:
        return self.rounds[self.best].answer if self.rounds else None


@dataclass
class Reasoning:
    """One reasoning and the rules that it breaks."""

    text: str
    rejected_by: list[str]
    shown: list[str]  # of each rule, what shows it


# ------------------------------------------------------------------ tasks
def read_tasks(config: TaskConfig) -> tuple[list[Task], Counter]:
    """(tasks in the order of the files, what was left out). Raises ValueError and BadRow."""
    if not config.sources:
        raise ValueError("prompts.sources is empty: a refinement needs tasks; set prompts.sources.NAME.path=FILE")
    tasks: dict[str, Task] = {}
    dropped: Counter = Counter()
    for source, given in config.sources.items():
        taken = 0
        for file in data_files(given.path):
            for where, raw in raw_rows(file):
                if config.limit is not None and taken >= config.limit:
                    break
                taken += 1
                task = read_task(decode(where, raw), where, source, config)
                dropped["duplicate"] += task.id in tasks
                tasks.setdefault(task.id, task)
    return list(tasks.values()), +dropped


def read_task(row: dict[str, Any], where: str, source: str, config: TaskConfig) -> Task:
    """The task of a row. Raises BadRow."""
    ends = isinstance(row.get("messages"), list) and row["messages"] and isinstance(row["messages"][-1], dict)
    said = bool(ends) and row["messages"][-1].get("role") == "assistant"
    conversation, data = read_prompt(row, where, source)
    asked_for = question_text(conversation.messages)
    if not conversation.messages[-1]["content"].strip() or asked_for.encode("utf-8", "replace").decode() != asked_for:
        raise BadRow.at(where, f"the task is {asked_for[:40]!r}", "a task is text that is not empty, in whole letters",
                        "mend the row, or leave it out")  # fmt: skip
    draft = data.get(config.draft, data.get("reference") if said else None)
    if draft is not None and (not isinstance(draft, str) or not final_answer(draft)):
        raise BadRow.at(where, f"{config.draft} is {str(draft)[:40]!r}", "a draft is text that is not empty",
                        "leave the field out to have a draft written")  # fmt: skip
    draft = draft and final_answer(draft)
    reference = data.get(config.reference)
    told = json.dumps([conversation.messages, conversation.tools, draft], sort_keys=True)
    name = hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
    return Task(name, conversation, draft, None if reference is None else str(reference))


# ------------------------------------------------------------------ the three phases
async def write_draft(task: Task, calls: Calls) -> str:
    """The given draft, or one that a model writes. Raises Unreadable and TooLong."""
    if task.draft is not None:
        return task.draft
    answer = await calls.ask(f"{task.id}/draft", task.conversation.messages, task.conversation.tools)
    if not answer.whole or not final_answer(answer.text):
        raise Unreadable("draft", "cut off at max_tokens" if not answer.whole else "it says nothing")
    return final_answer(answer.text)


async def refine(task: Task, calls: Calls, rules: Rules) -> Refined:
    """Checklist, critiques and rewritings of a task, until an end is reached."""
    refined = Refined("rounds")
    try:
        refined.draft = await write_draft(task, calls)
        refined.ended = await _rounds(task, calls, rules, refined)
    except Unreadable as error:
        refined.ended = f"unreadable_{error.step}"
    except TooLong:
        refined.ended = "too_long"
    if task.reference is not None:
        for name, answer in (("draft", refined.draft), ("final", refined.final)):
            if answer is not None:
                refined.correct[name] = await _is_reference(task, calls, name, answer)
    return refined


async def _rounds(task: Task, calls: Calls, rules: Rules, refined: Refined) -> str:
    """Fill `refined`; how it ended."""
    wording, fields = rules.wording, {"question": task.question}
    request = asked(wording.checklist, **fields, most=rules.most_items)
    refined.checklist = await calls.read(f"{task.id}/checklist", request, lambda text: read_checklist(text, rules.most_items))
    fields["checklist"] = numbered(refined.checklist)
    answer = refined.draft
    for number in range(rules.rounds + 1):
        request = asked(wording.critique, **fields, answer=answer)
        reader = functools.partial(read_critique, checklist=refined.checklist)
        round_ = Round(answer, await calls.read(f"{task.id}/round-{number}/critique", request, reader))
        refined.rounds.append(round_)
        better = number == 0 or round_.passed > refined.rounds[refined.best].passed
        refined.best = number if better else refined.best
        if not round_.failed:
            return "passed"
        if not better:
            return "not_better"
        if number == rules.rounds:
            break
        faults = numbered([f"{one.item} -- {one.reason or 'not fulfilled'}" for one in round_.failed])
        request = asked(wording.revision, **fields, answer=answer, faults=faults)
        answer = await calls.read(f"{task.id}/round-{number + 1}/revision", request, read_revision)
        if answer == round_.answer:
            return "unchanged"
    return "rounds"


async def _is_reference(task: Task, calls: Calls, name: str, answer: str) -> bool | None:
    return await calls.is_same(f"{task.id}/{name}", task.question, conclusion(task.reference), conclusion(answer))


def answer_faults(refined: Refined, rules: Rules) -> list[str]:
    """The rules by which a refinement is rejected before a reasoning is asked for."""
    if refined.final is None:
        return [refined.ended]
    leaks = phrases_in(refined.final, rules.leaks, rules.leaks.answer_kinds)
    faults = [leak.rule.replace("leak:", "answer_leak:") for leak in leaks]
    if len(refined.rounds[refined.best].failed) > rules.open_items:
        faults.append("open_items")
    if rules.require_reference and refined.correct.get("final") is not True:
        faults.append("not_reference")
    return faults


async def reconstruct(task: Task, calls: Calls, refined: Refined, rules: Rules) -> list[Reasoning]:
    """Reasonings, the last one accepted (it breaks no rule) unless none of them is."""
    written: list[Reasoning] = []
    request = asked(rules.wording.reasoning, question=task.question, answer=refined.final)
    for number in range(rules.reasonings):
        name = f"{task.id}/reasoning-{number}"
        try:
            answer = await calls.ask(name, request)
        except TooLong as error:
            return [*written, Reasoning("", ["reasoning_too_long_to_ask"], [str(error)])]
        written.append(await _judged(task, calls, refined, rules, name, answer.text, answer.whole))
        if not written[-1].rejected_by:
            break
    return written


async def _judged(
    task: Task, calls: Calls, refined: Refined, rules: Rules, name: str, text: str, whole: bool
) -> Reasoning:  # fmt: skip
    if not whole:
        return Reasoning(text, ["cut_off"], ["it ends at max_tokens"])
    try:
        reasoning, said = read_reasoning(text)
    except ValueError as error:
        return Reasoning(text, ["unreadable"], [str(error)])
    broken: list[tuple[str, str]] = []
    final = conclusion(refined.final)
    same = await calls.is_same(name, task.question, final, said)
    if not same:
        rule = "another_answer" if same is False else "not_comparable"
        broken.append((rule, f"{said[:80]!r} is not {final[:80]!r}"))
    leaks = leaks_in(reasoning, task.question, refined.final, final, rules.leaks)
    broken += [(leak.rule, leak.shown) for leak in leaks if same or leak.rule != "underived"]
    if not rules.length.min_chars <= len(reasoning) <= rules.length.max_chars:
        rule = "too_short" if len(reasoning) < rules.length.min_chars else "too_long"
        broken.append((rule, f"{len(reasoning)} characters"))
    return Reasoning(reasoning, [rule for rule, _ in broken], [shown for _, shown in broken])


# ------------------------------------------------------------------ the record
def record_of(task: Task, refined: Refined, faults: list[str], written: list[Reasoning]) -> dict[str, Any]:
    """Everything about a task, as JSON."""
    accepted = not faults and bool(written) and not written[-1].rejected_by
    rejected = faults or (list(written[-1].rejected_by) if written else ["no_reasoning"])
    return {
        "id": task.id, "source": task.conversation.source, "question": task.question, "draft": refined.draft,
        "checklist": refined.checklist, "rounds": [asdict(one) | {"passed": one.passed} for one in refined.rounds],
        "ended": refined.ended, "final": refined.final, "reasoning_content": written[-1].text if accepted else None,
        "accepted": accepted, "rejected_by": [] if accepted else rejected, "reasonings": [asdict(one) for one in written],
        "reference": task.reference, "correct": refined.correct,
    }  # fmt: skip


def sft_row(task: Task, record: dict[str, Any]) -> dict[str, Any]:
    """An accepted record as a row to train on: earlier turns are context, the refined answer is trained with its reasoning."""
    turn = {"role": "assistant", "reasoning_content": record["reasoning_content"], "content": record["final"], "loss": 1}
    history = [message | ({"loss": 0} if message["role"] == "assistant" else {}) for message in task.conversation.messages]
    row = {"id": task.id, "messages": [*history, turn], "source": task.conversation.source}
    return row | ({"tools": task.conversation.tools} if task.conversation.tools else {})
