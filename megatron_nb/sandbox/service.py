"""The judge as an HTTP service that many trainers share: a bounded queue before one pool.

    POST /judge       a row or a list of rows as of `python -m megatron_nb.sandbox judge`; its answer, or theirs in their order
    POST /complexity  likewise, as of the command `complexity`
    GET  /health      needs no token: isolation in force, workers, rows; 503 when it goes down or its sandbox is broken
    GET  /metrics     Prometheus' text form

What does not fit the queue gets 429 with Retry-After, a request beyond its deadline 504, a service that goes down 503: all
three may be sent again, there or elsewhere. A wrong request gets another 4xx. Runs of a client that hangs up leave the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import math
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from megatron_nb.listening import ListenConfig
from megatron_nb.sandbox.service_metrics import ServiceMetrics
from megatron_nb.sandbox.service_wire import HEAD_BYTES, Answer, gone, linger, read_body, read_head, send

LOOK_S = 0.1  # between two looks whether the client is still there
PROBE_S = 10.0  # without a verdict, after which a program of ours is judged, to know whether the sandbox lives
BROKEN = 3  # failures of the sandbox in a row, after which it counts as broken
PROBE = {"id": "probe", "language": "python", "program": "print(1)", "tests": [{"stdin": "", "stdout": "1"}],
         "time_limit_s": 10}  # fmt: skip

log = logging.getLogger(__name__)
Work = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]  # a row in, a row out; ValueError for a bad row


@dataclass
class ServiceConfig(ListenConfig):
    """Where it listens, who may ask and how much it takes on."""

    port: int = 8700
    queue: int = 512  # rows waiting and under way; more are refused
    deadline_s: float = 600.0
    max_body_mb: float = 64.0

    def __post_init__(self):
        super().__post_init__()
        if self.max_body_mb <= 0:
            raise ValueError(f"max_body_mb={self.max_body_mb} must be more than 0")


def serve(config: ServiceConfig, workers: int | None = None, isolation: str = "bubblewrap") -> None:
    """Answer until SIGTERM or SIGINT; what is under way finishes within drain_s. ValueError, OSError, IsolationMissing."""
    from megatron_nb.sandbox.judge import Judge
    from megatron_nb.sandbox.pool import Pool
    from megatron_nb.sandbox.rows import complexity_row, judge_row

    with Pool(workers, isolation) as pool, contextlib.closing(Judge(pool)) as judge:
        work = {"/judge": functools.partial(judge_row, judge), "/complexity": functools.partial(complexity_row, pool)}
        asyncio.run(_until_signal(Service(config, work, pool.workers, pool.in_force)))


async def _until_signal(service: Service) -> None:
    stop = asyncio.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(one, stop.set)
    async with service:
        print(f"judge service on {service.url}, {service.workers} workers, isolation {service.isolation}", file=sys.stderr,
              flush=True)  # fmt: skip
        await stop.wait()


class Service:
    """See the head of the file. `async with` it: it listens inside, and drains on leaving."""

    def __init__(self, config: ServiceConfig, work: dict[str, Work], workers: int, isolation: str):
        self.config, self.work, self.workers, self.isolation = config, work, workers, isolation
        self.metrics = ServiceMetrics()
        self.url = ""
        self._token = config.token()
        self._rows = 0  # admitted and not answered
        self._broken, self._last_verdict = 0, -math.inf  # failures of the sandbox in a row; when it last gave a verdict
        self._stopping = False
        self._connections: set[asyncio.Task] = set()
        self._under_way: set[asyncio.Task] = set()

    async def __aenter__(self) -> Service:
        self._gate = asyncio.Semaphore(2 * self.workers)  # rows in the pool: enough that no worker waits for one
        host, port = self.config.host, self.config.port
        try:
            self._server = await asyncio.start_server(self._connected, host, port, limit=HEAD_BYTES)
        except OSError as error:
            raise OSError(f"cannot listen on host={host!r} port={port}: {error}; name another host or port") from error
        host, port = self._server.sockets[0].getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._prober = asyncio.create_task(self._probing())
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._stopping = True
        self._server.close()
        self._prober.cancel()
        if self._under_way:
            log.info("going down: %d requests under way have %g s to finish", len(self._under_way), self.config.drain_s)
            await asyncio.wait(self._under_way, timeout=self.config.drain_s)
        for task in self._under_way:
            task.cancel()
        await asyncio.sleep(0)
        if self._connections:
            await asyncio.wait(self._connections, timeout=2 * LOOK_S)  # to send the last answers
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    # ------------------------------------------------------------------ a connection
    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._connections.add(task)
        try:
            while not self._stopping and await self._exchange(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, TimeoutError, asyncio.CancelledError):
            pass  # it hung up, or sent nothing for too long, or this service goes down
        finally:
            self._connections.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether another may follow."""
        path = "?"
        try:
            method, path, headers = await read_head(reader)
            answer = Answer(200, await self._answered(method, path, headers, reader, writer))
        except Answer as given:
            answer = given
        except asyncio.CancelledError:
            if not self._stopping or path == "?":
                raise
            answer = Answer(503, "the service goes down: ask another one", {"Retry-After": "5"})
        self.metrics.request(path if path in self.work or path in ("/health", "/metrics") else "other", answer.status)
        close = answer.close or self._stopping
        if not gone(reader, writer):
            await send(writer, answer, close)
        if answer.close:
            await linger(reader, writer)
        return not close

    async def _answered(
        self, method: str, path: str, headers: dict[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Any:
        routes = {**dict.fromkeys(self.work, "POST"), "/health": "GET", "/metrics": "GET"}
        # A refused body is not read, so the connection cannot go on.
        close = method == "POST"
        if path not in routes:
            raise Answer(404, f"no route {path}: there are {', '.join(routes)}", close=close)
        if method != routes[path]:
            raise Answer(405, f"{path} wants {routes[path]}", {"Allow": routes[path]}, close)
        if path == "/health":
            return self._health()
        given = headers.get("authorization", "").removeprefix("Bearer ").strip().encode()
        if self._token is not None and not hmac.compare_digest(given, self._token):
            raise Answer(401, "the token is missing or wrong: send it as `Authorization: Bearer TOKEN`", close=close)
        if path == "/metrics":
            gauges = {"rows_waiting": self._waiting, "rows_running": self._running, "workers": self.workers}
            return self.metrics.text({**gauges, "broken": self._broken >= BROKEN}, self.isolation)
        if self._stopping:
            raise Answer(503, "the service goes down: ask another one", {"Retry-After": "5"}, True)
        body = await read_body(headers, reader, writer, self.config.max_body_mb)
        return await self._worked(path, body, lambda: gone(reader, writer))

    # ------------------------------------------------------------------ the work
    @property
    def _running(self) -> int:
        return min(self._rows, 2 * self.workers)

    @property
    def _waiting(self) -> int:
        return self._rows - self._running

    async def _worked(self, path: str, body: Any, hung_up: Callable[[], bool]) -> Any:
        """The rows' answers. Raises Answer for what is not answered, CancelledError at the end of draining."""
        rows = [body] if isinstance(body, dict) else body
        if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
            raise Answer(400, f"found {str(body)[:60]!r}: send a row (an object), or a list of at least one")
        if len(rows) > self.config.queue:
            raise Answer(413, f"{len(rows)} rows are more than queue={self.config.queue} holds: send fewer at once")
        if self._rows + len(rows) > self.config.queue:
            wait = self.metrics.mean_s(path) * self._rows / (2 * self.workers)
            raise Answer(429, f"{self._rows} rows are waiting or under way, {len(rows)} more do not fit queue="
                         f"{self.config.queue}: send them later, or elsewhere",
                         {"Retry-After": str(min(max(math.ceil(wait), 1), 60))})  # fmt: skip
        self._rows += len(rows)
        task = asyncio.create_task(self._all(path, rows))
        self._under_way.add(task)
        task.add_done_callback(functools.partial(self._ended, len(rows)))
        end = time.monotonic() + self.config.deadline_s
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_S)
                if hung_up():
                    raise Answer(499, "the client hung up")
                if time.monotonic() > end:
                    raise Answer(504, f"no answer within deadline_s={self.config.deadline_s:g}: send fewer rows")
        finally:
            task.cancel()  # a program that runs already ends at its own limits; its rows count until then
        answers = task.result()
        return answers[0] if isinstance(body, dict) else answers

    def _ended(self, count: int, task: asyncio.Task) -> None:
        self._under_way.discard(task)
        self._rows -= count
        task.cancelled() or task.exception()  # it may be that nobody waits for it any more

    async def _all(self, path: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(path, number, row)) for number, row in enumerate(rows, 1)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(self, path: str, number: int, row: dict[str, Any]) -> dict[str, Any]:
        async with self._gate:
            began = time.monotonic()
            try:
                answer = await self.work[path](row)
            except ValueError as error:
                raise Answer(400, f"row {number} (id {str(row.get('id'))[:40]!r}): {error}") from error
            except Exception as error:
                log.exception("%s: row %d failed", path, number)
                self._noted(False)
                raise Answer(500, f"row {number}: {type(error).__name__}: {error}") from error
            self.metrics.row(path, answer, time.monotonic() - began)
            self._noted("infrastructure" not in answer.get("verdicts", ()))
            return answer

    # ------------------------------------------------------------------ health
    def _noted(self, good: bool) -> None:
        self._broken = 0 if good else self._broken + 1
        self.metrics.failures += not good
        self._last_verdict = time.monotonic()

    def _health(self) -> dict[str, Any]:
        status = "going down" if self._stopping else "sandbox broken" if self._broken >= BROKEN else "ok"
        state = {"status": status, "isolation": self.isolation, "workers": self.workers, "queue": self.config.queue,
                 "rows_waiting": self._waiting, "rows_running": self._running}  # fmt: skip
        if status != "ok":
            raise Answer(503, state)
        return state

    async def _probing(self) -> None:
        """Judges a program of ours from time to time when nobody else asks for any."""
        while True:
            if not self._rows and time.monotonic() - self._last_verdict > PROBE_S:
                with contextlib.suppress(Exception):  # counted, and shown by /health
                    await self._one("/judge", 0, PROBE)
            await asyncio.sleep(PROBE_S if self._broken == 0 else 1.0)
