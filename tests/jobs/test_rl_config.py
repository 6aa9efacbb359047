"""What the RL job refuses before any work, and the rows it takes prompts from."""

import json
from types import SimpleNamespace

import pytest

from megatron_nb import rl
from megatron_nb.config import compose
from megatron_nb.data.prompts import PromptConfig, PromptSource, open_prompts, read_prompt
from megatron_nb.data.rows import BadRow
from megatron_nb.launch import watchdog
from megatron_nb.rl_config import describe_job
from megatron_nb.rollout.native_config import cache_blocks
from megatron_nb.training import memory
from tests.data.data_tokenizers import tiny

SMALL = ["model=tiny", "parallel=cpu1", "answers=short"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["sampling.top_p=0.9"], "top_p=0.9 .* must be 1 .*truncated support"),
        (["sampling.top_k=50"], "top_k=50 must be"),
        (["sampling.repetition_penalty=1.1"], "unknown key"),
        (["sampling.temperature=0"], "temperature"),
        (["policy.temperature=0.6"], "temperature=1.0 must be above 0 and equal policy.temperature=0.6"),
        (["sampling.max_tokens=8000"], "prompts.max_tokens=256 .* = 8256 must be at most model.max_position_embeddings=8192"),
        (["sampling.max_tokens=1900"], "at most update.pack_tokens=2048"),
        (["engine.native.max_sequence_length=300"], "at most engine.native.max_sequence_length=300"),
        (["collect.group_size=1"], "group_size=1 with credit.advantage=grpo"),
        (["collect.group_size=1", "algorithm=rloo"], "group_size=1 with credit.advantage=rloo"),
        (["collect.staleness=1"], "staleness=1 needs engine=server"),
        (["collect.staleness=1", "engine=server", "policy.importance_cap=null"], "needs policy.importance_cap"),
        (["reference.checkpoint=somewhere"], "policy.kl is null"),
        (["heldout_reward.terms.a.kind=length"], "prompts.heldout"),
        (["collect.overlong.length=400"], "overlong.length=400 must be at most sampling.max_tokens=256"),
        (["collect.group_sise=4"], "unknown key 'collect.group_sise'.*collect.group_size"),
        (["num_steps=0"], "num_steps=0 must be at least 1"),
    ],
)
def test_a_stage_that_cannot_be_right_is_refused(words, complaint):
    with pytest.raises(ValueError, match=complaint):
        compose(rl.RlConfig, "rl_pointwise", [*SMALL, *words])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "settings.checkpoint"),
        (["reward.terms.model.settings.checkpoint=runs/nowhere"], "settings.checkpoint: runs/nowhere is not a folder"),
    ],
)
def test_a_reward_model_that_is_not_there_is_missed_before_any_model_is_built(words, complaint):
    source = ["prompts.sources.a.path=prompts.jsonl"]
    with pytest.raises(ValueError, match=complaint):
        rl.main(compose(rl.RlConfig, "rl_pointwise", [*SMALL, *source, *words]))


RECIPE = {
    "rl_pointwise": ["reward.terms.model.settings.checkpoint=r"],
    "rl_pairwise": ["reward.terms.model.settings.checkpoint=r"],
    "rl_code_pass_rate": [], "rl_code_complexity": [], "rl_agentic": [],
}  # fmt: skip


@pytest.mark.parametrize("stage", RECIPE)
def test_no_stage_of_the_recipe_takes_a_batch_that_keeps_its_time_outs_for_a_hang(stage, tmp_path):
    config = compose(rl.RlConfig, stage, RECIPE[stage])
    run = SimpleNamespace(logs=tmp_path, rank=0)
    dog = watchdog(config, run, config.sampling_s(8))
    assert dog.limit_s >= config.collect.timeout_s + config.reward.timeout_s


