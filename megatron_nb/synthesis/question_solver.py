"""What a model makes of a question: without any help, from the evidence alone, and with the search tools.

A question is kept when the model never answers it closed-book, answers it from the evidence, and answers it by search in some
tries but not in all. Without an endpoint none of this is checked, and the row says so.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from megatron_nb.client import Client, ClientConfig
from megatron_nb.rewards.answer_search import AnswerJudge, answer_of, matches
from megatron_nb.rollout.agent import seed_of
from megatron_nb.rollout.calls import Call
from megatron_nb.rollout.toolbox import Toolbox
from megatron_nb.rollout.tools import ToolsConfig

NOT_CHECKED = "not checked"
CHECKS = ("closed_book", "from_evidence", "by_search")
CLOSED = "Answer from memory, in a few words. If you do not know, guess. End with a line: Answer: ...\n\n{question}"
GIVEN = "These sentences, each from a page of an encyclopedia, hold all that is needed:\n{evidence}\n\n{question}\n\n" \
        "Answer in a few words. End with a line: Answer: ..."  # fmt: skip
SEARCHING = "Find the answer with the tools. When you are sure, answer in a few words and end with a line: Answer: ...\n\n" \
            "{question}"  # fmt: skip


@dataclass
class SolverConfig:
    """The strong model that tries the questions."""

    endpoint: ClientConfig | None = None  # None: closed_book, from_evidence and by_search are not checked
    judge: ClientConfig | None = None  # decides where an answer is not equal to the right one; None: equality decides
    closed_book_tries: int = 4  # (own) without tools; one right answer drops the question
    search_tries: int = 4  # (own) with tools; no right answer drops the question, and none but right ones do
    max_turns: int = 40  # of one try with tools
    temperature: float = 1.0
    max_tokens: int = 4096  # of one reply
    tools: ToolsConfig = field(default_factory=lambda: ToolsConfig(names=["search", "open_page", "find_in_page"]))

    def __post_init__(self):
        for name, least in (("closed_book_tries", 0), ("search_tries", 0), ("max_turns", 1), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")


class Solver:
    """Tries questions. tools: what by_search may use."""

    def __init__(self, config: SolverConfig, tools: Toolbox | None, seed: int):
        self.config, self.tools, self.seed = config, tools, seed
        self.client = Client(config.endpoint)
        self.judge = AnswerJudge(config.judge) if config.judge else None

    async def check(self, row: dict[str, Any]) -> str | None:
        """Write row["checks"]; the rule that drops the question, None when it stays. OSError when the model was not reached."""
        checks, config, asked = row["checks"], self.config, row["question"]
        closed = await self._tries(row, "closed_book", config.closed_book_tries, CLOSED.format(question=asked))
        checks["closed_book"] = {"right": sum(closed), "tries": len(closed)}
        if any(closed):
            return "answered_closed_book"
        quotes = "\n".join(f"- {step['title']}: {step['evidence']}" for step in row["path"])
        told = await self._tries(row, "from_evidence", 1, GIVEN.format(evidence=quotes, question=asked))
        checks["from_evidence"] = {"right": sum(told), "tries": 1}
        if not any(told):
            return "evidence_not_enough"
        if not config.search_tries:
            return None
        found = await self._tries(row, "by_search", config.search_tries, SEARCHING.format(question=asked), tools=True)
        checks["by_search"] = {"right": sum(found), "tries": len(found)}
        if not any(found):
            return "not_found_by_search"
        return "never_failed_by_search" if all(found) and len(found) > 1 else None

    async def _tries(self, row: dict[str, Any], name: str, count: int, asked: str, tools: bool = False) -> list[bool]:
        """Whether each try was right."""
        return await asyncio.gather(*(
            self._try(row, asked, seed_of(self.seed, f"{row['id']}/{name}/{number}"), tools) for number in range(count)
        ))  # fmt: skip

    async def _try(self, row: dict[str, Any], asked: str, seed: int, tools: bool) -> bool:
        messages: list[dict[str, Any]] = [{"role": "user", "content": asked}]
        for turn in range(self.config.max_turns if tools else 1):
            said = await self._reply(messages, seed + turn, tools)
            if not said.get("tool_calls"):
                return await self._right(row, said.get("content") or "")
            messages.append({key: said[key] for key in ("role", "content", "tool_calls") if key in said})
            messages += await asyncio.gather(*(self._result(call) for call in said["tool_calls"]))
        return False

    async def _reply(self, messages: list[dict[str, Any]], seed: int, tools: bool) -> dict[str, Any]:
        config = self.config
        body = {"model": config.endpoint.model, "messages": messages, "temperature": config.temperature,
                "max_tokens": config.max_tokens, "seed": seed % 2**31}  # fmt: skip
        if tools:
            body["tools"] = self.tools.schemas
        return await self.client.post("/v1/chat/completions", body, lambda answer: dict(answer["choices"][0]["message"]))

    async def _result(self, call: dict[str, Any]) -> dict[str, Any]:
        """The tool's message. OSError when the tool itself is in trouble: that is not the question's fault."""
        given, told = call["function"].get("arguments") or "{}", {"role": "tool", "tool_call_id": call.get("id", "")}
        try:
            arguments = given if isinstance(given, dict) else json.loads(given)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            return told | {"content": "Error: the arguments are no JSON object."}
        result = await self.tools.call(Call(call["function"]["name"], arguments, call.get("id", "")))
        if result.status == "failed":
            raise OSError(f"the tool {call['function']['name']} failed: {result.text}")
        return told | {"content": result.text}

    async def _right(self, row: dict[str, Any], text: str) -> bool:
        answer, references = answer_of(text), [row["answer"], *row["aliases"]]
        if matches(answer, references):
            return True
        return bool(answer) and self.judge is not None and (await self.judge.right(row["question"], references, answer))[0]
