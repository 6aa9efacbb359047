"""What bench_judge times are programs that are right, in as many shapes as it says."""

import contextlib
import io
import sys

import pytest

from tools.bench_judge import SMALL, TESTS, small_programs


@pytest.mark.parametrize("number", range(len(SMALL)))
def test_the_small_programs_pass_their_tests_and_no_two_sources_are_equal(number, monkeypatch):
    made = small_programs(2 * len(SMALL), "round 1")
    assert len({program.source for program, _ in made}) == len(made)
    program, tests = made[number]
    assert len(tests) == TESTS and len({test.stdin for test in tests}) > TESTS // 2
    for test in tests:
        monkeypatch.setattr(sys, "stdin", io.StringIO(test.stdin))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(program.source, {})
        assert printed.getvalue() == test.stdout
