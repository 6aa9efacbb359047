"""Questions with short answers: from memory, or by an agent with search tools (GAIA, BrowseComp, xBench-DeepSearch, SEAL-0).

    exact        the answer is one of the accepted ones, letter for letter
    normalised   after case, accents, articles, numbers and dates are evened out (rewards/answer_search.py)
    gaia         by GAIA's own rules: numbers as numbers, lists part by part, texts without blanks and signs
    judged       what is not equal so is shown to a judge

`score` is the one that `mode` names; the others that need no judge are given beside it. samples: avg of n. An answer that is
too long to be one is wrong, and so is an episode that ends without any.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_nb.asking.askers import Answer, Asker
from megatron_nb.client import ClientConfig
from megatron_nb.evals.episodes import Episodes
from megatron_nb.evals.judge import reach
from megatron_nb.evals.question_rows import FORMS, read_questions
from megatron_nb.evals.statistics import mean_with_bounds
from megatron_nb.evals.task import Item, Outcome, Talk, Task, TaskConfig, Verdict, by_item
from megatron_nb.rewards.answer_search import AnswerJudge, answer_of, matches
from megatron_nb.rollout.agent import AgentConfig

FROM_MEMORY = "{question}\n\nAnswer in a few words. End with a line: Answer: ..."
WITH_TOOLS = "Find the answer with the tools. When you are sure, answer in a few words and end with a line: Answer: ...\n\n" \
             "{question}"  # fmt: skip


@dataclass
class SearchQaConfig(TaskConfig):
    """path: the questions, see question_rows.py."""

    form: str = "rows"  # of question_rows.FORMS
    agent: AgentConfig | None = None  # null: from memory
    mode: Literal["exact", "normalised", "gaia", "judged"] = "normalised"
    judge: ClientConfig | None = None  # for mode=judged
    ask: str | None = None  # how it is asked, with {question}; null: in words of our own, "{question}": as the row has it
    longest: int = 400  # characters of an answer

    def __post_init__(self):
        super().__post_init__()
        if self.form not in FORMS:
            raise ValueError(f"form={self.form!r} must be one of {', '.join(FORMS)}")
        if (self.mode == "judged") != (self.judge is not None):
            raise ValueError(f"mode={self.mode!r} and judge={self.judge}: judged needs a judge, nothing else asks one")
        if self.ask is not None and "{question}" not in self.ask:
            raise ValueError(f"ask={self.ask!r} must hold {{question}}")


class SearchQa(Task):
    """See the head of the file."""

    Config = SearchQaConfig
    headline = "score"

    def __init__(self, *given: Any):
        super().__init__(*given)
        config = self.config
        self._ask = config.ask or (WITH_TOOLS if config.agent else FROM_MEMORY)
        self._judge = AnswerJudge(config.judge) if config.judge else None
        self._episodes: Episodes | None = None

    def read(self) -> Sequence[Item]:
        return [
            replace(item, prompt=[{"role": "user", "content": self._ask.replace("{question}", item.gold["question"])}])
            for item in read_questions(self.config.path, self.config.form)
        ]

    def check(self) -> None:
        """Raises ValueError when the tools cannot be opened."""
        super().check()
        if self.config.agent is not None:
            Episodes(self.config.agent).close()

    async def ready(self) -> None:
        if self.config.judge is not None:
            await reach(self.config.judge)
        if self.config.agent is not None:
            self._episodes = self._episodes or Episodes(self.config.agent)
            await self._episodes.ready()

    def close(self) -> None:
        if self._episodes is not None:
            self._episodes.close()

    async def attempt(self, item: Item, asker: Asker, index: int) -> Outcome:
        if self.config.agent is None:
            return await super().attempt(item, asker, index)
        talk = Talk(self, asker, item, index)
        ended = await self._episodes.play(talk, self.prompt(item))
        if ended.status == "done":
            verdict = await self._grade(item, ended.text)
        else:
            verdict = Verdict(0.0, self._parts(item, ""), f"the episode ended by {ended.status}, without an answer", "")
        parts = verdict.parts | {"turns": float(talk.turns), "calls": float(ended.calls)}
        return talk.outcome(verdict.score, ended.status, parts=parts, reason=verdict.reason, answer=verdict.answer,
                            messages=ended.messages)  # fmt: skip

    async def score(self, item: Item, answer: Answer) -> Verdict:
        return await self._grade(item, answer.text)

    async def _grade(self, item: Item, text: str) -> Verdict:
        answer, mode = answer_of(text), self.config.mode
        parts = self._parts(item, answer)
        if not answer:
            return Verdict(0.0, parts, "there is no answer", answer)
        if (length := len(answer)) > self.config.longest:
            return Verdict(0.0, parts, f"the answer has {length} characters, more than longest={self.config.longest}", answer)
        if self._judge is None or parts["normalised"]:
            return Verdict(parts["normalised" if mode == "judged" else mode], parts, answer=answer)
        right, why = await self._judge.right(item.gold["question"], item.gold["answer"], answer)
        return Verdict(float(right), parts, why, answer)

    def _parts(self, item: Item, answer: str) -> dict[str, float]:
        accepted = item.gold["answer"]
        short = answer if len(answer) <= self.config.longest else ""
        told = {mode: float(bool(short) and matches(short, accepted, mode)) for mode in ("exact", "normalised")}
        if self.config.mode == "gaia":
            told["gaia"] = float(any(gaia_equal(short, one) for one in accepted))
        return told

    def summarise(self, outcomes: list[Outcome]) -> dict[str, float]:
        told = super().summarise(outcomes)
        levels = {item.id: item.gold["level"] for item in self.items()}
        for level in sorted(set(levels.values()) - {""}):
            its = by_item([outcome for outcome in outcomes if levels.get(outcome.item) == level])
            told |= mean_with_bounds(f"score_{level}", its)
        return told


def gaia_equal(answer: str, reference: str) -> bool:
    """GAIA's rules: what the reference is (a number, a list by , or ;, or a text) decides how they are compared."""
    if _is_number(reference):
        return _number_equal(answer, reference)
    if "," in reference or ";" in reference:
        parts, wanted = (re.split(r"[,;]", text) for text in (answer, reference))
        return len(parts) == len(wanted) and all(
            _number_equal(a, b) if _is_number(b) else _bare(a, signs=True) == _bare(b, signs=True)
            for a, b in zip(parts, wanted)
        )
    return _bare(answer) == _bare(reference)


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        return math.isfinite(float(text))
    return False


def _number_equal(answer: str, reference: str) -> bool:
    """With signs of money, shares and thousands left out of the answer."""
    plain = re.sub(r"[$%,]", "", answer)
    return _is_number(plain) and float(plain) == float(reference)


def _bare(text: str, signs: bool = False) -> str:
    """Lower case without blanks; signs: whether punctuation stays."""
    text = re.sub(r"\s", "", text).lower()
    return text if signs else text.translate(str.maketrans("", "", string.punctuation))
