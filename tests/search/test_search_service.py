"""The service and its client: the same answers as here, refusals, draining, and services that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from megatron_nb.client import BadAnswer, ClientConfig, RequestFailed, RequestRefused
from megatron_nb.search.backend import LocalSearch, RemoteSearch
from megatron_nb.search.corpus import Hit
from megatron_nb.search.service import Service, ServiceConfig
from tests.search.conftest import ARTICLES
from tests.search.stub import Stub

FINE = {"/search": lambda body: {"hits": [{"title": "A", "snippet": "a", "score": 1}]}, "/page": lambda body: {"text": "x"}}


class Slow:
    """A search that waits until it is told."""

    def __init__(self):
        self.go, self.begun = threading.Event(), threading.Semaphore(0)

    async def search(self, query: str, k: int) -> list[Hit]:
        self.begun.release()
        await asyncio.to_thread(self.go.wait, 20)
        return [Hit(query, "", 1.0)]

    async def page(self, title: str) -> str | None:
        raise RuntimeError("broken disk")


@pytest.fixture
def slow():
    search = Slow()
    yield search
    search.go.set()


def remote(url: str, **settings) -> RemoteSearch:
    return RemoteSearch(ClientConfig(url, **{"timeout_s": 10.0, "retries": 2, "pause_s": 0.01, **settings}))


def service(search, **settings) -> Service:
    return Service(ServiceConfig(**{"port": 0, "drain_s": 10.0, **settings}), search, 8)


def test_a_remote_search_answers_as_the_local_one(corpus_folder):
    local = LocalSearch(corpus_folder)
    with service(local) as one:
        there = remote(one.url)

        async def both(query: str, title: str):
            return [await search.search(query, 4) for search in (local, there)], [await s.page(title) for s in (local, there)]

        for query, title in zip([*ARTICLES.values(), "", "القاهرة"], [*ARTICLES, "Nobody", "turing"]):
            hits, pages = asyncio.run(both(query, title))
            assert hits[0] == hits[1] and pages[0] == pages[1]


@pytest.mark.parametrize(
    ("plan", "error", "said"),
    [
        (["hang"] * 3, RequestFailed, "3 attempts; last: timed out: see that the server is up"),
        (["html"] * 3, BadAnswer, "not JSON.*<html>"),
        (["form"] * 3, BadAnswer, "another form.*KeyError.*hits"),
        (["429"] * 3, RequestFailed, "status 429: planned"),
        (["503"] * 3, RequestFailed, "status 503"),
        (["404"], RequestRefused, "404.*check base_url"),
        (["hang", "429"], None, ""),
        (["html", "500"], None, ""),
    ],
)
def test_a_service_that_misbehaves_is_asked_again_a_bounded_number_of_times(plan, error, said):
    with Stub(FINE) as stub:
        stub.plan = list(plan)
        search = remote(stub.url, timeout_s=0.3 if "hang" in plan else 10.0)
        if error is None:
            assert asyncio.run(search.search("q", 3)) == [Hit("A", "a", 1.0)]
        else:
            with pytest.raises(error, match=said):
                asyncio.run(search.search("q", 3))
        assert len(stub.bodies) == (1 if error is RequestRefused else 3)


@pytest.mark.parametrize("answer", [{"text": 3}, {}, [], {"text": ["x"]}])
def test_a_page_of_another_form_is_no_page(answer):
    with Stub({"/page": lambda body: answer}) as stub, pytest.raises(BadAnswer, match="another form"):
        asyncio.run(remote(stub.url).page("A"))


def test_a_token_is_asked_for(corpus_folder, monkeypatch):
    monkeypatch.setenv("SEARCH_TOKEN", "secret")
    monkeypatch.setenv("WRONG_TOKEN", "guess")
    with service(LocalSearch(corpus_folder), token_env="SEARCH_TOKEN") as one:
        assert asyncio.run(remote(one.url, api_key_env="SEARCH_TOKEN").search("turing", 1))
        for key in ("WRONG_TOKEN", None):
            with pytest.raises(RequestRefused, match="401.*the token is missing or wrong"):
                asyncio.run(remote(one.url, api_key_env=key).search("turing", 1))
        assert httpx.get(one.url + "/health").json()["status"] == "ok"
        assert httpx.get(one.url + "/metrics").status_code == 401


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host": "0.0.0.0"}, "can be reached by other machines and no token"),
        ({"queue": 0}, "queue=0 must be more than 0"),
        ({"token_env": "A", "token_file": "b"}, "name one of them"),
        ({"port": 70000}, "port=70000"),
    ],
)
def test_a_bad_setting_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        ServiceConfig(**settings)


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "said"),
    [
        ("POST", "/search", b"{", 400, "not JSON"),
        ("POST", "/search", b"[" * 100_000, 400, "not JSON"),
        ("POST", "/search", b'{"q": 1}', 400, 'send {"query": text}'),
        ("POST", "/search", b'{"query": "x", "k": 0}', 400, "k=0 must be 1 to 100"),
        ("POST", "/search", b'{"query": "x", "k": true}', 400, "k=True"),
        ("POST", "/search", b'{"query": "x", "k": 101}', 400, "k=101"),
        ("POST", "/page", b'{"title": 3}', 400, 'send {"title": text}'),
        ("GET", "/search", b"", 405, "wants POST"),
        ("POST", "/health", b"{}", 405, "wants GET"),
        ("POST", "/other", b"{}", 404, "no route /other"),
        ("POST", "/search", b"x" * ((1 << 20) + 1), 413, "more than"),
        ("DELETE", "/search", b"", 501, ""),
    ],
)
def test_a_wrong_request_is_refused_with_its_reason_in_json(corpus_folder, method, path, content, status, said):
    with service(LocalSearch(corpus_folder)) as one:
        answer = httpx.request(method, one.url + path, content=content)
        assert answer.status_code == status and said in answer.json()["error"]
        assert httpx.post(one.url + "/page", json={"title": "London"}).json()["text"].startswith("London is")


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (b'BREW\'"\\ /search HTTP/1.1\r\n\r\n', 501, "Unsupported method"),
        (b"POST /search HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 413, "more than"),
        (b"POST /search HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 411, "send Content-Length"),
    ],
)
def test_what_no_client_sends_is_refused_in_json_and_the_connection_ends(corpus_folder, sent, status, said):
    with service(LocalSearch(corpus_folder)) as one, socket.create_connection(("127.0.0.1", httpx.URL(one.url).port)) as to:
        to.sendall(sent)
        head, _, body = b"".join(iter(lambda: to.recv(1 << 16), b"")).partition(b"\r\n\r\n")
        assert head.split()[1] == str(status).encode() and said in json.loads(body)["error"]


def test_what_does_not_fit_the_queue_is_told_to_come_later(slow):
    with service(slow, queue=2) as one:
        asked = {"target": httpx.post, "args": (one.url + "/search",), "kwargs": {"json": {"query": "q"}}}
        asking = [threading.Thread(**asked) for _ in "ab"]
        for thread in asking:
            thread.start()
            assert slow.begun.acquire(timeout=10)
        refused = httpx.post(one.url + "/search", json={"query": "q"})
        assert refused.status_code == 429 and refused.headers["Retry-After"] == "1" and "queue=2" in refused.json()["error"]
        assert httpx.get(one.url + "/health").json()["requests"] == 2
        slow.go.set()
        for thread in asking:
            thread.join()
        told = httpx.get(one.url + "/metrics").text
        assert re.search(r'requests_total\{path="/search",status="200"\} 2', told) and 'status="429"} 1' in told


def test_a_request_ends_at_its_deadline_and_a_failure_says_what_failed(slow):
    with service(slow, deadline_s=0.2) as one:
        late = httpx.post(one.url + "/search", json={"query": "q"})
        assert late.status_code == 504 and "deadline_s=0.2" in late.json()["error"]
        failed = httpx.post(one.url + "/page", json={"title": "q"})
        assert failed.status_code == 500 and "RuntimeError: broken disk" in failed.json()["error"]


def test_a_service_that_goes_down_finishes_what_is_under_way_and_takes_no_more(slow):
    one, answers = service(slow).__enter__(), []
    try:

        def ask():
            answers.append(httpx.post(one.url + "/search", json={"query": "q"}, timeout=30))

        thread = threading.Thread(target=ask)
        thread.start()
        assert slow.begun.acquire(timeout=10)
        leaving = threading.Thread(target=one.__exit__, args=(None, None, None))
        leaving.start()
        while not one.stopping:
            time.sleep(0.01)
        assert httpx.get(one.url + "/health").status_code == 503
        assert httpx.post(one.url + "/search", json={"query": "q"}).status_code == 503
        slow.go.set()
        thread.join()
        leaving.join()
        assert answers[0].json()["hits"][0]["title"] == "q"
        with pytest.raises(httpx.ConnectError):
            httpx.get(one.url + "/health")
    finally:
        slow.go.set()


def test_the_command_serves_until_it_is_stopped(corpus_folder):
    words = [sys.executable, "-m", "megatron_nb.search", "serve", str(corpus_folder), "--port", "0"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2], env={**os.environ})
    try:
        url = re.search(r"search service on (http://\S+), 8 pages", process.stderr.readline())[1]
        assert asyncio.run(remote(url).search("turing", 1))[0].title == "Turing machine"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.stderr.close()
