"""The HTTP client against a server that fails in every way a test can ask for."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
import time
from email.utils import formatdate

import pytest
import torch

from megatron_nb.client import BadAnswer, Client, ClientConfig, RequestFailed, RequestRefused
from tests.rollout.stub_server import StubServer

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "2 + 2?"}]


@pytest.fixture
def stub():
    with StubServer(model=torch.nn.Identity()) as server:
        yield server


def client_of(stub, **settings) -> Client:
    return Client(ClientConfig(stub.url, **{"model": "judge", "timeout_s": 10.0, "retries": 2, "pause_s": 0.01, **settings}))


def chat(client, *args, **settings):
    return asyncio.run(client.chat(MESSAGES, *args, **settings))


def test_chat_sends_what_it_is_given_and_returns_the_text(stub, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    stub.chat = lambda body: body["messages"][0]["content"] + " 4"
    assert chat(client_of(stub, api_key_env="JUDGE_KEY"), temperature=0.0) == "2 + 2? 4"
    assert stub.requests == [(CHAT, {"model": "judge", "messages": MESSAGES, "temperature": 0.0})]
    assert stub.headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("kind", ["status", "nonsense", "truncate", "hang", "die"])
def test_what_waiting_may_mend_is_tried_again(stub, kind):
    stub.fail(CHAT, times=2, kind=kind, status=503)
    assert chat(client_of(stub, timeout_s=0.5 if kind == "hang" else 10.0)) == "fine"
    assert stub.count(CHAT) == 3


@pytest.mark.parametrize(
    ("kind", "status", "error", "said"),
    [
        ("status", 500, RequestFailed, "status 500: planned"),
        ("status", 429, RequestFailed, "status 429"),
        ("status", 408, RequestFailed, "status 408"),
        ("nonsense", 200, BadAnswer, "not JSON.*<html>nonsense"),
        ("truncate", None, RequestFailed, "RemoteProtocolError"),
        ("hang", None, RequestFailed, "timed out"),
        ("die", None, RequestFailed, "RemoteProtocolError|ReadError"),
    ],
)
def test_attempts_are_bounded_and_the_error_says_what_was_met(stub, kind, status, error, said):
    stub.fail(CHAT, times=9, kind=kind, status=status or 500)
    with pytest.raises(OSError, match=f"{stub.url}{CHAT} gave no usable answer in 3 attempts.*{said}") as found:
        chat(client_of(stub, timeout_s=0.3 if kind == "hang" else 10.0))
    assert stub.count(CHAT) == 3
    copy = pickle.loads(pickle.dumps(found.value))
    for one in (found.value, copy):
        assert (type(one), one.url, one.status, one.attempts) == (error, stub.url + CHAT, status, 3)
    assert str(copy) == str(found.value)


def test_nobody_listens(stub):
    stub.stop()
    with pytest.raises(RequestFailed, match="2 attempts.*ConnectError.*see that the server is up"):
        chat(client_of(stub, retries=1))


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refused_request_is_not_repeated(stub, status):
    stub.fail(CHAT, status=status, text='{"error": "too long"}')
    with pytest.raises(RequestRefused, match=f"status {status}.*too long") as found:
        chat(client_of(stub))
    assert (found.value.status, stub.count(CHAT)) == (status, 1)


@pytest.fixture
def pauses(monkeypatch):
    """Pauses as they are asked for; nobody waits."""
    asked, sleep = [], asyncio.sleep

    def recorded(seconds, *args):
        asked.append(seconds)
        return sleep(0, *args)

    monkeypatch.setattr("megatron_nb.client.asyncio.sleep", recorded)
    return asked


def test_pauses_double_up_to_a_bound_and_are_jittered(stub, pauses):
    stub.fail(CHAT, times=6)
    chat(client_of(stub, retries=6, pause_s=1.0, max_pause_s=8.0))
    assert len(pauses) == 6
    for pause, bound in zip(pauses, (1, 2, 4, 8, 8, 8)):
        assert bound / 2 <= pause <= bound
    assert len({pause / bound for pause, bound in zip(pauses, (1, 2, 4, 8, 8, 8))}) > 1


@pytest.mark.parametrize(("header", "least", "most"), [
    ("7", 7, 7), ("2.5", 2.5, 2.5), ("date", 55, 61), ("soon", 0, 0.01), ("-3", 0, 0.01), ("99999999", 600, 600),
])  # fmt: skip
def test_retry_after_is_waited_for(stub, pauses, header, least, most):
    text = formatdate(time.time() + 60, usegmt=True) if header == "date" else header
    stub.fail(CHAT, status=429, headers={"Retry-After": text})
    chat(client_of(stub))
    assert least <= pauses[0] <= most


def test_a_deadline_holds_over_all_attempts(stub):
    stub.fail(CHAT, times=9, kind="hang")
    began = time.monotonic()
    with pytest.raises(RequestFailed, match="deadline of 0.6 s"):
        chat(client_of(stub, retries=8, timeout_s=0.25, deadline_s=0.6))
    assert time.monotonic() - began < 3
    assert stub.count(CHAT) <= 3


def test_no_pause_is_begun_that_ends_after_the_deadline(stub):
    stub.fail(CHAT, status=503, headers={"Retry-After": "300"})
    began = time.monotonic()
    with pytest.raises(RequestFailed, match="1 attempt; last: status 503.*leaves no time"):
        chat(client_of(stub, deadline_s=60.0))
    assert time.monotonic() - began < 20


def verdict(text: str) -> float:
    return float(text.removeprefix("score "))


def test_an_answer_that_cannot_be_read_is_asked_for_again(stub):
    texts = iter(["as a language model", "score x", "score 7"])
    stub.chat = lambda body: next(texts)
    assert chat(client_of(stub), verdict) == 7.0
    stub.chat = lambda body: "dunno"
    with pytest.raises(BadAnswer, match="another form.*dunno"):
        chat(client_of(stub), verdict)


@pytest.mark.parametrize(
    "text", ['{"choices": []}', '{"error": "busy"}', "[]", "null", "", '{"choices": [{"message": {"content": null}}]}']
)
def test_json_of_another_form_is_a_bad_answer(stub, text):
    stub.fail(CHAT, times=3, kind="nonsense", text=text or " ")
    with pytest.raises(BadAnswer):
        chat(client_of(stub))


def test_an_answer_nested_too_deeply_is_a_bad_answer(stub):
    stub.chat = lambda body: "[" * 100_000
    with pytest.raises(BadAnswer, match="RecursionError"):
        chat(client_of(stub), json.loads)


def test_a_kept_answer_is_not_asked_for_again_and_failures_are_not_kept(stub, tmp_path):
    numbers = iter(range(9))
    stub.chat = lambda body: f"score {next(numbers)}"
    one, two = (client_of(stub, cache=tmp_path) for _ in range(2))
    stub.fail(CHAT, times=3)
    with pytest.raises(RequestFailed):
        chat(one, verdict)
    assert not list(tmp_path.rglob("*.json"))
    assert [chat(one, verdict), chat(one, verdict), chat(two, verdict)] == [0.0, 0.0, 0.0]
    assert stub.count(CHAT) == 4
    assert chat(one, verdict, temperature=0.5) == 1.0  # another request
    (file, _) = sorted(tmp_path.rglob("*.json"), key=lambda file: "temperature" in file.read_text())
    file.write_text(file.read_text()[:40])  # cut
    assert chat(one, verdict) == 2.0
    assert json.loads(file.read_text())["answer"]["choices"]
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and file.suffix != ".json"]


def test_an_answer_that_cannot_be_read_is_not_kept(stub, tmp_path):
    texts = iter(["dunno", "score 1"])
    stub.chat = lambda body: next(texts)
    assert chat(client_of(stub, cache=tmp_path), verdict) == 1.0
    assert "dunno" not in next(tmp_path.rglob("*.json")).read_text()


def many(client, count: int) -> None:
    async def main():
        await asyncio.gather(*(client.chat(MESSAGES) for _ in range(count)))

    asyncio.run(main())


def test_requests_under_way_are_bounded(stub):
    lock, now, most = threading.Lock(), 0, 0

    def answer(body):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.05)
        with lock:
            now -= 1
        return "fine"

    stub.chat = answer
    many(client_of(stub, concurrency=3), 12)
    assert most == 3


def test_requests_are_begun_at_the_permitted_rate(stub):
    began = time.monotonic()
    many(client_of(stub, rate=10.0), 6)
    assert time.monotonic() - began > 5 / 10 * 0.95
    unhurried = time.monotonic()
    many(client_of(stub), 6)
    assert time.monotonic() - unhurried < unhurried - began


def test_a_client_serves_one_event_loop_after_the_other(stub):
    client = client_of(stub)
    assert [chat(client) for _ in range(3)] == ["fine"] * 3
    assert len(client._lanes) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"base_url": "localhost:8000"}, "must start with http"),
        ({"timeout_s": 0.0}, "timeout_s=0.0 must be more than 0"),
        ({"retries": -1}, "retries=-1"),
        ({"rate": 0.0}, "rate=0.0"),
        ({"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY.*not set"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        ClientConfig(**{"base_url": "http://localhost:8000", **settings})
