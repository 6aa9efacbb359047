"""Rollouts made by hand, for tests of what happens to them."""

import math

from megatron_nb.records import Group, Rollout, Score, Turn


def rollout(
    group, index, reward, answer=(5, 6, 7), *, prompt=(1, 2), segment=0, status="done", logprob=None, turns=None, tools=()
) -> Rollout:
    """One row. turns: [(tokens, turn reward)] that cut `answer`; tools: numbers of the turns that were not sampled."""
    turns = turns or [(len(answer), None)]
    made, turn_id = [], []
    for number, (tokens, turn_reward) in enumerate(turns):
        kind = "tool" if number in tools else "assistant"
        made.append(Turn(len(turn_id), len(turn_id) + tokens, kind, reward=turn_reward))
        turn_id += [number] * tokens
    assert len(turn_id) == len(answer)
    sampled = [number not in tools for number in turn_id]
    score = None if reward is None else Score(None if reward == "invalid" else reward)
    return Rollout(
        prompt_ids=list(prompt), ids=list(answer), sampled_mask=sampled,
        logprob=[(-1.0 if logprob is None else logprob[i]) if s else math.nan for i, s in enumerate(sampled)],
        weight_version=[0 if s else -1 for s in sampled], turn_id=turn_id, turns=made, status=status,
        sampling={"temperature": 1.0}, seed=0, group_id=group, index=index, segment=segment, score=score,
    )  # fmt: skip


def grouped(*rollouts: Rollout) -> list[Group]:
    """Groups in the order in which their ids first appear."""
    found: dict[str, Group] = {}
    for one in rollouts:
        found.setdefault(one.group_id, Group(one.group_id, None, [])).rollouts.append(one)
    return list(found.values())
