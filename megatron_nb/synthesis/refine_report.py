"""What a refinement leaves: records, rows to train on, a report for people and one for programs, a card of the data set."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron_nb.asking.ledger import Ledger
from megatron_nb.run import write_atomic

CARD = """\
---
pretty_name: Refined solutions with reasoning
task_categories: [text-generation]
configs:
- config_name: default
  data_files: solutions.jsonl
---

# Refined solutions with reasoning

{accepted} conversations whose last turn is a refined solution (`content`) with the reasoning that leads to it
(`reasoning_content`), out of {tasks} tasks.{known}

## How it was made

{made}

A checklist was written for every task, the draft critiqued against it and rewritten until every item passed or nothing
improved. Then the reasoning was written with the solution in sight, and kept when its own final answer is the solution's and
nothing in it gives away that the solution was known. It is a reconstruction, not a record of how the solution was found. The
terms of the tasks and of the models' outputs apply.

## Fields

`solutions.jsonl`: id, messages (the last with reasoning_content and loss 1), source, tools. `records.jsonl`: id, source,
question, draft, checklist, rounds (answer, verdicts, passed), ended, final, reasoning_content, accepted, rejected_by,
reasonings (text, rejected_by, shown), reference, correct. Counts: `report.md`, `report.json`.
"""


@dataclass
class Price:
    """Of a million tokens, in any currency."""

    prompt: float = 0.0
    reply: float = 0.0

    def __post_init__(self):
        if self.prompt < 0 or self.reply < 0:
            raise ValueError(f"prompt={self.prompt} and reply={self.reply} must not be negative")


def used_tokens(ledgers: dict[str, Ledger], prices: dict[str, Price]) -> dict[str, dict[str, float]]:
    """Step -> calls, tokens, cost of all replies on disk. ledgers: by role."""
    used: dict[str, dict[str, float]] = {}
    for role, ledger in ledgers.items():
        price = prices.get(role, Price())
        for key, row in ledger.rows.items():
            if "text" not in row:
                continue
            names = key.split("/")[1:-1]
            step = next((name for name in reversed(names) if not name.startswith("try-")), "").partition("-")[0]
            into = used.setdefault(step, {"calls": 0, "prompt_tokens": 0, "reply_tokens": 0, "cost": 0.0})
            into["calls"] += 1
            into["prompt_tokens"] += row["prompt_tokens"]
            into["reply_tokens"] += row["tokens"]
            into["cost"] += (row["prompt_tokens"] * price.prompt + row["tokens"] * price.reply) / 1e6
    return used


def measure(records: Sequence[dict[str, Any]], dropped: Counter, used: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The report as nested mappings: correctness before and after, how refinements ended, rejections by rule, tokens."""
    known = [one for one in records if isinstance(one["correct"].get("draft"), bool) and "final" in one["correct"]]
    accepted = [one for one in records if one["accepted"]]
    sure = [one for one in accepted if isinstance(one["correct"].get("final"), bool)]
    rules = Counter(rule for one in records for rule in set(one["rejected_by"]))
    alone = Counter(one["rejected_by"][0] for one in records if len(set(one["rejected_by"])) == 1)
    tries = Counter(rule for one in records for reasoning in one["reasonings"] for rule in set(reasoning["rejected_by"]))
    moves = Counter((_word(one["correct"]["draft"]), _word(one["correct"]["final"])) for one in known)
    critiqued = [one for one in records if one["rounds"]]
    lengths = sorted(len(one["reasoning_content"]) for one in accepted)
    return {
        "tasks": len(records), "accepted": len(accepted), "dropped": dict(dropped),
        "correctness": {
            "compared": len(known), "draft": _share(one["correct"]["draft"] is True for one in known),
            "final": _share(one["correct"]["final"] is True for one in known),
            "accepted": _share(one["correct"]["final"] for one in sure), "accepted_compared": len(sure),
            "moves": {f"{before} -> {after}": count for (before, after), count in sorted(moves.items())},
        },
        "ended": dict(Counter(one["ended"] for one in records).most_common()),
        "rounds": dict(sorted(Counter(len(one["rounds"]) for one in records).items())),
        "items_passed_by_drafts": _share(verdict["passed"] for one in critiqued for verdict in one["rounds"][0]["verdicts"]),
        "rejected": {rule: {"tasks": count, "by_it_alone": alone[rule]} for rule, count in rules.most_common()},
        "reasonings": sum(len(one["reasonings"]) for one in records), "reasonings_rejected": dict(tries.most_common()),
        "reasoning_chars": {"least": lengths[0], "median": median(lengths), "most": lengths[-1]} if lengths else {},
        "tokens": used,
    }  # fmt: skip


