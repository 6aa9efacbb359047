"""Time complexities that were measured, by program: in memory, and in a file where one is named."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from megatron_nb.sandbox.complexity import Estimate


class Estimates:
    """key -> {"complexity", "confidence", "reason"}; the file has a line for each, and several processes may append to it."""

    def __init__(self, path: Path | None):
        self._path, self._found = path, {}
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the last line of a process that was killed: measured again
            self._found[row.pop("key")] = row

    @staticmethod
    def key(*question: str) -> str:
        return hashlib.sha256("\0".join(question).encode()).hexdigest()[:32]

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._found[key]

    def add(self, key: str, estimate: Estimate) -> None:
        """Keep an estimate; the first one of a key stays, also when several were waited for at once."""
        if key in self._found:
            return
        self._found[key] = {"complexity": estimate.complexity, "confidence": estimate.confidence, "reason": estimate.reason}
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key} | self._found[key]) + "\n")
