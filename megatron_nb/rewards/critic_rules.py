"""The critic without a model: rules that read each turn against all that was seen before it.

    tools   calls can be read, name a tool, fit its schema; no error comes back; a page's title stands in what was seen
    gain    results are new (phrases that no earlier one had) and, where the way to the answer is known, lead along it
    logic   what is said of the results is true of them; the call is what the reasoning speaks of; nothing is asked twice; a
            step of the way that lies in view is not passed over for something else; the answer stands in what was seen

A verdict looks at its own turn, its results and what came before, never at later turns: credit by turns needs that. What
a rule cannot see (a plausible hop off the way when no way is known) counts as right: ask a model for more (critic_model.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from jsonschema import Draft202012Validator

from megatron_nb.rewards.answer_search import answer_of, matches
from megatron_nb.rewards.critic_claims import untrue
from megatron_nb.rewards.critic_memory import (
    HIT,
    Memory,
    content_words,
    is_empty,
    is_error,
    plain,
    subject,
    told,
)
from megatron_nb.rewards.critic_steps import Step, Task, Verdict
from megatron_nb.rollout.calls import Call

NOVEL = 0.2  # (own) share of new phrases from which on a result tells something
LONGEST_QUERY = 300  # (own) characters
NOT_A_QUERY = re.compile(r"\s*[\[{<]|https?://|\bdef \w+\(|\bimport \w+")
SHORT_ANSWERS = frozenset(("yes", "no", "true", "false"))  # they need not stand anywhere


def judge_by_rules(task: Task, steps: Sequence[Step]) -> list[Verdict]:
    """A verdict for every step, in order."""
    memory, found = Memory(task), []
    for number, step in enumerate(steps):
        found.append(_verdict(task, step, memory, last=number == len(steps) - 1))
        memory.add(step)
    return found


def _verdict(task: Task, step: Step, memory: Memory, last: bool) -> Verdict:
    broken = next(broken_calls(task, step), "")
    if step.summary:
        logic, gain, tools = untrue(step, memory), "" if step.text else "the summary is empty", ""
    elif step.answers and last:
        logic, gain, tools = _unsupported(task, step, memory), "", ""
    else:
        tools = broken or _wrong_call(step, memory)
        gain = _no_gain(task, step, memory)
        logic = _illogical(task, step, memory)
    reasons = {"logic": logic, "tools": tools, "gain": gain}
    return Verdict(int(not logic), int(not tools), int(not gain), {key: why for key, why in reasons.items() if why},
                   is_invalid(step, broken))  # fmt: skip


# ------------------------------------------------------------------ tools
def is_invalid(step: Step, broken: str) -> bool:
    """Whether a broken call was refused: a tool may take what its schema does not (a number as text)."""
    return bool(broken) and (not step.results or any(map(is_error, step.results)))


def broken_calls(task: Task, step: Step) -> Iterator[str]:
    """What is wrong with calls of the step: unreadable, of no tool, or not as the tool's schema says."""
    yield from step.problems
    known = {schema["function"]["name"]: schema["function"].get("parameters") or {} for schema in task.schemas}
    for call in step.calls:
        if known and call.name not in known:
            yield f"there is no tool {call.name!r}"
            continue
        error = next(_validator(json.dumps(known.get(call.name, {}))).iter_errors(call.arguments), None)
        if error is not None:
            yield f"{told(call)}: {error.message}"[:300]
        elif extra := set(call.arguments) - set(known.get(call.name, {}).get("properties", call.arguments)):
            yield f"{told(call)}: {call.name} takes no {', '.join(sorted(extra))}"
        elif blank := [key for key, value in call.arguments.items() if isinstance(value, str) and not value.strip()]:
            yield f"{call.name}: {', '.join(blank)} is blank"


@lru_cache(maxsize=64)
def _validator(schema: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads(schema))


def _wrong_call(step: Step, memory: Memory) -> str:
    for call, result in zip(step.calls, step.results):
        if is_error(result):
            return f"{told(call)} gave {result[:120]!r}"
    for call in step.calls:
        title, query = call.arguments.get("title"), call.arguments.get("query")
        if title is not None and not memory.has(str(title)):
            return f"{told(call)}: no result so far names this page"
        if query is not None and (len(str(query)) > LONGEST_QUERY or NOT_A_QUERY.search(str(query))):
            return f"{told(call)} is not a search query"
    return ""


