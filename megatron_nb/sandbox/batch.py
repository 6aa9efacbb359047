"""Files of rows through the pool: checked before any work, in order, resumable, with the time left on stderr."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TextIO

SAY_EVERY_S = 2.0
Work = Callable[[dict], Awaitable[dict]]


class BadRow(ValueError):
    """A row that cannot be worked on; says file, line, value, rule and remedy."""


def rows(path: Path, check: Callable[[dict], object], skip_bad: bool = False, bad: list[str] | None = None) -> Iterator[dict]:
    """The rows of a file of JSON lines. BadRow for the first bad one, or with `skip_bad` its words go to `bad`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                check(row)
            except (ValueError, TypeError, RecursionError) as error:
                words = f"{path}:{number}: {error}"
                if not skip_bad:
                    raise BadRow(f"{words}; mend the row, or pass --bad-rows skip to leave such rows out") from None
                if bad is not None:
                    bad.append(words)
                continue
            yield row


def done_before(out: Path, wanted: Iterator[object]) -> int:
    """How many rows of an earlier run `out` begins with; what a kill left of a last line is cut off.

    ValueError where its ids are not the first of `wanted`: then it is the output of something else.
    """
    if not out.exists():
        return 0
    kept, count = 0, 0
    with out.open("r+b") as file:
        for line in file:
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                row = None
            if not isinstance(row, dict):
                if file.read(1):
                    raise ValueError(f"{out}:{count + 1}: not a row of an earlier run; move the file away")
                break
            if "id" not in row or row["id"] != next(wanted, ...):
                raise ValueError(f"{out}:{count + 1}: id {row.get('id')!r} is not that of row {count + 1} of the input: "
                                 "it was written from other rows; move it away or name another --out")  # fmt: skip
            kept, count = kept + len(line), count + 1
        file.truncate(kept)
    return count


class Progress:
    """Lines on stderr: how far, how fast, how long still."""

    def __init__(self, total: int, done: int, to: TextIO = sys.stderr) -> None:
        self.total, self.start, self.first, self.to = total, time.monotonic(), done, to
        self.said = self.start

    def at(self, done: int, end: bool = False) -> None:
        now = time.monotonic()
        if now - self.said < SAY_EVERY_S and not end:
            return
        self.said = now
        rate = (done - self.first) / max(now - self.start, 1e-9)
        left = f", {(self.total - done) / rate:.0f} s left" if rate and not end else ""
        print(f"{done} of {self.total} rows, {rate:.1f} rows/s{left}", file=self.to, flush=True)


async def stream(source: Iterator[dict], work: Work, out: Path, at_once: int, say: Progress) -> None:
    """Works on `at_once` rows at a time and appends the answers in the order of the rows."""
    under_way: deque[asyncio.Task] = deque()
    done, more = say.first, True
    with out.open("ab") as file:
        try:
            while more or under_way:
                while more and sum(not task.done() for task in under_way) < at_once and len(under_way) < 50 * at_once:
                    row = next(source, None)
                    if row is None:
                        more = False
                    else:
                        under_way.append(asyncio.create_task(_answer(work, row)))
                if pending := [task for task in under_way if not task.done()]:
                    await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED, timeout=SAY_EVERY_S)
                while under_way and under_way[0].done():
                    answer = under_way.popleft().result()
                    file.write(json.dumps(answer).encode() + b"\n")
                    done += 1
                file.flush()
                say.at(done)
            os.fsync(file.fileno())
        finally:
            for task in under_way:
                task.cancel()
    say.at(done, end=True)


async def _answer(work: Work, row: dict) -> dict:
    try:
        return await work(row)
    except Exception as error:
        raise RuntimeError(f"row {row.get('id')!r}: {type(error).__name__}: {error}") from error
