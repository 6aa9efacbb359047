"""Rules on the form of an answer, cheap and so in the event loop; and patterns, which may explode and so go to a worker."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from megatron_nb.records import Prompt, Rollout, Score
from megatron_nb.rewards.text import final_answer, reference_of, repeated_share, scripts_of


@dataclass
class Format:
    """1 when the answer has its form, else 0 with the rule it breaks: it ended, its thinking is closed, it says something."""

    thinking: Literal["optional", "required", "forbidden"] = "optional"
    ended: bool = False  # an answer cut by its length has no form

    async def score_rollout(self, prompt: Prompt, rollout: Rollout) -> Score:
        broken = self._broken(rollout)
        return Score(0.0, reason=broken) if broken else Score(1.0)

    def _broken(self, rollout: Rollout) -> str:
        opened, closed = rollout.text.count("<think>"), rollout.text.count("</think>")
        if self.ended and rollout.status == "length":
            return "it was cut by its length"
        if opened > closed:
            return "its thinking is never closed"
        if opened > 1 or closed > 1:  # templates may open it in the prompt, so none opened is fine
            return f"<think> occurs {opened} times and </think> {closed} times"
        if self.thinking == "required" and not closed:
            return "it does not think"
        if self.thinking == "forbidden" and closed:
            return "it thinks"
        if not final_answer(rollout.text):
            return "it says nothing after its thinking" if closed else "it is empty"
        return ""


@dataclass
class Length:
    """Soft overlong penalty (DAPO, arXiv 2503.14476): 0 up to max_tokens - cache, linear to -1 at max_tokens, -1 beyond."""

    max_tokens: int
    cache: int

    def __post_init__(self):
        if not 0 <= self.cache <= self.max_tokens:
            raise ValueError(f"cache={self.cache} must be between 0 and max_tokens={self.max_tokens}")

    async def score_rollout(self, prompt: Prompt, rollout: Rollout) -> float:
        over = sum(rollout.sampled_mask) - (self.max_tokens - self.cache)
        if over <= 0:
            return 0.0
        return -min(1.0, over / self.cache) if self.cache else -1.0


@dataclass
class Repetition:
    """Minus the share of sampled n-grams of tokens that have occurred before: 0 without repetition, towards -1."""

    n: int = 4

    def __post_init__(self):
        if self.n < 1:
            raise ValueError(f"n={self.n} must be at least 1")

    async def score_rollout(self, prompt: Prompt, rollout: Rollout) -> float:
        sampled = [token for token, mine in zip(rollout.ids, rollout.sampled_mask) if mine]
        return -repeated_share(sampled, self.n) or 0.0


class Language:
    """Share of the final answer that is in a script of the prompt's last message; 1 where either has no letters.

    Scripts of the message are those with at least a fifth of it: a Chinese question about Python may be answered in both.
    """

    async def score_rollout(self, prompt: Prompt, rollout: Rollout) -> float:
        asked = scripts_of(str(prompt.conversation.messages[-1]["content"]))
        said = scripts_of(final_answer(rollout.text))
        if not asked or not said:
            return 1.0
        permitted = {script for script, amount in asked.items() if amount >= asked.total() / 5}
        return sum(amount for script, amount in said.items() if script in permitted) / said.total()


@dataclass
class Exact:
    """1 when the final answer is the reference, or one of a list of them; white space round it does not count."""

    field: str = "answer"  # of the prompt's data
    ignore_case: bool = False

    def score_rollout(self, prompt: Prompt, rollout: Rollout) -> float:
        reference = reference_of(prompt, self.field)
        accepted = reference if isinstance(reference, list | tuple) else [reference]
        return float(self._plain(final_answer(rollout.text)) in [self._plain(str(one)) for one in accepted])

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()


@dataclass
class Regex:
    """1 when the pattern is found in the final answer (where=text: in all of it, thinking included), else 0."""

    pattern: str
    where: Literal["answer", "text"] = "answer"

    def __post_init__(self):
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern={self.pattern!r} is no regular expression: {error}") from error

    def score_rollout(self, prompt: Prompt, rollout: Rollout) -> float:
        text = rollout.text if self.where == "text" else final_answer(rollout.text)
        return float(re.search(self.pattern, text) is not None)
