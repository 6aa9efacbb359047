"""Dialogues judged by questions of yes or no."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from megatron_nb.evals.task import Outcome
from tests.evals.scripted_asker import ScriptedAsker, bodies, endpoint, outcomes, task_of, told

TALK = [{"role": "user", "content": "I never eat nuts."}, {"role": "assistant", "content": "<think>hm</think>Noted."},
        {"role": "user", "content": "A snack?"}]  # fmt: skip
ROWS = [
    {"QUESTION_ID": "a", "AXIS": "MEMORY", "CONVERSATION": TALK, "TARGET_QUESTION": "Is it free of nuts?",
     "PASS_CRITERIA": "YES"},
    {"QUESTION_ID": "b", "AXIS": "MEMORY", "CONVERSATION": TALK, "TARGET_QUESTION": "Are there nuts?", "PASS_CRITERIA": "NO"},
    {"id": "c", "axis": "ADVERSARIAL", "messages": TALK[-1:], "question": ["Is it free of nuts?", "Is it a snack?"]},
]  # fmt: skip


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def judge(messages):
    """Reads the answer in its frame, and the question."""
    text = messages[-1]["content"]
    answer = re.search(r"Answer:\n-+\n(.*?)\n-+", text, re.DOTALL)[1]
    yes = {"Is it free of nuts?": "nuts" not in answer, "Are there nuts?": "nuts" in answer, "Is it a snack?": True}
    return f"Because.\nVerdict: {'YES' if yes[re.search('Question about the answer: (.*)', text)[1]] else 'NO'}"


@pytest.mark.parametrize(
    ("said", "expected"),
    [("An apple.", (1.0, 1.0, 1.0)), ("Salted nuts!", (0.0, 0.0, 0.0)), ("<think>nuts?</think>An apple.", (1.0, 1.0, 1.0))],
    ids=["right", "wrong", "only thought of"],
)
def test_an_answer_passes_when_every_verdict_is_the_wanted_one(tmp_path, said, expected):
    with endpoint(judge) as stub:
        task = task_of("rubric", path=write(tmp_path / "r.jsonl", ROWS), judge=told(stub.url))
        found = outcomes(task, ScriptedAsker(lambda messages, tools: said))
        assert tuple(outcome.score for outcome in found) == expected
        assert len(bodies(stub)) == 4 and not any("hm" in json.dumps(body) for body in bodies(stub))


def test_the_headline_is_the_mean_over_axes_not_over_dialogues(tmp_path):
    said = iter(["Salted nuts!", "Salted nuts!", "An apple."])
    with endpoint(judge) as stub:
        task = task_of("rubric", path=write(tmp_path / "r.jsonl", ROWS), judge=told(stub.url))
        scores = task.summarise(outcomes(task, ScriptedAsker(lambda messages, tools: next(said))))
    assert (scores["axis_MEMORY"], scores["axis_ADVERSARIAL"], scores["mean_of_axes"]) == (0.0, 1.0, 0.5)
    assert scores["mean_of_axes_low"] <= 0.5 <= scores["mean_of_axes_high"]


def test_more_attempts_at_the_same_dialogues_do_not_narrow_the_bounds(tmp_path):
    rows = [ROWS[0] | {"QUESTION_ID": str(number)} for number in range(6)]
    task = task_of("rubric", path=write(tmp_path / "r.jsonl", rows), judge=told("http://127.0.0.1:9"))
    once = [Outcome(str(number), 0, float(number < 3), "done") for number in range(6)]
    many = [dataclasses.replace(one, index=index) for index in range(8) for one in once]
    assert task.summarise(many) == task.summarise(once)


@pytest.mark.parametrize(
    "row",
    [{"messages": TALK}, {"messages": TALK[:2], "question": "Is it?"}, {"messages": TALK, "question": "?", "pass": "MAYBE"}],
    ids=["no question", "no user's turn", "no verdict"],
)  # fmt: skip
def test_a_bad_row_is_named_with_its_line(tmp_path, row):
    with pytest.raises(ValueError, match=r"r\.jsonl:1"):
        task_of("rubric", path=write(tmp_path / "r.jsonl", [row]), judge=told("http://127.0.0.1:9")).items()


def test_a_judge_without_room_for_a_verdict_is_refused_before_any_work():
    with pytest.raises(ValueError, match="judge_tokens=0 must be at least 1"):
        task_of("rubric", path="r.jsonl", judge=told("http://127.0.0.1:9"), judge_tokens=0)
