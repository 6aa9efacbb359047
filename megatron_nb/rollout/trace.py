"""What happened in an episode, for people: messages, calls, results, tokens and seconds, one JSON row an episode.

    {"rollout_id", "group_id", "index", "seed", "status", "reason", "seconds", "rows", "prompt": [messages], "turns": [turn]}
    turn of the model   {"kind": "assistant", "row", "tokens", "seconds", "status", "message", "problems", "summary"}
    turn of the tools   {"kind": "tool", "row", "tokens", "seconds", "status", "results": [result]}
    result              {"role": "tool", "tool_call_id", "name", "content", "status", "seconds", "cached"}

Texts are decoded from the ids that were sampled. status "stopped": cut off from outside, by a time-out or the job's end.
Nothing is trained on these rows; the rows of ids are in store.py's files.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from megatron_nb.records import Prompt
from megatron_nb.rollout.calls import Call, Parsed
from megatron_nb.rollout.toolbox import Result


class Trace:
    """Of one episode, as it goes on."""

    def __init__(self, prompt: Prompt, group_id: str, index: int, seed: int):
        self._began = self._last = time.perf_counter()
        names = {"rollout_id": f"{group_id}/{index}", "group_id": group_id, "index": index, "seed": seed}
        self._row = {**names, "prompt": prompt.conversation.messages}
        self.turns: list[dict[str, Any]] = []

    def said(self, row: int, tokens: int, status: str, parsed: Parsed, summary: bool = False) -> None:
        """Note a turn of the model."""
        turn = self._turn("assistant", row, tokens, status)
        turn |= {"message": message_of(parsed), "problems": parsed.problems, "summary": summary}

    def answered(self, row: int, tokens: int, status: str, calls: list[Call], results: list[Result]) -> None:
        """Note a turn of the tools; results beyond the calls answer those that could not be read."""
        shown = []
        for number, result in enumerate(results):
            call = calls[number] if number < len(calls) else None
            named = {"tool_call_id": call.id, "name": call.name} if call else {"tool_call_id": "", "name": ""}
            took = {"seconds": round(result.seconds, 6), "cached": result.cached}
            shown.append({"role": "tool", **named, "content": result.text, "status": result.status, **took})
        self._turn("tool", row, tokens, status)["results"] = shown

    def row(self, status: str, reason: str = "") -> dict[str, Any]:
        """The whole of it."""
        rows = max((turn["row"] for turn in self.turns), default=0) + 1
        ended = {"status": status, "reason": reason, "seconds": round(time.perf_counter() - self._began, 6), "rows": rows}
        return {**self._row, **ended, "turns": self.turns}

    def _turn(self, kind: str, row: int, tokens: int, status: str) -> dict[str, Any]:
        now = time.perf_counter()
        took, self._last = now - self._last, now
        self.turns.append({"kind": kind, "row": row, "tokens": tokens, "seconds": round(took, 6), "status": status})
        return self.turns[-1]


def message_of(parsed: Parsed) -> dict[str, Any]:
    """A turn as an OpenAI message."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.answer}
    if parsed.thinking:
        message["reasoning_content"] = parsed.thinking
    if parsed.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.calls
        ]
    return message


def append(path: Path, row: dict[str, Any]) -> None:
    """One more row at the end of a file; whole, unless the machine stops in the middle of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write(json.dumps(row).encode() + b"\n")
