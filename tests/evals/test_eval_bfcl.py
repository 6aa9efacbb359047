"""Function calling: accepted answers score 100 %, broken ones 0, the package's own checker agrees; turns by their state."""

from __future__ import annotations

import asyncio
import collections
import json
import random
import sys
import types

import pytest

from megatron_nb.evals import stateful
from megatron_nb.evals.bfcl import MORE, overall
from megatron_nb.evals.bfcl_literals import read_literal
from megatron_nb.evals.bfcl_match import check
from megatron_nb.evals.bfcl_rows import category_of, package_folder, read_category, step_of
from megatron_nb.evals.stateful import Stage, Step, World, compare, play
from megatron_nb.rollout.calls import Call
from tests.evals.lamp_world import CLASSES, DOCS, SCENARIO
from tests.evals.scripted_asker import ScriptedAsker, outcomes, task_of

PYTHON = ("simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "live_parallel")


def accepted(values, required):
    """The first accepted value of each parameter; what may be left out is left out."""
    return {
        key: _inner(next((one for one in its if one != ""), "" if its else [])) for key, its in values.items()
        if key in required or "" not in its
    }  # fmt: skip


def _inner(value):
    if isinstance(value, dict):
        return {key: _inner(its[0] if isinstance(its, list) and its else its) for key, its in value.items()
                if not (isinstance(its, list) and "" in its)}  # fmt: skip
    return [_inner(one) for one in value] if isinstance(value, list) else value


def calls_of(gold, functions):
    made = []
    for answer in gold:
        ((name, values),) = answer.items()
        required = next(function for function in functions if function["name"] == name)["parameters"]["required"]
        made.append(Call(name, accepted(values, required), f"call_{len(made)}"))
    return made


@pytest.fixture(scope="module")
def bfcl():
    try:
        return package_folder()
    except ValueError as error:
        pytest.skip(str(error))


# ------------------------------------------------------------------ single calls
def test_accepted_answers_score_all_and_the_task_says_so(shared_data):
    folder = shared_data / "tools"
    items = {item.prompt[-1]["content"]: item for item in read_category(folder, "simple_python", {})}

    def right(messages, tools):
        item = items[messages[-1]["content"]]
        return [(call.name, call.arguments) for call in calls_of(item.gold["accepted"], item.gold["functions"])]

    task = task_of("bfcl", path=str(folder), categories=["simple_python"])
    found = outcomes(task, ScriptedAsker(right))
    scores = task.summarise(found)
    assert len(found) == 400 and scores["accuracy"] == 1.0 == scores["simple_python"] == scores["overall_run"]
    assert scores["overall_weight"] == 0.1 and scores["overall"] == pytest.approx(0.1)


BREAKS = {
    "another function": lambda call: [Call(call.name + "_2", call.arguments, "")],
    "an argument too many": lambda call: [Call(call.name, call.arguments | {"unheard_of": 1}, "")],
    "a required argument too few": lambda call: [Call(call.name, dict(list(call.arguments.items())[1:]), "")],
    "another value": lambda call: [Call(call.name, _other(call.arguments), "")],
    "another type": lambda call: [Call(call.name, {key: [value, None] for key, value in call.arguments.items()}, "")],
    "two calls": lambda call: [call, call],
    "no call": lambda call: [],
}


def _other(arguments):
    """Every value changed, its type kept."""
    changes = {bool: lambda v: not v, int: lambda v: v + 7919, float: lambda v: v + 7919.5, str: lambda v: v + " otherwise",
               list: lambda v: [*v, *v, *v, "otherwise"], dict: lambda v: v | {"otherwise": 1}}  # fmt: skip
    return {key: changes[type(value)](value) for key, value in arguments.items()}


@pytest.mark.parametrize("broken", BREAKS)
def test_deliberately_broken_answers_score_nothing(shared_data, broken):
    passed = []
    for item in read_category(shared_data / "tools", "simple_python", {}):
        functions, gold = item.gold["functions"], item.gold["accepted"]
        (call,) = calls_of(gold, functions)
        if broken == "a required argument too few" and not call.arguments:
            continue
        if not check("simple_python", functions, gold, BREAKS[broken](call)):
            passed.append(item.id)
    assert passed == []


def test_the_package_checks_changed_answers_the_same_way(bfcl, monkeypatch):
    """Random values, types, names and counts, through both checkers; on the leaderboard's Python categories."""
    names = types.ModuleType("bfcl_eval.constants.model_config")  # the real one imports every provider there is
    names.MODEL_CONFIG_MAPPING = collections.defaultdict(lambda: types.SimpleNamespace(underscore_to_dot=False))
    monkeypatch.setitem(sys.modules, "bfcl_eval.constants.model_config", names)
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    rng, compared, right = random.Random(0), 0, 0
    for category in PYTHON:
        for item in list(read_category(bfcl, category, {}))[:120]:
            functions, gold = item.gold["functions"], item.gold["accepted"]
            for _ in range(3):
                made = [_changed(call, rng) for call in calls_of(gold, functions)]
                made = made + made[:1] if rng.random() < 0.05 else rng.sample(made, len(made))
                sent = [{call.name: call.arguments} for call in made]
                theirs = ast_checker(functions, sent, gold, Language.PYTHON, category, "m")
                assert theirs["valid"] == (check(category, functions, gold, made) == ""), (item.id, made, theirs)
                compared, right = compared + 1, right + theirs["valid"]
    assert compared > 1500 and 0.2 < right / compared < 0.8


def _changed(call, rng):
    arguments = dict(call.arguments)
    if arguments and rng.random() < 0.6:
        key = rng.choice(list(arguments))
        value = arguments[key]
        kinds = [str(value), [value], True, "", value]
        if isinstance(value, str):
            kinds += [value.upper(), value.replace(" ", "-"), value + "x"]
        elif isinstance(value, (int, float)):
            kinds += [value + 1, float(value), value + 0.5]
        elif isinstance(value, list):
            kinds += [value[:-1], value[::-1], [str(one) for one in value]]
        elif isinstance(value, dict) and value:
            kinds += [dict(list(value.items())[1:]), value | {"more": 1}]
        arguments[key] = rng.choice(kinds)
    if arguments and rng.random() < 0.1:
        del arguments[rng.choice(list(arguments))]
    return Call(call.name, arguments, call.id)


def test_every_accepted_answer_of_the_package_passes_but_for_three_faulty_rows(bfcl):
    faulty = {"parallel_multiple_26", "live_multiple_862-181-3", "live_multiple_964-207-0"}  # answers with unknown parameters
    for category in ("multiple", "parallel", "parallel_multiple", "live_simple", "live_multiple", "live_parallel",
                     "live_parallel_multiple"):  # fmt: skip
        wrong = {item.id for item in read_category(bfcl, category, {}) if check(
            category, item.gold["functions"], item.gold["accepted"], calls_of(item.gold["accepted"], item.gold["functions"]))}
        assert wrong <= faulty


FUNCTIONS = [{"name": "geo.area", "parameters": {"type": "dict", "required": ["r"], "properties": {
    "r": {"type": "float"}, "unit": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}}}}]  # fmt: skip
