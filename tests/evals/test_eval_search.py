"""Questions with short answers: the forms they come in, how answers are compared, and episodes with tools on either side."""

from __future__ import annotations

import base64
import hashlib
import json

import pytest

from megatron_nb.asking.askers import AnswererConfig, EndpointAsker, EngineAsker
from megatron_nb.client import ClientConfig
from megatron_nb.evals.episodes import REMOVED, Episodes
from megatron_nb.evals.question_rows import decrypt, encrypt, read_questions
from megatron_nb.evals.search_qa import gaia_equal
from megatron_nb.rollout.agent import AgentConfig
from megatron_nb.rollout.toolbox import Toolbox
from megatron_nb.rollout.tools import ToolsConfig
from tests.data.data_tokenizers import tiny
from tests.evals.scripted_asker import ScriptedAsker, bodies, endpoint, outcomes, task_of, told
from tests.rollout.agent_setup import Pages, ScriptedEngine, call

ROWS = [{"id": "r", "question": "Where does the Loire end?", "answer": ["Atlantic", "Atlantic Ocean"]}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ------------------------------------------------------------------ the forms
def test_browsecomp_is_decrypted_by_the_hash_of_its_canary():
    canary, text = "BENCHMARK DATA canary 26b5c67b", "Étude in the key of C"
    key = hashlib.sha256(canary.encode()).digest()
    hidden = bytes(byte ^ key[place % 32] for place, byte in enumerate(text.encode()))
    assert decrypt(base64.b64encode(hidden).decode(), canary, "browsecomp") == text
    # worked out by hand: "Hi" is 48 69, SHA-256 of "a" begins with ca 97, so 82 fe
    assert decrypt(base64.b64encode(bytes([0x82, 0xFE])).decode(), "a", "browsecomp") == "Hi"
    assert decrypt(base64.b64encode(bytes([0x48 ^ ord("k"), 0x69 ^ ord("k")])).decode(), "k", "xbench") == "Hi"


@pytest.mark.parametrize("form", ["browsecomp", "xbench"])
def test_encrypted_files_give_questions_in_the_clear(tmp_path, form):
    name = {"browsecomp": "problem", "xbench": "prompt"}[form]
    canary = "do not, train"
    file = tmp_path / "hidden.csv"
    question, answer = "Which river,\nof two?", "the Loire"
    hidden = [encrypt(text, canary, form) for text in (question, answer)]
    file.write_text(f"\ufeffid,{name},answer,canary\n1,{hidden[0]},{hidden[1]},\"{canary}\"\n")
    (item,) = read_questions(str(file), form)
    assert item.gold["question"] == question and item.gold["answer"] == [answer] and item.id == "1"
    assert question not in file.read_text()


def test_gaia_questions_with_a_file_are_left_out(tmp_path):
    rows = [{"task_id": "a", "Question": "How many?", "Final answer": "3", "Level": 1, "file_name": ""},
            {"task_id": "b", "Question": "See the picture.", "Final answer": "4", "file_name": "b.png"}]  # fmt: skip
    (item,) = read_questions(write(tmp_path / "metadata.jsonl", rows), "gaia")
    assert (item.id, item.gold["answer"], item.gold["level"]) == ("a", ["3"], "1")


REAL = {"NQ-open.dev.jsonl": 3610, "webdancer_qa.jsonl": 200, "sailorfog-QA.jsonl": 20}


@pytest.mark.parametrize(("name", "count"), REAL.items(), ids=REAL)
def test_real_questions_are_read(shared_data, name, count):
    items = list(read_questions(str(shared_data / "search" / name), "rows"))
    assert len(items) == count and all(item.gold["answer"] and item.prompt[-1]["content"] for item in items)


@pytest.mark.parametrize(
    ("row", "form", "complaint"),
    [
        ({"question": "Why?"}, "rows", "a row of form rows has question and answer"),
        ({"question": "Why?", "answer": []}, "rows", "a row of form rows has question and answer"),
        ({"problem": "not base64!", "answer": "x", "canary": "c"}, "browsecomp", "it cannot be decrypted by its canary"),
        ({"problem": encrypt("a", "x", "xbench"), "answer": "/w==", "canary": "other"}, "browsecomp", "cannot be decrypted"),
    ],
    ids=["no answer", "empty answer", "not encrypted", "other key"],
)
def test_a_bad_row_is_named_with_its_line(tmp_path, row, form, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        list(read_questions(write(tmp_path / "q.jsonl", [row]), form))
    assert "q.jsonl:1" in str(caught.value)


# ------------------------------------------------------------------ answers
@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("$1,234.50", "1234.5", True), ("17 %", "17", True), ("1235", "1234.5", False), ("many", "17", False),
        ("Sea gull", "seagull", True), ("sea-gull!", "Seagull", True), ("gull", "seagull", False),
        ("a; b,3.0", "A, B, 3", True), ("b, a, 3", "a, b, 3", False), ("a, b", "a, b, c", False), ("", "a", False),
    ],
)  # fmt: skip
def test_gaias_rules(answer, reference, right):
    assert gaia_equal(answer, reference) == right


