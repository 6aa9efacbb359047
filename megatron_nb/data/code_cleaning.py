"""Cleaning of programming problems by their reference solutions: what a right solution cannot pass teaches nothing.

Each problem's references are judged under generous limits; the best one decides. Tests that it fails are dropped, limits that
leave it no margin are raised, and a problem that is left with nothing goes, with the rule that it broke.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from megatron_nb.data.code_formats import Problem
from megatron_nb.sandbox.execution import Limits
from megatron_nb.sandbox.judge import Verdict
from megatron_nb.sandbox.tests import Program, Test

JudgeBy = Callable[[Program, list[Test], Limits], Awaitable[list[Verdict]]]  # `infrastructure` is a verdict: a broken test
SHOWN = 5  # dropped tests of a problem that are told one by one


@dataclass
class CleaningConfig:
    """How strict to be."""

    references: int = 3  # solutions that are tried, until one passes every test
    margin: float = 3.0  # time and memory limits are at least so many times what the reference needs
    max_time_s: float = 15.0  # a reference that needs more on a test makes its problem go
    max_memory_mb: int = 1024
    min_tests: int = 1  # of what is left
    max_tests: int | None = None  # more are thinned out evenly, before anything is judged
    unchecked: str = "keep"  # problems without a reference: keep | drop

    def __post_init__(self):
        for name in ("references", "margin", "max_time_s", "max_memory_mb", "min_tests"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be more than 0")
        if self.max_tests is not None and self.max_tests < self.min_tests:
            raise ValueError(f"max_tests={self.max_tests} must be at least min_tests={self.min_tests}")
        if self.unchecked not in ("keep", "drop"):
            raise ValueError(f"unchecked={self.unchecked!r} must be keep or drop")


@dataclass
class Cleaned:
    """What became of a problem."""

    problem: Problem | None  # None: it went
    rules: Counter[str] = field(default_factory=Counter)  # how often each rule took effect
    notes: list[str] = field(default_factory=list)  # what was found, for those who want to know


async def clean(problem: Problem, judge: JudgeBy, config: CleaningConfig) -> Cleaned:
    """The problem without what its reference cannot pass. Raises what `judge` raises when it cannot judge."""
    found = Cleaned(None)
    tests = _distinct(problem.tests, found)
    if config.max_tests is not None and len(tests) > config.max_tests:
        found.rules["test thinned out"] += len(tests) - config.max_tests
        tests = [tests[len(tests) * place // config.max_tests] for place in range(config.max_tests)]
    if not problem.references:
        found.rules["no reference"] += 1
        if config.unchecked == "keep":
            found.problem = _with(problem, tests)
        return found
    reference, verdicts = await _best(problem, tests, judge, config)
    if slow := [verdict for verdict in verdicts if verdict.verdict == "time limit"]:
        found.rules["reference too slow"] += 1
        found.notes.append(f"the reference needs more than {config.max_time_s:g} s on {len(slow)} of {len(tests)} tests")
        return found
    passed = [test for test, verdict in zip(tests, verdicts) if verdict.verdict == "accepted"]
    failed = [(place, verdict) for place, verdict in enumerate(verdicts) if verdict.verdict != "accepted"]
    found.notes += [f"test {place}: {verdict.verdict}: {verdict.detail}"[:200] for place, verdict in failed[:SHOWN]]
    found.rules["test is broken"] += sum(verdict.verdict == "infrastructure" for _, verdict in failed)
    found.rules["reference fails the test"] += sum(verdict.verdict != "infrastructure" for _, verdict in failed)
    if len(passed) < config.min_tests:
        found.rules["reference fails every test" if not passed else "too few tests left"] += 1
        return found
    fitting = [verdict for verdict in verdicts if verdict.verdict == "accepted"]
    seconds = _raised(problem.time_limit_s, max(verdict.cpu_s for verdict in fitting) * config.margin)
    megabytes = _raised(problem.memory_limit_mb, max(verdict.peak_memory_mb for verdict in fitting) * config.margin)
    found.rules["time limit raised"] += seconds > problem.time_limit_s
    found.rules["memory limit raised"] += megabytes > problem.memory_limit_mb
    others = [source for source in problem.references if source is not reference]
    found.problem = dataclasses.replace(
        _with(problem, passed), references=[reference, *others], time_limit_s=seconds, memory_limit_mb=int(megabytes)
    )
    return found


async def _best(problem: Problem, tests: list[dict], judge: JudgeBy, config: CleaningConfig) -> tuple[str, list[Verdict]]:
    """The reference that passes most of the tests, and its verdicts; the later ones are asked only when the first fail."""
    limits = Limits(time_s=max(problem.time_limit_s, config.max_time_s),
                    memory_mb=max(problem.memory_limit_mb, config.max_memory_mb))  # fmt: skip
    read, best = [Test.read(test) for test in tests], None
    for source in problem.references[: config.references]:
        verdicts = await judge(Program(source), read, limits)
        passed = sum(verdict.verdict == "accepted" for verdict in verdicts)
        if best is None or passed > best[0]:
            best = passed, source, verdicts
        if passed == len(tests):
            break
    return best[1:]


def _distinct(tests: list[dict], found: Cleaned) -> list[dict]:
    distinct = list({json.dumps(test, sort_keys=True): test for test in tests}.values())
    found.rules["test given twice"] += len(tests) - len(distinct)
    return distinct


def _with(problem: Problem, tests: list[dict]) -> Problem:
    return dataclasses.replace(problem, tests=tests, public_tests=[test for test in problem.public_tests if test in tests])


def _raised(limit: float, needed: float) -> float:
    """The limit, or the next whole number that is enough."""
    return limit if needed <= limit else math.ceil(needed)
