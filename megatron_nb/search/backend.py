"""One way to ask a corpus, here or over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Protocol

from megatron_nb.client import Client, ClientConfig
from megatron_nb.search.corpus import Corpus, Hit


class Search(Protocol):
    async def search(self, query: str, k: int) -> list[Hit]: ...

    async def page(self, title: str) -> str | None:
        """The page's text, without its title; None when there is no such page."""
        ...


class LocalSearch:
    """A corpus on this machine. Usable from any event loop."""

    def __init__(self, folder: Path | str):
        """ValueError when the folder holds no finished corpus."""
        self.corpus = Corpus.open(folder)

    async def search(self, query: str, k: int) -> list[Hit]:
        return await asyncio.to_thread(self.corpus.search, query, k)

    async def page(self, title: str) -> str | None:
        found = await asyncio.to_thread(self.corpus.text, title)
        return None if found is None else found[1]


class RemoteSearch:
    """A search service (`python -m megatron_nb.search serve`). Raises client.RequestFailed when it gives no usable answer."""

    def __init__(self, config: ClientConfig):
        self._client = Client(config)

    async def search(self, query: str, k: int) -> list[Hit]:
        return await self._client.post("/search", {"query": query, "k": k}, _hits)

    async def page(self, title: str) -> str | None:
        return await self._client.post("/page", {"title": title}, _text)

    async def close(self) -> None:
        await self._client.close()


def _hits(answer: Any) -> list[Hit]:
    """ValueError and its like for another form, so that the client asks again."""
    hits = [Hit(hit["title"], hit["snippet"], float(hit["score"])) for hit in answer["hits"]]
    if not all(isinstance(hit.title, str) and isinstance(hit.snippet, str) for hit in hits):
        raise ValueError("a hit's title and snippet must be text")
    return hits


def _text(answer: Any) -> str | None:
    text = answer["text"]
    if not (text is None or isinstance(text, str)):
        raise ValueError(f"text is {type(text).__name__}, not text or null")
    return text
