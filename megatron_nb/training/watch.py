"""Reward over-optimisation: the reward that is trained on against a judge that is not, with KL and length, and when to stop.

The policy climbs its own reward (the proxy) past the point where the judge still agrees (arXiv 2210.10760). Single
evaluations are noisy, so every rule compares levels: means over the last `patience` evaluations.

    level(t) = mean of heldout over evaluations t - patience + 1 .. t,   error(t) = sqrt(sum of their errors^2) / patience
    stop     when best - level > (drop + sqrt(2 ln n)) * hypot(error(best), error)
             and the proxy's level is above that of the best, the highest level so far

Of n = evaluations / patience independent levels the highest stands about sqrt(2 ln n) errors too high by chance alone, and
every further one is another chance to look low: without that term a flat judge would stop every long run. Errors taken
over prompts are too large when every evaluation asks the same prompts, as it should: the rule then waits longer.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megatron_nb.run import write_atomic


@dataclass
class WatchConfig:
    """When a run has climbed its reward too far. A rule that is null does not stop."""

    patience: int = 3  # evaluations that are averaged before they are compared
    drop: float | None = 2.0  # standard errors the held-out judge may fall below its best while the proxy rises
    kl_ceiling: float | None = None  # of the mean KL to the reference
    length_factor: float | None = None  # of the mean length over that of the first evaluation

    def __post_init__(self):
        if self.patience < 1:
            raise ValueError(f"watch.patience={self.patience} must be at least 1: it counts evaluations")
        for name, least in (("drop", 0.0), ("kl_ceiling", 0.0), ("length_factor", 1.0)):
            value = getattr(self, name)
            if value is not None and not value > least:
                raise ValueError(f"watch.{name}={value} must be above {least:g}, or null for no such rule")


@dataclass(frozen=True)
class Seen:
    """One evaluation. heldout and its error are None where no judge was asked, kl where there is no reference."""

    step: int
    proxy: float
    heldout: float | None
    heldout_error: float
    kl: float | None
    length: float


class Watch:
    """What was seen so far. Every rank that observes the same values decides the same."""

    def __init__(self, config: WatchConfig, state: dict[str, Any] | None = None):
        """state: what `state` gave, to go on from there."""
        self.config = config
        self.seen = [Seen(**row) for row in (state or {}).get("seen", [])]

    def state(self) -> dict[str, Any]:
        """Plain values, for the checkpoint."""
        return {"seen": [dataclasses.asdict(row) for row in self.seen]}

    def observe(
        self, step: int, proxy: float, heldout: float | None, kl: float | None, length: float, *, heldout_error: float = 0.0
    ) -> str | None:
        """Take one evaluation; the reason to stop, or None.

        proxy: mean of the reward trained on; heldout: mean of the judge, heldout_error its standard error; kl: mean to the
        reference by token; length: mean tokens of an answer. A value that is not finite counts as not known; an evaluation
        without proxy or length is not taken at all. A step seen before is seen anew.
        """
        if not (math.isfinite(proxy) and math.isfinite(length)):
            return None
        heldout, kl = (value if value is not None and math.isfinite(value) else None for value in (heldout, kl))
        self.seen = [row for row in self.seen if row.step < step]
        self.seen.append(Seen(step, float(proxy), heldout, float(heldout_error), kl, float(length)))
        return self._disagreement() or self._distance() or self._growth()

    def _disagreement(self) -> str | None:
        judged, span = [row for row in self.seen if row.heldout is not None], self.config.patience
        if self.config.drop is None or len(judged) <= span:
            return None
        levels = [_level(judged[stop - span : stop]) for stop in range(span, len(judged) + 1)]
        now, best = levels[-1], max(levels, key=lambda level: level.heldout)
        by_chance = math.sqrt(2 * math.log(len(judged) / span))
        allowed = (self.config.drop + by_chance) * math.hypot(now.error, best.error)
        if best.heldout - now.heldout <= allowed or now.proxy <= best.proxy:
            return None
        return (
            f"over-optimisation: over the {span} evaluations up to step {now.step} the held-out judge gave {now.heldout:.4g}, "
            f"{best.heldout:.4g} up to step {best.step}, while the reward rose from {best.proxy:.4g} to {now.proxy:.4g}; "
            f"the fall is beyond {self.config.drop:g} standard errors and chance ({allowed:.2g}). Take the checkpoint of step "
            f"{best.step}"
        )

    def _distance(self) -> str | None:
        known, span = [row.kl for row in self.seen if row.kl is not None], self.config.patience
        ceiling = self.config.kl_ceiling
        if ceiling is None or len(known) < span or (mean := sum(known[-span:]) / span) <= ceiling:
            return None
        return f"KL: its mean over the last {span} evaluations is {mean:.4g}, above watch.kl_ceiling={ceiling:g}"

    def _growth(self) -> str | None:
        span, factor = self.config.patience, self.config.length_factor
        if factor is None or len(self.seen) <= span:
            return None
        first, mean = self.seen[0].length, sum(row.length for row in self.seen[-span:]) / span
        if mean <= factor * first:
            return None
        return (
            f"length: answers of {mean:.0f} tokens over the last {span} evaluations, {first:.0f} at step {self.seen[0].step}: "
            f"more than watch.length_factor={factor:g} times as long"
        )

    def plot(self, path: Path) -> None:
        """Draw what was seen, atomically; the place for it is plots/overoptimisation.png of the run."""
        write_atomic(path, draw(self.seen, path.parents[1].name))


@dataclass(frozen=True)
class _Level:
    """Means over some evaluations, the last of them at `step`."""

    step: int
    proxy: float
    heldout: float
    error: float


def _level(rows: list[Seen]) -> _Level:
    error = math.sqrt(sum(row.heldout_error**2 for row in rows)) / len(rows)
    return _Level(
        rows[-1].step, sum(row.proxy for row in rows) / len(rows), sum(row.heldout for row in rows) / len(rows), error
    )


def draw(seen: list[Seen], title: str) -> bytes:
    """The PNG: reward and judge with its error over steps and over the root of KL (where there is one), KL, length."""
    distances = [row for row in seen if row.kl is not None]
    figure = Figure(figsize=(12 if distances else 8, 8), dpi=120, layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(3, 2 if distances else 1, height_ratios=(2, 1, 1))
    by_step = figure.add_subplot(grid[0, 0])
    kl, length = (figure.add_subplot(grid[place, 0], sharex=by_step) for place in (1, 2))
    _both_rewards(by_step, seen, [row.step for row in seen])
    kl.plot([row.step for row in distances], [row.kl for row in distances], color="C2", marker="o", markersize=3)
    kl.set_ylabel("KL to the reference")
    length.plot([row.step for row in seen], [row.length for row in seen], color="C4", marker="o", markersize=3)
    length.set_ylabel("tokens of an answer")
    length.set_xlabel("step")
    length.xaxis.get_major_locator().set_params(integer=True)
    if distances:
        by_distance = figure.add_subplot(grid[:, 1])
        _both_rewards(by_distance, distances, [math.sqrt(max(row.kl, 0.0)) for row in distances])
        by_distance.set_xlabel("square root of KL")
    for axis in figure.axes:
        axis.spines["top"].set_visible(False)
    for axis in (by_step, kl, length):
        axis.grid(alpha=0.25)
    image = BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _both_rewards(axis: Any, rows: list[Seen], x: list[float]) -> None:
    """Proxy on the left scale, judge with two standard errors on the right one."""
    lines = axis.plot(x, [row.proxy for row in rows], color="C0", marker="o", markersize=3, label="reward trained on")
    axis.set_ylabel("reward trained on", color="C0")
    judged = [(place, row) for place, row in zip(x, rows) if row.heldout is not None]
    if judged:
        right = axis.twinx()
        right.set_ylabel("held-out judge, ± 2 standard errors", color="C1")
        lines.append(
            right.errorbar(
                [place for place, _ in judged], [row.heldout for _, row in judged],
                yerr=[2 * row.heldout_error for _, row in judged],
                color="C1", marker="o", markersize=3, capsize=2, label="held-out judge",
            )
        )  # fmt: skip
    axis.legend(handles=lines, frameon=False, loc="best")
