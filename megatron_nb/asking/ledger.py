"""What a job has finished, on disk: rows appended with fsync, read back by key. A kill loses only rows under way."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from megatron_nb.training.metrics import duration

log = logging.getLogger(__name__)
TELL_S = 5.0


def ledger_name(kind: str, *told: Any) -> str:
    """KIND-DIGEST of everything that decides the rows, so that a changed configuration does not meet the old ones."""
    text = json.dumps(told, sort_keys=True, default=str)
    return f"{kind}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


class Ledger:
    """folder/NAME.rank-R.jsonl, one file per rank; every rank reads the files of all ranks. A mapping of key -> row."""

    def __init__(self, folder: Path, name: str, rank: int):
        """A torn last line of an earlier attempt is cut off before anything is appended."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name, self.rows = folder, name, {}
        path = folder / f"{name}.rank-{rank}.jsonl"
        if path.exists():
            whole = path.read_bytes().rpartition(b"\n")
            os.truncate(path, len(whole[0]) + len(whole[1]))
        self._file = open(path, "ab")  # noqa: SIM115  held open while rows come
        self.read()

    def read(self) -> None:
        """Take in what other ranks have finished since."""
        for path in sorted(self.folder.glob(f"{self.name}.rank-*.jsonl")):
            for line in path.read_bytes().split(b"\n")[:-1]:
                key, row = json.loads(line)
                self.rows[key] = row

    def __contains__(self, key: str) -> bool:
        return key in self.rows

    def __getitem__(self, key: str) -> Any:
        return self.rows[key]

    def __setitem__(self, key: str, row: Any) -> None:
        """Append; on disk when this returns."""
        self._file.write(json.dumps([key, row]).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows[key] = row

    def close(self) -> None:
        self._file.close()


class Progress:
    """Says every few seconds how far something is, how fast, and how long it will take."""

    def __init__(self, name: str, total: int, done: int = 0):
        """done: of an earlier attempt; they do not count for the rate."""
        self.name, self.total, self.done, self._first = name, total, done, done
        self._began = self._told = time.monotonic()
        if done:
            log.info("%s: %d of %d are on disk already", name, done, total)

    def tick(self) -> None:
        self.done += 1
        now = time.monotonic()
        if now - self._told >= TELL_S or self.done == self.total:
            self._told = now
            rate = (self.done - self._first) / max(now - self._began, 1e-9)
            left = duration((self.total - self.done) / rate)
            log.info("%s: %d of %d, %.1f/s, left %s", self.name, self.done, self.total, rate, left)
