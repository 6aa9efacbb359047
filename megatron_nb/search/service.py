"""A corpus as an HTTP service that many trainers share.

    POST /search   {"query": str, "k"?: 1..100} -> {"hits": [{"title", "snippet", "score"}]}
    POST /page     {"title": str} -> {"title", "text"}; both null when there is no such page
    GET  /health   needs no token: status, pages, requests under way; 503 when it goes down
    GET  /metrics  Prometheus' text form

A request that does not fit gets 429 with Retry-After, one beyond its deadline 504, a service that goes down 503: all three may
be sent again, there or elsewhere. A wrong request gets another 4xx. Errors are {"error": str}. The server is the standard
library's.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import signal
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron_nb.client import RequestFailed
from megatron_nb.listening import ListenConfig
from megatron_nb.search.backend import Search

MOST = 100  # hits
IDLE_S = 120.0  # for the next request on an open connection, and to send or take a body
BODY_BYTES = 1 << 20
PREFIX = "megatron_nb_search"

log = logging.getLogger(__name__)


@dataclass
class ServiceConfig(ListenConfig):
    """Where it listens, who may ask and how much it takes on."""

    port: int = 8710


class Answer(Exception):
    """A request that is not answered with what it asks for."""

    def __init__(self, status: int, said: str, **headers: str):
        super().__init__(said)
        self.status, self.said, self.headers = status, said, headers


def serve(config: ServiceConfig, search: Search, pages: int) -> None:
    """Answer until SIGTERM or SIGINT; what is under way finishes within drain_s. ValueError, OSError."""
    stop = threading.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: stop.set())
    with Service(config, search, pages) as service:
        log.info("search service on %s, %d pages", service.url, pages)
        stop.wait()


class Service:
    """See the head of the file. `with` it: it listens inside, and drains on leaving."""

    def __init__(self, config: ServiceConfig, search: Search, pages: int):
        self.config, self.search, self.pages = config, search, pages
        self.token, self.stopping, self.running = config.token(), False, 0
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.seconds: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Service:
        host, port = self.config.host, self.config.port
        try:
            self._server = _Server((host, port), type("Bound", (_Handler,), {"service": self}))
        except OSError as error:
            raise OSError(f"cannot listen on host={host!r} port={port}: {error}; name another host or port") from error
        host, port = self._server.server_address[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        # Short polling of the flag that ends serve_forever; a connection is answered at once either way.
        self._threads = [threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True),
                         threading.Thread(target=self._loop.run_forever, daemon=True)]  # fmt: skip
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        with self._changed:
            self.stopping = True
            if self.running:
                log.info("going down: %d requests under way have %g s to finish", self.running, self.config.drain_s)
            self._changed.wait_for(lambda: not self.running, self.config.drain_s)
        self._server.shutdown()
        self._server.server_close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join()
        self._loop.close()

    # ------------------------------------------------------------------ a request
    def answer(self, method: str, path: str, token: str, body: bytes) -> Any:
        """What is sent with status 200: an object, or text. Raises Answer."""
        routes = {"/search": "POST", "/page": "POST", "/health": "GET", "/metrics": "GET"}
        if path not in routes:
            raise Answer(404, f"no route {path}: there are {', '.join(routes)}")
        if method != routes[path]:
            raise Answer(405, f"{path} wants {routes[path]}", Allow=routes[path])
        if path == "/health":
            return self._health()
        if self.token is not None and not hmac.compare_digest(token.removeprefix("Bearer ").strip().encode(), self.token):
            raise Answer(401, "the token is missing or wrong: send it as `Authorization: Bearer TOKEN`")
        if path == "/metrics":
            return self._metrics()
        with self._changed:
            if self.stopping:
                raise Answer(503, "the service goes down: ask another one", **{"Retry-After": "5"})
            if self.running >= self.config.queue:
                raise Answer(429, f"{self.running} requests are under way, as many as queue={self.config.queue} holds: send it "
                             "later, or elsewhere", **{"Retry-After": "1"})  # fmt: skip
            self.running += 1
        try:
            return self._worked(path, body)
        finally:
            with self._changed:
                self.running -= 1
                self._changed.notify_all()

    def _worked(self, path: str, body: bytes) -> dict[str, Any]:
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Answer(400, f"the body is not JSON ({error})") from None
        name = "query" if path == "/search" else "title"
        if not isinstance(asked, dict) or not isinstance(asked.get(name), str):
            raise Answer(400, f'found {str(asked)[:60]!r}: send {{"{name}": text}}')
        if path == "/page":
            work = self.search.page(asked["title"])
        else:
            k = asked.get("k", 10)
            if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MOST:
                raise Answer(400, f"k={k!r} must be 1 to {MOST}")
            work = self.search.search(asked["query"], k)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            found = future.result(self.config.deadline_s)
        except TimeoutError:
            future.cancel()
            raise Answer(504, f"no answer within deadline_s={self.config.deadline_s:g}") from None
        except RequestFailed as error:  # of the endpoint that makes vectors
            raise Answer(503, str(error), **{"Retry-After": "5"}) from error
        except Exception as error:
            log.exception("%s failed", path)
            raise Answer(500, f"{type(error).__name__}: {error}") from error
        if path == "/page":
            return {"title": None if found is None else asked["title"], "text": found}
        return {"hits": [asdict(hit) for hit in found]}

    def counted(self, path: str, status: int, seconds: float) -> None:
        with self._changed:
            path = path if path in ("/search", "/page", "/health", "/metrics") else "other"
            self.requests[path, status] += 1
            self.seconds[path] += seconds

    def _health(self) -> dict[str, Any]:
        if self.stopping:
            raise Answer(503, "going down")
        return {"status": "ok", "pages": self.pages, "requests": self.running, "queue": self.config.queue}

    def _metrics(self) -> str:
        with self._changed:
            lines = [f"# TYPE {PREFIX}_requests_total counter"]
            lines += [f'{PREFIX}_requests_total{{path="{path}",status="{status}"}} {count}'
                      for (path, status), count in sorted(self.requests.items())]  # fmt: skip
            lines.append(f"# TYPE {PREFIX}_seconds_total counter")
            lines += [f'{PREFIX}_seconds_total{{path="{path}"}} {total:.6g}' for path, total in sorted(self.seconds.items())]
            lines += [f"# TYPE {PREFIX}_requests_running gauge", f"{PREFIX}_requests_running {self.running}"]
        return "\n".join(lines) + "\n"


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close, request_queue_size, allow_reuse_address = True, False, 256, True

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("connection of %s broke off", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    service: Service
    protocol_version, timeout, disable_nagle_algorithm = "HTTP/1.1", IDLE_S, True

    def do_GET(self) -> None:
        self._exchange(b"")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        known = length.isascii() and length.isdigit()
        if not known or len(length) > 12 or int(length) > BODY_BYTES:
            told = f"the body has {length[:12]} bytes, more than {BODY_BYTES}" if known else "send Content-Length"
            self.send_error(413 if known else 411, told)
            return
        self._exchange(self.rfile.read(int(length)))

    def _exchange(self, body: bytes) -> None:
        path, began = self.path.partition("?")[0], time.monotonic()
        try:
            said = self.service.answer(self.command, path, self.headers.get("Authorization", ""), body)
            status, headers = 200, {}
        except Answer as given:
            status, said, headers = given.status, {"error": given.said}, given.headers
        self.service.counted(path, status, time.monotonic() - began)
        self.close_connection = self.close_connection or self.service.stopping
        self._send(status, said, headers)

    def _send(self, status: int, said: Any, headers: dict[str, str]) -> None:
        plain = isinstance(said, str)
        body = said.encode() if plain else json.dumps(said).encode()
        self.send_response(status)
        kind = "text/plain; version=0.0.4" if plain else "application/json"
        close = {"Connection": "close"} if self.close_connection else {}
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **close, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class finds wrong with a request; the connection ends, for what follows may be part of it."""
        self.close_connection = True
        self._send(code, {"error": message or self.responses[code][0]}, {})

    def log_message(self, form: str, *words: Any) -> None:
        log.debug(form, *words)
