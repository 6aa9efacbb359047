"""One run of the measuring driver: a fork that does a piece of work once, and what the kernel says of it.

Runs inside the sandbox, beside measure.py (sent there as source).
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time

WALL = 12  # a run may take this many times its CPU cap by the clock: cores are shared


class Child:
    """The end of a fork: status "ok", "cap" (of CPU), "clock", "memory", "error: ..."; its CPU seconds; what it reported."""

    def __init__(self, work, cap_s: float, memory_mb: int):
        reader, writer = os.pipe()
        self.cpu, self.said, ended = 0.0, b"", False
        pid = os.fork()
        if not pid:
            os.close(reader)
            _be_child(work, writer, cap_s, memory_mb)
        os.close(writer)
        deadline = time.monotonic() + WALL * cap_s + 1.0
        while (left := deadline - time.monotonic()) > 0 and select.select([reader], [], [], left)[0]:
            part = os.read(reader, 65536)
            if not part:
                ended = True
                break
            self.said = (self.said + part)[:65536]
        if not ended:
            os.kill(pid, signal.SIGKILL)
        os.close(reader)
        while True:  # the pipe may be closed early
            done, status, usage = os.wait4(pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > deadline:
                ended = False
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.0005)
        self.cpu = usage.ru_utime + usage.ru_stime
        ended_by = os.waitstatus_to_exitcode(status)
        self.status = "ok" if ended_by == 0 else self.said.decode(errors="replace")[:200] or f"error: ended with {ended_by}"
        if not ended or ended_by == -signal.SIGPROF:
            self.status = "cap" if self.cpu > 0.8 * cap_s else "clock"


def _be_child(work, writer: int, cap_s: float, memory_mb: int) -> None:
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        sys.setrecursionlimit(1_000_000)
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20,) * 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # nothing is kept for the next run
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # and no work is done by a process that nobody waits for
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cap_s)
        said = work()
    except MemoryError:
        os.write(writer, b"memory")
        os._exit(1)
    except BaseException as error:  # SystemExit of a program that ends by exit() too
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            os.write(writer, f"error: {type(error).__name__}: {str(error)[:100]}".encode())
            os._exit(1)
        said = b"exit"
    os.write(writer, said or b"")
    os._exit(0)
