"""Prompts of the right difficulty: those that the starting model solves sometimes, but not always.

Every prompt is answered n times; lo..hi successes keep it. The result stands in runs/NAME/prompt_filter.json, what was
generated on the way in rollouts/pending: a kill loses nothing.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_nb.data.prompts import PromptSet
from megatron_nb.records import Group
from megatron_nb.rollout.collect import Collector
from megatron_nb.rollout.store import forget
from megatron_nb.run import write_atomic

log = logging.getLogger(__name__)

CHUNK = 256  # prompts that are answered between two lines of progress


@dataclass
class PromptFilterConfig:
    """Which prompts are kept."""

    n: int = 8  # answers to each prompt
    lo: int = 1  # successes at least
    hi: int = 5  # and at most
    success: float = 1.0  # reward from which an answer is one; an overlong penalty does not count here

    def __post_init__(self):
        if not 0 <= self.lo <= self.hi <= self.n or self.n < 1:
            raise ValueError(f"prompt_filter: 0 <= lo={self.lo} <= hi={self.hi} <= n={self.n} must hold")


def successes(group: Group, success: float) -> int | None:
    """Answers that reach the reward; None when no answer is valid."""
    scores = [rows[-1].score for rows in group.episodes if rows[-1].score.reward is not None]
    return sum(s.reward - s.parts.get("overlong", 0.0) >= success for s in scores) if scores else None


def filter_by_success(collector: Collector, prompts: PromptSet, config: PromptFilterConfig, folder: Path,
                      writes: bool) -> list[int]:  # fmt: skip
    """Indices of the training prompts that are kept. Collective; `writes` on one rank.

    Done before, it is read back. ValueError when nothing is kept. Interrupted when asked to stop.
    """
    path = folder / "prompt_filter.json"
    settings = {**asdict(config), "prompts": prompts.digest}
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if {name: known.get(name) for name in settings} == settings:
        log.info("%s: %d of %d prompts were kept", path, len(known["kept"]), len(prompts))
        return known["kept"]
    counts, began = [], time.perf_counter()
    for number, first in enumerate(range(0, len(prompts), CHUNK)):
        groups, _ = collector.answers("filter", number, prompts.training[first : first + CHUNK], config.n)
        counts += [successes(group, config.success) for group in groups]
        left = (time.perf_counter() - began) / len(counts) * (len(prompts) - len(counts))
        log.info("prompt filter: %d/%d prompts, %s, about %.0f s left", len(counts), len(prompts), _rate(counts, config), left)
    kept = [index for index, count in enumerate(counts) if count is not None and config.lo <= count <= config.hi]
    table = ", ".join(f"{'invalid' if n is None else n}: {many}" for n, many in sorted(Counter(counts).items(), key=str))
    log.info("prompt filter: prompts by successes of %d: %s", config.n, table)
    if not kept:
        raise ValueError(
            f"prompt_filter keeps none of {len(prompts)} prompts: lo={config.lo}..hi={config.hi} of n={config.n} answers must "
            f"reach the reward success={config.success:g}; prompts by successes: {table}"
        )
    if writes:
        write_atomic(path, json.dumps({**settings, "kept": kept, "successes": counts}) + "\n")
        forget(folder, None, ("filter",))
    return kept


def _rate(counts: list[int | None], config: PromptFilterConfig) -> str:
    kept = sum(count is not None and config.lo <= count <= config.hi for count in counts)
    return f"{kept / len(counts):.0%} kept"
