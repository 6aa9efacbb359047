"""A stop/continue bandit: at every turn the policy ends its episode or goes on, by a sigmoid of its own for each turn.

A turn is one action token (GO or END) and, unless it was the last, a tool's answer. The gradient comes through credit(), pack()
and the loss of the RL job.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch

from megatron_nb.data.packing import pack
from megatron_nb.losses.policy_gradient import PolicyConfig, PolicyGradient
from megatron_nb.records import Rollout
from megatron_nb.rewards.advantage import CreditConfig, credit
from tests.rewards.made_rollouts import grouped, rollout

GO, END, TOOL = 3, 4, 9
Path = tuple[int, ...]  # actions


@dataclass(frozen=True)
class Bandit:
    """reward and turn_rewards: of a path. two_rows: the context is cut after the first turn."""

    turns: int  # an episode has at most so many
    reward: Callable[[Path], float]
    turn_rewards: Callable[[Path], list[float | None]]
    two_rows: bool = False

    @property
    def paths(self) -> list[Path]:
        return [(GO,) * t + (END,) for t in range(self.turns)] + [(GO,) * self.turns]

    def rows(self, path: Path, group: str, index: int) -> list[Rollout]:
        """The training rows of an episode that went this path."""
        parts = [path[:1], path[1:]] if self.two_rows and len(path) > 1 else [path]
        rewards, rows, done = self.turn_rewards(path), [], 0
        for segment, actions in enumerate(parts):
            ids = [token for action in actions for token in (action, TOOL)]
            turns = [turn for r in rewards[done : done + len(actions)] for turn in ((1, r), (1, None))]
            if done + len(actions) == len(path):  # nothing is called after the last turn
                ids, turns = ids[:-1], turns[:-1]
            tools, reward = range(1, len(turns), 2), self.reward(path)
            rows.append(rollout(group, index, reward, ids, segment=segment, turns=turns, tools=tools))
            done += len(actions)
        return rows

    def log_chance(self, path: Path, theta: torch.Tensor) -> torch.Tensor:
        """[turns of the path] log-prob of each action."""
        return torch.stack([log_chance(action, theta[t]) for t, action in enumerate(path)])

    def chance(self, path: Path, theta: torch.Tensor) -> torch.Tensor:
        return self.log_chance(path, theta).sum().exp()

    def objective(self, theta: torch.Tensor, omega: float, baseline: float) -> torch.Tensor:
        """J = E[R + omega sum_t (r_t - b) / turns]."""
        total = torch.zeros((), dtype=theta.dtype)
        for path in self.paths:
            extra = sum(r - baseline for r in self.turn_rewards(path) if r is not None)
            total = total + self.chance(path, theta) * (self.reward(path) + omega * extra / self.turns)
        return total

    def slope(self, theta: torch.Tensor, omega: float, baseline: float, step: float = 1e-5) -> torch.Tensor:
        """[turns] the gradient of J by finite differences."""
        shifts = step * torch.eye(self.turns, dtype=theta.dtype)
        differences = [self.objective(theta + s, omega, baseline) - self.objective(theta - s, omega, baseline) for s in shifts]
        return torch.stack(differences) / (2 * step)

    def gradient(self, groups: list[list[Path]], theta: torch.Tensor, config: CreditConfig, baseline: float) -> torch.Tensor:
        """[turns] what the job's loss makes the policy climb, for a batch of these groups."""
        theta = theta.detach().clone().requires_grad_()
        rows = [row for g, paths in enumerate(groups) for i, path in enumerate(paths) for row in self.rows(path, f"g{g}", i)]
        samples, _ = credit(grouped(*rows), config, baseline)
        batch = pack(samples)
        logprob, first = torch.zeros(len(batch.targets), dtype=theta.dtype), {}
        values, places = [], []
        for sample, start in zip(samples, batch.cu_seqlens.tolist()):
            t = first.get(sample.rollout_id, 0)  # turns of earlier rows
            for j in range(2, len(sample), 2):
                values.append(log_chance(int(sample.ids[j]), theta[t]))
                places.append(start + j - 1)  # the position whose target is token j
                t += 1
            first[sample.rollout_id] = t
        logprob = logprob.index_put((torch.tensor(places),), torch.stack(values))
        loss = PolicyGradient(PolicyConfig(importance_cap=None))
        total, count, _ = loss((logprob, torch.ones_like(logprob)), batch)
        return -torch.autograd.grad(total / count, theta)[0]

    def mean_gradient(self, theta: torch.Tensor, config: CreditConfig, baseline: float, size: int = 2) -> torch.Tensor:
        """[turns] its exact mean over every group of `size` rollouts, whose order does not matter."""
        mean = torch.zeros_like(theta)
        for paths in combinations_with_replacement(self.paths, size):
            orders = math.factorial(size) / math.prod(map(math.factorial, Counter(paths).values()))
            chance = orders * torch.stack([self.chance(path, theta) for path in paths]).prod()
            mean += chance * self.gradient([list(paths)], theta, config, baseline)
        return mean

    def mean_length(self, theta: torch.Tensor) -> float:
        """Turns of an episode on average."""
        return float(sum(self.chance(path, theta) * len(path) for path in self.paths))


def log_chance(action: int, theta: torch.Tensor) -> torch.Tensor:
    """Log-prob of one action of a turn."""
    return torch.nn.functional.logsigmoid(theta if action == END else -theta)
