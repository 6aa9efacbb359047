"""Verifies a question against the corpus by rules alone; shares nothing with what writes questions.

A row (RUN/questions/*.jsonl) is a chain of evidence: every page of the path exists, quotes its evidence verbatim, and links to
the next one from that very sentence; the last page says the answer in a sentence of its own.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any, Protocol

MAX_CHARACTERS = 800  # a question has fewer (RECIPE: under 800 characters)
MAX_CLUES = 15


class PageSource(Protocol):
    """What is needed of a corpus (search/store.py)."""

    def page(self, title: str) -> Any: ...


def verify_chain(corpus: PageSource, row: dict[str, Any]) -> str | None:
    """None for a sound row, else "RULE: what was found"; the rules are the functions below."""
    for rule in (form, pages, links, answer_found, answer_hidden, path_hidden, limits):
        if found := rule(corpus, row):
            return f"{rule.__name__}: {found}"
    return None


def form(corpus: PageSource, row: dict[str, Any]) -> str | None:
    """The fields are there, of their types, and count each other rightly; no page stands twice."""
    if not isinstance(row, dict):
        return f"{str(row)[:80]!r} must be an object"
    wanted = {"id": str, "question": str, "answer": str, "aliases": list, "hops": int, "path": list, "answer_evidence": str,
              "clues": list}  # fmt: skip
    for name, kind in wanted.items():
        if not isinstance(row.get(name), kind) or (kind is str and not row[name].strip()):
            return f"{name}={row.get(name)!r} must be a {kind.__name__} with something in it"
    for name in ("aliases", "clues"):
        if not all(isinstance(one, str) for one in row[name]):
            return f"{name}={row[name]} must hold text alone"
    path = row["path"]
    for number, step in enumerate(path):
        if not isinstance(step, dict) or not all(isinstance(step.get(key), str) for key in ("title", "evidence")):
            return f"step {number + 1} must have title and evidence"
    for number, step in enumerate(path):
        following = path[number + 1]["title"] if number + 1 < len(path) else None
        if step.get("link") != following:
            return f"step {number + 1} links to {step.get('link')!r}, the next page is {following!r}"
    titles = [step["title"] for step in path]
    if len(set(titles)) < len(titles):
        return "a page stands twice in the path"
    if row["hops"] != len(path) - 1 or row["hops"] < 1:
        return f"hops={row['hops']} must be at least 1 and one less than the {len(path)} pages"
    if path[-1]["evidence"] != row["answer_evidence"]:
        return "the evidence of the last page must be answer_evidence"
    return None


def pages(corpus: PageSource, row: dict[str, Any]) -> str | None:
    """Every page exists under its own title."""
    for step in row["path"]:
        page = corpus.page(step["title"])
        if page is None or page.title != step["title"]:
            return f"there is no page {step['title']!r}"
    return None


def links(corpus: PageSource, row: dict[str, Any]) -> str | None:
    """Each hop's evidence stands verbatim in its page, which links to the next page from that sentence."""
    for step in row["path"][:-1]:
        page = corpus.page(step["title"])
        if not step["evidence"] or step["evidence"] not in page.text:
            return f"{step['title']!r} does not say {step['evidence']!r}"
        if not any(link.target == step["link"] and link.sentence == step["evidence"] for link in page.links):
            return f"{step['title']!r} does not link to {step['link']!r} where it says {step['evidence']!r}"
    return None


def answer_found(corpus: PageSource, row: dict[str, Any]) -> str | None:
    """The last page quotes the sentence of the answer, and the answer stands in it once, beside something else."""
    page = corpus.page(row["path"][-1]["title"])
    if row["answer_evidence"] not in page.text:
        return f"{page.title!r} does not say {row['answer_evidence']!r}"
    if "\n" in row["answer_evidence"]:
        return f"{row['answer_evidence'][:80]!r} is more than a sentence"
    if _plain(row["answer"]) == _plain(row["answer_evidence"]):
        return f"the answer {row['answer']!r} is all of its evidence"
    count = len(_places(row["answer"], row["answer_evidence"]))
    return None if count == 1 else f"the answer {row['answer']!r} stands {count} times in {row['answer_evidence']!r}"


def answer_hidden(corpus: PageSource, row: dict[str, Any]) -> str | None:
    """Neither the question nor the evidence of a hop says the answer."""
    said = [("question", row["question"]), *(("evidence of a hop", step["evidence"]) for step in row["path"][:-1])]
    for written in (row["answer"], *row["aliases"]):
        for place, text in said:
            if _places(written, text):
                return f"the {place} says {written!r}"
    return None


def path_hidden(corpus: PageSource, row: dict[str, Any]) -> str | None:
    """The question names no page of the path."""
    for step in row["path"]:
        name = re.sub(r"\s*\([^()]*\)$", "", step["title"])
        if _places(name, row["question"]):
            return f"the question names {name!r}"
    return None


def limits(corpus: PageSource, row: dict[str, Any]) -> str | None:
    """Under 800 characters, and 1 to 15 clues."""
    if len(row["question"]) >= MAX_CHARACTERS:
        return f"the question has {len(row['question'])} characters, under {MAX_CHARACTERS} are allowed"
    if not 1 <= len(row["clues"]) <= MAX_CLUES:
        return f"{len(row['clues'])} clues, 1 to {MAX_CLUES} are allowed"
    return None


def _places(phrase: str, text: str) -> list[int]:
    """Where a phrase stands in a text as whole words, without regard to case, accents and punctuation."""
    phrase, text = (f" {_plain(part)} " for part in (phrase, text))
    return [match.start() for match in re.finditer(f"(?={re.escape(phrase)})", text)] if phrase.strip() else []


def _plain(text: str) -> str:
    text = "".join(letter for letter in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(letter))
    return " ".join(re.findall(r"\w+(?:[.,]\w+)*", text))
