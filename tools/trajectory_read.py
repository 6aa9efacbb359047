"""Trajectories as files hold them: traces of an agent's episodes, and rows of messages (SFT format, either wire).

    runs/NAME/rollouts/trace-LABEL.replica-R.jsonl   megatron_nb/rollout/trace.py; scores are in the step's file beside it
    trajectories.jsonl                               {"messages": [...], "critic"?: [verdict of a turn], "loss" on the model's}

Only the standard library is needed, and megatron_nb.rollout.calls for calls that stand as text in a message.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_nb.rollout.calls import parse, results

TRACE = re.compile(r"trace-(?P<label>.+)\.replica-\d+\.jsonl")
ERROR = "Error: "


@dataclass
class Turn:
    """One turn. The model's: thinking, text, calls, problems. The tools': results."""

    kind: str  # assistant | tool | user
    text: str = ""
    thinking: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # (name, arguments as JSON)
    problems: list[str] = field(default_factory=list)  # calls that could not be read
    results: list[dict[str, Any]] = field(default_factory=list)  # name, content, status, seconds?, cached?
    facts: list[str] = field(default_factory=list)  # tokens, seconds, row, ...
    reward: float | None = None
    loss: int | None = None
    verdict: str = ""  # what a critic said


@dataclass
class Trajectory:
    """One episode."""

    name: str
    prompt: list[dict[str, Any]]  # messages
    turns: list[Turn]
    status: str = ""
    reason: str = ""
    reward: float | None = None
    facts: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def said(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.kind == "assistant"]

    def count(self, status: str) -> int:
        """Results of tools with this status."""
        return sum(result["status"] == status for turn in self.turns for result in turn.results)


def head_of(result: dict[str, Any]) -> str:
    """Tool, status and time of a result; one without a tool corrects a call that could not be read."""
    took = "cached" if result.get("cached") else f"{result['seconds']:.3g} s" if result.get("seconds") else ""
    return f"{result.get('name') or 'correction'} {result['status']} {took}".strip()


def read(path: Path) -> list[Trajectory]:
    """The trajectories of a file, or of the newest trace of a run's folder. ValueError for what holds none.

    An episode that was traced twice (a job was killed in between) is shown as it ended last.
    """
    if path.is_dir():
        files = sorted((path / "rollouts").glob("trace-*.jsonl"), key=lambda file: (file.stat().st_mtime, file.name))
        if not files:
            raise ValueError(f"{path}/rollouts holds no trace-*.jsonl: only a run with an agent writes them")
        path = files[-1]
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a JSONL file of trajectories, or the folder of a run")
    scores, found = _scores(path), {}
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            trajectory = _traced(row, scores) if "turns" in row else _messages(row, number)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if number == len(lines):  # being written, or cut off by a kill
                break
            raise ValueError(f"{path}:{number} is no trajectory ({error!r}): a row has turns, or messages") from error
        found[trajectory.name] = trajectory
    if not found:
        raise ValueError(f"{path} holds no trajectory")
    return list(found.values())


def _scores(path: Path) -> dict[str, dict[str, Any]]:
    """rollout_id -> score and turn rewards, from the step's file beside a trace, once it is there."""
    named = TRACE.fullmatch(path.name)
    step = path.parent / f"{named['label']}.jsonl" if named else None
    if step is None or not step.is_file():
        return {}
    scores: dict[str, dict[str, Any]] = {}
    with open(step, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            score = scores.setdefault(f"{row['group_id']}/{row['index']}", {**(row.get("score") or {}), "turns": []})
            score["turns"] += [turn.get("reward") for turn in row["turns"] if turn["kind"] == "assistant"]
    return scores


def _traced(row: dict[str, Any], scores: dict[str, dict[str, Any]]) -> Trajectory:
    score = scores.get(row["rollout_id"], {})
    rewards, turns = iter(score.get("turns", [])), []
    for turn in row["turns"]:
        facts = [f"{turn['tokens']} tokens", f"{turn['seconds']:.3g} s"]
        facts += [f"row {turn['row']}"] if row["rows"] > 1 else []
        if turn["kind"] == "assistant":
            facts += [turn["status"]] if turn["status"] not in ("eos", "malformed") else []
            facts += ["summary"] if turn.get("summary") else []
            made = _said(turn["message"])
            made.problems, made.reward = turn["problems"], next(rewards, None)
        else:
            made = Turn("tool", results=turn["results"])
        made.facts = facts
        turns.append(made)
    parts = [f"{name} {value:.4g}" for name, value in (score.get("parts") or {}).items()]
    return Trajectory(
        row["rollout_id"], row["prompt"], turns, row["status"], row.get("reason") or score.get("reason", ""),
        score.get("reward"), parts + ([f"{row['rows']} rows"] if row["rows"] > 1 else []),
        sum(turn["tokens"] for turn in row["turns"]), row["seconds"],
    )  # fmt: skip


def _messages(row: dict[str, Any], number: int) -> Trajectory:
    """A row of messages: the prompt up to the first assistant turn, then turns; results of the MCP wire are user messages."""
    messages = row["messages"]
    first = next((place for place, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    turns: list[Turn] = []
    for message in messages[first:]:
        if message["role"] == "assistant":
            turns.append(_said(message))
        elif message["role"] == "tool" or (message["role"] == "user" and turns and turns[-1].calls):
            if not turns or turns[-1].kind != "tool":
                turns.append(Turn("tool"))
            contents = [message["content"]] if message["role"] == "tool" else results(message["content"], "mcp")
            turns[-1].results += [
                {"name": message.get("name", ""), "content": text, "status": "error" if text.startswith(ERROR) else "ok"}
                for text in contents
            ]
        else:
            turns.append(Turn(message["role"], message["content"]))
    for turn, verdict in zip((turn for turn in turns if turn.kind == "assistant"), row.get("critic") or ()):
        reasons = verdict.get("reasons") or {}
        told = (f"{name} {value}" + (f": {reasons[name]}" if reasons.get(name) and not value else "")
                for name, value in verdict.items() if name != "reasons")  # fmt: skip
        turn.verdict = "; ".join(told)
    return Trajectory(str(row.get("id") or number), messages[:first], turns, row.get("status", ""))


def _said(message: dict[str, Any]) -> Turn:
    content, calls = message.get("content") or "", []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        given = function.get("arguments")
        calls.append((function["name"], given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)))
    turn = Turn("assistant", content, message.get("reasoning_content") or "", calls, loss=message.get("loss"))
    wire = "mcp" if "<use_mcp_tool>" in content else "hermes" if "<tool_call>" in content else None
    if wire or "</think>" in content:
        found = parse(content, wire or "hermes")
        turn.calls += [(call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in found.calls]
        turn.text, turn.thinking, turn.problems = found.answer, turn.thinking or found.thinking, found.problems
    return turn
