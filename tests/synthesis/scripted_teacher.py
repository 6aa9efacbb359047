"""A small wiki, and teachers that play their roles from a script."""

from __future__ import annotations

import asyncio
import json

from megatron_nb.rollout.toolbox import Toolbox
from megatron_nb.rollout.tools import ToolsConfig
from megatron_nb.search.corpus import Hit

PAGES = {
    "Alba": "Alba is a small town in the hills. Its bridge was built by Brunel Marsh in 1871.",
    "Brunel Marsh": "Brunel Marsh was an engineer. He was born in Cortona Vale and died far from it.",
    "Cortona Vale": "Cortona Vale is a valley. Its river is the Dunmere, which floods in spring.",
}
ROW = {
    "id": "q", "question": "A small hill town has a bridge; which river runs where its builder was born?", "answer": "Dunmere",
    "aliases": ["the Dunmere"], "hops": 2, "source": "made",
    "path": [{"title": "Alba", "evidence": "Its bridge was built by Brunel Marsh in 1871.", "link": "Brunel Marsh"},
             {"title": "Brunel Marsh", "evidence": "He was born in Cortona Vale and died far from it.", "link": "Cortona Vale"},
             {"title": "Cortona Vale", "evidence": "Its river is the Dunmere, which floods in spring."}],
}  # fmt: skip
WAY = [  # (thought, name, arguments)
    ("A town with a bridge in the hills.", "search", {"query": "small town hills bridge"}),
    ("Alba is such a town.", "open_page", {"title": "Alba"}),
    ("The bridge is by Brunel Marsh.", "open_page", {"title": "Brunel Marsh"}),
    ("He was born in Cortona Vale.", "open_page", {"title": "Cortona Vale"}),
]


class Pages:
    """A Search over a handful of pages."""

    def __init__(self, pages: dict[str, str] | None = None):
        self.pages = PAGES if pages is None else pages

    async def search(self, query: str, k: int) -> list[Hit]:
        wanted = set(query.lower().split())
        scored = [(len(wanted & set(f"{title} {text}".lower().split())), title) for title, text in self.pages.items()]
        return [Hit(title, self.pages[title][:60], score) for score, title in sorted(scored, reverse=True)[:k] if score]

    async def page(self, title: str) -> str | None:
        return self.pages.get(title)


def toolbox(pages=None, tokenizer=None) -> Toolbox:
    return Toolbox(ToolsConfig(names=["search", "open_page", "find_in_page"]), tokenizer, search=Pages(pages))


def calling(thought: str, name: str, arguments, **more) -> dict:
    """A searcher's message; arguments as JSON text, as servers send them."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    calls = [{"id": "x", "function": {"name": name, "arguments": written}}]
    return {"role": "assistant", "content": thought, "tool_calls": calls, **more}


class Script:
    """Plays a list of searcher's messages, then says that it is done. `seen`: what it was shown, by role."""

    def __init__(self, turns: list[dict] | None = None, answer: str = "The river there.\nAnswer: Dunmere", delay: float = 0.0):
        self.turns = [calling(*one) for one in WAY] if turns is None else turns
        self.answer, self.delay, self.at, self.seen = answer, delay, 0, []

    async def reply(self, role: str, messages: list[dict], tools: list[dict]) -> dict:
        self.seen.append((role, messages, tools))
        await asyncio.sleep(self.delay)
        if role == "planner":
            return {"role": "assistant", "content": f"<think>hm</think>1. Find the town. (plan {self.at})"}
        if role == "writer":
            return {"role": "assistant", "content": self.answer, "reasoning_content": "I write."}
        self.at += 1
        return self.turns[self.at - 1] if self.at <= len(self.turns) else {"role": "assistant", "content": "That is all."}
