"""Whether calls are the accepted ones, by the rules of the Berkeley function-calling leaderboard's AST check (V4).

An accepted answer is {function: {parameter: [values]}}; "" among the values means that the parameter may be left out. Texts
are compared without case, blanks and the signs ,./-_*^ . A value has the type of the function's description, an integer
may stand for a float, and a value of the accepted values' own type (a variable's name, say) is compared as it is.
Every function here gives "" for what is right, else what is wrong in a sentence.
"""

from __future__ import annotations

import re
from typing import Any

from megatron_nb.evals.bfcl_literals import read_literal
from megatron_nb.rollout.calls import Call

PYTHON = {
    "string": str, "integer": int, "float": float, "boolean": bool, "array": list, "tuple": list, "dict": dict, "any": str,
}  # fmt: skip
FOREIGN = {  # of Java and JavaScript
    **dict.fromkeys(("byte", "short", "integer", "long", "Bigint"), int), **dict.fromkeys(("float", "double"), float),
    **dict.fromkeys(("boolean", "Boolean"), bool), **dict.fromkeys(("char", "String", "any"), str),
    **dict.fromkeys(("Array", "ArrayList", "Queue", "Stack", "Set", "array"), list),
    **dict.fromkeys(("HashMap", "Hashtable", "dict"), dict),
}  # fmt: skip
SIGNS = re.compile(r"[ ,./\-_*^]")
Accepted = dict[str, dict[str, list[Any]]]  # one function's name and its parameters


def check(category: str, functions: list[dict[str, Any]], gold: list[Accepted], calls: list[Call]) -> str:
    """What is wrong with the calls of an answer; category: of the item, such as live_parallel_multiple."""
    if "irrelevance" in category:
        return f"it calls {calls[0].name}, but no function fits" if calls else ""
    if "relevance" in category:
        return "" if calls else "it calls nothing"
    if len(calls) != len(gold):
        return f"{len(calls)} calls instead of {len(gold)}"
    language = next((name for name in ("javascript", "java") if name in category), "python")
    if "parallel" not in category:
        return _call(_described(functions, gold[0]), gold[0], calls[0], language)
    left = list(calls)
    for accepted in gold:  # in any order
        wrong = [_call(_described(functions, accepted), accepted, call, language) for call in left]
        if "" not in wrong:
            return f"no call is the accepted {next(iter(accepted))}: {wrong[0]}"
        del left[wrong.index("")]
    return ""


def _described(functions: list[dict[str, Any]], accepted: Accepted) -> dict[str, Any]:
    name = next(iter(accepted))
    found = next((function for function in functions if function["name"] == name), None)
    if found is None:
        raise ValueError(f"the accepted answer calls {name!r}, which is not among the functions: mend the row")
    return found


def _call(function: dict[str, Any], accepted: Accepted, call: Call, language: str) -> str:
    """function: its description."""
    name, parameters = next(iter(accepted.items()))
    if call.name not in (name, name.replace(".", "_")):  # servers refuse names with dots
        return f"{call.name} is called instead of {name}"
    described = function["parameters"]["properties"]
    for needed in function["parameters"].get("required", []):
        if needed not in call.arguments:
            return f"{needed} is missing"
    for key, value in call.arguments.items():
        if key not in described or key not in parameters:
            return f"{key} is not expected"
        if wrong := _value(described[key], parameters[key], value, language):
            return f"{key}={value!r}: {wrong}"[:300]
    for key, values in parameters.items():
        if key not in call.arguments and "" not in values:
            return f"{key} is missing"
    return ""


def _value(described: dict[str, Any], accepted: list[Any], value: Any, language: str) -> str:
    types, kind = PYTHON if language == "python" else FOREIGN, described["type"]
    wanted = types[kind]
    items = described.get("items", {}).get("type", "any") if wanted is list else "any"
    within = None if items == "any" else types[items]
    if language != "python":
        if not isinstance(value, str):
            return "it must be written as a text of the language"
        value = read_literal(value, kind, language)
    elif wanted is float and type(value) is int:
        value = float(value)
    if wanted is list and value == accepted == []:
        return ""
    kinds = [type(one) for one in accepted if one != ""][:1]
    if type(value) is not wanted and type(value) not in kinds:
        return f"it is a {type(value).__name__}, not a {kind}"
    if type(value) is not wanted or (kinds and kinds[0] is not wanted):  # a variable
        return "" if value in accepted else f"accepted is {accepted}"
    if within is not None and not any(_items_fit(value, within, one) for one in accepted):
        return f"its items are not of type {items}"
    if wanted is dict:
        right = any(_dict(value, one) for one in accepted if one != "")
    elif wanted is list and within is dict:
        right = any(_dicts(value, one) for one in accepted if one != "")
    elif wanted is list:
        right = [plain(one) for one in value] in [[plain(one) for one in its] for its in accepted]
    else:
        right = plain(value) in [plain(one) for one in accepted if wanted is not str or isinstance(one, str)]
    return "" if right else f"accepted is {accepted}"


def _items_fit(value: list[Any], kind: type, accepted: Any) -> bool:
    """Whether every item has the described type, or that of the accepted list's items."""
    if not isinstance(accepted, list):
        return True
    kinds = [kind, *[type(one) for one in accepted if one != ""][:1]]
    return all(type(item) in kinds for item in value)


def _dict(value: Any, accepted: dict[str, list[Any]]) -> bool:
    if not isinstance(value, dict) or not value.keys() <= accepted.keys():
        return False
    lists = {key: its if isinstance(its, list) else [its] for key, its in accepted.items()}  # some rows hold the value itself
    given = all(plain(item) in [plain(one) for one in lists[key]] for key, item in value.items())
    return given and all("" in values for key, values in lists.items() if key not in value)


def _dicts(value: list[Any], accepted: list[dict[str, list[Any]]]) -> bool:
    return len(value) == len(accepted) and all(_dict(one, its) for one, its in zip(value, accepted))


def plain(value: Any) -> Any:
    """A text without case, blanks and signs; anything else as it is."""
    return SIGNS.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value
