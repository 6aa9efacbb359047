"""How far a long piece of work is, how fast it goes and how long it will take; told to the log every few seconds."""

from __future__ import annotations

import logging
import resource
import time
from pathlib import Path

log = logging.getLogger(__name__)
TELL_S = 5.0


class Progress:
    """at(done): how far it is. done and total are of any one unit; documents are what the rate counts."""

    def __init__(self, name: str, total: float):
        self.name, self.total, self._first = name, total, None
        self.began = self._told = time.monotonic()
        self.documents = 0

    def at(self, done: float, documents: int) -> None:
        """documents: finished since the last call. The first call says where this attempt begins, more or less."""
        self._first = done if self._first is None else self._first
        self.documents += documents
        now = time.monotonic()
        if now - self._told >= TELL_S:
            self._told = now
            self._tell(done, now)

    def end(self) -> float:
        """Seconds that it took."""
        now = time.monotonic()
        self._tell(self.total, now)
        return now - self.began

    def _tell(self, done: float, now: float) -> None:
        seconds = max(now - self.began, 1e-9)
        first = self._first or 0.0
        left = (self.total - done) * seconds / max(done - first, 1e-9) if done > first else float("nan")
        share = 100 * done / self.total if self.total else 100.0
        log.info("%s: %.1f %%, %d documents in %s, %.0f/s, left %s, memory %d MB", self.name, share, self.documents,
                 duration(seconds), self.documents / seconds, duration(left), peak_mb())  # fmt: skip


def duration(seconds: float) -> str:
    """2 h 05 min, 3 min 20 s, 12 s"""
    if seconds != seconds:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def peak_mb() -> int:
    """The largest resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage says may be of the process that started this one
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) >> 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