def test_what_a_batch_may_take_follows_from_its_time_outs():
    words = ["collect.num_prompts=40", "collect.group_size=8", "collect.concurrency=16", "collect.timeout_s=100"]
    words += ["reward.timeout_s=10", "reward.retries=0", "prompts.heldout_limit=1"]
    config = compose(rl.RlConfig, "rl_pointwise", [*SMALL, *words])
    assert config.sampling_s(1) == 20 * 100 + 20  # 320 answers, 16 at a time; gates, then the other terms
    assert config.sampling_s(4) == 5 * 100 + 20
    more = compose(rl.RlConfig, "rl_pointwise", [*SMALL, *words, "prompts.heldout_limit=400"])
    assert more.sampling_s(4) == 7 * 100 + 20
    config = compose(rl.RlConfig, "rl_pointwise", [*SMALL, *words, "algorithm=dapo", "collect.max_generation_batches=3"])
    assert config.sampling_s(4) == 3 * (5 * 100 + 20)


@pytest.mark.parametrize("stage", RECIPE)
def test_the_recipe_s_trainer_engine_cache_and_reward_models_fit_80_gb_together(stage):
    config = compose(rl.RlConfig, stage, [*RECIPE[stage], "launch.dry_run=true"])
    told = describe_job(config)
    plan = memory.plan(config.model, config.parallel, 8, config.update.pack_tokens)
    beside = 2 * config.model.num_parameters / 1e9 + (14.03 if "model" in config.reward.terms else 0)
    assert f"{plan.total / 1e9 + beside:.1f} GB while training" in told
    held = (plan.weights + plan.gradients + plan.optimizer) / 1e9 + beside + config.engine.native.kv_cache_gb * 2**30 / 1e9
    assert f"{held:.1f} GB while sampling" in told and held < 80 * 0.92


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["engine.native.kv_cache_gb=40"], r"needs 82\.6 GB while sampling, a device has 80 GB of which 73\.6 .*kv_cache_gb"),
        (["update.pack_tokens=98304"], r"while training, a device has 80 GB .*parallel\.context .*dtype=bfloat16"),
    ],
)
def test_an_engine_that_does_not_fit_beside_the_trainer_is_refused(words, complaint):
    config = compose(rl.RlConfig, "rl_pointwise", [*RECIPE["rl_pointwise"], *words, "launch.dry_run=true"])
    with pytest.raises(ValueError, match=complaint):
        describe_job(config)
    leaner = ["reward.terms.model.settings.dtype=bfloat16", "engine=server"]
    describe_job(compose(rl.RlConfig, "rl_pointwise", [*RECIPE["rl_pointwise"], *words, *leaner, "launch.dry_run=true"]))


@pytest.mark.parametrize("stage", RECIPE)
@pytest.mark.parametrize("launch", ["local", "slurm"])
def test_a_long_step_of_the_recipe_is_saved_often_and_given_time_to_end(stage, launch):
    config = compose(rl.RlConfig, stage, [*RECIPE[stage], f"launch={launch}"])
    assert config.launch.slurm.grace_s >= 900 and config.checkpoint.every <= 10
    small = compose(rl.RlConfig, "rl_pointwise", [*SMALL, f"launch={launch}"])
    assert (small.launch.slurm.grace_s, small.checkpoint.every) == (300, 100)


