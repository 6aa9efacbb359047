"""The judge service: who may ask, how much it takes on, what it says when it cannot, and how it ends."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_nb.sandbox import service as service_module
from megatron_nb.sandbox.service import Service, ServiceConfig
from tests.sandbox.running_service import Running, echo


@pytest.fixture(autouse=True)
def unprobed(monkeypatch):
    monkeypatch.setattr(service_module, "PROBE_S", float("inf"))


def row(name="a", tests=1, **more):
    return {"id": name, "tests": [{}] * tests, **more}


class Gate:
    """Work that starts and then waits for `open`."""

    def __init__(self):
        self.started, self.cancelled, self.open = [], [], threading.Event()

    async def __call__(self, row):
        self.started.append(row["id"])
        try:
            while not self.open.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled.append(row["id"])
            raise
        return await echo(row)

    def wait(self, condition, timeout=10.0):
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, (self.started, self.cancelled)
            time.sleep(0.01)


def test_a_row_gives_an_answer_and_a_list_gives_a_list_in_its_order():
    with Running(echo, workers=2) as running:
        status, answer, _ = running.judge(row(tests=3))
        assert (status, answer["id"], answer["passed"]) == (200, "a", 3)
        status, answers, _ = running.judge([row("slow", sleep_s=0.2), row("b"), row("c")])
        assert status == 200 and [answer["id"] for answer in answers] == ["slow", "b", "c"]
        assert running.ask("POST", "/complexity", row())[0] == 200


def test_one_connection_serves_many_requests():
    with Running(echo) as running:
        connection = running.connect()
        for name in "abc":
            connection.request("POST", "/judge", json.dumps(row(name)))
            assert json.loads(connection.getresponse().read())["id"] == name
            address = connection.sock.getsockname()
        assert connection.sock.getsockname() == address
        connection.close()


def test_what_does_not_fit_the_queue_is_refused_with_the_time_to_wait_and_nothing_else_suffers():
    gate = Gate()
    with Running(gate, queue=3) as running, ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(running.judge, row(str(number))) for number in range(3)]
        gate.wait(lambda: running.service._rows == 3)
        status, answer, headers = running.judge(row("late"))
        assert status == 429 and 1 <= int(headers["Retry-After"]) <= 60 and "3 rows are waiting" in answer["error"]
        assert running.judge([row()] * 4)[0] == 413  # would never fit
        health = running.ask("GET", "/health")[1]
        assert (health["rows_running"], health["rows_waiting"]) == (2, 1)  # of one worker: one runs, one stands ready
        assert len(gate.started) == 2
        gate.open.set()
        assert [future.result()[0] for future in waiting] == [200] * 3
        assert running.judge(row("now"))[0] == 200


@pytest.mark.parametrize("given", [None, "", "wrong", "secre", "secret2", "sécret"])
def test_without_the_token_nothing_but_health_is_told(monkeypatch, given):
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    with Running(echo, token_env="JUDGE_TOKEN") as running:
        assert running.ask("GET", "/health")[0] == 200
        assert running.ask("GET", "/metrics", token=given)[0] == 401
        status, answer, _ = running.judge(row(), token=given)
        assert status == 401 and "Authorization" in answer["error"] and "secret" not in answer["error"]
        assert running.ask("POST", "/judge", raw=b"x" * 2_000_000, token=given)[0] == 401  # told, not reset
        assert running.judge(row(), token="secret")[0] == 200


def test_the_token_may_stand_in_a_file(tmp_path):
    (tmp_path / "token").write_text("from a file\n")
    with Running(echo, token_file=str(tmp_path / "token")) as running:
        assert running.judge(row(), token="from a file")[0] == 200 and running.judge(row(), token="other")[0] == 401


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"host": "0.0.0.0"}, "can be reached by other machines and no token"),
        ({"host": "::"}, "can be reached by other machines"),
        ({"host": "judge.example"}, "can be reached by other machines"),
        ({"queue": 0}, "queue=0 must be more than 0"),
        ({"port": 70000}, "port=70000"),
        ({"token_env": "A", "token_file": "b"}, "name one of them"),
    ],
)
def test_settings_that_would_be_unsafe_or_useless_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        ServiceConfig(**settings)


@pytest.mark.parametrize("settings", [{"host": "0.0.0.0", "without_token": True}, {"host": "0.0.0.0", "token_env": "A"},
                                      {"host": "127.0.0.9"}, {"host": "localhost"}, {"host": "::1"}])  # fmt: skip
def test_other_settings_are_not(settings):
    ServiceConfig(**settings)


def test_an_address_that_is_taken_is_named():
    async def twice():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(OSError, match=f"host='127.0.0.1' port={port}.*in use.*name another"):
                async with Service(ServiceConfig(port=port), {}, 1, "none"):
                    pass

    asyncio.run(twice())


def test_a_token_that_is_asked_for_and_empty_is_refused(monkeypatch):
    monkeypatch.setenv("EMPTY_TOKEN", " ")
    with pytest.raises(ValueError, match="EMPTY_TOKEN holds no token"):
        ServiceConfig(token_env="EMPTY_TOKEN").token()


async def picky(row):
    if row["id"] == "bad":
        raise ValueError("time_limit_s is 'x': a number of seconds is needed")
    if row["id"] == "broken":
        raise RuntimeError("the pool is gone")
    return await echo(row)


@pytest.mark.parametrize(
    ("method", "path", "raw", "status", "words"),
    [
        ("POST", "/judge", b"{", 400, "not JSON"),
        ("POST", "/judge", b"[" * 100000, 400, "not JSON"),
        ("POST", "/judge", b"[]", 400, "a list of at least one"),
        ("POST", "/judge", b"[1]", 400, "send a row"),
        ("POST", "/judge", json.dumps([row("a"), row("bad")]), 400, "row 2 (id 'bad'): time_limit_s is 'x'"),
        ("POST", "/judge", json.dumps(row("broken")), 500, "RuntimeError: the pool is gone"),
        ("POST", "/judge", b" " * 1_100_000, 413, "more than max_body_mb=1"),
        ("GET", "/judge", None, 405, "wants POST"),
        ("POST", "/health", b"{}", 405, "wants GET"),
        ("GET", "/secret", None, 404, "no route /secret"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong_and_the_service_goes_on(method, path, raw, status, words):
    with Running(picky, max_body_mb=1) as running:
        found, answer, _ = running.ask(method, path, raw=raw)
        assert (found, words in answer["error"]) == (status, True), answer
        assert running.judge(row())[0] == 200


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"x" * 200_000,
                                  b"POST /judge HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
                                  b"POST /judge HTTP/1.1\r\nContent-Length: -5\r\n\r\n"])  # fmt: skip
def test_what_is_not_our_kind_of_http_gets_a_4xx(sent):
    with Running(echo) as running:
        with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":")[-1])), timeout=20) as connection:
            connection.sendall(sent)
            assert connection.recv(100).startswith(b"HTTP/1.1 4")
        assert running.judge(row())[0] == 200


def test_a_request_beyond_its_deadline_ends_and_its_runs_with_it():
    gate = Gate()
    with Running(gate, deadline_s=0.3) as running:
        began = time.monotonic()
        status, answer, _ = running.judge(row("late"))
        assert status == 504 and "deadline_s=0.3" in answer["error"] and time.monotonic() - began < 5
        gate.wait(lambda: gate.cancelled == ["late"] and running.service._rows == 0)


def test_a_client_that_hangs_up_ends_its_runs():
    gate = Gate()
    with Running(gate) as running:
        connection = running.connect()
        connection.request("POST", "/judge", json.dumps(row("gone")))
        gate.wait(lambda: gate.started == ["gone"])
        connection.close()
        gate.wait(lambda: gate.cancelled == ["gone"] and running.service._rows == 0)


def test_going_down_finishes_what_is_under_way_and_refuses_the_rest():
    gate = Gate()
    with Running(gate, drain_s=20) as running, ThreadPoolExecutor(1) as threads:
        open_before = running.connect()
        open_before.request("GET", "/health")
        open_before.getresponse().read()
        under_way = threads.submit(running.judge, row("first"))
        gate.wait(lambda: gate.started == ["first"])
        running.stop()
        gate.wait(lambda: running.service._stopping)
        with pytest.raises(ConnectionRefusedError):
            running.judge(row("second"))
        open_before.request("POST", "/judge", json.dumps(row("third")))
        assert open_before.getresponse().status == 503
        gate.open.set()
        assert under_way.result()[0] == 200


def test_going_down_waits_for_a_bounded_time():
    gate = Gate()
    with Running(gate, drain_s=0.2) as running, ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(running.judge, row("endless"))
        gate.wait(lambda: gate.started == ["endless"])
        running.stop()
        status, _, headers = under_way.result()
        assert status == 503 and "Retry-After" in headers and gate.cancelled == ["endless"]


def test_metrics_count_requests_rows_verdicts_seconds_and_failures():
    async def half(row):
        answer = await echo(row)
        return answer | {"verdicts": ["accepted", "wrong answer", "infrastructure"]}

    with Running(half, workers=3) as running:
        running.judge([row(tests=3), row(tests=3)])
        running.ask("GET", "/nothing")
        text = running.ask("GET", "/metrics")[1]
    for line in (
        'megatron_nb_judge_requests_total{path="/judge",status="200"} 1',
        'megatron_nb_judge_requests_total{path="other",status="404"} 1',
        'megatron_nb_judge_rows_total{path="/judge"} 2',
        'megatron_nb_judge_verdicts_total{verdict="infrastructure"} 2',
        "megatron_nb_judge_program_cpu_seconds_total 1.5",
        "megatron_nb_judge_infrastructure_failures_total 2",
        "megatron_nb_judge_rows_waiting 0",
        "megatron_nb_judge_workers 3",
        'megatron_nb_judge_isolation{kind="made up"} 1',
    ):
        assert line in text.splitlines(), text


def test_health_says_when_the_sandbox_is_broken_and_when_it_is_well_again(monkeypatch):
    monkeypatch.setattr(service_module, "PROBE_S", 0.05)
    broken = threading.Event()

    async def judge(row):
        if broken.is_set():
            raise RuntimeError("no sandbox")
        return await echo(row)

    with Running(judge) as running:
        status, health, _ = running.ask("GET", "/health")
        assert status == 200 and health["status"] == "ok" and health["isolation"] == "made up" and health["workers"] == 1
        broken.set()
        for _ in range(3):
            running.judge(row())
        status, health, _ = running.ask("GET", "/health")
        assert status == 503 and health["status"] == "sandbox broken"
        broken.clear()  # nobody asks for anything: it tries by itself
        end = time.monotonic() + 10
        while running.ask("GET", "/health")[0] != 200:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_sigterm_ends_the_real_service_with_nothing_left_behind(tmp_path):
    command = [sys.executable, "-m", "megatron_nb.sandbox", "serve", "--port", "0", "--workers", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        said = process.stderr.readline()
        if "http" not in said:
            rest = process.stderr.read()
            assert "isolat" in said + rest, said + rest
            pytest.skip(said + rest)
        running = Running(echo)  # for its way of asking
        running.service.url = next(word.rstrip(",") for word in said.split() if word.startswith("http"))
        program = {"id": "x", "language": "python", "program": "print(int(input()) + 1)", "time_limit_s": 10,
                   "tests": [{"stdin": "1", "stdout": "2"}, {"stdin": "1", "stdout": "3"}]}  # fmt: skip
        status, answer, _ = running.judge(program)
        assert status == 200 and answer["verdicts"] == ["accepted", "wrong answer"], answer
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, process.stderr.read()
        assert list(tmp_path.iterdir()) == []
    finally:
        process.kill()
        process.wait()
