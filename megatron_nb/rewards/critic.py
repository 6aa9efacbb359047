"""The turn-level critic: logic, tool accuracy and information gain of every turn, each 0 or 1 with a reason (critic_steps.py).

Judged by rules that read the turn (critic_rules.py), or by a model behind an endpoint (critic_model.py). Two uses:

    reinforcement learning   kind `critic`: Score.turn_rewards, one for each assistant turn of the episode:
                             the mean of the three, -1 for an invalid call. Score.reward is their mean: weight 0 leaves it out
    fine-tuning              `judge_turns`, and `loss_flags` of its verdicts: 1 where all three hold, and for a right answer
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_nb.client import ClientConfig, RequestFailed
from megatron_nb.records import Prompt, Rollout, Score
from megatron_nb.rewards.answer_search import question_of
from megatron_nb.rewards.critic_model import ModelCritic
from megatron_nb.rewards.critic_rules import judge_by_rules
from megatron_nb.rewards.critic_steps import CRITERIA, Step, Task, Verdict, steps_of_rows


@dataclass
class CriticConfig:
    """Who judges the turns."""

    judge: Literal["rules", "endpoint"] = "rules"
    endpoint: ClientConfig | None = None  # an OpenAI-compatible server
    reference: bool = True  # judged with the right answer and the way to it, where the question's row has them

    def __post_init__(self):
        if (self.judge == "endpoint") != (self.endpoint is not None):
            raise ValueError(
                f"judge={self.judge!r}, endpoint={self.endpoint}: judge=endpoint needs endpoint.base_url, rules read none"
            )


def model_critic(config: CriticConfig) -> ModelCritic | None:
    """The model that judges, None for rules; keep it: it holds the connections."""
    return ModelCritic(config.endpoint, config.reference) if config.endpoint else None


async def judge_turns(
    task: Task, steps: Sequence[Step], config: CriticConfig, model: ModelCritic | None
) -> list[Verdict | RequestFailed]:
    """A verdict for every step; where a model gave none after all retries, its failure."""
    if not config.reference:
        task = task.without_reference()
    if model is not None:
        return await model.judged(task, steps)
    return await asyncio.to_thread(judge_by_rules, task, steps)  # long episodes take a second: others go on


def loss_flags(steps: Sequence[Step], verdicts: Sequence[Verdict | RequestFailed], right: bool) -> list[int]:
    """The loss of each turn: 1 where logic, tools and gain hold, and for the answer when it is right. Not judged: 0."""
    flags = [int(isinstance(verdict, Verdict) and verdict.good) for verdict in verdicts]
    if steps and steps[-1].answers:
        flags[-1] = int(right)
    return flags


class Critic:
    """The term of kind `critic`; see the head of the file. A model that fails makes the rollout invalid."""

    def __init__(
        self, tokenizer: Any, wire: Literal["hermes", "mcp"] = "hermes",
        judge: Literal["rules", "endpoint"] = "rules", endpoint: ClientConfig | None = None, reference: bool = True,
    ):  # fmt: skip
        self.config, self.tokenizer, self.wire = CriticConfig(judge, endpoint, reference), tokenizer, wire
        self._model = model_critic(self.config)

    async def score_episode(self, prompt: Prompt, rows: Sequence[Rollout]) -> Score:
        steps = steps_of_rows(rows, self.tokenizer, self.wire)
        if not steps:
            return Score(None, reason="the episode has no turn to judge")
        task = Task.of(question_of(prompt), prompt.conversation.tools or prompt.data.get("tools"), prompt.data)
        verdicts = await judge_turns(task, steps, self.config, self._model)
        if failed := next((one for one in verdicts if isinstance(one, RequestFailed)), None):
            raise failed
        rewards = [verdict.reward for verdict in verdicts]
        parts = {name: sum(getattr(one, name) for one in verdicts) / len(verdicts) for name in CRITERIA}
        parts["invalid"] = sum(one.invalid for one in verdicts) / len(verdicts)
        bad = next((f"turn {at}: {'; '.join(one.reasons.values())}" for at, one in enumerate(verdicts, 1) if not one.good), "")
        return Score(sum(rewards) / len(rewards), rewards, parts, bad[:300])
