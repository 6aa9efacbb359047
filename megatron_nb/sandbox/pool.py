"""Workers that run programs in isolation and never raise for what a program does.

`with Pool() as pool: execution = pool.submit(Job("print(6 * 7)")).result()`
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import queue
import threading
import weakref
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace

from megatron_nb.sandbox import cgroup
from megatron_nb.sandbox.execution import Execution, Job, Limits
from megatron_nb.sandbox.isolation import IsolationMissing
from megatron_nb.sandbox.session import Session
from megatron_nb.sandbox.worker import Broken, Worker

__all__ = ["IsolationMissing", "Pool", "Session"]
COMPILE_LIMITS = Limits(time_s=30.0, memory_mb=1024, output_bytes=64 << 20, processes=16, disk_mb=256)
COMPILE = """
import subprocess, sys
command = "g++ -O2 -std=c++17 -pipe -x c++ main.cpp -o program".split()
with open("main.cpp", "wb") as file:
    file.write(sys.stdin.buffer.read())
made = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, env={"PATH": "/usr/local/bin:/usr/bin:/bin"})
if made.returncode == 0:
    sys.stdout.buffer.write(open("program", "rb").read())
sys.exit(made.returncode != 0)
"""
KEPT_BINARIES = 256


class Pool:
    """`workers` isolated workers (the number of cores when None), each with a thread of this process.

    isolation="bubblewrap" raises IsolationMissing, which names the cause and the remedy, where it cannot be had;
    "none" runs programs as this user, bounded by process limits only, and says so in every Execution.
    Thread-safe, and usable from any event loop. Closed by `close`, by `with`, or when it is no longer referenced.
    """

    def __init__(self, workers: int | None = None, isolation: str = "bubblewrap"):
        if isolation not in ("bubblewrap", "none"):
            raise ValueError(f"isolation={isolation!r} must be 'bubblewrap' or 'none'")
        count = len(os.sched_getaffinity(0)) if workers is None else workers
        if count < 1:
            raise ValueError(f"workers={workers} must be at least 1")
        cgroup.sweep()
        self.isolation, self.workers = isolation, count
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._binaries: dict[str, Execution | bytes] = {}
        self._workers = [Worker(isolation) for _ in range(count)]
        self._up = [Future() for _ in range(count)]
        self._threads = [
            threading.Thread(target=_work, args=(worker, up, self._tasks, self._binaries), daemon=True, name="sandbox")
            for worker, up in zip(self._workers, self._up)
        ]
        self._close = weakref.finalize(self, _close, self._workers, self._threads, self._tasks)
        for thread in self._threads:
            thread.start()
        try:
            for up in self._up:
                up.result()
        except IsolationMissing:
            self._close()
            raise

    @property
    def in_force(self) -> str:
        """The isolation of every run, as Execution.isolation."""
        return self._workers[0].name

    def submit(self, job: Job) -> Future[Execution]:
        """Queue one run. Raises ValueError for a job that no sandbox could run, RuntimeError once closed."""
        return self._queue(_checked(job), None, Future())

    async def run(self, job: Job) -> Execution:
        """One run; what the program does is in the Execution, never an exception."""
        return await asyncio.wrap_future(self.submit(job))

    async def session(self, job: Job) -> Session:
        """Start a program to talk with; its stdin begins with job.stdin."""
        session = Session()
        await session.send(job.stdin)
        self._queue(_checked(job), session, Future())
        return session

    def close(self) -> None:
        """End what runs, and leave no process, file or control group. Later calls do nothing."""
        self._close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def _queue(self, job: Job, session: Session | None, future: Future) -> Future:
        if not self._close.alive:
            raise RuntimeError("the pool is closed")
        self._tasks.put((job, session, future))
        return future


def _checked(job: Job) -> Job:
    if job.language not in ("python", "cpp"):
        raise ValueError(f"language={job.language!r} must be 'python' or 'cpp'")
    names = [name for name, _ in job.files]
    for name in names:
        if name in ("", ".", "..", "main.py") or "/" in name or "\0" in name or names.count(name) > 1:
            raise ValueError(f"file name {name!r} must be a plain name of its own, and not main.py")
    limits = job.limits
    if min(limits.time_s, limits.memory_mb, limits.processes, limits.disk_mb, limits.files) <= 0 or limits.output_bytes < 0:
        raise ValueError(f"every bound of {limits} must be above zero")
    size = len(job.source) + sum(len(content) for _, content in job.files)
    if size > limits.disk_mb << 20 or len(names) + 2 > limits.files:
        raise ValueError(f"{len(names)} files of {size} bytes do not fit the disk: {limits.disk_mb} MB, {limits.files} files")
    return job


def _work(worker: Worker, up: Future, tasks: queue.SimpleQueue, binaries: dict) -> None:
    """A worker's thread: bubblewrap ends with the thread that started it, so the thread starts it and outlives it."""
    try:
        worker.start()
        up.set_result(None)
        while (task := tasks.get()) is not None:
            job, session, future = task
            if session is None and not future.set_running_or_notify_cancel():
                continue
            execution = _attempt(worker, job, session, binaries)
            if session is None:
                with suppress(InvalidStateError):
                    future.set_result(execution)
            else:
                session.finished(execution)
            del task, job, session, future, execution  # nothing is kept alive while waiting
    except IsolationMissing as error:
        up.set_exception(error)
    finally:
        worker.stop()


def _attempt(worker: Worker, job: Job, session: Session | None, binaries: dict) -> Execution:
    """Run a job, once more on a fresh worker when the sandbox broke and nobody has talked with the program yet."""
    causes = []
    for _ in range(1 if session else 2):
        try:
            binary = b""
            if job.language == "cpp":
                binary = _compiled(worker, job, binaries)
                if isinstance(binary, Execution):
                    return binary
            return worker.run(job, binary, session)
        except Exception as error:  # whatever it is, a verdict is owed, and the next job needs a worker
            causes.append(str(error) if isinstance(error, Broken | IsolationMissing) else repr(error))
            worker.stop()
            if worker.stopping:
                break
    return Execution("infrastructure", detail="; then ".join(causes), isolation=worker.name)


def _compiled(worker: Worker, job: Job, binaries: dict) -> bytes | Execution:
    """The binary of a C++ source, or the Execution of a compiler that refused it; made once per pool, in the isolation."""
    source = job.source.encode("utf-8", "surrogatepass")
    key = hashlib.sha256(source).hexdigest()
    result = binaries.get(key)
    if result is None:
        made = worker.run(Job(COMPILE, stdin=source, limits=COMPILE_LIMITS))
        if made.status == "ok":
            result = made.stdout
        else:
            detail = made.detail if made.status != "runtime error" else "g++ refused the program"
            result = replace(made, status="compile error", stdout=b"", detail=detail)
        binaries[key] = result
        while len(binaries) > KEPT_BINARIES:
            with suppress(KeyError, StopIteration, RuntimeError):
                del binaries[next(iter(binaries))]
    return result


def _close(workers: list[Worker], threads: list[threading.Thread], tasks: queue.SimpleQueue) -> None:
    """Cancel what waits, stop what runs, join the threads."""
    with suppress(queue.Empty):
        while True:
            task = tasks.get_nowait()
            if task is not None and task[1] is not None:
                task[1].finished(Execution("infrastructure", detail="the pool was closed"))
            elif task is not None:
                task[2].cancel()
    for worker in workers:
        worker.ask_to_stop()
        tasks.put(None)
    for worker, thread in zip(workers, threads):
        if thread is not threading.current_thread():  # the last reference may go away in a callback of a worker's thread
            thread.join()
            worker.close()