GOLD = [{"geo.area": {"r": [5, 5.0], "unit": ["", "Square Meters"], "tags": ["", ["Big-One"]]}}]


@pytest.mark.parametrize(
    ("name", "arguments", "right"),
    [
        ("geo.area", {"r": 5}, True),
        ("geo_area", {"r": 5.0}, True),  # for servers that refuse dots
        ("geo.area", {"r": 5, "unit": "square-meters"}, True),
        ("geo.area", {"r": 5, "unit": "SQUARE METERS", "tags": ["big one"]}, True),
        ("geo.area", {"r": "5"}, False),
        ("geo.area", {"r": True}, False),
        ("geo.area", {"r": 5, "tags": ["big two"]}, False),
        ("geo.area", {"r": 5, "tags": [1]}, False),
        ("geo.area", {"unit": "Square Meters"}, False),
        ("area", {"r": 5}, False),
    ],
)
def test_values_are_compared_by_type_and_without_case_and_signs(name, arguments, right):
    assert (check("simple_python", FUNCTIONS, GOLD, [Call(name, arguments, "")]) == "") == right


def test_nothing_may_be_called_where_nothing_fits_and_something_where_something_does():
    call = [Call("geo.area", {"r": 5}, "")]
    assert check("irrelevance", FUNCTIONS, [], []) == "" == check("live_relevance", FUNCTIONS, [], call)
    assert check("live_irrelevance", FUNCTIONS, [], call) and check("live_relevance", FUNCTIONS, [], [])


