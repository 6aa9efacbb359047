"""The token cache on disk: shards that are mapped into memory, built once, under a key of everything that matters.

CACHE_DIR/NAME-KEY/index.json            written last; its presence says that the cache is complete
CACHE_DIR/NAME-KEY/00000/ids.npy         [tokens] uint32
                         rows.npy        [n, 5] int64: first token, length, first span, one past the last, trained tokens
                         spans.npy       [m, 4] int64: first token, one past the last, turn, weight (as render.Rendered)
                         names.json      sample ids
                         shard.json      counts and digest
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_nb.data.render import Rendered
from megatron_nb.records import Sample

COUNTS = ("rows", "samples", "tokens", "trained", "skipped", "untrained", "stripped")


def write_shard(folder: Path, rendered: list[Rendered], counts: dict[str, Any]) -> None:
    """Writes the shard's files into `folder`, which exists; `counts` is stored with what the tokens themselves tell."""
    lengths = np.array([len(row.ids) for row in rendered], np.int64)
    spans = np.array([len(row.spans) for row in rendered], np.int64)
    trained = np.array([_trained(row.spans, len(row.ids)) for row in rendered], np.int64)
    first, first_span = np.cumsum(lengths) - lengths, np.cumsum(spans) - spans
    files = {
        "ids": np.concatenate([row.ids for row in rendered] or [np.empty(0)]).astype(np.uint32),
        "rows": np.stack([first, lengths, first_span, first_span + spans, trained], axis=1),
        "spans": np.concatenate([row.spans for row in rendered] or [np.empty((0, 4))]).astype(np.int64),
    }
    digest = hashlib.sha256()
    for name, array in files.items():
        np.save(folder / f"{name}.npy", array)
        digest.update(np.ascontiguousarray(array))
    names = [row.sample_id for row in rendered]
    (folder / "names.json").write_text(json.dumps(names))
    digest.update(json.dumps(names).encode())
    untrained = [name for name, count in zip(names, trained) if not count]
    stored = counts | {
        "samples": len(rendered),
        "tokens": int(lengths.sum()),
        "trained": int(trained.sum()),
        "untrained": len(untrained),
        "untrained_names": untrained[:5],
        "stripped": sum(row.stripped for row in rendered),
        "max_id": int(files["ids"].max(initial=0)),
        "digest": digest.hexdigest(),
    }
    (folder / "shard.json").write_text(json.dumps(stored))


def write_index(folder: Path, shards: list[dict[str, Any]], key: dict[str, Any]) -> dict[str, Any]:
    """The index that completes a cache: sums of the shards' counts, a digest of the content, the key it was built under."""
    index: dict[str, Any] = {name: sum(shard[name] for shard in shards) for name in COUNTS}
    index["untrained_names"] = [name for shard in shards for name in shard["untrained_names"]][:5]
    index["skipped_examples"] = [text for shard in shards for text in shard["skipped_examples"]][:5]
    index["max_id"] = max((shard["max_id"] for shard in shards), default=0)
    index["digest"] = hashlib.sha256("".join(shard["digest"] for shard in shards).encode()).hexdigest()
    index["shards"], index["key"] = len(shards), key
    temporary = folder / "index.json.new"
    temporary.write_text(json.dumps(index, indent=1))
    temporary.rename(folder / "index.json")
    return index


def _trained(spans: np.ndarray, length: int) -> int:
    """Trained tokens among the first `length`, without token 0, which nothing predicts."""
    start, stop = np.clip(spans[:, 0], 1, length), np.clip(spans[:, 1], 1, length)
    return int(((stop - start) * spans[:, 3]).sum())


class TokenCache:
    """A complete cache of one source, read from mapped files. Pickles as its folder, so workers open it themselves."""

    def __init__(self, folder: Path, source: str):
        self.folder, self.source = folder, source
        self.index: dict[str, Any] = json.loads((folder / "index.json").read_text())
        shards = range(self.index["shards"])
        rows = [np.load(self._shard(shard) / "rows.npy") for shard in shards]
        self._first = np.cumsum([0, *map(len, rows)])  # first sample of each shard
        self.lengths = np.concatenate([part[:, 1] for part in rows]).astype(np.int32)  # [n] tokens of each sample
        self._trained = np.concatenate([part[:, 4] for part in rows]).astype(np.int32)
        self._open: dict[int, dict[str, np.ndarray]] = {}
        self._names: dict[int, list[str]] = {}

    def __reduce__(self) -> tuple:
        return TokenCache, (self.folder, self.source)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def digest(self) -> str:
        """Hex digest of all tokens, masks and sample ids, in order."""
        return self.index["digest"]

    def trained(self, limit: int) -> np.ndarray:
        """[n] int32 trained tokens of each sample among its first `limit`."""
        counts = self._trained.copy()
        for row in np.flatnonzero(self.lengths > limit):
            counts[row] = _trained(self._parts(int(row))[1], limit)
        return counts

    def first_beyond(self, vocab_size: int) -> tuple[str, int] | None:
        """(sample id, token) of the first token that a vocabulary of this size does not have."""
        if self.index["max_id"] < vocab_size:
            return None
        for row in range(len(self)):
            ids = self._parts(row)[0]
            if ids.max() >= vocab_size:
                return self.name(row), int(ids[ids >= vocab_size][0])
        raise AssertionError("the index says that there is one")

    def sample(self, row: int, limit: int | None = None) -> Sample:
        """The sample, cut to its first `limit` tokens, with its source in its id."""
        ids, spans = self._parts(row)
        spans = np.clip(spans, None, [len(ids[:limit]), len(ids[:limit]), np.iinfo(np.int64).max, 1])
        return Rendered(ids[:limit], spans, f"{self.source}/{self.name(row)}").sample(self.source)

    def name(self, row: int) -> str:
        """The sample's id within its source."""
        shard = self._shard_of(row)
        if shard not in self._names:
            self._names[shard] = json.loads((self._shard(shard) / "names.json").read_text())
        return self._names[shard][row - self._first[shard]]

    def _parts(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """ids [L] and spans [n, 4] of a sample, as views of the mapped files."""
        shard = self._shard_of(row)
        if shard not in self._open:
            files = {name: self._shard(shard) / f"{name}.npy" for name in ("rows", "ids", "spans")}
            self._open[shard] = {name: np.load(file, mmap_mode="r") for name, file in files.items()}
        files = self._open[shard]
        first, length, start, stop, _ = files["rows"][row - self._first[shard]]
        return files["ids"][first : first + length], files["spans"][start:stop]

    def _shard_of(self, row: int) -> int:
        return int(np.searchsorted(self._first, row, "right")) - 1

    def _shard(self, shard: int) -> Path:
        return self.folder / f"{shard:05d}"
