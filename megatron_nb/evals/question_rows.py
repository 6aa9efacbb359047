"""Questions with short answers, in the forms that search and agent benchmarks come in.

    rows        {"question" or "prompt", "answer" (one or several), "aliases"?, "level"?}: NQ-open, HotpotQA, our own
    gaia        {"task_id", "Question", "Final answer", "Level", "file_name"}; those with a file are left out, and counted
    browsecomp  CSV of problem, answer, canary: base64 of the text XOR SHA-256 of the canary, repeated
    xbench      CSV or rows of id, prompt, answer, canary: base64 of the text XOR the canary itself, repeated
    seal0       {"question", "answer", "topic", "freshness", ...} (SealQA)

gold: {"answer": [accepted], "level": text, "question": text}. Decrypted texts are never written anywhere but outcomes.
"""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_nb.data.rows import BadRow, data_files, decode, raw_rows
from megatron_nb.evals.task import Item
from megatron_nb.rewards.text import spellings

FORMS = ("rows", "gaia", "browsecomp", "xbench", "seal0")
FIELDS = {  # form -> (names of the question, of the answer, of the id, of the level); the first that a row has
    "rows": (("question", "prompt", "problem"), "answer", ("id", "_id"), ("level", "type", "category")),
    "gaia": (("Question",), "Final answer", ("task_id",), ("Level",)),
    "browsecomp": (("problem",), "answer", ("id",), ("problem_topic",)),
    "xbench": (("prompt",), "answer", ("id",), ("type",)),
    "seal0": (("question",), "answer", ("id",), ("freshness", "topic")),
}
REMEDY = "mend the row, or choose the right `form`"

log = logging.getLogger(__name__)


def read_questions(path: str, form: str) -> Iterator[Item]:
    """The questions as items whose prompt is the bare question. Raises BadRow, ValueError."""
    files, without = [Path(path)] if path.endswith(".csv") else data_files(path), 0
    asking, answer, ids, levels = FIELDS[form]
    for file in files:
        for number, (where, row) in enumerate(_rows(file)):
            if form == "gaia" and row.get("file_name"):
                without += 1
                continue
            key = next((name for name in asking if row.get(name)), None)
            if key is None or row.get(answer) in (None, "", []):
                raise BadRow.at(where, f"found {', '.join(row)}", f"a row of form {form} has {asking[0]} and {answer}", REMEDY)
            if form in ("browsecomp", "xbench"):
                row = _readable(row, (key, answer), form, where)
            accepted = spellings(row, answer)
            name = next((str(row[name]) for name in ids if row.get(name) not in (None, "")), f"{file.name}:{number}")
            level = next((str(row[name]) for name in levels if row.get(name)), "")
            asked = str(row[key])
            gold = {"answer": accepted, "level": level, "question": asked}
            yield Item(name, [{"role": "user", "content": asked}], gold)
    if without:
        log.info("%s: %d questions come with a file and are left out", path, without)


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if file.suffix != ".csv":
        yield from ((where, decode(where, raw)) for where, raw in raw_rows(file))
        return
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read ({error}): a CSV file in UTF-8 is needed") from error
    for number, row in enumerate(csv.DictReader(io.StringIO(text, newline="")), 1):
        yield f"{file}:row {number}", {key: value for key, value in row.items() if key}


def _readable(row: dict[str, Any], keys: tuple[str, ...], form: str, where: str) -> dict[str, Any]:
    """The row with its texts decrypted; one without a canary is in the clear."""
    if not row.get("canary"):
        return row
    try:
        return row | {key: decrypt(row[key], row["canary"], form) for key in keys}
    except (binascii.Error, UnicodeDecodeError, TypeError) as error:
        raise BadRow.at(where, f"it cannot be decrypted by its canary ({error})", f"form {form} hides it by XOR, in base64",
                        REMEDY) from error  # fmt: skip


def decrypt(text: str, canary: str, form: str) -> str:
    """The text in the clear. Raises binascii.Error, UnicodeDecodeError."""
    key = hashlib.sha256(canary.encode()).digest() if form == "browsecomp" else canary.encode()
    return _xor(base64.b64decode(text, validate=True), key).decode()


def encrypt(text: str, canary: str, form: str) -> str:
    """The inverse of `decrypt`: for sets of your own that no crawler should read."""
    key = hashlib.sha256(canary.encode()).digest() if form == "browsecomp" else canary.encode()
    return base64.b64encode(_xor(text.encode(), key)).decode()


def _xor(data: bytes, key: bytes) -> bytes:
    return bytes(byte ^ key[place % len(key)] for place, byte in enumerate(data))