@pytest.mark.parametrize(
    ("text", "exact", "normalised"),
    [
        ("It flows west.\nAnswer: Atlantic", 1, 1), ("Answer: the atlantic ocean.", 0, 1), ("Answer: Pacific", 0, 0),
        ("<think>\nAnswer: Atlantic\n</think>\n\nAnswer: Pacific", 0, 0), ("<think>\nAnswer: Atlantic", 0, 0),
        ("Answer: " + "Atlantic " * 100, 0, 0), ("", 0, 0),
    ],
)  # fmt: skip
def test_answers_from_memory_are_compared_in_each_way(tmp_path, text, exact, normalised):
    task = task_of("search_qa", path=write(tmp_path / "q.jsonl", ROWS))
    asker = ScriptedAsker(lambda messages, tools: text)
    (outcome,) = outcomes(task, asker)
    assert (outcome.parts["exact"], outcome.parts["normalised"], outcome.score) == (exact, normalised, normalised)
    assert asker.asked[0][-1]["content"].startswith("Where does the Loire end?") and asker.tools == [[]]


def test_the_mean_is_over_questions_of_the_mean_over_their_attempts(tmp_path):
    rows = [{"id": str(i), "question": f"Q{i}?", "answer": "yes", "level": f"L{i}"} for i in range(2)]
    said = iter(["Answer: yes", "Answer: no", "Answer: yes", "Answer: yes"])  # item 0: 1/2, item 1: 1
    task = task_of("search_qa", path=write(tmp_path / "q.jsonl", rows), samples=2)
    scores = task.summarise(outcomes(task, ScriptedAsker(lambda messages, tools: next(said)), 2))
    assert (scores["score"], scores["score_L0"], scores["score_L1"], scores["exact"]) == (0.75, 0.5, 1.0, 0.75)
    assert scores["score_low"] < 0.75 < scores["score_high"]


def test_a_judge_is_asked_only_about_answers_that_are_not_equal(tmp_path):
    rows = [ROWS[0] | {"id": name} for name in ("equal", "other words", "wrong")]
    said = iter(["Answer: Atlantic", "Answer: the ocean west of France", "Answer: Baltic"])
    judge = lambda messages: "Verdict: " + ("right" if "west of France" in messages[0]["content"] else "wrong")  # noqa: E731
    with endpoint(judge) as stub:
        task = task_of("search_qa", path=write(tmp_path / "q.jsonl", rows), mode="judged", judge=told(stub.url))
        found = outcomes(task, ScriptedAsker(lambda messages, tools: next(said)))
        assert len(bodies(stub)) == 2
    assert [outcome.score for outcome in found] == [1.0, 1.0, 0.0]
    assert task.summarise(found)["normalised"] == pytest.approx(1 / 3)


# ------------------------------------------------------------------ with tools
AGENT = {"tools": {"names": ["search", "open_page"], "search": "unused"}, "max_turns": 3}


def with_tools(tmp_path, monkeypatch, asker, **agent):
    """The outcome of the one question, with a few pages to search in."""
    made = lambda config, tokenizer=None: Toolbox(config, tokenizer, Pages())  # noqa: E731
    monkeypatch.setattr("megatron_nb.evals.episodes.Toolbox", made)
    task = task_of("search_qa", path=write(tmp_path / "q.jsonl", ROWS), agent=AGENT | agent)
    (outcome,) = outcomes(task, asker)
    return outcome


