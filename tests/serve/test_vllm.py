"""The server engine against a real vLLM server: what the stub of the default tests takes for granted.

Tolerance of log-probs 1e-3 in fp32; every update moves them by more than ten times that, or the checks would say nothing.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from megatron_nb.client import RequestFailed
from megatron_nb.losses.policy_gradient import PolicyConfig
from megatron_nb.rollout.engine import Request, Sampling, Stop
from megatron_nb.rollout.leader import of_leader
from megatron_nb.rollout.server import ServerConfig, ServerEngine
from megatron_nb.training.policy import Policy, UpdateConfig
from tests.rollout.server_setup import ALONE, Weights, logprobs_of
from tests.serve.conftest import BLOCK, llama_config
from tests.training import tiny

pytestmark = [pytest.mark.slow, pytest.mark.serve, pytest.mark.timeout(1200)]  # the server starts within the first

SHAPE = dict(num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, head_dim=32, ffn_hidden_size=96,
             vocab_size=300, max_position_embeddings=512)  # fmt: skip
TOLERANCE = 1e-3
PROMPT = [5 + (7 * i * i + 3 * i) % 251 for i in range(3 * BLOCK)]
SAMPLING = Sampling(max_tokens=24, temperature=0.7)


def llama(seed: int):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(llama_config()).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25 + centre)
    return model


def request(name="g/0/0.0", ids=None, seed=1, sampling=SAMPLING) -> Request:
    return Request(name, ids or PROMPT, sampling, seed)


def ask(engine, *requests):
    async def main():
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return engine.run(main)


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def engine_of(server, tmp_path):
    made = []

    def make(probe=None, **settings):
        settings = {"transfer": "group", "folder": tmp_path / "weights", "tolerance": TOLERANCE, **settings}
        made.append(ServerEngine(ServerConfig(urls=[server], **settings), ALONE, probe))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


# ---------------------------------------------------------------------- log-probs after updates
def _moved(chunks, seed: int) -> None:
    """Noise on every matrix; all matrices are cut over tensor ranks, so ranks may differ."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                if parameter.dim() > 1:
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)


def updates(url: str, transfer: str, layout: dict, folder: Path) -> list[tuple[float, float]]:
    """(engine against trainer, before against after the update) for each of three updates, at every rank."""
    trainer = tiny.trainer(SHAPE, layout)
    policy = Policy(trainer, PolicyConfig(), UpdateConfig(pack_tokens=512))
    config = ServerConfig(urls=[url], transfer=transfer, folder=folder, tolerance=TOLERANCE, bucket_mb=1)
    engine, found = ServerEngine(config, trainer.topology, policy.probe), []
    seen: list = []
    for version in range(3):
        before = [policy.probe(*key) for key in seen]
        _moved(trainer.chunks, 100 * version + trainer.topology.tensor_rank)
        moved = [apart(a, policy.probe(*key)) for a, key in zip(before, seen)]
        engine.load_weights(trainer.weights(), version)
        temperatures = (0.0, 0.7, 1.0, 1.0)  # the same prompt: its beginning comes from the cache, of these weights alone
        requests = [request(f"u{i}/0.0", seed=i, sampling=replace(SAMPLING, temperature=t)) for i, t in enumerate(temperatures)]
        done = of_leader(ask(engine, *requests), engine._world) + of_leader(ask(engine, *requests), engine._world)
        assert all(one.versions == [version] * 24 and one.stop is Stop.LENGTH for one in done)
        seen = [(PROMPT + one.ids, len(PROMPT), t or 1.0) for one, t in zip(done, temperatures * 2)]
        found.append((max(apart(one.logprobs, policy.probe(*key)) for one, key in zip(done, seen)), max(moved, default=None)))
    engine.close()
    return found


@pytest.mark.parametrize("transfer", ["files", "group"])
@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 2}], ids=["dp1", "tp2", "pp2"])
def test_logprobs_are_the_trainers_after_every_update(server, ranks, tmp_path, transfer, layout):
    world = 2 if layout else 1
    for rank in ranks.run(world, updates, server, transfer, layout, tmp_path):
        print(transfer, layout, "(engine against trainer, moved by the update):", rank)
        for difference, moved in rank:
            assert difference < TOLERANCE
            assert moved is None or moved > 10 * TOLERANCE  # None: the first


