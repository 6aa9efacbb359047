"""The one HTTP client: JSON posts and OpenAI-compatible chat and completions, for engines, judges and search.

What may be mended by waiting (429, 408, 5xx, lost connections, time-outs, unreadable answers) is tried again, a bounded
number of times, with a growing and jittered pause that is at least what Retry-After asks for. What cannot (other 4xx) fails
at once. Failures are OSErrors that name the address, the status, the attempts and the remedy, and survive pickling.
"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import json
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from megatron_nb.addresses import is_address, token_for, url_of

T = TypeVar("T")
# what a reader meets in an answer of another form
UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError)
LONGEST_WAIT_S = 600.0  # of a Retry-After
SHOWN = 300  # characters of an answer in a message


class RequestFailed(OSError):
    """No usable answer, after all attempts or at the deadline. status: of the last answer, None when there was none."""

    def __init__(self, message: str, url: str = "", status: int | None = None, attempts: int = 0):
        super().__init__(message)
        self.url, self.status, self.attempts = url, status, attempts


class RequestRefused(RequestFailed):
    """The server says that the request itself is wrong (4xx): the same again would be refused again."""


class BadAnswer(RequestFailed):
    """The server answered with success, but not with what was asked for; tried again before it is raised."""


@dataclass
class ClientConfig:
    """Where a server is and how hard to try."""

    base_url: str  # such as http://host:8000, or service:NAME of launch.services
    model: str = ""  # its name on the server, sent with chat and completions
    api_key_env: str | None = None  # the environment variable that holds the key; it is sent as a bearer token
    timeout_s: float = 600.0  # of one attempt; of a stream: from one piece to the next
    deadline_s: float | None = None  # of all attempts together, pauses included
    retries: int = 5  # attempts after the first
    pause_s: float = 0.5  # before the first retry; doubles each time, times a random 0.5 to 1
    max_pause_s: float = 30.0
    concurrency: int = 256  # requests under way at once
    rate: float | None = None  # requests begun per second
    cache: Path | None = None  # folder of answers by request; for judges, whose answers may be kept

    def __post_init__(self):
        if not is_address(self.base_url):
            raise ValueError(f"base_url={self.base_url!r} must start with http:// or https://, or be service:NAME")
        for name, least in (("timeout_s", 0), ("deadline_s", 0), ("rate", 0), ("concurrency", 0), ("retries", -1)):
            value = getattr(self, name)
            if value is not None and value <= least:
                raise ValueError(f"{name}={value} must be more than {least}")
        if self.api_key_env and not os.environ.get(self.api_key_env):
            raise ValueError(f"api_key_env={self.api_key_env!r} names an environment variable that is not set: export it")


class _Retry(Exception):
    """An attempt failed in a way that another may mend."""

    def __init__(self, reason: str, status: int | None = None, wait: float = 0.0, kind: type = RequestFailed):
        super().__init__(reason)
        self.status, self.wait, self.kind = status, wait, kind


@dataclass
class _Lane:
    """What belongs to one event loop."""

    http: httpx.AsyncClient
    gate: asyncio.Semaphore
    next_start: float = 0.0


class Client:
    """See the head of the file. Usable from any event loop; each gets its own connections."""

    def __init__(self, config: ClientConfig):
        self.config = config
        self._lanes: dict[asyncio.AbstractEventLoop, _Lane] = {}

    # ------------------------------------------------------------------ OpenAI-compatible
    async def chat(self, messages: list[dict[str, Any]], read: Callable[[str], Any] = str, **settings: Any) -> Any:
        """`read` of the answer's text. An answer that `read` raises on (ValueError and its like) is asked for again."""
        body = {"model": self.config.model, "messages": messages, **settings}
        return await self.post("/v1/chat/completions", body, lambda answer: read(_text_of(answer)))

    async def complete(self, prompt: str | list[int], **settings: Any) -> dict[str, Any]:
        """The first choice of a completion. prompt: text, or token ids."""
        body = {"model": self.config.model, "prompt": prompt, **settings}
        return await self.post("/v1/completions", body, lambda answer: dict(answer["choices"][0]))

    async def post(
        self, path: str, body: Any = None, read: Callable[[Any], Any] = lambda answer: answer, *,
        params: dict[str, Any] | None = None, timeout_s: float | None = None, retries: int | None = None,
    ) -> Any:  # fmt: skip
        """`read` of the JSON answer. An answer that is not JSON, or that `read` raises on, counts as a failed attempt.

        Raises RequestRefused, BadAnswer or RequestFailed.
        """
        file = self._cached(path, body, params)
        if file is not None and file.exists():
            with suppress(*UNREADABLE):  # half a file, or read by another reader: ask again
                return read(json.loads(file.read_text())["answer"])
        sent = {"json": body, "params": params}
        answer, result = await self._attempts(path, lambda: self._once("POST", path, read, timeout_s, **sent), retries)
        if file is not None:
            _write(file, {"path": path, "body": body, "answer": answer})
        return result

    async def get(self, path: str, *, retries: int | None = None) -> Any:
        """The JSON answer (None when empty). Raises as `post`."""
        answer, _ = await self._attempts(path, lambda: self._once("GET", path, lambda answer: answer, None), retries)
        return answer

    async def stream(
        self, path: str, body: Any, before_retry: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """The events of a server-sent stream, parsed. Tried again only while none has arrived; raises as `post`.

        Close it (contextlib.aclosing) to hang up: the server then stops. before_retry may raise to end the attempts.
        """
        lines = None
        try:
            lines, event = await self._attempts(path, lambda: self._open_stream(path, body), None, before_retry)
            while event is not None:
                yield event
                event = await self._event(path, lines)
        finally:
            if lines is not None:
                await lines.aclose()

    async def close(self) -> None:
        """Close this loop's connections."""
        lane = self._lanes.pop(asyncio.get_running_loop(), None)
        if lane is not None:
            await lane.http.aclose()

    async def _once(self, method: str, path: str, read: Callable, timeout_s: float | None, **sent: Any) -> tuple[Any, Any]:
        """(the JSON answer, `read` of it)"""
        async with self._turn() as http, asyncio.timeout(timeout_s or self.config.timeout_s):
            response = await http.request(method, path, **sent)
        self._check(path, response.status_code, response.headers, response.text)
        answer = _json(response.text)
        try:
            return answer, read(answer)
        except UNREADABLE as error:
            reason = f"the answer has another form ({type(error).__name__}: {error}): {response.text[:SHOWN]}"
            raise _Retry(reason, response.status_code, kind=BadAnswer) from error

    async def _open_stream(self, path: str, body: Any) -> tuple[AsyncIterator[str], dict[str, Any] | None]:
        lines = self._lines(path, body)
        try:
            await anext(lines)
            return lines, await _next_event(lines, self.config.timeout_s)
        except BaseException:
            await lines.aclose()
            raise

    async def _lines(self, path: str, body: Any) -> AsyncIterator[str]:
        async with self._turn() as http:
            yield ""  # the wait for a turn is over: what follows is the server's time
            async with http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._check(path, response.status_code, response.headers, response.text)
                async for line in response.aiter_lines():
                    yield line

    async def _event(self, path: str, lines: AsyncIterator[str]) -> dict[str, Any] | None:
        try:
            return await _next_event(lines, self.config.timeout_s)
        except (_Retry, httpx.RequestError, TimeoutError) as error:
            message = f"{self._url(path)}: the stream broke off: {_why(error)}: ask again for the rest"
            raise RequestFailed(message, self._url(path), 200, 1) from error

    def _check(self, path: str, status: int, headers: Any, text: str) -> None:
        if 200 <= status < 300:
            return
        said = f"status {status}: {text[:SHOWN] or '(no text)'}"
        if status in (408, 425, 429) or status >= 500:
            raise _Retry(said, status, _retry_after(headers.get("retry-after", "")))
        remedy = dict.fromkeys((401, 403), f"check the key (${self.config.api_key_env})") | {404: "check base_url and model"}
        message = f"{self._url(path)} refused the request with {said}: {remedy.get(status, 'mend the request')}"
        raise RequestRefused(message, self._url(path), status, 1)

    # ------------------------------------------------------------------ all attempts
    async def _attempts(
        self, path: str, once: Callable[[], Awaitable[T]], retries: int | None,
        before_retry: Callable[[], Awaitable[None]] | None = None,
    ) -> T:  # fmt: skip
        config, began = self.config, time.monotonic()
        last, attempts = (config.retries if retries is None else retries) + 1, 0
        try:
            async with asyncio.timeout(config.deadline_s):
                while True:
                    attempts += 1
                    try:
                        return await once()
                    except (_Retry, httpx.RequestError, TimeoutError) as error:
                        failure = error if isinstance(error, _Retry) else _Retry(_why(error))
                    pause = min(config.pause_s * 2 ** (attempts - 1), config.max_pause_s) * random.uniform(0.5, 1.0)
                    pause = max(pause, failure.wait)
                    if attempts >= last:
                        raise self._failed(path, attempts, failure, "see that the server is up, or raise retries")
                    if config.deadline_s is not None and time.monotonic() - began + pause > config.deadline_s:
                        raise self._failed(path, attempts, failure, f"the deadline of {config.deadline_s:g} s leaves no time")
                    await asyncio.sleep(pause)
                    if before_retry is not None:
                        await before_retry()
        except TimeoutError as error:
            late = _Retry(f"no answer within the deadline of {config.deadline_s:g} s")
            raise self._failed(path, attempts, late, "see that the server is up, or raise deadline_s") from error

    def _failed(self, path: str, attempts: int, failure: _Retry, remedy: str) -> RequestFailed:
        tried = f"{attempts} attempt{'s' if attempts > 1 else ''}"
        message = f"{self._url(path)} gave no usable answer in {tried}; last: {failure}: {remedy}"
        return failure.kind(message, self._url(path), failure.status, attempts)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[httpx.AsyncClient]:
        """A place among the requests under way, at the permitted rate."""
        loop = asyncio.get_running_loop()
        if loop not in self._lanes:
            self._lanes = {other: lane for other, lane in self._lanes.items() if not other.is_closed()}
            self._lanes[loop] = _Lane(self._connections(), asyncio.Semaphore(self.config.concurrency))
        lane = self._lanes[loop]
        async with lane.gate:
            if self.config.rate is not None:
                start = max(loop.time(), lane.next_start)
                lane.next_start = start + 1 / self.config.rate
                await asyncio.sleep(start - loop.time())
            yield lane.http

    def _connections(self) -> httpx.AsyncClient:
        key = token_for(self.config.base_url, self.config.api_key_env)
        return httpx.AsyncClient(
            base_url=url_of(self.config.base_url),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=min(30.0, self.config.timeout_s)),  # asyncio.timeout bounds the rest
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=self.config.concurrency),
        )

    def _url(self, path: str) -> str:
        return self.config.base_url.rstrip("/") + path

    def _cached(self, path: str, body: Any, params: Any) -> Path | None:
        if self.config.cache is None:
            return None
        name = hashlib.sha256(json.dumps([self._url(path), body, params], sort_keys=True).encode()).hexdigest()
        return self.config.cache / name[:2] / f"{name}.json"