@pytest.mark.parametrize(
    ("text", "kind", "language", "value"),
    [
        ("7", "integer", "java", 7), ("7L", "long", "java", 7), ("7", "long", "java", "7"), ("0.5f", "float", "java", 0.5),
        ("0.5", "float", "java", "0.5"), ("0.5", "double", "java", 0.5), ("true", "boolean", "java", True),
        ("new int[]{1, 2}", "Array", "java", [1, 2]), ("testArgs", "Array", "java", "testArgs"),
        ('new ArrayList<>(Arrays.asList("a, b", "c"))', "ArrayList", "java", ["a, b", "c"]),
        ("new ArrayList<Integer>() {{ add(1); add(2); }}", "ArrayList", "java", [1, 2]),
        ('new HashMap<String, Integer>() {{ put("a", 1); }}', "HashMap", "java", {"a": 1}),
        ("new ArrayList<>()", "ArrayList", "java", []),
        ("7n", "Bigint", "javascript", 7), ("'a'", "String", "javascript", "a"),
        ("[[1, 2], [3]]", "array", "javascript", [[1, 2], [3]]),
        ("new Array(1, 'b')", "array", "javascript", [1, "b"]), ("{}", "dict", "javascript", {}),
        ("{a: 1, \"b\": [true, 'x:y']}", "dict", "javascript", {"a": 1, "b": [True, "x:y"]}),
        ("props", "dict", "javascript", "props"),
    ],
)  # fmt: skip
def test_literals_of_other_languages_are_read(text, kind, language, value):
    assert read_literal(text, kind, language) == value and type(read_literal(text, kind, language)) is type(value)


def test_overall_weighs_10_10_10_30_40_by_hand():
    scores = {
        "simple_python": (0.9, 400), "simple_java": (0.6, 100), "simple_javascript": (0.6, 50),  # simple: 0.7
        "multiple": (0.8, 200), "parallel": (0.5, 200), "parallel_multiple": (0.4, 200),  # non-live: 2.4 / 4 = 0.6
        "live_simple": (0.5, 300), "live_multiple": (0.8, 100), "live_parallel": (1.0, 100),  # live: 330 / 500 = 0.66
        "irrelevance": (1.0, 240), "live_irrelevance": (0.5, 800), "live_relevance": (0.0, 16),  # irrelevance: 0.75
        "multi_turn_base": (0.4, 200), "multi_turn_miss_func": (0.2, 200),  # multi-turn: 0.3
        "web_search_base": (0.5, 100), "web_search_no_snippet": (0.3, 100), "memory_kv": (0.2, 155),  # 0.4, 0.2: agentic 0.3
    }  # fmt: skip
    told = overall(scores)
    assert [round(told[f"group_{name}"], 12) for name in ("non_live", "live", "irrelevance", "multi_turn", "agentic")] == [
        0.6, 0.66, 0.75, 0.3, 0.3]  # fmt: skip
    assert told["overall"] == pytest.approx(0.06 + 0.066 + 0.075 + 0.09 + 0.12) and told["overall_weight"] == 1.0
    part = overall({"multi_turn_base": (0.5, 1)})
    assert (part["overall"], part["overall_run"], part["overall_weight"]) == (0.15, 0.5, 0.3)


def test_categories_are_read_from_ids():
    assert [category_of(name) for name in ("simple_python_12", "live_simple_0-0-0", "multi_turn_miss_func_3")] == [
        "simple_python", "live_simple", "multi_turn_miss_func"]  # fmt: skip


# ------------------------------------------------------------------ several turns
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
