"""Files shared by many processes: locks that die with their holder, digests that are computed once."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def file_digests(files: list[Path], folder: Path) -> list[str]:
    """Hex digest of each file's content, remembered in `folder` by path, size and times of change."""
    memory = folder / "digests.json"
    states = {str(file.resolve()): file.stat() for file in files}
    stamps = {path: [state.st_size, state.st_mtime_ns, state.st_ctime_ns] for path, state in states.items()}

    def known() -> dict[str, Any]:
        return json.loads(memory.read_text()) if memory.exists() else {}

    def fresh(remembered: dict[str, Any]) -> bool:
        return all(remembered.get(path, [None])[:-1] == stamp for path, stamp in stamps.items())

    remembered = known()
    if not fresh(remembered):
        with locked(folder / "digests.lock"):
            remembered = known()
            for path, stamp in stamps.items():
                if remembered.get(path, [None])[:-1] != stamp:
                    with open(path, "rb") as stream:
                        remembered[path] = [*stamp, hashlib.file_digest(stream, "sha256").hexdigest()]
            temporary = folder / "digests.json.new"
            temporary.write_text(json.dumps(remembered))
            temporary.rename(memory)
    return [remembered[path][-1] for path in stamps]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the file's lock. The kernel releases it when the process dies, however that happens."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that holds %s", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise ValueError(
                f"{path}: the file system has no locks ({error}): ranks share the cache by them; set data.cache_dir elsewhere"
            ) from error
        yield
