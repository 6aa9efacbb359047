"""Calls answered: by the right tool, within its time, tried again where the trouble is outside, remembered, at its rate.

The text of every result is data: whatever markers or special tokens it held are broken (`as_data`), so no tokenizer and no
template can take it for structure. A Result says whose fault it is: "error" is the model's, and its text says what to do
otherwise; "failed" is trouble outside that retries did not mend: the rollout is invalid, not wrong.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_nb.client import RequestFailed, RequestRefused
from megatron_nb.rollout.budget import Budget
from megatron_nb.rollout.calls import Call, plain
from megatron_nb.rollout.tools import SCHEMAS, BadUse, CodeTool, PageTools, ToolLimits, ToolsConfig, checked, needs_search
from megatron_nb.sandbox.pool import IsolationMissing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatron_nb.search.backend import Search

log = logging.getLogger(__name__)
ERROR = "Error: "  # every result that is not "ok" begins with it
THEIR_FAULT = (400, 413, 414, 422)  # a service refuses what the model asks; other refusals are ours (keys, address)
MAX_PAUSE_S = 30.0


@dataclass(frozen=True)
class Result:
    """What a call gave."""

    text: str
    status: str  # ok | error (the model's fault) | failed (trouble outside, after all retries)
    seconds: float = 0.0  # retries and waiting for the rate included
    cached: bool = False


class Toolbox:
    """The tools of a configuration. Usable from any event loop, by any number of episodes at once.

    search: pages come from it instead of from `config.search` or `config.service`. Raises ValueError when there is none.
    """

    def __init__(self, config: ToolsConfig, tokenizer: PreTrainedTokenizerBase | None = None, search: Search | None = None):
        self.config = config
        self.schemas: list[dict[str, Any]] = [SCHEMAS[name] for name in config.names]
        self._budget, self._special = Budget(tokenizer), special_tokens(tokenizer)
        self._code = CodeTool(config.code)
        self._pages: PageTools | None = None
        if needs_search(config):
            self._search = search or _open_search(config)
            self._pages = PageTools(config, self._search, self._budget, self.as_data)
        self._cache: dict[str, OrderedDict[str, Result]] = {name: OrderedDict() for name in config.names}
        self._next_start = dict.fromkeys(config.names, 0.0)

    def as_data(self, text: str) -> str:
        """The text with every marker and special token broken; see calls.plain."""
        return plain(text, self._special)

    async def ready(self) -> None:
        """Try what the tools stand on, before any work. Raises OSError naming it, IsolationMissing."""
        if "run_code" in self.config.names:
            self._code.open()
        if self._pages is not None:
            result = await self.call(Call("search", {"query": "a"}, "")) if "search" in self.config.names else None
            if result is not None and result.status == "failed":
                raise OSError(f"the tools cannot search: {result.text}")

    async def call(self, call: Call) -> Result:
        """The result of one call; what goes wrong is in its status. Raises IsolationMissing, which no retry mends."""
        began = time.perf_counter()
        try:
            if call.name not in self.config.names:
                raise BadUse(f"there is no tool {call.name[:80]!r}; the tools are {', '.join(self.config.names)}.")
            arguments = checked(call.name, call.arguments)
        except BadUse as error:
            return self._result(ERROR + str(error), "error", began)
        cache, key = self._cache[call.name], json.dumps(arguments, sort_keys=True)
        if key in cache:
            cache.move_to_end(key)
            return replace(cache[key], seconds=time.perf_counter() - began, cached=True)
        result = await self._attempts(call.name, arguments, began)
        if result.status != "failed" and call.name != "run_code":
            cache[key] = result
            while len(cache) > self._limits(call.name).cache:
                cache.popitem(last=False)
        return result

    def close(self) -> None:
        """End the sandbox's workers. A later call starts them again."""
        self._code.close()

    # ------------------------------------------------------------------ one call
    def _limits(self, name: str) -> ToolLimits:
        return self.config.limits.get(name) or ToolLimits()

    async def _attempts(self, name: str, arguments: dict[str, Any], began: float) -> Result:
        limits, tool = self._limits(name), getattr(self._code if name == "run_code" else self._pages, name)
        for attempt in range(limits.retries + 1):
            try:
                await self._turn(name, limits.rate)
                async with asyncio.timeout(limits.timeout_s):
                    return self._result(await tool(**arguments), "ok", began)
            except BadUse as error:
                return self._result(ERROR + str(error), "error", began)
            except IsolationMissing:
                raise
            except Exception as error:  # whatever stands behind a tool: it is not the model's fault
                if isinstance(error, RequestRefused) and error.status in THEIR_FAULT:
                    return self._result(f"{ERROR}{name} refuses this request (status {error.status}).", "error", began)
                told = f"no answer within {limits.timeout_s:g} s" if isinstance(error, TimeoutError) else _told(error)
                given_up = attempt == limits.retries or isinstance(error, RequestFailed)  # a client has retried already
            log.warning("%s failed, attempt %d of %d: %s", name, attempt + 1, limits.retries + 1, told)
            if given_up:
                break
            await asyncio.sleep(min(limits.pause_s * 2**attempt, MAX_PAUSE_S) * random.uniform(0.5, 1.0))
        return self._result(f"{ERROR}{name} failed after {attempt + 1} attempts: {told}", "failed", began)

    async def _turn(self, name: str, rate: float | None) -> None:
        """Wait until the rate permits a call."""
        if rate is not None:
            start = max(time.monotonic(), self._next_start[name])
            self._next_start[name] = start + 1 / rate
            await asyncio.sleep(start - time.monotonic())

    def _result(self, text: str, status: str, began: float) -> Result:
        text = self._budget.cut(self.as_data(text), self.config.result_tokens)
        return Result(text, status, time.perf_counter() - began)


def _open_search(config: ToolsConfig) -> Search:
    from megatron_nb.search.backend import LocalSearch, RemoteSearch

    if config.search is None and config.service is None:
        raise ValueError(
            f"tools.names={config.names} read pages, but neither tools.search (a folder) nor tools.service (a server) is set: "
            "build an index with `python -m megatron_nb.search build` and name its folder"
        )
    return LocalSearch(config.search) if config.search is not None else RemoteSearch(config.service)


def special_tokens(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[str]:
    """Tokens that a tokenizer takes out of any text before it splits it, and that mean something."""
    if tokenizer is None:
        return frozenset()
    added = tokenizer.added_tokens_decoder.values()
    marked = {token.content for token in added if token.special or token.content.startswith(("<", "["))}
    return frozenset(marked | set(tokenizer.all_special_tokens))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
