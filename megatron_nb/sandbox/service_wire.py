"""HTTP/1.1 as far as the judge service speaks it: one request after another on a connection, bodies of a known length."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

HEAD_BYTES = 1 << 16  # of a request line and its headers
BODY_S, IDLE_S = 120.0, 300.0  # to send or take a body; for the next request on an open connection
LINGER_S = 2.0  # for the rest of a refused body


class Answer(Exception):
    """How a request is answered. close: the connection cannot go on, for its body was not read."""

    def __init__(self, status: int, said: Any, headers: dict[str, str] | None = None, close: bool = False):
        super().__init__(said)
        self.status, self.said, self.headers, self.close = status, said, headers or {}, close


async def read_head(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]]:
    """(method, path without its query, headers by lower-case name). Raises Answer, IncompleteReadError, TimeoutError."""
    try:
        async with asyncio.timeout(IDLE_S):
            head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise Answer(431, f"the headers are longer than {HEAD_BYTES} bytes", close=True) from None
    first, *lines = head.decode("latin-1").split("\r\n")
    parts, headers = first.split(" "), {}
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise Answer(400, "this is not HTTP/1.1", close=True)
    for line in filter(None, lines):
        name, colon, value = line.partition(":")
        if not colon:
            raise Answer(400, f"a header line without a colon: {line[:40]!r}", close=True)
        headers[name.strip().lower()] = value.strip()
    return parts[0], parts[1].partition("?")[0], headers


async def read_body(headers: dict[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_mb: float) -> Any:
    """The body's JSON. Raises Answer, IncompleteReadError, TimeoutError."""
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdigit()):
        raise Answer(411, f"Content-Length is {length!r}: send the length of the body", close=True)
    if int(length) > max_mb * 2**20:
        raise Answer(413, f"the body has {length} bytes, more than max_body_mb={max_mb:g}: send fewer rows", close=True)
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    async with asyncio.timeout(BODY_S):
        body = await reader.readexactly(int(length))
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Answer(400, f"the body is not JSON ({error}): send a row or a list of rows") from error


async def send(writer: asyncio.StreamWriter, answer: Answer, close: bool) -> None:
    """Write the answer: text as it is after success, everything else as JSON. Raises OSError, TimeoutError."""
    plain = answer.status == 200 and isinstance(answer.said, str)
    said = {"error": answer.said} if isinstance(answer.said, str) else answer.said
    body = answer.said.encode() if plain else json.dumps(said).encode()
    headers = {
        "Content-Type": "text/plain; version=0.0.4" if plain else "application/json",
        "Content-Length": len(body), "Connection": "close" if close else "keep-alive", **answer.headers,
    }  # fmt: skip
    lines = [f"HTTP/1.1 {answer.status} -", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    writer.write("\r\n".join(lines).encode() + body)
    async with asyncio.timeout(BODY_S):
        await writer.drain()


async def linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Throw away what still comes: closing with a body unread would reset the connection and take the answer with it."""
    writer.write_eof()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while await reader.read(HEAD_BYTES):
                pass


def gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether the other end has hung up."""
    return reader.at_eof() or reader.exception() is not None or writer.transport.is_closing()
