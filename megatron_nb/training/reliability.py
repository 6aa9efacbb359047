"""How good a reward model is on held-out pairs: accuracy, calibration, swap agreement, biases; and the reliability plot.

For a pair with p = probability that the first answer is better, confidence = max(p, 1 - p), and the prediction is right when
p > 1/2 (the first is the better one, half right at exactly 1/2):
    ECE = sum over bins of confidence of (pairs in the bin / pairs) * |mean right - mean confidence|   (arXiv 1706.04599)
Ties are left out of everything but the position bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from megatron_nb.parallel.topology import everywhere
from megatron_nb.records import Batch
from megatron_nb.training.trainer import Trainer

BINS = 10


@dataclass
class Judged:
    """Scores of held-out rows. Point-wise: of the better answer and the other; pair-wise: of the two orders, bounded."""

    first: np.ndarray  # [P]
    second: np.ndarray  # [P]
    strict: np.ndarray  # [P] bool, no tie
    lengths: np.ndarray  # [P, 2] characters of the better answer and the other
    scores: np.ndarray  # [G] of graded answers
    grades: np.ndarray  # [G]
    grade_lengths: np.ndarray  # [G]


class _Recorder:
    """A loss that remembers {(unit, sign): score} beside doing its work."""

    output = "score"

    def __init__(self, loss: Any):
        self.loss, self.found = loss, {}

    def __call__(self, scores, batch: Batch):
        names = zip(batch.documents["unit"].tolist(), batch.documents["sign"].tolist(), scores.tolist())
        self.found |= {(unit, sign): score for unit, sign, score in names if unit >= 0}
        return self.loss(scores, batch)


def judge(trainer: Trainer, packs: list[Batch], loss: Any) -> tuple[float, int, dict[tuple[int, int], float]]:
    """(loss sum, count, {(unit, sign): score}) of this data rank's packs and all others', on every rank."""
    recorder = _Recorder(loss)
    total, count = trainer.evaluate(packs, recorder)
    return total, count, {key: score for part in everywhere(recorder.found) for key, score in part.items()}


def expected_calibration_error(p: np.ndarray, bins: int = BINS) -> float:
    """ECE of [P] probabilities that the first answer, which is the better one, is better."""
    total = 0.0
    for number, confidence, right in calibration(p, bins):
        total += number / len(p) * abs(right - confidence)
    return total


def calibration(p: np.ndarray, bins: int = BINS) -> list[tuple[int, float, float]]:
    """(pairs, mean confidence, share that is right) of every bin of confidence in [1/2, 1] that is not empty."""
    confidence, right = np.maximum(p, 1 - p), np.where(p == 0.5, 0.5, p > 0.5)
    place = np.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    return [
        (int(mine.sum()), float(confidence[mine].mean()), float(right[mine].mean()))
        for mine in (place == number for number in range(bins))
        if mine.any()
    ]


def probabilities(judged: Judged, pairwise: bool) -> np.ndarray:
    """[strict pairs] probability of the better answer: sigmoid(r+ - r-), or sigmoid((s_ab - s_ba) / 2)."""
    margin = (judged.first - judged.second)[judged.strict]
    return 1 / (1 + np.exp(-margin / 2 if pairwise else -margin))


def report(judged: Judged, pairwise: bool) -> dict[str, float]:
    """The measures, those that the rows allow."""
    found: dict[str, float] = {}
    strict = judged.strict
    if strict.any():
        p = probabilities(judged, pairwise)
        found |= {"accuracy": float(np.mean(np.where(p == 0.5, 0.5, p > 0.5))), "ece": expected_calibration_error(p)}
    if pairwise and strict.any():
        ab, ba = judged.first[strict], judged.second[strict]
        agreement = float(np.mean(ab * ba < 0))
        found |= {"swap_agreement": agreement, "flip_rate": 1 - agreement, "zero_share": float(np.mean(ab * ba == 0))}
    if pairwise and len(judged.first):
        found["position_bias"] = float(np.mean(judged.first + judged.second) / 2)
    found["length_bias"] = _length_bias(judged, pairwise)
    if len(judged.grades):
        found["grade_error"] = float(np.mean((judged.scores - judged.grades) ** 2))
        found["grade_correlation"] = _correlation(judged.scores, judged.grades)
    return found


def _length_bias(judged: Judged, pairwise: bool) -> float:
    """Correlation of reward and length over all answers; pair-wise of margin and difference of lengths, over both orders."""
    if not pairwise:
        scores = np.concatenate([judged.first, judged.second, judged.scores])
        return _correlation(scores, np.concatenate([judged.lengths[:, 0], judged.lengths[:, 1], judged.grade_lengths]))
    margin, difference = judged.first - judged.second, judged.lengths[:, 0] - judged.lengths[:, 1]
    return _correlation(np.concatenate([margin, -margin]), np.concatenate([difference, -difference]))


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's; 0 where one of them does not vary."""
    if len(x) < 2 or not x.std() or not y.std():
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def draw(p: np.ndarray, title: str) -> bytes:
    """The reliability plot of [P] probabilities, as PNG: share that is right by confidence, and how many pairs each bin has."""
    bins = calibration(p)
    figure = Figure(figsize=(5, 6), dpi=120, layout="constrained")
    figure.suptitle(title)
    curve, counts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for axis in (curve, counts):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    curve.plot([0.5, 1], [0.5, 1], color="gray", linestyle="--", linewidth=1, label="calibrated")
    confidence, right = [row[1] for row in bins], [row[2] for row in bins]
    curve.plot(confidence, right, color="C0", marker="o", label=f"ECE {expected_calibration_error(p):.3f}")
    curve.set_ylabel("share that is right")
    curve.set_ylim(-0.02, 1.02)
    curve.legend(frameon=False)
    edges: Sequence[float] = np.linspace(0.5, 1, BINS + 1)
    counts.hist(np.maximum(p, 1 - p), bins=edges, color="C0", alpha=0.6)
    counts.set_ylabel("pairs")
    counts.set_xlabel("confidence")
    image = BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
