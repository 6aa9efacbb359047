"""Outputs of which several are right: a checker program decides, in a sandbox of its own."""

from __future__ import annotations

import re

from megatron_nb.sandbox.execution import Job, Limits
from megatron_nb.sandbox.harness import CHECK, last_words, refused
from megatron_nb.sandbox.harness_checker import UNUSABLE
from megatron_nb.sandbox.harness_wire import encode
from megatron_nb.sandbox.pool import Pool
from megatron_nb.sandbox.tests import Test

LIMITS = Limits(time_s=20.0, memory_mb=1024)  # a checker is trusted to end, not to be quick
FUNCTION = re.compile(r"^def check\(", re.MULTILINE)


async def judge_by_checker(pool: Pool, test: Test, output: bytes, limits: Limits) -> tuple[str, str]:
    """(verdict, detail). A checker that breaks on an output and not on the expected one speaks against the output.

    Where no output is expected it does so too, unless it cannot even begin: else what no checker can read would cost nothing.
    """
    verdict, detail = await _ask(pool, test, output)
    if verdict == "unusable":
        return "infrastructure", f"the checker is broken: {detail}"
    if verdict != "broken":
        return verdict, detail
    if test.stdout is None or (await _ask(pool, test, test.stdout.encode()))[0] == "accepted":
        return "wrong answer", f"the checker failed on this output: {detail}"
    return "infrastructure", f"the checker is broken: {detail}"


async def _ask(pool: Pool, test: Test, output: bytes) -> tuple[str, str]:
    checker, stdin, expected = test.checker, (test.stdin or "").encode(), (test.stdout or "").encode()
    given = ("input", stdin), ("output", output), ("expected", expected)
    if checker.language == "python" and FUNCTION.search(checker.source):
        task = {name: content.decode("utf-8", "replace") for name, content in given}
        job = Job(CHECK, stdin=encode({"program": checker.source, **task}).encode(), limits=LIMITS)
    else:
        job = Job(checker.source, checker.language, limits=LIMITS, files=given)
    execution = await pool.run(job)
    if execution.status == "infrastructure":
        return "infrastructure", last_words(execution)
    words = execution.stdout.decode("utf-8", "replace").strip().partition("\n")[0][:300]
    if execution.status == "ok":
        return "accepted", ""
    told = f"{execution.status}: {last_words(execution)}"
    if execution.status == "compile error" or refused(execution) or execution.exit_code == UNUSABLE:
        return "unusable", told
    if execution.exit_code in (1, 2) and b"Traceback" not in execution.stderr:
        return "wrong answer", words or "the checker says no"
    return "broken", told
