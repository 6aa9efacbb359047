"""What the RL demo measures: held-out answers judged before and after, with length taken out, as a table and as plots.

The judges are reward models trained on pairs that the rewards of the stages never saw. Before and after are the answers to the
same held-out prompts with the same seeds, so every difference is taken prompt by prompt, and errors are over prompts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_nb.data.preferences import answer_ids, pair_ids
from megatron_nb.records import Conversation
from megatron_nb.rewards.pairwise import probability
from megatron_nb.training.hf_reward import load_reward_model
from tools.demo_rl_data import quality


@dataclass
class Gain:
    """A difference over prompts (or seeds) with its standard error."""

    what: str
    before: float
    after: float
    error: float

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def rose(self) -> bool:
        return self.difference > 2 * self.error


class Judges:
    """The held-out reward models, on answers as rollouts/heldout-N.jsonl holds them."""

    def __init__(self, pointwise: Path, pairwise: Path):
        self.pointwise, self.tokenizer, kind = load_reward_model(pointwise)
        self.pairwise, _, other = load_reward_model(pairwise)
        assert (kind, other) == ("pointwise", "pairwise")

    def rewards(self, rows: list[dict]) -> np.ndarray:
        """[n] scores of the point-wise judge."""
        ids = [answer_ids(_asked(row), row["text"], self.tokenizer) for row in rows]
        return self.pointwise(ids).double().numpy()

    def wins(self, rows: list[dict], others: list[dict]) -> np.ndarray:
        """[n] probability that an answer is better than the other one to the same prompt, both orders judged."""
        texts = [(_asked(row), row["text"], other["text"]) for row, other in zip(rows, others, strict=True)]
        ab = self.pairwise([pair_ids(asked, a, b, self.tokenizer) for asked, a, b in texts]).tolist()
        ba = self.pairwise([pair_ids(asked, b, a, self.tokenizer) for asked, a, b in texts]).tolist()
        return np.array([probability(one, two) for one, two in zip(ab, ba)])


def _asked(row: dict) -> Conversation:
    return Conversation(row["prompt"], row["group_id"], "heldout")


def prompt_key(messages: list[dict]) -> str:
    """What was said, whatever else a message carries."""
    return json.dumps([[message["role"], message["content"]] for message in messages])


def heldout_answers(run: Path) -> dict[int, list[dict]]:
    """Step -> the answers to the held-out prompts, in one order; an answer that failed is left out of all steps."""
    found = {}
    for file in sorted((run / "rollouts").glob("heldout-*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().split("\n") if line]
        # the group's id names the step too: the prompt itself tells which answers belong together
        found[int(file.stem.split("-")[1])] = {(prompt_key(row["prompt"]), row["index"]): row for row in rows}
    whole = [{key for key, row in rows.items() if row["status"] != "invalid"} for rows in found.values()]
    keys = sorted(set.intersection(*whole)) if whole else []
    return {step: [rows[key] for key in keys] for step, rows in found.items()}


def at_equal_length(difference: np.ndarray, longer: np.ndarray) -> tuple[float, float]:
    """(difference expected where lengths are equal, its standard error): intercept of a line over the length difference.

    Least squares; the error is the heteroscedasticity-robust one (HC1). All lengths equal: the plain mean and its error.
    """
    count = len(difference)
    if np.ptp(longer) == 0:
        return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(count))
    x = np.stack([np.ones(count), longer], 1)
    inverse = np.linalg.inv(x.T @ x)
    line = inverse @ x.T @ difference
    left = difference - x @ line
    covariance = inverse @ (x.T * left**2) @ x @ inverse * count / (count - 2)
    return float(line[0]), float(np.sqrt(covariance[0, 0]))


def plain(difference: np.ndarray) -> tuple[float, float]:
    """(mean, standard error)."""
    return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(len(difference)))


@dataclass
class Course:
    """One RL stage as the held-out judges saw it; lists are over the evaluated steps."""

    stage: str
    steps: list[int]
    reward: list[float]
    win_rate: list[float]
    win_error: list[float]
    length: list[float]
    gains: list[Gain]  # from the first evaluation to the last
    train: list[tuple[int, float]]  # (step, mean reward in training)


def judge_stage(stage: str, run: Path, judges: Judges, ideals: dict[str, str]) -> Course:
    """Judge every evaluation of a run. ideals: prompt_key -> ideal answer."""
    answers = heldout_answers(run)
    steps = sorted(answers)
    first = answers[steps[0]]
    rewards = {step: judges.rewards(answers[step]) for step in steps}
    wins = {step: judges.wins(answers[step], first) for step in steps}
    lengths = {step: np.array([len(row["ids"]) for row in answers[step]], float) for step in steps}
    last = steps[-1]
    ruled = {step: np.array([quality(ideals[prompt_key(row["prompt"])], row["text"]) for row in answers[step]])
             for step in (steps[0], last)}  # fmt: skip
    longer = lengths[last] - lengths[steps[0]]
    gains = []
    for what, difference, before in (
        ("reward", rewards[last] - rewards[steps[0]], rewards[steps[0]].mean()),
        ("win_rate", wins[last] - 0.5, 0.5),
    ):
        controlled = at_equal_length(difference, longer)
        for name, (value, error) in ((what, plain(difference)), (f"{what}_length_controlled", controlled)):
            gains.append(Gain(name, float(before), float(before) + value, error))
    value, error = plain(ruled[last] - ruled[steps[0]])
    gains.append(Gain("rule", float(ruled[steps[0]].mean()), float(ruled[last].mean()), error))
    value, error = plain(longer)
    gains.append(Gain("length", float(lengths[steps[0]].mean()), float(lengths[last].mean()), error))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n") if line]
    train = [(row["step"], row["reward_mean"]) for row in rows if row.get("reward_mean") is not None]
    return Course(
        stage, steps, [float(rewards[step].mean()) for step in steps], [float(wins[step].mean()) for step in steps],
        [plain(wins[step])[1] for step in steps], [float(lengths[step].mean()) for step in steps], gains, train,
    )  # fmt: skip


MUST_RISE = ("reward_length_controlled", "win_rate_length_controlled")
TOLD = {
    "reward": "reward, held-out point-wise judge",
    "reward_length_controlled": "  the same at equal length",
    "win_rate": "win rate over the start, held-out pair-wise judge",
    "win_rate_length_controlled": "  the same at equal length",
    "rule": "quality by the rule that judged the pairs",
    "length": "length in tokens",
}


def table(stages: dict[str, list[Gain]], errors: str) -> str:
    """Before, after, difference and standard error of every measure. errors: what the errors are over."""
    lines = [f"{'':<52}{'before':>9}{'after':>9}{'change':>9}{'error':>8}   rose beyond two standard errors ({errors})"]
    for stage, gains in stages.items():
        lines.append(stage)
        for gain in gains:
            verdict = "" if gain.what == "length" else "yes" if gain.rose else "NO" if gain.what in MUST_RISE else "no"
            values = f"{gain.before:9.3f}{gain.after:9.3f}{gain.difference:+9.3f}{gain.error:8.3f}"
            lines.append(f"  {TOLD[gain.what]:<50}{values}   {verdict}")
    return "\n".join(lines)


def shown(stages: dict[str, list[Gain]]) -> bool:
    """Whether everything that must rise rose."""
    return all(gain.rose for gains in stages.values() for gain in gains if gain.what in MUST_RISE)


def flat(stages: dict[str, list[Gain]]) -> dict[str, float]:
    """The table as numbers for summary.json; reward_* are the point-wise stage's, win_rate_* the pair-wise stage's."""
    told: dict[str, float] = {}
    for stage, gains in stages.items():
        for gain in gains:
            values = {"before": gain.before, "after": gain.after, "error": gain.error}
            told |= {f"{stage}_{gain.what}_{name}": value for name, value in values.items()}
    for what, stage in (("reward", "rl_pointwise"), ("win_rate", "rl_pairwise")):
        told |= {f"{what}_{name}": told[f"{stage}_{what}_{name}"] for name in ("before", "after")}
    return told


def over_seeds(seeds: list[dict[str, list[Gain]]]) -> dict[str, list[Gain]]:
    """Means over seeds; the error of a change is that of its mean over seeds."""
    merged = {}
    for stage in seeds[0]:
        merged[stage] = []
        for one in zip(*(seed[stage] for seed in seeds)):
            error = plain(np.array([gain.difference for gain in one]))[1]
            before, after = (float(np.mean([getattr(gain, name) for gain in one])) for name in ("before", "after"))
            merged[stage].append(Gain(one[0].what, before, after, error))
    return merged


def draw(courses: list[list[Course]], path: Path) -> None:
    """Reward, win rate and length over steps, a line per stage; several seeds: thin lines and their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.8))
    panels = (("reward", "reward by the held-out judge"), ("win_rate", "win rate over the start, held-out judge"),
              ("length", "mean length of an answer (tokens)"))  # fmt: skip
    for number, stage in enumerate([course.stage for course in courses[0]]):
        runs = [course for seed in courses for course in seed if course.stage == stage]
        for axis, (key, title) in zip(axes, panels):
            for run in runs if len(runs) > 1 else ():
                axis.plot(run.steps, getattr(run, key), color=f"C{number}", alpha=0.3, linewidth=1)
            mean = np.mean([getattr(run, key) for run in runs], 0)
            axis.plot(runs[0].steps, mean, color=f"C{number}", marker="o", markersize=3, label=stage)
            axis.set(title=title, xlabel="step")
            axis.grid(alpha=0.3)
    axes[0].legend()
    axes[1].axhline(0.5, color="grey", linestyle=":")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
