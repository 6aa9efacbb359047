"""Function calling over several turns: ways are compared by state and results, calls are made in workers that can be killed."""

from __future__ import annotations

import asyncio
import json

import pytest

from megatron_nb.evals import stateful
from megatron_nb.evals.bfcl import MORE
from megatron_nb.evals.bfcl_rows import read_category, step_of
from megatron_nb.evals.stateful import Stage, Step, World, compare, play
from tests.evals.lamp_world import CLASSES, DOCS, SCENARIO
from tests.evals.scripted_asker import ScriptedAsker, outcomes, task_of


def steps(*texts):
    return [step_of(text) for text in texts]


WORLD = World(CLASSES, SCENARIO)
RIGHT = [steps("switch(room='hall')"), steps("lit()", "buy(2)")]


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (RIGHT, ""),
        ([steps("switch('attic', on=False)", "switch('attic')", "switch('hall', True)"), steps("buy(2)", "lit()")], ""),
        ([steps("switch(room='hall', on=False)"), RIGHT[1]], "turn 1: on of Lamps"),
        ([RIGHT[0], steps("lit()", "buy(1)")], "turn 2: stock of Shop is 4, not 3"),
        ([RIGHT[0], steps("buy(2)")], "turn 2: no call has given"),
        ([steps("lit()", "switch(room='hall')"), steps("buy(2)")], "turn 2: no call has given"),  # lit() said less then
        ([[], RIGHT[0] + RIGHT[1]], "turn 1: nothing is called"),
        ([RIGHT[0] + steps("switch(room='cellar')"), RIGHT[1]], ""),  # an error changes nothing
    ],
    ids=["right", "another way", "state", "other object", "no result", "too early", "too late", "with an error"],
)
def test_ways_are_compared_by_state_and_results(made, complaint):
    said = compare(WORLD, made, RIGHT)
    assert said.startswith(complaint) and bool(said) == bool(complaint)


def test_a_turn_without_right_calls_is_not_compared_unless_states_alone_count():
    made = [steps("buy(1)"), steps("buy(1)")]
    assert compare(WORLD, made, [[], steps("buy(2)")], results=False).startswith("turn 1: stock")
    assert compare(WORLD, [[], steps("buy(2)")], [[], steps("buy(2)")]) == ""


def test_what_goes_wrong_in_a_call_is_told():
    said = play(WORLD, [Step("switch", {"room": "cellar"}), Step("sell", {}), Step("_load_scenario", {"scenario": {}}),
                        Step("buy", {}), Step("buy", {"count": 1})])  # fmt: skip
    assert said[0] == "Error during execution: 'no lamp in cellar'" and "there is no function 'sell'" in said[1]
    assert "no function '_load_scenario'" in said[2] and "missing 1 required" in said[3] and said[4] == "1 bought"


def test_a_call_that_never_ends_is_cut_off_and_leaves_the_rest_alone(monkeypatch):
    monkeypatch.setattr(stateful, "DEADLINE_S", 1.0)
    stage, taken = Stage(1), []

    async def visit():
        one = await stage.take(WORLD, taken, Step("buy", {"count": 1}))
        stuck = await stage.take(WORLD, taken, Step("wait_for_ever", {}))
        return one, stuck, await stage.take(WORLD, taken, Step("buy", {"count": 1})), await stage.compare(
            WORLD, [taken], [steps("buy(1)", "buy(1)")])  # fmt: skip

    try:
        assert asyncio.run(visit()) == ("1 bought", "Error during execution: no result within 1 s", "1 bought", "")
    finally:
        stage.close()


