"""Kept trajectories as rows for fine-tuning (`loss` on every turn), in either wire format, with a report and a card."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import mean, median
from typing import Any

from megatron_nb.client import RequestFailed
from megatron_nb.data.formats import parse
from megatron_nb.rewards.critic import loss_flags
from megatron_nb.rewards.critic_steps import CRITERIA, Step, Verdict
from megatron_nb.rollout.calls import Call, describe, joined, write
from megatron_nb.run import write_atomic
from megatron_nb.synthesis.trajectory_rules import RULES

REASONS_SHOWN = 8


def row_of(
    question: dict[str, Any], key: str, attempt: dict[str, Any], steps: list[Step], verdicts: list[Verdict | RequestFailed],
    tools: list[dict[str, Any]], wire: str,
) -> dict[str, Any]:  # fmt: skip
    """One row as data/formats.py reads it. BadRow when it does not."""
    flags = iter(loss_flags(steps, verdicts, right=True))
    messages = [
        {**message, "loss": next(flags)} if message["role"] == "assistant" else message for message in attempt["messages"]
    ]
    told = [one.as_row() if isinstance(one, Verdict) else {"failed": str(one)[:300]} for one in verdicts]
    row = {
        "id": key, "messages": in_wire(messages, tools, wire), "question": question["question"], "answer": question["answer"],
        "hops": question.get("hops"), "source": question.get("source"), "wire": wire, "status": attempt["status"],
        "critic": told,
    }  # fmt: skip
    if wire == "hermes":
        row["tools"] = tools
    parse(row, key, "trajectories")
    return row


def in_wire(messages: list[dict[str, Any]], tools: list[dict[str, Any]], wire: str) -> list[dict[str, Any]]:
    """The conversation as the wire format has it: calls in tool_calls and results of role tool, or all of it as text (mcp)."""
    if wire == "hermes":
        return messages
    found: list[dict[str, Any]] = [{"role": "system", "content": describe(tools, wire)}]
    results: list[str] = []
    for message in [*messages, {"role": "end"}]:
        if message["role"] == "tool":
            results.append(message["content"])
            continue
        if results:
            found.append({"role": "user", "content": joined(results)})
            results = []
        if message["role"] == "end":
            break
        calls = [Call(call["function"]["name"], call["function"]["arguments"], call["id"])
                 for call in message.get("tool_calls", ())]  # fmt: skip
        said = "\n".join(part for part in (message["content"], *(write(call, wire) for call in calls)) if part)
        found.append({key: value for key, value in message.items() if key != "tool_calls"} | {"content": said})
    return found


# ------------------------------------------------------------------ statistics
def statistics(
    questions: list[dict[str, Any]], attempts: dict[str, dict[str, Any]], dropped: dict[str, str], rows: list[dict[str, Any]],
    left_open: int,
) -> dict[str, Any]:  # fmt: skip
    """What was tried, kept and dropped, how long it was, what the tools were asked, what the critic said."""
    by_rule = Counter(rule for rule in dropped.values() if rule)
    verdicts = [one for row in rows for one in row["critic"]]
    judged = [one for one in verdicts if "failed" not in one]
    flagged = sum(message.get("loss", 0) for row in rows for message in row["messages"])
    found: dict[str, Any] = {
        "questions": len(questions), "attempts": len(attempts), "kept": len(rows), "left_open": left_open,
        "questions_kept": len({row["id"].rpartition("/")[0] for row in rows}),
        "dropped": {rule: by_rule[rule] for rule in RULES if by_rule[rule]},
        "turns": _spread([len(_turns(attempt)) for attempt in attempts.values()]),
        "turns_kept": _spread([len(row["critic"]) for row in rows]),
        "messages_kept": _spread([len(row["messages"]) for row in rows]),
        "stopped_by_max_turns": sum(attempt["status"] == "turns" for attempt in attempts.values()),
        "tools": _tools(attempts),
        "hops": _hops(questions, attempts, dropped),
        "critic": {
            "turns": len(verdicts), "not_judged": len(verdicts) - len(judged), "flagged": flagged,
            "flagged_share": flagged / max(len(verdicts), 1), "invalid": sum("invalid" in one for one in judged),
            **{name: mean(one[name] for one in judged) if judged else 0.0 for name in CRITERIA},
            "reasons": {name: _reasons(judged, name) for name in CRITERIA},
        },
    }  # fmt: skip
    return found


def _turns(attempt: dict[str, Any]) -> list[dict[str, Any]]:
    return [message for message in attempt["messages"] if message["role"] == "assistant"]


def _spread(values: list[int]) -> dict[str, float]:
    if not values:
        return {}
    return {"least": min(values), "median": median(values), "mean": round(mean(values), 2), "most": max(values)}


def _tools(attempts: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Tool -> calls, errors, calls answered from the cache, mean seconds."""
    calls: dict[str, list[dict[str, Any]]] = {}
    for attempt in attempts.values():
        for call in attempt["calls"]:
            calls.setdefault(call["name"] if len(call["name"]) < 40 else "(other)", []).append(call)
    return {
        name: {"calls": len(of), "errors": sum(call["status"] == "error" for call in of),
               "cached": sum(call["cached"] for call in of), "mean_s": round(mean(call["seconds"] for call in of), 4)}
        for name, of in sorted(calls.items())
    }  # fmt: skip


