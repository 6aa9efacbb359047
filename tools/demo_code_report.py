"""What the code demo measures: held-out answers before RL and after each stage, judged in the sandbox, as a table and as plots.

Every evaluation answers the same prompts with the same seeds, so differences are taken prompt by prompt; errors are those of a
bootstrap over prompts, which also serves shares whose divisor changes (optimal among passing).
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from megatron_nb.records import Conversation, Prompt, Rollout, Score
from megatron_nb.rewards.code import GatedComplexity
from megatron_nb.rollout.store import rollout_of, step_file
from tools.demo_rl_report import Gain, plain

STAGES = ("rl_code_pass_rate", "rl_code_complexity")
RESAMPLES = 2000
HOLDS = 0.02  # what the pass rate may lose in stage 2
TOLD = {
    "pass_rate": "share of tests passed",
    "solved": "answers that pass every test",
    "optimal_share": "  of these: of the optimal class",
    "unknown_share": "  of these: class unknown",
    "form": "answers with the form",
}


@dataclass
class Judged:
    """One evaluation, prompt by prompt: sums over a prompt's answers."""

    answers: np.ndarray  # [prompts]
    pass_rate: np.ndarray  # [prompts] sum of passed / total
    solved: np.ndarray  # [prompts] answers that pass every test
    optimal: np.ndarray  # [prompts] of these, those of the optimal class
    unknown: np.ndarray  # [prompts] of these, those whose class is unknown
    form: np.ndarray  # [prompts] answers with the form

    def measures(self, weights: np.ndarray | None = None) -> dict[str, Any]:
        """What TOLD names; weights: [resamples, prompts], how often each prompt counts, gives [resamples] of everything."""
        values = np.stack([getattr(self, one.name) for one in fields(self)], -1)
        sums = values.sum(0) if weights is None else weights @ values
        answers, pass_rate, solved, optimal, unknown, form = np.moveaxis(sums, -1, 0)
        among = np.maximum(solved, 1)
        return {
            "pass_rate": pass_rate / answers, "solved": solved / answers, "optimal_share": optimal / among,
            "unknown_share": unknown / among, "form": form / answers,
        }  # fmt: skip


@dataclass
class Course:
    """One RL stage: its held-out evaluations, and the gains from the first to the last."""

    stage: str
    steps: list[int]
    measures: list[dict[str, float]]
    gains: dict[str, Gain] = field(default_factory=dict)


class Referee:
    """Judges held-out answers by the reward of stage 2, each different answer to a problem once."""

    def __init__(self, heldout: Path, reward: GatedComplexity):
        self.rows = {row["prompt"]: row for row in map(json.loads, heldout.read_text().splitlines())}
        self.reward, self._scores = reward, {}

    def judge(self, run: Path, step: int) -> Judged:
        """One evaluation of a run. RuntimeError when the judge failed: no figure is made of what is missing."""
        answers = [json.loads(line) for line in step_file(run, step, "heldout").read_text().splitlines()]
        asked = [self.rows[answer["prompt"][-1]["content"]] for answer in answers]
        scores = asyncio.run(self._all([(rollout_of(answer), row) for answer, row in zip(answers, asked)]))
        places = {text: place for place, text in enumerate(self.rows)}
        sums = {name: np.zeros(len(places)) for name in ("answers", "pass_rate", "solved", "optimal", "unknown", "form")}
        for row, score in zip(asked, scores):
            if score.reward is None:
                raise RuntimeError(f"an answer to {row['id']} of {run.name} at step {step} has no verdict: {score.reason}")
            place, parts = places[row["prompt"]], score.parts
            solved = "total" in parts and parts["passed"] == parts["total"]
            optimal = solved and parts.get("unknown") == 0 and parts["c_hat"] == parts["c_star"]
            values = (1, parts.get("pass_rate", 0.0), solved, optimal, solved and parts.get("unknown", 1.0), "total" in parts)
            for name, value in zip(sums, values):
                sums[name][place] += value
        used = sums["answers"] > 0
        return Judged(**{name: values[used] for name, values in sums.items()})

    async def _all(self, answers: list[tuple[Rollout, dict]]) -> list[Score]:
        keys = [(row["problem"], rollout.text) for rollout, row in answers]
        missing = {key: answer for key, answer in zip(keys, answers) if key not in self._scores}
        found = await asyncio.gather(*(self._score(*answer) for answer in missing.values()))
        self._scores |= dict(zip(missing, found))
        return [self._scores[key] for key in keys]

    async def _score(self, rollout: Rollout, row: dict) -> Score:
        said = Conversation([{"role": "user", "content": row["prompt"]}], row["id"], "heldout")
        return await self.reward.score_rollout(Prompt(said, [], row), rollout)


