"""A talk with a running program: lines in, lines out, while its limits hold over the whole of it."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future
from contextlib import suppress

from megatron_nb.sandbox.execution import Execution


class Session:
    """Made by Pool.session; used from the event loop that made it. The worker's thread reads and writes on its side."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.arrived = asyncio.Event()  # output, or the end
        self.lines = bytearray()
        self.over = False
        self.execution: Future[Execution] = Future()
        self.lock = threading.Lock()
        self.outgoing, self.input_over = bytearray(), False
        self.wake = -1  # the worker's event descriptor, once it has taken the session

    # the event loop's side

    async def send(self, line: bytes) -> None:
        """Queue bytes for the program's stdin; what a program that has ended does not read is dropped."""
        with self.lock:
            self.outgoing += line
            self._knock()

    async def receive(self, timeout_s: float) -> bytes | None:
        """The next line with its newline, None at the end of the output; raises TimeoutError after `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            while b"\n" not in self.lines and not self.over:
                self.arrived.clear()
                await self.arrived.wait()
        stop = self.lines.find(b"\n") + 1 or len(self.lines)
        line = bytes(self.lines[:stop])
        del self.lines[:stop]
        return line or None

    async def end(self) -> Execution:
        """Close the program's stdin and wait for its end."""
        with self.lock:
            self.input_over = True
            self._knock()
        return await asyncio.wrap_future(self.execution)

    # the worker's side

    def taken(self, wake: int) -> None:
        with self.lock:
            self.wake = wake
            self._knock()

    def received(self, data: bytes) -> None:
        self._tell(data)

    def pending(self) -> tuple[bytes, bool]:
        """What waits to be written, and whether the input ends after it."""
        with self.lock:
            return bytes(self.outgoing[: 1 << 16]), self.input_over and len(self.outgoing) <= 1 << 16

    def sent(self, count: int) -> None:
        with self.lock:
            del self.outgoing[:count]

    def finished(self, execution: Execution) -> None:
        with self.lock:
            self.wake = -1
        self.execution.set_result(execution)
        self._tell(None)

    def _knock(self) -> None:
        if self.wake >= 0:
            os.eventfd_write(self.wake, 1)

    def _tell(self, data: bytes | None) -> None:
        def arrive():
            self.over |= data is None
            self.lines += data or b""
            self.arrived.set()

        with suppress(RuntimeError):  # the loop is gone, and nobody listens
            self.loop.call_soon_threadsafe(arrive)
