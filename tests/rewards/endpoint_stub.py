"""A server of chat completions and of /pooling whose answers the request's text (or `said`) chooses."""

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAILURES = ("429", "500", "400", "nonsense", "nothing", "no json", "other form", "hang up", "hang")


class Stub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: Counter[str] = Counter()  # failure -> how often
        self.bodies: list[dict] = []
        self.said: list[str] = []  # complexities that are named, one request after the other and round again; or <failure>
        self.under_way = self.most_at_once = 0
        self.lock = threading.Lock()
        self.released = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self):
        self.released.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        with self.server.lock:
            self.server.under_way += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.under_way)
        try:
            answer = self._answer()
            time.sleep(0.005)
        finally:
            with self.server.lock:  # before a client can know of its answer and ask for the next
                self.server.under_way -= 1
        if answer is not None:
            self._send(*answer)

    def _answer(self) -> tuple[int, str] | None:
        """(status, text); None: there is none to send."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            said = self.server.said[(len(self.server.bodies) - 1) % len(self.server.said)] if self.server.said else ""
        if self.path == "/pooling":
            return 200, json.dumps({"data": [{"index": 0, "data": [float(len(body["input"][0]))]}]})
        text = body["messages"][0]["content"] + said
        kind = next((kind for kind in FAILURES if f"<{kind}>" in text), "")
        self.server.asked[kind] += 1
        if kind == "hang":
            self.server.released.wait(60)
            return None
        if kind == "hang up":
            self.close_connection = True
            self.connection.shutdown(2)
            return None
        if kind in ("429", "500", "400"):
            return int(kind), '{"error": "as you wish"}'
        if kind == "nothing":
            return 200, ""
        if kind in ("no json", "other form"):
            return 200, "<html>" if kind == "no json" else '{"choices": []}'
        good = f"Loops.\nComplexity: {said}" if said else "<think>Grade: 1</think>Good.\nGrade: 7"
        reply = "I could not say." if kind == "nonsense" else good
        return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": reply}}]})

    def _send(self, status: int, text: str):
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
