"""Workers that run programs in isolation and never raise for what a program does."""

from __future__ import annotations

import asyncio
import os
import resource
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from megatron_nb.sandbox.execution import Execution, Job
from megatron_nb.sandbox.isolation import IsolationMissing, check, interpreter, walls

__all__ = ["IsolationMissing", "Pool", "Session"]
COMPILE = ["/usr/bin/g++", "-O2", "-std=c++17", "-pipe", "-x", "c++", "main.cpp", "-o", "main"]


class Pool:
    """Runs jobs on `workers` threads, each job in a bubblewrap of its own (first version)."""

    def __init__(self, workers: int | None = None, isolation: str = "bubblewrap"):
        if isolation not in ("bubblewrap", "none"):
            raise ValueError(f"isolation={isolation!r} must be 'bubblewrap' or 'none'")
        if isolation == "bubblewrap":
            check()
        self.isolation = isolation
        self.workers = workers or os.cpu_count()
        self.threads = ThreadPoolExecutor(self.workers)
        self.binaries: dict[str, bytes | str] = {}

    def submit(self, job: Job) -> Future[Execution]:
        return self.threads.submit(self._run, job)

    async def run(self, job: Job) -> Execution:
        return await asyncio.wrap_future(self.submit(job))

    async def session(self, job: Job) -> Session:
        return Session(self, job)

    def close(self) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def _run(self, job: Job, session: Session | None = None) -> Execution:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            for name, content in (*job.files, ("main.cpp" if job.language == "cpp" else "main.py", job.source.encode())):
                with open(os.path.join(folder, name), "wb") as file:
                    file.write(content)
            command = ["./main"] if job.language == "cpp" else [interpreter(), "-I", "-X", "utf8", "main.py"]
            if job.language == "cpp":
                made = subprocess.run(COMPILE, cwd=folder, capture_output=True, timeout=60)
                if made.returncode:
                    return Execution("compile error", stderr=made.stderr[-8192:], isolation=self.isolation)
            if self.isolation == "bubblewrap":
                command = [*walls(), "--bind", folder, "/tmp", "--", *command]
            return self._watch(job, command, folder, session)

    def _watch(self, job: Job, command: list[str], folder: str, session: Session | None) -> Execution:
        limits, start = job.limits, time.monotonic()
        seconds = int(limits.time_s) + 1

        def limit():
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            resource.setrlimit(resource.RLIMIT_AS, ((limits.memory_mb + 64) << 20,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        environment = {} if self.isolation == "bubblewrap" else {"PATH": os.environ["PATH"]}
        command[0] = shutil.which(command[0]) or command[0]
        program = subprocess.Popen(
            command, cwd=folder, stdin=-1, stdout=-1, stderr=-1, preexec_fn=limit, start_new_session=True, env=environment
        )
        if session:
            session._started(program)
        else:
            threading.Thread(target=_feed, args=(program.stdin, job.stdin), daemon=True).start()
        end, output, status = start + limits.time_s, {"o": b"", "e": b""}, None
        with selectors.DefaultSelector() as selector:
            selector.register(program.stdout, selectors.EVENT_READ, "o")
            selector.register(program.stderr, selectors.EVENT_READ, "e")
            while selector.get_map() and status is None:
                events = selector.select(max(0, end - time.monotonic()))
                if time.monotonic() >= end:
                    status = "time limit"
                for key, _ in events:
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                    output[key.data] += data
                    if session and key.data == "o":
                        session._received(data)
                if len(output["o"]) > limits.output_bytes:
                    status = "output limit"
                output["e"] = output["e"][-8192:]
        if status:
            os.killpg(program.pid, signal.SIGKILL)
        _, code, usage = os.wait4(program.pid, 0)
        program.returncode = code = os.waitstatus_to_exitcode(code)
        program.stdout.close()
        program.stderr.close()
        if status is None:
            status = "ok" if code == 0 else "memory limit" if b"\nMemoryError" in output["e"][-200:] else "runtime error"
        return Execution(
            status, output["o"][: limits.output_bytes], output["e"], code, usage.ru_utime + usage.ru_stime,
            time.monotonic() - start, usage.ru_maxrss / 1024, isolation=self.isolation,
        )  # fmt: skip


class Session:
    """A duplex talk with a running program."""

    def __init__(self, pool: Pool, job: Job):
        self.loop, self.ready, self.buffer, self.over = asyncio.get_running_loop(), asyncio.Event(), b"", False
        self.begun: Future = Future()
        self.future = pool.threads.submit(pool._run, job, self)
        self.future.add_done_callback(lambda _: self.loop.call_soon_threadsafe(self._add, None))

    def _started(self, program) -> None:
        self.begun.set_result(program)

    def _received(self, data: bytes) -> None:
        self.loop.call_soon_threadsafe(self._add, data)

    def _add(self, data: bytes | None) -> None:
        self.over |= data is None
        self.buffer += data or b""
        self.ready.set()

    async def send(self, line: bytes) -> None:
        program = await asyncio.wrap_future(self.begun)
        await asyncio.to_thread(_feed, program.stdin, line, False)

    async def receive(self, timeout_s: float) -> bytes | None:
        """The next line with its newline, None at the end of its output; raises TimeoutError after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while b"\n" not in self.buffer and not self.over:
            self.ready.clear()
            await asyncio.wait_for(self.ready.wait(), end - time.monotonic())
        line, mark, rest = self.buffer.partition(b"\n")
        self.buffer = rest
        return line + mark or None

    async def end(self) -> Execution:
        """Close the program's stdin and wait for it."""
        program = await asyncio.wrap_future(self.begun)
        program.stdin.close()
        return await asyncio.wrap_future(self.future)


def _feed(pipe, data: bytes, close: bool = True) -> None:
    try:
        pipe.write(data)
        pipe.flush()
        if close:
            pipe.close()
    except OSError:
        pass
