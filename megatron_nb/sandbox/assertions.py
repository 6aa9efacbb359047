"""Tests that are code: the test runs in one sandbox, the program in another, and the host carries lines between them."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

from megatron_nb.sandbox.execution import LONGEST_S, Execution, Job, Limits
from megatron_nb.sandbox.harness import ASSERT, SERVE, last_words
from megatron_nb.sandbox.harness_program import OUT_OF_TIME
from megatron_nb.sandbox.harness_wire import decode, encode
from megatron_nb.sandbox.pool import Pool, Session
from megatron_nb.sandbox.tests import Program, Test

TALK_BYTES = 8 << 20  # arguments and results of all calls of a test
FOREVER_S = 86400.0  # to wait for a line: the limits of the session end it
TEST_MEMORY_MB = 512  # at least: the test's own
VERDICT_OF = {"passed": "accepted", "failed": "wrong answer", "raised": "runtime error", "error": "wrong answer"}


class Assertions:
    """Judges by code. The tests' side has workers of its own: a program that waits for its test never waits for a worker."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.starting = threading.Lock()
        self.beside: Pool | None = None

    def tests_pool(self) -> Pool:
        with self.starting:
            if self.beside is None:
                isolation = "none" if self.pool.isolation == "none" else "bubblewrap"
                self.beside = Pool(self.pool.workers, isolation)
            return self.beside

    def close(self) -> None:
        if self.beside:
            self.beside.close()

    async def judge(self, program: Program, test: Test, limits: Limits) -> tuple[Execution, str, str]:
        """(how the program ran, verdict, detail).

        Both sides may use `limits.time_s` of CPU: what a program returns can keep its test busy for ever, and that is the
        program's doing. On the clock each waits for the other, so there they have longer: a machine so busy that this is not
        enough is "infrastructure", and so is a test that breaks before it uses the program, or never does.
        """
        beside = self.beside or await asyncio.to_thread(self.tests_pool)
        long = replace(limits, output_bytes=TALK_BYTES, time_s=min(limits.deadline_s, LONGEST_S))
        side = Side(await self.pool.session(Job(SERVE, limits=long)))
        test_side, test_ran, told, used = None, None, None, False
        try:
            loaded = _loaded(await side.ask({"program": program.source, "cpu_s": limits.time_s}))
            if loaded == {"ready": True}:
                memory_mb = max(limits.memory_mb, TEST_MEMORY_MB)
                job = Job(ASSERT, limits=replace(long, time_s=min(2 * long.time_s, LONGEST_S), memory_mb=memory_mb))
                test_side = Side(await beside.session(job))
                try:
                    task = {"code": test.code, "entry": test.entry or program.entry, "cpu_s": limits.time_s}
                    told, used = await _relay(side, test_side, task)
                finally:
                    test_ran = _timed(await test_side.session.end(), limits)
        finally:
            ran = _timed(await side.session.end(), limits)
        if "refused" in loaded:
            return ran, "compile error", str(loaded["refused"])[:300]
        waited_s = test_side.busy_s if test_side else 0.0
        if ran.status == "time limit" and max(ran.cpu_s, ran.wall_s - waited_s) < limits.time_s:
            return ran, "infrastructure", f"the program waited {waited_s:.1f} s of {ran.wall_s:.1f} s for its test"
        return ran, *_verdict(ran, test_ran, told, used)


class Side:
    """One end of the talk, and how long it kept the other waiting."""

    def __init__(self, session: Session) -> None:
        self.session, self.busy_s = session, 0.0

    async def ask(self, line: bytes | dict) -> bytes | None:
        """What it answers; None if it has ended."""
        start = time.monotonic()
        await self.session.send(encode(line).encode() + b"\n" if isinstance(line, dict) else line)
        answer = await self.session.receive(FOREVER_S)
        self.busy_s += time.monotonic() - start
        return answer if answer and answer.endswith(b"\n") else None  # half a line is the last of a program that was ended


async def _relay(side: Side, test_side: Side, task: dict) -> tuple[dict | None, bool]:
    """Carries lines until the test's verdict; (None, was the program used) where one side ended without."""
    used, answer = False, task
    while (line := await test_side.ask(answer)) is not None:
        if line.startswith(b"!"):
            told = decode(line[1:])
            return told, told["uses"] > 0
        used |= not line.startswith(b'{"ask":"find"')
        answer = await side.ask(line)
        if answer is None:
            break
    return None, used


def _verdict(ran: Execution, test_ran: Execution | None, told: dict | None, used: bool) -> tuple[str, str]:
    broken = next((one for one in (ran, test_ran) if one and one.status == "infrastructure"), None)
    if broken:
        return "infrastructure", last_words(broken)
    if ran.status == "time limit":
        return ran.status, last_words(ran)
    if told is None and (test_ran is None or ran.status != "ok" or test_ran.status == "ok"):
        if ran.status != "ok":
            return ran.status, last_words(ran)
        return "runtime error", f"the program ended (exit code {ran.exit_code}) before it answered"
    if told is None:
        kind, detail = test_ran.status, f"in the test's code: {last_words(test_ran)}"
    else:
        kind, detail = told["verdict"], told["detail"]
    if kind == "broken" or not used and kind != "raised":
        return "infrastructure", f"the test is broken: {detail or 'it never used the program'}"
    if told is None:
        return "wrong answer" if kind == "runtime error" else kind, detail
    return VERDICT_OF[kind], detail


def _timed(ran: Execution, limits: Limits) -> Execution:
    """The same under the limit on CPU time, which the sandbox was told to be longer."""
    if ran.status in ("ok", "runtime error") and (ran.cpu_s > limits.time_s or ran.exit_code == OUT_OF_TIME):
        return replace(ran, status="time limit", detail=f"{limits.time_s:g} s of CPU", stderr=b"")
    return ran


def _loaded(line: bytes | None) -> dict:
    """What the program's side says once loaded; empty for anything else, as if it had ended."""
    try:
        found = decode(line or b"null")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
