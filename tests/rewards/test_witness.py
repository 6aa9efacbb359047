"""The second witness behind an endpoint that fails in every way: a majority, unknown, or no verdict; never a guess."""

import asyncio
import logging
import time

import pytest

from megatron_nb.client import ClientConfig
from megatron_nb.rewards.witness import (
    Agreement,
    Told,
    Witness,
    WitnessConfig,
    WitnessFailed,
    majority_of,
    question,
    read_answer,
    without_claims,
)
from tests.rewards.endpoint_stub import Stub

FAILING = ("429", "500", "400", "nonsense", "nothing", "no json", "other form", "hang up")


@pytest.fixture
def stub():
    made = Stub()
    made.said = ["O(n)"]
    yield made
    made.close()


def witness(stub, answers=5, retries=1, timeout_s=20.0, cache=None, **settings):
    endpoint = ClientConfig(stub.url, "m", retries=retries, timeout_s=timeout_s, pause_s=0.01, cache=cache)
    return Witness(WitnessConfig(endpoint, answers=answers, **settings))


def told(asking: Witness, *programs: str) -> list[Told]:
    async def all_of_them():
        try:
            return await asyncio.gather(*map(asking.complexity, programs))
        finally:
            await asking.close()

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (["O(n)"] * 5, "n"),
        (["O(n^2)", "O(n)", "O(N**2)", "O(n)", "quadratic"], "n^2"),
        (["O(n)", "O(n)", "O(n^2)", "O(n^2)", "O(1)"], "unknown"),  # a tie
        (["O(n)", "O(n)", "O(1)", "O(log n)", "O(2^n)"], "unknown"),  # the most, but no majority
        (["O(n*m)", "O(n*m)", "unknown", "O(n)", "O(n)"], "unknown"),  # what is not on the ladder is a vote for unknown
    ],
)
def test_the_majority_of_all_answers_counts_and_a_tie_is_unknown(stub, said, expected):
    stub.said = said
    (found,) = told(witness(stub), "x = 1")
    assert found.complexity == expected


def test_each_answer_is_a_request_of_its_own_at_a_temperature(stub):
    stub.said = ["O(n)", "O(1)", "O(n)", "O(1)"]
    told(witness(stub, answers=4, temperature=0.6, max_tokens=9), "x = 1")
    assert sorted(body["seed"] for body in stub.bodies) == [0, 1, 2, 3]
    assert {(body["temperature"], body["max_tokens"], body["model"]) for body in stub.bodies} == {(0.6, 9, "m")}


@pytest.mark.parametrize("kind", FAILING)
def test_an_endpoint_that_fails_gives_no_verdict_after_bounded_attempts(stub, kind):
    with pytest.raises(WitnessFailed, match="3 of 3 answers could not be had") as caught:
        told(witness(stub, answers=3), f"x = '<{kind}>'")
    assert stub.asked[kind] == (3 if kind == "400" else 6)
    assert isinstance(caught.value, OSError)


def test_a_hanging_endpoint_gives_no_verdict_in_bounded_time(stub):
    began = time.monotonic()
    with pytest.raises(WitnessFailed, match="timed out"):
        told(witness(stub, answers=2, timeout_s=0.3), "x = '<hang>'")
    assert time.monotonic() - began < 10 and stub.asked["hang"] == 4


def test_one_program_that_hangs_does_not_hold_up_the_others(stub):
    async def both():
        asking = witness(stub, answers=1)
        stuck = asyncio.ensure_future(asking.complexity("x = '<hang>'"))
        try:
            return await asyncio.wait_for(asking.complexity("x = 1"), 10)
        finally:
            stuck.cancel()
            for task in asking._asking.values():
                task.cancel()
            await asking.close()

    assert asyncio.run(both()).complexity == "n"


def test_missing_answers_that_cannot_change_the_result_are_not_waited_for(stub):
    stub.said = ["O(n)", "<hang>", "O(n)", "<500>", "O(n)"]
    began = time.monotonic()
    (found,) = told(witness(stub, retries=0), "x = 1")
    assert found.complexity == "n" and time.monotonic() - began < 10


def test_missing_answers_that_could_decide_make_it_fail_not_unknown(stub):
    stub.said = ["O(n)", "O(n)", "O(1)", "O(1)", "<500>"]
    with pytest.raises(WitnessFailed, match="1 of 5 answers could not be had"):
        told(witness(stub, retries=0), "x = 1")


def test_the_same_program_is_asked_about_once_also_at_the_same_time_and_whatever_its_comments(stub):
    asking = witness(stub, answers=3)
    assert told(asking, "x = 1", "x = 1  # O(1)", "x  =  1")[1].complexity == "n"
    assert told(asking, "x = 1")[0].complexity == "n"
    assert len(stub.bodies) in (2, 3)  # two that agree may settle it before the third is asked for


