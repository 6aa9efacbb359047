"""Rewards of programs for the tests of the RL job: a program stands in for what the untrained model says."""

import asyncio
import os
import signal
from dataclasses import dataclass, replace

from megatron_nb.rewards.code import GatedComplexity, PassRate

PROGRAMS = (  # by the rollout's place in its group
    "def f(x):\n    return sum(x)",
    "def f(x):\n    # all of them\n    return sum(x)",
    "def f(x):\n    return len(x)",
)


def answered(rollout):
    return replace(rollout, text=f"```python\n{PROGRAMS[rollout.index]}\n```")


@dataclass
class Measured(GatedComplexity):
    async def score_rollout(self, prompt, rollout):
        return await super().score_rollout(prompt, answered(rollout))


@dataclass
class Killing(PassRate):
    """Kills process `victim`, the judge, when it has had `after` verdicts of it and is asked about more."""

    victim: int = 0
    after: int = 0

    def __post_init__(self):
        super().__post_init__()
        self._asked = self._done = 0

    async def score_rollout(self, prompt, rollout):
        self._asked += 1
        number = self._asked
        while number > self.after and self._done < self.after:
            await asyncio.sleep(0.01)
        if number == self.after + 1:
            os.kill(self.victim, signal.SIGKILL)
        # every program is another one: what was judged before is remembered
        written = answered(rollout).text.replace("def f", f"# {number}\ndef f")
        score = await super().score_rollout(prompt, replace(rollout, text=written))
        self._done += 1
        return score
