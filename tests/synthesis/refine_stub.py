"""A server of chat completions that works on what it is shown: it redoes the sums of an answer, criticises, revises, reasons.

It sees the requests alone, never a reference. At seeded rates it errs as models do: replies of another form, verdicts that are
wrong, slips in a sum, phrases that give the solution away, an answer told first, a solution copied first, replies cut off.
The same request has the same reply, whichever job asks.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.synthesis.refine_arithmetic import END, STEP, faults_of, near, number, plain, revised, value_of
from tests.synthesis.refine_phrases import LEAKS

ITEMS = {
    "calculation": "Every calculation gives the result that is written after it.",
    "operand": "Only numbers of the task and earlier results are calculated with.",
    "end": "The last line states the result of the last calculation.",
    "nothing": "Calculations and a last line with the result are there.",
}
RATES = {"form": 0.03, "cut": 0.01, "verdict": 0.01, "slip": 0.04}  # of every reply; a verdict: of every item
REASONINGS = {"leak": 0.12, "told first": 0.06, "copied": 0.05, "slip": 0.05, "short": 0.04}
KINDS = {"Write a checklist": "checklist", "Judge the answer": "critique", "Rewrite the answer": "revision",
         "Below are a task": "reasoning", "Do these two": "judge"}  # fmt: skip


def reply(text: str, rng: random.Random) -> tuple[str, str]:
    """(reply, finish reason) to the text of a request."""
    kind = next((kind for start, kind in KINDS.items() if text.startswith(start)), "draft")
    work = {"checklist": _checklist, "critique": _critique, "revision": _revision, "reasoning": _reasoning}.get(kind, _draft)
    if kind == "judge":
        return f"Grade: {int(near(number(part(text, 'first')), number(part(text, 'second'))))}", "stop"
    said = work(text, rng)
    if rng.random() < RATES["form"]:
        said = re.sub(r"</?\w+>|^\d+\.", "", said, flags=re.MULTILINE)
    if rng.random() < RATES["cut"]:
        return said[: len(said) // 2], "length"
    return f"<think>\nThey want a {kind}. 1. PASS\n</think>\n\n{said}", "stop"


def part(text: str, name: str) -> str:
    """What a request holds between <name> and </name>; the answer may write such marks itself."""
    return text.partition(f"<{name}>\n")[2].partition(f"\n</{name}>")[0]


def _checklist(text: str, rng: random.Random) -> str:
    return "\n".join(f"{place}. {item}" for place, item in enumerate(ITEMS.values(), 1))


def _critique(text: str, rng: random.Random) -> str:
    faults = faults_of(part(text, "task"), part(text, "answer"))
    lines = []
    for found, item in re.findall(r"^(\d+)\. (.*)$", part(text, "checklist"), re.MULTILINE):
        kind = next((kind for kind, told in ITEMS.items() if told == item), "")
        told = [fault.told for fault in faults if fault.kind == kind]
        fails = bool(told) != (rng.random() < RATES["verdict"])
        lines.append(f"{found}. FAIL: {'; '.join(told) or 'I do not see it'}" if fails else f"{found}. **PASS**")
    return "\n".join(lines)


def _revision(text: str, rng: random.Random) -> str:
    answer = part(text, "answer_to_rewrite")
    slip = rng.randrange(max(1, len(STEP.findall(answer)))) if rng.random() < RATES["slip"] else None
    return f"Here it is.\n<answer>\n{revised(part(text, 'task'), answer, slip)}\n</answer>"


def _draft(text: str, rng: random.Random) -> str:
    return "I would have to think about this."


def _reasoning(text: str, rng: random.Random) -> str:
    """The solution's sums in other words, each worked out again."""
    solution, how = part(text, "solution"), _chosen(REASONINGS, rng)
    steps = list(STEP.finditer(solution))
    result = number(END.findall(solution)[-1][1]) if END.search(solution) else None
    lines = ["Let me read the task again, and find out what is asked for."]
    for place, step in enumerate(steps, 1):
        value = value_of(step[1])
        value = number(step[2]) if value is None else abs(value)
        value = (value or 0) + (how == "slip" and place == len(steps))
        lines.append(f"{rng.choice(['Next', 'Now', 'Then'])} I work out {step[1]}, which makes {plain(value)}.")
        result = value if place == len(steps) else result
    told = "?" if result is None else plain(result)
    if how == "leak":
        lines.insert(rng.randrange(1, len(lines) + 1), rng.choice(LEAKS).format(answer=told))
    elif how == "told first":
        lines.insert(0, f"It comes to {told}, of course. Why is that?")
    elif how == "copied":
        lines = [END.sub("", solution), "That is clear, and easy to check.", *lines]
    elif how == "short":
        lines = [f"1 + 0 = 1, so {told}."]
    return "<reasoning>\n" + "\n".join(lines) + f"\nAnswer: {told}\n</reasoning>"


def _chosen(rates: dict[str, float], rng: random.Random) -> str:
    place = rng.random()
    for kind, rate in rates.items():
        place -= rate
        if place < 0:
            return kind
    return ""


class Stub(ThreadingHTTPServer):
    """asked: how often each request came; delay_s: of every reply; now and then the first try of a request meets a 503."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, delay_s: float = 0.0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.delay_s, self.lock = delay_s, threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body["messages"][-1]["content"]
        name = hashlib.blake2b(json.dumps([text, body.get("seed")]).encode(), digest_size=8).hexdigest()
        rng = random.Random(name)
        with self.server.lock:
            self.server.asked[name] += 1
            first = self.server.asked[name] == 1
        time.sleep(self.server.delay_s)
        if rng.random() < 0.02 and first:
            return self._send(503, {"error": "busy"})
        said, finish = reply(text, rng)
        with self.server.lock:
            self.server.answered[name] += 1
        used = {"prompt_tokens": len(text.split()), "completion_tokens": len(said.split())}
        return self._send(200, {"choices": [{"message": {"content": said}, "finish_reason": finish}], "usage": used})

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


