"""The native engine on one rank: what it samples, how it schedules, what it refuses."""

import asyncio

import numpy as np
import pytest
import torch

from megatron_nb.data.packing import pack
from megatron_nb.losses.next_token import NextToken
from megatron_nb.records import Sample
from megatron_nb.rollout.engine import Request, Sampling, Stop
from megatron_nb.rollout.native import NativeConfig
from megatron_nb.training.optimizer import OptimizerConfig
from megatron_nb.training.trainer import Trainer
from tests.model.hf_folders import save_random
from tests.rollout.native_setup import another, bytes_alive, engine_of, perturb, prompts_of, sample

LENGTHS = [1, 5, 16, 17, 33, 40, 3, 31, 9]  # blocks hold 16: below, at and beyond their edges
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


def _theirs(folder, prompts):
    """What transformers generates greedily, 20 tokens."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    rows = [torch.tensor([ids]) for ids in prompts]
    options = dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
    return [model.generate(x, attention_mask=torch.ones_like(x), **options)[0, x.shape[1] :].tolist() for x in rows]


def _greedy(folder, prompts, stop_ids):
    sampling = Sampling(20, temperature=0, stop_ids=stop_ids)
    engine, source = engine_of(folder)
    engine.core.context.memory_buffer.fill_(float("nan"))  # what was never written is never read
    together = sample(engine, prompts, sampling)
    alone = [sample(engine, [ids], sampling)[0] for ids in prompts]
    chunked = another(source, step_tokens=10, max_concurrency=8)
    return together, alone, sample(chunked, prompts, sampling)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {}), ("llama", LLAMA3), ("qwen2", dict(tied=True)), ("qwen3", {})],
    ids=["llama", "llama3-rope", "qwen2-tied", "qwen3"],
)
def test_greedy_ids_equal_those_of_transformers_alone_together_and_in_chunks(ranks, tmp_path, family, settings):
    folder, prompts = save_random(tmp_path, family, **settings), prompts_of(LENGTHS)
    expected = _theirs(folder, prompts)
    stop_ids = expected[1][4], expected[4][11]
    ends = [next((i + 1 for i, token in enumerate(ids) if token in stop_ids), 20) for ids in expected]
    (runs,) = ranks.run(1, _greedy, folder, prompts, stop_ids)
    for run in runs:
        assert [completion.ids for completion in run] == [ids[:end] for ids, end in zip(expected, ends)]
        assert [completion.stop for completion in run] == [
            Stop.EOS if ids[end - 1] in stop_ids else Stop.LENGTH for ids, end in zip(expected, ends)
        ]
        assert all(completion.versions == [0] * len(completion.ids) for completion in run)


TEMPERATURE = 0.7


class _AtTemperature(NextToken):
    temperature = TEMPERATURE


def _trainer_logprobs(trainer, prompts, completions):
    """The trainer's log-probs of the sampled tokens, in the engine's order."""
    rows = [np.array(ids + completion.ids) for ids, completion in zip(prompts, completions)]
    weights = [np.arange(len(row)) >= len(ids) for row, ids in zip(rows, prompts)]
    samples = [Sample(row, weight.astype(np.float32), sample_id=str(i)) for i, (row, weight) in enumerate(zip(rows, weights))]
    (logprobs,) = trainer.logprobs([pack(samples, sum(map(len, rows)) + 7, 1)], _AtTemperature())
    starts = np.cumsum([0, *map(len, rows)])
    # stream t of a pack belongs to the token after it
    return [
        logprobs[a + len(ids) - 1 : a + len(row) - 1].tolist() for a, ids, row in zip(starts, prompts, rows)
    ]  # fmt: skip


def _logprobs_after_updates(folder):
    engine, source = engine_of(folder)
    trainer = Trainer(source.modules, OptimizerConfig(schedule="constant"), engine.topology, num_steps=1)
    source.modules = trainer.chunks
    prompts = prompts_of([40, 40, 35, 1, 18])
    prompts[1][:39] = prompts[0][:39]  # share two blocks
    found = []
    for version in range(3):
        if version:
            perturb(source, version)
            engine.load_weights(source, version)
        hits = []
        for _ in range(2):  # the second time every prompt's blocks are known
            before = engine.core._prefill_tokens_skipped
            completions = sample(engine, prompts, Sampling(12, temperature=TEMPERATURE), seeds=[9, 8, 7, 6, 5])
            hits.append(engine.core._prefill_tokens_skipped - before)
            assert all(completion.versions == [version] * 12 for completion in completions)
            theirs = _trainer_logprobs(trainer, prompts, completions)
            found.append((version, [completion.logprobs for completion in completions], theirs, completions[0].ids))
        assert hits[0] == 32, hits  # what two prompts of this run share, nothing of the runs before
        assert hits[1] > hits[0]
    return found


def test_logprobs_equal_the_trainers_after_every_update_and_with_cached_prefixes(ranks, tmp_path):
    (found,) = ranks.run(1, _logprobs_after_updates, save_random(tmp_path, "llama"))
    for _, ours, theirs, _ in found:
        assert np.abs(np.array(ours) - np.array(theirs)).max() < 1e-3
        shifted = np.abs(np.array(ours)[:, 1:] - np.array(theirs)[:, :-1])
        assert np.median(shifted) > 1e-1  # a log-prob of the token before would be seen
    first = {version: (ours, ids) for version, ours, _, ids in reversed(found)}
    for version in (1, 2):  # what the update moved, stale weights would not have
        assert np.abs(np.array(first[version][0]) - np.array(first[version - 1][0])).max() > 1e-2


def _schedules(folder):
    engine, source = engine_of(folder, max_concurrency=2)
    prompts, sampling = prompts_of(LENGTHS), Sampling(9)
    running, step = [], engine.core.async_step

    async def watched():
        result = await step()
        running.append(engine.core.context.total_request_count)
        return result

    engine.core.async_step = watched
    queued = sample(engine, prompts, sampling)
    wide = another(source)
    assert [c.ids for c in sample(wide, prompts, sampling)] == [c.ids for c in queued]  # whatever runs beside it
    assert max(running) == 2
    # two requests of five blocks each do not fit into six blocks: one is driven out and read again
    small = another(source, kv_cache_gb=7 * 16 * 2 * 2 * 2 * 8 * 4 / 2**30, prefix_caching=False)
    assert small.blocks == 6
    long = prompts_of([20, 20, 20])
    cramped = sample(small, long, Sampling(60))
    assert small.core.evicted_request_count > 0
    roomy = sample(wide, long, Sampling(60))
    assert [c.ids for c in cramped] == [c.ids for c in roomy]
    assert np.abs(np.array([c.logprobs for c in cramped]) - np.array([c.logprobs for c in roomy])).max() < 1e-4
    one = sample(wide, prompts, Sampling(1))
    assert [c.ids for c in one] == [c.ids[:1] for c in queued]
    again = [sample(wide, [ids], sampling, seeds=[i])[0] for _ in range(2) for i, ids in enumerate(prompts)]
    assert again[: len(prompts)] == again[len(prompts) :]  # to the last bit
    return True


def test_requests_queue_are_driven_out_and_repeat_without_changing_what_they_sample(ranks, tmp_path):
    assert ranks.run(1, _schedules, save_random(tmp_path, "llama")) == [True]


def _aborts(folder):
    engine, _ = engine_of(folder, max_concurrency=1)
    running, queued = prompts_of([12, 7])
    whole = sample(engine, [running], Sampling(40))[0]

    async def main():
        first = asyncio.ensure_future(engine.generate(Request("a", running, Sampling(40), 0)))
        second = asyncio.ensure_future(engine.generate(Request("b", queued, Sampling(40), 0)))
        while len(engine.sampler.streams) < 2 or len(engine.sampler.streams[min(engine.sampler.streams)].ids) < 5:
            await asyncio.sleep(0)
        await engine.abort("nobody")
        await engine.abort("b")
        assert (await second).ids == []
        await engine.abort("a")
        part = await first
        rest = await engine.generate(Request("a", running + part.ids, Sampling(40 - len(part.ids)), 0))
        # one that is given up by its caller makes room
        third = asyncio.ensure_future(engine.generate(Request("c", queued, Sampling(40), 0)))
        await asyncio.sleep(0)
        third.cancel()
        assert len((await engine.generate(Request("d", queued, Sampling(3), 0))).ids) == 3
        asyncio.ensure_future(engine.generate(Request("e", queued, Sampling(40), 0)))  # ends with main
        return part, rest

    part, rest = engine.run(main)
    assert part.stop == Stop.ABORT
    assert 5 <= len(part.ids) < 40
    assert part.ids + rest.ids == whole.ids  # the draw goes by position, so the rest is what it would have been
    assert len(part.logprobs) == len(part.versions) == len(part.ids)
    assert sample(engine, [running], Sampling(40))[0].ids == whole.ids
    return True


def test_an_aborted_request_keeps_its_part_and_goes_on_as_if_it_had_not_stopped(ranks, tmp_path):
    assert ranks.run(1, _aborts, save_random(tmp_path, "llama")) == [True]


def _message(call, *args):
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    raise AssertionError("no ValueError")


def _refusals(folder):
    engine, source = engine_of(folder, kv_cache_gb=4 * 16 * 2 * 2 * 2 * 8 * 4 / 2**30, max_sequence_length=100)
    found = {}
    cases = {
        "long": Request("x", [1] * 90, Sampling(11), 0),
        "cache": Request("x", [1] * 40, Sampling(20), 0),
        "empty": Request("x", [], Sampling(1), 0),
        "vocabulary": Request("x", [1, 301], Sampling(1), 0),
    }
    for name, request in cases.items():
        found[name] = _message(lambda r: engine.run(lambda: engine.generate(r)), request)

    async def twice():
        await asyncio.gather(*(engine.generate(Request("same", [1], Sampling(2), 0)) for _ in range(2)))

    found["twice"] = _message(engine.run, twice)
    found["start"] = _message(engine.start, twice)
    found["outside"] = _message(asyncio.run, engine.generate(Request("x", [1], Sampling(1), 0)))
    assert len(sample(engine, [[1] * 40], Sampling(8))[0].ids) == 8  # 48 tokens are the cache's three blocks
    found["layout"] = _message(lambda: another(source, tensor=2, max_concurrency=2))
    found["budget"] = _message(lambda: another(source, kv_cache_gb=1e-9))
    found["positions"] = _message(lambda: another(source, max_sequence_length=129))
    found["graphs"] = _message(lambda: another(source, cuda_graphs=True))
    return found


def test_what_can_never_be_served_is_refused_by_name(ranks, tmp_path):
    (found,) = ranks.run(1, _refusals, save_random(tmp_path, "llama"))
    expected = {
        "long": "prompt 90 \\+ max_tokens 11 = 101 must be at most max_sequence_length=100",
        "cache": "60 tokens do not fit into the cache of 3 blocks of 16: raise the engine.s kv_cache_gb",
        "empty": "has no ids",
        "vocabulary": "id 301, outside the vocabulary of 301",
        "twice": "'same' is running already",
        "start": "engine=server",
        "outside": "within run",
        "layout": "engine: tensor=2 must divide the 1 processes",
        "budget": "holds no block of 16 tokens .*give at least",
        "positions": "max_sequence_length=129 must be at most model.max_position_embeddings=128",
        "graphs": "needs a GPU",
    }
    for name, pattern in expected.items():
        with pytest.raises(ValueError, match=pattern):
            raise ValueError(found[name])


@pytest.mark.parametrize(
    "field", ["tensor", "max_concurrency", "block_size", "step_tokens", "kv_cache_gb", "max_sequence_length"]
)
def test_a_configuration_that_cannot_be_names_its_field(field):
    with pytest.raises(ValueError, match=f"engine: {field}=0"):
        NativeConfig(**{field: 0})


def _memory(folder):
    engine, source = engine_of(folder, kv_cache_gb=0.05)
    cache = engine.core.context.memory_buffer.nbytes
    assert cache > 0.99 * 0.05 * 2**30 - engine.core.context.block_size_bytes
    prompts = prompts_of([20, 30])
    before = sample(engine, prompts, Sampling(5))
    awake, packed = bytes_alive()
    assert packed > 0
    engine.sleep()
    asleep, packed = bytes_alive()
    assert packed == 0
    assert awake - asleep >= cache, (awake, asleep, cache)
    engine.sleep()  # again is nothing
    engine.wake()
    assert bytes_alive()[0] >= awake - 2**16
    assert sample(engine, prompts, Sampling(5)) == before
    engine.sleep()
    engine.load_weights(source, 3)
    after = sample(engine, prompts, Sampling(5))
    assert [c.ids for c in after] == [c.ids for c in before]
    assert after[0].versions == [3] * 5
    engine.close()
    return True


def test_sleep_frees_cache_and_packed_weights_and_wake_brings_them_back(ranks, tmp_path):
    assert ranks.run(1, _memory, save_random(tmp_path, "llama")) == [True]


def _not_finite(folder):
    engine, source = engine_of(folder)
    with torch.no_grad():
        next(source.modules[0].parameters()).fill_(float("nan"))
    engine.load_weights(source, 4)
    try:
        sample(engine, [[1, 2]], Sampling(3))
    except FloatingPointError as error:
        return str(error)
    return ""


def test_weights_that_are_not_finite_raise_instead_of_sampling(ranks, tmp_path):
    assert "version 4" in ranks.run(1, _not_finite, save_random(tmp_path, "llama"))[0]
