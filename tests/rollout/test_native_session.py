"""Sessions of the native engine: every id of a stream is read once, whatever happens between its turns."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_nb.data.packing import pack
from megatron_nb.losses.next_token import NextToken
from megatron_nb.records import Sample
from megatron_nb.rollout.engine import Request, Sampling, Stop
from megatron_nb.training.optimizer import OptimizerConfig
from megatron_nb.training.trainer import Trainer
from tests.model.hf_folders import save_random
from tests.rollout.native_setup import another, engine_of, perturb, prompts_of, sample

TEMPERATURE = 0.7
BLOCK_GB = 16 * 2 * 2 * 2 * 8 * 4 / 2**30  # of the tiny model's cache


class _AtTemperature(NextToken):
    temperature = TEMPERATURE


class Stream:
    """What an agent holds of one episode."""

    def __init__(self, name: str, prompt: list[int], session: bool = True):
        self.name, self.ids, self.session = name, list(prompt), session
        self.sampled, self.logprob = [False] * len(prompt), [0.0] * len(prompt)
        self.asked = self.requests = 0  # ids of all requests
        self.random = np.random.default_rng(sum(name.encode()))

    def add(self, ids: list[int], logprobs: list[float] | None = None) -> None:
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprob += logprobs or [0.0] * len(ids)

    async def turn(self, engine, sampled: int = 5) -> Stop:
        name = f"{self.name}/{self.requests}"
        self.requests, self.asked = self.requests + 1, self.asked + len(self.ids)
        sampling = Sampling(sampled, temperature=TEMPERATURE, stop_ids=(3, 5, 8))
        request = Request(name, self.ids, sampling, seed=7, session=self.name if self.session else None)
        completion = await engine.generate(request)
        self.add(completion.ids, completion.logprobs)
        return completion.stop

    async def talk(self, engine, turns: int, sampled: int = 5, given: int = 9) -> None:
        for turn in range(turns):
            if turn:
                self.add(self.random.integers(0, 301, self.random.integers(1, given)).tolist())
            await self.turn(engine, sampled)


def together(engine, streams: list[Stream], *args) -> None:
    async def main():
        await asyncio.gather(*(stream.talk(engine, *args) for stream in streams))

    engine.run(main)


def end(engine, streams: list[Stream]) -> None:
    async def main():
        for stream in streams:
            await engine.end_session(stream.name)

    engine.run(main)


def trainer_of(engine, source) -> Trainer:
    trainer = Trainer(source.modules, OptimizerConfig(schedule="constant"), engine.topology, num_steps=1)
    source.modules = trainer.chunks
    return trainer


def gap(trainer: Trainer, streams: list[Stream]) -> float:
    """Largest difference between the engine's log-probs and those of the trainer's forward pass over whole streams."""
    samples = [Sample(np.array(s.ids), np.array(s.sampled, np.float32), sample_id=s.name) for s in streams]
    (found,) = trainer.logprobs([pack(samples, sum(map(len, samples)) + 7, 1)], _AtTemperature())
    worst, start = 0.0, 0
    for stream in streams:
        theirs = np.array(found[start : start + len(stream.ids) - 1])  # entry t is of the id after it
        mask = np.array(stream.sampled[1:])
        difference = np.abs(theirs - np.array(stream.logprob[1:]))[mask]
        shifted = np.abs(theirs[:-1] - np.array(stream.logprob[2:]))[mask[1:]]
        assert np.median(shifted) > 0.1  # a log-prob of the id before would be seen
        worst, start = max(worst, difference.max()), start + len(stream.ids)
    return worst


def free_blocks(engine) -> int:
    allocator = engine.core.context.kv_block_allocator
    cached = int(allocator.get_evictable_block_count()) if allocator.enable_prefix_caching else 0
    return allocator.total_avail + cached


def read(engine) -> int:
    return engine.stats.prefilled + engine.stats.decoded


def _once(folder: Path, config: dict):
    engine, source = engine_of(folder, **config)
    engine.core.context.memory_buffer.fill_(float("nan"))  # what was never written is never read
    trainer, whole = trainer_of(engine, source), free_blocks(engine)
    prompts = prompts_of([40, 40, 1, 17, 33, 16])
    prompts[1][:39] = prompts[0][:39]  # share two blocks
    streams = [Stream(f"s{i}", ids) for i, ids in enumerate(prompts)]
    together(engine, streams, 6)
    stats = engine.stats
    assert sum(s.asked for s in streams) == stats.prefilled + stats.reused
    shared = 32 if engine.config.prefix_caching else 0
    assert read(engine) == sum(len(s.ids) - 1 for s in streams) - shared, stats
    assert stats.lost == 0
    assert gap(trainer, streams) < 1e-4
    assert free_blocks(engine) < whole
    end(engine, streams)
    assert free_blocks(engine) == whole
    # without sessions everything is read again each turn, and the same is sampled
    plain = [Stream(f"s{i}", ids, session=False) for i, ids in enumerate(prompts)]
    before = read(engine)
    together(engine, plain, 6)
    assert [s.ids for s in plain] == [s.ids for s in streams]
    assert read(engine) - before > sum(len(s.ids) for s in streams)
    return True


@pytest.mark.parametrize(
    "config", [{}, dict(prefix_caching=False, step_tokens=10, max_concurrency=3), dict(step_tokens=10, max_concurrency=2)],
    ids=["roomy", "chunks", "prefixes-in-chunks"],
)  # fmt: skip
def test_every_id_of_a_session_is_read_once_and_logprobs_equal_a_full_forward(ranks, tmp_path, config):
    assert ranks.run(1, _once, save_random(tmp_path, "llama"), config) == [True]


def _cramped(folder: Path, caching: bool):
    engine, source = engine_of(folder)
    trainer = trainer_of(engine, source)
    small = another(source, kv_cache_gb=9 * BLOCK_GB, prefix_caching=caching, max_concurrency=4)
    assert small.blocks == 8
    prompts = prompts_of([20, 5, 33, 17, 40, 9])
    roomy, cramped = ([Stream(f"s{i}", ids) for i, ids in enumerate(prompts)] for _ in range(2))
    together(engine, roomy, 7)
    together(small, cramped, 7)
    assert [s.ids for s in cramped] == [s.ids for s in roomy]
    assert gap(trainer, cramped) < 1e-4
    stats, new = small.stats, sum(len(s.ids) - 1 for s in cramped)
    assert stats.lost > 0
    assert new < read(small) <= new + stats.lost  # what is dropped after its last turn is not read again
    end(small, cramped)
    assert free_blocks(small) == small.blocks
    # idle sessions go first, the one used longest ago before the others
    a, b, c = (Stream(name, ids) for name, ids in zip("abc", prompts_of([40, 40, 40], seed=3)))
    for stream in (a, b, a):
        together(small, [stream], 1, 3)
    lost = small.stats.lost
    together(small, [c], 1, 3)
    assert small.stats.lost - lost == len(b.ids) - 1
    before = read(small)
    together(small, [a], 1, 1)
    assert read(small) - before == 1
    return True


@pytest.mark.parametrize("caching", [False, True])
def test_little_memory_drops_the_session_used_longest_ago_and_changes_no_token(ranks, tmp_path, caching):
    assert ranks.run(1, _cramped, save_random(tmp_path, "llama"), caching) == [True]


def _interrupted(folder: Path):
    engine, _ = engine_of(folder, max_concurrency=1, prefix_caching=False)
    whole, parts, queued = Stream("w", [4] * 20), Stream("p", [4] * 20), Stream("q", [9] * 30)
    sampling = Sampling(30, temperature=TEMPERATURE)

    async def sampled(number):
        while not any(len(s.ids) >= number for s in engine.sampler.streams.values()):
            await asyncio.sleep(0)

    async def main():
        whole.add((await engine.generate(Request("w", whole.ids, sampling, 7, "w"))).ids)
        before = read(engine)
        await queued.turn(engine, 2)
        first = asyncio.ensure_future(engine.generate(Request("a", parts.ids, sampling, 7, "p")))
        second = asyncio.ensure_future(engine.generate(Request("b", queued.ids + [1], sampling, 7, "q")))
        await sampled(5)
        await engine.abort("b")  # while it waits to go on with what is kept
        assert (await second).ids == []
        await engine.abort("a")
        done = await first
        assert done.stop is Stop.ABORT
        parts.add(done.ids)
        # at once, while core still holds the aborted request
        parts.add((await engine.generate(Request("a", parts.ids, Sampling(3, TEMPERATURE), 7, "p"))).ids)
        third = asyncio.ensure_future(engine.generate(Request("a", parts.ids, sampling, 7, "p")))
        await sampled(3)
        await engine.abort("a")
        parts.add((await third).ids)
        gone = asyncio.ensure_future(engine.generate(Request("c", parts.ids, sampling, 7, "p")))
        await asyncio.sleep(0)
        await engine.abort("c")  # before it could begin
        assert (await gone).ids == []
        left = 50 - len(parts.ids)
        parts.add((await engine.generate(Request("d", parts.ids, Sampling(left, TEMPERATURE), 7, "p"))).ids)
        queued.add([1, 2])  # as the request that was aborted while it waited
        await queued.turn(engine, 2)
        return read(engine) - before

    found = engine.run(main)
    assert parts.ids == whole.ids
    # an aborted request still reads the id that it sampled last, and the next one wants what follows it: once more each
    assert found == len(parts.ids) - 1 + 2 + len(queued.ids) - 1

    async def begun(name):
        task = asyncio.ensure_future(engine.generate(Request(name, [6] * 20, sampling, 7, "x")))
        while not engine.sampler.streams:
            await asyncio.sleep(0)
        task.cancel()

    async def cancelled():
        await begun("x")
        before = read(engine)
        await engine.generate(Request("again", [6] * 20, Sampling(2), 7, "x"))  # while core still holds the cancelled one
        assert read(engine) - before <= 4  # the cancelled one's last step, the prompt's last id, and one sampled
        await begun("y")
        await engine.end_session("x")  # nothing of it stays
        await engine.generate(Request("z", [6], Sampling(3), 7))

    engine.run(cancelled)
    assert set(engine.core.context.kept) == {"w", "p", "q"}
    end(engine, [whole, parts, queued])
    assert not engine.core.context.kept
    return True


def test_an_aborted_or_cancelled_turn_leaves_its_session_whole(ranks, tmp_path):
    assert ranks.run(1, _interrupted, save_random(tmp_path, "llama")) == [True]


def _updated(folder: Path):
    engine, source = engine_of(folder)
    trainer = trainer_of(engine, source)
    stream = Stream("s", [4] * 20)
    together(engine, [stream], 2)
    for change in ("load", "sleep"):
        held, before = len(stream.ids) - 1, read(engine)
        if change == "load":
            perturb(source, 1)
            engine.load_weights(source, 1)
            start = len(stream.ids)
        else:
            engine.sleep()
            engine.wake()
        assert not engine.core.context.kept
        assert engine.stats.lost == held
        engine.stats.lost = 0
        stream.add([1, 2])
        together(engine, [stream], 2)
        assert read(engine) - before == len(stream.ids) - 1
    stream.sampled[:start] = [False] * start  # by the weights before
    assert gap(trainer, [stream]) < 1e-4
    return True


def test_new_weights_and_sleep_drop_every_session_and_count_what_is_read_again(ranks, tmp_path):
    assert ranks.run(1, _updated, save_random(tmp_path, "llama")) == [True]


def _restarted(folder: Path):
    engine, source = engine_of(folder)
    trainer = trainer_of(engine, source)
    prompt = prompts_of([40])[0]
    rows, context = [Stream("s", prompt)], engine.core.context
    together(engine, rows, 3)
    for cut in (50, 43, 37, 20, 0):  # beyond the prompt, and inside its blocks, which others find by their hashes
        row = Stream("s", rows[-1].ids[:cut] + [11, 12, 13])
        before, kept = read(engine), context.kept["s"].length
        assert kept == len(rows[-1].ids) - 1
        together(engine, [row], 2)
        whole = cut - cut % 16 if cut < 32 else cut  # a block that others may read is not written to
        assert read(engine) - before == len(row.ids) - 1 - whole
        rows.append(row)
    assert gap(trainer, rows) < 1e-4
    other = Stream("o", prompt)
    before = engine.stats.reused
    together(engine, [other], 3)
    assert engine.stats.reused - before >= 32
    assert gap(trainer, [other]) < 1e-4
    return True


def test_a_stream_that_begins_alike_and_then_differs_reads_what_differs(ranks, tmp_path):
    assert ranks.run(1, _restarted, save_random(tmp_path, "llama")) == [True]


def _replicas(folder: Path, tensor: int):
    engine, source = engine_of(folder, dict(tensor=tensor), tensor=tensor, max_concurrency=4, kv_cache_gb=9 * BLOCK_GB / tensor)
    streams = [Stream(f"s{i}", ids) for i, ids in enumerate(prompts_of([20, 5, 33, 17]))]
    together(engine, streams, 5)
    told = [None] * tensor
    torch.distributed.all_gather_object(told, (engine.stats, list(engine.core.context.kept)))
    assert all(other == told[0] for other in told)
    assert sample(engine, [[1]], Sampling(1)) is not None or not engine.leads
    return [s.ids for s in streams], [s.logprob for s in streams], engine.stats


def test_tensor_ranks_keep_the_same_sessions(ranks, tmp_path):
    folder = save_random(tmp_path, "llama")
    ((ids, logprobs, stats),) = ranks.run(1, _replicas, folder, 1)
    (found, theirs, other), _ = ranks.run(2, _replicas, folder, 2)
    assert found == ids
    assert stats == other
    assert stats.lost > 0
    assert max(np.abs(np.array(a) - np.array(b)).max() for a, b in zip(logprobs, theirs)) < 1e-4
