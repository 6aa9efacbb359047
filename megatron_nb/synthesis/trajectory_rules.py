"""Which attempts are kept: those that end with the right answer, and found it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from megatron_nb.asking.ledger import Ledger
from megatron_nb.client import ClientConfig
from megatron_nb.rewards.answer_search import AnswerJudge, answer_of, matches
from megatron_nb.rewards.critic_memory import plain
from megatron_nb.rewards.text import spellings

RULES = {  # why an attempt is dropped, in the order in which it is looked at
    "malformed": "its calls could not be read, turn after turn",
    "no_answer": "the writer gave no answer",
    "wrong": "the answer is not the right one",
    "no_tools": "no tool was called: nothing was searched for",
    "unsupported": "the answer is right, but stands in no result: it was known or guessed",
    "duplicate": "it makes the same calls as another one of its question",
}


@dataclass
class AnswerConfig:
    """When an answer is right."""

    mode: Literal["exact", "normalised", "judged"] = "normalised"  # judged: a model decides where normalised says no
    endpoint: ClientConfig | None = None  # of the judge

    def __post_init__(self):
        if (self.mode == "judged") != (self.endpoint is not None):
            raise ValueError(f"mode={self.mode!r}, endpoint={self.endpoint}: judged needs an endpoint, nothing else reads it")


class AnswerFilter:
    """Says of each attempt by which of RULES it is dropped ("" when it is kept), once; `found` keeps it on disk."""

    def __init__(self, config: AnswerConfig, found: Ledger):
        self.config, self.found = config, found
        self._judge = AnswerJudge(config.endpoint) if config.endpoint else None

    async def __call__(self, row: dict[str, Any], key: str, attempt: dict[str, Any]) -> bool:
        """Whether the attempt is kept. RequestFailed when the judge is out of reach."""
        if key not in self.found:
            rule, reason = await self._dropped(row, attempt)
            self.found[key] = {"dropped": rule, "reason": reason}
        return not self.found[key]["dropped"]

    async def _dropped(self, row: dict[str, Any], attempt: dict[str, Any]) -> tuple[str, str]:
        if attempt["status"] == "malformed":
            return "malformed", ""
        answer = answer_of(attempt["messages"][-1]["content"])
        if not answer:
            return "no_answer", ""
        references = spellings(row)
        right, why = matches(answer, references, "exact" if self.config.mode == "exact" else "normalised"), ""
        if not right and self._judge is not None:
            right, why = await self._judge.right(row["question"], references, answer)
        told = f"answer {answer[:80]!r}, reference {references[0][:80]!r}" + (f": {why}" if why else "")
        if not right:
            return "wrong", told
        if not attempt["calls"]:
            return "no_tools", told
        seen = [plain(message["content"]) for message in attempt["messages"] if message["role"] == "tool"]
        if not any(plain(one) in text for one in (answer, *references) for text in seen):
            return "unsupported", told
        return "", told


def calls_of(attempt: dict[str, Any]) -> str:
    """What an attempt asked its tools, in order: the same text for duplicates."""
    return json.dumps([call["function"] for message in attempt["messages"] for call in message.get("tool_calls", ())])
