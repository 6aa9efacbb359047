"""The server engine against a stub that holds a real tiny model."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from megatron_nb.rollout.engine import Stop
from megatron_nb.rollout.server import ServerConfig
from tests.rollout.server_setup import PROMPT, SAMPLING, Weights, ask, llama, logprobs_of, request
from tests.rollout.stub_server import StubServer


@pytest.mark.parametrize("transfer", ["files", "group"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_sampled_logprobs_are_the_trainers_after_every_update(stub, engine_of, transfer, temperature):
    engine = engine_of(stub, transfer=transfer, bucket_mb=1)
    before = None
    for version in (0, 1):
        model = llama(seed=10 + version)
        engine.load_weights(Weights(model), version)
        (done,) = ask(engine, request(sampling=replace(SAMPLING, temperature=temperature)))
        assert len(done.ids) == 8 and done.versions == [version] * 8 and done.stop is Stop.LENGTH
        mine = logprobs_of(model, PROMPT + done.ids, len(PROMPT), temperature or 1.0)
        assert done.logprobs == pytest.approx(mine, abs=1e-4)
        if before is not None:
            moved = logprobs_of(before[0], PROMPT + done.ids, len(PROMPT), temperature or 1.0)
            assert max(abs(a - b) for a, b in zip(mine, moved)) > 1e-3 * 10  # else the check above says nothing
        before = (model, done)


def test_the_seed_decides_the_draw_whatever_else_runs(stub, engine_of):
    engine = engine_of(stub)
    engine.load_weights(Weights(llama(1)), 0)
    (alone,) = ask(engine, request("a/0/0.0", seed=7))
    crowd = ask(engine, *(request(f"b/{i}/0.0", seed=i) for i in range(10)))
    assert crowd[7].ids == alone.ids
    assert len({tuple(done.ids) for done in crowd}) > 5


def test_stops_are_typed_and_a_stop_id_is_the_last_id(stub, engine_of):
    engine = engine_of(stub)
    engine.load_weights(Weights(llama(1)), 0)
    (free,) = ask(engine, request())
    (stopped,) = ask(engine, request(sampling=replace(SAMPLING, stop_ids=(free.ids[3],))))
    first = free.ids.index(free.ids[3]) + 1
    assert (stopped.ids, stopped.stop) == (free.ids[:first], Stop.EOS)
    assert free.stop is Stop.LENGTH


@pytest.mark.parametrize("transfer", ["files", "group"])
def test_an_update_mid_request_ends_it_and_each_part_has_the_version_that_sampled_it(stub, engine_of, transfer):
    models = [llama(1), llama(2)]
    engine = engine_of(stub, transfer=transfer)
    engine.load_weights(Weights(models[0]), 3)
    stub.hold(after=3)

    async def main():
        first = await engine.generate(request("g/0/0.0"))
        rest = replace(SAMPLING, max_tokens=8 - len(first.ids))
        return first, await engine.generate(request("g/0/0.1", PROMPT + first.ids, sampling=rest))

    future = engine.start(main)
    stub.wait_held(1)
    updater = threading.Thread(target=engine.load_weights, args=(Weights(models[1]), 4))
    updater.start()
    updater.join(20)
    stub.release()
    first, second = future.result(20)
    assert (first.versions, first.stop) == ([3] * 3, Stop.ABORT)
    assert (second.versions, second.stop) == ([4] * 5, Stop.LENGTH)
    ids = PROMPT + first.ids + second.ids
    assert first.logprobs == pytest.approx(logprobs_of(models[0], ids[:8], 5, 0.7), abs=1e-4)
    assert second.logprobs == pytest.approx(logprobs_of(models[1], ids, 8, 0.7), abs=1e-4)


def test_a_request_that_waits_for_an_update_is_sampled_by_the_new_weights(stub, engine_of):
    engine = engine_of(stub)
    engine.load_weights(Weights(llama(1)), 0)

    async def main():
        return await engine.generate(request())

    class Slow(Weights):
        def hf_tensors(self):
            self.future = engine.start(main)
            time.sleep(0.2)
            assert not self.future.done()
            yield from super().hf_tensors()

    source = Slow(llama(2))
    engine.load_weights(source, 1)
    assert source.future.result(20).versions == [1] * 8


def test_an_update_does_not_queue_behind_requests(stub, engine_of):
    engine = engine_of(stub, concurrency=2)
    engine.load_weights(Weights(llama(1)), 0)
    stub.hold(after=1)

    async def main():
        return await asyncio.gather(*(engine.generate(request(f"g/{i}/0.0")) for i in range(20)))

    future = engine.start(main)
    stub.wait_held(2)
    engine.load_weights(Weights(llama(2)), 1)
    done = future.result(20)
    assert all(one.stop is Stop.ABORT for one in done)
    assert sum(len(one.ids) for one in done) <= 2


def test_abort_keeps_what_was_sampled_and_stops_the_server(stub, engine_of):
    engine = engine_of(stub)
    engine.load_weights(Weights(llama(1)), 0)
    stub.hold(after=2)

    async def main():
        task = asyncio.create_task(engine.generate(request("x/0/0.0")))
        await asyncio.to_thread(stub.wait_held, 1)
        await asyncio.sleep(0.2)  # for what was sent to be read
        await engine.abort("nobody")
        await engine.abort("x/0/0.0")
        return await task

    done = engine.run(main)
    assert (done.stop, len(done.ids), len(done.logprobs), done.versions) == (Stop.ABORT, 2, 2, [0, 0])
    end = time.monotonic() + 10
    while not stub.hung_up:
        assert time.monotonic() < end, "the server goes on"
        time.sleep(0.01)


def test_a_cancelled_generate_hangs_up(stub, engine_of):
    engine = engine_of(stub)
    engine.load_weights(Weights(llama(1)), 0)
    stub.hold(after=2)

    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await engine.generate(request())
        return dict(engine._running)

    assert engine.run(main) == {}
    end = time.monotonic() + 10
    while not stub.hung_up:
        assert time.monotonic() < end, "the server goes on"
        time.sleep(0.01)


def test_streams_spread_over_servers_and_stay_where_their_prefix_is(engine_of):
    with StubServer(model=llama()) as one, StubServer(model=llama()) as two:
        engine = engine_of(one, two, transfer="group")
        engine.load_weights(Weights(llama(1)), 0)
        ask(engine, *(request(f"g/{i}/0.0") for i in range(6)))
        counts = [stub.count("/v1/completions") for stub in (one, two)]
        assert counts == [3, 3]
        ask(engine, *(request(f"g/{i}/1.0") for i in range(6)))
        prompts = [sorted(i for i in range(6) if engine._homes[f"g/{i}"] == server) for server in (0, 1)]
        assert sorted(map(len, prompts)) == [3, 3]
        assert [stub.count("/v1/completions") for stub in (one, two)] == [6, 6]


def test_a_session_stays_where_its_prefix_is_whatever_its_requests_are_called(engine_of):
    with StubServer(model=llama()) as one, StubServer(model=llama()) as two:
        engine = engine_of(one, two)
        engine.load_weights(Weights(llama(1)), 0)
        for turn in range(3):  # all at once: without sessions they would be spread anew each turn
            order = [0, 1, 2, 3] if turn % 2 else [3, 1, 0, 2]
            ask(engine, *(replace(request(f"{turn}-{i}", seed=i), session=f"s{i}") for i in order))
        asked = [[body["seed"] for path, body in stub.requests if path == "/v1/completions"] for stub in (one, two)]
        assert {*asked[0]}.isdisjoint(asked[1])
        assert sorted(map(len, asked)) == [6, 6]
        assert (engine.stats.prefilled, engine.stats.decoded) == (12 * len(PROMPT), 12 * 7)

        async def leave():
            await engine.end_session("s0")
            await engine.end_session("unknown")

        engine.run(leave)
        assert sorted(engine._homes) == ["s1", "s2", "s3"]


def test_what_the_server_refuses_is_a_value_error_with_its_words(stub, engine_of):
    engine = engine_of(stub)
    engine.load_weights(Weights(llama(1)), 0)
    with pytest.raises(ValueError, match="g/0/0.0.*outside the vocabulary"):
        ask(engine, request(ids=[5, 4000]))


def test_an_exception_of_the_coroutine_is_raised(stub, engine_of):
    engine = engine_of(stub)
    engine.load_weights(Weights(llama(1)), 0)

    async def main():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.run(main)
    with pytest.raises(KeyError, match="mine"):
        engine.start(main).result(10)


def test_nothing_is_sampled_before_the_first_weights(stub, engine_of):
    engine = engine_of(stub)
    with pytest.raises(RuntimeError, match="call load_weights first"):
        ask(engine, request())
    assert stub.count("/v1/completions") == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"urls": []}, "urls is empty"),
        ({"urls": ["localhost:8000"]}, "must start with http"),
        ({"transfer": "files"}, "needs engine.server.folder"),
        ({"bucket_mb": 0}, "bucket_mb=0 must be positive"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        ServerConfig(**settings)
