"""Rows of the commands and of the service: JSON in, JSON out."""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron_nb.sandbox.execution import Limits
from megatron_nb.sandbox.judge import Judge
from megatron_nb.sandbox.pool import Pool
from megatron_nb.sandbox.tests import Program, Test


def read_judge_row(row: dict) -> tuple[Program, list[Test], Limits, bool]:
    """(program, tests, limits, stop at the first failure); ValueError naming field, value and rule. Other fields are let be."""
    _object(row)
    for name in ("program", "tests"):
        if name not in row:
            raise ValueError(f"{name} is missing")
    if not isinstance(row["tests"], list) or not row["tests"]:
        raise ValueError(f"tests={row['tests']!r:.80} must be a list of at least one test")
    program = Program(_text(row, "program"), row.get("language") or "python", _text(row, "entry", None))
    tests = []
    for at, test in enumerate(row["tests"]):
        try:
            tests.append(Test.read(test))
        except (ValueError, TypeError) as error:
            raise ValueError(f"tests[{at}]: {error}") from None
        if program.language != "python" and tests[-1].kind != "stdin":
            raise ValueError(f"tests[{at}]: a program in {program.language} takes stdin/stdout tests only")
    if not isinstance(row.get("stop_at_first", False), bool):
        raise ValueError(f"stop_at_first={row['stop_at_first']!r} must be true or false")
    usual = Limits()
    limits = Limits(
        time_s=_positive(row, "time_limit_s", usual.time_s), memory_mb=int(_positive(row, "memory_limit_mb", usual.memory_mb))
    )
    return program, tests, limits, row.get("stop_at_first", False)


async def judge_row(judge: Judge, row: dict) -> dict:
    """{"id", "program", "tests", ...} -> {"id", "verdicts", "passed", "total", ...}; lists have one element per test run."""
    program, tests, limits, stop_at_first = read_judge_row(row)
    verdicts = await judge.judge(program, tests, limits, stop_at_first)
    return {
        "id": row.get("id"),
        "verdicts": [one.verdict for one in verdicts],
        "passed": sum(one.verdict == "accepted" for one in verdicts),
        "total": len(tests),
        "cpu_s": [round(one.cpu_s, 6) for one in verdicts],
        "wall_s": [round(one.wall_s, 6) for one in verdicts],
        "peak_memory_mb": [round(one.peak_memory_mb, 3) for one in verdicts],
        "details": [one.detail for one in verdicts],
        "isolation": verdicts[0].isolation,
    }


def read_complexity_row(row: dict) -> tuple[str, str, str]:
    """(program, function, generator); ValueError naming field, value and rule."""
    _object(row)
    for name in ("program", "function", "generator"):
        if name not in row:
            raise ValueError(f"{name} is missing")
    return _text(row, "program"), _text(row, "function"), _text(row, "generator")


async def complexity_row(pool: Pool, row: dict) -> dict:
    """{"id", "program", "function", "generator"} -> {"id", "class", "confidence", "reason", "points"}."""
    from megatron_nb.sandbox.complexity import estimate

    found = await estimate(pool, *read_complexity_row(row), reference=_text(row, "reference", None) or "")
    return {
        "id": row.get("id"),
        "class": found.complexity,
        "confidence": round(found.confidence, 4),
        "reason": found.reason,
        "points": [list(point) for point in found.points],
    }


READERS: dict[str, Callable[[dict], object]] = {"judge": read_judge_row, "complexity": read_complexity_row}


def _object(row: object) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"a row must be an object, not {row!r:.80}")
    if not isinstance(row.get("id", 0), (str, int)):
        raise ValueError(f"id={row['id']!r:.80} must be text or a whole number")


def _text(row: dict, name: str, *default) -> str:
    value = row.get(name, *default)
    if default and value is None:
        return value
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r:.80} must be text")
    return value


def _positive(row: dict, name: str, default: float) -> float:
    value = row.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
        raise ValueError(f"{name}={value!r} must be a number above 0")
    return value
