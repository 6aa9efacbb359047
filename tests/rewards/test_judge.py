"""A judge endpoint that fails in every way: the affected rollouts are invalid and named, the rest are graded."""

import logging

import pytest

from tests.rewards.endpoint_stub import FAILURES, Stub
from tests.rewards.made_groups import group_of, scores


@pytest.fixture
def stub():
    made = Stub()
    yield made
    made.close()


def judge(stub, **settings):
    return {"judge": {"kind": "judge", "settings": {"url": stub.url, "model": "m", "retries": 1, **settings}}}


def test_every_failure_makes_its_rollout_invalid_with_a_reason_and_the_rest_are_graded(stub, caplog):
    group = group_of("fine", *[f"<{kind}>" for kind in FAILURES], "<think>x</think>fine too")
    with caplog.at_level(logging.WARNING):
        found = scores(judge(stub, attempt_s=30), group, timeout_s=4, retries=1)
    assert found[0].reward == found[-1].reward == pytest.approx((7 - 1) / 9) and found[0].reason == "judge: grade 7"
    for kind, score in zip(FAILURES, found[1:-1]):
        assert score.reward is None and score.reason.startswith("judge: "), kind
    reasons = dict(zip(FAILURES, (score.reason for score in found[1:-1])))
    assert "status 429" in reasons["429"] and "status 500" in reasons["500"] and "status 400" in reasons["400"]
    assert "no grade in 'I could not say.'" in reasons["nonsense"] and "2 attempts" in reasons["nonsense"]
    assert "not JSON" in reasons["no json"] and "another form" in reasons["other form"] and "another form" in reasons["nothing"]
    assert reasons["hang"] == "judge: TimeoutError: no answer in 4 s"
    assert f"waiting for g/{1 + FAILURES.index('hang')}" in caplog.text  # the log names what is waited for
    for kind in FAILURES:
        assert stub.asked[kind] == (1 if kind in ("400", "hang") else 2), kind  # bounded; the term does not try again on top


def test_a_judge_that_hangs_is_asked_again_when_an_attempt_has_its_own_limit(stub):
    (score,) = scores(judge(stub, attempt_s=0.3), group_of("<hang>"), timeout_s=10)
    assert score.reward is None and "timed out" in score.reason and stub.asked["hang"] == 2


def test_the_judge_reads_the_conversation_the_final_answer_and_fields_of_the_data(stub):
    template = "{conversation} | {answer} | {rubric} | {low}-{high} | {unknown}"
    group = group_of("<think>no</think>{rubric}", question="Why?", data={"rubric": "be brief"})
    scores(judge(stub, template=template, low=0, temperature=0.5), group)
    (body,) = stub.bodies
    assert body["messages"] == [{"role": "user", "content": "user: Why? | {rubric} | be brief | 0-10 | {unknown}"}]
    assert (body["model"], body["temperature"]) == ("m", 0.5)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [({"low": 3, "high": 3}, "high=3.0 must be more than low=3.0"), ({"pattern": "x"}, "must have one group, the grade")],
)
def test_bad_settings_are_refused(stub, settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        scores(judge(stub, **settings), group_of("x"))


def test_a_grade_outside_its_range_is_nonsense(stub):
    (score,) = scores(judge(stub, high=5), group_of("fine"))
    assert score.reward is None and "grade 7 is not within 1 and 5" in score.reason
