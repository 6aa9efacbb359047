"""Labelled programs of others: rows of CodeComplex, BigOBench and TACO, their labels read onto the ladder.

What cannot be used is counted by reason, never guessed. Names of columns are those of the public releases as far as known;
`program` and `label` of a source name others. BigOBench keeps labels and solutions in two files: join them by solution first.
TACO labels what a problem expects, so its programs may be slower than their label: rather a source of optimal classes.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megatron_nb.data.rows import data_files, decode, raw_rows
from megatron_nb.rewards.witness import LONGEST, question
from megatron_nb.sandbox.ladder import parse_class

COLUMNS = {  # format -> (columns that may hold the program, columns that may hold the label)
    "codecomplex": (("src", "code"), ("complexity",)),
    "bigobench": (("solution_code", "solution", "code"), ("time_complexity_inferred", "time_complexity")),
    "taco": (("solutions",), ("Expected Time Complexity", "expected_time_complexity")),
}
LANGUAGES = {"python": "python", "python3": "python", "py": "python", "java": "java", "cpp": "cpp", "c++": "cpp"}


@dataclass
class LabelledSource:
    """Files of labelled programs."""

    path: str  # a file, a folder or a glob
    format: Literal["codecomplex", "bigobench", "taco"]
    program: str | None = None  # the column that holds the program, or a list of programs, where it has another name
    label: str | None = None  # the column that holds the class
    language: str | None = None  # of all rows; None: the row's `language`, else Python
    per_row: int = 1  # programs of a row with several that are taken at most


def labelled_rows(source: LabelledSource, name: str, dropped: Counter) -> Iterator[dict[str, Any]]:
    """Conversations to train on, with `complexity`; what is left out is counted by reason. ValueError for a broken file."""
    for file in data_files(source.path):
        for where, raw in raw_rows(file):
            row = decode(where, raw)
            label = _first(row, [source.label] if source.label else COLUMNS[source.format][1])
            programs = _programs(_first(row, [source.program] if source.program else COLUMNS[source.format][0]))
            complexity = parse_class(str(label)) if label else None
            if not (label and programs and complexity):
                dropped["no_label" if not label else "label_not_on_ladder" if programs else "no_program"] += 1
                continue
            language = source.language or LANGUAGES.get(str(row.get("language", "python")).lower(), "")
            for number, program in enumerate(programs[: source.per_row]):
                if len(program) > LONGEST:
                    dropped["program_too_long"] += 1
                    continue
                asked, answer = question(program, language), f"Complexity: O({complexity})"
                yield {
                    "id": f"{name}/{where.rpartition('/')[2]}/{number}", "complexity": complexity, "template": name,
                    "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}],
                    "program": program,
                }  # fmt: skip


def _first(row: dict[str, Any], columns: tuple[str, ...] | list[str]) -> Any:
    return next((row[column] for column in columns if row.get(column) not in (None, "", [])), None)


def _programs(value: Any) -> list[str]:
    """One program, a list of them, or a list as JSON text; {"code": ...} objects too."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):  # a program may begin so
            value = json.loads(value)
    found = value if isinstance(value, list) else [value]
    texts = [one.get("code", one.get("solution_code")) if isinstance(one, dict) else one for one in found]
    return [text for text in texts if isinstance(text, str) and text.strip()]
