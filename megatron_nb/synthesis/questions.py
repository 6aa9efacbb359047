"""Multi-hop questions from walks: attempt by attempt until enough are kept, in an order that a kill and a resume do not change.

An attempt is a walk; it ends as a row or with the rule that dropped it, and the ledger remembers which. Attempts are made many
at once, but taken in order: what duplicates an earlier question is dropped, never the earlier one. The held-out part comes
first; the training part then walks over what it has left.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_nb.asking.ledger import Ledger, Progress
from megatron_nb.rewards.answer_search import normalised
from megatron_nb.rollout.agent import seed_of
from megatron_nb.search.corpus import Corpus
from megatron_nb.synthesis.question_chain import Draft, Pages, Unusable, draft
from megatron_nb.synthesis.question_quotes import Quotes, quotes
from megatron_nb.synthesis.question_solver import CHECKS, NOT_CHECKED, Solver
from megatron_nb.synthesis.question_verify import verify_chain
from megatron_nb.synthesis.question_writer import EndpointWriter, Writer
from megatron_nb.synthesis.walk import WalkConfig, Walker, day_of, neighbourhood

log = logging.getLogger(__name__)
PARTS = ("heldout", "train", "rl")  # in the order in which they are made
CHUNK = 256  # walks drawn at once; attempt n is walk n % CHUNK of chunk n // CHUNK
LOST = 3  # times the concurrency: attempts in a row without an answer of the model, before the job stops


class Maker:
    """One attempt: from a walk to a row, or to the rule that drops it."""

    def __init__(self, corpus: Corpus, writer: Writer, solver: Solver | None, min_hops: int, seed: int, source: str):
        self.corpus, self.writer, self.solver = corpus, writer, solver
        self.pages, self.min_hops, self.seed, self.source = Pages(corpus), min_hops, seed, source
        self.drafting = quotes if isinstance(writer, Quotes) else draft
        self.asks_models = solver is not None or isinstance(writer, EndpointWriter)

    def chain(self, name: str, titles: list[str]) -> Draft | dict[str, Any]:
        """The chain of a walk, or {"dropped": rule}."""
        if len(titles) <= self.min_hops:
            return {"dropped": "walk_too_short"}
        try:
            return self.drafting(self.pages, titles, self.min_hops, random.Random(seed_of(self.seed, name)))
        except Unusable as rule:
            return {"dropped": str(rule)}

    async def question(self, name: str, chain: Draft, head_date: str | None) -> dict[str, Any]:
        """{"row": ...} or {"dropped": rule}. OSError when a model was not reached."""
        rng, wrong = random.Random(seed_of(self.seed, f"{name}/question")), []
        for _ in range(self.writer.tries):
            question, clues = await self.writer.write(chain, rng, wrong)
            row = row_of(chain, question, clues, head_date, self.source)
            broken = verify_chain(self.pages, row)
            if broken is None:
                break
            wrong.append((question, broken))
        else:
            return {"dropped": broken.partition(":")[0], "reason": broken}
        rule = await self.solver.check(row) if self.solver else None
        return {"dropped": rule, "checks": row["checks"]} if rule else {"row": row}


def row_of(chain: Draft, question: str, clues: list[str], head_date: str | None, source: str) -> dict[str, Any]:
    """The record of a question; checks that a model must do say "not checked" until it has."""
    following = [*chain.titles[1:], None]
    quotes = [*chain.evidence, chain.answer.evidence]
    digest = hashlib.blake2b(f"{question}\n{chain.answer.text}".encode(), digest_size=8)
    models = dict.fromkeys(CHECKS, NOT_CHECKED)
    return {
        "id": digest.hexdigest(), "question": question, "answer": chain.answer.text, "aliases": chain.answer.aliases,
        "answer_kind": chain.answer.kind, "hops": len(chain.titles) - 1,
        "path": [{"title": title, "evidence": quote, "link": link}
                 for title, quote, link in zip(chain.titles, quotes, following)],
        "answer_evidence": chain.answer.evidence, "head_date": head_date, "clues": clues, "source": source,
        "checks": {"chain": "verified", "hops_unique": True, "head_rank": chain.head_rank, **models},
    }  # fmt: skip


@dataclass
class Kept:
    """The questions so far, and what a further one may not repeat."""

    same_links: float = 0.5  # share of its links that a question may have in common with an earlier one
    parts: tuple[str, ...] = PARTS[:2]  # that were asked for
    rows: list[dict[str, Any]] = field(default_factory=list)
    dropped: dict[str, Counter] = field(default_factory=lambda: {part: Counter() for part in PARTS})
    attempts: Counter = field(default_factory=Counter)
    _questions: set[str] = field(default_factory=set)
    _asked: set[tuple[str, str]] = field(default_factory=set)
    _links: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    _heldout: dict[str, set[str]] = field(default_factory=lambda: {"answers": set(), "pages": set()})

    def repeats(self, row: dict[str, Any], part: str) -> str | None:
        """The rule by which a row is too much like an earlier one."""
        last, answer = row["path"][-1]["title"], normalised(row["answer"])
        if part != "heldout" and answer in self._heldout["answers"]:
            return "answer_is_held_out"
        if part != "heldout" and last in self._heldout["pages"]:
            return "answer_page_is_held_out"
        if normalised(row["question"]) in self._questions:
            return "duplicate_question"
        if (last, answer) in self._asked:
            return "duplicate_answer"
        shared = Counter(number for link in _links(row) for number in self._links.get(link, ()))
        if shared and max(shared.values()) > self.same_links * row["hops"]:
            return "duplicate_path"
        return None

    def add(self, row: dict[str, Any], part: str) -> None:
        last, answer = row["path"][-1]["title"], normalised(row["answer"])
        for link in _links(row):
            self._links.setdefault(link, []).append(len(self.rows))
        self.rows.append({**row, "split": part})
        self._questions.add(normalised(row["question"]))
        self._asked.add((last, answer))
        if part == "heldout":
            self._heldout["answers"].add(answer)
            self._heldout["pages"].add(last)

    def of(self, part: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["split"] == part]

    def pages(self, part: str) -> set[str]:
        """Titles on the paths of a part."""
        return {step["title"] for row in self.of(part) for step in row["path"]}


def _links(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(step["title"], step["link"]) for step in row["path"][:-1]]


async def make_part(
    part: str, count: int, kept: Kept, walker: Walker, maker: Maker, ledger: Ledger, concurrency: int, attempts: int
) -> None:  # fmt: skip
    """Add `count` questions of a part, or as many as `attempts` walks give. OSError when the models do not answer."""
    progress, lost, told = Progress(f"questions of {part}", count), 0, len(kept.rows)
    async for outcome in _outcomes(part, walker, maker, ledger, concurrency, attempts):
        if len(kept.rows) - told >= count:
            break
        kept.attempts[part] += 1
        lost = lost + 1 if isinstance(outcome, OSError) else 0
        if lost > LOST * concurrency:
            raise OSError(f"{lost} attempts in a row without an answer; the last: {outcome}") from outcome
        rule = "failed" if isinstance(outcome, OSError) else outcome.get("dropped") or kept.repeats(outcome["row"], part)
        if rule:
            kept.dropped[part][rule] += 1
            continue
        kept.add(outcome["row"], part)
        progress.tick()
        if len(kept.rows) - told >= count:
            break


async def _outcomes(
    part: str, walker: Walker, maker: Maker, ledger: Ledger, concurrency: int, attempts: int
) -> AsyncIterator[dict[str, Any] | OSError]:  # fmt: skip
    """What became of attempt 0, 1, 2, ...; up to `concurrency` of them are under way."""
    made = Attempts(part, walker, maker, ledger)
    waiting: deque[asyncio.Task] = deque()
    numbers = iter(range(attempts))
    try:
        for number in range(attempts):
            while len(waiting) < concurrency and (following := next(numbers, None)) is not None:
                waiting.append(asyncio.create_task(made.outcome(following)))
            yield await waiting.popleft()
            if number % CHUNK == CHUNK - 1:
                made.finished(number // CHUNK)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


class Attempts:
    """The attempts of a part, remembered: one by one where a model was asked, else by chunks, for a sync each would be slow."""

    def __init__(self, part: str, walker: Walker, maker: Maker, ledger: Ledger):
        self.part, self.walker, self.maker, self.ledger = part, walker, maker, ledger
        self._walks: tuple[int, np.ndarray, np.ndarray] = (-1, np.zeros(0), np.zeros(0))
        self._cheap: dict[int, dict[str, dict[str, Any]]] = {}  # chunk -> attempt -> outcome

    async def outcome(self, number: int) -> dict[str, Any] | OSError:
        """Of one attempt; an OSError where a model was not reached."""
        name, chunk = f"{self.part}/{number}", number // CHUNK
        if name in self.ledger:
            return self.ledger[name]
        if (known := f"{self.part}/chunk-{chunk}") in self.ledger and str(number) in self.ledger[known]:
            return self.ledger[known][str(number)]
        if self._walks[0] != chunk:
            self._walks = (chunk, *self.walker.draw(CHUNK, [self.maker.seed, PARTS.index(self.part), chunk]))
        walk = self._walks[1][number % CHUNK, : self._walks[2][number % CHUNK] + 1]
        graph = self.walker.graph
        result = self.maker.chain(name, [graph.titles[page] for page in walk])
        if isinstance(result, Draft):
            try:
                result = await self.maker.question(name, result, day_of(float(graph.date[walk[0]])))
            except OSError as error:
                log.warning("%s: %s", name, error)
                return error
            if self.maker.asks_models:
                self.ledger[name] = result
                return result
        self._cheap.setdefault(chunk, {})[str(number)] = result
        return result

    def finished(self, chunk: int) -> None:
        """Every attempt of the chunk is done."""
        if cheap := self._cheap.pop(chunk, None):
            self.ledger[f"{self.part}/chunk-{chunk}"] = cheap


async def make_all(
    counts: dict[str, int], apart: str, heldout_pages: float | None, same_links: float, walk: WalkConfig, maker: Maker,
    ledger: Ledger, concurrency: int, attempts: int,
) -> Kept:  # fmt: skip
    """All parts. apart: "path": no page of a held-out path is on a training path; "answer": no page with a held-out answer.

    heldout_pages: held-out walks keep to a neighbourhood of that share of the pages, training walks keep out of it.
    """
    kept, graph = Kept(same_links, tuple(part for part in PARTS if part in PARTS[:2] or counts.get(part))), maker.corpus.graph
    inside = None if heldout_pages is None else neighbourhood(Walker(graph, walk), heldout_pages, maker.seed)
    for part in kept.parts:
        if not counts[part]:
            continue
        away = kept.pages("heldout") if apart == "path" else set()
        without = [graph.id_of(title) for title in away]
        if inside is not None:
            without += np.flatnonzero(inside != (part == "heldout")).tolist()
        try:
            walker = Walker(graph, walk, without)
        except ValueError as error:
            if not without:
                raise
            told = f"{part}, apart={apart} and heldout_pages={heldout_pages} leave out {len(set(without))} pages: {error}"
            if not kept.rows:
                raise ValueError(told) from error
            log.warning("%s", told)
            continue
        await make_part(part, counts[part], kept, walker, maker, ledger, concurrency, attempts * counts[part])
        made = len(kept.of(part))
        if made < counts[part]:
            log.warning("%s: only %d of %d questions after %d walks; raise attempts, or loosen the rule that drops most: %s",
                        part, made, counts[part], kept.attempts[part], dict(kept.dropped[part].most_common(3)))  # fmt: skip
    return kept