@pytest.fixture
def lamps(tmp_path):
    """A folder in the package's form with one item of three turns, of which the second brings `lit`."""
    row = {"id": "multi_turn_miss_func_0", "initial_config": SCENARIO, "involved_classes": ["Lamps", "Shop"],
           "question": [[{"role": "user", "content": "Light the hall."}], [], [{"role": "user", "content": "Buy 2."}]],
           "missed_function": {"1": ["lit"]}}  # fmt: skip
    answer = {"id": row["id"], "ground_truth": [["switch(room='hall')"], ["lit()"], ["buy(count=2)"]]}
    file = "BFCL_v4_multi_turn_miss_func.json"
    for name, rows in ((file, [row]), (f"possible_answer/{file}", [answer]),
                       *((f"multi_turn_func_doc/{name}.json", docs) for name, docs in DOCS.items())):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in rows))
    return tmp_path


def played(lamps, script, **settings):
    """(outcome, asker) of a model that plays the script turn by turn."""
    turns = iter(script)
    asker = ScriptedAsker(lambda messages, tools: next(turns))
    task = task_of("bfcl", path=str(lamps), categories=["multi_turn_miss_func"], classes=CLASSES, **settings)
    task.check()
    (outcome,) = outcomes(task, asker)
    return outcome, asker, task


SCRIPT = [[("switch", {"room": "hall"})], "It is lit.", [("lit", {})], "Two rooms.", [("buy", {"count": 2})], "Done."]


def test_an_item_of_several_turns_is_right_when_states_and_results_are(lamps):
    outcome, asker, task = played(lamps, SCRIPT)
    assert (outcome.score, outcome.status, outcome.reason) == (1.0, "done", "")
    assert asker.tools[0] == ["switch", "buy"] and asker.tools[2] == ["switch", "buy", "lit"]  # it came with the second turn
    assert {"role": "user", "content": MORE} in asker.asked[2]
    results = [message["content"] for message in outcome.messages if message["role"] == "tool"]
    assert results == ['{"room": "hall", "on": true}', "['attic', 'hall']", "2 bought"]
    assert task.summarise([outcome])["group_multi_turn"] == 1.0 and len(set(asker.seeds)) == 6
    assert (outcome.tokens_in, outcome.tokens_out) == (60, 15 + 3 + 2 + 1)


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (["It is lit.", *SCRIPT[2:]], "turn 1: nothing is called"),
        ([*SCRIPT[:4], [("buy", {"count": 3})], "Done."], "turn 3: stock of Shop is 2, not 3"),
        ([[("switch", {"room": "hall"})]] * 4, "turn 1 still calls functions after 3 steps"),
    ],
    ids=["nothing", "other state", "no end"],
)
def test_an_item_of_several_turns_fails_with_its_first_wrong_turn(lamps, script, complaint):
    outcome, _, _ = played(lamps, script, steps=3)
    assert outcome.score == 0.0 and outcome.reason == complaint


def test_right_ways_of_the_package_pass_and_lose_their_last_call(bfcl):
    count = 0
    for category in ("multi_turn_base", "multi_turn_long_context"):
        for item in list(read_category(bfcl, category, {}))[::5]:
            world = World(item.gold["classes"], item.gold["scenario"], {"long_context": category.endswith("long_context")})
            right = [[step_of(text) for text in turn] for turn in item.gold["accepted"]]
            assert compare(world, right, right) == "", item.id
            last = max(place for place, turn in enumerate(right) if turn)
            assert compare(world, [turn[:-1] if place == last else turn for place, turn in enumerate(right)], right), item.id
            count += 1
    assert count == 80


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"categories": ["simple_perl"]}, "simple_perl unknown; known are simple_python"),
        ({"categories": ["simple_java"]}, "BFCL_v4_simple_java.json does not exist"),
        ({"classes": CLASSES | {"Lamps": "tests.evals.lamp_world:Candles"}}, "class 'tests.evals.lamp_world:Candles'"),
    ],
    ids=["category", "file", "class"],
)
def test_what_cannot_be_run_is_refused_before_any_model_is_asked(lamps, settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        task = task_of("bfcl", **{"path": str(lamps), "categories": ["multi_turn_miss_func"], "classes": CLASSES} | settings)
        task.check()
