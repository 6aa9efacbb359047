"""A scripted teacher that knows the way: it walks a question's recorded path with the real tools, as a person would.

It searches for the first clue, looks into each page for the words around the name of the next one, reads that name from what
the tool gave back, and ends with what it read. Where a result does not show what it expects it tries again in other words;
where nothing helps it gives up and says so. Now and then it errs on purpose (ERRORS): a critic should drop such turns, and a
model should see how one goes on after them.
"""

from __future__ import annotations

import random
import re
from typing import Any

from megatron_nb.synthesis.question_obscure import GAP, plain_title
from megatron_nb.synthesis.question_quotes import before_gap, labelled

ERRORS = {"wrong_page": 0.3, "repeat": 0.2, "astray": 0.2, "misspelt": 0.15, "lacking": 0.15}  # shares of kinds
ERROR_RATE = 0.15  # of calls
MISREAD_RATE = 0.05  # of answers
WORDS = 4  # before a name, by which it is looked for
HIT = re.compile(r"^\[\d+\] (.+)$", re.MULTILINE)
CONTEXT = re.compile(r"^\.\.\. (.*) \.\.\.$", re.MULTILINE)
UNKNOWN = "The search did not find it."
Made = tuple[str, dict[str, str]]  # name and arguments of a call


class Oracle:
    """The teacher of one attempt; see synthesis/trajectories.py. row: of synthesize_questions."""

    def __init__(self, row: dict[str, Any], seed: int):
        self.row, self.rng = row, random.Random(seed)
        self.titles = [step["title"] for step in row["path"]]
        self.at = -1  # the step whose page is at hand; -1: the first page is not found yet
        self.page = ""  # its title, as it was read
        self.hits: list[str] = []  # titles of the last search
        self.last: Made | None = None  # the call before
        self.queries = self._queries()
        self.texts: list[str] = []  # to look for in the page at hand, best first
        self.found = ""  # the answer as it was read

    async def reply(self, role: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        """An assistant message of a role; the plan is left to the reader."""
        if role == "planner":
            return {"role": "assistant", "content": ""}
        if role == "writer":
            return {"role": "assistant", "content": f"Answer: {self._answer()}" if self.found else UNKNOWN}
        result = messages[-1]["content"] if messages[-1]["role"] == "tool" else ""
        self.hits = HIT.findall(result) or self.hits
        self._read(result)
        if self.found or not (call := self._next()):
            return {"role": "assistant", "content": ""}
        if self.rng.random() < ERROR_RATE and (wrong := self._wrong(*call)):
            (self.queries if call[0] == "search" else self.texts).insert(0, call[1].get("query") or call[1]["text"])
            call = wrong
        self.last = call
        item = {"id": "", "type": "function", "function": {"name": call[0], "arguments": call[1]}}
        return {"role": "assistant", "content": self._thought(), "tool_calls": [item]}

    # ------------------------------------------------------------------ what it looks for
    def _queries(self) -> list[str]:
        """What finds the first page, best first."""
        clues, evidence = self.row["clues"], self.row["path"][0]["evidence"]
        head = [clue for clue in clues[: max(1, len(clues) - self.row["hops"] - 1)] if clue]
        return list(dict.fromkeys([*head, " ".join(head), evidence]))

    def _texts(self) -> list[str]:
        """What stands before the name or answer that the page at hand should give, best first."""
        last = self.at == len(self.titles) - 1
        clue = self.row["clues"][self.at - len(self.titles)]
        name = self.row["answer"] if last else plain_title(self.titles[self.at + 1])
        quoted = clue.partition(GAP)[0].strip() if GAP in clue else ""
        place = re.search(re.escape(name), self.row["path"][self.at]["evidence"], re.IGNORECASE)
        words = self.row["path"][self.at]["evidence"][: place.start() if place else None].split()
        before = words[-WORDS:] if place else words[:WORDS]
        told = [quoted, " ".join(before), " ".join(before[-2:]), name]
        return [text for text in dict.fromkeys(told) if text]

    # ------------------------------------------------------------------ reading
    def _read(self, result: str) -> None:
        """Go on to the next page, or to the answer, where the result shows it."""
        if self.at < 0:
            title = next((one for one in HIT.findall(result) if one.lower() == self.titles[0].lower()), None)
            if title:
                self._arrive(title)
        elif read := self._name_in(result):
            if self.at == len(self.titles) - 1:
                self.found = read
            else:
                self._arrive(read)

    def _arrive(self, title: str) -> None:
        self.at, self.page = self.at + 1, title
        self.texts = self._texts()

    def _name_in(self, result: str) -> str | None:
        """The next name as a context of the result has it; None when none has."""
        last = self.at == len(self.titles) - 1
        wanted = self.row["answer"] if last else plain_title(self.titles[self.at + 1])
        for context in CONTEXT.findall(result):
            if place := re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", context, re.IGNORECASE):
                return place[0] if last or wanted == self.titles[self.at + 1] else self.titles[self.at + 1]
        return None

    # ------------------------------------------------------------------ calling
    def _next(self) -> Made | None:
        """The call that leads on; None when nothing is left to try."""
        if self.at < 0:
            return ("search", {"query": self.queries.pop(0)}) if self.queries else None
        return ("find_in_page", {"title": self.page, "text": self.texts.pop(0)}) if self.texts else None

    def _thought(self) -> str:
        """The quote that this call is about up to its gap, as its question has it; empty where the question quotes nothing."""
        clues = self.row["clues"]
        quote = labelled(clues, 0 if self.at < 0 else self.at - len(self.titles) + len(clues))
        return before_gap(quote) if quote in self.row["question"] else ""

    def _wrong(self, name: str, arguments: dict[str, str]) -> Made | None:
        """A mistake in place of this call, which is made in the next turn; None where the chosen one cannot be made here."""
        (kind,) = self.rng.choices(list(ERRORS), list(ERRORS.values()))
        first = name == "search"
        other = next((hit for hit in self.hits if hit != self.page), None)
        words = " ".join(arguments.values()).split()
        made: dict[str, Made | None] = {
            "wrong_page": None if first or other is None else (name, {**arguments, "title": other}),
            "repeat": self.last,
            "astray": ("search", {"query": " ".join(self.rng.sample(words, min(2, len(words))))}),
            "misspelt": None if first else (name, {**arguments, "title": self.page[:-1] + self.rng.choice("aeiou")}),
            "lacking": (name, dict(list(arguments.items())[:-1])),
        }
        return made[kind]

    def _answer(self) -> str:
        """What was read, or another word of the same result."""
        return self.found if self.rng.random() >= MISREAD_RATE else self.rng.choice(self.page.split())
