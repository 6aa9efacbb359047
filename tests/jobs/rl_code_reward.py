"""Rewards of programs for the tests of the RL job: a program stands in for what the untrained model says."""

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
    """Kills process `victim`, the judge, when it is asked about rollout number `after`."""

    victim: int = 0
    after: int = 0

    def __post_init__(self):
        super().__post_init__()
        self._asked = 0

    async def score_rollout(self, prompt, rollout):
        self._asked += 1
        if self._asked == self.after:
            os.kill(self.victim, signal.SIGKILL)
        # every program is another one: what was judged before is remembered
        written = answered(rollout).text.replace("def f", f"# {self._asked}\ndef f")
        return await super().score_rollout(prompt, replace(rollout, text=written))
