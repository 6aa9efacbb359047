r"""Mathematics: is the final answer the right one (math-verify), avg@k over k samples, maj@k by their votes.

Rows: {"question" | "problem" | "prompt" | "messages", "answer" (gsm8k's solution with ####, a text with \boxed{}, or the bare
answer), "id"?}.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from megatron_nb.asking.askers import Answer
from megatron_nb.data.preferences import final_answer
from megatron_nb.evals.items import read_questions
from megatron_nb.evals.math_grade import grade_within
from megatron_nb.evals.statistics import mean_with_bounds
from megatron_nb.evals.task import Item, Outcome, Task, TaskConfig, Verdict
from megatron_nb.rewards.deadline import WorkerLost, Workers

WORKERS = 2
CPU_S = 20  # of a comparison: more is the answer's fault
WALL_S = 600.0  # more is the machine's


@dataclass
class MathConfig(TaskConfig):
    """Problems with one right answer."""

    instruction: str = "Reason step by step, and put your final answer in \\boxed{}."  # after every question; "": none
    boxed: bool = False  # an answer outside \boxed{} is wrong


class Math(Task):
    """See the head of the file. metrics: avg@k with bounds, maj@k, and the share of attempts whose answer could be read."""

    Config: ClassVar[type[TaskConfig]] = MathConfig

    def __init__(self, name: str, config: MathConfig, sampling: Any):
        super().__init__(name, config, sampling)
        self.headline = f"avg@{config.samples}"
        self._workers: Workers | None = None
        self._target = pickle.dumps(grade_within)

    def read(self) -> Sequence[Item]:
        return read_questions(self.config.path, self.config.instruction)

    async def ready(self) -> None:
        self._workers = Workers(WORKERS)

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()

    async def score(self, item: Item, answer: Answer) -> Verdict:
        arguments = CPU_S, final_answer(answer.text), str(item.gold["answer"]), self.config.boxed
        try:
            right, said, reason = await self._workers.call(self._target, WALL_S, 0, *arguments)
        except WorkerLost as error:
            if f"exit code {-signal.SIGXCPU}" not in str(error):
                raise OSError(str(error)) from error
            reason = f"the answer cannot be compared in {CPU_S} s of computing"  # 7^7^7^7 is the model's fault
            return Verdict(0.0, {"read": 0.0}, reason, "")
        except ValueError as error:  # the reference is no mathematics: that is no fault of the model
            return Verdict(None, reason=str(error))
        return Verdict(right, {"read": float(bool(said))}, reason, said)

    def summarise(self, outcomes: list[Outcome]) -> dict[str, float]:
        told = super().summarise(outcomes)
        votes: dict[str, list[tuple[str, float]]] = {}
        for one in outcomes:
            if one.score is not None:
                votes.setdefault(one.item, []).append((one.answer, one.score))
        if self.samples > 1 and votes:
            told |= mean_with_bounds(f"maj@{self.samples}", [[majority(its)] for its in votes.values()])
        return told


def majority(votes: list[tuple[str, float]]) -> float:
    """How right the answer with the most votes is; the mean over those that share the first place. No answer is no vote.

    All that are right are one answer, however they are spelled: sqrt(8) and 2 sqrt(2) vote together.
    """
    counts: dict[str | float, list[float]] = {}
    for said, score in votes:
        if said:
            counts.setdefault(score if score == 1 else said, []).append(score)
    most = max(map(len, counts.values()), default=0)
    return float(np.mean([np.mean(its) for its in counts.values() if len(its) == most])) if counts else 0.0