# ------------------------------------------------------------------ gain
def _no_gain(task: Task, step: Step, memory: Memory) -> str:
    if not step.calls:
        return "it neither calls a tool nor ends the search"
    why = ["no result came back"]
    for call, result in zip(step.calls, step.results):
        if not (reason := _nothing_from(task, call, result, memory)):
            return ""
        why.append(reason)
    return why[-1]


def _nothing_from(task: Task, call: Call, result: str, memory: Memory) -> str:
    """Why a result does not help; "" when it does."""
    if is_error(result):
        return "the call failed"
    if is_empty(result):
        return "nothing was found"
    if (earlier := memory.repeats(call)) is not None:
        return f"{told(call)} was asked in turn {earlier + 1} already"
    if (share := memory.novelty(result)) < NOVEL:
        return f"{share:.0%} of the result is new"
    if call.name == "run_code" or leads(task, call, result, memory):
        return ""
    return f"{told(call)} brought nothing that leads to the answer"


def leads(task: Task, call: Call, result: str, memory: Memory) -> bool:
    """Whether a result brings the answer nearer: a page of the way, its evidence, the name of its next page, the answer.

    Where no way is known: whether what the call is about has a word in common with question or results.
    """
    if not task.path:
        return bool(content_words(subject(call)) & memory.words) or not content_words(subject(call))
    way = {plain(title) for title in task.path}
    if plain(subject(call)) in way:
        return True
    text = plain(result)
    hits = {plain(title) for title in HIT.findall(result)} if call.name == "search" else set()
    if (hits & way) - memory.opened:
        return True
    pieces = [plain(piece) for piece in (*task.path, *task.evidence, *task.references)]
    return any(piece in text and not memory.has(piece) for piece in pieces)


# ------------------------------------------------------------------ logic
def _illogical(task: Task, step: Step, memory: Memory) -> str:
    said = f"{step.thinking}\n{step.text}"
    for call in step.calls:
        if (earlier := memory.repeats(call)) is not None:
            return f"{told(call)} asks again what turn {earlier + 1} was answered"
    return (
        untrue(step, memory) or _other_than_said(said, step) or _groundless(said, step, memory)
        or _passed_over(task, step, memory)
    )  # fmt: skip


def _other_than_said(said: str, step: Step) -> str:
    """Calls that have nothing to do with the reasoning before them."""
    reasoning = content_words(said)
    asked = [content_words(" ".join(str(value) for key, value in call.arguments.items() if key != "code"))
             for call in step.calls if call.name != "run_code"]  # fmt: skip
    if len(reasoning) >= 4 and any(asked) and not any(words_ & reasoning for words_ in asked):
        return f"{told(step.calls[0])} is not what its reasoning speaks of"
    return ""


def _groundless(said: str, step: Step, memory: Memory) -> str:
    """A query or page out of nowhere."""
    for call in step.calls:
        about = content_words(subject(call))
        if about and not about & (memory.words | content_words(said)):
            return f"{told(call)} has no word of question, results or reasoning"
    return ""


def _passed_over(task: Task, step: Step, memory: Memory) -> str:
    """A page of the way lay open to the agent, and it went elsewhere for nothing."""
    results = list(zip(step.calls, step.results))
    useful = (call.name == "run_code" or leads(task, call, result, memory) for call, result in results)
    if not task.path or not results or any(useful):
        return ""
    shown = plain("\n".join(memory.last))
    for title in task.path:
        if plain(title) in shown and plain(title) not in memory.opened:
            return f"{title!r} stood in the last result, and {told(step.calls[0])} goes elsewhere"
    return ""


def _unsupported(task: Task, step: Step, memory: Memory) -> str:
    """Why the evidence does not carry the answer."""
    answer = answer_of(step.text)
    if not answer.strip():
        return "there is no answer"
    right = not task.references or matches(answer, list(task.references), "normalised")
    seen = next((one for one in task.references if memory.in_results(one)), None)
    if not right and seen is not None:
        return f"answers {answer[:80]!r}, where the results had {seen[:80]!r}"
    if plain(answer).strip() in SHORT_ANSWERS or memory.in_results(answer) or right and seen is not None:
        return ""
    return f"no result has the answer {answer[:80]!r}"
