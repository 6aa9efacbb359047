"""Published solutions are accepted; with one operator changed they are not. The whole of it: make verify-judge."""

import asyncio
from collections import Counter

import pytest

from tools.verify_judge import changed, humaneval, judge_all, mbpp, mutants, whole

MBPP_EXCEPTIONS = {"MBPP/123"}  # takes 3.6 s of CPU, the limit is 3


def accepted(judge, work):
    """(how many of each verdict, what is not accepted)."""
    found = asyncio.run(judge_all(judge, work))
    return Counter(one.verdict for _, one in found), [(name, one) for name, one in found if one.verdict != "accepted"]


@pytest.mark.parametrize("name", ["HumanEval", "MBPP"])
def test_a_sample_of_published_solutions_is_accepted(shared_judge, shared_data, name):
    problems = list({"HumanEval": humaneval, "MBPP": mbpp}[name](shared_data / "code"))
    helpers = [one for one in problems if one[0] in ("HumanEval/32", "HumanEval/38", "HumanEval/50", "MBPP/126", "MBPP/124")]
    counts, others = accepted(shared_judge, whole([*problems[::15], *helpers]))
    assert not others and counts["accepted"] > 10


def test_a_sample_of_changed_solutions_is_rejected(shared_judge, shared_data):
    work = mutants(list(humaneval(shared_data / "code"))[::10])[::4]
    counts, others = accepted(shared_judge, work)
    assert not counts["infrastructure"] and len(others) >= 0.75 * len(work) > 10


@pytest.mark.slow
def test_all_published_solutions_are_accepted_and_most_changed_ones_are_not(shared_judge, shared_data):
    rows = list(humaneval(shared_data / "code"))
    assert accepted(shared_judge, whole(rows)) == ({"accepted": 164}, [])
    _, others = accepted(shared_judge, whole(list(mbpp(shared_data / "code"))))
    assert {name for name, _ in others} <= MBPP_EXCEPTIONS
    work = mutants(rows)
    counts, others = accepted(shared_judge, work)
    assert not counts["infrastructure"] and len(others) >= 0.85 * len(work)


def test_every_operator_is_changed_once():
    head, solution = "def f(a, b):\n", "    if a < b and not a == 0:\n        a += 1\n    return -a * b\n"
    programs = [source for _, source in changed(head, solution)]
    assert len(set(programs)) == 6 and all("def f(a, b)" in one for one in programs)
    assert sum("a <= b" in one for one in programs) == sum("a -= 1" in one for one in programs) == 1
