"""Groups of rollouts made from texts, for tests of rewards."""

import asyncio

from megatron_nb.config import build
from megatron_nb.records import Conversation, Group, Prompt, Rollout
from megatron_nb.rewards.reward import RewardConfig, build_reward


def group_of(*texts, data=None, question="How much?", status="done", ids=None, statuses=None, group_id="g", messages=None):
    conversation = Conversation(messages or [{"role": "user", "content": question}], "p", "test")
    prompt = Prompt(conversation, [1, 2, 3], data or {})
    rollouts = []
    for i, text in enumerate(texts):
        row = ids[i] if ids else list(range(10, 10 + len(text.split())))
        rollouts.append(
            Rollout(
                prompt_ids=[1, 2, 3], ids=row, sampled_mask=[True] * len(row), logprob=[-1.0] * len(row),
                weight_version=[0] * len(row), turn_id=[0] * len(row), turns=[],
                status=statuses[i] if statuses else status, sampling={}, seed=0, group_id=group_id, index=i, text=text,
            )
        )  # fmt: skip
    return Group(group_id, prompt, rollouts)


def scores(terms, group, tokenizer=None, device="cpu", **settings):
    """What the reward of these terms says of the group."""
    reward = build_reward(build(RewardConfig, {"terms": terms, **settings}, "reward"), tokenizer, device)
    try:
        return asyncio.run(reward.score(group))
    finally:
        reward.close()


def values(terms, group, **settings):
    return [score.reward for score in scores(terms, group, **settings)]
