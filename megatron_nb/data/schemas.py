"""Tool definitions and tool calls as real rows carry them, brought to the one OpenAI form."""

from __future__ import annotations

import json
import re
from typing import Any

# What authors write for a JSON-schema type. None: no such type, the key is dropped (a schema without type allows anything).
TYPES = {
    "str": "string", "string": "string", "int": "integer", "integer": "integer", "float": "number", "number": "number",
    "bool": "boolean", "boolean": "boolean", "list": "array", "array": "array", "tuple": "array", "set": "array",
    "dict": "object", "object": "object", "none": "null", "nonetype": "null", "null": "null", "any": None,
}  # fmt: skip
GENERIC = re.compile(r"^(?P<outer>\w+)\[(?P<inner>.*)\]$")


def tools(value: Any) -> list[dict[str, Any]] | None:
    """[{"type": "function", "function": {...}}], or None when there is none.

    value: a list, one tool, JSON text of either, or any of these wrapped again. Raises ValueError for a tool without name.
    """
    found = [_tool(item) for item in _flat(value)]
    return found or None


def _flat(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return _flat(json.loads(value))
    if isinstance(value, list):
        return [item for part in value for item in _flat(part)]
    return [value]


def _tool(tool: Any) -> dict[str, Any]:
    while isinstance(tool, dict) and isinstance(tool.get("function"), dict):
        tool = tool["function"]
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or not tool["name"]:
        raise ValueError(f"tool {str(tool)[:80]!r} has no name")
    parameters = tool.get("parameters")
    if isinstance(parameters, str):
        parameters = json.loads(parameters)
    if not parameters:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise ValueError(f"tool {tool['name']!r} has parameters of type {type(parameters).__name__}, not an object")
    if not {"type", "properties"} & parameters.keys() and all(isinstance(item, dict) for item in parameters.values()):
        parameters = {"type": "object", "properties": parameters}  # the properties alone, without the schema around them
    return {"type": "function", "function": {**tool, "parameters": schema(parameters)}}


def schema(value: Any) -> Any:
    """The JSON schema with python's type names replaced. A property that is called "type" is left alone."""
    if isinstance(value, list):
        return [schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    mended: dict[str, Any] = {}
    for key, item in value.items():
        if key == "type":
            mended.update(_type(item))
        elif key in ("properties", "$defs", "definitions", "patternProperties") and isinstance(item, dict):
            mended[key] = {name: schema(inner) for name, inner in item.items()}
        elif key in ("items", "additionalProperties", "anyOf", "oneOf", "allOf", "not", "prefixItems"):
            mended[key] = schema(item)
        else:
            mended[key] = item
    return mended


def _type(name: Any) -> dict[str, Any]:
    """The keys that stand for `"type": name`; an unknown name stays as it is."""
    if isinstance(name, list):
        return {"type": [kind for item in name if (kind := _type(item).get("type"))]}
    if not isinstance(name, str):
        return {"type": name}
    bare = re.sub(r",\s*optional$", "", name.strip(), flags=re.IGNORECASE)
    if generic := GENERIC.match(bare):
        outer, inner = generic["outer"].lower(), generic["inner"]
        if outer == "optional":
            return _type(inner)
        kind = TYPES.get(outer)
        if kind == "array" and "," not in inner:
            return {"type": "array", "items": _type(inner)}
        return {"type": kind or name}
    if bare.lower() not in TYPES:
        return {"type": name}
    kind = TYPES[bare.lower()]
    return {"type": kind} if kind else {}


def call(value: Any) -> dict[str, Any]:
    """{"type": "function", "function": {"name", "arguments": dict}} with its "id" when it has one, from any wrapping.

    Raises ValueError when the call has no name, its arguments are not an object, or hold what no JSON text can hold in every
    reader: half a surrogate pair, NaN, 1e400, a thousand levels.
    """
    try:
        mended = _call(value)
        json.dumps(mended, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("the call is nested too deeply") from error
    return mended


def _call(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = json.loads(value)
    identity = value.get("id") if isinstance(value, dict) else None
    while isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError(f"tool call {str(value)[:80]!r} has no name")
    mended = {"type": "function", "function": {"name": value["name"], "arguments": arguments(value.get("arguments"))}}
    return {"id": str(identity), **mended} if identity else mended


def arguments(value: Any) -> dict[str, Any]:
    """Arguments as an object, from an object, JSON text (encoded once or twice), null, or a list of objects."""
    for _ in range(2):
        if isinstance(value, str):
            value = json.loads(value) if value.strip() else {}
    if value is None:
        return {}
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return {key: inner for item in value for key, inner in item.items()}
    if not isinstance(value, dict):
        raise ValueError(f"arguments {str(value)[:80]!r} are not an object")
    return value
