"""Data of the search demo beside what the stages make: the wiki sample, a tokenizer, copying exercises.

The sample is a shortened English Wikipedia dump that the package gensim brings (106 articles, text CC BY-SA). An exercise has
the form of a search trajectory, but its pages are invented: sentences of the sample in which a name is replaced by random
words. Its search and its looks into pages are written, not made; they teach where to copy from, and nothing about any page.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
from pathlib import Path
from typing import Any

from megatron_nb.search.corpus import Corpus
from megatron_nb.search.sentences import sentences
from megatron_nb.synthesis.question_obscure import GAP
from megatron_nb.synthesis.question_quotes import before_gap, labelled, question_of
from tools.demo_files import train_twin_tokenizer, write_rows

VOCABULARY = 4096
SAMPLE = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
PLAIN = re.compile(r"[A-Za-z0-9 ,.'()-]+")
CONTEXT, SNIPPET = 8, 6  # words around a match, and of a hit


def sample() -> Path:
    """The dump. ValueError when its package is not installed."""
    spec = importlib.util.find_spec("gensim")  # not imported: its own dependencies are not installed
    found = [place for root in (spec.submodule_search_locations if spec else None) or []
             if (place := Path(root) / "test" / "test_data" / SAMPLE).is_file()]  # fmt: skip
    if not found:
        raise ValueError("the wiki sample of package gensim is not installed: pip install --no-deps gensim==4.4.0")
    return found[0]


def quotable(corpus: Corpus, without: set[str]) -> list[str]:
    """Plain sentences of all pages but those."""
    said = (one for title in corpus.titles() if title not in without for one in sentences(corpus.page(title).text))
    return [one for one in said if 9 <= len(one.split()) <= 40 and PLAIN.fullmatch(one)]


class Exercises:
    """Draws exercises from sentences."""

    def __init__(self, said: list[str], rng: random.Random):
        self.said, self.rng = said, rng
        self.words = sorted({word for one in said for word in one.split() if word.isalpha() and len(word) > 2})

    def name(self) -> str:
        return " ".join(self.rng.choice(self.words).capitalize() for _ in range(self.rng.choice((1, 1, 2, 2, 3))))

    def number_or_name(self) -> str:
        return str(self.rng.randint(1, 2000)) if self.rng.random() < 0.3 else self.name()

    def gap(self, name: str) -> tuple[str, str, str]:
        """(words before a gap, words after it, a context with the name) of a sentence."""
        words = self.rng.choice(self.said).split()
        at, before, after = self.rng.randint(4, len(words) - 2), 3, self.rng.randint(1, 2)
        looked_for = " ".join(words[at - before : at])
        context = [*words[max(0, at - before - CONTEXT) : at - before], f"**{looked_for}**", name]
        return looked_for, " ".join(words[at + 1 : at + 1 + after]), " ".join([*context, *words[at + 1 : at + CONTEXT]])

    def hits(self, title: str, quote: str) -> str:
        """What a search for the quote gives."""
        words = [*self.rng.choice(self.said).split()[: self.rng.randint(0, 2)], *quote.split()][: SNIPPET + 2]
        shown = [(title, " ".join(words)), (self.name(), " ".join(self.rng.choice(self.said).split()[:SNIPPET]))]
        return "\n\n".join(f"[{number}] {one}\n{text} ..." for number, (one, text) in enumerate(shown, 1))

    def draw(self) -> dict[str, Any]:
        """One conversation of 1 or 2 links."""
        titles = [self.name() for _ in range(self.rng.choice((2, 2, 3)))]
        words = self.rng.choice(self.said).split()
        start, count = self.rng.randrange(len(words) - 6), self.rng.randint(4, 6)
        quote = " ".join(words[start : start + count])
        gaps = [self.gap(title) for title in titles[1:]]
        answer = self.number_or_name()
        gaps.append(self.gap(answer))
        clues = [quote, *(f"{before} {GAP} {after}" for before, after, _ in gaps)]
        messages = [{"role": "user", "content": question_of(clues)}, called(labelled(clues, 0), "search", query=quote),
                    {"role": "tool", "content": self.hits(titles[0], quote)}]  # fmt: skip
        for place, (title, (before, _, context)) in enumerate(zip(titles, gaps), 1):
            messages += [called(before_gap(labelled(clues, place)), "find_in_page", title=title, text=before),
                         {"role": "tool", "content": f"{title}: 1 match\n... {context} ..."}]  # fmt: skip
        return {"messages": [*messages, {"role": "assistant", "content": f"Answer: {answer}"}]}


def called(thought: str, name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": thought, "tool_calls": [{"id": "", "type": "function", "function": function}]}


def write_exercises(out: Path, corpus: Path, heldout: list[dict[str, Any]], count: int, seed: int) -> None:
    """`count` exercises. heldout: question rows whose pages lend no sentence."""
    away = {step["title"] for row in heldout for step in row["path"]}
    exercises = Exercises(quotable(Corpus.open(corpus), away), random.Random(seed))
    write_rows(out, [exercises.draw() for _ in range(count)])


def write_tokenizer(out: Path, corpus: Path, schemas: list[dict[str, Any]], seed: int) -> None:
    """A tokenizer of VOCABULARY entries, trained on the sample and on the form of trajectories.

    Every word is cut in the same pieces with and without a space before it: names in running text and in quotation marks then
    differ in one token, which has a twin. ValueError when the sample does not give so many entries.
    """
    opened = Corpus.open(corpus)
    said = [one for title in opened.titles() for one in (title, *sentences(opened.page(title).text))]
    exercises = Exercises(quotable(opened, set()), random.Random(seed))
    form = "<tool_call>\n{}\n</tool_call>\n<tool_response>\n</tool_response>\n"
    for _ in range(200):
        for message in exercises.draw()["messages"]:
            calls = message.get("tool_calls", [])
            said += [message["content"], *(form.format(json.dumps(one["function"])) for one in calls)]
    head = "# Tools\n\nFunctions that can be called:\n<tools>\n</tools>\n\nA call is written as:\n<function>, <object>"
    entries = train_twin_tokenizer(out, [*said, *([head, *map(json.dumps, schemas)] * 50)], VOCABULARY, indents=())
    if not VOCABULARY - 1 <= entries <= VOCABULARY:
        raise ValueError(f"{out} has {entries} tokens, {VOCABULARY} are needed: is the sample whole?")
