"""A hang ends itself: a rank that makes no step for too long writes down where its threads are and leaves for a restart.

Every rank has one. In a hang of some ranks the others wait in a collective, so all of them meet their limit together and the
stacks of all are in RUN/logs/attempt-K/stacks-rank-R.txt.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import statistics
import threading
import time
from pathlib import Path

log = logging.getLogger(__name__)
HANG_EXIT = 86
RECENT = 50  # steps that the median is taken over
LOOKS = 20  # times that a limit is looked at before it is reached


class Watchdog:
    """Started by the first `beat`. limit = max(least_s, factor * median seconds of a step).

    factor: 0 switches it off. A context manager: leaving it stops the watch.
    """

    def __init__(self, stacks: Path, factor: float, least_s: float):
        self.stacks, self.factor, self.least_s = stacks, factor, least_s
        self._steps: list[float] = []
        self._last: float | None = None  # step
        self._alive = 0.0  # the last sign of life, a step or a part of one
        self._over = threading.Event()

    @property
    def limit_s(self) -> float:
        median = statistics.median(self._steps) if self._steps else 0.0
        return max(self.least_s, self.factor * median)

    def beat(self) -> None:
        """A step is done."""
        now = time.monotonic()
        if self._last is not None:
            self._steps = [*self._steps[1 - RECENT :], now - self._last]
        elif self.factor:
            self._alive = now  # before the thread looks at it
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        self._last = self._alive = now

    def alive(self) -> None:
        """A part of a step is done. Nothing before the first `beat`."""
        if self._last is not None:
            self._alive = time.monotonic()

    def _watch(self) -> None:
        while not self._over.wait(self.limit_s / LOOKS):
            waited = time.monotonic() - self._alive
            if waited > self.limit_s:
                self._leave(waited)

    def _leave(self, waited: float) -> None:
        log.error(
            "no step, and no part of one, for %.0f s, more than %.0f s (launch.hang_factor=%g times the median, at least "
            "launch.hang_least_s or what its time-outs allow, %g): the stacks of this rank are in %s; leaving for a restart "
            "from the last checkpoint",
            waited, self.limit_s, self.factor, self.least_s, self.stacks,
        )  # fmt: skip
        with open(self.stacks, "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.flush()
            os.fsync(file.fileno())
        os._exit(HANG_EXIT)  # the main thread waits somewhere that no exception reaches

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *exception) -> None:
        self._over.set()
