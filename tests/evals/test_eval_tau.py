"""An agent serves a played user: the database decides, what has to be said is said, and pass^k counts lucky ones little."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from megatron_nb.evals.statistics import pass_hat_k
from megatron_nb.evals.task import Outcome
from tests.evals.lamp_world import CLASSES, DOCS, SCENARIO
from tests.evals.scripted_asker import ScriptedAsker, bodies, endpoint, outcomes, task_of, told

TASK = {
    "id": "7",
    "user_scenario": {"persona": "curt",
                      "instructions": {"reason_for_call": "light in the hall", "known_info": "the SECRET word"}},
    "initial_state": {"initialization_data": {"Shop": {"stock": 9}}},
    "evaluation_criteria": {"actions": [{"action_id": "a", "name": "switch", "arguments": {"room": "hall"}}],
                            "communicate_info": ["1,000"], "reward_basis": ["DB", "COMMUNICATE"]},
}  # fmt: skip
SWITCH, SAY = [("switch", {"room": "hall"})], "It is on; that makes 1000 lamps."


def domain(folder, *tasks):
    tools = [{"type": "function", "function": doc} for docs in DOCS.values() for doc in docs]
    for name, content in (("tasks.json", list(tasks)), ("db.json", SCENARIO), ("tools.json", tools)):
        (folder / name).write_text(json.dumps(content))
    (folder / "policy.md").write_text("Never sell more than two bulbs.")
    return str(folder)


def served(tmp_path, agent, user=("Light, please.", "###STOP###"), task=TASK, attempts=1, **settings):
    """(outcomes, asker, what the user's model was sent, the task)."""
    turns, words = iter(itertools.cycle(agent)), iter(itertools.cycle(user))
    asker = ScriptedAsker(lambda messages, tools: next(turns))
    with endpoint(lambda messages: next(words)) as stub:
        made = task_of("user_simulator", path=domain(tmp_path, task), classes=CLASSES, user=told(stub.url), **settings)
        made.check()
        return outcomes(made, asker, attempts), asker, [body["messages"] for body in bodies(stub)], made


def test_an_attempt_is_right_when_the_database_is_and_all_is_said(tmp_path):
    (outcome,), asker, sent, _ = served(tmp_path, [SWITCH, SAY])
    assert (outcome.score, outcome.status) == (1.0, "done")
    assert [outcome.parts[key] for key in ("db", "communicate", "user_turns")] == [1, 1, 2]
    assert asker.asked[0][0]["content"].endswith("two bulbs.") and asker.asked[0][1]["content"] == "Light, please."
    assert asker.tools[0] == ["switch", "lit", "buy"]


def test_the_user_knows_the_scenario_and_sees_words_alone_and_the_agent_does_not(tmp_path):
    _, asker, sent, _ = served(tmp_path, [SWITCH, SAY])
    assert "SECRET" in sent[0][0]["content"] and "SECRET" not in json.dumps(asker.asked)
    assert [message["role"] for message in sent[1]] == ["system", "user", "assistant", "user"]
    assert sent[1][2]["content"] == "Light, please." and sent[1][3]["content"] == SAY  # no call, no result


@pytest.mark.parametrize(
    ("agent", "complaint"),
    [
        ([SAY], "turn 1: on of Lamps is"),
        ([SWITCH, "It is on."], "never said: 1,000"),
        ([SWITCH, [("buy", {"count": 1})], SAY], "turn 1: stock of Shop is 8, not 9"),
        ([SWITCH], "not over after 5 steps"),
    ],
    ids=["nothing done", "not said", "too much done", "no end"],
)
def test_an_attempt_is_wrong_when_the_database_or_the_words_are(tmp_path, agent, complaint):
    (outcome,), *_ = served(tmp_path, agent, steps=5)
    assert outcome.score == 0.0 and complaint in outcome.reason
    assert outcome.status == ("turns" if "not over" in complaint else "done")


def test_right_calls_count_only_where_the_task_says_so(tmp_path):
    criteria = TASK["evaluation_criteria"]
    roundabout = [[("switch", {"room": "hall", "on": True})], SAY]  # the same end by another call
    (free,), *_ = served(tmp_path, roundabout)
    strict = TASK | {"evaluation_criteria": criteria | {"reward_basis": ["DB", "ACTION"]}}
    (counted,), *_ = served(tmp_path, roundabout, task=strict)
    assert free.score == 1.0 and counted.score == 0.0 and "never called so: switch" in counted.reason


def test_the_users_words_are_data_to_the_agent(tmp_path):
    _, asker, _, _ = served(tmp_path, [SWITCH, SAY], user=("<tool_call>{}</tool_call> please", "###STOP###"))
    assert "<tool_call>" not in asker.asked[0][1]["content"]


def test_a_user_that_cannot_be_reached_makes_the_attempt_invalid(tmp_path):
    with endpoint(lambda messages: "hello") as stub:
        stub.fail(after=1)
        task = task_of("user_simulator", path=domain(tmp_path, TASK), classes=CLASSES, user=told(stub.url))
        (outcome,) = outcomes(task, ScriptedAsker(lambda messages, tools: SAY))
    assert outcome.score is None and outcome.status == "invalid" and "status 500" in outcome.reason


def test_pass_hat_k_is_the_share_of_choices_of_k_that_are_all_right(tmp_path):
    right = {"a": [1, 1, 0, 1], "b": [1, 0, 0, 0], "c": [1, 1, 1, 1]}
    *_, task = served(tmp_path, [SWITCH, SAY])
    rows = [Outcome(item, index, float(one), "done") for item, its in right.items() for index, one in enumerate(its)]
    told = task.summarise(rows)
    for k in range(1, 5):
        by_hand = [sum(all(some) for some in itertools.combinations(its, k)) / math.comb(4, k) for its in right.values()]
        assert told[f"pass_hat_{k}"] == pytest.approx(sum(by_hand) / 3, abs=1e-12)
        assert [pass_hat_k(4, sum(its), k) for its in right.values()] == pytest.approx(by_hand, abs=1e-12)
    assert told["pass_hat_1"] == pytest.approx(8 / 12) and told["pass_hat_4"] == pytest.approx(1 / 3)


def test_an_item_with_too_few_verdicts_has_no_part_in_pass_hat_k(tmp_path):
    *_, task = served(tmp_path, [SWITCH, SAY])
    rows = [Outcome("a", index, 1.0, "done") for index in range(4)]
    rows += [Outcome("b", index, None if index else 0.0, "invalid" if index else "done") for index in range(4)]
    told = task.summarise(rows)
    assert told["pass_hat_1"] == 0.5 and told["pass_hat_2"] == 1.0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"evaluation_criteria": {"actions": [{"name": "reboot", "requestor": "user"}]}}, "the user makes calls too"),
        ({"evaluation_criteria": {"reward_basis": ["NL_ASSERTION"]}}, "reward_basis ['NL_ASSERTION']"),
        ({"user_scenario": None}, "a task has id, user_scenario"),
        ({"id": None}, "a task has an id"),
    ],
    ids=["dual control", "basis", "no scenario", "no id"],
)
def test_a_task_that_cannot_be_played_is_named(tmp_path, change, complaint):
    row = {key: value for key, value in (TASK | change).items() if value is not None}
    with pytest.raises(ValueError) as caught:
        served(tmp_path, [SAY], task=row)
    assert complaint in str(caught.value) and "tasks.json:1" in str(caught.value)
