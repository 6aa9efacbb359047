"""What the loop of every job does between two updates: refused steps, saving, leaving when asked to."""

from __future__ import annotations

import logging
import sys
from typing import Any

from megatron_nb.give_up import GivesUp
from megatron_nb.training.checkpoint import Checkpoints
from megatron_nb.training.signals import REQUEUE_EXIT, StopSignal
from megatron_nb.training.trainer import StepResult, Trainer

log = logging.getLogger(__name__)


def count_bad(bad: int, step: int, result: StepResult, limit: int) -> int:
    """Refused steps in a row, this one included; GivesUp when they reach `limit`: the same steps would be refused again."""
    if not result.skipped:
        return 0
    log.error("step %d was refused: loss or gradient is not finite; samples %s", step, ", ".join(result.skipped[:32]))
    if bad + 1 >= limit:
        raise GivesUp(
            f"{bad + 1} steps in a row were refused for NaN or inf, the last is {step}, with samples "
            f"{', '.join(result.skipped[:8])}. Lower optimizer.lr or lengthen its warm-up; replay_step={step} shows "
            "the loss of each of its micro-batches with the weights of the newest checkpoint"
        )
    return bad + 1


def save_or_leave(
    checkpoints: Checkpoints, stop: StopSignal, step: int, num_steps: int, trainer: Trainer, data_state: dict[str, Any]
) -> None:
    """Save after `step` when due or when asked to stop; then leave by SystemExit, for the same command to go on."""
    checkpoints.poll()
    stopping = stop.agreed()
    if stopping or checkpoints.due(step, num_steps):
        checkpoints.save(step, trainer, data_state)
    if stopping and step != num_steps:
        checkpoints.wait()
        log.warning("stopped after step %d of %d; the same command continues", step, num_steps)
        sys.exit(REQUEUE_EXIT)
