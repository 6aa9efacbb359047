"""What the stage rl_agentic refuses before any work, what its files say, and what its dry run tells."""

import pytest

from megatron_nb import rl
from megatron_nb.config import compose
from megatron_nb.rl_config import describe_job

SMALL = ["model=tiny", "parallel=cpu1", "answers=episodes_short"]


def agentic(*words, small=SMALL):
    return compose(rl.RlConfig, "rl_agentic", [*small, *words])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["agent.max_tokens=5000"], "agent.max_tokens=5000 must be at most update.pack_tokens=4096"),
        (["update.pack_tokens=9000"], "agent.max_tokens=9000 must be at most model.max_position_embeddings=8192"),
        (["engine.native.max_sequence_length=2000"], "at most engine.native.max_sequence_length=2000"),
        (["prompts.max_tokens=4096"], "prompts.max_tokens=4096 must be less than agent.max_tokens=4096"),
        (["collect.dynamic_sampling=true"], "dynamic_sampling=true with credit.turn_credit=unbiased"),
        (["credit.mask_truncated=true"], "credit.mask_truncated=True must be false"),
        (["credit.advantage=grpo"], "must be rloo with turn_credit=unbiased"),
        (["agent.wire=xml"], "agent.wire"),
        (["agent.keep_lats=3"], "unknown key 'agent.keep_lats'"),
    ],
)
def test_a_stage_that_cannot_be_right_is_refused(words, complaint):
    with pytest.raises(ValueError, match=complaint):
        agentic(*words)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["~reward.terms.turns"], "no term of the reward gives turn rewards: add reward.terms.turns.kind=critic"),
        (["engine.native.kv_cache_gb=0.001", "engine.native.block_size=16"], "holds .* tokens, a row may have 4096: give"),
        (["reward.terms.turns.settings.judge=endpoint", "reward.terms.turns.settings.wire=xml"], "reward.terms.turns.settings"),
    ],
)
def test_what_would_fail_later_is_told_by_the_dry_run(words, complaint):
    with pytest.raises(ValueError, match=complaint):
        describe_job(agentic(*words))


@pytest.mark.parametrize("words", [["turns=none"], ["turns=gigpo"], ["credit.turn_weight=0"]])
def test_without_turn_rewards_it_runs_where_none_are_read(words):
    describe_job(agentic(*words, "~reward.terms.turns"))


def test_tools_that_are_not_there_are_missed_before_any_model_is_built(tmp_path):
    with pytest.raises(ValueError, match="agent.tools: they cannot be used: .*nowhere"):
        rl.main(agentic(f"agent.tools.search={tmp_path}/nowhere", "init_from=x", "prompts.sources.a.path=x"))


def test_the_stage_holds_the_recipes_numbers(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    config = agentic(small=[])
    assert (config.agent.max_turns, config.agent.max_tokens, config.update.pack_tokens) == (600, 262144, 262144)
    assert (config.collect.group_size, config.sampling.temperature, config.optimizer.lr) == (8, 1.0, 1e-6)
    assert (config.policy.clip_low, config.policy.clip_high, config.policy.kl) == (0.2, 0.28, None)
    credit = config.credit
    assert (credit.turn_credit, credit.advantage, credit.reduction, credit.max_turns) == ("unbiased", "rloo", "constant", 600)
    assert 0.2 <= credit.turn_weight <= 0.5 and not config.reward.terms["answer"].gate
    told = describe_job(config)
    assert "600 turns" in told and "rows of 262,144 tokens" in told and "unbiased, weight 0.3" in told


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("recipe", ("grpo", "recipe", "token", 0.3)),
        ("unbiased", ("rloo", "unbiased", "constant", 0.3)),
        ("gigpo", ("grpo", "gigpo", "token", 1.0)),
        ("none", ("grpo", None, "token", 0.0)),
    ],
)
def test_what_a_form_of_turn_credit_changes_is_in_its_file(turns, expected):
    credit = agentic(f"turns={turns}").credit
    assert (credit.advantage, credit.turn_credit, credit.reduction, credit.turn_weight) == expected
