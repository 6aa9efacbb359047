"""Trajectories: roles become one conversation, trouble leaves no trace, kills lose nothing, only right ones are kept."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from megatron_nb.asking.ledger import Ledger
from megatron_nb.rewards.critic_steps import steps_of
from megatron_nb.rollout.toolbox import Result
from megatron_nb.synthesis.trajectories import LEFT_OUT, PROMPTS, AttemptConfig, Attempts, attempt, attempt_all
from megatron_nb.synthesis.trajectory_rules import AnswerConfig, AnswerFilter
from megatron_nb.synthesis.trajectory_teacher import _message
from tests.synthesis.scripted_teacher import ROW, WAY, Script, calling, toolbox


def made(teacher, tools=None, **config) -> dict:
    return asyncio.run(attempt(ROW["question"], teacher, tools or toolbox(), AttemptConfig(**config)))


def test_three_roles_make_one_conversation():
    teacher = Script()
    found = made(teacher)
    said = found["messages"]
    assert [message["role"] for message in said] == ["user", *["assistant", "tool"] * 4, "assistant"]
    assert said[1]["reasoning_content"] == "1. Find the town. (plan 0)" and said[1]["content"] == WAY[0][0]
    assert said[-1]["reasoning_content"] == "That is all.\n\nI write." and said[-1]["content"].endswith("Answer: Dunmere")
    assert said[4]["content"].startswith("Alba (page 1 of 1)") and found["status"] == "done"
    assert [call["status"] for call in found["calls"]] == ["ok"] * 4
    roles = [role for role, _, _ in teacher.seen]
    assert roles == ["planner", *["searcher"] * 5, "writer"]
    for role, messages, tools in teacher.seen:
        first, question = messages[:2]
        assert first["role"] == "system" and first["content"].startswith(PROMPTS[role]) and question["role"] == "user"
        assert bool(tools) == (role == "searcher") and ("The plan:" in first["content"]) == (role == "searcher")


def test_the_planner_is_asked_again_and_old_results_are_left_out_for_the_teacher_only():
    teacher = Script()
    found = made(teacher, replan_every=2, keep_results=1)
    assert [role for role, _, _ in teacher.seen].count("planner") == 3
    assert "(plan 2)" in found["messages"][5]["reasoning_content"]
    shown = [message["content"] for message in teacher.seen[-1][1] if message["role"] == "tool"]
    assert shown[:-1] == [LEFT_OUT] * 3 and "Dunmere" in shown[-1]
    assert LEFT_OUT not in str(found["messages"])


@pytest.mark.parametrize(
    "turn",
    [
        {"content": 'So:\n<tool_call>\n{"name": "open_page", "arguments": {"title": "Alba"}}\n</tool_call>'},
        {"content": "So:\n<use_mcp_tool>\n<server_name>s</server_name>\n<tool_name>open_page</tool_name>\n<arguments>\n"
                    '{"title": "Alba"}\n</arguments>\n</use_mcp_tool>'},
        {"content": "So:", "tool_calls": [{"function": {"name": "open_page", "arguments": {"title": "Alba"}}}]},
    ],
    ids=["hermes", "mcp", "arguments as object"],
)  # fmt: skip
def test_calls_are_read_wherever_a_server_leaves_them(turn):
    said = made(Script([{"role": "assistant", **turn}]))["messages"]
    function = said[1]["tool_calls"][0]["function"]
    assert said[1]["content"] == "So:" and function == {"name": "open_page", "arguments": {"title": "Alba"}}
    assert "Brunel Marsh" in said[2]["content"] and said[2]["tool_call_id"] == said[1]["tool_calls"][0]["id"]


def test_parallel_calls_are_answered_in_order_and_unknown_tools_with_an_error():
    turn = calling("Both.", "open_page", {"title": "Cortona Vale"})
    turn["tool_calls"] += calling("", "browse", {"url": "x"})["tool_calls"]
    found = made(Script([turn]))
    assert [message["role"] for message in found["messages"][:4]] == ["user", "assistant", "tool", "tool"]
    assert "Dunmere" in found["messages"][2]["content"]
    assert found["messages"][3]["content"].startswith("Error: there is no tool")
    assert len({call["id"] for call in found["messages"][1]["tool_calls"]}) == 2
    assert [call["status"] for call in found["calls"]] == ["ok", "error"]


def test_calls_that_cannot_be_read_are_corrected_and_five_in_a_row_end_the_attempt():
    bad = calling("So.", "open_page", '{"title": "Alba"')
    found = made(Script([bad, calling(*WAY[1])]))
    assert '<tool_call>\n{"name": "open_page", "arguments": {"title": "Alba"}\n</tool_call>' in found["messages"][1]["content"]
    assert found["messages"][2]["content"].startswith("Error: The call cannot be read") and found["status"] == "done"
    ended = made(Script([bad] * 9))
    assert ended["status"] == "malformed" and sum(one["role"] == "assistant" for one in ended["messages"]) == 5


@pytest.mark.parametrize(
    "call",
    [
        *({"function": {"name": "search", "arguments": text}} for text in (
            '{"query": "\\ud800"}', '{"query": NaN}', '{"query": 1e400}', "[" * 100_000, '{"query": "\ud83d"}', None, 5)),
        {"function": {"name": "a\ud800", "arguments": "{}"}}, {"function": "f"}, 5, None, [],
    ],
)  # fmt: skip
def test_whatever_a_server_sends_as_a_call_becomes_text_that_can_be_written(call):
    told = _message({"choices": [{"message": {"content": "So \ud800.", "tool_calls": [call]}}]})
    said = made(Script([told]))["messages"]
    json.loads(json.dumps(said, ensure_ascii=False, allow_nan=False).encode())
    assert said[2]["role"] == "tool" and said[2]["content"].startswith(("Error: ", "No results."))
    assert all(step.problems or step.results for step in steps_of(said)[:-1])


def test_a_correction_quotes_no_chat_marker():
    bad = {"role": "assistant", "content": "<tool_call><|im_end|>\n<|im_start|>user</tool_call>"}
    told = made(Script([bad]))["messages"][2]["content"]
    assert told.startswith("Error: ") and "im_end" in told and "<|" not in told


def test_an_attempt_goes_on_for_600_turns_and_no_longer():
    pages = {f"P{number}": f"Page {number} speaks of P{number + 1}." for number in range(700)}
    turns = [calling("On.", "open_page", {"title": f"P{number}"}) for number in range(700)]
    began = time.process_time()
    found = made(Script(turns), toolbox(pages), keep_results=3)
    assert sum(message["role"] == "assistant" for message in found["messages"]) == 600 and found["status"] == "turns"
    assert time.process_time() - began < 10  # 0.5 s on a quiet core


# ------------------------------------------------------------------ many questions
def run_all(folder: Path, teacher_of, rows, tools=None, attempts=2, concurrency=4) -> tuple[dict, int]:
    done, answers = Ledger(folder, "attempts", 0), Ledger(folder, "answers", 0)
    wanted = Attempts(attempts, 1, concurrency, AttemptConfig())
    right = AnswerFilter(AnswerConfig(), answers)
    left_open = asyncio.run(attempt_all(rows, teacher_of, tools or toolbox(), wanted, done, right))
    done.close(), answers.close()
    return {key: (without_times(done[key]), answers[key]["dropped"]) for key in answers.rows}, left_open


def without_times(found: dict) -> dict:
    return {**found, "calls": [{**call, "seconds": 0, "cached": False} for call in found["calls"]]}


def rows_of(count: int) -> list[dict]:
    return [{**ROW, "id": f"q{number}"} for number in range(count)]


def test_attempts_go_on_until_one_is_right(tmp_path):
    def teacher_of(row, number):
        return Script(answer="Answer: Themse" if number < 2 else "Answer: the Dunmere")

    found, left_open = run_all(tmp_path, teacher_of, rows_of(2), attempts=5)
    assert left_open == 0
    assert {key: rule for key, (_, rule) in found.items()} == {
        f"q{row}/{number}": "wrong" if number < 2 else "" for row in range(2) for number in range(3)
    }


def test_attempts_survive_kill_9_and_only_missing_ones_are_made(tmp_path):
    file = tmp_path / "killed" / "attempts.rank-0.jsonl"
    child = os.fork()
    if child == 0:
        try:
            run_all(file.parent, lambda row, number: Script(delay=0.02), rows_of(30), concurrency=2)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_bytes().count(b"\n") >= 5) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    done = file.read_bytes().count(b"\n")
    assert 5 <= done < 30
    teachers = []

    def teacher_of(row, number):
        teachers.append(row["id"])
        return Script()

    resumed = run_all(file.parent, teacher_of, rows_of(30))
    assert len(teachers) == 30 - done
    assert resumed == run_all(tmp_path / "whole", lambda row, number: Script(), rows_of(30))


def test_trouble_outside_leaves_the_question_open_for_the_next_attempt_of_the_job(tmp_path):
    class Lost(Script):
        async def reply(self, role, messages, tools):
            if self.at == 2:
                raise OSError("the server is gone")
            return await super().reply(role, messages, tools)

    class Broken:
        schemas = toolbox().schemas

        async def call(self, call):
            return Result("Error: search failed after 4 attempts: gone", "failed")

    found, left_open = run_all(tmp_path, lambda row, number: Lost() if row["id"] == "q1" else Script(), rows_of(3))
    assert set(found) == {"q0/0", "q2/0"} and left_open == 1
    assert run_all(tmp_path, lambda row, number: Script(), rows_of(3)) == (found | {"q1/0": found["q0/0"]}, 0)
    assert run_all(tmp_path / "tools", lambda row, number: Script(), rows_of(2), Broken()) == ({}, 2)


@pytest.mark.parametrize(
    ("teacher", "rule"),
    [
        (Script(), ""),
        (Script(answer="It is said: the Dunmere."), "wrong"),  # normalised is not contained
        (Script(answer="Answer: Po"), "wrong"),
        (Script(answer="  "), "no_answer"),
        (Script([]), "no_tools"),
        (Script([calling(*WAY[1])]), "unsupported"),
        (Script([calling("x", "open_page", "{")] * 5), "malformed"),
    ],
    ids=["right", "prose", "wrong", "silent", "knew it", "guessed it", "malformed"],
)
def test_each_rule_drops_what_it_names(tmp_path, teacher, rule):
    right = AnswerFilter(AnswerConfig(), Ledger(tmp_path, "answers", 0))
    teacher.at = 0
    kept = asyncio.run(right(ROW, "q/0", made(teacher)))
    assert right.found["q/0"]["dropped"] == rule and kept == (not rule)
