"""Rewards of programs: the share of tests passed, and a bonus for a good time complexity that opens when every test passes.

    format   `format` (0.1) where the thinking is closed and exactly one code block that parses follows, else all of it is 0
    correct  passed / total; every test is run
    time     [passed == total] * w * gamma^max(0, rank(c_hat) - rank(c_star)); 0 where c_hat or c_star is unknown
    PassRate = format + correct        GatedComplexity = format + correct + time

Among answers with a valid format, one that fails a test scores below every one that passes all: at most
format + (total - 1) / total, against at least format + 1. c_hat is measured in the sandbox; where a second witness is
configured and names another class, it is unknown. A c_hat better than c_star is unknown too, and flagged: a table of known
answers would otherwise earn the most; so is that of a program which answers otherwise than the reference, where the data has
one: being wrong on inputs larger than the tests' is quick. A judge that fails is never a number: its error makes the rollout
invalid.

Read from the prompt's data: tests, language, time_limit_s, memory_limit_mb, function, and for the time part optimal, generator,
reference.
"""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megatron_nb.records import Prompt, Rollout, Score
from megatron_nb.rewards.estimates import Estimates
from megatron_nb.rewards.judging import CodeJudge, JudgeConfig
from megatron_nb.rewards.rules import Format
from megatron_nb.rewards.text import final_answer
from megatron_nb.rewards.witness import Agreement, Witness, WitnessConfig, without_claims
from megatron_nb.sandbox.execution import Limits
from megatron_nb.sandbox.judge import Program, Verdict
from megatron_nb.sandbox.ladder import LADDER, parse_class, rank
from megatron_nb.sandbox.tests import Test

TAGS = {"python": ("", "python", "python3", "py"), "cpp": ("", "cpp", "c++", "cc", "cxx")}  # of a code block, by language
UNKNOWN = "unknown"


def code_block(answer: str, language: str) -> tuple[str, str]:
    """(the program, "") of an answer with exactly one closed code block in the language, else ("", the rule it breaks)."""
    lines = answer.split("\n")
    fences = [number for number, line in enumerate(lines) if line.strip().startswith("```")]
    if len(fences) % 2:
        return "", "its code block is never closed"
    if len(fences) != 2:
        return "", f"it has {len(fences) // 2} code blocks, not one"
    start, end = fences
    tag = lines[start].strip().removeprefix("```").strip().lower()
    if tag not in TAGS[language]:
        return "", f"its code block is marked {tag[:20]!r}, {language} is asked"
    if lines[end].strip() != "```":
        return "", "its code block is never closed"
    indent = re.match(" *", lines[start])[0]  # of a block in a list: its lines have it too
    source = "\n".join(re.sub(f"^ {{0,{len(indent)}}}", "", line) for line in lines[start + 1 : end])
    return (source, "") if source.strip() else ("", "its code block is empty")


@dataclass(frozen=True)
class Question:
    """What a prompt asks of a program."""

    language: str
    tests: list[Test]
    limits: Limits
    function: str | None

    @staticmethod
    def read(data: dict[str, Any], limits: Limits) -> Question:
        """From the data of a prompt; `limits` where it has none. Raises ValueError naming the field."""
        language, rows = data.get("language") or "python", data.get("tests")
        if language not in TAGS:
            raise ValueError(f"language={language!r} of the prompt must be one of {', '.join(TAGS)}")
        if not isinstance(rows, list) or not rows:
            raise ValueError(f"the prompt's data needs tests, a list with at least one; it has {', '.join(data) or 'nothing'}")
        memory = data.get("memory_limit_mb")
        given = {"time_s": data.get("time_limit_s"), "memory_mb": int(memory) if isinstance(memory, float) else memory}
        limits = replace(limits, **{name: value for name, value in given.items() if value is not None})
        return Question(language, [Test.read(row) for row in rows], limits, data.get("function"))


@dataclass
class PassRate:
    """format + passed / total; see the head of the file."""

    format: float = 0.1
    thinking: Literal["optional", "required", "forbidden"] = "required"
    time_limit_s: float = 10.0  # of a test, where the row names none
    memory_limit_mb: int = 512
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    def __post_init__(self):
        if not 0 <= self.format <= 1:  # a huge one would swallow the rest of the sum
            raise ValueError(f"format={self.format} must be in [0, 1]: it is added to the share of tests passed")
        self._limits = Limits(time_s=self.time_limit_s, memory_mb=self.memory_limit_mb)
        self._form = Format(self.thinking)
        self._judge = CodeJudge(self.judge)

    async def ready(self) -> None:
        """Have the judge judge something. Raises JudgeFailed, RequestRefused, IsolationMissing."""
        try:
            await self._judge.check()
        finally:
            self._judge.close()  # what it asked belongs to this event loop; a later question begins anew

    async def score_rollout(self, prompt: Prompt, rollout: Rollout) -> Score:
        return (await self._passed(prompt, rollout))[0]

    async def _passed(self, prompt: Prompt, rollout: Rollout) -> tuple[Score, str]:
        """(format + correct, the program). ValueError for a bad prompt; what the judge raises when it fails."""
        question = Question.read(prompt.data, self._limits)
        form = await self._form.score_rollout(prompt, rollout)
        if form.reward == 0:
            return _formless(form.reason), ""
        source, broken = code_block(final_answer(rollout.text), question.language)
        if broken:
            return _formless(broken), ""
        program = Program(source, question.language, question.function)
        verdicts = await self._judge.verdicts(program, question.tests, question.limits)
        assert len(verdicts) == len(question.tests), "the judge gives a verdict for every test"
        if failed := next((one for one in verdicts if one.verdict == "infrastructure"), None):
            return Score(None, reason=f"the judge failed: {failed.detail or failed.verdict}"), source
        if all(one.verdict == "compile error" for one in verdicts):
            return _formless(f"its code block does not parse: {verdicts[0].detail}"), source
        passed, total = sum(one.verdict == "accepted" for one in verdicts), len(verdicts)
        parts = {
            "format": self.format, "pass_rate": passed / total, "passed": float(passed), "total": float(total),
            "cpu_s": sum(one.cpu_s for one in verdicts),
        }  # fmt: skip
        return Score(self.format + passed / total, parts=parts, reason=_told(verdicts, passed)), source


