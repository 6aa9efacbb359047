"""Plain functions in worker processes that are killed at their deadline.

A thread cannot be stopped, and the pools of the standard library wait for what hangs. Each worker here has a pipe of its own,
so one that is killed or lost (kill -9, out of memory) leaves its neighbours alone and is replaced by the next call. Workers
start light (no torch), live on between calls, and die with the job, along with what they started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from megatron_nb.data.spawn import die_with_parent, light_start

START_S = 120  # to start a worker and to import what it is to call: not counted against the call's deadline

log = logging.getLogger(__name__)


class WorkerLost(RuntimeError):
    """The worker ended without an answer."""


class Workers:
    """At most `count` processes; a call waits for a free one, and its time runs from when it has begun there."""

    def __init__(self, count: int):
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="reward-worker")  # one waits beside each process
        self._lock = threading.Lock()  # of the list, and of `light_start`, which is global
        self._idle: list[_Worker] = []

    async def call(self, target: bytes, timeout_s: float, retries: int, *arguments: Any) -> Any:
        """target(*arguments), where target is a pickled callable: a worker unpickles it once.

        retries: how often another worker tries when one is lost, while time is left. Raises what the call raises,
        TimeoutError at the deadline, WorkerLost.
        """
        sent = pickle.dumps(arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, target, timeout_s, retries, sent)

    def close(self) -> None:
        """End the workers."""
        self._threads.shutdown(wait=True)
        while self._idle:
            self._idle.pop().kill()

    def _call(self, target: bytes, timeout_s: float, retries: int, arguments: bytes) -> Any:
        deadline = None
        for attempt in range(retries + 1):
            worker = self._take()
            began = time.monotonic()
            deadline = deadline or began + timeout_s
            try:
                answered, result = worker.ask(target, deadline - began, arguments)
            except BaseException as error:
                worker.kill()
                if isinstance(error, WorkerLost) and attempt < retries and time.monotonic() < deadline:
                    continue
                raise
            with self._lock:
                self._idle.append(worker)
            if answered:
                return result
            raise result
        raise AssertionError("the last attempt returns or raises")

    def _take(self) -> _Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.process.is_alive():
                    return worker
                log.warning("rewards: worker %s was lost while idle; another takes its place", worker.process.pid)
                worker.kill()
            return _Worker()


class _Worker:
    def __init__(self):
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may deadlock
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True, name="reward-worker")
        self.known: set[bytes] = set()
        with light_start():
            self.process.start()
        theirs.close()

    def ask(self, target: bytes, timeout_s: float, arguments: bytes) -> tuple[bool, Any]:
        """(True, the result) or (False, the exception). After TimeoutError or WorkerLost the worker is of no more use."""
        try:
            self.pipe.send((hash(target), None if target in self.known else target, arguments))
            if not self.pipe.poll(START_S):
                raise TimeoutError(f"a worker did not start in {START_S} s")
            self.pipe.recv_bytes()  # it has begun
            self.known.add(target)
            if not self.pipe.poll(timeout_s):
                raise TimeoutError(f"no answer in {timeout_s:g} s; its worker {self.process.pid} was killed")
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            self.process.join(1)
            raise WorkerLost(f"its worker process was lost (exit code {self.process.exitcode})") from error

    def kill(self) -> None:
        """End the process and what it started, whatever they are doing."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # it leads a group of its own
        self.process.kill()  # should it not have come so far
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection) -> None:
    """The worker: read a call, say that it has begun, answer; until the other end closes."""
    os.setpgid(0, 0)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    targets: dict[int, Callable] = {}
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            key, target, arguments = pipe.recv()
            try:
                if target is not None:
                    targets[key] = pickle.loads(target)
                given = pickle.loads(arguments)
            except Exception as error:
                pipe.send_bytes(b"")
                pipe.send((False, _sendable(error)))
                continue
            pipe.send_bytes(b"")
            try:
                answer = pickle.dumps((True, targets[key](*given)))
            except Exception as error:
                answer = pickle.dumps((False, _sendable(error)))
            pipe.send_bytes(answer)


def _sendable(error: Exception) -> Exception:
    """The error, or one that says the same: not every exception survives pickling."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError("".join(traceback.format_exception_only(error)).strip())