def _share(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def _word(value: bool | None) -> str:
    return {True: "right", False: "wrong", None: "unknown"}[value]


def summary_of(report: dict[str, Any]) -> dict[str, float]:
    """The numbers of the report that a summary holds, flat."""
    right = report["correctness"]
    numbers = {"tasks": report["tasks"], "accepted": report["accepted"], "compared": right["compared"]}
    numbers |= {f"correct_{name}": right[name] for name in ("draft", "final", "accepted")}
    numbers |= {f"dropped_{name}": count for name, count in report["dropped"].items()}
    numbers |= {f"rejected_{rule.replace(':', '_')}": found["tasks"] for rule, found in report["rejected"].items()}
    for key in ("calls", "prompt_tokens", "reply_tokens", "cost"):
        numbers[key] = sum(step[key] for step in report["tokens"].values())
    return numbers


# ------------------------------------------------------------------ text
def report_text(report: dict[str, Any], title: str) -> str:
    """The report in Markdown."""
    right = report["correctness"]
    lines = [f"# {title}", "", f"{report['tasks']} tasks, {report['accepted']} accepted; left out before: "
             f"{_counts(report['dropped']) or 'none'}."]  # fmt: skip
    if right["compared"]:
        lines += ["", "## Correct against the rows' references", "", "| answers | compared | correct |", "|---|---|---|",
                  f"| drafts | {right['compared']} | {right['draft']:.1%} |",
                  f"| refined | {right['compared']} | {right['final']:.1%} |",
                  f"| refined and accepted | {right['accepted_compared']} | {right['accepted']:.1%} |",
                  "", f"Draft -> refined: {_counts(right['moves'])}."]  # fmt: skip
    lines += ["", "## Refinement", "", f"Ended: {_counts(report['ended'])}.", "",
              f"Answers critiqued per task: {_counts(report['rounds'])}. Items that drafts passed: "
              f"{report['items_passed_by_drafts']:.1%}."]  # fmt: skip
    lines += ["", "## Rejected", "", "| rule | tasks | by this rule alone |", "|---|---|---|"]
    lines += [f"| {rule} | {found['tasks']} | {found['by_it_alone']} |" for rule, found in report["rejected"].items()]
    lines += ["", f"Reasonings written: {report['reasonings']}; of those rejected: "
              f"{_counts(report['reasonings_rejected']) or 'none'}."]  # fmt: skip
    if chars := report["reasoning_chars"]:
        lines += ["", f"Accepted reasonings have {chars['least']} to {chars['most']} characters, median {chars['median']:g}."]
    lines += ["", "## Tokens", "", "| step | calls | prompt tokens | reply tokens | cost |", "|---|---|---|---|---|"]
    lines += [f"| {step} | {one['calls']} | {one['prompt_tokens']} | {one['reply_tokens']} | {one['cost']:.4g} |"
              for step, one in report["tokens"].items()]  # fmt: skip
    return "\n".join(lines) + "\n"


def _counts(counts: dict[Any, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def card_text(report: dict[str, Any], models: dict[str, str], sources: dict[str, str], rules: str) -> str:
    """The card of the data set."""
    right = report["correctness"]
    known = f" Of {right['accepted_compared']} with a reference {right['accepted']:.1%} are right."
    made = [f"- {role}: {model}" for role, model in models.items()]
    made += [f"- tasks of `{name}`: {path}" for name, path in sources.items()]
    return CARD.format(
        accepted=report["accepted"], tasks=report["tasks"], known=known if right["accepted_compared"] else "",
        made="\n".join([*made, f"- {rules}"]),
    )  # fmt: skip


def write_all(
    folder: Path, records: list[dict[str, Any]], rows: list[dict[str, Any]], report: dict[str, Any], card: str
) -> None:  # fmt: skip
    """All files of the folder, each whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("records.jsonl", records), ("solutions.jsonl", rows)):
        write_atomic(folder / name, "".join(json.dumps(line) + "\n" for line in lines))
    write_atomic(folder / "report.json", json.dumps(report, indent=2) + "\n")
    write_atomic(folder / "report.md", report_text(report, "Refined solutions"))
    write_atomic(folder / "README.md", card)
