"""How a job reaches the process that runs it: a header, and descriptors that only that process opens."""

from __future__ import annotations

import fcntl
import marshal
import math
import os
import resource

from megatron_nb.sandbox.execution import Job
from megatron_nb.sandbox.isolation import PAYLOAD_USER, Server

RESERVED_BYTES = 4 << 30  # address space beyond the memory limit, where a control group counts what is really used


class Delivery:
    """`given` descriptors go to the program, `stdout`, `stderr` and `feed` (stdin of a session, else -1) stay here."""

    def __init__(self, job: Job, binary: bytes, duplex: bool, server: Server, grouped: bool):
        self.opened: list[int] = []
        script = [] if binary else [("main.py", job.source.encode("utf-8", "surrogatepass"))]
        parts = [*script, *job.files]
        try:
            package = self._sealed(b"".join(content for _, content in parts))
            stdin, self.feed = self._pipe() if duplex else (self._sealed(job.stdin), -1)
            if duplex:
                os.set_blocking(self.feed, False)
            self.stdout, to_stdout = self._pipe()
            self.stderr, to_stderr = self._pipe()
            if server.two_users:
                os.fchown(to_stdout, PAYLOAD_USER, PAYLOAD_USER)  # so that a program may open /dev/stdout
                os.fchown(to_stderr, PAYLOAD_USER, PAYLOAD_USER)
            self.given = [package, stdin, to_stdout, to_stderr]
            if binary:
                self.given.append(self._sealed(binary))
        except OSError:
            self.close()
            raise
        header = {
            "parts": [[name, len(content)] for name, content in parts],
            "disk_mb": job.limits.disk_mb,
            "files": job.limits.files,
            "limits": _process_limits(job, bool(binary), server, grouped),
        }
        self.header = marshal.dumps(header)

    def handed_over(self) -> None:
        """Close what the other side now has."""
        for descriptor in self.given:
            self._shut(descriptor)

    def close_feed(self) -> None:
        self._shut(self.feed)
        self.feed = -1

    def close(self) -> None:
        for descriptor in list(self.opened):
            self._shut(descriptor)

    def _shut(self, descriptor: int) -> None:
        self.opened.remove(descriptor)
        os.close(descriptor)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe2(os.O_CLOEXEC)
        self.opened += ends
        return ends

    def _sealed(self, content: bytes) -> int:
        """A file without a name that nobody can change any more, also not the program that reads it."""
        descriptor = os.memfd_create("job", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.opened.append(descriptor)
        offset = 0
        while offset < len(content):
            offset += os.pwrite(descriptor, content[offset:] if offset else content, offset)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return descriptor


def _process_limits(job: Job, compiled: bool, server: Server, grouped: bool) -> list[tuple[int, int]]:
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
    if not grouped:
        bounds["RLIMIT_AS"] = memory + (64 << 20)
    elif not compiled:  # memory only reserved costs nothing, but one absurd request should fail at once
        bounds["RLIMIT_AS"] = memory + RESERVED_BYTES
    if server.isolated:  # counted per user of the user namespace: the server is another user, or the same
        bounds["RLIMIT_NPROC"] = limits.processes + (0 if server.two_users else 4)
    return [(getattr(resource, name), bound) for name, bound in bounds.items()]
