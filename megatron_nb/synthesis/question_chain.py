"""From a walk to a chain to ask about: evidence and an obscure clue for every hop, and an answer at its end.

A hop can be used when its page names the next one in a sentence, and when among everything that page links to only the next one
fits the clue. A walk is cut at the first hop that cannot be used; what is left must be long enough.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from megatron_nb.search.sentences import sentences
from megatron_nb.synthesis.question_answers import Answer, answers_in
from megatron_nb.synthesis.question_obscure import noun_of, obscure, plain_title, said_of, shortened, telling_words
from megatron_nb.synthesis.walk import QUOTABLE

PAGES_KEPT, WORDS_KEPT = 4096, 400_000  # in memory
QUOTED = (20, 500)  # characters of a sentence that is evidence
END = re.compile(r"[.!?][\"'”’)\]]*$")
FACT = (40, 220)  # characters of a sentence that can tell about the head
FACT_WORDS = 5
FACTS_FROM = 25  # sentences at the page's beginning
HEAD_FOUND = 10  # searching for the clues of the head must bring its page among so many


class Source(Protocol):
    """What is needed of a corpus (search/store.py)."""

    def page(self, title: str) -> Any: ...

    def search(self, query: str, k: int) -> list[Any]: ...


@dataclass(frozen=True)
class About:
    """What a page says it is."""

    said: str  # "" where it does not say
    noun: str
    obscure: str
    words: frozenset[str]


@dataclass
class Draft:
    """A chain with its clues, names hidden."""

    titles: list[str]  # [hops + 1]
    evidence: list[str]  # [hops] verbatim, and then the answer's
    answer: Answer
    head: str  # what the first page is
    fact: str  # something else about it
    hops: list[str]  # what each next page is
    head_rank: int  # place of the first page when its clues are searched for, from 1

    @property
    def clues(self) -> list[str]:
        return [self.head, self.fact, *self.hops, self.answer.clue]


class Unusable(Exception):
    """The walk gives no question; the message is the rule, the same for every walk."""


@dataclass
class ClueLengths:
    """Characters of each clue, so that a question with so many hops stays short enough."""

    head: int = 75
    fact: int = 100
    hop: int = 80
    gap: int = 120

    @classmethod
    def for_hops(cls, hops: int) -> ClueLengths:
        return cls(hop=max(24, min(80, 360 // hops)))


class Pages:
    """A corpus with what has been found about its pages, kept for the next walk."""

    def __init__(self, corpus: Source):
        self.corpus = corpus
        self.page: Callable[[str], Any] = lru_cache(PAGES_KEPT)(corpus.page)
        self.kind: Callable[[str], str | None] = lru_cache(WORDS_KEPT)(self._kind)
        self.about: Callable[[str], About] = lru_cache(WORDS_KEPT)(self._about)

    def _kind(self, name: str) -> str | None:
        """The noun of what a name names."""
        page = self.page(name)
        said = said_of(page.title, page.text) if page is not None and page.kind == "article" else None
        return noun_of(said) if said else None

    def _about(self, title: str) -> About:
        page = self.page(title)
        said = said_of(page.title, page.text) if page is not None else None
        if not said:
            return About("", "", "", frozenset())
        hidden = obscure(said, self.kind, title)
        return About(said, noun_of(said), hidden, frozenset(telling_words(hidden)))


def evidence_of(page: Any, target: str) -> str | None:
    """The sentence by which a page leads to another; None when no link of it stands in one."""
    for link in page.links:
        if link.target != target or not link.kind.startswith(QUOTABLE) or link.sentence not in page.text:
            continue
        whole = link.kind.startswith("infobox") or END.search(link.sentence)  # a caption is no sentence
        if whole and QUOTED[0] <= len(link.sentence) <= QUOTED[1]:
            return link.sentence
    return None


def hop_clue(pages: Pages, page: Any, target: str, longest: int) -> str | None:
    """A clue that among all links of the page only `target` fits; None when there is none.

    A page fits when it is everything that the clue says. Where several do, the first letter of the title is told.
    """
    clue = shortened(pages.about(target).obscure, longest)
    words = telling_words(clue)
    if not words:
        return None
    linked = {link.target for link in page.links} - {page.title, target}
    fitting = [plain_title(title) for title in linked if words <= pages.about(title).words]
    initial = plain_title(target)[0]
    if not fitting:
        return clue
    if any(title.startswith(initial) for title in fitting) or not initial.isalpha():
        return None
    return f"{clue} (“{initial}…”)"


def head_fact(pages: Pages, page: Any, longest: int, rng: random.Random) -> str | None:
    """A sentence of a page with names hidden, one that says much."""
    said, described = [], pages.about(page.title).obscure
    for sentence in sentences(page.text)[:FACTS_FROM]:
        if FACT[0] <= len(sentence) <= FACT[1] and sentence.endswith("."):
            fact = shortened(obscure(sentence, pages.kind, page.title), longest)
            words = telling_words(fact)
            if len(words) >= FACT_WORDS and described[:24] not in fact:
                said.append((len(words) + rng.random() * 3, fact))
    return max(said)[1] if said else None


def draft(pages: Pages, titles: list[str], min_hops: int, rng: random.Random) -> Draft:
    """A chain of the walk's first pages, as many as can be used. Raises Unusable."""
    length = ClueLengths.for_hops(len(titles) - 1)
    head = pages.page(titles[0])
    about = pages.about(titles[0])
    fact = head_fact(pages, head, length.fact, rng) if about.said else None
    if not fact:
        raise Unusable("head_says_too_little")
    quotes: list[str] = []
    for title, following in zip(titles, titles[1:]):
        quote = evidence_of(pages.page(title), following)
        if quote is None:
            break
        quotes.append(quote)
    if len(quotes) < min_hops:
        raise Unusable("no_evidence")
    hops: list[str] = []
    for title, following in list(zip(titles, titles[1:]))[: len(quotes)]:
        clue = hop_clue(pages, pages.page(title), following, length.hop)
        if clue is None:
            break
        hops.append(clue)
    if len(hops) < min_hops:
        raise Unusable("ambiguous_hop")
    clue = shortened(about.obscure, length.head)
    hits = [hit.title for hit in pages.corpus.search(f"{clue} {fact}", HEAD_FOUND)]
    rank = hits.index(titles[0]) + 1 if titles[0] in hits else 0
    if not rank:
        raise Unusable("head_not_found")
    for count in range(len(hops), min_hops - 1, -1):
        last = pages.page(titles[count])
        found = answers_in(last.title, last.text, length.gap, pages.kind)
        if found:
            kind = rng.choice(sorted({one.kind for one in found}))
            answer = rng.choice([one for one in found if one.kind == kind])
            return Draft(titles[: count + 1], quotes[:count], answer, clue, fact, hops[:count], rank)
    raise Unusable("no_answer")
