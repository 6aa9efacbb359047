"""Programs: HumanEval, MBPP, LiveCodeBench, APPS/TACO, CodeContests or rows of tools/prepare_code.py, run in the sandbox.

Every test of a problem is run, also after one has failed, so that the share of tests passed is known too (LiveCodeBench's own
runner stops there). A program that passes all of them is right; pass@k is the unbiased estimator over all samples.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any, ClassVar

import numpy as np

from megatron_nb.asking.askers import Answer
from megatron_nb.data.code_problems import FORMATS, ask, read_problem
from megatron_nb.data.preferences import final_answer
from megatron_nb.data.rows import data_files, decode, raw_rows
from megatron_nb.evals.statistics import mean_with_bounds, pass_at_k
from megatron_nb.evals.task import Item, Outcome, Task, TaskConfig, Verdict, by_item
from megatron_nb.rewards.judging import CodeJudge, JudgeConfig
from megatron_nb.sandbox.execution import Limits
from megatron_nb.sandbox.judge import Program
from megatron_nb.sandbox.tests import Test

FENCED = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
PYTHON = ("python", "python3", "py")


@dataclass
class CodeConfig(TaskConfig):
    """Programming problems."""

    format: str = "auto"  # of data/code_problems.py
    k: list[int] = field(default_factory=lambda: [1])  # of pass@k; each needs as many samples
    time_limit_s: float | None = None  # of a test; null: the row's
    since: str | None = None  # LiveCodeBench: contests from this day on, YYYY-MM-DD
    until: str | None = None  # and before this day
    contest: str | None = None  # rows of this contest alone, by their field `contest` (or `contest_id`)
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    def __post_init__(self):
        super().__post_init__()
        if self.format not in FORMATS:
            raise ValueError(f"format={self.format!r} must be one of {', '.join(FORMATS)}")
        if not self.k or min(self.k) < 1 or max(self.k) > self.samples:
            raise ValueError(f"k={self.k} must be in 1..samples={self.samples}: pass@k is estimated from k samples or more")
        for name in ("since", "until"):
            if getattr(self, name) is not None:
                _day(getattr(self, name), name)


class Code(Task):
    """See the head of the file. metrics: pass@k, pass_rate, by difficulty where the rows have it, and of a contest."""

    Config: ClassVar[type[TaskConfig]] = CodeConfig
    told_by = ("k",)
    headline = "pass@1"  # the mean over all samples is its unbiased estimate

    def __init__(self, name: str, config: CodeConfig, sampling: Any):
        super().__init__(name, config, sampling)
        self._judge = CodeJudge(config.judge)
        self._about: dict[str, dict[str, Any]] = {}  # item -> difficulty, points

    def read(self) -> Sequence[Item]:
        found = []
        for file in data_files(self.config.path):
            for where, raw in raw_rows(file):
                row = decode(where, raw)
                if self._wanted(row, where):
                    found.append(self._item(row, where))
        return found

    def _item(self, row: dict[str, Any], where: str) -> Item:
        problem = read_problem(row, where, self.config.format)
        self._about[problem.name] = {key: row[key] for key in ("difficulty", "points") if row.get(key) is not None}
        gold = {"tests": problem.tests, "function": problem.function, "starter": problem.starter,
                "time_s": self.config.time_limit_s or problem.time_limit_s, "memory_mb": problem.memory_limit_mb}  # fmt: skip
        return Item(problem.name, [{"role": "user", "content": problem.prompt or ask(problem)}], gold)

    def _wanted(self, row: dict[str, Any], where: str) -> bool:
        config = self.config
        if config.contest is not None and config.contest != str(row.get("contest", row.get("contest_id"))):
            return False
        if config.since is None and config.until is None:
            return True
        day = _day(str(row.get("contest_date", ""))[:10], f"{where}: contest_date")
        early = config.since is not None and day < _day(config.since, "since")
        return not early and not (config.until is not None and day >= _day(config.until, "until"))

    async def ready(self) -> None:
        await self._judge.check()

    def close(self) -> None:
        self._judge.close()

    async def score(self, item: Item, answer: Answer) -> Verdict:
        source, gold = program_of(answer.text, item.gold), item.gold
        if not source:
            return Verdict(0.0, {"pass_rate": 0.0}, "it has no code", "")
        tests = [Test.read(row) for row in gold["tests"]]
        limits = replace(Limits(), time_s=gold["time_s"], memory_mb=gold["memory_mb"])
        verdicts = await self._judge.verdicts(Program(source, "python", gold["function"]), tests, limits)
        passed = sum(one.verdict == "accepted" for one in verdicts)
        first = next((f"test {number}: {one.verdict}" for number, one in enumerate(verdicts) if one.verdict != "accepted"), "")
        return Verdict(float(passed == len(tests)), {"pass_rate": passed / len(tests)}, first, source)

    def summarise(self, outcomes: list[Outcome]) -> dict[str, float]:
        told = super().summarise(outcomes)
        told |= passes(by_item(outcomes), self.config.k)
        for level in dict.fromkeys(str(about["difficulty"]) for about in self._about.values() if "difficulty" in about):
            its = [one for one in outcomes if str(self._about.get(one.item, {}).get("difficulty")) == level]
            if values := by_item(its):
                told[f"pass@1_{level}"] = float(np.mean([np.mean(one) for one in values]))
        if any("points" in about for about in self._about.values()):
            told |= self._contest(outcomes)
        return told

    def _contest(self, outcomes: list[Outcome]) -> dict[str, float]:
        """As a contest counts: points of solved problems, expected of one submission each; of all that can be had."""
        by_name: dict[str, list[float]] = {}
        for one in outcomes:
            if one.score is not None:
                by_name.setdefault(one.item, []).append(one.score)
        points = {name: float(self._about[name].get("points", 0)) for name in by_name}
        means = {name: float(np.mean(its)) for name, its in by_name.items()}
        return {
            "contest_solved": sum(means.values()), "contest_problems": float(len(means)),
            "contest_points": sum(means[name] * points[name] for name in means), "contest_points_most": sum(points.values()),
        }  # fmt: skip


def passes(by_problem: list[list[float]], ks: Sequence[int]) -> dict[str, float]:
    """pass@k with bounds over problems; by_problem: scores of its samples, 1 for right. One with fewer than k is left out."""
    told: dict[str, float] = {}
    for k in ks:
        found = [[pass_at_k(len(its), round(sum(its)), k)] for its in by_problem if len(its) >= k]
        told |= mean_with_bounds(f"pass@{k}", found)
    return told


def program_of(text: str, gold: dict[str, Any]) -> str:
    """The program in an answer: its last block of Python (of any code, when none says so), else all of it where it parses.

    Where a function is asked, a block that defines it gets what the given code has before that function (imports, helpers);
    one that does not goes on from the given code.
    """
    answer = final_answer(text)
    blocks = FENCED.findall(answer)
    marked = [code for tag, code in blocks if tag.lower() in PYTHON] or [code for _, code in blocks]
    source = marked[-1] if marked else answer if "```" not in answer and _parses(answer) else ""
    function, starter = gold.get("function"), gold.get("starter") or ""
    if not source.strip() or not function or not starter:
        return source if source.strip() else ""
    if re.search(rf"^\s*(async )?def {re.escape(function)}\b", source, re.MULTILINE):
        before = re.split(rf"^(?:async )?def {re.escape(function)}\b", starter, maxsplit=1, flags=re.MULTILINE)[0]
        return f"{before.rstrip()}\n\n{source}" if before.strip() and _parses(before) else source
    return f"{starter.rstrip()}\n{source}" if source[:1].isspace() else source


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _day(text: str, name: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r} must be a day, YYYY-MM-DD") from error
