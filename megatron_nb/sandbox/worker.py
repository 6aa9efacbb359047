"""The outside of one worker: hands a job to its server, watches the run with its own clock, and judges how it ended."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import select
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field

from megatron_nb.sandbox import cgroup, processes
from megatron_nb.sandbox.execution import Execution, Job
from megatron_nb.sandbox.isolation import PAYLOAD_USER, IsolationMissing, Server

NUMBERS = itertools.count()
CORES = os.cpu_count() or 1
TAIL = 8192  # bytes of stderr kept
GRACE_S = 0.5  # from the order to kill a run to giving up on its worker
LOOK_S = 0.002  # the least time between two looks
SCAN_S = 0.03  # between looks at the processes' memory where no control group bounds it
HIDDEN_CPU_S = 0.02  # of the server's own work within a run; more than that is a program hiding its children's time


class Broken(RuntimeError):
    """The sandbox failed, not the program."""


@dataclass
class Watch:
    """What is known of the run in progress."""

    job: Job
    number: int
    began: float = 0.0  # monotonic; 0: not yet
    pid: int = 0  # of its first process, in our process table
    cpu_before: float = 0.0
    memory_before: int = 0
    kills_before: int = 0
    start_cpu_s: float = 0.0  # spent by the fork on its own walls
    verdict: tuple[str, str] | None = None  # status and detail of the bound it broke
    peak_bytes: int = 0
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)


class Worker:
    """One server and the runs in it, one at a time. Not thread-safe: one thread owns it."""

    def __init__(self, isolation: str):
        self.isolation = self.name = isolation
        self.server: Server | None = None
        self.group = None
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # from other threads: input has come, or stop
        self.stopping = False
        self.number = 0

    def start(self) -> None:
        """Start a fresh server. Raises IsolationMissing."""
        self.stop()
        self.number = 0
        self.server = Server(self.isolation)
        self.group = cgroup.create(f"{next(NUMBERS)}") if self.isolation == "bubblewrap" else None
        if self.group:
            try:
                for pid in processes.descendants(self.server.process.pid):
                    self.group.add(pid)
                self.idle_memory, self.idle_processes = self.group.memory_bytes(), self.group.processes()
            except OSError:
                self.group.close()
                self.group = None
        self.name = f"bubblewrap{'+cgroup' if self.group else ''}" if self.isolation == "bubblewrap" else "none"

    def stop(self) -> None:
        """Kill the server and everything in it; leaves no group behind."""
        if self.server:
            self.server.close()
            self.server = None
        if self.group:
            end = time.monotonic() + 5
            while not self.group.close() and time.monotonic() < end:
                time.sleep(0.005)
            self.group = None

    def ask_to_stop(self) -> None:
        """From another thread: the run in progress ends as broken."""
        self.stopping = True
        with suppress(OSError):
            os.eventfd_write(self.wake, 1)

    def close(self) -> None:
        self.stop()
        wake, self.wake = self.wake, -1
        if wake >= 0:
            os.close(wake)

    def run(self, job: Job, binary: bytes = b"", session=None) -> Execution:
        """Run a job to its end. Raises Broken when the sandbox fails; the worker then needs a start."""
        if self.server is None:
            self.start()
        server, self.number = self.server, self.number + 1
        watch = Watch(job, self.number)
        if self.group:
            self._limit(job)
            watch.cpu_before, watch.kills_before = self.group.cpu_s(), self.group.kills()
            self.group.reset_peak()
            watch.memory_before = self.group.memory_bytes()
        opened: list[int] = []
        try:
            if session:
                session.taken(self.wake)
            header, given, kept = self._package(job, binary, session, opened)
            socket.send_fds(server.jobs, [header], given)
            for descriptor in given:
                os.close(descriptor)
                opened.remove(descriptor)
            ended = self._follow(watch, kept, session, opened)
            return self._judge(watch, *ended)
        except OSError as error:
            raise Broken(f"{type(error).__name__}: {error}; {server.said()}") from error
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _limit(self, job: Job) -> None:
        memory = self.idle_memory + (job.limits.memory_mb << 20)
        self.group.limit(memory, self.idle_processes + job.limits.processes)

    def _package(self, job: Job, binary: bytes, session, opened: list[int]) -> tuple[bytes, list[int], list[int]]:
        """The message of a run, the descriptors that go with it, and those that stay: stdout, stderr, and stdin or -1."""

        def holding(content: bytes) -> int:
            descriptor = os.memfd_create("job", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            opened.append(descriptor)
            _write_all(descriptor, content)
            _seal(descriptor)
            return descriptor

        def pipe() -> tuple[int, int]:
            ends = os.pipe2(os.O_CLOEXEC)
            opened.extend(ends)
            return ends

        script = [] if binary else [("main.py", job.source.encode("utf-8", "surrogatepass"))]
        parts = [*script, *job.files]
        package = holding(b"".join(content for _, content in parts))
        stdin, feed = pipe() if session else (holding(job.stdin), -1)
        if session:
            os.set_blocking(feed, False)
        stdout, to_stdout = pipe()
        stderr, to_stderr = pipe()
        if self.server.two_users:
            os.fchown(to_stdout, PAYLOAD_USER, PAYLOAD_USER)  # so that a program may open /dev/stdout
            os.fchown(to_stderr, PAYLOAD_USER, PAYLOAD_USER)
        given = [package, stdin, to_stdout, to_stderr]
        if binary:
            given.append(holding(binary))
        header = {
            "parts": [[name, len(content)] for name, content in parts],
            "disk_mb": job.limits.disk_mb,
            "files": job.limits.files,
            "limits": self._process_limits(job, bool(binary)),
        }
        return json.dumps(header).encode(), given, [stdout, stderr, feed]

    def _process_limits(self, job: Job, compiled: bool) -> dict[str, list[int]]:
        """The kernel's limits per process: a second fence behind the control group, the only one without."""
        limits, memory = job.limits, job.limits.memory_mb << 20
        bounds = {
            "RLIMIT_CPU": math.ceil(limits.time_s) + 1,
            "RLIMIT_FSIZE": limits.disk_mb << 20,
            "RLIMIT_NOFILE": 256,
            "RLIMIT_CORE": 0,
            "RLIMIT_STACK": memory,
            "RLIMIT_MEMLOCK": 1 << 16,
        }
        if not self.group:
            bounds["RLIMIT_AS"] = memory + (64 << 20)
        elif not compiled:  # what is only reserved costs nothing; a single absurd request should still fail at once
            bounds["RLIMIT_AS"] = memory + (4 << 30)
        if self.isolation == "bubblewrap":  # counted per user and user namespace: the server is another user, or the same
            bounds["RLIMIT_NPROC"] = limits.processes + (0 if self.server.two_users else 4)
        return {name: [bound, bound] for name, bound in bounds.items()}

    def _follow(self, watch: Watch, kept: list[int], session, opened: list[int]) -> tuple[int, float, int]:
        """Watch a run until the server reports its end: (wait status, CPU seconds, peak KiB of the largest process)."""
        stdout, stderr, feed = kept
        server, limits = self.server, watch.job.limits
        control = server.control.fileno()
        poll = select.poll()
        for descriptor in (control, stdout, stderr, self.wake):
            poll.register(descriptor, select.POLLIN)
        look = give_up = time.monotonic() + 30.0  # a fork that has not begun by then never will
        while True:
            ready = dict(poll.poll(max(0, math.ceil((min(look, give_up) - time.monotonic()) * 1000))))
            for descriptor in (stdout, stderr):
                if descriptor in ready and not self._take(watch, descriptor, descriptor == stdout, session):
                    poll.unregister(descriptor)
            if control in ready:
                ended = self._hear(watch)
                if ended:
                    self._drain(watch, stdout, stderr, session)
                    return ended
                look = watch.began + self._first_look(limits)
                give_up = watch.began + limits.deadline_s + GRACE_S
            if self.wake in ready:
                os.eventfd_read(self.wake)
                if self.stopping:
                    raise Broken("the pool was closed")
            if session and (self.wake in ready or feed in ready):
                feed = self._feed(poll, feed, session, opened)
            now = time.monotonic()
            if now >= give_up and watch.verdict:
                server.kill()  # its process table dies with it
                return 9, self._cpu_s(watch), 0
            if now >= give_up:
                raise Broken(f"no word from the worker: {server.said()}")
            if watch.verdict is None and watch.began and now >= look:
                look = now + self._check(watch, now)
            if watch.verdict is not None and look < math.inf:
                server.control.send(struct.pack("<Q", watch.number))
                look, give_up = math.inf, now + GRACE_S

    def _first_look(self, limits) -> float:
        return min(limits.time_s / min(CORES, limits.processes), limits.time_s if self.group else SCAN_S)

    def _take(self, watch: Watch, descriptor: int, is_stdout: bool, session) -> bool:
        """Read what has come; False at the end of the stream."""
        data = os.read(descriptor, 1 << 16)
        if not is_stdout:
            watch.stderr += data
            del watch.stderr[:-TAIL]
            return bool(data)
        room = watch.job.limits.output_bytes - len(watch.stdout)
        watch.stdout += data[: max(0, room)]
        if session and data[:room]:
            session.received(data[:room])
        if len(data) > room and watch.verdict is None:
            watch.verdict = "output limit", f"more than {watch.job.limits.output_bytes} bytes of output"
        return bool(data)

    def _hear(self, watch: Watch) -> tuple[int, float, int] | None:
        """Read the control socket; the end of the run when that is what came."""
        data, ancillary, _, _ = self.server.control.recvmsg(4096, 256)
        kind = data[:1]
        if kind == b"s":
            number, watch.start_cpu_s = struct.unpack("<Qd", data[1:])
            credentials = next(content for _, name, content in ancillary if name == socket.SCM_CREDENTIALS)
            watch.pid, watch.began = struct.unpack("i", credentials[:4])[0], time.monotonic()
        elif kind == b"e":
            number, status, seconds, peak_kib = struct.unpack("<Qidq", data[1:])
            if watch.began:
                return status, seconds - watch.start_cpu_s, peak_kib
            raise Broken(f"a run ended before it began, with wait status {status}: {self.server.said()}")
        else:
            raise Broken(data[1:].decode(errors="replace") or f"the worker died: {self.server.said()}")
        return None

    def _drain(self, watch: Watch, stdout: int, stderr: int, session) -> None:
        """Read what lies in the pipes of a run that is over."""
        for descriptor in (stdout, stderr):
            os.set_blocking(descriptor, False)
            with suppress(BlockingIOError):
                while self._take(watch, descriptor, descriptor == stdout, session):
                    if watch.verdict:
                        break

    def _feed(self, poll, feed: int, session, opened: list[int]) -> int:
        """Write what a session has to say; -1 once its input is closed."""
        if feed < 0:
            return -1
        data, over = session.pending()
        try:
            session.sent(os.write(feed, data) if data else 0)
            data, over = session.pending()
        except BlockingIOError:
            pass
        except BrokenPipeError:
            data, over = b"", True
        if data:
            poll.register(feed, select.POLLOUT)
            return feed
        with suppress(KeyError):
            poll.unregister(feed)
        if over:
            opened.remove(feed)
            os.close(feed)
            return -1
        return feed

    def _check(self, watch: Watch, now: float) -> float:
        """Compare a run with its limits; seconds until the next look is due."""
        limits, clock = watch.job.limits, now - watch.began
        cpu = self._cpu_s(watch)
        waiting = processes.waited_s(watch.pid) if clock >= limits.time_s else 0.0
        if cpu >= limits.time_s:
            watch.verdict = "time limit", f"{cpu:.2f} s of CPU, {limits.time_s:g} s allowed"
        elif waiting is not None and clock - waiting >= limits.time_s:  # one that never sleeps meets the bound above
            watch.verdict = "time limit", f"{clock - waiting:.2f} s of the clock, {limits.time_s:g} s allowed"
        elif clock >= limits.deadline_s:
            watch.verdict = "time limit", f"deadline of {limits.deadline_s:g} s"
        elif not self.group and watch.peak_bytes > limits.memory_mb << 20:
            watch.verdict = "memory limit", f"{watch.peak_bytes >> 20} MB in all processes, {limits.memory_mb} MB allowed"
        due = (limits.time_s - cpu) / min(CORES, limits.processes)
        if waiting is not None:
            due = min(due, limits.time_s - clock + waiting)
        due = min(due, limits.deadline_s - clock)
        return max(LOOK_S, due if self.group else min(due, SCAN_S))

    def _cpu_s(self, watch: Watch) -> float:
        if self.group:
            return self.group.cpu_s() - watch.cpu_before
        cpu, memory = processes.spent(watch.pid)
        if memory > watch.job.limits.memory_mb << 20:
            memory = processes.shared_memory_counted_once(watch.pid)
        watch.peak_bytes = max(watch.peak_bytes, memory)
        return cpu - watch.start_cpu_s

    def _judge(self, watch: Watch, status: int, cpu_s: float, peak_kib: int) -> Execution:
        """The Execution of a run that is over."""
        limits, wall = watch.job.limits, time.monotonic() - watch.began
        code = os.waitstatus_to_exitcode(status)
        peak, killed = max(watch.peak_bytes, peak_kib << 10), False
        if self.group:
            used = self.group.peak_bytes() - watch.memory_before
            peak = max(peak, used)
            killed = self.group.kills() > watch.kills_before
            if killed and used < 0.8 * (limits.memory_mb << 20) and watch.verdict is None:
                raise Broken(f"the machine ran out of memory and ended a program that held {used >> 20} MB")
            total = self.group.cpu_s() - watch.cpu_before - watch.start_cpu_s
            cpu_s = total if total > cpu_s + HIDDEN_CPU_S else cpu_s
        outcome, detail = self._outcome(watch, code, killed, cpu_s)
        return Execution(
            outcome, bytes(watch.stdout), bytes(watch.stderr), code, max(0.0, cpu_s), wall, peak / (1 << 20), detail, self.name
        )

    def _outcome(self, watch: Watch, code: int, killed: bool, cpu_s: float) -> tuple[str, str]:
        limits = watch.job.limits
        last = bytes(watch.stderr).rstrip().rpartition(b"\n")[2]
        if killed:
            return "memory limit", f"more than {limits.memory_mb} MB in all processes"
        if watch.verdict:
            return watch.verdict
        if cpu_s > limits.time_s:
            return "time limit", f"{cpu_s:.2f} s of CPU, {limits.time_s:g} s allowed"
        if code == 0:
            return "ok", ""
        if last.startswith(b"MemoryError") or (code == -6 and b"std::bad_alloc" in watch.stderr):
            return "memory limit", f"an allocation failed, {limits.memory_mb} MB allowed"
        return "runtime error", f"exit code {code}" if code > 0 else f"killed by signal {-code}"


def _write_all(descriptor: int, content: bytes) -> None:
    offset = 0
    while offset < len(content):
        offset += os.pwrite(descriptor, content[offset:] if offset else content, offset)


def _seal(descriptor: int) -> None:
    """Nobody may change it any more, also not the program that reads it."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)


__all__ = ["Broken", "IsolationMissing", "Worker"]
