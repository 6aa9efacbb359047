"""What an episode has seen so far, for the critic's rules: words, phrases, pages and calls. A step costs its own new text."""

from __future__ import annotations

import json
import re
import unicodedata
from functools import lru_cache

from megatron_nb.rewards.critic_steps import Step, Task
from megatron_nb.rollout.calls import Call

WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")  # ideographs count singly
HIT = re.compile(r"^\[\d+\] (.+)$", re.MULTILINE)  # a title among search results
NOTHING = re.compile(r"^\s*(?:No results\.?|.*: 0 matches)?\s*$")
ERROR = "Error: "
SHINGLE = 4  # words in a row by which text counts as seen before
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
STOP = frozenset(
    """
    a about after all also am an and any are as at be because been before being but by can could did do does for from had has
    have he her him his how i if in into is it its itself just let me more most my next no nor not now of on one only or other
    our out over page pages result results search searching she should so some such than that the their them then there these
    they this those through to up us was we were what when where which who whom whose why will with would you your look looking
    find found open opening need needs check read article text see first know says said
    """.split()  # noqa: SIM905
)


@lru_cache(maxsize=128)  # a result is looked at by several rules
def words(text: str) -> tuple[str, ...]:
    """The words of a text, without case and accents."""
    if not text.isascii():
        text = "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return tuple(WORD.findall(text.casefold()))


def content_words(text: str) -> set[str]:
    """The words that say something."""
    return {word for word in words(text) if word not in STOP and (len(word) > 1 or not word.isascii() or word.isdigit())}


def plain(text: str) -> str:
    """The words between blanks: `plain(a) in plain(b)` when b has the phrase a."""
    return f" {' '.join(words(text))} "


def is_error(result: str) -> bool:
    return result.startswith(ERROR)


def is_empty(result: str) -> bool:
    """Whether a tool found nothing."""
    return NOTHING.match(result) is not None


def told(call: Call) -> str:
    """A call in one short line."""
    return f"{call.name}({', '.join(f'{key}={str(value)[:60]!r}' for key, value in call.arguments.items())})"


def subject(call: Call) -> str:
    """What a call is about: its query, or the page it names."""
    return str(call.arguments.get("query") or call.arguments.get("title") or "")


class Memory:
    """All of the question and of the results up to a step. Texts are kept as plain() of them."""

    def __init__(self, task: Task):
        self.question = plain(task.question)
        self.words = set(words(task.question))
        self.texts: list[str] = []  # results, oldest first
        self.shingles: set[tuple[str, ...]] = set()
        self.calls: dict[str, int] = {}  # what was asked and answered -> the first step that did
        self.opened: set[str] = set()
        self.last: list[str] = []  # results of the latest step that called a tool, as they were written
        self.known: dict[str, bool] = {}  # phrase -> has been seen
        self.steps = 0

    def has(self, phrase: str) -> bool:
        """Whether question or results hold the phrase."""
        wanted = plain(phrase)
        if not wanted.strip() or self.known.get(wanted):
            return bool(wanted.strip())
        self.known[wanted] = wanted in self.question or any(wanted in text for text in self.texts)
        return self.known[wanted]

    def in_results(self, phrase: str) -> bool:
        wanted = plain(phrase)
        return bool(wanted.strip()) and any(wanted in text for text in self.texts)

    def novelty(self, result: str) -> float:
        """Share of the result's phrases that no earlier result had; 0 for an empty one."""
        found = shingles(result)
        return len(found - self.shingles) / len(found) if found else 0.0

    def repeats(self, call: Call) -> int | None:
        """The step (from 0) that asked the same and was answered."""
        return self.calls.get(key_of(call))

    def add(self, step: Step) -> None:
        """Take a step in, after it was judged."""
        for call, result in zip(step.calls, step.results):
            if not is_error(result):
                self.calls.setdefault(key_of(call), self.steps)
                if call.name == "open_page":
                    self.opened.add(plain(subject(call)))
        for result in step.results:
            self.texts.append(plain(result))
            self.words.update(words(result))
            self.shingles |= shingles(result)
        if step.calls:
            self.last = list(step.results)
        self.steps += 1


@lru_cache(maxsize=8)
def shingles(text: str) -> frozenset[tuple[str, ...]]:
    found = words(text)
    size = min(SHINGLE, len(found))
    return frozenset(found[i : i + size] for i in range(len(found) - size + 1)) if size else frozenset()


def key_of(call: Call) -> str:
    """Calls with the same key ask the same: the words of a query in any order, other arguments as they are."""
    if call.name == "search":
        query = str(call.arguments.get("query", ""))
        return "search " + " ".join(sorted(content_words(query) or words(query)))
    arguments = {key: plain(value) if isinstance(value, str) and key != "code" else value
                 for key, value in call.arguments.items() if (key, value) != ("page", 1)}  # fmt: skip
    return f"{call.name} {json.dumps(arguments, sort_keys=True, default=str)}"


def sentences(text: str) -> list[str]:
    return [part for part in SENTENCE.split(text) if part.strip()]
