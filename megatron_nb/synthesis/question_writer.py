"""Writes the question of a chain: by templates, or by an instruct model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from megatron_nb.client import Client, ClientConfig
from megatron_nb.data.preferences import final_answer
from megatron_nb.synthesis.question_answers import ASKED
from megatron_nb.synthesis.question_chain import Draft

FORMS = (
    "Begin at {head}; one reads of it: “{fact}”. From its article links lead to {first}{rest}. "
    "Of the last one it says: “{gap}”. {asked} belongs in the gap?",
    "There is {head}, of which it is told: “{fact}”. Its article names {first}{rest}. "
    "About the last of these an article says: “{gap}”. {asked} is left out?",
    "{asked} fills the gap in “{gap}”? This is said of the last page of a chain of links that begins at {head} (“{fact}”) "
    "and goes on to {first}{rest}.",
)
STEPS = (", from there to ", ", then to ", ", on to ")

RULES = """\
You write one difficult question for a test of searching in an encyclopedia. Given is a chain of pages, with the sentence by \
which each leads to the next, and a sentence of the last page that contains the answer.

Rules:
- The question describes the first page without naming it, leads along the chain page by page, and asks for the answer.
- No page of the chain is named, and the answer is not said. Names, dates, places and numbers are made vague (a decade for a \
year, "a city in the north" for its name), yet every step must fit the next page only.
- Under {characters} characters, at most {clues} clues. One clue is one fact that narrows down where to look.
- Natural, complete sentences. Nothing that the sentences below do not say.

Chain:
{chain}

Answer ({kind}): {answer}
It stands in: {evidence}

Vague descriptions that may help: {hints}

Reply with JSON alone: {{"question": "...", "clues": ["...", "..."]}}"""


@dataclass
class WriterConfig:
    """Who writes the questions."""

    endpoint: ClientConfig | None = None  # an instruct model; None: templates
    form: Literal["described", "quotes"] = "described"  # quotes: short verbatim quotes with gaps, by templates alone
    temperature: float = 0.7
    max_tokens: int = 4096  # of a reply, thinking included
    tries: int = 3  # replies for one chain; each is told what was wrong with the one before

    def __post_init__(self):
        if self.endpoint and self.form == "quotes":
            raise ValueError("form=quotes is written by templates: leave endpoint out")
        if self.tries < 1 or self.max_tokens < 1:
            raise ValueError(f"tries={self.tries} and max_tokens={self.max_tokens} must be at least 1")


class Writer(Protocol):
    tries: int

    async def write(self, draft: Draft, rng: random.Random, wrong: list[tuple[str, str]]) -> tuple[str, list[str]]:
        """(question, clues). wrong: (question, the rule it broke) of earlier tries. OSError when there was no reply."""


class Templates:
    """Writes by filling in one of FORMS."""

    tries = 1

    async def write(self, draft: Draft, rng: random.Random, wrong: list[tuple[str, str]]) -> tuple[str, list[str]]:
        rest = "".join(rng.choice(STEPS) + clue for clue in draft.hops[1:])
        text = rng.choice(FORMS).format(
            head=draft.head, fact=draft.fact, first=draft.hops[0], rest=rest, gap=draft.answer.clue,
            asked=ASKED[draft.answer.kind],
        )  # fmt: skip
        return text, draft.clues


class EndpointWriter:
    """Writes by asking a model; a reply that is not the JSON asked for is asked for again by the client."""

    def __init__(self, config: WriterConfig, characters: int, clues: int):
        self.config, self.tries, self.characters, self.most = config, config.tries, characters, clues
        self.client = Client(config.endpoint)

    async def write(self, draft: Draft, rng: random.Random, wrong: list[tuple[str, str]]) -> tuple[str, list[str]]:
        chain = "\n".join(
            f"{number}. {title}: {quote}" for number, (title, quote) in enumerate(zip(draft.titles, draft.evidence), 1)
        )
        asked = RULES.format(
            characters=self.characters, clues=self.most, chain=f"{chain}\n{len(draft.titles)}. {draft.titles[-1]}",
            kind=draft.answer.kind, answer=draft.answer.text, evidence=draft.answer.evidence, hints="; ".join(draft.clues),
        )  # fmt: skip
        messages: list[dict[str, Any]] = [{"role": "user", "content": asked}]
        for question, rule in wrong:
            messages.append({"role": "assistant", "content": json.dumps({"question": question}, ensure_ascii=False)})
            messages.append({"role": "user", "content": f"This breaks a rule ({rule}). Write it again, as JSON."})
        return await self.client.chat(
            messages, _read, temperature=self.config.temperature, max_tokens=self.config.max_tokens, seed=rng.getrandbits(31)
        )


def _read(reply: str) -> tuple[str, list[str]]:
    found = re.search(r"\{.*\}", final_answer(reply), re.DOTALL)
    written = json.loads(found[0]) if found else {}
    question, clues = written.get("question"), written.get("clues")
    if not isinstance(question, str) or not question.strip():
        raise ValueError("no question in the JSON")
    if not isinstance(clues, list) or not clues or not all(isinstance(clue, str) for clue in clues):
        raise ValueError("clues must be a list of texts")
    "".join([question, *clues]).encode()  # ValueError: half a surrogate pair can be written nowhere
    return " ".join(question.split()), clues
