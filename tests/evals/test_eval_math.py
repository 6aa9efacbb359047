"""Mathematics: graded as mathematics, votes in one spelling, what cannot be compared."""

import asyncio
import json

import pytest

from megatron_nb.data.rows import BadRow, raw_rows
from megatron_nb.evals import math
from megatron_nb.evals.harness import attempt
from megatron_nb.evals.kinds import make_task
from megatron_nb.evals.math_grade import grade
from megatron_nb.rollout.engine import Sampling
from tests.evals.scripted_asker import ScriptedAsker

SAMPLING = Sampling(max_tokens=512, temperature=0.8)


@pytest.mark.parametrize(
    ("text", "reference", "right", "spelling"),
    [
        (r"so \boxed{\frac12}", "0.5", 1, "1/2"), (r"\boxed{0.50}", r"\frac{1}{2}", 1, "1/2"), ("It is 7.", "#### 7", 1, "7"),
        (r"\boxed{x+1}", "1+x", 1, "x + 1"), (r"\boxed{8}", "7", 0, "8"), ("I give up", "7", 0, ""),
    ],
)  # fmt: skip
def test_an_answer_is_graded_and_spelled_as_mathematics(text, reference, right, spelling):
    assert grade(text, reference, False)[:2] == (right, spelling)


def test_an_answer_outside_a_box_counts_only_where_none_is_asked():
    assert grade("It is 7.", "7", True)[:2] == (0, "") and grade(r"It is \boxed{7}.", "7", True)[:2] == (1, "7")


def evaluate(path, say, **settings):
    task = make_task("m", {"kind": "math", "path": str(path), **settings}, SAMPLING)

    async def every():
        await task.ready()
        pairs = [(item, index) for item in task.items() for index in range(task.samples)]
        return await asyncio.gather(*(attempt(task, item, ScriptedAsker(say), index) for item, index in pairs))

    try:
        outcomes = asyncio.run(every())
    finally:
        task.close()
    return outcomes, task.summarise(outcomes)


def test_gsm8ks_own_solutions_are_right_and_others_wrong(shared_data):
    path = shared_data / "math" / "gsm8k_test.jsonl.gz"
    rows = [json.loads(raw) for _, raw in raw_rows(path)]
    solutions = {row["question"]: row["answer"] for row in rows}
    wrong = {rows[place]["question"] for place in range(0, len(rows), 3)}

    def say(messages, tools):
        question = messages[-1]["content"].partition("\n\nReason step by step")[0]
        return "I say #### 123456789" if question in wrong else solutions[question]

    outcomes, told = evaluate(path, say, limit=40)
    asked = [rows[int(one.item.rpartition(":")[2]) - 1]["question"] in wrong for one in outcomes]
    assert [one.score for one in outcomes] == [float(not bad) for bad in asked] and 0 < sum(asked) < 40
    assert told["avg@1"] == 1 - sum(asked) / 40 and told["read"] == 1 and "maj@1" not in told


def test_votes_of_equal_answers_are_counted_together(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "half?", "answer": "0.5"}\n')
    said = iter([r"\boxed{\frac12}", r"\boxed{3}", r"\boxed{0.5}", r"\boxed{4}", "none", r"\boxed{\frac{2}{4}}"])
    outcomes, told = evaluate(tmp_path / "rows.jsonl", lambda messages, tools: next(said), samples=6)
    assert told["avg@6"] == 0.5 and told["maj@6"] == 1 and told["read"] == pytest.approx(5 / 6)


def test_an_answer_that_can_never_be_compared_is_wrong_and_one_without_reference_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(math, "CPU_S", 1)
    (tmp_path / "rows.jsonl").write_text('{"question": "big?", "answer": "1"}\n')
    outcomes, told = evaluate(tmp_path / "rows.jsonl", lambda messages, tools: r"\boxed{7^{7^{7^{7^{7}}}}}")
    assert outcomes[0].score == 0 and "cannot be compared" in outcomes[0].reason
    (tmp_path / "rows.jsonl").write_text('{"question": "big?", "answer": "\\\\boxed{}"}\n')
    outcomes, _ = evaluate(tmp_path / "rows.jsonl", lambda messages, tools: "1")
    assert outcomes[0].score is None and "cannot be read as mathematics" in outcomes[0].reason
    (tmp_path / "rows.jsonl").write_text('{"question": "big?"}\n')
    with pytest.raises(BadRow, match=r"rows.jsonl:1: it has no 'answer'"):
        evaluate(tmp_path / "rows.jsonl", lambda messages, tools: "")
