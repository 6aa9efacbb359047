"""Items from the files of the package bfcl-eval (Berkeley function-calling leaderboard V4): questions, tools, accepted answers.

    FOLDER/BFCL_v4_CATEGORY.json, FOLDER/possible_answer/ (the same names), FOLDER/multi_turn_func_doc/CLASS'S FILE.json
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_nb.data import schemas
from megatron_nb.data.rows import BadRow, decode, raw_rows
from megatron_nb.evals.stateful import Step
from megatron_nb.evals.task import Item

SINGLE = (
    "simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple", "irrelevance",
    "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance",
)  # fmt: skip
SEVERAL = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
CATEGORIES = (*SINGLE, *SEVERAL)
PACKAGE = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
MODULES = {  # of the package, by class; the file that describes a class has its name too
    "GorillaFileSystem": "gorilla_file_system", "MathAPI": "math_api", "MessageAPI": "message_api",
    "TwitterAPI": "posting_api", "TicketAPI": "ticket_api", "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking", "VehicleControlAPI": "vehicle_control",
}  # fmt: skip
REMEDY = "mend the row, or leave its category out of `categories`"


def package_folder() -> Path:
    """The data of the installed package, found without importing it. ValueError when it is not installed."""
    found = importlib.util.find_spec("bfcl_eval")
    if found is None:
        raise ValueError("no path is set and bfcl-eval is not installed: set path, or pip install --no-deps bfcl-eval")
    return Path(found.submodule_search_locations[0]) / "data"


def category_of(item: str) -> str:
    """live_simple of live_simple_0-0-0."""
    return re.sub(r"_[\d-]+$", "", item)


def read_category(folder: Path, category: str, classes: dict[str, str], dots: bool = True) -> Iterator[Item]:
    """The items of a category. classes: your own, name -> module:Class; dots: whether names of functions keep theirs.

    Raises BadRow, and ValueError for a missing file.
    """
    name = f"BFCL_v4_{category}.json"
    answers = {} if "relevance" in category else dict(_answers(folder / "possible_answer" / name))
    for where, raw in raw_rows(_existing(folder / name)):
        row = decode(where, raw)
        try:
            accepted = answers.get(row["id"], []) if "relevance" in category else answers[row["id"]]
            if category in SEVERAL:
                yield _several(folder, category, row, accepted, classes)
            else:
                messages = [message for turn in row["question"] for message in turn]
                gold = {"category": category, "functions": row["function"], "accepted": accepted}
                yield Item(row["id"], messages, gold, offered(row["function"], category, dots))
        except (KeyError, TypeError, IndexError, SyntaxError, AttributeError) as error:
            raise BadRow.at(where, f"{type(error).__name__}: {error}", "a row has id, question, function or initial_config, "
                            "and an answer of its id in possible_answer/", REMEDY) from error  # fmt: skip


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise ValueError(f"{file} does not exist: set path to the data folder of bfcl-eval, or leave its category out")
    return file


def _answers(file: Path) -> Iterator[tuple[str, list[Any]]]:
    for where, raw in raw_rows(_existing(file)):
        row = decode(where, raw)
        yield row["id"], row["ground_truth"]


def _several(folder: Path, category: str, row: dict[str, Any], accepted: list[list[str]], classes: dict[str, str]) -> Item:
    """An item of several turns; functions that come later are offered from their turn on."""
    later = {int(turn): names for turn, names in (row.get("missed_function") or {}).items()}
    known = {doc["name"]: doc for name in row["involved_classes"] for doc in _described(folder, name)}
    missing = {name for names in later.values() for name in names}
    gold = {
        "category": category, "turns": row["question"], "accepted": accepted, "scenario": row["initial_config"],
        "classes": {name: class_place(name, classes) for name in row["involved_classes"]},
        "later": {turn: offered([known[name] for name in names], category) for turn, names in later.items()},
    }  # fmt: skip
    if len(row["question"]) != len(accepted):
        raise TypeError(f"{len(row['question'])} turns, but answers to {len(accepted)}")
    for text in (text for turn in accepted for text in turn):
        step_of(text)
    first = offered([doc for name, doc in known.items() if name not in missing], category)
    return Item(row["id"], row["question"][0], gold, first)


def class_place(name: str, classes: dict[str, str]) -> str:
    """module:Class."""
    return classes[name] if name in classes else f"{PACKAGE}.{MODULES[name]}:{name}"


def _described(folder: Path, name: str) -> list[dict[str, Any]]:
    file = folder / "multi_turn_func_doc" / f"{MODULES.get(name, name)}.json"
    if not file.is_file() and name in MODULES:
        file = package_folder() / "multi_turn_func_doc" / file.name
    return [decode(where, raw) for where, raw in raw_rows(_existing(file))]


def offered(functions: list[dict[str, Any]], category: str, dots: bool = True) -> list[dict[str, Any]]:
    """The functions as tools in the OpenAI form; values of another language are texts."""
    language = {"simple_java": "Java", "simple_javascript": "JavaScript"}.get(category)
    if language:
        functions = [_as_texts(function, language) for function in functions]
    kept = [{key: function[key] for key in ("name", "description", "parameters")} for function in functions]
    kept = kept if dots else [function | {"name": function["name"].replace(".", "_")} for function in kept]
    return schemas.tools(json.loads(json.dumps(kept))) or []


def _as_texts(function: dict[str, Any], language: str) -> dict[str, Any]:
    texts = {
        key: {"type": "string", "description": f"{value.get('description', '')} Written as {language}, of type {_type(value)}."}
        for key, value in function["parameters"]["properties"].items()
    }
    return function | {"parameters": function["parameters"] | {"properties": texts}}


def _type(described: dict[str, Any]) -> str:
    items = described.get("items", {}).get("type")
    return f"{described['type']} of {items}" if items else described["type"]


def step_of(text: str) -> Step:
    """A call written as Python: mv(source='a', destination='b'). Raises SyntaxError, TypeError for anything else."""
    call = ast.parse(text.strip(), mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise TypeError(f"{text!r} is no call")
    try:
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return Step(call.func.id, named, tuple(ast.literal_eval(value) for value in call.args))
    except ValueError as error:
        raise TypeError(f"{text!r} has an argument that is no literal") from error
