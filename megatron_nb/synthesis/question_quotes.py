"""Questions as a chain of short quotes with gaps, verbatim from the pages: for readers that can copy but not paraphrase.

    Quote 3 "elected to the Senate as" is on some page. Quote 2 "States victory in the ___ , the territory" is there and hides
    the next page. Quote 1 "system for the Continental ___ to direct" is on that. What does it hide?

Every quote is CONTEXT words of a sentence on either side of what it hides, and stands once in its page, so a search and a look
into each page lead along the chain. Numbers count down, so a reader knows from the last one how many are left. Names of the
chain are hidden wherever they would stand.
"""

from __future__ import annotations

import random
import re
from typing import Any

from megatron_nb.search.sentences import sentences
from megatron_nb.synthesis.question_answers import Answer
from megatron_nb.synthesis.question_chain import Draft, Pages, Unusable
from megatron_nb.synthesis.question_obscure import FUNCTION, GAP, plain_title

FIRST = (4, 6)  # words of the quote that finds the first page
BEFORE, AFTER = (3, 3), (1, 2)  # words around a gap
FOUND = 1  # the search for the first quote must bring its page among so many
TRIES = 60
PLAIN = re.compile(r"[A-Za-z0-9 ,.'()-]+")
WORDS = re.compile(r"[A-Z][A-Za-z]+(?: [A-Z][A-Za-z]+){0,2}|\d[\d,]*\d|\d")  # what an answer may be: a name or a number
LONGEST = 400  # characters of a sentence


class Quotes:
    """Writes the question of a chain that `quotes` has drafted; a Writer."""

    tries = 1

    async def write(self, draft: Draft, rng: random.Random, wrong: list[tuple[str, str]]) -> tuple[str, list[str]]:
        clues = [draft.fact, *draft.hops, draft.answer.clue]
        return question_of(clues), clues


def question_of(clues: list[str]) -> str:
    """The question that quotes in path order ask: the first page's, one for each link, the answer's."""
    first, *links, last = (labelled(clues, place) for place in range(len(clues)))
    parts = [f"{first} is on some page.", *(f"{link} is there and hides the next page." for link in links)]
    return " ".join([*parts, f"{last} is on that. What does it hide?" if links else f"{last} is there. What does it hide?"])


def labelled(clues: list[str], place: int) -> str:
    """One of the quotes as its question has it."""
    return f'Quote {len(clues) - place} "{clues[place]}"'


def before_gap(quote: str) -> str:
    """A labelled quote without its gap and what follows."""
    start, gap, _ = quote.partition(f" {GAP}")
    return f'{start}"' if gap else quote


def quotes(pages: Pages, titles: list[str], min_hops: int, rng: random.Random) -> Draft:
    """A chain of the whole walk. Raises Unusable."""
    texts = [" ".join(pages.page(title).text.split()) for title in titles]
    hidden = [plain_title(title).lower() for title in titles]
    evidence: list[str] = []
    hops: list[str] = []
    for title, following, text in zip(titles, titles[1:], texts):
        links = [link.sentence for link in pages.page(title).links if link.target == following and _usable(link.sentence)]
        rng.shuffle(links)
        found = next(((one, gap) for one in links if (gap := _name_gap(one, following, text, rng))), None)
        if found is None:
            raise Unusable("no_evidence")
        evidence.append(found[0])
        hops.append(found[1])
    answer = _answer(pages.page(titles[-1]), texts[-1], [*hidden, *(quote.lower() for quote in evidence)], rng)
    fact, rank = _first_quote(pages, titles[0], hidden, rng)
    said = question_of([fact, *hops, answer.clue]).lower()
    if any(re.search(rf"\b{re.escape(name)}\b", said) for name in [*hidden, answer.text.lower()]):
        raise Unusable("named")
    return Draft(titles, evidence, answer, "", fact, hops, rank)


def _usable(sentence: str) -> bool:
    return 0 < len(sentence) <= LONGEST and "\n" not in sentence


def _gap(sentence: str, start: int, stop: int, text: str, rng: random.Random) -> str | None:
    """The words around sentence[start:stop], those before it once in the text; None when they cannot be quoted."""
    before, after = sentence[:start].split(), sentence[stop:]
    words = before[-rng.randint(*BEFORE) :]
    left = " ".join(words)
    if len(words) < BEFORE[0] or sentence[start - 1] != " " or not re.match(r"[ ,.)]|$", after) or not PLAIN.fullmatch(left):
        return None
    right = " ".join(re.sub(r"^([,.)]+)", r"\1 ", after).split()[: rng.randint(*AFTER)])
    if right and not PLAIN.fullmatch(right) or text.lower().count(left.lower()) != 1:
        return None
    return f"{left} {GAP} {right}".rstrip()


def _name_gap(sentence: str, title: str, text: str, rng: random.Random) -> str | None:
    """The quote that hides a page's title where a sentence has it, as it is written or with a small first letter."""
    for name in (title, title[:1].lower() + title[1:]):
        places = [found.span() for found in re.finditer(re.escape(name), sentence)]
        if len(places) == 1:
            return _gap(sentence, *places[0], text, rng)
    return None


def _answer(page: Any, text: str, said: list[str], rng: random.Random) -> Answer:
    """A name or number of the page with a quote that hides it. Raises Unusable."""
    usable = [one for one in dict.fromkeys(sentences(page.text)) if _usable(one) and page.text.count(one) == 1]
    for _ in range(TRIES if usable else 0):
        sentence = rng.choice(usable)
        places = [found for found in WORDS.finditer(sentence) if found.start() and found[0].lower() not in FUNCTION]
        if not places:
            continue
        found = rng.choice(places)
        value = found[0]
        once = len(re.findall(rf"\b{re.escape(value.lower())}\b", sentence.lower())) == 1
        told = any(re.search(rf"\b{re.escape(value.lower())}\b", one) for one in said)
        gap = _gap(sentence, *found.span(), text, rng) if once and not told else None
        if gap:
            return Answer(value, "words", sentence, gap)
    raise Unusable("no_answer")


def _first_quote(pages: Pages, title: str, hidden: list[str], rng: random.Random) -> tuple[str, int]:
    """(words of the first page that a search for them finds it by, its place among the hits). Raises Unusable."""
    usable = [one for one in sentences(pages.page(title).text) if _usable(one)]
    for _ in range(TRIES if usable else 0):
        words, count = rng.choice(usable).split(), rng.randint(*FIRST)
        if len(words) <= count:
            continue
        start = rng.randrange(len(words) - count)
        quote = " ".join(words[start : start + count])
        if not PLAIN.fullmatch(quote) or any(name in quote.lower() for name in hidden):
            continue
        hits = [hit.title for hit in pages.corpus.search(quote, FOUND)]
        if title in hits:
            return quote, hits.index(title) + 1
    raise Unusable("head_not_found")
