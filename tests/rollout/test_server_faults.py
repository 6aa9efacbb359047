"""What goes wrong between the server engine and its servers: nothing is sampled by weights that are not known."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_nb.client import RequestFailed
from megatron_nb.rollout.engine import Sampling, Stop
from megatron_nb.rollout.server import ServerConfig, ServerEngine
from megatron_nb.rollout.weight_link import buckets, checksum, describe, flat, flat_bytes, unflat
from tests.rollout.server_setup import PROMPT, Weights, ask, llama, logprobs_of, request
from tests.rollout.stub_server import StubServer
from tests.training import tiny


# ---------------------------------------------------------------------- requests
@pytest.mark.parametrize("kind", ["status", "nonsense", "truncate", "die", "hang"])
def test_a_request_that_fails_before_its_first_token_is_tried_again(stub, engine_of, kind):
    engine = engine_of(stub, retries=2, timeout_s=0.5 if kind == "hang" else 20.0)
    engine.load_weights(Weights(llama(1)), 0)
    (wanted,) = ask(engine, request())
    stub.fail("/v1/completions", times=2, kind=kind)
    (done,) = ask(engine, request())
    assert done == wanted


def test_a_server_that_dies_mid_request_leaves_what_it_sampled(stub, engine_of):
    engine = engine_of(stub)
    engine.load_weights(Weights(llama(1)), 0)
    stub.hold(after=3)

    async def main():
        task = asyncio.create_task(engine.generate(request()))
        await asyncio.to_thread(stub.wait_held, 1)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(stub.stop)
        done = await task
        with pytest.raises(RequestFailed):
            await engine.generate(request("g/0/0.1", PROMPT + done.ids))
        return done

    done = engine.run(main)
    assert (done.stop, len(done.ids), done.versions) == (Stop.ABORT, 3, [0] * 3)


def test_streams_leave_a_server_that_died_for_one_that_lives(engine_of):
    with StubServer(model=llama()) as one, StubServer(model=llama()) as two:
        engine = engine_of(one, two)
        engine.load_weights(Weights(llama(1)), 0)
        ask(engine, *(request(f"g/{i}/0.0") for i in range(4)))

        async def main():
            await asyncio.to_thread(one.stop)
            return await asyncio.gather(*(engine.generate(request(f"g/{i}/1.0")) for i in range(4)))

        assert all(done.stop is Stop.LENGTH for done in engine.run(main))
        assert set(engine._homes.values()) == {1}


@pytest.mark.parametrize("transfer", ["files", "group"])
def test_a_server_that_was_restarted_between_requests_gets_the_weights_again(stub, engine_of, transfer):
    engine = engine_of(stub, transfer=transfer)
    engine.load_weights(Weights(llama(1)), 5)
    (wanted,) = ask(engine, request())
    stub.restart()
    assert ask(engine, request()) == [wanted]
    assert stub.version == 5
    engine.load_weights(Weights(llama(2)), 6)
    assert ask(engine, request())[0].versions == [6] * 8


@pytest.mark.parametrize("died", ["before its first token", "in the middle", "unseen"])
def test_nothing_that_a_restarted_server_sampled_by_its_first_weights_is_kept(stub, engine_of, died):
    engine = engine_of(stub, retries=3)
    engine.load_weights(Weights(llama(1)), 5)
    (wanted,) = ask(engine, request())

    async def main():
        if died == "in the middle":
            stub.hold(after=3)
            task = asyncio.create_task(engine.generate(request()))
            await asyncio.to_thread(stub.wait_held, 1)
            stub.hold(float("inf"))
        elif died == "before its first token":
            stub.fail("/v1/completions", kind="die")
        stub.restart()
        return await task if died == "in the middle" else await engine.generate(request())

    done = engine.run(main)
    if done.stop is Stop.ABORT:
        assert done.ids == wanted.ids[: len(done.ids)]
    else:
        assert done == wanted


@pytest.mark.parametrize("at", ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"])
@pytest.mark.parametrize("transfer", ["files", "group"])
def test_a_server_that_is_restarted_in_the_middle_of_an_update_gets_all_of_it(stub, engine_of, transfer, at):
    engine = engine_of(stub, transfer=transfer, update_timeout_s=5.0)
    engine.load_weights(Weights(llama(1)), 0)
    kept, calls = getattr(stub, at[1:]), []

    def restarted_once(body, query):
        calls.append(at)
        if len(calls) == 1:
            stub.restart()
            raise OSError("killed")
        return kept(body, query)

    setattr(stub, at[1:], restarted_once)
    model = llama(2)
    engine.load_weights(Weights(model), 1)
    (done,) = ask(engine, request())
    assert done.versions == [1] * 8
    assert done.logprobs == pytest.approx(logprobs_of(model, PROMPT + done.ids, len(PROMPT), 0.7), abs=1e-4)


def test_a_server_that_is_away_for_a_while_costs_no_request(engine_of):
    with StubServer(model=llama()) as stub:
        port = int(stub.url.rpartition(":")[2])
        engine = engine_of(stub, away_s=30.0)
        engine.load_weights(Weights(llama(1)), 5)
        (wanted,) = ask(engine, request())
        stub.stop()
        again = []
        threading.Timer(2.0, lambda: again.append(StubServer(model=llama(7), port=port))).start()
        assert ask(engine, request()) == [wanted]
        again[0].stop()


def test_a_server_that_somebody_else_updates_is_an_error(stub, engine_of):
    engine = engine_of(stub)
    engine.load_weights(Weights(llama(1)), 5)
    stub.version = 9
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"holds weights of version \[9\], not 5.*somebody else"):
            ask(engine, request())
    assert stub.count("/v1/completions") == 0
    engine.load_weights(Weights(llama(1)), 6)
    assert ask(engine, request())[0].versions == [6] * 8


def test_a_server_that_gives_no_logprobs_is_an_error(stub, engine_of):
    engine = engine_of(stub)
    engine.load_weights(Weights(llama(1)), 0)
    event = {"choices": [{"token_ids": [4, 5], "logprobs": None, "finish_reason": "length"}]}
    stub.fail("/v1/completions", kind="nonsense", text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")
    with pytest.raises(ValueError, match="2 token ids and 0 log-probs"):
        ask(engine, request())


# ---------------------------------------------------------------------- updates
ROUTES = ["/pause", "/collective_rpc", "/start_weight_update", "/update_weights", "/finish_weight_update",
          "/reset_prefix_cache", "/resume"]  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("transfer", "kind"), [("files", "status"), ("group", "die"), ("group", "nonsense")])
def test_an_update_that_fails_anywhere_is_raised_and_nothing_is_sampled_until_one_succeeds(
    stub, engine_of, transfer, kind, path
):
    models = [llama(1), llama(2)]
    engine = engine_of(stub, transfer=transfer, update_timeout_s=5.0)
    engine.load_weights(Weights(models[0]), 0)
    stub.fail(path, kind=kind)
    with pytest.raises(RequestFailed):
        engine.load_weights(Weights(models[1]), 1)
    sampled = stub.count("/v1/completions")
    with pytest.raises(RuntimeError, match="update to weights of version 1 failed"):
        ask(engine, request())
    assert stub.count("/v1/completions") == sampled
    assert engine.version == 0
    engine.load_weights(Weights(models[1]), 2)
    (done,) = ask(engine, request())
    assert done.versions == [2] * 8
    assert done.logprobs == pytest.approx(logprobs_of(models[1], PROMPT + done.ids, len(PROMPT), 0.7), abs=1e-4)


@pytest.mark.parametrize("transfer", ["files", "group"])
def test_a_server_that_dies_in_the_middle_of_the_weights_is_an_error_in_time(stub, engine_of, transfer):
    engine = engine_of(stub, transfer=transfer, update_timeout_s=4.0)
    engine.load_weights(Weights(llama(1)), 0)
    engine.sender.bucket_bytes = 2000
    stub.fail("/update_weights", times=9, kind="die", after=1)
    began = time.monotonic()
    with pytest.raises((RequestFailed, RuntimeError)):
        engine.load_weights(Weights(llama(2)), 1)
    assert time.monotonic() - began < 15
    stub.stop()
    with pytest.raises(RuntimeError, match="version 1 failed"):
        ask(engine, request())


def test_who_waits_for_an_update_that_fails_is_told(stub, engine_of):
    engine = engine_of(stub)
    engine.load_weights(Weights(llama(1)), 0)
    stub.hold(after=2)

    async def main():
        first = await engine.generate(request())
        await engine.generate(request("g/0/0.1", PROMPT + first.ids))

    future = engine.start(main)
    stub.wait_held(1)
    stub.fail("/finish_weight_update")
    with pytest.raises(RequestFailed):
        engine.load_weights(Weights(llama(2)), 1)
    with pytest.raises(RuntimeError, match="version 1 failed"):
        future.result(20)


def test_a_source_that_breaks_leaves_the_engine_refusing(stub, engine_of):
    engine = engine_of(stub)
    engine.load_weights(Weights(llama(1)), 0)
    engine.sender.bucket_bytes = 2000
    with pytest.raises(OSError, match="the source has gone"):
        engine.load_weights(Weights(llama(2), breaks_at=3), 1)
    with pytest.raises(RuntimeError, match="version 1 failed"):
        ask(engine, request())


def test_weights_that_arrive_changed_are_noticed(stub, engine_of):
    engine = engine_of(stub)
    take = stub.update_weights

    def changed(body, query):
        take(body, query)
        stub.checksum += 1
        return {}

    stub.update_weights = changed
    with pytest.raises(RuntimeError, match="not taken whole"):
        engine.load_weights(Weights(llama(1)), 0)


def test_an_update_that_the_server_pretends_to_take_fails_the_check_of_logprobs(stub, engine_of):
    trainer = llama(1)
    engine = engine_of(stub, probe=lambda ids, start, temperature: logprobs_of(trainer, ids, start, temperature))
    engine.load_weights(Weights(trainer), 0)
    stub.model.load_state_dict = lambda *args, **kwargs: torch.nn.modules.module._IncompatibleKeys([], [])
    trainer = llama(2)
    with pytest.raises(RuntimeError, match="differ from the trainer's"):
        engine.load_weights(Weights(trainer), 1)
    with pytest.raises(RuntimeError, match="version 1 failed"):
        ask(engine, request())


def test_a_prefix_cache_that_survives_an_update_fails_the_check_of_logprobs(stub, engine_of):
    trainer = llama(1)
    engine = engine_of(stub, probe=lambda ids, start, temperature: logprobs_of(trainer, ids, start, temperature))
    engine.load_weights(Weights(trainer), 0)
    assert stub.cache
    stub.reset_prefix_cache = lambda body, query: {"success": True}
    trainer = llama(2)
    with pytest.raises(RuntimeError, match="differ from the trainer's"):
        engine.load_weights(Weights(trainer), 1)


def test_logprobs_of_another_temperature_are_refused(engine_of):
    with StubServer(model=llama(), logprobs_mode="raw_logprobs") as stub:
        engine = engine_of(stub)
        with pytest.raises(ValueError, match="logprobs_mode.*raw_logprobs.*processed_logprobs"):
            engine.load_weights(Weights(llama(1)), 0)


def test_files_appear_whole_and_only_the_last_update_stays(stub, engine_of, tmp_path):
    engine = engine_of(stub)
    engine.sender.bucket_bytes = 2000
    for version in range(3):
        engine.load_weights(Weights(llama(version)), version)
    (folder,) = (tmp_path / "weights").iterdir()
    assert folder.name == "weights-v2"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(llama(0).state_dict()) and len(set(index.values())) > 1


@pytest.mark.parametrize("limit", [1, 50, 10**9])
def test_a_bucket_is_the_same_tensors_after_the_way_as_bytes(limit):
    torch.manual_seed(0)
    tensors = [("a", torch.randn(3)), ("b", torch.randn(5, 2).bfloat16()), ("c", torch.randn(4, 4).T), ("d", torch.ones(1))]
    made = list(buckets(tensors, limit))
    assert [pair[0] for bucket in made for pair in bucket] == list("abcd")
    assert len(made) == {1: 4, 50: 3, 10**9: 1}[limit]
    for bucket in made:
        whole = flat(bucket, torch.device("cpu"))
        assert len(whole) == flat_bytes(describe(bucket))
        back = unflat(whole, json.loads(json.dumps(describe(bucket))))
        for (name, tensor), (other, copy) in zip(bucket, back, strict=True):
            assert (name, tensor.dtype) == (other, copy.dtype) and torch.equal(tensor, copy)
        assert checksum(bucket) == checksum(back)
        back[0][1].view(-1)[0] += 1
        assert checksum(bucket) != checksum(back)


# ---------------------------------------------------------------------- several ranks
def over_ranks(url: str, layout: dict, transfer: str, folder: Path):
    """What each rank sees: results of run, errors of the leader, and of an update that fails while tensors are gathered."""
    trainer = tiny.trainer({}, layout)
    probed = []

    def probe(ids, start, temperature):
        probed.append(ids)
        dist.barrier()
        return [float("nan")] * (len(ids) - start) if len(probed) > 1 else [0.0] * (len(ids) - start)

    config = ServerConfig(urls=[url], transfer=transfer, folder=folder, retries=0, tolerance=100.0, update_timeout_s=10.0)
    engine = ServerEngine(config, trainer.topology, probe)
    assert (engine.leads, engine.replica, engine.replicas) == (dist.get_rank() == 0, 0, 1)
    engine.load_weights(trainer.weights(), 0)

    async def main():
        done = await engine.generate(request(sampling=Sampling(4, 1.0)))
        return done.versions

    async def broken():
        raise KeyError("mine")

    found = [engine.run(main), engine.version, len(probed)]
    future = engine.start(main)
    found.append(future and future.result(20))
    for act in (lambda: engine.run(broken), lambda: engine.load_weights(trainer.weights(), 1),
                lambda: engine.run(main)):  # fmt: skip
        try:
            act()
            found.append("went well")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    engine.close()
    return found


@pytest.mark.parametrize(("layout", "world", "transfer"), [
    ({"tensor": 2}, 2, "group"), ({"pipeline": 2}, 2, "files"), ({}, 2, "group"), ({"context": 2}, 2, "files"),
])  # fmt: skip
def test_every_rank_takes_part_and_meets_the_leaders_errors(ranks, tmp_path, layout, world, transfer):
    shape = tiny.model_config()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, rope_theta=shape.rope_theta, rms_norm_eps=1e-5,
    )  # fmt: skip
    with StubServer(model=LlamaForCausalLM(config)) as stub:
        leader, other = ranks.run(world, over_ranks, stub.url, layout, transfer, tmp_path)
        assert leader[:4] == [[0] * 4, 0, 1, [0] * 4]
        assert other[:4] == [None, 0, 1, None]
        assert leader[4] == other[4] == "KeyError: 'mine'"
        assert leader[5] == other[5] and "differ from the trainer's by nan" in leader[5]
        assert "update to weights of version 1 failed" in leader[6] and leader[6] == other[6]
