"""Finds texts that share runs of words with evaluation sets, and says with which.

Words are compared without case, punctuation and width; each character of a script without spaces is a word. Two texts overlap
when they share n words in a row. An evaluation text of fewer words overlaps with its equal only. Runs that stand in more than
`common` different evaluation texts are phrases of the trade ("the first line of the input contains ...") and do not count.
The length of 13 is the one of the GPT-3 report (arXiv 2005.14165, appendix C).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import asdict, dataclass

WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


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

    def add(self, set_name: str, item: str, text: str) -> None:
        """One text of a set."""
        words = words_of(text)
        said = " ".join(words)
        self._distinct.append(self._texts.setdefault(said, len(self._texts)))
        runs = dict.fromkeys(self._runs(words)) if len(words) >= self.n else dict.fromkeys([said] if said else [])
        for run in runs:
            self._by_run.setdefault(run, []).append(len(self._items))
        self._items.append(_Item(set_name, item, len(runs)))

    def overlaps(self, text: str, name: str = "") -> list[Overlap]:
        """Evaluation texts that share runs with this one, most of them first; noted for the report under `name`."""
        words, shared, first = words_of(text), Counter(), {}
        for run in dict.fromkeys([*self._runs(words), " ".join(words)]):
            items = self._by_run.get(run, ())
            if len({self._distinct[item] for item in items}) > self.common:
                continue
            for item in items:
                shared[item] += 1
                first.setdefault(item, run)
        found = [Overlap(self._items[item].set, self._items[item].name, count, self._items[item].runs, first[item])
                 for item, count in shared.most_common()]  # fmt: skip
        self._pairs += [{"id": name, **asdict(one)} for one in found]
        return found

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

    def _runs(self, words: list[str]) -> list[str]:
        return [" ".join(words[place : place + self.n]) for place in range(len(words) - self.n + 1)]


def words_of(text: str) -> list[str]:
    """The words of a text as they are compared."""
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())
