"""Rows of questions -> items."""

from __future__ import annotations

from typing import Any

from megatron_nb.data.rows import BadRow, data_files, decode, raw_rows
from megatron_nb.evals.task import Item

ASKED = ("messages", "question", "problem", "prompt", "instruction")  # fields that hold the question; the first that is there
REMEDY = "mend the row or take it out"


def read_rows(path: str) -> list[tuple[str, dict[str, Any]]]:
    """(where, row) of every row that `path` names. Raises BadRow and ValueError."""
    if not path:
        raise ValueError("path is not set: it names the file (or folder, or glob) of the task's items")
    return [(where, decode(where, raw)) for file in data_files(path) for where, raw in raw_rows(file)]


def read_questions(path: str, instruction: str = "", answer: str | None = "answer") -> list[Item]:
    """An item for every row: the question with `instruction` after it; gold is the row. answer: the field it must have."""
    found = []
    for where, row in read_rows(path):
        if answer is not None and row.get(answer) in (None, ""):
            raise BadRow.at(where, f"it has no {answer!r}", f"it has {', '.join(map(str, row))}", REMEDY)
        messages = messages_of(row, where)
        if instruction:
            last = messages[-1]
            messages = [*messages[:-1], last | {"content": f"{last['content']}\n\n{instruction}"}]
        found.append(Item(id_of(row, where), messages, row))
    return found


def messages_of(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The question's messages, the last one the user's. BadRow when there is none."""
    name = next((name for name in ASKED if row.get(name)), None)
    asked = row.get(name) if name else None
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}]
    if isinstance(asked, list) and all(isinstance(one, dict) and isinstance(one.get("content"), str)
                                       and isinstance(one.get("role"), str) for one in asked):  # fmt: skip
        while len(asked) > 1 and asked[-1].get("role") != "user":
            asked = asked[:-1]
        return asked
    raise BadRow.at(where, f"keys are {', '.join(map(str, row))}", f"one of {', '.join(ASKED)} holds the question", REMEDY)


def id_of(row: dict[str, Any], where: str) -> str:
    """The row's own id, else its file and line."""
    for name in ("id", "key", "task_id", "question_id", "problem_id"):
        if row.get(name) not in (None, ""):
            return str(row[name])
    return where.rpartition("/")[2]
