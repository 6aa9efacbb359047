"""What a long conversion says while it runs: share done, rate, time left, peak anonymous memory."""
from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

GB = 1e9


def anonymous_memory() -> int:
    """Bytes of this process that no file backs: mapped weights do not count, copies do. 0 where /proc does not tell."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.is_file() else ():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


class Meter:
    """`with Meter("import", total_bytes) as meter: meter.add(bytes)` prints to stderr; .peak is sampled 50 times a second."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done, self.peak = what, max(total, 1), 0, 0
        self.begin, self.end, self._printed = time.monotonic(), None, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, kind, *rest) -> None:
        self.end = time.monotonic()
        self._stop.set()
        self._thread.join()
        if kind is None:
            self._say(last=True)

    @property
    def seconds(self) -> float:
        """Since the start, or the whole time when it is over."""
        return (self.end or time.monotonic()) - self.begin

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, anonymous_memory())
            if self._stop.wait(0.02):
                return

    def add(self, size: int) -> None:
        self.done += size
        every = 0.2 if sys.stderr.isatty() else 5.0
        if time.monotonic() - self._printed > every:
            self._printed = time.monotonic()
            self._say()

    def _say(self, last: bool = False) -> None:
        rate = self.done / max(self.seconds, 1e-9)
        left = f"{(self.total - self.done) / max(rate, 1):.0f} s left" if not last else f"{self.seconds:.1f} s"
        text = (
            f"{self.what}: {self.done / GB:.2f} of {self.total / GB:.2f} GB ({100 * self.done / self.total:.0f} %), "
            f"{rate / GB:.2f} GB/s, {left}, peak anonymous memory {self.peak / GB:.2f} GB"
        )
        print(text, file=sys.stderr, end="\n" if last or not sys.stderr.isatty() else "\r", flush=True)
