"""An HTTP server that answers, or fails in the way a test asks for."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Stub:
    """`with` it. answers: path -> function of the body. `plan`: failures to give first, one for each request."""

    def __init__(self, answers: dict[str, Callable[[Any], Any]]):
        self.answers, self.plan, self.bodies, self.released = answers, [], [], threading.Event()
        self.after: int | None = None
        self.count = 0

    def fail(self, after: int | None) -> None:
        """Status 500 for every request after so many; None: no more."""
        self.after = None if after is None else self.count + after

    def __enter__(self) -> Stub:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"stub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    stub: Stub

    def do_POST(self) -> None:
        stub, body = self.stub, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        stub.count += 1
        stub.bodies.append(body)
        kind = stub.plan.pop(0) if stub.plan else "fine"
        if stub.after is not None and stub.count > stub.after:
            kind = "500"
        if kind == "hang":
            stub.released.wait(30)
            return
        if kind == "fine":
            self._send(200, json.dumps(stub.answers[self.path](body)))
        elif kind == "html":
            self._send(200, "<html><body>Bad gateway</body></html>")
        elif kind == "form":
            self._send(200, '{"results": []}')
        else:
            self._send(int(kind), "planned", {"Retry-After": "0"})

    def _send(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(text.encode())), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass
