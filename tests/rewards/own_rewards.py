"""Rewards of a user, for the tests of what names them."""

import asyncio
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass

import numpy as np

from megatron_nb.records import Group, Prompt, Rollout, Score


@dataclass
class Mentions:
    word: str
    times: int = 1

    def score_rollout(self, prompt: Prompt, rollout: Rollout) -> float:
        return float(rollout.text.count(self.word) >= self.times)


def longer_is_better(prompt, rollout, *, scale: float = 1.0):
    return scale * len(rollout.text)


class Constant:
    """One verdict for all; what YAML cannot write is named."""

    def __init__(self, value: float | str | None = 1.0):
        self.value = {"nan": float("nan"), "text": "good", "inf": float("inf")}.get(value, value)

    async def score_texts(self, prompt: Prompt, texts: list[str]) -> list:
        return [self.value for _ in texts]


class ByText:
    """The answer's own text says what happens to it."""

    def score_rollout(self, prompt: Prompt, rollout: Rollout) -> float | None:
        what, _, value = rollout.text.partition(" ")
        if what == "loop":
            while True:
                pass
        if what == "regex":
            re.match(r"(a+)+$", "a" * 40 + "b")
        if what == "lost":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "sleep":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        if what == "child":
            with open(value, "w") as file:
                file.write(str(subprocess.Popen(["sleep", "600"]).pid))
            time.sleep(600)
        if what == "raise":
            raise ArithmeticError("no such number")
        return None if what == "none" else float(value)


class ByTextAsync(ByText):
    async def score_rollout(self, prompt: Prompt, rollout: Rollout) -> float | None:
        if rollout.text == "sleep":
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                await asyncio.sleep(600)  # it does not even stop when it is told to
        return super().score_rollout(prompt, rollout)


class Short:
    """One verdict too few."""

    def score(self, group: Group) -> list[float]:
        return [1.0] * (len(group.rollouts) - 1)


class Rank:
    """Compares a group."""

    async def score(self, group: Group) -> list[Score]:
        return [Score(float(i), turn_rewards=[0.5], parts={"seen": len(group.rollouts)}) for i in range(len(group.rollouts))]


class Ids:
    def score_ids(self, prompt: Prompt, ids: list[list[int]]) -> np.ndarray:
        return np.array([sum(row) for row in ids])


class Flaky:
    """Fails the first `failures` times."""

    def __init__(self, failures: int):
        self.failures = failures

    async def score_rollout(self, prompt: Prompt, rollout: Rollout) -> float:
        self.failures -= 1
        if self.failures >= 0:
            raise ConnectionError("busy")
        return 1.0


class NoMethod:
    pass


class WrongSignature:
    def score_rollout(self, rollout):
        return 1.0


class Unsendable:
    def __init__(self):
        self.lock = asyncio.Lock.__new__(type("Local", (), {"__reduce__": lambda self: 1 / 0}))

    def score_rollout(self, prompt, rollout):
        return 1.0
