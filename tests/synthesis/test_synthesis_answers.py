"""Answers of both models: durable through kill -9, missing turns filled, endpoints that fail."""

import asyncio
import http.server
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from megatron_nb.asking.askers import Answer, AnswererConfig, EndpointAsker, EngineAsker, TooLong
from megatron_nb.asking.ledger import Ledger
from megatron_nb.client import ClientConfig
from megatron_nb.records import Conversation
from megatron_nb.synthesis.answers import Question, answer_all
from tests.data.data_tokenizers import tiny
from tests.rollout.fake_engine import FakeEngine


def question(number: int, *contents: str) -> Question:
    """A question whose messages all come from the user, one after the other."""
    messages = [{"role": "user", "content": text} for text in contents or (f"question {number}",)]
    return Question(f"{number:016x}", Conversation(messages, f"q{number}", "a"))


class Echo:
    """Answers with what it was asked; notes what that was. delay: seconds per answer."""

    def __init__(self, delay: float = 0.0):
        self.delay, self.asked = delay, []

    async def ask(self, conversation: Conversation, name: str, seed: int) -> Answer:
        said = " | ".join(message["content"] for message in conversation.messages)
        self.asked.append((name, seed))
        await asyncio.sleep(self.delay)
        if "too long" in said:
            raise TooLong("99 tokens of prompt, 9 are allowed")
        if "lost" in said:
            raise OSError("the server is gone")
        return Answer(f"<think>\nhm\n</think>\n\n{said} ({seed % 1000})", True, 3)


def ask(folder: Path, asker, questions, samples=1, side="strong", concurrency=4) -> Ledger:
    ledger = Ledger(folder, side, 0)
    asyncio.run(answer_all(asker, questions, ledger, side, samples, 7, concurrency))
    ledger.close()
    return ledger


def test_answers_survive_kill_9_and_only_missing_ones_are_asked_for(tmp_path):
    file = tmp_path / "killed" / "strong.rank-0.jsonl"
    child = os.fork()  # not a new interpreter: that would spend seconds on imports
    if child == 0:
        try:
            ask(file.parent, Echo(0.05), [question(number) for number in range(40)], concurrency=2)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_bytes().count(b"\n") >= 6) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    with open(file, "ab") as torn:
        torn.write(b'["0000000000000027", {"answers": [{"te')  # killed while it wrote
    done = file.read_bytes().count(b"\n")
    assert 6 <= done < 40
    asker, questions = Echo(), [question(number) for number in range(40)]
    resumed = ask(file.parent, asker, questions)
    assert len(asker.asked) == 40 - done
    assert resumed.rows == ask(tmp_path / "whole", Echo(), questions).rows
    assert Ledger(file.parent, "strong", 0).rows == resumed.rows  # and from disk


def test_ranks_read_what_other_ranks_have_finished(tmp_path):
    one, two = Ledger(tmp_path, "weak", 0), Ledger(tmp_path, "weak", 1)
    one["a"], two["b"] = 1, 2
    one.read()
    assert one.rows == {"a": 1, "b": 2} and "b" not in Ledger(tmp_path, "strong", 0)


def test_missing_turns_are_written_by_the_strong_model_and_shown_to_it_without_thinking(tmp_path):
    asker = Echo()
    ledger = ask(tmp_path, asker, [question(1, "first", "second", "third")], samples=2)
    row = ledger[f"{1:016x}"]
    roles = [message["role"] for message in row["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    assert row["messages"][1]["content"].startswith("first (") and "<think>" not in row["messages"][1]["content"]
    assert row["messages"][3]["content"].startswith("first | first (")
    assert len(row["answers"]) == 2 and len({seed for _, seed in asker.asked}) == 4  # every draw has its own seed
    given = question(2, "first")
    given.conversation.messages += [{"role": "assistant", "content": "given"}, {"role": "user", "content": "next"}]
    assert "messages" not in ask(tmp_path, Echo(), [given])[given.id]


def test_what_cannot_be_asked_is_told_and_what_failed_is_asked_again_by_the_next_attempt(tmp_path):
    questions = [question(1), question(2, "too long"), question(3, "lost")]
    ledger = ask(tmp_path, Echo(), questions)
    assert ledger[questions[1].id] == {"dropped": "too_long", "reason": "99 tokens of prompt, 9 are allowed"}
    assert questions[2].id not in ledger
    again = Echo()
    ask(tmp_path, again, questions)
    assert [name.split("/")[0] for name, _ in again.asked] == [questions[2].id]


def test_an_engine_is_asked_in_the_chat_template_and_refuses_prompts_above_the_limit(tmp_path):
    engine, config = FakeEngine(), AnswererConfig(checkpoint="x", max_tokens=5, temperature=0.7)
    asker = EngineAsker(engine, tiny(), config, max_prompt=40)
    ledger = ask(tmp_path, asker, [question(1), question(2, "word " * 60)], samples=2)
    assert ledger[question(2).id]["dropped"] == "too_long"
    answers = ledger[question(1).id]["answers"]
    assert len(answers) == 2 and all(0 < answer["tokens"] <= 5 for answer in answers)
    request = engine.requests[0]
    assert tiny().decode(request.ids) == "<|im_start|>user\nquestion 1<|im_end|>\n<|im_start|>assistant\n"
    assert (request.sampling.max_tokens, request.sampling.temperature) == (5, 0.7)
    assert tiny().convert_ids_to_tokens(request.sampling.stop_ids[0]) == "<|im_end|>"


class Server(http.server.BaseHTTPRequestHandler):
    """Chat completions: question 2 is refused, question 3 cut off, the first request of all meets a 503."""

    asked: list = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        text = body["messages"][-1]["content"]
        status = 503 if len(self.asked) == 1 else 400 if text == "question 2" else 200
        choice = {"message": {"content": text.upper()}, "finish_reason": "length" if text == "question 3" else "stop"}
        reply = json.dumps({"choices": [choice], "usage": {"completion_tokens": 2, "prompt_tokens": 5}}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args):
        pass


def test_an_endpoint_is_asked_with_seeds_and_what_it_refuses_is_left_out(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = ClientConfig(f"http://127.0.0.1:{server.server_port}", "judge-model", pause_s=0.01)
    try:
        asker = EndpointAsker(AnswererConfig(endpoint=endpoint, max_tokens=9))
        ledger = ask(tmp_path, asker, [question(number) for number in (1, 2, 3)])
    finally:
        server.shutdown()
        server.server_close()
    assert ledger[question(1).id]["answers"] == [{"text": "QUESTION 1", "whole": True, "tokens": 2, "prompt_tokens": 5}]
    assert ledger[question(3).id]["answers"][0]["whole"] is False
    assert question(2).id not in ledger
    assert {(body["model"], body["max_tokens"]) for body in Server.asked} == {("judge-model", 9)}
    assert len({body["seed"] for body in Server.asked}) == 3


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (AnswererConfig(), "neither given"),
        (AnswererConfig("a", ClientConfig("http://x")), "both given"),
        (AnswererConfig("a", samples=0), "at least 1"),
        (AnswererConfig("a", temperature=-1), "temperature"),
    ],
)
def test_who_answers_must_be_said(config, rule):
    with pytest.raises(ValueError, match=rule):
        config.validate("strong")