@dataclass
class GatedComplexity(PassRate):
    """format + passed / total + time; see the head of the file."""

    w: float = 0.5  # the time part of the optimal class
    gamma: float = 0.5  # what is left of it for every rank above
    witness: WitnessConfig = field(default_factory=WitnessConfig)  # the second one; none without an endpoint
    estimates: Path | None = None  # a file that keeps the measured classes over runs

    def __post_init__(self):
        super().__post_init__()
        if not (self.w >= 0 and math.isfinite(self.w)):
            raise ValueError(f"w={self.w} must be at least 0 and finite: less would put right programs below wrong ones")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma={self.gamma} must be in (0, 1]: a worse class must not earn more")
        self._estimates, self._agreement = Estimates(self.estimates), Agreement()
        self._witness = Witness(self.witness) if self.witness.endpoint else None

    async def score_rollout(self, prompt: Prompt, rollout: Rollout) -> Score:
        score, source = await self._passed(prompt, rollout)
        if "total" not in score.parts:
            return score
        if score.parts["passed"] < score.parts["total"]:
            return replace(score, parts=score.parts | {"time": 0.0})
        flags, found, told = await self._class_of(source, prompt)
        time, parts, told = self._time(found, str(prompt.data.get("optimal") or ""), told)
        parts = score.parts | {"time": time} | flags | parts
        return replace(score, reward=score.reward + time, parts=parts, reason=f"{score.reason}; {told}")

    def _time(self, found: str, optimal: str, told: str) -> tuple[float, dict[str, float], str]:
        """(time part, ranks and flags, what to say) of a program of class `found`."""
        best = optimal if optimal in LADDER else parse_class(optimal) if optimal else None
        parts = {} if best is None else {"c_star": float(rank(best))}
        if found == UNKNOWN:
            return 0.0, parts | {"unknown": 1.0, "better_than_optimal": 0.0}, told
        parts |= {"c_hat": float(rank(found)), "better_than_optimal": float(best is not None and rank(found) < rank(best))}
        if best is None or parts["better_than_optimal"]:
            why = f"optimal={optimal!r} is no class" if best is None else f"better than the optimal {best}: not believed"
            return 0.0, parts | {"unknown": 1.0}, f"{found} {why}"
        worse = max(0, rank(found) - rank(best))
        return self.w * self.gamma**worse, parts | {"unknown": 0.0}, f"{found}, the optimal is {best}"

    async def _class_of(self, source: str, prompt: Prompt) -> tuple[dict[str, float], str, str]:
        """(flags, class or unknown, why) by the witnesses."""
        data, name = prompt.data, prompt.conversation.sample_id
        function, generator = data.get("function"), data.get("generator")
        if (data.get("language") or "python") != "python" or not function or not generator:
            return {}, UNKNOWN, "class unknown: only Python functions with a generator of inputs are measured"
        measured, witnessed = await asyncio.gather(
            self._measured(source, function, generator, data.get("reference") or ""),
            self._witness.complexity(source) if self._witness else _nothing(),
        )  # what fails makes the rollout invalid
        found, told = measured["complexity"], f"class {measured['complexity']} ({measured['reason']})"
        if witnessed is None:
            return {}, found, told
        agreed = self._agreement.agree(found, witnessed.complexity, name)
        flags = {"witnesses_differ": float(agreed == UNKNOWN and UNKNOWN not in (found, witnessed.complexity))}
        return flags, agreed, told if agreed == found else f"class unknown: measured {found}, told {witnessed.complexity}"

    async def _measured(self, source: str, function: str, generator: str, reference: str) -> dict[str, Any]:
        """What was measured of this program: once for all that differ in comments and layout alone."""
        plain = without_claims(source)
        key = self._estimates.key(plain, function, generator, reference)
        if key not in self._estimates:
            estimate = await self._judge.complexity(plain, function, generator, reference)
            if estimate.complexity == UNKNOWN:  # it may come from a busy machine: not kept
                return {"complexity": UNKNOWN, "reason": estimate.reason}
            self._estimates.add(key, estimate)
        return self._estimates[key]


async def _nothing() -> None:
    """Stands for the witness that is not asked."""


def _formless(reason: str) -> Score:
    return Score(0.0, parts={"format": 0.0, "pass_rate": 0.0}, reason=reason)


def _told(verdicts: list[Verdict], passed: int) -> str:
    """What happened, with the first failure."""
    told = f"{passed} of {len(verdicts)} tests pass"
    first = next((number for number, one in enumerate(verdicts) if one.verdict != "accepted"), None)
    if first is not None:
        detail = verdicts[first].detail
        told += f"; test {first}: {verdicts[first].verdict}" + (f" ({detail})" if detail else "")
    return told + ("; without isolation" if any(one.isolation == "none" for one in verdicts) else "")
