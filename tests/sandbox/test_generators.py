"""Inputs of growing size keep what the tests showed, and a generator that is no good is refused with the reason."""

from __future__ import annotations

import asyncio

import pytest

from megatron_nb.sandbox.generators import from_tests, parse, validated, written


def made(generator, n):
    space: dict = {}
    exec(generator, space)
    return space["make"](n)


def calls(*arguments):
    return from_tests([{"call": "f", "args": list(a), "expected": None} for a in arguments])


def test_a_list_of_numbers_is_lengthened_within_its_range():
    (items,) = made(calls([[5, 3, 5, 9]], [[2, 2]]), 500)
    assert len(items) == 500 and min(items) >= 2 and max(items) <= 9 and len(set(items)) > 3


def test_sorted_distinct_and_index_lists_stay_so():
    (rising,) = made(calls([[1, 4, 9]], [[2, 3, 3, 8]]), 300)
    assert rising == sorted(rising) and len(rising) == 300
    (distinct,) = made(calls([[10, -3, 7]], [[8, 2]]), 300)
    assert len(set(distinct)) == 300
    (index,) = made(calls([[1, 0, 3, 3]], [[0, 0, 1]]), 300)
    assert all(0 <= x < 300 for x in index) and max(index) > 100


def test_a_number_that_is_the_length_of_a_list_follows_it_and_others_stay():
    n, items, k = made(calls([3, [1, 2, 2], 2], [4, [9, 9, 1, 1], 2]), 64)
    assert (n, len(items), k) == (64, 64, 2)


def test_numbers_alone_grow_and_strings_keep_their_letters():
    assert made(calls([5], [12]), 1000) == [1000]
    (text,) = made(calls(["abba"], ["c"]), 200)
    assert len(text) == 200 and set(text) <= set("abc")


def test_grids_grow_both_ways_and_lists_of_pairs_one():
    (grid,) = made(calls([[[1, 0, 1], [0, 0, 1], [1, 1, 1]]]), 20)
    assert len(grid) == 20 and {len(row) for row in grid} == {20} and {c for row in grid for c in row} == {0, 1}
    (pairs,) = made(calls([[[1, 3], [2, 6], [8, 10]]]), 50)
    assert len(pairs) == 50 and {b - a for a, b in pairs} <= {2, 4}


@pytest.mark.parametrize("arguments", [([True],), ([[]],), ([{"a": 1}],), ([3.5],), ([7],), ([[1, 2]], [[1], 2])])
def test_what_shows_no_scale_is_none(arguments):
    assert calls(*arguments) is None


def test_stdin_of_numbers_is_scaled_in_its_own_layout():
    text = made(from_tests([{"stdin": "3\n1 2 2\n", "stdout": "5"}, {"stdin": "2\n7 7\n", "stdout": "9"}]), 40)
    first, second = text.splitlines()
    assert first == "40" and len(second.split()) == 40
    rows = made(from_tests([{"stdin": "3\n1 2\n2 9\n4 4\n"}, {"stdin": "4\n1 2\n2 9\n4 4\n1 1\n"}]), 40).splitlines()
    assert rows[0] == "40" and len(rows) == 41 and all(len(row.split()) == 2 for row in rows[1:])
    assert made(from_tests([{"stdin": "17\n"}, {"stdin": "4\n"}]), 99) == "99\n"


@pytest.mark.parametrize("stdin", ["", "2 2\n#.\n.#\n", "add 1\nadd 2\n", "2\n3\n1 2 3\n1\n4\n"])
def test_stdin_of_another_layout_is_none(stdin):
    assert from_tests([{"stdin": stdin}]) is None


def test_no_tests_give_no_generator():
    assert from_tests([]) is None and from_tests([{"code": "assert True"}]) is None


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("Sure:\n```python\ndef make(n):\n    return [n]\n```\nDone.", True),
        ("def make(n):\n    return [n]\n", True),
        ("```\nimport random\ndef make(n, low=1):\n    return [low]\n```", True),
        ("```python\ndef generate(n):\n    return [n]\n```", False),
        ("```python\ndef make():\n    return []\n```", False),
        ("```python\ndef make(n) return\n```", False),
        ("", False),
    ],
)
def test_the_generator_in_an_answer_is_found(answer, found):
    assert (parse(answer) is not None) == found


REFERENCE = "def f(a):\n    return sum(a) // len(a)\n"


@pytest.mark.parametrize(
    ("generator", "reason"),
    [
        ("def make(n):\n    return [list(range(n))]\n", ""),
        ("def make(n):\n    return [[1, 2, 3]]\n", "does not grow"),
        ("def make(n):\n    return list(range(n))\n", "the reference solution fails at n=8"),
        ("def make(n):\n    return [[0] * (n - 64)]\n", "does not grow"),
        ("def make(n):\n    raise KeyError(n)\n", "make(n) fails: runtime error"),
    ],
)
def test_a_generator_must_grow_and_the_reference_must_run_on_it(shared_pool, generator, reason):
    said = asyncio.run(validated(shared_pool, generator, REFERENCE, "f"))
    assert (said == "") if not reason else (reason in said), said


def test_a_model_is_told_why_its_generator_was_refused(shared_pool):
    prompts = []

    async def ask(prompt):
        prompts.append(prompt)
        length = "3" if len(prompts) == 1 else "n"
        return f"```python\ndef make(n):\n    return [[1] * {length}]\n```"

    generator, reason = asyncio.run(written(ask, shared_pool, "The mean of a list.", "f", REFERENCE))
    assert reason == "" and made(generator, 5) == [[1] * 5]
    assert len(prompts) == 2 and "does not grow" in prompts[1] and "refused" not in prompts[0]
