"""An endpoint that judges turns by reading the prompt: a reader of its own, which shares no code with the critic's rules.

It takes the data out of the prompt as a model would see it, and compares reasoning, calls and results by simple measures.
"""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DATA = re.compile(r"<data ([0-9a-f]+)>\n(.*?)\n</data \1>", re.DOTALL)
NEGATION = re.compile(r"\b(no|not|nothing|nowhere|empty|none|nor)\b", re.IGNORECASE)
NAME = re.compile(r"\b[A-Z][\w'-]{3,}(?: [A-Z][\w'-]+)*|\b\d{4}\b")
DULL = set(
    """this that there what where page with from have been will they them first next then more looks clue must their those
    some into about could sounds read good find comes follow link named among start thing words under search
    somewhere""".split()  # noqa: SIM905
)


def words(text: str) -> list[str]:
    return re.findall(r"\w{3,}", text.lower())


def told(call: dict) -> str:
    return " ".join([call["name"], *sorted(words(json.dumps(call["arguments"], ensure_ascii=False).lower()))])


def judge(data: dict) -> dict:
    """The reply's object for the data of one turn."""
    verdicts = {"logic": logic(data), "tools": tools(data), "gain": gain(data)}
    return {name: {"ok": not reason, "reason": reason or "Nothing speaks against it."} for name, reason in verdicts.items()}


def tools(data: dict) -> str:
    if data["calls_that_cannot_be_read"]:
        return "A call cannot be read."
    known = {tool["name"]: tool["parameters"] for tool in data["tools"]}
    for call in data["its_calls"]:
        if call["name"] not in known:
            return f"{call['name']} is not offered."
        if set(known[call["name"]]["required"]) - set(call["arguments"]):
            return "An argument is lacking."
        if set(call["arguments"]) - set(known[call["name"]]["properties"]):
            return "An argument is unknown."
        if any(re.search(r"[{}]|//", str(value)) or isinstance(value, list) for value in call["arguments"].values()):
            return "An argument is not what the tool takes."
    return "The tool complains." if any(result.startswith("Error") for result in data["its_results"]) else ""


def gain(data: dict) -> str:
    if not data["its_calls"]:
        return "" if data["its_text"] else "It does nothing."
    results = " ".join(data["its_results"])
    if not results or results.startswith("Error"):
        return "There is no result."
    earlier = [" ".join([line.split("(")[0].split()[-1], *sorted(words(re.sub(r"\b\w+=", "", line.split("(", 1)[1])))])
               for line in data["earlier_calls"]]  # fmt: skip
    for call in data["its_calls"]:
        values = " ".join([call["name"], *sorted(words(" ".join(map(str, call["arguments"].values()))))])
        if values in earlier or values.replace(" the ", " ") in earlier:
            return "That was asked before."
    pages = data.get("pages_that_lead_to_it", [])
    subject = json.dumps([call["arguments"] for call in data["its_calls"]], ensure_ascii=False)
    evidence = [quote for quote in data.get("their_evidence", []) if " ".join(quote.split()) in " ".join(results.split())]
    asked = any(page in subject for page in pages)
    listed = any(f"] {page}\n" in results and page not in "".join(data["earlier_calls"]) for page in pages)
    return "" if asked or listed or evidence else "Nothing in it belongs to the way."


def logic(data: dict) -> str:
    said = data["its_reasoning"] + " " + data["its_text"]
    last = " ".join(data["latest_results_before_this_turn"])
    if not data["its_calls"] and data["its_text"]:
        answer = data["its_text"].rpartition("Answer:")[2].strip()
        right = data.get("right_answer", [answer])
        return "" if answer in right else "The answer is not what the evidence has."
    if last and NEGATION.search(said):
        names = [name for name in NAME.findall(said) if name not in json.dumps(data["its_calls"], ensure_ascii=False)]
        if any(name in last for name in names):
            return "It denies what lies before it."
        if re.search(r"hit|return|empty|result|bring|blank", said) and "of these" not in said:
            return "There were results."
    quotes = re.findall(r'"([^"]{10,})"', said)
    if any(" ".join(words(quote)) not in " ".join(words(last + data["question"])) for quote in quotes):
        return "The quote is made up."
    calls = json.dumps(data["its_calls"], ensure_ascii=False)
    if re.search(r"page|article|text|snippet|entry|states?\b", said):
        for name in NAME.findall(re.sub(r'"[^"]*"', "", said))[1:]:
            if name not in last + calls + data["question"] + "".join(data["earlier_calls"]):
                return f"{name} stands nowhere."
    telling = set(words(said)) - DULL
    return "" if not telling or telling & set(words(calls)) or not data["its_calls"] else "It does something else than it says."


class CriticEndpoint(ThreadingHTTPServer):
    """nonsense: so many requests are answered with something else first."""

    daemon_threads, allow_reuse_address = True, True

    def __init__(self, nonsense: list[str] | None = None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.nonsense, self.asked, self.prompts = list(nonsense or []), 0, []
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        prompt = json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"][0]["content"]
        with self.server.lock:
            self.server.asked += 1
            self.server.prompts.append(prompt)
            reply = self.server.nonsense.pop(0) if self.server.nonsense else None
        if reply is None:
            reply = json.dumps(judge(json.loads(DATA.search(prompt)[2])))
        text = json.dumps({"choices": [{"message": {"role": "assistant", "content": reply}}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
