"""Programming problems of any published form -> the rows that code RL reads as prompts.

    {"id", "prompt", "language", "tests": [rows of the judge], "time_limit_s", "memory_limit_mb", "function"?, "reference"?,
     "optimal"? (a class of the ladder), "public_tests"?}
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_nb.data.code_formats import READERS, Problem, WrongField, complexity_of
from megatron_nb.data.rows import BadRow, data_files, decode, raw_rows
from megatron_nb.sandbox.ladder import parse_class
from megatron_nb.sandbox.tests import Test

FORMATS = ("auto", *READERS)
REMEDY = "mend the row, or leave such rows out (--bad-rows skip)"
PROGRAM = "Write a Python program that reads its input from standard input and writes its answer to standard output."
FUNCTION = "Write `{function}` in Python, with the name and the arguments given; it returns its answer and prints nothing."
ENDING = "End your answer with the whole code in one ```python block."


def detect(row: dict[str, Any]) -> str | None:
    """The format that the row's keys tell, None when they tell none."""
    return next((name for name, (keys, _) in READERS.items() if all(row.get(key) is not None for key in keys)), None)


def read_problem(row: dict[str, Any], where: str, form: str = "auto") -> Problem:
    """The row's problem, its tests checked. Raises BadRow naming file, line, field, value and rule."""
    chosen = detect(row) if form == "auto" else form
    if chosen is None:
        keys = "; ".join(f"{name}: {', '.join(keys)}" for name, (keys, _) in READERS.items())
        raise BadRow.at(where, f"keys are {', '.join(map(str, row)) or 'none'}", f"they tell one of {keys}", REMEDY)
    try:
        problem = READERS[chosen][1](row)
    except WrongField as error:
        raise BadRow.at(where, f"{error.name} {error.found}", error.rule, REMEDY) from error
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise BadRow.at(where, f"a field has another form ({type(error).__name__}: {error})", f"the format is {chosen}",
                        REMEDY) from error  # fmt: skip
    if not problem.tests:
        raise BadRow.at(where, "it has no tests", "a problem needs at least one", REMEDY)
    for number, test in enumerate(problem.tests):
        try:
            Test.read(test)
        except ValueError as error:
            raise BadRow.at(where, f"tests[{number}]", str(error), REMEDY) from error
    problem.name = problem.name or where.rpartition("/")[2]
    problem.complexity = complexity_of(row)
    return problem


def read_problems(path: str, form: str = "auto") -> Iterator[tuple[str, Problem]]:
    """(where, problem) of every row that `path` names, in order. Raises BadRow and ValueError."""
    for file in data_files(path):
        for where, raw in raw_rows(file):
            yield where, read_problem(decode(where, raw), where, form)


def problem_row(problem: Problem) -> dict[str, Any]:
    """The row to train on."""
    optimal = parse_class(problem.complexity) if problem.complexity else None
    row = {
        "id": problem.name, "prompt": problem.prompt or ask(problem), "language": "python", "tests": problem.tests,
        "time_limit_s": problem.time_limit_s, "memory_limit_mb": problem.memory_limit_mb,
        "function": problem.function, "reference": next(iter(problem.references), None), "optimal": optimal,
        "public_tests": problem.public_tests or None,
    }  # fmt: skip
    return {key: value for key, value in row.items() if value is not None} | problem.other


def ask(problem: Problem) -> str:
    """What the model is asked: the statement, the code to begin with, and the form of the answer."""
    starter = f"```python\n{problem.starter.strip()}\n```" if problem.starter.strip() else ""
    wanted = FUNCTION.format(function=problem.function) if problem.function else PROGRAM
    return "\n\n".join(filter(None, [problem.statement.strip(), starter, f"{wanted} {ENDING}"]))
