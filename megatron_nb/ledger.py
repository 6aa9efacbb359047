"""What a chain of stages has come to: each stage's numbers, whether its gate let the chain go on, its evaluation.

    python -m megatron_nb.ledger RECIPE_FOLDER [STAGE]        write ledger.json; exit code 86 when the gate of STAGE is shut

Everything is read anew from the stages' run folders, so that any process may write it at any time.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_nb.run import write_atomic

log = logging.getLogger(__name__)
CHAIN_FILE, LEDGER_FILE, RESULTS_FILE = "chain.json", "ledger.json", "results.json"
GATE_EXIT = 86  # a stage has done its work, and the chain must not go on


class GateShut(ValueError):
    """A stage is done, and is not good enough for the next."""


@dataclass
class Gate:
    """A bound on a number of the stage's summary.json; the chain goes on when it holds."""

    metric: str = ""  # such as heldout_loss_after
    minus: str | None = None  # another one, taken off first: {metric: reward_after, minus: reward_before, at_least: 0.05}
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self):
        if not self.metric:
            raise ValueError("gate.metric is not set: name a number of the stage's summary.json")
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"gate of {self.metric}: at_least={self.at_least}, at_most={self.at_most}: give one of the two")

    @property
    def told(self) -> str:
        bound = f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"
        return f"{self.metric}{f' - {self.minus}' if self.minus else ''} {bound}"

    def value(self, summary: dict[str, float]) -> float | None:
        """The number that is bounded; None when the summary lacks it."""
        wanted = [self.metric, *([self.minus] if self.minus else [])]
        if any(name not in summary for name in wanted):
            return None
        return summary[self.metric] - (summary[self.minus] if self.minus else 0.0)

    def passed(self, summary: dict[str, float]) -> bool:
        value = self.value(summary)
        if value is None:
            return False
        return value >= self.at_least if self.at_least is not None else value <= self.at_most


@dataclass
class LedgerConfig:
    """Evaluations that the chain makes of the checkpoints on its way, by the same tasks each time."""

    stage: str = "evaluate"  # their stage file
    words: list[str] = field(default_factory=list)  # their command line, such as [tasks=[ifeval,humaneval]]; none: no evaluations
    of: list[str] | None = None  # stages; null: every one that trains a policy (sft, rl)
    base: str | None = None  # a model folder that is evaluated before all stages