def test_the_recipe_s_cache_holds_enough_answers_for_each_to_end_in_its_time():
    config = compose(rl.RlConfig, "rl_pointwise", RECIPE["rl_pointwise"])
    native, c = config.engine.native, config.collect
    held = cache_blocks(native, config.model) * native.block_size // config.longest  # answers at their longest, side by side
    turns = -(-c.num_prompts * c.group_size // 8 // held)
    assert turns * config.sampling.max_tokens * 0.04 < c.timeout_s  # at 40 ms a token


def test_what_a_variant_changes_is_in_its_file():
    configs = {
        name: compose(rl.RlConfig, "rl_pointwise", [*SMALL, f"algorithm={name}"])
        for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp")
    }
    told = {name: (c.credit.advantage, c.credit.reduction, c.policy.objective, c.policy.ratio) for name, c in configs.items()}
    assert told == {
        "grpo": ("grpo", "token", "clip", "token"),
        "dr_grpo": ("dr_grpo", "constant", "clip", "token"),
        "dapo": ("grpo", "token", "clip", "token"),
        "gspo": ("grpo", "sequence", "clip", "sequence"),
        "cispo": ("grpo", "token", "cispo", "token"),
        "rloo": ("rloo", "sequence", "clip", "token"),
        "reinforce_pp": ("reinforce_pp", "token", "clip", "token"),
    }
    c = configs["grpo"]  # the recipe's numbers
    assert (c.collect.group_size, c.sampling.temperature) == (8, 1.0)
    assert (c.policy.clip_low, c.policy.clip_high, c.policy.kl) == (0.2, 0.28, None)
    assert c.optimizer.lr == 1e-6 and not c.credit.mask_truncated and configs["dapo"].collect.dynamic_sampling
    assert configs["dr_grpo"].credit.max_tokens == c.sampling.max_tokens == c.collect.overlong.length


def test_the_dry_run_tells_layout_tokens_and_memory(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = ["~reward.terms.model", "reward.terms.a.kind=format", "engine.native.kv_cache_gb=0.5", "launch.dry_run=true"]
    told = describe_job(compose(rl.RlConfig, "rl_pointwise", ["model=tiny", "parallel=cpu2", "answers=short", *words]))
    assert "2 = data 2 *" in told and "2 replicas of 1 tensor ranks" in told and "0.5 GB cache" in told
    assert "64 prompts * 8 answers of at most 256 = 131,072 tokens" in told
    with pytest.raises(ValueError, match="checkpoint must be"):
        describe_job(compose(rl.RlConfig, "rl_pointwise", SMALL))


# ---------------------------------------------------------------------- rows of prompts
@pytest.mark.parametrize(
    ("row", "said", "data"),
    [
        ({"prompt": "hi", "answer": "4"}, ["user"], {"answer": "4"}),
        ({"question": "hi", "tests": [1]}, ["user"], {"tests": [1]}),
        ({"problem": "hi", "system": "be short"}, ["system", "user"], {}),
        ({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "chosen": "c"},
         ["system", "user"], {"chosen": "c"}),
        ({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}, ["user"], {"reference": "a"}),
        ({"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}, {"from": "human", "value": "v"}]},
         ["user", "assistant", "user"], {}),
    ],
)  # fmt: skip
def test_a_row_is_a_conversation_up_to_the_answer_and_its_other_fields_stay(row, said, data):
    conversation, fields = read_prompt(row, "rows.jsonl:1", "s")
    assert [message["role"] for message in conversation.messages] == said and fields == data


@pytest.mark.parametrize("row", [{"text": "plain"}, {"prompt": []}, {"messages": [{"role": "assistant", "content": "a"}]}])
def test_a_row_that_asks_nothing_is_refused(row):
    with pytest.raises(BadRow):
        read_prompt(row, "rows.jsonl:1", "s")


def test_prompts_are_split_by_what_they_say_and_filtered_by_tokens(tmp_path):
    rows = [{"prompt": f"words of question {number}", "answer": number} for number in range(200)] + [{"prompt": "long " * 200}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = {"a": PromptSource(str(tmp_path / "rows.jsonl"))}
    config = PromptConfig(sources, heldout_share=0.2, heldout_limit=10, max_tokens=100)
    sets = open_prompts(config, tiny(), seed=3)
    said = {prompt.conversation.messages[0]["content"] for prompt in sets.training}
    held = [prompt.conversation.messages[0]["content"] for prompt in sets.heldout]
    assert 130 < len(said) < 190 and len(held) == 10 and not said & set(held)
    assert sets.training[0].data["answer"] == 0 or sets.training[0].data
    again = open_prompts(PromptConfig({"b": sources["a"], **sources}, heldout_share=0.2, max_tokens=100), tiny(), seed=4)
    assert set(held) <= {prompt.conversation.messages[0]["content"] for prompt in again.heldout}  # the same side, always
    with pytest.raises(ValueError, match="prompts.sources is empty"):
        open_prompts(PromptConfig(), tiny(), seed=3)
