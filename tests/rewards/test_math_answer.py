"""Mathematics: equal answers written in different ways, real reference solutions, and what never ends."""

import gzip
import json

import pytest

from megatron_nb.rewards.answer import MathAnswer
from tests.rewards.made_groups import group_of, scores


def verdict(reference, text, **settings):
    group = group_of(text, data={"answer": reference})
    return MathAnswer(**settings).score_rollout(group.prompt, group.rollouts[0])


@pytest.mark.parametrize(
    ("reference", "text", "right"),
    [
        ("18", "so \\boxed{18}.", 1),
        ("18", "It is 17, no: \\boxed{17} or rather \\boxed{18}", 1),
        ("18", "The answer is 18.", 1),
        ("18", "The answer is 17.", 0),
        ("16 - 7 = 9\n#### 1,018", "#### 1018", 1),
        ("#### 18", "she makes 18 dollars\n#### $18", 1),
        ("#### 18", "18 is tempting\n#### 20", 0),
        ("\\frac{1}{2}", "\\boxed{0.5}", 1),
        ("$\\frac{1}{2}$", "\\boxed{\\frac{2}{4}}", 1),
        ("(1,2)", "\\boxed{(1, 2)}", 1),
        ("(1,2)", "\\boxed{(2, 1)}", 0),
        ("x^2+1", "\\boxed{1+x^2}", 1),
        ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", 1),
        ("5", "\\boxed{x=5}", 1),
        ("$70,000", "He made $70,000.", 1),
        ("18", "<think>\\boxed{18}</think>\\boxed{3}", 0),  # the thinking is not the answer
        ("18", "<think>\\boxed{18}", 0),
        ("18", "", 0),
        ("18", "\\boxed{}", 0),
        ("18", "\\boxed{@#!}", 0),
        ("18", "\\boxed{18", 0),  # never closed: it was cut
        ("\\frac{1}{2}", "first \\boxed{1}, then \\boxed{\\frac{1}{2}} is it", 1),
        ("no solution", "\\boxed{no solution}", 1),
    ],
)
def test_answers_are_compared_as_mathematics(reference, text, right):
    assert verdict(reference, text).reward == right


def test_an_answer_outside_a_box_is_wrong_when_a_box_is_asked_for():
    assert verdict("18", "18", boxed=True).reward == 0 and verdict("18", "\\boxed{18}", boxed=True).reward == 1


@pytest.mark.parametrize("data", [{}, {"answer": ""}])
def test_a_reference_that_cannot_be_read_is_invalid(data):
    (score,) = scores({"math": {"kind": "math"}}, group_of("18", data=data))
    assert score.reward is None and score.reason.startswith("math: ValueError: the ")


def test_a_power_tower_is_invalid_by_the_deadline():
    group = group_of("\\boxed{7^{7^{7^{7}}}}", "\\boxed{18}", data={"answer": "18"})
    tower, right = scores({"math": {"kind": "math"}}, group, timeout_s=8, workers=2)  # sympy's first formula takes its time
    assert tower.reward is None and "math: TimeoutError: no answer in 8 s" in tower.reason
    assert right.reward == 1


def test_reference_answers_of_gsm8k_are_right_and_those_of_the_next_question_wrong(shared_data):
    with gzip.open(shared_data / "math" / "gsm8k_test.jsonl.gz", "rt") as file:
        rows = [json.loads(line)["answer"] for line in file][:400]
    numbers = [row.split("####")[1].strip() for row in rows]
    for row, number, other in zip(rows, numbers, numbers[1:] + numbers[:1]):
        assert verdict(row, row).reward == 1, row
        assert verdict(number, f"<think>\\boxed{{{other}}}</think>So it is \\boxed{{{number}}}.").reward == 1, row
        assert verdict(row, f"#### {other}").reward == (other.replace(",", "") == number.replace(",", "")), row
