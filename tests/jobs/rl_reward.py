"""A reward without a model, for the tests of the RL job."""

from megatron_nb.records import Prompt, Rollout


class Distinct:
    """How many different tokens an answer has, for its length."""

    async def score_rollout(self, prompt: Prompt, rollout: Rollout) -> float:
        return len(set(rollout.ids)) / len(rollout.ids) + 0.01 * (rollout.ids[0] % 7)