def _hops(questions: list[dict], attempts: dict[str, dict], dropped: dict[str, str]) -> dict[str, dict[str, int]]:
    """Hops of the question -> questions and attempts with how many were right."""
    hops = {row["id"]: str(row.get("hops") or "?") for row in questions}
    found: dict[str, dict[str, int]] = {}
    for of in hops.values():
        found.setdefault(of, {"questions": 0, "attempts": 0, "right": 0})["questions"] += 1
    for key in attempts:
        of = found[hops[key.rpartition("/")[0]]]
        of["attempts"] += 1
        of["right"] += not dropped.get(key)
    return dict(sorted(found.items()))


def _reasons(judged: list[dict[str, Any]], name: str) -> list[str]:
    """The first reasons for a 0."""
    return [one["reasons"].get(name, "") for one in judged if not one[name]][:REASONS_SHOWN]


# ------------------------------------------------------------------ files
def write_all(folder: Path, rows: list[dict[str, Any]], stats: dict[str, Any], about: dict[str, str]) -> None:
    """folder/trajectories.jsonl with its card, and report.md and report.json beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "trajectories.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    write_atomic(folder / "report.json", json.dumps(stats, indent=2, ensure_ascii=False) + "\n")
    write_atomic(folder / "report.md", report(stats))
    write_atomic(folder / "README.md", card(stats, about))


def report(stats: dict[str, Any]) -> str:
    """The statistics as Markdown."""
    critic = stats["critic"]
    lines = [
        "# Trajectories\n",
        f"{stats['questions']} questions, {stats['attempts']} attempts, {stats['kept']} kept for {stats['questions_kept']} "
        f"questions; {stats['left_open']} questions left open by trouble outside.\n",
        "## Dropped\n", *_table(("rule", "attempts", "what it says"),
                                [(rule, count, RULES[rule]) for rule, count in stats["dropped"].items()]),
        "## Length\n", *_table(("", "least", "median", "mean", "most"),
                               [(name.replace("_", " "), *stats[name].values())
                                for name in ("turns", "turns_kept", "messages_kept") if stats[name]]),
        f"{stats['stopped_by_max_turns']} attempts were stopped by max_turns.\n",
        "## Tools\n", *_table(("tool", "calls", "errors", "cached", "mean s"),
                              [(name, *of.values()) for name, of in stats["tools"].items()]),
        "## Hops\n", *_table(("hops", "questions", "attempts", "right"),
                             [(name, *of.values()) for name, of in stats["hops"].items()]),
        "## Critic\n",
        f"{critic['turns']} turns of kept trajectories, {critic['flagged']} flagged to be trained "
        f"({critic['flagged_share']:.1%}); {critic['invalid']} with an invalid call, {critic['not_judged']} not judged.\n",
        *_table(("criterion", "share that holds"), [(name, f"{critic[name]:.3f}") for name in CRITERIA]),
    ]  # fmt: skip
    for name in CRITERIA:
        lines += [f"- {name}: {reason}" for reason in critic["reasons"][name]]
    return "\n".join(lines) + "\n"


def _table(head: tuple, rows: list[tuple]) -> list[str]:
    """A Markdown table with a blank line after it."""
    cells = [head, ("---",) * len(head), *rows]
    return [*("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in cells), ""]


def card(stats: dict[str, Any], about: dict[str, str]) -> str:
    """The data-set card."""
    return f"""\
---
task_categories: [text-generation]
tags: [agent, tool-use, deep-search, synthetic]
---
# Search trajectories

{stats["kept"]} conversations in which an agent answers multi-hop questions with tools, made by `synthesize_trajectories`.

| | |
|---|---|
{chr(10).join(f"| {name} | {value} |" for name, value in about.items())}
| questions, attempts, kept | {stats["questions"]}, {stats["attempts"]}, {stats["kept"]} |
| turns, flagged to be trained | {stats["critic"]["turns"]}, {stats["critic"]["flagged"]} |

`trajectories.jsonl`, one object a line: `messages` (roles system, user, assistant, tool; `reasoning_content`, `tool_calls`;
every assistant turn has `loss` 0 or 1), `tools`, `question`, `answer`, `hops`, `source`, `wire`, `status` (done, or turns:
stopped by the limit), and `critic`: for each turn logic, tools and gain, 0 or 1, with reasons. Loss is 1 where all three hold,
and for the answer. Only attempts whose answer is right and stands in a result are here; report.md counts the others.

Results quote pages of the corpus that was searched: its licence and its errors are theirs. Questions, plans and reasoning are
synthetic; they come from the teacher named above and share its faults. Keep questions of evaluations out of the questions file.
"""
