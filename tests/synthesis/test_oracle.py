"""The oracle: it copies what the tools say, and nothing else; it errs in ways that a critic drops; a seed decides its way."""

import asyncio
from collections import Counter

import pytest

from megatron_nb.rewards.answer_search import answer_of
from megatron_nb.rewards.critic_rules import judge_by_rules
from megatron_nb.rewards.critic_steps import Task, steps_of
from megatron_nb.synthesis import oracle
from megatron_nb.synthesis.oracle import ERRORS, UNKNOWN, Oracle
from megatron_nb.synthesis.trajectories import AttemptConfig, attempt
from tests.synthesis.scripted_teacher import PAGES, ROW, toolbox

QUOTED = {
    **ROW, "answer_evidence": "Its river is the Dunmere, which floods in spring.",
    "clues": ["town in the hills", "bridge was built by ___ in", "was born in ___ and", "river is the ___ , which"],
}  # fmt: skip
DESCRIBED = {**QUOTED, "clues": ["a small town in some hills", "its bridge was built by a certain name", "an engineer",
                                 "a valley", "Its river is ___, which floods"]}  # fmt: skip
for row in (QUOTED, DESCRIBED):
    row["path"] = [{"link": None, **step} for step in ROW["path"]]
    row["path"][-1]["evidence"] = QUOTED["answer_evidence"]


def walked(row=QUOTED, seed=0, pages=None) -> dict:
    return asyncio.run(attempt(row["question"], Oracle(row, seed), toolbox(pages), AttemptConfig(max_turns=20)))


def calls(found) -> list[tuple[str, dict]]:
    return [(call["function"]["name"], call["function"]["arguments"])
            for message in found["messages"] for call in message.get("tool_calls", [])]  # fmt: skip


@pytest.fixture
def careful(monkeypatch):
    monkeypatch.setattr(oracle, "ERROR_RATE", 0.0)
    monkeypatch.setattr(oracle, "MISREAD_RATE", 0.0)


def test_it_searches_looks_into_every_page_and_answers(careful):
    found = walked()
    assert calls(found) == [
        ("search", {"query": "town in the hills"}),
        ("find_in_page", {"title": "Alba", "text": "bridge was built by"}),
        ("find_in_page", {"title": "Brunel Marsh", "text": "was born in"}),
        ("find_in_page", {"title": "Cortona Vale", "text": "river is the"}),
    ]
    assert found["messages"][-1]["content"] == "Answer: Dunmere" and found["status"] == "done"


def test_clues_that_hide_everything_are_walked_by_the_evidence(careful):
    found = walked(DESCRIBED)
    assert [arguments.get("title") for _, arguments in calls(found)][-3:] == ["Alba", "Brunel Marsh", "Cortona Vale"]
    assert answer_of(found["messages"][-1]["content"]) == "Dunmere"


@pytest.mark.parametrize(("page", "text"), [
    ("Alba", "Alba is a small town in the hills. It has no bridge."),
    ("Brunel Marsh", "Brunel Marsh was an engineer. Nobody knows where he was born."),
    ("Cortona Vale", "Cortona Vale is a valley. Its river is the Silver, which floods in spring."),
])  # fmt: skip
def test_what_no_result_says_is_not_said(careful, page, text):
    found = walked(pages={**PAGES, page: text})
    assert found["messages"][-1]["content"] == UNKNOWN
    assert len(calls(found)) > 4 or page == "Alba", "other words are tried before it gives up"


def test_a_head_that_the_search_does_not_bring_is_searched_for_in_other_words_and_then_given_up(careful):
    found = walked(pages={title: text for title, text in PAGES.items() if title != "Alba"})
    queries = [arguments["query"] for name, arguments in calls(found)]
    assert len(set(queries)) == len(queries) > 1 and found["messages"][-1]["content"] == UNKNOWN


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_is_dropped_by_the_critic_and_the_way_goes_on(careful, monkeypatch, kind):
    monkeypatch.setattr(oracle, "ERRORS", {kind: 1.0})
    right, found = walked(), None
    for seed in range(40):
        monkeypatch.setattr(oracle, "ERROR_RATE", 0.3)
        found = walked(seed=seed)
        wrong = [place for place, call in enumerate(calls(found)) if call not in calls(right) or call in calls(found)[:place]]
        if wrong:
            break
    assert wrong, f"{kind} was never made"
    assert answer_of(found["messages"][-1]["content"]) == "Dunmere"
    assert [call for place, call in enumerate(calls(found)) if place not in wrong] == calls(right)
    steps = steps_of(found["messages"])
    verdicts = judge_by_rules(Task.of(QUOTED["question"], toolbox().schemas, QUOTED), steps)
    assert not any(verdicts[place].good for place in wrong), [steps[place].calls for place in wrong]
    assert all(verdict.good for place, verdict in enumerate(verdicts) if place not in wrong)


def test_answers_are_misread_now_and_then(monkeypatch):
    monkeypatch.setattr(oracle, "ERROR_RATE", 0.0)
    monkeypatch.setattr(oracle, "MISREAD_RATE", 0.5)
    said = Counter(answer_of(walked(seed=seed)["messages"][-1]["content"]) for seed in range(30))
    assert 5 <= said["Dunmere"] <= 25 and set(said) - {"Dunmere"} <= {"Cortona", "Vale"}


def test_the_same_seed_walks_the_same_way(monkeypatch):
    monkeypatch.setattr(oracle, "ERROR_RATE", 0.5)
    ways = {seed: calls(walked(seed=seed)) for seed in range(8)}
    assert all(calls(walked(seed=seed)) == way for seed, way in ways.items())
    assert len({str(way) for way in ways.values()}) > 4
