"""Multiple choice: every published form, options shuffled, answers read from words."""

import asyncio
import json
import re
import time

import pytest

from megatron_nb.data.rows import BadRow
from megatron_nb.evals.arena import style_of
from megatron_nb.evals.choice import letter_of, read_choice
from megatron_nb.evals.harness import attempt
from megatron_nb.evals.instruction_rules import follows
from megatron_nb.evals.kinds import make_task
from megatron_nb.rollout.engine import Sampling
from tests.evals.scripted_asker import ScriptedAsker

OPTIONS = ["red", "green", "blue", "grey"]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "choices": OPTIONS, "answer": 2},
        {"question": "q", "options": OPTIONS, "answer": "C", "answer_index": 2},
        {"question": "q", "choices": OPTIONS, "answer": "blue"},
        {"question": "q", "choices": {"text": OPTIONS, "label": ["1", "2", "3", "4"]}, "answerKey": "3"},
        {"question": {"stem": "q", "choices": [{"text": one, "label": label} for one, label in zip(OPTIONS, "ABCD")]},
         "answerKey": "C"},
    ],
    ids=["mmlu", "mmlu-pro", "text", "arc", "arc-original"],
)  # fmt: skip
def test_every_form_of_a_row_is_read(row):
    assert read_choice(row, "f:1") == ("q", OPTIONS, 2)


def test_thousands_of_empty_lines_are_read_in_no_time():
    text, began = "x" + "\n" * 20_000 + "y", time.process_time()
    assert letter_of(text, OPTIONS) == "" and style_of(text)["lists"] == 0
    assert not follows("detectable_format:number_bullet_lists", text, {"num_bullets": 1})
    assert time.process_time() - began < 0.5


def test_a_label_names_its_place_also_where_options_are_letters_or_numbers():
    numbers = {"question": "q", "choices": {"text": ["3", "1", "2"], "label": ["1", "2", "3"]}, "answerKey": "3"}
    assert read_choice(numbers, "f:1")[2] == 2
    assert read_choice({"question": "q", "choices": ["AB", "B", "A", "0"], "answer": "A"}, "f:1")[2] == 0
    assert read_choice({"question": "q", "choices": ["7", "1", "2"], "answer": "1"}, "f:1")[2] == 1  # a text before a place


def test_gpqa_is_read_with_its_right_answer_first():
    row = {"Question": "q", "Correct Answer": "blue\n", **{f"Incorrect Answer {n}": OPTIONS[n] for n in (1, 3)}}
    assert read_choice(row, "f:1") == ("q", ["blue", "green", "grey"], 0)


@pytest.mark.parametrize(
    "row",
    [{"question": "q", "choices": OPTIONS, "answer": 4}, {"question": "q", "choices": ["a"], "answer": 0},
     {"question": "q", "choices": OPTIONS}, {"choices": OPTIONS, "answer": 0}],
    ids=["no such place", "one option", "no answer", "no question"],
)  # fmt: skip
def test_rows_of_another_form_are_refused_with_their_place(row):
    with pytest.raises(BadRow, match="f:1: "):
        read_choice(row, "f:1")


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: C", "C"), ("The answer is (B).", "B"), ("**Answer:** D", "D"), ("Answer: A. No, wait.\nAnswer: B", "B"),
        ("answer is B, because option C is wrong.", "B"), (r"Therefore \boxed{C}.", "C"), (r"\boxed{\text{B}}", "B"),
        ("Option A is wrong.\n\nC", "C"), ("I choose option D", "D"), ("The answer is a hard one.", ""), ("Answer: E", ""),
        ("**Answer**: B", "B"), ("Answer: $B$", "B"), ("Answer: `B`", "B"), (r"\boxed{\textbf{B}}", "B"),
        ("Answer\uff1aB", "B"), (r"Answer: \text{B}", "B"), ("The correct option is B.", "B"), ('Answer: "B"', "B"),
        ("The answer is *a* word.", ""),
        ("blue", "C"), ("", ""), ("It must be\n**blue**.", "C"), ("A man walks in.", ""),
    ],
)  # fmt: skip
def test_the_letter_is_read_where_the_answer_stands(text, letter):
    assert letter_of(text, OPTIONS) == letter


def evaluate(tmp_path, rows, say, **settings):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"kind": "choice", "path": str(tmp_path / "rows.jsonl"), **settings}
    task = make_task("c", settings, Sampling(max_tokens=64, temperature=0.0))
    task.check()
    asker = ScriptedAsker(say)

    async def every():
        pairs = [(item, index) for item in task.items() for index in range(task.samples)]
        return await asyncio.gather(*(attempt(task, item, asker, index) for item, index in pairs))

    outcomes = asyncio.run(every())
    return asker, outcomes, task.summarise(outcomes)


ROWS = [{"id": f"r{n}", "question": f"q{n}", "choices": OPTIONS, "answer": n % 4} for n in range(40)]


def test_a_favourite_letter_earns_chance_and_one_who_knows_earns_all_wherever_options_stand(tmp_path):
    _, _, told = evaluate(tmp_path, ROWS, lambda messages, tools: "Answer: A", samples=5)
    assert told["accuracy"] == pytest.approx(0.25, abs=0.07) and told["favourite"] == 1 and told["consistent"] < 0.2

    def knows(messages, tools):
        text = messages[-1]["content"]
        wanted = OPTIONS[int(re.match(r"q(\d+)", text)[1]) % 4]
        return f"Answer: {re.search(rf'^([A-D])\. {wanted}$', text, re.MULTILINE)[1]}"

    asker, outcomes, told = evaluate(tmp_path, ROWS, knows, samples=5)
    assert told["accuracy"] == told["consistent"] == told["read"] == 1 and told["favourite"] < 0.4
    shown = {messages[-1]["content"] for messages in asker.asked if messages[-1]["content"].startswith("q0\n")}
    assert len(shown) > 2  # another order in most attempts
    again, _, _ = evaluate(tmp_path, ROWS, knows, samples=5)
    assert again.asked == asker.asked  # and the same orders in every run


def test_options_that_speak_of_others_stay_where_they_are(tmp_path):
    for last in ("All of the above", "A and B"):
        row = {"question": "q", "choices": ["one", "two", "three", last], "answer": 3}
        _, _, told = evaluate(tmp_path, [row], lambda messages, tools: "Answer: D", samples=8)
        assert told["accuracy"] == 1


def test_the_same_question_twice_without_shuffle_and_temperature_is_refused(tmp_path):
    with pytest.raises(ValueError, match="would be the same answer"):
        evaluate(tmp_path, ROWS, lambda messages, tools: "A", samples=2, shuffle=False)
