"""What the models are asked in a refinement, and how their replies are read. A reply of another form is a ValueError.

    checklist   numbered lines                              1. The units are converted.
    critique    a verdict for every item, once              1. PASS  or  1. FAIL: the second sum is wrong
    revision    <answer> the whole new answer </answer>
    reasoning   <reasoning> ..., at its end a line Answer: ... </reasoning>

Thinking before a reply is cut. What stands in {braces} is filled in one pass, so a text that writes {answer} gets nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from megatron_nb.data.preferences import final_answer

NUMBERED = re.compile(r"^\s*[*_(]*(?:item\s*)?(\d{1,2})\s*[.):]+[*_]*\s*(\S.*)$", re.IGNORECASE | re.MULTILINE)
VERDICT = re.compile(r"[*_`\[(]*(PASS|FAIL)(?:ED|S|ES)?\b[*_`\])]*\s*[-:.,;\u2013\u2014]*\s*(.*)", re.IGNORECASE)
CONCLUSION = re.compile(r"^[\s*_]*(?:final\s+)?(?:answer|a)[*_]*\s*:[*_]*\s*(\S.*?)[\s*_]*$", re.IGNORECASE | re.MULTILINE)

CHECKLIST = """\
Write a checklist by which an answer to the task below can be judged: at most {most} items, each one thing that a correct and
complete answer to this very task must fulfil and that can be seen in the answer. Do not solve the task.
Reply with numbered lines only, such as: 1. ...

<task>
{question}
</task>"""

CRITIQUE = """\
Judge the answer to the task strictly by the checklist. Redo every calculation and deduction instead of trusting the answer.
Reply with one line for each item, in their order: its number, then PASS, or FAIL and what is wrong, such as:
1. PASS
2. FAIL: ...

<task>
{question}
</task>

<checklist>
{checklist}
</checklist>

<answer>
{answer}
</answer>"""

REVISION = """\
Rewrite the answer to the task so that it has none of the faults listed. Keep what is right and keep its form. The new answer
stands for itself: it mentions neither the faults nor an earlier answer.
Reply with <answer>, the whole new answer, </answer>.

<task>
{question}
</task>

<answer_to_rewrite>
{answer}
</answer_to_rewrite>

<faults>
{faults}
</faults>"""

REASONING = """\
Below are a task and its solution. Write the reasoning of somebody who meets the task for the first time, thinks it through
step by step, checks doubtful steps, and so finds the solution. Every result is worked out before it is used. The reasoning
never mentions that a solution exists and never argues from its result.
Reply with <reasoning>, the reasoning, and as its last line "Answer: " with the final answer, then </reasoning>.

<task>
{question}
</task>

<solution>
{answer}
</solution>"""


@dataclass
class Wording:
    """The four templates."""

    checklist: str = CHECKLIST  # {question}, {most}
    critique: str = CRITIQUE  # {question}, {checklist}, {answer}
    revision: str = REVISION  # {question}, {answer}, {faults}
    reasoning: str = REASONING  # {question}, {answer}

    def __post_init__(self):
        needed = {"checklist": ["question"], "critique": ["question", "checklist", "answer"]}
        needed |= {"revision": ["question", "answer", "faults"], "reasoning": ["question", "answer"]}
        for name, fields in needed.items():
            if missing := [field for field in fields if f"{{{field}}}" not in getattr(self, name)]:
                raise ValueError(f"wording.{name} lacks {{{missing[0]}}}: the model would not see it; put it into the text")


@dataclass
class Verdict:
    """What the critique says of one item of the checklist."""

    item: str
    passed: bool
    reason: str = ""


def asked(template: str, **fields: Any) -> list[dict[str, Any]]:
    """The template, filled, as the one message of a conversation."""
    text = re.sub(r"\{(\w+)\}", lambda found: str(fields.get(found[1], found[0])), template)
    return [{"role": "user", "content": text}]


def question_text(messages: list[dict[str, Any]]) -> str:
    """What is asked: a lone user turn as it stands, else every turn with its role."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)


def numbered(items: list[str]) -> str:
    return "\n".join(f"{number}. {item}" for number, item in enumerate(items, 1))


def read_checklist(text: str, most: int) -> list[str]:
    """The items in their order. ValueError when there is none, or more than `most`."""
    items = list(dict.fromkeys(found[1].strip() for found in NUMBERED.findall(final_answer(text))))
    if not 1 <= len(items) <= most:
        raise ValueError(f"{len(items)} numbered items, 1 to {most} are wanted")
    return items


def read_critique(text: str, checklist: list[str]) -> list[Verdict]:
    """One verdict per item. ValueError unless every item has exactly one."""
    found: dict[int, Verdict] = {}
    for number, rest in NUMBERED.findall(final_answer(text)):
        said, place = VERDICT.match(rest), int(number)
        if said is None:
            continue
        if place in found or not 1 <= place <= len(checklist):
            raise ValueError(f"item {place} of {len(checklist)} has a second verdict, or is none")
        found[place] = Verdict(checklist[place - 1], said[1].upper() == "PASS", said[2].strip())
    if missing := [place for place in range(1, len(checklist) + 1) if place not in found]:
        raise ValueError(f"no verdict on item {missing[0]} of {len(checklist)}")
    return [found[place] for place in sorted(found)]


def read_revision(text: str) -> str:
    return _between(text, "answer")


def read_reasoning(text: str) -> tuple[str, str]:
    """(the reasoning without its last line, the answer that this line gives). ValueError when one of them is missing."""
    reasoning = _between(text, "reasoning")
    body, _, last = reasoning.rpartition("\n")
    found = CONCLUSION.match(last)
    if found is None:
        raise ValueError(f"the last line is {last[:60]!r}, not 'Answer: ...'")
    if not body.strip():
        raise ValueError("nothing stands before the answer")
    return body.strip(), found[1]


def _between(text: str, tag: str) -> str:
    """What stands between the first <tag> and the last </tag> of a reply."""
    said = final_answer(text)
    inner = said.partition(f"<{tag}>")[2].rpartition(f"</{tag}>")[0].strip()
    if not inner:
        raise ValueError(f"no <{tag}>...</{tag}> with text in {said[-60:]!r}")
    return inner


def conclusion(text: str) -> str:
    r"""The final answer in an answer: the last \boxed{}, else after the last ####, else the last line Answer: ...,
    else all of it when it is one line, else its last line."""
    said = final_answer(text)
    if (start := said.rfind("\\boxed{")) >= 0:
        return said[start : _closing(said, start)]
    if marked := re.findall(r"^####\s*(\S.*)$", said, re.MULTILINE):
        return marked[-1].strip()
    if lines := CONCLUSION.findall(said):
        return lines[-1].strip()
    return said.strip().rpartition("\n")[2].strip()


def unboxed(text: str) -> str:
    r"""What a lone \boxed{} holds; any other text as it is."""
    return text[len("\\boxed{") : -1] if text.startswith("\\boxed{") and text.endswith("}") else text


def _closing(text: str, start: int) -> int:
    """Behind the brace that closes the first one after `start`; the end of the text when none does."""
    depth = 0
    for place in range(text.index("{", start), len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return place + 1
    return len(text)
