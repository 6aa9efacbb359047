"""Time complexities that were measured, by program: in memory, and in a file where one is named."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from megatron_nb.sandbox.complexity import Estimate


class Estimates:
    """key -> {"complexity", "confidence", "reason"}; the file has a line for each, and several processes may append to it.

    Raises ValueError for a file that cannot be written, or that holds something else.
    """

    def __init__(self, path: Path | None):
        self._path, self._found = path, {}
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:  # what cannot be kept is told before anything is measured
                file.seek(0)
                text = file.read()
                if text and not text.endswith(b"\n"):
                    file.write(b"\n")  # ends the line of a process that was killed, so that the next one stands alone
        except OSError as error:
            raise ValueError(f"estimates={str(path)!r} cannot be written ({error}): name a file where there is room") from error
        for number, line in enumerate(text.splitlines(), 1):
            try:
                row = json.loads(line)
            except ValueError:
                continue  # of a process that was killed: measured again
            if not isinstance(row, dict) or not {"key", "complexity", "confidence", "reason"} <= row.keys():
                raise ValueError(f"{path}:{number} is no measured class ({line[:60]!r}): name another file")
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
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key} | self._found[key]) + "\n")
