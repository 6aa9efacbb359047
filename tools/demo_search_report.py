"""What the search demo measures: accuracy on held-out questions, as a table and as plots.

Every evaluation answers the same questions with the same seeds, so changes are taken question by question. Questions over one
path have much in common: errors are those of a bootstrap over paths.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_nb.records import Rollout
from megatron_nb.rewards.answer_search import answer_of, matches
from megatron_nb.rollout.store import rollout_of, step_file
from tools.demo_rl_report import Gain, plain

RESAMPLES = 2000
TOLD = {
    "accuracy": "questions answered right", "ended": "episodes that end with an answer", "turns": "turns of an episode",
    "turn_reward": "the critic's reward of a turn",
}  # fmt: skip
STEPS = {"sft": "before SFT -> after it", "rl": "after SFT -> after RL"}


@dataclass
class Seen:
    """One evaluation, question by question; a question's episodes are averaged."""

    path: np.ndarray  # [questions] number of its path
    measures: dict[str, np.ndarray]  # of TOLD -> [questions]

    def mean(self, name: str) -> float:
        return float(self.measures[name].mean())


@dataclass
class Course:
    """A seed's evaluations, and the change of every measure in SFT and in RL."""

    accuracy: dict[str, float]  # before | after_sft | after_rl
    gains: dict[str, dict[str, Gain]]  # of STEPS -> of TOLD
    rl_steps: list[int] = field(default_factory=list)
    rl_accuracy: list[float] = field(default_factory=list)
    train: list[tuple[int, float]] = field(default_factory=list)  # (step, mean reward in training)


def read(run: Path, step: int, heldout: Path) -> Seen:
    """An evaluation of a run. RuntimeError for episodes that failed: no figure is made of what is missing."""
    asked = {row["question"]: row for row in map(json.loads, heldout.read_text().splitlines())}
    episodes: dict[tuple[str, int], list[Rollout]] = {}
    for row in map(json.loads, step_file(run, step, "heldout").read_text().splitlines()):
        episodes.setdefault((row["prompt"][-1]["content"], row["index"]), []).append(rollout_of(row))
    found: dict[str, list[list[float]]] = {question: [] for question in asked}
    for (question, _), rows in episodes.items():
        if rows[-1].status == "invalid":
            raise RuntimeError(f"an episode of {run.name} at step {step} is invalid, see {run}/rollouts: no figure without it")
        row, last = asked[question], rows[-1]
        right = last.status == "done" and matches(answer_of(last.text), [row["answer"], *row["aliases"]])
        turns = [turn for one in rows for turn in one.turns if turn.kind == "assistant"]
        rewards = [turn.reward for turn in turns if turn.reward is not None]
        found[question].append([right, last.status == "done", len(turns), float(np.mean(rewards)) if rewards else 0.0])
    used = [question for question, its in found.items() if its]
    paths = {path: place for place, path in enumerate(dict.fromkeys(map(_path, map(asked.get, used))))}
    values = np.array([np.mean(found[question], 0) for question in used])
    return Seen(np.array([paths[_path(asked[one])] for one in used]), dict(zip(TOLD, values.T)))


def _path(row: dict) -> tuple[str, ...]:
    return tuple(step["title"] for step in row["path"])


def gains(before: Seen, after: Seen) -> dict[str, Gain]:
    """Changes with their standard errors: paths are drawn anew, with all their questions."""
    count = int(before.path.max()) + 1
    weights = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)[:, before.path]
    found = {}
    for name in TOLD:
        change = after.measures[name] - before.measures[name]
        error = float(np.std(weights @ change / np.maximum(weights.sum(1), 1)))
        found[name] = Gain(name, before.mean(name), after.mean(name), error)
    return found


def evaluations(run: Path) -> list[int]:
    return sorted(int(file.stem.split("-")[1]) for file in (run / "rollouts").glob("heldout-*.jsonl"))