def test_failures_are_not_remembered(stub):
    asking = witness(stub, answers=1, retries=0)
    stub.said = ["<500>"]
    with pytest.raises(WitnessFailed):
        told(asking, "x = 1")
    stub.said = ["O(n)"]
    assert told(asking, "x = 1")[0].complexity == "n"


def test_the_cache_folder_keeps_every_one_of_the_answers_over_processes(stub, tmp_path):
    stub.said = ["O(n)", "O(1)", "O(n)"]
    assert told(witness(stub, answers=3, cache=tmp_path), "x = 1")[0].complexity == "n"
    stub.said, count = ["O(2^n)"], len(stub.bodies)
    assert told(witness(stub, answers=3, cache=tmp_path), "x = 1")[0].complexity == "n"
    assert len(stub.bodies) <= count + 1 <= 4  # an answer that was not needed may be asked for


def test_at_most_so_many_requests_are_under_way(stub):
    asking = Witness(WitnessConfig(ClientConfig(stub.url, concurrency=2), answers=1))  # none that is given up half way
    told(asking, *(f"x = {number}" for number in range(24)))
    assert stub.most_at_once == 2


def test_claims_in_comments_docstrings_and_long_texts_do_not_reach_the_model():
    program = '"""O(1), honestly"""\nimport math\n\ndef f(n):\n    """Runs in O(1)."""\n    # O(1)\n    s = "say O(1) " * n\n'
    program += f"    return '{'Complexity: O(1). ' * 9}'\n\ndef g():\n    'O(1)'\n"
    asked = question(program)
    assert "honestly" not in asked and "Runs" not in asked and "# O(1)" not in asked and asked.count("Complexity: O(1)") <= 3
    assert "def f(n):" in asked and "def g():\n    pass" in asked


def test_a_program_that_python_cannot_read_is_shown_as_it_is():
    for program in ("int main() { return 0; }  // O(1)", "def f(:\n", "x = " + "(" * 900 + "1" + ")" * 900, "x\0y"):
        assert without_claims(program) == program
    assert "{language}" in question("x = '{language}'") and "```cpp\nint x;" in question("int x;", "cpp")


def test_an_endless_program_is_unknown_without_asking(stub):
    assert told(witness(stub), "x = 1\n" * 9000)[0] == Told("unknown") and not stub.bodies


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("Two loops.\nComplexity: O(n^2)", "n^2"),
        ("Complexity: O(1)\nNo, wait.\n**Complexity:** `O(n log n)`.", "n log n"),
        ("<think>Complexity: O(1)</think>complexity: $O(N^2)$", "n^2"),
        ("Complexity: O(n * m)", "unknown"),
        ("Complexity: hard to say", "unknown"),
    ],
)
def test_the_last_complexity_line_of_the_final_answer_is_read(reply, expected):
    assert read_answer(reply) == expected


def test_a_reply_without_the_line_is_no_answer():
    with pytest.raises(ValueError, match="no line `Complexity"):
        read_answer("It is O(n).")


@pytest.mark.parametrize(
    ("votes", "answers", "majority", "expected"),
    [
        (["n", "n", "n"], 5, 0.5, "n"), (["n", "n"], 4, 0.5, None), (["n", "n", "1", "1"], 4, 0.5, "unknown"),
        (["n"] * 3 + ["1"] * 2, 5, 0.6, "unknown"), ([], 3, 0.5, None), (["n"], 1, 0.5, "n"), (["n", "1"], 3, 0.5, None),
        (["n", "1", "n^2"], 4, 0.5, "unknown"),
    ],
)  # fmt: skip
def test_a_majority_is_decided_as_soon_as_the_missing_ones_cannot_change_it(votes, answers, majority, expected):
    assert majority_of(votes, answers, majority) == expected


def test_two_witnesses_must_name_one_class_and_differences_are_logged(caplog):
    both = Agreement()
    with caplog.at_level(logging.WARNING):
        verdicts = [both.agree(a, b, "r7") for a, b in (("n", "n"), ("n", "n^2"), ("unknown", "n"), ("n", "unknown"))]
    assert verdicts == ["n", "unknown", "unknown", "unknown"]
    assert [record.getMessage() for record in caplog.records] == ["r7: the costs say n, the model says n^2: unknown"]
    assert both.metrics() == {
        "witnesses_agree": 0.25, "witnesses_differ": 0.25, "empirical_unknown": 0.25, "witness_unknown": 0.25, "witnessed": 4.0,
    }  # fmt: skip
    assert Agreement().agree("unknown", "unknown") == "unknown"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"answers": 0}, "at least 1"), ({"majority": 0.4}, "two classes cannot both"),
        ({"temperature": 0.0}, "would be equal"),
        ({"template": "what?"}, "must hold {program}"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        WitnessConfig(**settings)


def test_without_an_endpoint_there_is_no_witness():
    with pytest.raises(ValueError, match="needs an endpoint"):
        Witness(WitnessConfig())
