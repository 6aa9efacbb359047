"""The tools an agent may use: their settings, what the model is told of them, and what each gives back as text.

    search(query)                [1] TITLE / SNIPPET, hits separated by a blank line, or "No results."
    open_page(title, page=1)     TITLE (page 1 of 3), then that part of the text
    find_in_page(title, text)    TITLE: 2 matches, then a line "... context ..." for each
    run_code(code)               what the program printed, then [exit status N] unless it is 0

Trouble that the model caused is a BadUse: a sentence for it. Anything else that is raised is trouble outside.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_nb.client import ClientConfig
from megatron_nb.rollout.budget import Budget
from megatron_nb.sandbox.execution import Execution, Job, Limits
from megatron_nb.sandbox.pool import Pool

if TYPE_CHECKING:
    from megatron_nb.search.backend import Search

SEARCHING = ("search", "open_page", "find_in_page")
NAMES = (*SEARCHING, "run_code")
KEPT_TEXTS = 256  # texts of pages that are kept with their parts
STDERR = 2000  # characters of its end that the model is shown


class BadUse(Exception):
    """A call that the model should have made otherwise; the message is for the model."""


@dataclass
class ToolLimits:
    """How patient a tool is with what stands behind it."""

    timeout_s: float = 60.0  # of one attempt
    retries: int = 3  # attempts after the first; a client of a service retries by its own settings instead
    pause_s: float = 0.5  # before the first retry; doubles each time
    rate: float | None = None  # calls begun per second, over all episodes of this process
    cache: int = 10_000  # results kept in memory; programs are always run again

    def __post_init__(self):
        for name, least in (("timeout_s", 0), ("retries", -1), ("pause_s", -1), ("rate", 0), ("cache", -1)):
            value = getattr(self, name)
            if value is not None and value <= least:
                raise ValueError(f"tools.limits.{name}={value} must be more than {least}")


@dataclass
class CodeConfig:
    """The sandbox of run_code."""

    workers: int | None = None  # None: one per core
    isolation: Literal["bubblewrap", "none"] = "bubblewrap"  # none runs programs with nothing around them
    time_s: float = 10.0
    memory_mb: int = 512

    def __post_init__(self):
        for name in ("workers", "time_s", "memory_mb"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"tools.code.{name}={value} must be more than 0")


@dataclass
class ToolsConfig:
    """Which tools there are and how much they say."""

    names: list[str] = field(default_factory=lambda: list(NAMES))
    search: Path | None = None  # an index made by `python -m megatron_nb.search build`, opened in this process
    service: ClientConfig | None = None  # or a server started by `python -m megatron_nb.search serve`
    hits: int = 5  # of a search
    snippet_tokens: int = 96  # of a hit
    page_tokens: int = 1536  # of one page of a text
    matches: int = 5  # of find_in_page that are shown
    context_words: int = 25  # on either side of a match
    mark_matches: bool = False  # matches stand between ** in their context
    result_tokens: int = 2048  # of any result; the rest is cut
    limits: dict[str, ToolLimits] = field(default_factory=dict)  # by tool; ToolLimits() for the others
    code: CodeConfig = field(default_factory=CodeConfig)

    def __post_init__(self):
        for name in (*self.names, *self.limits):
            if name not in NAMES:
                raise ValueError(f"tools: {name!r} is no tool: known are {', '.join(NAMES)}")
        if len(set(self.names)) != len(self.names) or not self.names:
            raise ValueError(f"tools.names={self.names} must name at least one tool, each once")
        for name in ("hits", "snippet_tokens", "page_tokens", "matches", "context_words"):
            if getattr(self, name) < 1:
                raise ValueError(f"tools.{name}={getattr(self, name)} must be at least 1")
        if self.result_tokens < self.page_tokens:
            raise ValueError(
                f"tools.result_tokens={self.result_tokens} must be at least page_tokens={self.page_tokens}: a page is a result"
            )
        if self.search is not None and self.service is not None:
            raise ValueError("tools.search and tools.service are both set: pages come from one of them; leave one out")


def needs_search(config: ToolsConfig) -> bool:
    """Whether any of the tools reads pages."""
    return any(name in SEARCHING for name in config.names)


def _schema(name: str, description: str, required: tuple[str, ...], **properties: tuple[str, str]) -> dict[str, Any]:
    shown = {key: {"type": kind, "description": told} for key, (kind, told) in properties.items()}
    parameters = {"type": "object", "properties": shown, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SCHEMAS = {
    "search": _schema(
        "search", "Search the encyclopedia. Gives titles of pages with a snippet of each.", ("query",),
        query=("string", "words to look for"),
    ),
    "open_page": _schema(
        "open_page", "Read a page. Long pages come in parts.", ("title",),
        title=("string", "the page's title, as a search gave it"), page=("integer", "which part, from 1"),
    ),
    "find_in_page": _schema(
        "find_in_page", "Find the places of a page where some words stand.", ("title", "text"),
        title=("string", "the page's title"), text=("string", "the words, upper and lower case alike"),
    ),
    "run_code": _schema(
        "run_code", "Run a Python program without network. Gives what it prints.", ("code",),
        code=("string", "the whole program"),
    ),
}  # fmt: skip


def checked(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, as its schema wants them. Raises BadUse."""
    parameters = SCHEMAS[name]["function"]["parameters"]
    known, required = parameters["properties"], parameters["required"]
    told = f"{name} takes {', '.join(key if key in required else f'{key} (may be left out)' for key in known)}"
    if unknown := [key for key in given if key not in known]:
        raise BadUse(f"{name} knows no argument {', '.join(map(repr, unknown))}; {told}.")
    if missing := [key for key in required if given.get(key) is None]:
        raise BadUse(f"{name} lacks the argument {', '.join(missing)}; {told}.")
    found = {}
    for key, value in given.items():
        if known[key]["type"] == "integer" and value is not None:
            if isinstance(value, str) and re.fullmatch(r"\s*\d{1,9}\s*", value):
                value = int(value)
            whole = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e9
            if not whole or value != int(value):  # JSON knows 1e400, which is infinite
                raise BadUse(f"{key} of {name} is {str(value)[:60]!r}, but must be a whole number.")
            value = int(value)
        elif value is not None and (not isinstance(value, str) or not value.strip()):
            raise BadUse(f"{key} of {name} is {str(value)[:60]!r}, but must be text that is not empty.")
        if value is not None:
            found[key] = value
    return found


