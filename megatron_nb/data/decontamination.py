"""Finds texts that share runs of words with evaluation sets, and says with which.

Words are compared without case, punctuation and width; each character of a script without spaces is a word. Two texts overlap
when they share n words in a row. An evaluation text of fewer words overlaps with its equal only. Runs that stand in more than
`common` different evaluation texts are phrases of the trade ("the first line of the input contains ...") and do not count.
The length of 13 is the one of the GPT-3 report (arXiv 2005.14165, appendix C).

Any n words in a row hold a whole piece of m = (n + 1) // 2 words that begins at a multiple of m, so a long text is first read
in such pieces, and only around those that an evaluation text has too is it compared run by run.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

NO_TEXT = frozenset((  # fields of a training row that say nothing a model learns to answer, or whose numbers meet by chance
    "id", "role", "from", "source", "tools", "tests", "public_tests", "private_tests", "generated_tests", "input_output",
    "public_test_cases", "private_test_cases",
))  # fmt: skip

WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
ASCII_WORD = re.compile("[a-z0-9]+")


@dataclass(frozen=True)
class Overlap:
    """A text of an evaluation set that shares something with the text asked about."""

    set: str
    item: str
    shared: int  # runs of words in common
    of: int  # runs of the evaluation text that count
    excerpt: str  # the first one


@dataclass
class _Item:
    set: str
    name: str
    runs: int  # that count; known once the sets are complete


class Evaluations:
    """The texts of evaluation sets, by their runs of n words. Add all of them before the first question."""

    def __init__(self, n: int = 13, common: int = 3):
        if n < 1 or common < 1:
            raise ValueError(f"n={n} and common={common} must be at least 1")
        self.n, self.common = n, common
        self._items: list[_Item] = []
        self._by_run: dict[str, list[int]] = {}  # a run of words -> items with it; short texts whole
        self._texts: dict[str, int] = {}  # the words of a text -> how it is numbered among the different ones
        self._distinct: list[int] = []  # item -> number of its text
        self._pairs: list[dict] = []
        self._piece = (n + 1) // 2
        self._pieces: set[str] = set()  # of all texts with a run

    def add(self, set_name: str, item: str, text: str, *others: str) -> None:
        """One text of a set; others: what else tells that it was met."""
        runs: dict[str, None] = {}
        for words in map(words_of, (text, *others)):
            if len(words) >= self.n:
                runs |= dict.fromkeys(self._runs(words))
                self._pieces.update(" ".join(words[k : k + self._piece]) for k in range(len(words) - self._piece + 1))
            elif words:
                runs[" ".join(words)] = None
        self._distinct.append(self._texts.setdefault(" ".join(words_of(text)), len(self._texts)))
        for run in runs:
            self._by_run.setdefault(run, []).append(len(self._items))
        self._items.append(_Item(set_name, item, len(runs)))

    def overlaps(self, text: str, name: str = "") -> list[Overlap]:
        """Evaluation texts that share runs with this one, most of them first; noted for the report under `name`."""
        found = self.find(text)
        self._pairs += [{"id": name, **asdict(one)} for one in found]
        return found

    def find(self, text: str) -> list[Overlap]:
        """The same, not noted."""
        words, shared, first = words_of(text), Counter(), {}
        runs = [" ".join(words[place : place + self.n]) for place in self._near(words)]
        whole = [" ".join(words)] if 0 < len(words) < self.n else []
        for run in dict.fromkeys([*runs, *whole]):
            items = self._by_run.get(run, ())
            if len({self._distinct[item] for item in items}) > self.common:
                continue
            for item in items:
                shared[item] += 1
                first.setdefault(item, run)
        return [Overlap(self._items[item].set, self._items[item].name, count, self._items[item].runs, first[item])
                for item, count in shared.most_common()]  # fmt: skip

    def report(self) -> dict:
        """Per set its texts and how many were met, and every pair that overlaps."""
        sets: dict[str, dict[str, int]] = {}
        for item in self._items:
            sets.setdefault(item.set, {"texts": 0, "met": 0})["texts"] += 1
        for name in sets:
            sets[name]["met"] = len({pair["item"] for pair in self._pairs if pair["set"] == name})
        return {"n": self.n, "common": self.common, "sets": sets, "pairs": self._pairs}

    def remember(self, pairs: list[dict]) -> None:
        """Take up pairs of an earlier report."""
        self._pairs += pairs

    def _near(self, words: list[str]) -> Iterator[int]:
        """Where runs begin that hold a piece of an evaluation text; none is left out that could overlap."""
        size, last, done = self._piece, len(words) - self.n, 0
        for place in range(0, len(words) - size + 1, size):
            if " ".join(words[place : place + size]) in self._pieces:
                begin = max(done, place - self.n + size)
                done = max(done, min(place, last) + 1)
                yield from range(begin, done)

    def _runs(self, words: list[str]) -> list[str]:
        return [" ".join(words[place : place + self.n]) for place in range(len(words) - self.n + 1)]


def words_of(text: str) -> list[str]:
    """The words of a text as they are compared."""
    if text.isascii():  # the same words, several times faster
        return ASCII_WORD.findall(text.lower())
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def texts_of(row: Any) -> Iterator[str]:
    """Every text of a training row, whatever its format, without names, tools and tests."""
    if isinstance(row, str):
        yield row
    elif isinstance(row, dict):
        for key, value in row.items():
            if key not in NO_TEXT:
                yield from texts_of(value)
    elif isinstance(row, list):
        for value in row:
            yield from texts_of(value)
