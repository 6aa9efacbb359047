"""Tests that are code: the test runs in one sandbox, the program in another, and the host carries lines between them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

from megatron_nb.sandbox.execution import Execution, Job, Limits
from megatron_nb.sandbox.harness import ASSERT, SERVE, last_words
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

        The test runs under the program's limits too: what a program returns can keep its test busy for ever, and that is the
        program's doing. Only a test that breaks before its first call, or never calls, is itself broken: "infrastructure".
        """
        beside = self.beside or await asyncio.to_thread(self.tests_pool)
        side = await self.pool.session(Job(SERVE, limits=replace(limits, output_bytes=TALK_BYTES)))
        try:
            await side.send(_line({"program": program.source}))
            loaded = _read(await side.receive(FOREVER_S))
            if loaded is None:
                return _program_ended(await side.end())
            if "refused" in loaded:
                return await side.end(), "compile error", str(loaded["refused"])[:300]
            memory = max(limits.memory_mb, TEST_MEMORY_MB)
            test_side = await beside.session(Job(ASSERT, limits=replace(limits, output_bytes=TALK_BYTES, memory_mb=memory)))
            try:
                await test_side.send(_line({"code": test.code, "entry": test.entry or program.entry}))
                told, called = await _relay(side, test_side)
            finally:
                test_ran = await test_side.end()
        finally:
            ran = await side.end()
        return _verdict(ran, test_ran, told, called)


async def _relay(side: Session, test_side: Session) -> tuple[dict | None, bool]:
    """Carries lines until the test's verdict; (None, was the program called) where one side ended without."""
    called = False
    while (line := await test_side.receive(FOREVER_S)) is not None:
        if line.startswith(b"!"):
            told = decode(line[1:])
            return told, told["calls"] > 0
        called |= line.startswith(b'{"ask":"call"')
        await side.send(line)
        answer = await side.receive(FOREVER_S)
        if answer is None:
            break
        await test_side.send(answer)
    return None, called


def _verdict(ran: Execution, test_ran: Execution, told: dict | None, called: bool) -> tuple[Execution, str, str]:
    broken = next((one for one in (ran, test_ran) if one.status == "infrastructure"), None)
    if broken:
        return ran, "infrastructure", last_words(broken)
    if told is None and (ran.status != "ok" or test_ran.status == "ok"):
        return _program_ended(ran)
    if told is None:
        kind, detail = test_ran.status, f"in the test's code: {last_words(test_ran)}"
    else:
        kind, detail = told["verdict"], told["detail"]
    if kind == "broken" or not called and kind != "raised":
        return ran, "infrastructure", f"the test is broken: {detail or 'it never called the program'}"
    if told is None:
        return ran, "wrong answer" if kind == "runtime error" else kind, detail
    return ran, VERDICT_OF[kind], detail


def _program_ended(ran: Execution) -> tuple[Execution, str, str]:
    if ran.status != "ok":
        return ran, ran.status, last_words(ran)
    return ran, "runtime error", f"the program ended (exit code {ran.exit_code}) before it answered"


def _line(value: object) -> bytes:
    return encode(value).encode() + b"\n"


def _read(line: bytes | None) -> dict | None:
    """What the program's side says once loaded; None for anything else, as if it had ended."""
    try:
        found = decode(line or b"null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
