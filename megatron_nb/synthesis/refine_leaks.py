"""Signs in a reasoning that its writer knew the solution beforehand.

    leak:KIND    a wording of this kind, regular expressions from the stage file ("the given solution", "matches the result")
    announced    early, the final answer stands there without having been worked out
    quoted       early, most of the solution's own wording stands there
    underived    the final answer, a number, stands nowhere before the line that gives it

Early is the first `early` share of the text. A number counts as worked out where a calculation, or another number, precedes it
within the sentence; one that the task itself contains is not looked for, nor are numbers that count steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from megatron_nb.synthesis.refine_wording import unboxed

NUMBER = re.compile(r"(?<![\w.])-?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d])|(?<![\w.])-?\d*\.?\d+(?![\w]*\d)")
STEP = re.compile(r"(?:^|\n)\s*(?:\W{0,3})\d+[.):]\s|\b(?:step|item|part|line|equation|case|point)\s+\d+", re.IGNORECASE)
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+|(?<=[\u3002\uff01\uff1f])")
WORD = re.compile(r"\w+|[^\w\s]")
SAME = str.maketrans({"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u00a0": " ", "*": "", "_": " "})
NO_UNIT = {"pi", "ln", "log", "sin", "cos", "tan", "exp", "or", "and", "not"}
LEAST = 4  # characters of a final answer in words that is looked for: "no" stands everywhere


@dataclass
class LeakConfig:
    """What gives away that the solution was known."""

    phrases: dict[str, list[str]] = field(default_factory=dict)  # kind -> regular expressions; case and line ends do not count
    answer_kinds: list[str] = field(default_factory=list)  # kinds that a refined answer may not contain either
    early: float = 0.3  # (own) share of the reasoning
    quoted: float = 0.4  # (own) share of the solution's n-grams that may stand in the early part
    quoted_words: int = 5  # (own) words of an n-gram; a shorter solution is not looked for

    def __post_init__(self):
        for kind, patterns in self.phrases.items():
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"leaks.phrases.{kind}: {pattern!r} is no regular expression: {error}") from error
        if unknown := sorted(set(self.answer_kinds) - set(self.phrases)):
            raise ValueError(f"leaks.answer_kinds={unknown} must be kinds of leaks.phrases: {', '.join(self.phrases)}")
        for name in ("early", "quoted"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"leaks.{name}={getattr(self, name)} must be in (0, 1]")
        if self.quoted_words < 2:
            raise ValueError(f"leaks.quoted_words={self.quoted_words} must be at least 2")

    @cached_property
    def compiled(self) -> dict[str, re.Pattern]:
        joined = {kind: "|".join(f"(?:{one})" for one in patterns) for kind, patterns in self.phrases.items() if patterns}
        return {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in joined.items()}


@dataclass
class Leak:
    """One sign: the rule it breaks and the words that show it."""

    rule: str
    shown: str


def phrases_in(text: str, config: LeakConfig, kinds: list[str] | None = None) -> Iterator[Leak]:
    """The first wording of every kind."""
    plain = re.sub(r"\s+", " ", text.translate(SAME))
    for kind, pattern in config.compiled.items():
        if (kinds is None or kind in kinds) and (found := pattern.search(plain)):
            yield Leak(f"leak:{kind}", plain[max(0, found.start() - 30) : found.end() + 30])


def leaks_in(reasoning: str, question: str, solution: str, answer: str, config: LeakConfig) -> list[Leak]:
    """Every sign in a reasoning that leads to `solution`, whose final answer is `answer`."""
    found = list(phrases_in(reasoning, config))
    value = value_of(answer)
    number = None if value is None or value in values_in(question) else value
    if number is not None:
        found += _number_leaks(reasoning, number, config.early)
    answer = unboxed(answer)
    if value is None and LEAST <= len(answer) <= 80 and answer.casefold() not in question.casefold():
        place = reasoning.casefold().find(answer.casefold())
        if 0 <= place < config.early * len(reasoning):
            found.append(Leak("announced", reasoning[max(0, place - 40) : place + len(answer) + 20]))
    share = quoted_share(reasoning[: int(config.early * len(reasoning))], question, solution, config.quoted_words)
    if share > config.quoted:
        found.append(Leak("quoted", f"{share:.0%} of the solution's wording stands in the first {config.early:.0%}"))
    return found


# ------------------------------------------------------------------ numbers
def value_of(text: str) -> float | None:
    """The number that a final answer is, a unit of a few words and currency aside; None when it is anything else."""
    plain = re.sub(r"\\text\s*|\\[$%!,]|[{}$]", " ", unboxed(text.strip()).replace("{,}", ","))
    found, words = values_in(plain), re.findall(r"[^\W\d_]+", plain)
    unit = len(words) <= 3 and all(len(word) > 1 and word not in NO_UNIT for word in words)  # 5x and 5 pi are not 5
    return found[0] if len(found) == 1 and unit and not re.search(r"[\\^+*/=()]", plain) else None


def values_in(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in NUMBER.findall(text)]


def _number_leaks(reasoning: str, value: float, early: float) -> Iterator[Leak]:
    """Where the value first stands, unless it is worked out there or far on."""
    plain = STEP.sub(lambda found: " " * len(found[0]), reasoning)
    place = next((found.start() for found in NUMBER.finditer(plain) if float(found[0].replace(",", "")) == value), None)
    if place is None:
        yield Leak("underived", f"{value:g} stands nowhere in the reasoning")
        return
    if place >= early * len(plain):
        return
    before = SENTENCE.split(plain[:place])[-1]
    if "=" not in before and not NUMBER.search(before):
        yield Leak("announced", reasoning[max(0, place - 60) : place + 20])


# ------------------------------------------------------------------ quotes
def quoted_share(early: str, question: str, solution: str, n: int) -> float:
    """Share of the solution's n-grams of words, those of the task aside, that stand in the early part of a reasoning."""
    own = _grams(solution, n) - _grams(question, n)
    return len(own & _grams(early, n)) / len(own) if own else 0.0


def _grams(text: str, n: int) -> set[tuple[str, ...]]:
    words = WORD.findall(text.casefold())
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}
