"""Cleaning keeps what a right solution can pass, raises limits that are too tight, and says by which rule the rest went."""

import asyncio
import json

import pytest

from megatron_nb.data.code_cleaning import CleaningConfig, clean
from megatron_nb.data.code_formats import Problem
from megatron_nb.sandbox.judge import Judge, Verdict
from megatron_nb.sandbox.pool import IsolationMissing, Pool


def io_tests(count):
    return [{"stdin": f"{number}\n", "stdout": f"{number + 1}\n"} for number in range(count)]


def told(**verdicts_by_test):
    """A made-up reference that says what its verdicts are: {"t3": "wrong answer"}; others are accepted after 0.1 s."""
    return json.dumps(verdicts_by_test)


class Said:
    """A judge that reads the verdicts off the program; `asked` keeps how it was asked."""

    def __init__(self):
        self.asked = []

    async def __call__(self, program, tests, limits):
        self.asked.append((program.source, limits))
        known = json.loads(program.source)
        found = []
        for test in tests:
            said = known.get(f"t{int(test.stdin)}", {})
            said = {"verdict": said} if isinstance(said, str) else said
            found.append(Verdict(**{"verdict": "accepted", "cpu_s": 0.1, "peak_memory_mb": 20, "detail": "why", **said}))
        return found


def cleaned(problem, judge=None, **settings):
    return asyncio.run(clean(problem, judge or Said(), CleaningConfig(**settings)))


def problem(*references, count=4, **more):
    return Problem("p", "s", io_tests(count), references=list(references), **more)


def rules(found):
    return {rule: count for rule, count in found.rules.items() if count}


def test_tests_that_the_reference_fails_go_and_are_told():
    found = cleaned(problem(told(t1="wrong answer", t2="runtime error"), public_tests=io_tests(2)))
    assert [test["stdin"] for test in found.problem.tests] == ["0\n", "3\n"]
    assert found.problem.public_tests == io_tests(1)  # the shown one that is gone is not shown either
    assert rules(found) == {"reference fails the test": 2}
    assert found.notes == ["test 1: wrong answer: why", "test 2: runtime error: why"]


def test_the_reference_that_passes_most_decides_and_stands_first():
    bad, good, unasked = told(t0="wrong answer", t1="wrong answer"), told(t3="wrong answer"), told()
    judge = Said()
    found = cleaned(problem(bad, good, unasked), judge, references=2)
    assert len(found.problem.tests) == 3 and found.problem.references == [good, bad, unasked]
    assert [source for source, _ in judge.asked] == [bad, good]
    judge = Said()
    assert len(cleaned(problem(told(), bad), judge).problem.tests) == 4 and len(judge.asked) == 1  # the first was perfect


def test_references_run_under_generous_limits():
    judge = Said()
    cleaned(problem(told(), time_limit_s=1.0, memory_limit_mb=64), judge, max_time_s=9, max_memory_mb=700)
    (_, limits), = judge.asked
    assert (limits.time_s, limits.memory_mb) == (9, 700)


def test_limits_without_margin_are_raised_and_others_stay():
    tight = told(t2={"cpu_s": 1.2, "peak_memory_mb": 100})
    found = cleaned(problem(tight, time_limit_s=2.0, memory_limit_mb=128), margin=2)
    assert (found.problem.time_limit_s, found.problem.memory_limit_mb) == (3, 200)
    assert rules(found) == {"time limit raised": 1, "memory limit raised": 1}
    found = cleaned(problem(tight, time_limit_s=2.5, memory_limit_mb=256), margin=2)
    assert (found.problem.time_limit_s, found.problem.memory_limit_mb) == (2.5, 256) and not rules(found)


@pytest.mark.parametrize(
    ("reference", "settings", "rule"),
    [
        (told(t1="time limit"), {}, "reference too slow"),
        (told(t0="wrong answer", t1="wrong answer", t2="runtime error", t3="memory limit"), {}, "reference fails every test"),
        (told(t0="wrong answer"), {"min_tests": 4}, "too few tests left"),
    ],
)
def test_a_problem_that_is_left_with_nothing_goes_with_its_rule(reference, settings, rule):
    found = cleaned(problem(reference), **settings)
    assert found.problem is None and found.rules[rule] == 1 and found.notes


def test_a_test_that_cannot_be_judged_is_broken_not_failed():
    found = cleaned(problem(told(t1="infrastructure")))
    assert rules(found) == {"test is broken": 1} and len(found.problem.tests) == 3


@pytest.mark.parametrize(("unchecked", "kept"), [("keep", True), ("drop", False)])
def test_a_problem_without_reference_is_counted_and_kept_or_not(unchecked, kept):
    found = cleaned(problem(), unchecked=unchecked)
    assert (found.problem is not None) == kept and rules(found) == {"no reference": 1}


def test_tests_given_twice_count_once_and_many_are_thinned_out_evenly():
    found = cleaned(Problem("p", "s", io_tests(3) + io_tests(3), references=[told()]))
    assert found.problem.tests == io_tests(3) and rules(found) == {"test given twice": 3}
    found = cleaned(problem(told(), count=10), max_tests=5)
    assert [int(test["stdin"]) for test in found.problem.tests] == [0, 2, 4, 6, 8]
    assert rules(found) == {"test thinned out": 5}


@pytest.mark.parametrize("settings", [{"margin": 0}, {"max_tests": 0}, {"unchecked": "maybe"}, {"references": 0}])
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        CleaningConfig(**settings)


def test_real_programs_are_cleaned_in_the_sandbox():
    try:
        pool = Pool(2)
    except IsolationMissing as missing:
        pytest.skip(str(missing))
    wrong, slow = {"stdin": "5\n", "stdout": "7\n"}, {"stdin": "1000000\n", "stdout": "1000001\n"}
    reference = "n = int(input())\nfor _ in range(n // 1000000 * 3000000):\n    pass\nprint(n + 1)\n"
    given = Problem("p", "s", [*io_tests(2), wrong, slow], references=["syntax error", reference], time_limit_s=0.02)
    with pool:
        found = cleaned(given, Judge(pool).judge)
    assert found.problem.tests == [*io_tests(2), slow] and found.problem.time_limit_s >= 1
    assert found.problem.references[0] == reference
    assert rules(found) == {"reference fails the test": 1, "time limit raised": 1}