def test_the_server_reads_the_ids_it_is_given_and_gives_the_ids_it_sampled(engine_of, server):
    engine, model = engine_of(), llama(1)
    engine.load_weights(Weights(model), 0)
    for seed in range(3):
        (done,) = ask(engine, request(seed=seed))
        greedy = Request("greedy/0.0", PROMPT, replace(SAMPLING, temperature=0.0), 0)
        (cold,) = ask(engine, greedy)
        ids = list(PROMPT)
        for _ in range(24):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert cold.ids == ids[len(PROMPT) :]
        assert apart(done.logprobs, logprobs_of(model, PROMPT + done.ids, len(PROMPT), 0.7)) < TOLERANCE
    body = {"model": "policy", "prompt": PROMPT, "max_tokens": 1, "return_token_ids": True}
    assert httpx.post(f"{server}/v1/completions", json=body).json()["choices"][0]["prompt_token_ids"] == PROMPT


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_temperature(engine_of, temperature):
    engine, model = engine_of(), llama(2)
    engine.load_weights(Weights(model), 0)
    one = Sampling(1, temperature)
    tokens = [done.ids[0] for done in ask(engine, *(request(f"t/{i}/0.0", seed=i, sampling=one) for i in range(600)))]
    with torch.no_grad():
        p = (model(torch.tensor([PROMPT])).logits[0, -1] / temperature).softmax(0)
    top = p.argsort(descending=True)[:12]
    for token in top.tolist():
        share, expected = tokens.count(token) / 600, float(p[token])
        assert abs(share - expected) < 4 * (expected * (1 - expected) / 600) ** 0.5 + 1e-3


def test_the_seed_decides_the_draw(engine_of):
    engine = engine_of()
    engine.load_weights(Weights(llama(2)), 0)
    (alone,) = ask(engine, request(seed=3))
    crowd = ask(engine, *(request(f"b/{i}/0.0", seed=i) for i in range(8)))
    assert crowd[3].ids == alone.ids
    assert len({tuple(done.ids) for done in crowd}) == 8


def test_a_stop_id_is_the_last_id(engine_of):
    engine = engine_of()
    engine.load_weights(Weights(llama(2)), 0)
    (free,) = ask(engine, request())
    (stopped,) = ask(engine, request(sampling=replace(SAMPLING, stop_ids=(free.ids[9],))))
    first = free.ids.index(free.ids[9]) + 1
    assert (stopped.ids, stopped.stop, free.stop) == (free.ids[:first], Stop.EOS, Stop.LENGTH)
    assert stopped.logprobs == pytest.approx(free.logprobs[:first], abs=1e-4)


# ---------------------------------------------------------------------- in the middle of requests
def watched(engine) -> list[list[int]]:
    """The ids of every stream that is begun from now on; they grow while it runs."""
    streams, sample = [], engine._sample

    def noted(server, request, ids, logprobs):
        streams.append(ids)
        return sample(server, request, ids, logprobs)

    engine._sample = noted
    return streams


@pytest.mark.parametrize("transfer", ["files", "group"])
def test_an_update_mid_request_marks_each_part_with_the_version_that_sampled_it(engine_of, transfer):
    models = [llama(seed) for seed in (3, 4, 5)]
    engine = engine_of(transfer=transfer)
    engine.load_weights(Weights(models[0]), 0)
    total = 400

    async def episode(number: int):
        parts, ids = [], list(PROMPT)
        while len(ids) < len(PROMPT) + total:
            left = Sampling(len(PROMPT) + total - len(ids), 0.7)
            parts.append(await engine.generate(request(f"m/{number}/0.{len(parts)}", ids, number, left)))
            ids = ids + parts[-1].ids
        return parts

    async def main():
        return await asyncio.gather(*(episode(number) for number in range(3)))

    streams = watched(engine)
    future = engine.start(main)
    for version in (1, 2):
        while len(streams) < 3 * version or min(map(len, streams[-3:])) < 20:
            time.sleep(0.005)
        engine.load_weights(Weights(models[version]), version)
    assert not future.done(), "the requests ended before the last update: the test shows nothing"
    for parts in future.result(300):
        ids, used = list(PROMPT), []
        for part in parts:
            if part.ids:
                version = part.versions[0]
                assert part.versions == [version] * len(part.ids)
                mine = logprobs_of(models[version], ids + part.ids, len(ids), 0.7)
                assert apart(part.logprobs, mine) < TOLERANCE
                other = logprobs_of(models[(version + 1) % 3], ids + part.ids, len(ids), 0.7)
                assert apart(part.logprobs, other) > 10 * TOLERANCE
                used.append(version)
            ids += part.ids
        assert used == [0, 1, 2]
        assert [part.stop for part in parts if part.ids] == [Stop.ABORT, Stop.ABORT, Stop.LENGTH]


