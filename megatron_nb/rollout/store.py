"""Rollouts on disk: what is finished survives a kill, and what a step was trained on can be looked at.

    runs/NAME/rollouts/pending/LABEL.replica-R.jsonl   appended with fsync while a batch is collected; label: step-00000012
              rollouts/step-N.jsonl                    a line for every row, written atomically at the end of step N
              rollouts/heldout-N.jsonl                 the answers to the held-out prompts after step N
              rollouts/trace-LABEL.replica-R.jsonl     what happened in the episodes of an agent, see trace.py

A row is the fields of Rollout with its score nested; floats keep every bit. A step's row also has "prompt", the messages,
and "ratio", trainer over engine by token, where the trainer gave it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_nb.records import Group, Rollout, Score, Turn
from megatron_nb.rollout.trace import append
from megatron_nb.run import sync, write_atomic

log = logging.getLogger(__name__)


def rollout_row(rollout: Rollout) -> dict[str, Any]:
    """The rollout as plain JSON values; `rollout_of` gives it back exactly."""
    row = {field.name: getattr(rollout, field.name) for field in dataclasses.fields(rollout)}  # asdict would copy every token
    row["turns"] = [dataclasses.asdict(turn) for turn in rollout.turns]
    row["score"] = None if rollout.score is None else dataclasses.asdict(rollout.score)
    return row


def rollout_of(row: dict[str, Any]) -> Rollout:
    """The rollout of a row; keys a row has besides the fields are left alone."""
    given = {field.name: row[field.name] for field in dataclasses.fields(Rollout) if field.name in row}
    given["turns"] = [Turn(**turn) for turn in row["turns"]]
    given["score"] = None if row.get("score") is None else Score(**row["score"])
    return Rollout(**given)


def step_file(folder: Path, step: int, kind: str = "step") -> Path:
    """rollouts/step-N.jsonl of a run folder; kind "heldout" for the answers to held-out prompts."""
    return Path(folder) / "rollouts" / f"{kind}-{step:08d}.jsonl"


def write_step(folder: Path, step: int, groups: list[Group], kind: str = "step",
               ratios: dict[str, Sequence[float]] | None = None) -> Path:  # fmt: skip
    """Write the groups of a step atomically. ratios: rollout_id/segment -> ratio of every token of `ids`."""
    path, lines = step_file(folder, step, kind), []
    for group in groups:
        for rollout in group.rollouts:
            row = {"step": step, "prompt": group.prompt.conversation.messages, **rollout_row(rollout)}
            ratio = (ratios or {}).get(f"{rollout.rollout_id}/{rollout.segment}")
            lines.append(json.dumps(row if ratio is None else row | {"ratio": list(ratio)}) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(lines))
    return path


def read_step(folder: Path, step: int, kind: str = "step") -> list[Rollout]:
    """The rollouts of a step, in order. FileNotFoundError when the step has no file."""
    return [rollout_of(json.loads(line)) for line in step_file(folder, step, kind).read_text().splitlines()]


class Journal:
    """What one replica has finished of one batch: an append-only file; every leader also reads the files of the others.

    Whoever holds it may be killed at any moment: a row is there whole or not at all.
    """

    def __init__(self, folder: Path, label: str, replica: int):
        """folder: that of the run. A torn last line of an earlier attempt is cut off before anything is appended."""
        self.folder = Path(folder) / "rollouts" / "pending"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rollouts: dict[tuple[str, int], list[Rollout]] = {}  # (group_id, index) -> rows, score not filled in
        self._scores: dict[str, tuple[str, list[Score]]] = {}  # group_id -> (digest of what was scored, scores)
        for path in sorted(self.folder.glob(f"{label}.replica-*.jsonl")):
            self._take(path)
        path = self.folder / f"{label}.replica-{replica}.jsonl"
        _cut_torn_line(path)
        self._file = open(path, "ab")  # noqa: SIM115  held open while the batch is collected
        sync(self.folder)  # a new file's name must survive a power cut too
        # what happened in each episode of an agent, for people; see trace.py
        self.trace = partial(append, self.folder.parent / f"trace-{label}.replica-{replica}.jsonl")

    def add_rollout(self, rows: list[Rollout]) -> None:
        """Append all rows of a finished episode; they are on disk when this returns, all or none."""
        self._append({"rows": [rollout_row(row) for row in rows]})

    def add_scores(self, rollouts: list[Rollout], scores: list[Score]) -> None:
        """Append the scores of a whole group, one for each episode; they are on disk when this returns."""
        rows = [dataclasses.asdict(score) for score in scores]
        self._append({"group_id": rollouts[0].group_id, "digest": _digest(rollouts), "scores": rows})

    def scores_of(self, rollouts: list[Rollout]) -> list[Score] | None:
        """The scores of exactly these rollouts of a group; None when there are none."""
        digest, scores = self._scores.get(rollouts[0].group_id, ("", []))
        return scores if digest == _digest(rollouts) else None

    def close(self) -> None:
        self._file.close()

    def _take(self, path: Path) -> None:
        for row in _whole_rows(path):
            if "rows" in row:
                rows = [rollout_of(its) for its in row["rows"]]
                self.rollouts[rows[0].group_id, rows[0].index] = rows
            else:
                self._scores[row["group_id"]] = row["digest"], [Score(**score) for score in row["scores"]]

    def _append(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def forget(folder: Path, until: int | None, kinds: tuple[str, ...] = ("step", "heldout")) -> None:
    """Remove the pending files up to a number (None: all): those of steps that a checkpoint has behind it."""
    for path in (Path(folder) / "rollouts" / "pending").glob("*.replica-*.jsonl"):
        kind, _, number = path.name.split(".")[0].rpartition("-")
        if kind in kinds and (until is None or int(number) <= until):
            path.unlink(missing_ok=True)


def label(kind: str, number: int) -> str:
    """How a batch's pending files are called."""
    return f"{kind}-{number:08d}"


def _digest(rollouts: list[Rollout]) -> str:
    told = [(rollout.index, rollout.segment, rollout.ids) for rollout in rollouts]
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=8).hexdigest()


def _whole_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a pending file; a last line without its end was being written when the job was killed, and does not count."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError:
                log.warning("%s:%d is damaged and does not count: it is generated again", path, number)


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with open(path, "r+b") as file:
        end, block = file.seek(0, os.SEEK_END), 1 << 16
        while end > 0:
            start = max(0, end - block)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        file.truncate(end)
        os.fsync(file.fileno())
