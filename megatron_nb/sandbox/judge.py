"""Programs against tests: one verdict per test, compared on the host with what never entered the program's sandbox."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from megatron_nb.sandbox.assertions import Assertions
from megatron_nb.sandbox.checkers import judge_by_checker
from megatron_nb.sandbox.compare import CompareConfig, difference, value_difference
from megatron_nb.sandbox.execution import Execution, Job, Limits
from megatron_nb.sandbox.harness import CALL, last_words, refused
from megatron_nb.sandbox.harness_wire import decode, encode
from megatron_nb.sandbox.pool import Pool
from megatron_nb.sandbox.tests import Program, Test

VERDICTS = (
    *("accepted", "wrong answer", "time limit", "memory limit", "output limit", "runtime error", "compile error"),
    "infrastructure",  # the sandbox or the test itself is broken: says nothing about the program and is no reward
)
HEAD_START_S = 0.1  # of the first test: a program that does not compile is then not started for the others


@dataclass
class Verdict:
    """What one test says of a program."""

    verdict: str  # one of VERDICTS
    cpu_s: float = 0.0
    wall_s: float = 0.0
    peak_memory_mb: float = 0.0
    detail: str = ""  # the first thing wrong, shortened. Shows expected values: for logs, not for the model that is trained
    isolation: str = ""

    @staticmethod
    def of(execution: Execution, verdict: str, detail: str = "") -> Verdict:
        spent = execution.cpu_s, execution.wall_s, execution.peak_memory_mb
        return Verdict(verdict, *spent, detail, execution.isolation)


class Judge:
    """Judges on a pool; as many programs and tests at once as the caller starts, the pool has the queue."""

    def __init__(self, pool: Pool, compare: CompareConfig | None = None) -> None:
        self.pool, self.compare = pool, compare or CompareConfig()
        self.assertions = Assertions(pool)

    def close(self) -> None:
        """Ends the workers of assertion tests; the pool stays its maker's."""
        self.assertions.close()

    async def judge(
        self, program: Program, tests: list[Test], limits: Limits | None = None, stop_at_first: bool = False
    ) -> list[Verdict]:
        """One verdict per test, in order. With `stop_at_first` the list ends with the first test that is not accepted.

        Raises ValueError for tests that the language cannot take; never for anything that the program does.
        """
        limits = limits or Limits()
        for at, test in enumerate(tests):
            if test.kind != "stdin" and program.language != "python":
                raise ValueError(f"test {at} is of kind {test.kind!r}: a program in {program.language} takes stdin/stdout only")
        size, most = len(program.source.encode("utf-8", "surrogatepass")), limits.disk_mb << 19
        if size > most:  # half of the disk, which also holds what the program writes
            told = f"the program has {size} bytes, {most} are allowed"
            run = tests[:1] if stop_at_first else tests
            return [Verdict("compile error", detail=told, isolation=self.pool.isolation) for _ in run]
        if stop_at_first:
            verdicts = []
            for test in tests:
                verdicts.append(await self._one(program, test, limits))
                if verdicts[-1].verdict != "accepted":
                    break
            return verdicts
        async with asyncio.TaskGroup() as group:
            first = group.create_task(self._one(program, tests[0], limits)) if tests else None
            if first:
                await asyncio.wait([first], timeout=HEAD_START_S)
            if first and first.done() and first.result().verdict == "compile error":
                told = first.result()
                return [told, *(Verdict(told.verdict, detail=told.detail, isolation=told.isolation) for _ in tests[1:])]
            others = [group.create_task(self._one(program, test, limits)) for test in tests[1:]]
        return [task.result() for task in ([first] if first else []) + others]

    async def _one(self, program: Program, test: Test, limits: Limits) -> Verdict:
        if test.kind == "code":
            return Verdict.of(*await self.assertions.judge(program, test, limits))
        if test.kind == "call":
            return await self._call(program, test, limits)
        stdin, expected = (test.stdin or "").encode(), (test.stdout or "").encode()
        execution = await self.pool.run(Job(program.source, program.language, stdin, _with_room(limits, len(expected))))
        if program.language == "python" and (words := refused(execution)):
            return Verdict.of(execution, "compile error", words)
        if execution.status != "ok":
            return Verdict.of(execution, execution.status, last_words(execution))
        if test.checker:
            return Verdict.of(execution, *await judge_by_checker(self.pool, test, execution.stdout, limits))
        wrong = difference(execution.stdout, expected, test.compare or self.compare)
        return Verdict.of(execution, "wrong answer" if wrong else "accepted", wrong or "")

    async def _call(self, program: Program, test: Test, limits: Limits) -> Verdict:
        task = encode({"program": program.source, "call": test.call, "args": test.args})
        room = _with_room(limits, len(encode(test.expected)))
        execution = await self.pool.run(Job(CALL, stdin=task.encode(), limits=room))
        if execution.status != "ok":
            return Verdict.of(execution, execution.status, last_words(execution))
        if not execution.stdout:
            return Verdict.of(execution, "runtime error", f"the program ended (exit code 0) before {test.call} returned")
        try:
            answer = decode(execution.stdout)
            if not isinstance(answer, dict) or len(answer) != 1 or not {*answer} <= {"value", "refused"}:
                raise ValueError("not an answer")
        except ValueError as error:  # the harness writes one answer and ends: the program wrote there too
            return Verdict.of(execution, "runtime error", f"the program wrote into the judge's channel: {error}")
        if "refused" in answer:
            return Verdict.of(execution, "compile error", str(answer["refused"])[:300])
        wrong = value_difference(answer["value"], test.expected, test.compare or self.compare)
        return Verdict.of(execution, "wrong answer" if wrong else "accepted", wrong or "")


def _with_room(limits: Limits, expected_bytes: int) -> Limits:
    """Limits under which the expected output fits, however long it is."""
    return replace(limits, output_bytes=max(limits.output_bytes, 2 * expected_bytes))
