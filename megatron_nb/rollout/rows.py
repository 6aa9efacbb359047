"""The rows of one episode as they grow: ids and, for each of them, mask, log-prob, version and turn.

A row is an exact prefix of what the engine saw next, until the context is cut: then a new row begins, whose prompt is the
context as it is now, and whose own ids begin with what is new in it. Every turn stands in one row only.
"""

from __future__ import annotations

from typing import Any

from megatron_nb.records import Rollout, Turn
from megatron_nb.rollout.engine import Completion


class Rows:
    """ids: the whole context, that is prompt and ids of the last row; it only grows, so an engine may be given it as it is."""

    def __init__(self, prompt_ids: list[int], sampling: dict[str, Any], seed: int, group_id: str, index: int):
        self._names = {"sampling": sampling, "seed": seed, "group_id": group_id, "index": index}
        self.rows: list[Rollout] = []
        self.sampled_turns = 0
        self.open(list(prompt_ids))

    @property
    def row(self) -> Rollout:
        """The row that grows."""
        return self.rows[-1]

    def open(self, prompt_ids: list[int]) -> None:
        """Begin a row; the list of ids is its own from now on."""
        self.ids = list(prompt_ids)
        fields = {"ids": [], "sampled_mask": [], "logprob": [], "weight_version": [], "turn_id": [], "turns": []}
        self.rows.append(Rollout(prompt_ids, **fields, status="", segment=len(self.rows), **self._names))

    def begin(self) -> int:
        """Begin an assistant turn. Its number in the episode, from 1."""
        self.row.turns.append(Turn(len(self.row.ids), len(self.row.ids), "assistant"))
        self.sampled_turns += 1
        return self.sampled_turns

    def sampled(self, completion: Completion) -> None:
        """Append what was sampled to the turn."""
        count = len(completion.ids)
        assert len(completion.logprobs) == len(completion.versions) == count, "an engine's completion has one value per token"
        self._extend(completion.ids, True, completion.logprobs, completion.versions)

    def add_results(self, ids: list[int], status: str) -> None:
        """Append a tool turn."""
        self.row.turns.append(Turn(len(self.row.ids), len(self.row.ids) + len(ids), "tool", status=status))
        self._extend(ids, False, [0.0] * len(ids), [-1] * len(ids))

    def _extend(self, ids: list[int], sampled: bool, logprobs: list[float], versions: list[int]) -> None:
        row = self.row
        self.ids += ids
        row.ids += ids
        row.sampled_mask += [sampled] * len(ids)
        row.logprob += logprobs
        row.weight_version += versions
        row.turn_id += [len(row.turns) - 1] * len(ids)

    @property
    def turn_ids(self) -> list[int]:
        """Ids of the last turn."""
        return self.row.ids[self.row.turns[-1].start :]

    def end(self, status: str) -> list[Rollout]:
        """The rows; how the episode ended is written into each."""
        for row in self.rows:
            row.status = status
        return self.rows