def _running(server: str) -> float:
    text = httpx.get(f"{server}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{"))]
    assert lines, "the server tells no number of running requests"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_abort_keeps_what_was_sampled_and_stops_the_server(engine_of, server):
    engine, model = engine_of(), llama(3)
    engine.load_weights(Weights(model), 0)
    streams = watched(engine)

    async def main():
        task = asyncio.create_task(engine.generate(request("x/0/0.0", sampling=Sampling(400, 0.7))))
        while not streams or len(streams[0]) < 20:
            await asyncio.sleep(0.005)
        await engine.abort("x/0/0.0")
        return await task

    done = engine.run(main)
    assert done.stop is Stop.ABORT and 0 < len(done.ids) < 400
    assert apart(done.logprobs, logprobs_of(model, PROMPT + done.ids, len(PROMPT), 0.7)) < TOLERANCE
    end = time.monotonic() + 5
    while _running(server):
        assert time.monotonic() < end, "the server goes on"
        time.sleep(0.1)


# ---------------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize("transfer", ["files", "group"])
def test_an_update_that_lacks_a_tensor_is_an_error_and_the_next_whole_one_mends_it(engine_of, transfer):
    class Lacking(Weights):
        def hf_tensors(self):
            return (pair for pair in super().hf_tensors() if "up_proj" not in pair[0])

    engine, model = engine_of(transfer=transfer), llama(4)
    engine.load_weights(Weights(llama(3)), 0)
    with pytest.raises((RequestFailed, RuntimeError)):
        engine.load_weights(Lacking(llama(5)), 1)
    with pytest.raises(RuntimeError, match="update to weights of version 1 failed"):
        ask(engine, request())
    engine.load_weights(Weights(model), 2)
    (done,) = ask(engine, request())
    assert done.versions[0] == 2
    assert apart(done.logprobs, logprobs_of(model, PROMPT + done.ids, len(PROMPT), 0.7)) < TOLERANCE


def test_an_update_that_another_trainer_left_unfinished_is_no_obstacle(engine_of, server):
    httpx.post(f"{server}/pause?mode=abort").raise_for_status()
    httpx.post(f"{server}/start_weight_update", json={}).raise_for_status()
    engine, model = engine_of(), llama(6)
    engine.load_weights(Weights(model), 0)
    (done,) = ask(engine, request())
    assert apart(done.logprobs, logprobs_of(model, PROMPT + done.ids, len(PROMPT), 0.7)) < TOLERANCE


def test_a_server_whose_weights_are_not_the_trainers_fails_the_check(engine_of):
    other = llama(8)

    def probe(ids, start, temperature):
        return logprobs_of(other, ids, start, temperature)

    engine = engine_of(probe=probe)
    with pytest.raises(RuntimeError, match="differ from the trainer's"):
        engine.load_weights(Weights(llama(7)), 0)
    with pytest.raises(RuntimeError, match="version 0 failed"):
        ask(engine, request())


def test_too_long_a_request_is_a_value_error(engine_of):
    engine = engine_of()
    engine.load_weights(Weights(llama(7)), 0)
    with pytest.raises(ValueError, match="refused"):
        ask(engine, request(sampling=Sampling(5000)))