class PageTools:
    """search, open_page and find_in_page over one Search. text: makes data of what pages say."""

    def __init__(self, config: ToolsConfig, search: Search, budget: Budget, text: Callable[[str], str]):
        self.config, self._search, self._budget, self._text = config, search, budget, text
        self._read: OrderedDict[str, str] = OrderedDict()  # title -> text, as data
        self._parts: dict[str, list[str]] = {}  # of texts that were opened: it takes seconds where a page has megabytes

    async def search(self, query: str) -> str:
        hits = await self._search.search(query, self.config.hits)
        shown = []
        for number, hit in enumerate(hits, 1):
            snippet = self._budget.cut(_line(self._text(hit.snippet)), self.config.snippet_tokens, mark=" ...")
            shown.append(f"[{number}] {_line(self._text(hit.title))}\n{snippet}")
        return "\n\n".join(shown) or "No results."

    async def open_page(self, title: str, page: int = 1) -> str:
        text = await self._page(title)
        parts = self._parts.get(title) or await self._budget.pages(text, self.config.page_tokens)
        if title in self._read:
            self._parts[title] = parts
        if not 1 <= page <= len(parts):
            raise BadUse(f"{title!r} has {len(parts)} page{'s' * (len(parts) > 1)}; page {page} does not exist.")
        return f"{_line(self._text(title))} (page {page} of {len(parts)})\n{parts[page - 1]}"

    async def find_in_page(self, title: str, text: str) -> str:
        said, wanted = _line(await self._page(title)), _line(text)
        places = [found.span() for found in re.finditer(re.escape(wanted), said, re.IGNORECASE)]
        lines = [f"{_line(self._text(title))}: {len(places)} match{'es' * (len(places) != 1)}"]
        mark = "**" if self.config.mark_matches else ""
        lines += [_context(said, *place, self.config.context_words, mark) for place in places[: self.config.matches]]
        if len(places) > self.config.matches:
            lines.append(f"[{len(places) - self.config.matches} more]")
        return "\n".join(lines)

    async def _page(self, title: str) -> str:
        """The page's text as data."""
        if title not in self._read:
            text = await self._search.page(title)
            if text is None:
                raise BadUse(f"there is no page {_line(title)[:200]!r}; take a title that a search gave.")
            self._read[title] = self._text(text)
            while len(self._read) > KEPT_TEXTS:
                self._parts.pop(self._read.popitem(last=False)[0], None)
        return self._read[title]


def _line(text: str) -> str:
    """The text in one line: it cannot pretend to be further hits."""
    return " ".join(text.split())


def _context(said: str, start: int, stop: int, words: int, mark: str) -> str:
    """The match with so many words on either side."""
    reach = 24 * words  # characters that surely hold them, unless words are very long
    before = said[max(0, start - reach) : start].split(" ")
    after = said[stop : stop + reach].split(" ")
    # what is cut from a word in which the match stands belongs to it: hence one more
    left, right = " ".join(before[-words - 1 :]), " ".join(after[: words + 1])
    return f"... {left}{mark}{said[start:stop]}{mark}{right} ..."


class CodeTool:
    """run_code in the sandbox; its workers start with the first program."""

    def __init__(self, config: CodeConfig):
        self.config, self._limits = config, Limits(time_s=config.time_s, memory_mb=config.memory_mb)
        self._pool: Pool | None = None

    def open(self) -> Pool:
        """The workers. Raises IsolationMissing."""
        if self._pool is None:
            self._pool = Pool(self.config.workers, self.config.isolation)
        return self._pool

    async def run_code(self, code: str) -> str:
        execution = await self.open().run(Job(code, limits=self._limits))
        if execution.status == "infrastructure":
            raise OSError(f"the sandbox is broken: {execution.detail}")
        if execution.status != "ok":
            raise BadUse(_failure(execution))
        return execution.stdout.decode("utf-8", "replace").rstrip("\n") or "(no output)"

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _failure(execution: Execution) -> str:
    """What a program said before it failed, and how it ended."""
    said = execution.stdout.decode("utf-8", "replace")[-STDERR:].rstrip("\n")
    complaint = execution.stderr.decode("utf-8", "replace")[-STDERR:].rstrip("\n")
    ended = f"[exit status {execution.exit_code}]" if execution.exit_code is not None else f"[{execution.status}]"
    if execution.status != "runtime error":
        ended = f"[{execution.status}: {execution.detail}]" if execution.detail else f"[{execution.status}]"
    return "\n".join(part for part in ("the program failed.", said, complaint, ended) if part)
