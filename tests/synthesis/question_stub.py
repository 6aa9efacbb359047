"""A server of chat completions that writes questions and tries them.

From evidence it answers by reading it; for the other tries it remembers what it wrote, and `knows` and `searches` say how well.
"""

import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

YEAR = re.compile(r"founded in (\d{4})")


class Stub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: Counter[str] = Counter()  # kind of request -> how often
        self.knows = 0.0  # share of questions answered closed-book
        self.searches = (True, False)  # whether the n-th search of a question succeeds, round and round
        self.spoils = ()  # what the first written questions are, before sound ones
        self.down = self.blind = False  # every request fails; evidence is not understood
        self.truths: dict[str, str] = {}  # question -> answer
        self.by_question: Counter[str] = Counter()
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, address):
        """A client that hangs up is no error here."""

    def close(self):
        self.shutdown()
        self.server_close()

    def reply(self, body: dict) -> tuple[str, dict]:
        """(kind of request, message)"""
        text, told = body["messages"][0]["content"], body["messages"]
        if text.startswith("You write one difficult question"):
            hints = re.search(r"may help: (.*)", text)[1].split("; ")
            question = f"Follow the links from {'; then '.join(hints)}. What fills the gap?"
            spoilt = self.spoils[len(told) // 2] if len(told) // 2 < len(self.spoils) else ""
            if spoilt == "answer":
                question += " 1" + re.search(r"^Answer \(\w+\): (.*)$", text, re.MULTILINE)[1][1:]
            if spoilt == "title":
                question = re.search(r"^1\. (\w+):", text, re.MULTILINE)[1] + f": {question}"
            self.truths[question] = re.search(r"^Answer \(\w+\): (.*)$", text, re.MULTILINE)[1]
            written = json.dumps({"question": question, "clues": hints})
            return "write", say("no JSON at all" if spoilt == "nonsense" else written)
        truth = next((answer for question, answer in self.truths.items() if question in text), "")
        if text.startswith("Answer from memory"):
            known = (hash_of(text) % 100) / 100 < self.knows
            return "closed", say(f"Answer: {truth if known else 'no idea'}")
        if text.startswith("These sentences"):
            return "evidence", say("Answer: " + ("who knows" if self.blind else YEAR.findall(text)[-1]))
        if len(told) == 1:  # a search by the words of the question
            function = {"name": "search", "arguments": json.dumps({"query": text[-300:]})}
            call = {"id": "c1", "type": "function", "function": function}
            return "search", {"role": "assistant", "content": "", "tool_calls": [call]}
        with self.lock:
            number = self.by_question[text]
            self.by_question[text] += 1
        good = self.searches[number % len(self.searches)] and told[-1]["content"].startswith("[1] ")
        return "search", say(f"Answer: {truth if good else 'no idea'}")


def say(text: str) -> dict:
    return {"role": "assistant", "content": text}


def hash_of(text: str) -> int:
    return sum(ord(letter) * (at % 7 + 1) for at, letter in enumerate(text))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        kind, message = self.server.reply(body)
        with self.server.lock:
            self.server.asked[kind] += 1
        sent = json.dumps({"choices": [{"message": message}]}).encode()
        self.send_response(503 if self.server.down else 200)
        self.send_header("content-length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)