async def _next_event(lines: AsyncIterator[str], timeout_s: float) -> dict[str, Any] | None:
    """The next `data:` of a stream, None at [DONE]. A stream that ends without it has been cut."""
    async with asyncio.timeout(timeout_s):
        async for line in lines:
            if line.startswith("data:"):
                text = line[5:].strip()
                event = None if text == "[DONE]" else _json(text)
                if isinstance(event, dict) and "error" in event:
                    raise _Retry(f"the server reports {str(event['error'])[:SHOWN]}", 200)
                return event
            if line and not line.startswith((":", "event:", "id:", "retry:")):
                raise _Retry(f"not an event stream: {line[:SHOWN]}", 200, kind=BadAnswer)
    raise _Retry("the stream ended before [DONE]", 200, kind=BadAnswer)


def _text_of(answer: Any) -> str:
    if not isinstance(text := answer["choices"][0]["message"]["content"], str):
        raise ValueError(f"message.content is {text!r}, not text")
    return text


def _json(text: str) -> Any:
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Retry(f"the answer is not JSON ({error}): {text[:SHOWN]}", 200, kind=BadAnswer) from error


def _why(error: BaseException) -> str:
    return "timed out" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"


def _retry_after(text: str) -> float:
    """Seconds that a Retry-After header asks for, as a number or as a date; 0 when unreadable."""
    with suppress(TypeError, ValueError):
        date = None if text.replace(".", "").strip().isdigit() else email.utils.parsedate_to_datetime(text)
        return min(max(float(text) if date is None else date.timestamp() - time.time(), 0.0), LONGEST_WAIT_S)
    return 0.0


def _write(file: Path, content: Any) -> None:
    """All of it or nothing, whoever else writes the same."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}-{random.getrandbits(32):08x}")
    partial.write_text(json.dumps(content))
    partial.replace(file)
