"""What goes into the sandbox and what comes out: one run of one program."""

from __future__ import annotations

from dataclasses import dataclass, field

LONGEST_S = 86400.0
MOST_MB = 1 << 30


@dataclass(frozen=True)
class Limits:
    """Bounds of one run. They hold for the sum over all processes of the program. ValueError for what no run can have."""

    time_s: float = 10.0  # of CPU, and of the clock without the time spent waiting for a core
    memory_mb: int = 512
    output_bytes: int = 1 << 20  # of stdout; stderr is cut, not judged
    processes: int = 16
    disk_mb: int = 64  # of /tmp
    files: int = 4096  # inodes of /tmp

    def __post_init__(self) -> None:
        if isinstance(self.time_s, bool) or not isinstance(self.time_s, (int, float)) or not 0 < self.time_s <= LONGEST_S:
            raise ValueError(f"time_s={self.time_s!r} must be seconds, above 0 and at most {LONGEST_S:.0f}")
        for name in ("memory_mb", "disk_mb"):
            value = getattr(self, name)
            if type(value) is not int or not 0 < value <= MOST_MB:
                raise ValueError(f"{name}={value!r} must be a whole number of MB, above 0 and at most {MOST_MB}")

    @property
    def deadline_s(self) -> float:
        """Seconds of the clock after which the run is ended whatever the machine was doing."""
        return 2 * self.time_s + 1.0


@dataclass(frozen=True)
class Job:
    """One run of one program."""

    source: str
    language: str = "python"  # python | cpp
    stdin: bytes = b""
    limits: Limits = field(default_factory=Limits)
    files: tuple[tuple[str, bytes], ...] = ()  # (name, content) placed read-only in the working folder


STATUSES = ("ok", "runtime error", "time limit", "memory limit", "output limit", "compile error", "infrastructure")


@dataclass
class Execution:
    """How a run ended."""

    status: str  # one of STATUSES; ok: exit code 0
    stdout: bytes = b""
    stderr: bytes = b""  # its end
    exit_code: int | None = None  # negative: killed by that signal
    cpu_s: float = 0.0  # user and system time of all processes
    wall_s: float = 0.0
    peak_memory_mb: float = 0.0
    detail: str = ""  # which bound, which signal, or what is wrong with the sandbox
    isolation: str = ""  # bubblewrap+cgroup | bubblewrap | none