def evaluations(run: Path) -> list[int]:
    return sorted(int(file.stem.split("-")[1]) for file in (run / "rollouts").glob("heldout-*.jsonl"))


def gains(before: Judged, after: Judged) -> dict[str, Gain]:
    """The change of every measure with its standard error: both evaluations resampled by the same prompts."""
    count = len(before.answers)
    weights = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    a, b, many_a, many_b = before.measures(), after.measures(), before.measures(weights), after.measures(weights)
    return {name: Gain(name, float(a[name]), float(b[name]), float(np.std(many_b[name] - many_a[name]))) for name in TOLD}


def judge_stages(folder: Path, referee: Referee) -> list[Course]:
    """Every held-out evaluation of both stages."""
    courses = []
    for stage in STAGES:
        steps = evaluations(folder / stage)
        judged = [referee.judge(folder / stage, step) for step in steps]
        courses.append(Course(stage, steps, [one.measures() for one in judged], gains(judged[0], judged[-1])))
    return courses


def shown(courses: list[Course]) -> dict[str, bool]:
    """What has to be seen -> whether it was."""
    first, second = courses
    held = second.gains["pass_rate"]
    return {
        "stage 1: the pass rate rises": first.gains["pass_rate"].rose,
        "stage 2: the optimal share rises": second.gains["optimal_share"].rose,
        f"stage 2: the pass rate holds within {HOLDS:g}": bool(held.difference >= -HOLDS),
    }


def table(courses: list[Course], errors: str) -> str:
    """Before, after, change and standard error of every measure. errors: what the errors are over."""
    lines = [f"{'':<38}{'before':>9}{'after':>9}{'change':>9}{'error':>8}   (standard errors {errors})"]
    for course in courses:
        lines.append(course.stage)
        for name, gain in course.gains.items():
            lines.append(f"  {TOLD[name]:<36}{gain.before:9.3f}{gain.after:9.3f}{gain.difference:+9.3f}{gain.error:8.3f}")
    return "\n".join([*lines, *(f"{'yes' if seen else 'NO ':<4} {what}" for what, seen in shown(courses).items())])


def flat(courses: list[Course]) -> dict[str, float]:
    """The table as numbers for summary.json."""
    first, second = (course.gains for course in courses)
    told = {
        "pass_rate_before": first["pass_rate"].before, "pass_rate_after_stage1": first["pass_rate"].after,
        "pass_rate_after_stage2": second["pass_rate"].after,
        "optimal_share_before": second["optimal_share"].before, "optimal_share_after": second["optimal_share"].after,
    }  # fmt: skip
    for number, course in enumerate(courses, 1):
        for name, gain in course.gains.items():
            values = {"before": gain.before, "after": gain.after, "error": gain.error}
            told |= {f"stage{number}_{name}_{when}": value for when, value in values.items()}
    return {name: float(value) for name, value in told.items()}


def over_seeds(seeds: list[list[Course]]) -> list[Course]:
    """Means over seeds; the error of a change is that of its mean over seeds."""
    merged = []
    for runs in zip(*seeds):
        its = {}
        for name in TOLD:
            one = [run.gains[name] for run in runs]
            error = plain(np.array([gain.difference for gain in one]))[1]
            before, after = (float(np.mean([getattr(gain, when) for gain in one])) for when in ("before", "after"))
            its[name] = Gain(name, before, after, error)
        merged.append(Course(runs[0].stage, runs[0].steps, [], its))
    return merged


def draw(seeds: list[list[Course]], path: Path) -> None:
    """Pass rate and optimal share over the steps of both stages in a row; several seeds: thin lines and their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    for axis, name, title in zip(axes, ("pass_rate", "optimal_share"), ("share of tests passed", "optimal among passing")):
        for number, runs in enumerate(zip(*seeds)):
            shift = seeds[0][0].steps[-1] if number else 0
            steps = [step + shift for step in runs[0].steps]
            lines = [[one[name] for one in run.measures] for run in runs]
            for line in lines if len(lines) > 1 else ():
                axis.plot(steps, line, color=f"C{number}", alpha=0.3, linewidth=1)
            axis.plot(steps, np.mean(lines, 0), color=f"C{number}", marker="o", markersize=3, label=runs[0].stage)
        axis.set(title=f"{title}, held-out prompts", xlabel="step", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
