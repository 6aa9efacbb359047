"""Batches of bounded staleness from a server that holds a real model: version marks, importance weights, staleness 0."""

import time

import pytest
import torch
from nb_kernels.grpo_loss import Objective, grpo_loss

from megatron_nb.data.prompts import PromptSet
from megatron_nb.records import Conversation, Prompt, Score
from megatron_nb.rewards.advantage import CreditConfig, credit
from megatron_nb.rollout.collect import CollectConfig, Collector
from megatron_nb.rollout.engine import Request, Sampling
from tests.data.data_tokenizers import tiny
from tests.rollout.server_setup import Weights, ask, llama, logprobs_of

TOKENIZER, SAMPLING, STEPS, CAP = tiny(), Sampling(10, temperature=0.7), 4, 2.0


async def by_ids(group):
    return [Score(sum(rollout.ids) / 1000) for rollout in group.rollouts]


def collector(engine, folder, staleness):
    said = [Conversation([{"role": "user", "content": f"q{i}"}], f"row-{i}", "s") for i in range(6)]
    prompts = PromptSet([Prompt(one, [10 + i, 7, 30]) for i, one in enumerate(said)], [], 3)
    config = CollectConfig(num_prompts=2, group_size=2, concurrency=4, staleness=staleness)
    return Collector(engine, prompts, by_ids, config, SAMPLING, TOKENIZER, folder, seed=5, num_steps=STEPS)


def run(engine, one, training_s=0.0):
    """The batches of a run whose weights of version v are llama(v)."""
    engine.load_weights(Weights(llama(0)), 0)
    batches = []
    for step in range(1, STEPS + 1):
        batches.append(one.collect(step)[0])
        time.sleep(training_s)
        engine.load_weights(Weights(llama(step)), step)
        one.start_ahead(step + 1)
    return batches


@pytest.mark.parametrize("k", [1, 2])
def test_every_token_bears_the_version_that_sampled_it_and_is_weighed_by_the_trainers(stub, engine_of, tmp_path, k):
    stub.token_delay = 0.01
    engine = engine_of(stub)
    batches = run(engine, collector(engine, tmp_path, k), training_s=0.06)
    models, lags, parts = [llama(version) for version in range(STEPS + 1)], [], 0
    for step, groups in enumerate(batches, 1):
        samples, _ = credit(groups, CreditConfig())
        by_id = {sample.sample_id: sample for sample in samples}
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            ids, start, versions = rollout.prompt_ids + rollout.ids, len(rollout.prompt_ids), rollout.weight_version
            assert versions == sorted(versions) and len(versions) == len(rollout.ids) == 10
            lags += [step - 1 - version for version in versions]
            parts += len(set(versions)) > 1
            by_version = {version: logprobs_of(models[version], ids, start, 0.7) for version in {*versions, step - 1}}
            marked = [by_version[version][place] for place, version in enumerate(versions)]
            assert rollout.logprob == pytest.approx(marked, abs=1e-4)
            _check_importance(by_id[f"{rollout.rollout_id}/0"], start, by_version[step - 1], marked)
    assert min(lags) >= 0 and 0 < max(lags) <= k and parts  # stale tokens, fresh ones, and some rollouts of both


def _check_importance(sample, start, trainer, engine):
    """The loss weighs each token by min(exp(trainer - engine), cap), worked out here from the models themselves."""
    logprob = torch.tensor([0.0] * start + trainer, dtype=torch.float64)
    streams = [torch.tensor(stream).double() for stream in (sample.advantage, sample.loss_weight, sample.behaviour_logprob)]
    result = grpo_loss(logprob, streams[0], streams[1], behaviour=streams[2], options=Objective(importance_cap=CAP))
    by_hand = [min(2.718281828459045 ** (a - b), CAP) for a, b in zip(trainer, engine)]
    expected = torch.tensor(by_hand) * -streams[0][start:] * streams[1][start:]
    assert result.d_logprob[start:].tolist() == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-6)


def test_staleness_0_is_the_synchronous_run(stub, engine_of, tmp_path):
    engine = engine_of(stub)
    batches = run(engine, collector(engine, tmp_path, 0))
    for step, groups in enumerate(batches, 1):
        engine.load_weights(Weights(llama(step - 1)), step - 1)
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            (alone,) = ask(engine, Request("alone/0/0.0", rollout.prompt_ids, SAMPLING, rollout.seed))
            assert (alone.ids, alone.versions) == (rollout.ids, rollout.weight_version)
            assert alone.logprobs == rollout.logprob and set(alone.versions) == {step - 1}


def test_a_server_that_is_gone_makes_rollouts_invalid_and_the_rest_of_the_batch_stands(stub, engine_of, tmp_path):
    engine = engine_of(stub)
    engine.load_weights(Weights(llama(0)), 0)
    stub.fail("/v1/completions", times=1, kind="die", after=1)
    groups, stats = collector(engine, tmp_path, 0).collect(1)
    reasons = [rollout.score.reason for group in groups for rollout in group.rollouts if rollout.score.reward is None]
    assert len(reasons) == 1 and reasons[0].startswith("generation: ") and stats["invalid_share"] == 0.25
