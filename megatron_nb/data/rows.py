"""Files of rows: JSON lines, JSON arrays and Parquet, plain or gzipped. Every row knows the file and line it stands in."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
SKIP_REMEDY = "mend the row, or leave such rows out with data.bad_rows=skip"


class BadRow(ValueError):
    """One row breaks a rule. The message names file, line, value found, rule and remedy."""

    @classmethod
    def at(cls, where: str, found: str, rule: str, remedy: str = SKIP_REMEDY) -> BadRow:
        return cls(f"{where}: {found}: {rule}; {remedy}")


def data_files(path: str) -> list[Path]:
    """The files that `path` (a file, a folder or a glob) names, sorted."""
    given = Path(path).expanduser()
    if given.is_file():
        found = [given]
    elif given.is_dir():
        found = sorted(file for file in given.rglob("*") if file.name.endswith(SUFFIXES))
    else:
        pattern = given.relative_to(given.anchor)
        found = sorted(file for file in Path(given.anchor or ".").glob(str(pattern)) if file.name.endswith(SUFFIXES))
    if not found:
        raise ValueError(
            f"path={path!r} names no data file: a file, folder or glob of {', '.join(SUFFIXES)} is needed; check the path"
        )
    for file in found:
        if not file.name.endswith(SUFFIXES):
            raise ValueError(f"{file}: unknown kind of file: {', '.join(SUFFIXES)} can be read; convert or rename it")
    return found


def raw_rows(file: Path) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    """(where, row) of each row: undecoded JSON lines as bytes (decoding is left to the workers), other kinds as objects.

    Raises ValueError for an empty or a broken file.
    """
    count = 0
    try:
        for line, raw in _parquet_rows(file) if file.name.endswith(".parquet") else _json_rows(file):
            count += 1
            yield f"{file}:{line}", raw
    except (EOFError, OSError) as error:  # gzip reports damage as either
        raise ValueError(
            f"{file}: cannot be read to its end ({error}): the file is damaged or cut off; write it again"
        ) from error
    if not count:
        raise ValueError(f"{file}: the file is empty: at least one row is needed; remove the file or take it out of the path")


def _json_rows(file: Path) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
    with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as stream:
        first = next((line for line in stream if line.strip()), b"")
        stream.seek(0)
        # A .json file is an array, or (as many published ones are) JSON lines under another name.
        if file.name.removesuffix(".gz").endswith(".json") and first.lstrip().startswith(b"["):
            try:
                rows = json.loads(stream.read())
            except ValueError as error:
                raise ValueError(f"{file}: malformed JSON array ({error}): write it again, or as one object a line") from error
            yield from enumerate(rows, 1)
            return
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield number, line


def _parquet_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file}: not a Parquet file ({error}): write it again") from error
    number = 0
    for batch in table.iter_batches(batch_size=256):
        for row in batch.to_pylist():
            number += 1
            yield number, without_none(row)


def without_none(value: Any) -> Any:
    """The value without keys that are None: Parquet gives every row the union of all rows' keys."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value


def decode(where: str, raw: bytes | dict[str, Any]) -> dict[str, Any]:
    """The row as an object. Raises BadRow for malformed JSON, text that is not UTF-8, and rows that are no objects."""
    if isinstance(raw, bytes):
        try:
            raw = json.loads(raw)
        except ValueError as error:
            shown = raw.strip()[:60].decode(errors="replace")
            raise BadRow.at(where, f"malformed JSON ({error}) in {shown!r}", "each line is one JSON object") from error
    if not isinstance(raw, dict):
        raise BadRow.at(where, f"found a {type(raw).__name__}", "each row is one JSON object")
    return raw
