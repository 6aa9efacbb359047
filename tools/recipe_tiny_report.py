"""What the stages of the tiny recipe changed: held-out figures before and after each of them, and answers of its models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_nb.rollout.store import step_file
from tools.demo_rl_report import plain
from tools.demo_search_report import evaluations

MEASURES = {  # the start of a figure in a stage's summary.json -> (what it is, whether less is better); the first that is there
    "heldout_accuracy": ("pairs ordered right, held out", False),
    "heldout_loss": ("loss on rows held out from SFT", True),
    "reward": ("reward of answers to held-out prompts", False),
}
TASKS = {"chat": "score", "code": "pass_rate", "search": "score"}  # of tasks=recipe_tiny -> the metric that is shown
ASKED = {"chat": 3, "code": 1}  # held-out questions that are put to the exported models
LONGEST = 112  # tokens of an answer


@dataclass
class Change:
    """A held-out figure before and after a stage, with the standard error of the difference; 0 where none is known."""

    what: str
    before: float
    after: float
    error: float
    less: bool = False  # is better

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def better(self) -> bool:
        return (-self.difference if self.less else self.difference) > 2 * self.error


def changes_of(chain: Path) -> dict[str, Change]:
    """Stage -> what it changed, of every stage that tells."""
    found = {}
    for row in json.loads((chain / "ledger.json").read_text())["stages"]:
        told = row["metrics"]
        for name, (what, less) in MEASURES.items():
            if name == "reward" and not row["stage"].startswith("rl_"):
                continue
            if f"{name}_before" in told and f"{name}_after" in told:
                error = paired_error(chain / row["name"]) if name == "reward" else 0.0
                found[row["name"]] = Change(what, told[f"{name}_before"], told[f"{name}_after"], error, less)
                break
    return found


def paired_error(run: Path) -> float:
    """Standard error of what an RL run changed: the same held-out prompts are answered before and after."""
    before, after = (judged(step_file(run, step, "heldout")) for step in (evaluations(run)[0], evaluations(run)[-1]))
    return plain(np.array([after[prompt] - before[prompt] for prompt in sorted(before.keys() & after.keys())]))[1]


def judged(file: Path) -> dict[str, float]:
    """Prompt -> mean of its answers, by the held-out judge where there is one; answers without a verdict do not count."""
    found: dict[str, list[float]] = {}
    for row in _rows(file):
        if row["score"] is not None:
            said = row["score"]["parts"].get("heldout_judge", row["score"]["reward"])
            found.setdefault(row["group_id"].split(".", 2)[2], []).append(said)  # heldoutSTEP.0.PROMPT
    return {prompt: float(np.mean(its)) for prompt, its in found.items()}


def over_seeds(runs: list[dict[str, Change]]) -> dict[str, Change]:
    """Means over seeds; the error of a change is that of its mean over seeds."""
    merged = {}
    for name, first in runs[0].items():
        its = [run[name] for run in runs]
        error = float(np.std([one.difference for one in its], ddof=1) / np.sqrt(len(its)))
        before, after = (float(np.mean([getattr(one, when) for one in its])) for when in ("before", "after"))
        merged[name] = Change(first.what, before, after, error, first.less)
    return merged


def improved(found: dict[str, Change], names: tuple[str, ...]) -> bool:
    return all(found[name].better for name in names)


def table(found: dict[str, Change], errors: str) -> str:
    """A line for every stage. errors: what they are over."""
    lines = [f"{'':<20}{'':<40}{'before':>9}{'after':>9}{'change':>9}{'error':>8}   better by two standard errors ({errors})"]
    for name, one in found.items():
        values = f"{one.before:9.3f}{one.after:9.3f}{one.difference:+9.3f}{one.error:8.3f}"
        lines.append(f"{name:<20}{one.what:<40}{values}   {'yes' if one.better else 'NO'}")
    return "\n".join(lines)


def scores(chain: Path) -> str:
    """The evaluations after the stages: a line for each."""
    told = json.loads((chain / "ledger.json").read_text())
    rows = [("start", told.get("base_evaluation")), *((row["name"], row["evaluation"]) for row in told["stages"])]
    lines = [f"{'evaluated after':<20}" + "".join(f"{f'{task} {metric}':>18}" for task, metric in TASKS.items())]
    for name, its in rows:
        if its:
            lines.append(f"{name:<20}" + "".join(f"{its.get(task, {}).get(metric, float('nan')):18.3f}"
                                                 for task, metric in TASKS.items()))  # fmt: skip
    return "\n".join(lines)


def flat(found: dict[str, Change]) -> dict[str, float]:
    """The table as numbers for summary.json."""
    return {f"{name}_{key}": float(getattr(one, key)) for name, one in found.items() for key in ("before", "after", "error")}


def ask_both(chain: Path) -> str:
    """Held-out questions, and what transformers makes of the exported models of before and after RL."""
    asked = [(name, row) for name, count in ASKED.items() for row in _rows(chain / "data" / f"{name}_heldout.jsonl")[:count]]
    questions = [row.get("messages") or [{"role": "user", "content": row["prompt"]}] for _, row in asked]
    before, after = (_answers(chain / name / "model", questions) for name in ("export_sft", "export"))
    lines = ["the exported models, as transformers answers (greedy):"]
    for messages, one, other in zip(questions, before, after):
        lines += ["", f"question   {messages[-1]['content']}", f"before RL  {_shifted(one)}", f"after      {_shifted(other)}"]
    return "\n".join(lines)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _shifted(text: str) -> str:
    return text.replace("\n", "\n           ")


def _answers(folder: Path, questions: list[list[dict[str, Any]]]) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    said = []
    for messages in questions:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = model.generate(prompt["input_ids"], max_new_tokens=LONGEST, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        said.append(tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return said
