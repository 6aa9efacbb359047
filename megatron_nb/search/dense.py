"""Dense retrieval beside BM25: one vector a page from an OpenAI-compatible /v1/embeddings endpoint, compared by numpy.

The vectors are one mapped file of half precision, written in the order of the pages; a build that was stopped goes on behind
the last whole vector. Both rankings are joined by reciprocal rank (Cormack et al. 2009).
"""

from __future__ import annotations

import asyncio
import json
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np

from megatron_nb.client import Client, ClientConfig
from megatron_nb.run import write_atomic
from megatron_nb.search.backend import LocalSearch
from megatron_nb.search.corpus import Corpus, Hit
from megatron_nb.search.progress import Progress

TEXT = 2000  # characters of a page that its vector stands for, title included
BATCH = 64  # texts of one request
BLOCK = 1 << 18  # vectors compared at once
DAMPING = 60  # of reciprocal rank
DEPTH = 100  # of each ranking that is joined


class Vectors:
    """The vectors of a corpus, with the name of the model that made them."""

    def __init__(self, folder: Path, pages: int):
        """ValueError when there are none, or not of all pages."""
        facts = folder / "facts.json"
        if not facts.exists():
            raise ValueError(f"{folder} holds no vectors: make them with `python -m megatron_nb.search embed {folder.parent}`")
        said = json.loads(facts.read_text())
        self.model, self.width = said["model"], said["width"]
        count = (folder / "vectors.f16").stat().st_size // (2 * self.width)
        if count != pages:
            raise ValueError(f"{folder} holds vectors of {count} of {pages} pages: run the command `embed` again; it goes on")
        self._rows = np.memmap(folder / "vectors.f16", np.float16, "r", shape=(count, self.width))  # [pages, width], length 1

    def nearest(self, vector: np.ndarray, k: int) -> list[int]:
        """Ids of the k pages of the largest cosine, best first."""
        best_ids, best = np.zeros(0, np.int64), np.zeros(0, np.float32)
        for start in range(0, len(self._rows), BLOCK):
            scores = np.concatenate([best, self._rows[start : start + BLOCK].astype(np.float32) @ vector])
            ids = np.concatenate([best_ids, np.arange(start, start + len(scores) - len(best))])
            order = np.argsort(-scores, kind="stable")[:k]
            best_ids, best = ids[order], scores[order]
        return best_ids.tolist()


async def embed(folder: Path, config: ClientConfig) -> int:
    """Make the vectors of all pages; how many there are. RequestFailed when the endpoint gives none; then go on later.

    ValueError when the folder holds vectors of another model.
    """
    corpus, place, client = Corpus.open(folder), folder / "dense", Client(config)
    place.mkdir(exist_ok=True)
    facts = json.loads((place / "facts.json").read_text()) if (place / "facts.json").exists() else None
    if facts and facts["model"] != config.model:
        raise ValueError(f"{place} holds vectors of model {facts['model']!r}, not {config.model!r}: remove it first")
    done = 0
    with open(place / "vectors.f16", "ab") as file:
        if facts:
            done = file.tell() // (2 * facts["width"])
            file.truncate(done * 2 * facts["width"])  # a torn vector
        else:
            file.truncate(0)
        progress = Progress("vectors", len(corpus))
        for batch in batched(corpus.texts(done), BATCH):
            rows = await vectors_of(client, [f"{title}\n{text}"[:TEXT] for _, title, text in batch])
            if facts is None:
                facts = {"model": config.model, "width": rows.shape[1]}
                write_atomic(place / "facts.json", json.dumps(facts) + "\n")
            if rows.shape[1] != facts["width"]:
                raise ValueError(f"{config.base_url} gave vectors of {rows.shape[1]} numbers, formerly {facts['width']}")
            file.write(rows.astype(np.float16).tobytes())
            file.flush()
            done += len(batch)
            progress.at(done, len(batch))
    progress.end()
    await client.close()
    return done


async def vectors_of(client: Client, texts: list[str]) -> np.ndarray:
    """[texts, width] float32 of length 1. RequestFailed when the endpoint gives no usable answer."""

    def read(answer: Any) -> np.ndarray:
        rows = [row["embedding"] for row in sorted(answer["data"], key=lambda row: row["index"])]
        vectors = np.array(rows, np.float32)
        if len(rows) != len(texts) or vectors.ndim != 2 or not np.isfinite(vectors).all():
            raise ValueError(f"{len(rows)} vectors of shape {vectors.shape} for {len(texts)} texts")
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)

    return await client.post("/v1/embeddings", {"model": client.config.model, "input": texts}, read)


class HybridSearch(LocalSearch):
    """A corpus here, its vectors, and the endpoint that makes the question's vector."""

    def __init__(self, folder: Path | str, config: ClientConfig):
        """ValueError when there are no vectors, or of another model."""
        super().__init__(folder)
        self._vectors = Vectors(Path(folder) / "dense", len(self.corpus))
        if config.model != self._vectors.model:
            raise ValueError(f"model={config.model!r}, but {folder} holds vectors of {self._vectors.model!r}: name that one")
        self._client = Client(config)

    async def search(self, query: str, k: int) -> list[Hit]:
        """Both rankings joined; scores are sums of reciprocal ranks. RequestFailed when the endpoint gives no vector."""
        vector = (await vectors_of(self._client, [query]))[0]
        return await asyncio.to_thread(self._ranked, query, vector, k)

    def _ranked(self, query: str, vector: np.ndarray, k: int) -> list[Hit]:
        near = self._vectors.nearest(vector, max(k, DEPTH))
        said = [page for page, _ in self.corpus.ranked(query, max(k, DEPTH))]
        return [self.corpus.hit(page, score, query) for page, score in joined([said, near])[:k]]


def joined(rankings: list[list[int]]) -> list[tuple[int, float]]:
    """(id, sum of 1 / (DAMPING + rank)), best first; ties by id."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, page in enumerate(ranking, 1):
            scores[page] = scores.get(page, 0.0) + 1 / (DAMPING + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