def engine_asker(turns, **settings):
    tokenizer = tiny()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    engine = ScriptedEngine(turns, end, tokenizer)
    config = AnswererConfig(checkpoint="x", max_tokens=256)
    return EngineAsker(engine, tokenizer, config, settings.get("max_prompt", 4096)), engine


def endpoint_turn(turn):
    """The same turn as a server's message."""
    if "<tool_call>" not in turn:
        return turn
    value = json.loads(turn.partition("<tool_call>\n")[2].partition("\n</tool_call>")[0])
    function = {"name": value["name"], "arguments": json.dumps(value["arguments"])}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


EPISODES = {
    "right": ([call(), call("open_page", title="Loire"), "It is there.\nAnswer: Atlantic"], (1.0, "done", 3, 2)),
    "wrong": ([call(), "Answer: Baltic"], (0.0, "done", 2, 1)),
    "used up": ([call(), call(), call()], (0.0, "turns", 3, 3)),
}


@pytest.mark.parametrize("name", EPISODES)
@pytest.mark.parametrize("side", ["engine", "endpoint"])
def test_an_episode_is_the_same_over_an_engine_and_over_an_endpoint(tmp_path, monkeypatch, side, name):
    turns, expected = EPISODES[name]
    if side == "engine":
        asker, engine = engine_asker(turns)
        outcome = with_tools(tmp_path, monkeypatch, asker)
        assert engine.ended, "the session is ended"
    else:
        said = iter(turns)
        with endpoint(lambda messages: endpoint_turn(next(said))) as stub:
            asker = EndpointAsker(AnswererConfig(endpoint=ClientConfig(**told(stub.url))))
            outcome = with_tools(tmp_path, monkeypatch, asker)
            assert [tool["function"]["name"] for tool in bodies(stub)[0]["tools"]] == ["search", "open_page"]
            results = [message for message in bodies(stub)[-1]["messages"] if message["role"] == "tool"]
            assert "The Loire is a river." in results[0]["content"]
    assert (outcome.score, outcome.status, outcome.parts["turns"], outcome.parts["calls"]) == expected
    shown = [message["content"] for message in outcome.messages if message["role"] == "tool"]
    assert any("The Loire is a river." in text for text in shown) and outcome.tokens_out > 0


def test_a_prompt_that_does_not_fit_scores_nothing_and_says_so(tmp_path, monkeypatch):
    outcome = with_tools(tmp_path, monkeypatch, engine_asker([call()], max_prompt=8)[0])
    assert (outcome.score, outcome.status) == (0.0, "too_long")


def test_tools_that_fail_make_the_attempt_invalid(tmp_path, monkeypatch):
    broken = Pages(broken={"river": OSError("the index is gone")})
    quick = {"search": {"retries": 0}}
    made = lambda config, tokenizer=None: Toolbox(config, tokenizer, broken)  # noqa: E731
    monkeypatch.setattr("megatron_nb.evals.episodes.Toolbox", made)
    agent = AGENT | {"tools": AGENT["tools"] | {"limits": quick}}
    task = task_of("search_qa", path=write(tmp_path / "q.jsonl", ROWS), agent=agent)
    for asker in (engine_asker([call()])[0], ScriptedAsker(lambda messages, tools: [("search", {"query": "river"})])):
        (outcome,) = outcomes(task, asker)
        assert outcome.score is None and outcome.status == "invalid" and "the index is gone" in outcome.reason
        task._episodes = None


def test_older_results_are_replaced_several_at_a_time_over_an_endpoint():
    config = AgentConfig(context="keep_last", keep_last=2, clear_every=2, tools=ToolsConfig(names=["run_code"]))
    episodes = Episodes(config)
    for count in range(7):
        messages = [{"role": "tool", "content": str(number)} for number in range(count)]
        removed = sum(message["content"] == REMOVED for message in episodes._shortened(messages))
        assert removed == max(0, (count - 2) // 2 * 2)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"mode": "judged"}, "judged needs a judge"),
        ({"form": "trivia"}, "form='trivia' must be one of rows, gaia"),
        ({"ask": "Please answer."}, "must hold {question}"),
    ],
    ids=["judge", "form", "ask"],
)
def test_settings_that_cannot_be_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        task_of("search_qa", path="q.jsonl", **settings)
