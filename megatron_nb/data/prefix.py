"""A prompt that many rows begin with is computed once: rows of a group -> one prefix document and the documents behind it.

The rows of a group share their prompt. Laid out as [prompt without its last token][its last token, answer 1][its last token,
answer 2] ..., with every answer attending to the prompt and to itself, the arithmetic of the prompt is done once instead of
once an answer; log-probs and gradients are those of the whole rows. The prompt's last token stays with each answer, since it
predicts the answer's first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_nb.records import STREAMS, Sample


def units(samples: Sequence[Sample], max_tokens: int, share: bool = True) -> list[list[Sample]]:
    """Lists of documents that must follow one another in a pack, in the order of the samples' groups.

    max_tokens: of a unit that holds more than one row; a longer group is several units, each with its own prefix.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id or f"alone/{sample.sample_id}", []).append(sample)
    found: list[list[Sample]] = []
    for rows in groups.values():
        length = common_prefix(rows) if share and len(rows) > 1 else 0
        found += _units_of(rows, length, max_tokens) if length else [[row] for row in rows]
    return found


def common_prefix(rows: Sequence[Sample]) -> int:
    """Tokens that every row begins with and none trains on, less the one that predicts the first trained token."""
    length = min(int(np.argmax(row.loss_weight != 0)) if np.any(row.loss_weight) else len(row) for row in rows) - 1
    for row in rows[1:]:
        differs = np.flatnonzero(rows[0].ids[: max(length, 0)] != row.ids[: max(length, 0)])
        length = int(differs[0]) if len(differs) else length
    return max(length, 0)


def _units_of(rows: Sequence[Sample], length: int, max_tokens: int) -> list[list[Sample]]:
    found: list[list[Sample]] = []
    room = 0
    for row in rows:
        if len(row) - length > room:
            found.append([replace(_cut(row, slice(None, length)), sample_id="", count=0)])
            room = max_tokens - length
        found[-1].append(replace(_cut(row, slice(length, None)), prefix=length))
        room -= len(row) - length
    return found


def _cut(row: Sample, part: slice) -> Sample:
    streams = {name: None if (stream := getattr(row, name)) is None else stream[part] for name in STREAMS}
    return replace(row, ids=row.ids[part], **streams)
