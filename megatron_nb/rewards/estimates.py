"""Time complexities that were measured, by program: in memory, and in a file where one is named."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from megatron_nb.rewards.witness import without_claims
from megatron_nb.sandbox.complexity import Estimate

log = logging.getLogger(__name__)


class Estimates:
    """key -> {"complexity", "confidence", "reason"}. The file has a line for each and may be appended to by several processes."""

    def __init__(self, path: Path | None):
        self._path, self._found = path, {}
        if path is not None and path.exists():
            for line in path.read_text().split("\n"):
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # the last line of a process that was killed, or the empty end
                self._found[row.pop("key")] = row

    @staticmethod
    def key(source: str, function: str, generator: str) -> str:
        """Equal for programs that differ in comments, docstrings and layout alone."""
        return hashlib.sha256("\0".join((without_claims(source), function, generator)).encode()).hexdigest()[:32]

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._found[key]

    def __len__(self) -> int:
        return len(self._found)

    def add(self, key: str, estimate: Estimate) -> None:
        row = {"complexity": estimate.complexity, "confidence": estimate.confidence, "reason": estimate.reason}
        self._found[key] = row
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key} | row) + "\n")
