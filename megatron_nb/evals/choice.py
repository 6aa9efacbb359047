"""Multiple choice, asked in words: the options are shuffled anew in every attempt, so that a favourite letter earns nothing.

Rows: MMLU and MMLU-Pro {"question", "choices" | "options", "answer" (place or letter) | "answer_index"}; ARC {"question",
"choices": {"text", "label"}, "answerKey"}; GPQA {"Question", "Correct Answer", "Incorrect Answer 1", ...}. Where an option
speaks of others ("all of the above", "A and B") they stay in the row's order.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from megatron_nb.asking.askers import Answer, Asker
from megatron_nb.data.preferences import final_answer
from megatron_nb.data.rows import BadRow
from megatron_nb.evals.items import REMEDY, id_of, read_rows
from megatron_nb.evals.task import Item, Outcome, Talk, Task, TaskConfig
from megatron_nb.rollout.turn import seed_of

LETTERS = string.ascii_uppercase
REFERS = re.compile(
    r"\b(all|none|both|neither|either|any|two|some) of (the |these|those)|\b(above|below)\b|\b[A-J] (and|or|nor) [A-J]\b", re.I
)
SAID = (  # where an answer stands, the surest first; the last one said counts
    r"\\boxed\{\s*(?:\\\w+\{)?\s*\(?([A-Z])\b",
    r"(?i:answer)[*_]*(?i:\s+is\s*:?|\s*[:=\uff1a])(?:\\\w+\{|[*_(\[\s$`\"<])*(?i:option\s+)?([A-Z])\b(?!')",
    r"^[ \t*_(\[]*([A-Z])[ \t*_)\].:]*\r?$",  # no \s: thousands of empty lines would take minutes
    r"(?i:option|choice)\s+(?:is:?\s+)?[*_(\[]*([A-Z])\b(?!')",
)


@dataclass
class ChoiceConfig(TaskConfig):
    """Questions with options."""

    shuffle: bool = True
    instruction: str = 'Think it through, then end with a line "Answer: X" where X is the letter of the right option.'


class Choice(Task):
    """See the head of the file.

    metrics: accuracy with bounds; read (an option was named); consistent (the same option in all of an item's attempts, where
    there are several); favourite (the most named letter's share of the answers).
    """

    Config: ClassVar[type[TaskConfig]] = ChoiceConfig
    headline = "accuracy"

    def read(self) -> Sequence[Item]:
        found = []
        for where, row in read_rows(self.config.path):
            question, options, right = read_choice(row, where)
            found.append(Item(id_of(row, where), [{"role": "user", "content": question}], {"options": options, "right": right}))
        return found

    async def attempt(self, item: Item, asker: Asker, index: int) -> Outcome:
        talk, order = Talk(self, asker, item, index), self.order(item, index)
        options = [item.gold["options"][place] for place in order]
        listed = "\n".join(f"{LETTERS[number]}. {option}" for number, option in enumerate(options))
        *before, last = self.prompt(item)
        asked = "\n\n".join(filter(None, [last["content"], listed, self.config.instruction]))
        answer: Answer = await talk.say([*before, last | {"content": asked}])
        letter = letter_of(final_answer(answer.text), options)
        chosen = order[LETTERS.index(letter)] if letter else None
        parts = {"read": float(bool(letter)), "chosen": -1.0 if chosen is None else float(chosen)}
        parts["letter"] = float(LETTERS.index(letter)) if letter else -1.0
        reason = f"option {chosen}, right is {item.gold['right']}" if letter else "no option was named"
        return talk.outcome(float(chosen == item.gold["right"]), parts=parts, reason=reason, answer=letter)

    def check(self) -> None:
        if not self.config.shuffle:  # shuffled, the same question is another one each time
            super().check()

    def order(self, item: Item, index: int) -> list[int]:
        """The places of the row's options, in the order in which they are shown."""
        options = item.gold["options"]
        if not self.config.shuffle or any(REFERS.search(str(option)) for option in options):
            return list(range(len(options)))
        rng = np.random.default_rng(seed_of(self.config.seed, self.name, item.id, index, "order"))
        return rng.permutation(len(options)).tolist()

    def summarise(self, outcomes: list[Outcome]) -> dict[str, float]:
        told = super().summarise(outcomes)
        for name in ("chosen", "letter"):
            told.pop(name, None)
        chosen: dict[str, list[float]] = {}
        for one in outcomes:
            if one.score is not None and "chosen" in one.parts:
                chosen.setdefault(one.item, []).append(one.parts["chosen"])
        if several := [its for its in chosen.values() if len(its) > 1]:
            told["consistent"] = float(np.mean([len(set(its)) == 1 and its[0] >= 0 for its in several]))
        letters = [one.parts["letter"] for one in outcomes if one.parts.get("letter", -1) >= 0]
        if letters:
            counts = Counter(letters)
            told["favourite"] = max(counts.values()) / len(letters)
        return told


def read_choice(row: dict[str, Any], where: str) -> tuple[str, list[str], int]:
    """(question, options, place of the right one). BadRow for another form."""
    if "Correct Answer" in row:
        wrong = [str(value).strip() for key, value in row.items() if key.startswith("Incorrect Answer") and value]
        return str(row["Question"]).strip(), [str(row["Correct Answer"]).strip(), *wrong], 0
    question, options = row.get("question"), row.get("choices", row.get("options"))
    labels: Sequence[str] = LETTERS
    if isinstance(question, dict):  # ARC as its authors wrote it
        question, options = question.get("stem"), question.get("choices")
    if isinstance(options, list) and options and all(isinstance(one, dict) for one in options):
        options = {key: [one.get(key) for one in options] for key in ("text", "label")}
    if isinstance(options, dict):
        options, labels = options.get("text"), [str(one) for one in options.get("label", LETTERS)]
    if not isinstance(question, str) or not isinstance(options, list) or not 2 <= len(options) <= len(LETTERS):
        raise BadRow.at(where, f"question is {str(question)[:40]!r}, options are {str(options)[:60]}",
                        f"a text and a list of 2 to {len(LETTERS)} options are needed", REMEDY)  # fmt: skip
    options = [str(one) for one in options]
    right = next((row[key] for key in ("answer_index", "answerKey", "answer", "label") if row.get(key) not in (None, "")), None)
    place = _place(right, options, labels)
    if place is None:
        rule = "it is the place (from 0), the letter or the text of an option"
        raise BadRow.at(where, f"the answer is {right!r}", rule, REMEDY)
    return question, options, place


def _place(right: Any, options: list[str], labels: Sequence[str]) -> int | None:
    if isinstance(right, int) and not isinstance(right, bool):
        return right if 0 <= right < len(options) else None
    told = str(right).strip()
    if told in list(labels)[: len(options)]:  # before the texts: options may be letters or numbers themselves
        return list(labels).index(told)
    if told in options:
        return options.index(told)
    return int(told) if told.isdigit() and int(told) < len(options) else None


def letter_of(text: str, options: list[str]) -> str:
    """The letter of the option that an answer names at its end; "" for none. An option written out in full counts too."""
    permitted = LETTERS[: len(options)]
    for pattern in SAID:
        found = [one for one in re.findall(pattern, text, re.MULTILINE) if one in permitted]
        if found:
            return found[-1]
    last = next((line.strip(" .*_") for line in reversed(text.splitlines()) if line.strip()), "")
    named = [letter for letter, option in zip(permitted, options) if last.casefold() == option.strip(" .").casefold()]
    return named[0] if len(named) == 1 else ""
