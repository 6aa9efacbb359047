"""The outside of one worker: hands a job to its server, watches the run with its own clock, and judges how it ended."""

from __future__ import annotations

import itertools
import math
import os
import select
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field

from megatron_nb.sandbox import cgroup, processes
from megatron_nb.sandbox.delivery import Delivery
from megatron_nb.sandbox.execution import Execution, Job
from megatron_nb.sandbox.isolation import IsolationMissing, Server

NUMBERS = itertools.count()
CORES = os.cpu_count() or 1
IDLE_PROCESSES = 3  # bubblewrap, the server, and the run's process 1, which are no program's
TAIL = 8192  # bytes of stderr kept
LEAST_MB = 16  # of memory, for the fork to begin at all
STDERR_FREE = 4 << 20  # bytes read without delay
GRACE_S = 0.5  # from the order to kill a run to giving up on its worker
LOOK_S = 0.002  # the least time between two looks
SETTLE_S = 0.2
SCAN_S = 0.03  # between looks that read all of /proc
HIDDEN_CPU_S = 0.02  # of the server's own work within a run; more than that is a program hiding its children's time


class Broken(RuntimeError):
    """The sandbox failed, not the program."""


@dataclass
class Watch:
    """What is known of the run in progress."""

    job: Job
    number: int
    began: float = 0.0  # monotonic, by the fork's own word before it lets the program in; 0: not yet
    ended: float = 0.0  # by the server's word
    pid: int = 0  # of its first process, in our process table
    cpu_before: float = 0.0
    memory_before: int = 0
    kills_before: int = 0
    start_cpu_s: float = 0.0  # spent by the fork on its own walls
    verdict: tuple[str, str] | None = None  # status and detail of the bound it broke
    peak_bytes: int = 0
    stdout: bytearray = field(default_factory=bytearray)
    stderr_bytes: int = 0
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
        group = cgroup.create(f"{next(NUMBERS)}") if self.isolation == "bubblewrap" else None
        try:
            self.server = Server(self.isolation, group.add if group else None)
        finally:
            if group and (self.server is None or not group.joined):
                group.close()
                group = None
        if group:
            self.idle_memory = group.memory_bytes()
        self.group = group
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
        os.eventfd_write(self.wake, 1)

    def close(self) -> None:
        """Once its thread is gone."""
        self.stop()
        os.close(self.wake)

    def run(self, job: Job, binary: bytes = b"", session=None) -> Execution:
        """Run a job to its end. Raises Broken when the sandbox fails; the worker then needs a start."""
        if self.server is None or self.server.over:
            self.start()
        server, self.number = self.server, self.number + 1
        watch = Watch(job, self.number)
        if self.group:
            memory = max(job.limits.memory_mb, LEAST_MB) << 20
            self.group.limit(self.idle_memory + memory, IDLE_PROCESSES + job.limits.processes)
            watch.cpu_before, watch.kills_before = self.group.cpu_s(), self.group.kills()
            watch.memory_before = self._settled()
            self.group.reset_peak()
        delivery = None
        try:
            if session:
                session.taken(self.wake)
            delivery = Delivery(job, binary, session is not None, server, self.group is not None)
            socket.send_fds(server.jobs, [delivery.header], delivery.given)
            delivery.handed_over()
            ended = self._follow(watch, delivery, session)
            return self._judge(watch, *ended)
        except OSError as error:
            raise Broken(f"{type(error).__name__}: {error}; {server.said()}") from error
        finally:
            if delivery:
                delivery.close()

    def _settled(self) -> int:
        """Bytes in the group before a run, once the kernel has taken back the last run's /tmp, as it does in its own time."""
        end = time.monotonic() + SETTLE_S
        while (held := self.group.memory_bytes()) > self.idle_memory + (8 << 20) and time.monotonic() < end:
            if self.group.shared_bytes() < 1 << 20:
                break  # files of the system that programs have read: given back on demand
            time.sleep(LOOK_S)
        return held

    def _follow(self, watch: Watch, delivery: Delivery, session) -> tuple[int, float, int]:
        """Watch a run until the server reports its end: (wait status, CPU seconds, peak KiB of the largest process)."""
        stdout, stderr = delivery.stdout, delivery.stderr
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
            if session and (self.wake in ready or delivery.feed in ready):
                self._feed(poll, delivery, session)
            now = time.monotonic()
            if now >= give_up and watch.verdict:
                server.kill(0.2)  # its process table dies with it
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
            watch.stderr_bytes += len(data)
            if watch.stderr_bytes > STDERR_FREE:
                time.sleep(LOOK_S)  # a flood that nobody keeps must not take this process's time
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
            _, watch.began, watch.start_cpu_s = struct.unpack("<Qdd", data[1:])
            credentials = next(content for _, name, content in ancillary if name == socket.SCM_CREDENTIALS)
            watch.pid = struct.unpack("i", credentials[:4])[0]
        elif kind == b"e":
            _, status, watch.ended, seconds, peak_kib = struct.unpack("<Qiddq", data[1:])
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

    def _feed(self, poll, delivery: Delivery, session) -> None:
        """Write what a session has to say; close the program's stdin once that is all."""
        if delivery.feed < 0:
            return
        data, over = session.pending()
        try:
            session.sent(os.write(delivery.feed, data) if data else 0)
            data, over = session.pending()
        except BlockingIOError:
            pass
        except BrokenPipeError:
            data, over = b"", True
        if data:
            poll.register(delivery.feed, select.POLLOUT)
            return
        with suppress(KeyError):
            poll.unregister(delivery.feed)
        if over:
            delivery.close_feed()

    def _check(self, watch: Watch, now: float) -> float:
        """Compare a run with its limits; seconds until the next look is due."""
        limits, clock = watch.job.limits, now - watch.began
        cpu = self._cpu_s(watch)
        waiting, pause = processes.waited_s(watch.pid) if clock >= limits.time_s else 0.0, LOOK_S
        if waiting is not None and clock - waiting >= limits.time_s:  # asleep, perhaps until its threads and children are done
            waiting, pause = processes.waited_in_all_s(watch.pid), SCAN_S
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
        return max(pause, due if self.group else min(due, SCAN_S))

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
        wall = (watch.ended or time.monotonic()) - watch.began
        code = os.waitstatus_to_exitcode(status)
        peak, killed = max(watch.peak_bytes, peak_kib << 10), False
        if self.group:
            highest = self.group.peak_bytes()
            peak = max(peak, highest - watch.memory_before)
            killed = self.group.kills() > watch.kills_before
            if killed and highest < 0.9 * self.group.limits[0] and watch.verdict is None:
                raise Broken(f"the machine ran out of memory and ended a program that held {peak >> 20} MB")
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


__all__ = ["Broken", "IsolationMissing", "Worker"]
