"""The folder side of checkpoints: names, completeness, damage, what is kept. Files only, no torch.

    runs/NAME/checkpoints/step-00000100/{core's files, config.yaml, hf/, files.json, COMPLETE}

A checkpoint is written into a hidden folder and renamed when COMPLETE, its last file, is on disk: whatever a listing
shows was finished. files.json holds size and CRC-32 of every file: a lost tail or a flipped bit, which torch would load
without a word, is known before a weight is touched.
"""
from __future__ import annotations

import json
import logging
import re
import shutil
import zlib
from pathlib import Path

from megatron_nb.run import sync

log = logging.getLogger(__name__)

COMPLETE, FILES = "COMPLETE", "files.json"


class DamagedCheckpoint(RuntimeError):
    """A complete checkpoint whose files are not those that were written."""


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def partial_folder(run: Path, step: int) -> Path:
    """Where step is written until it is complete."""
    return run / "checkpoints" / f".partial-step-{step:08d}"


def complete_steps(run: Path) -> dict[int, Path]:
    """{step: folder} of the complete checkpoints of a run, newest first."""
    folders = (run / "checkpoints").glob("step-*")
    found = {int(folder.name[5:]): folder for folder in folders if re.fullmatch(r"step-\d{8,}", folder.name)}
    return {step: found[step] for step in sorted(found, reverse=True) if (found[step] / COMPLETE).is_file()}


def newest_complete(run: Path) -> Path | None:
    """The newest complete checkpoint of a run, None when it has none."""
    return next(iter(complete_steps(run).values()), None)


def resolve(path: str | Path) -> Path | None:
    """The step folder that a run folder or a step folder means; None for anything else, such as a Hugging Face folder.

    ValueError when the path is missing, or a run or step without a complete checkpoint.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder: give a Hugging Face folder, a run, or a step-N folder of a run")
    if (path / COMPLETE).is_file():
        return path
    if re.fullmatch(r"step-\d+", path.name):
        raise ValueError(f"{path} has no file {COMPLETE}: it was not finished; take another step-N of the same run")
    if (path / "checkpoints").is_dir():
        newest = newest_complete(path)
        if newest is None:
            raise ValueError(f"{path} holds no complete checkpoint: let the run reach its first save, or give another one")
        return newest
    return None


def checksum(file: Path) -> int:
    """CRC-32 of a file's content; about 1.5 GB/s, and other threads run meanwhile."""
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def _files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name not in (COMPLETE, FILES)]


def seal(partial: Path, final: Path, checksums: dict[str, int] | None = None) -> None:
    """Make a written folder a checkpoint: files.json, data on disk, COMPLETE last, rename.

    checksums: {name: CRC-32} of files whose writers know it already.
    """
    known = checksums or {}
    names = {str(file.relative_to(partial)): file for file in _files(partial)}
    table = {name: [file.stat().st_size, known.get(name) or checksum(file)] for name, file in names.items()}
    (partial / FILES).write_text(json.dumps(table, indent=0))
    for file in (*names.values(), partial / FILES):
        sync(file)
    (partial / COMPLETE).touch()
    sync(partial / COMPLETE)
    for folder in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
        sync(folder)
    partial.rename(final)
    sync(final.parent)


def check_files(folder: Path, rank: int = 0, world: int = 1) -> None:
    """DamagedCheckpoint when a file is missing or not as it was written; `rank` of `world` reads its share of the files."""
    try:
        table = json.loads((folder / FILES).read_text())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{folder / FILES} cannot be read: {error}") from error
    for number, (name, (size, crc)) in enumerate(sorted(table.items())):
        file = folder / name
        if not file.is_file():
            raise DamagedCheckpoint(f"{file} is missing")
        if file.stat().st_size != size:
            raise DamagedCheckpoint(f"{file} has {file.stat().st_size} bytes, {size} were written")
        if number % world == rank and checksum(file) != crc:
            raise DamagedCheckpoint(f"{file} has another content than was written")


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint so that nothing takes it for a good one, and its step can be written again."""
    number = 0
    while (aside := folder.with_name(f"damaged-{folder.name}" + (f"-{number}" if number else ""))).exists():
        number += 1
    return folder.rename(aside)


def _remove(folder: Path) -> None:
    hidden = folder.with_name(f".deleting-{folder.name.lstrip('.')}")  # a half-deleted folder must not look complete
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def prune(run: Path, keep_last: int, keep_every: int | None) -> None:
    """Delete complete checkpoints beyond the newest `keep_last`, except multiples of `keep_every`."""
    for step, folder in list(complete_steps(run).items())[keep_last:]:
        if not (keep_every and step % keep_every == 0):
            _remove(folder)


def discard_unfinished(run: Path) -> None:
    """Delete what an earlier process of this run left half written or half deleted. Only when no save is under way."""
    for pattern in (".partial-*", ".deleting-*"):
        for folder in (run / "checkpoints").glob(pattern):
            log.warning("removing %s, which an earlier process did not finish", folder)
            shutil.rmtree(folder, ignore_errors=True)