def judge_stages(folder: Path, heldout: Path) -> Course:
    """Every held-out evaluation of a seed's folder."""
    run = folder / "rl_agentic"
    steps = evaluations(run)
    seen = [read(run, step, heldout) for step in steps]
    before = read(folder / "before", 0, heldout)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return Course(
        {"before": before.mean("accuracy"), "after_sft": seen[0].mean("accuracy"), "after_rl": seen[-1].mean("accuracy")},
        {"sft": gains(before, seen[0]), "rl": gains(seen[0], seen[-1])}, steps, [one.mean("accuracy") for one in seen],
        [(row["step"], row["reward_mean"]) for row in rows if row.get("reward_mean") is not None],
    )  # fmt: skip


def shown(course: Course) -> dict[str, bool]:
    """What has to be seen -> whether it was."""
    return {f"accuracy rises in {step.upper()}": course.gains[step]["accuracy"].rose for step in STEPS}


def table(course: Course, errors: str) -> str:
    """Before, after, change and standard error of every measure. errors: what the errors are over."""
    lines = [f"{'':<36}{'before':>9}{'after':>9}{'change':>9}{'error':>8}   (standard errors {errors})"]
    for step, title in STEPS.items():
        lines.append(title)
        for name, gain in course.gains[step].items():
            lines.append(f"  {TOLD[name]:<34}{gain.before:9.3f}{gain.after:9.3f}{gain.difference:+9.3f}{gain.error:8.3f}")
    return "\n".join([*lines, *(f"{'yes' if seen else 'NO ':<4} {what}" for what, seen in shown(course).items())])


def flat(course: Course) -> dict[str, float]:
    """The table as numbers for summary.json."""
    told = {f"accuracy_{when}": value for when, value in course.accuracy.items()}
    for step, its in course.gains.items():
        for name, gain in its.items():
            values = {"before": gain.before, "after": gain.after, "error": gain.error}
            told |= {f"{step}_{name}_{when}": value for when, value in values.items()}
    return {name: float(value) for name, value in told.items()}


def over_seeds(courses: list[Course]) -> Course:
    """Means over seeds; the error of a change is that of its mean over seeds."""
    accuracy = {when: float(np.mean([one.accuracy[when] for one in courses])) for when in courses[0].accuracy}
    merged: dict[str, dict[str, Gain]] = {}
    for step in STEPS:
        merged[step] = {}
        for name in TOLD:
            its = [one.gains[step][name] for one in courses]
            before, after = (float(np.mean([getattr(gain, when) for gain in its])) for when in ("before", "after"))
            merged[step][name] = Gain(name, before, after, plain(np.array([gain.difference for gain in its]))[1])
    return Course(accuracy, merged)


def draw(courses: list[Course], path: Path) -> None:
    """Accuracy by stage with errors of the last change, and over the steps of RL; several seeds: thin lines and their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bars, axis) = pyplot.subplots(1, 2, figsize=(10, 3.8))
    course = over_seeds(courses) if len(courses) > 1 else courses[0]
    errors = [0.0, course.gains["sft"]["accuracy"].error, course.gains["rl"]["accuracy"].error]
    names, colors = ["before", "after SFT", "after RL"], ["C7", "C0", "C1"]
    bars.bar(names, list(course.accuracy.values()), yerr=errors, capsize=4, color=colors)
    bars.set(title="held-out questions answered right", ylim=(0, 1.02))
    bars.set_xlabel("bars: standard error of the change from the stage before")
    for one in courses if len(courses) > 1 else ():
        axis.plot(one.rl_steps, one.rl_accuracy, color="C1", alpha=0.3, linewidth=1)
    axis.plot(courses[0].rl_steps, np.mean([one.rl_accuracy for one in courses], 0), color="C1", marker="o", markersize=3,
              label="accuracy, held-out questions")  # fmt: skip
    train = [dict(one.train) for one in courses]
    steps = sorted(set.intersection(*map(set, train)))
    axis.plot(steps, [np.mean([its[step] for its in train]) for step in steps], color="C2", alpha=0.5, linewidth=1,
              label="mean reward, training questions")  # fmt: skip
    axis.set(title="reinforcement learning", xlabel="step", ylim=(0, 1.02))
    for one in (bars, axis):
        one.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
