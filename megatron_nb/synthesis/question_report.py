"""The files of a set of questions: rows by part, what was dropped by which rule, and the card that says how all was made."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_nb.run import write_atomic
from megatron_nb.synthesis.question_solver import CHECKS, NOT_CHECKED
from megatron_nb.synthesis.question_verify import MAX_CHARACTERS, MAX_CLUES
from megatron_nb.synthesis.questions import Kept

RULES = {  # rule -> what it says of a walk or a question that was dropped
    "walk_too_short": "the walk came to a page that leads nowhere new",
    "head_says_too_little": "the first page does not say what it is, or tells nothing else",
    "named": "a quote says a name of the chain, or the answer",
    "head_not_found": "searching for the first page's clues does not find it",
    "no_evidence": "a page does not name the next one in a sentence of its text",
    "ambiguous_hop": "a clue fits several of the pages that a page links to, or says nothing",
    "no_answer": "the last pages hold nothing whose sentence fits one value only",
    "form": "a field is missing or wrong", "pages": "a page does not exist", "links": "a hop's evidence is not on its page",
    "answer_found": "the answer does not stand once in its evidence", "answer_hidden": "the question or a hop says the answer",
    "path_hidden": "the question names a page of the path", "limits": "too long, or too many clues",
    "answered_closed_book": "the model knows the answer without searching",
    "evidence_not_enough": "the model cannot answer from the evidence",
    "not_found_by_search": "the model never finds the answer by search",
    "never_failed_by_search": "the model always finds the answer by search",
    "duplicate_question": "the same question stands already", "duplicate_answer": "the same is asked of the same page already",
    "duplicate_path": "most of its links stand in one earlier question",
    "answer_is_held_out": "a held-out question has the same answer",
    "answer_page_is_held_out": "a held-out question asks about the same page", "failed": "the model or a tool was not reached",
}  # fmt: skip

CARD = """\
---
task_categories: [question-answering]
language: [en]
tags: [multi-hop, search, synthetic]
---
# Multi-hop questions from walks over {source}

{total} questions, each with the chain of pages that leads to its answer and a verbatim quote for every hop. `train.jsonl` \
({train}) and `heldout.jsonl` ({heldout}) share no answer{apart}; {further}`questions.jsonl` holds all, told apart by `split`.

## How they were made
Walks of {steps} links over {pages} pages and {links} links, from heads {heads}. {writer} Every row was verified by rules: \
each page exists, each quote stands in its page and links to the next page, the answer stands once in the last quote, in no \
other and not in the question, no page is named, fewer than {characters} characters, at most {clues} clues.

| check by a model | result |
|---|---|
{checks}

## Fields
`id`, `question`, `answer`, `aliases`, `answer_kind`, `hops` (links), `path` [{{`title`, `evidence`, `link`}}], \
`answer_evidence`, `head_date`, `clues`, `source`, `checks`, `split`. Quotes keep the licence of their source.

## Statistics
{statistics}

## Dropped, by rule
| rule | what it says | {parts} |
|---|---|{bars}
{dropped}
"""


def statistics(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and means over rows."""
    if not rows:
        return {"questions": 0}
    characters, clues = [len(row["question"]) for row in rows], [len(row["clues"]) for row in rows]
    days = sorted(row["head_date"] for row in rows if row["head_date"])
    return {
        "questions": len(rows), "hops": _counts(row["hops"] for row in rows),
        "five_or_more_hops": sum(row["hops"] >= 5 for row in rows), "answer_kinds": _counts(row["answer_kind"] for row in rows),
        "characters": {"mean": round(sum(characters) / len(rows), 1), "max": max(characters)},
        "clues": {"mean": round(sum(clues) / len(rows), 2), "max": max(clues)},
        "head_dates": {"oldest": days[0], "median": days[len(days) // 2], "newest": days[-1]} if days else None,
        "pages": len({step["title"] for row in rows for step in row["path"]}),
    }  # fmt: skip


def _counts(values: Any) -> dict[str, int]:
    return {str(value): count for value, count in sorted(Counter(values).items())}


def write_questions(folder: Path, kept: Kept, facts: dict[str, str]) -> dict[str, float]:
    """questions.jsonl, PART.jsonl, report.json and README.md; the numbers for the summary. facts: what the card says."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("questions", kept.rows), *((part, kept.of(part)) for part in kept.parts)):
        write_atomic(folder / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    report = {
        "walks": dict(kept.attempts), "all": statistics(kept.rows),
        **{part: statistics(kept.of(part)) for part in kept.parts},
        "dropped": {part: dict(kept.dropped[part].most_common()) for part in kept.parts},
    }  # fmt: skip
    write_atomic(folder / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    write_atomic(folder / "README.md", card(kept, facts, report))
    dropped = sum((kept.dropped[part] for part in kept.parts), Counter())
    return {
        "questions": len(kept.rows), **{f"questions_{part}": len(kept.of(part)) for part in kept.parts},
        "questions_5_hops": report["all"].get("five_or_more_hops", 0), "walks": kept.attempts.total(),
        **{f"dropped_{rule}": count for rule, count in dropped.items()},
    }  # fmt: skip


def card(kept: Kept, facts: dict[str, str], report: dict[str, Any]) -> str:
    """The data set's README."""
    rules = [rule for rule in RULES if any(kept.dropped[part][rule] for part in kept.parts)]
    dropped = [f"| {rule} | {RULES[rule]} | " + " | ".join(str(kept.dropped[part][rule]) for part in kept.parts) + " |"
               for rule in rules]  # fmt: skip
    said = [f"| {name} | {_told(kept.rows, name)} |" for name in CHECKS]
    numbers = [f"- {key.replace('_', ' ')}: {value if not isinstance(value, dict) else _line(value)}"
               for key, value in report["all"].items()]  # fmt: skip
    further = f"`rl.jsonl` ({len(kept.of('rl'))}) holds further ones, away from `heldout` too; " if "rl" in kept.parts else ""
    return CARD.format(
        total=len(kept.rows), further=further, **{part: len(kept.of(part)) for part in kept.parts}, checks="\n".join(said),
        statistics="\n".join(numbers), parts=" | ".join(kept.parts), bars="---:|" * len(kept.parts), dropped="\n".join(dropped),
        characters=MAX_CHARACTERS, clues=MAX_CLUES, **facts,
    )  # fmt: skip


def _line(counts: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in counts.items())


def _told(rows: list[dict[str, Any]], name: str) -> str:
    done = [row["checks"][name] for row in rows if row["checks"][name] != NOT_CHECKED]
    if not done:
        return NOT_CHECKED
    right, tries = sum(one["right"] for one in done), sum(one["tries"] for one in done)
    return f"{right} of {tries} tries right, over {len(done)} questions"
