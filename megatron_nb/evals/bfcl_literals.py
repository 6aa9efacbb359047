"""Values written as Java or JavaScript, read as Python's: for the categories of function calling in those languages.

    Java        7  7L  0.5f  true  new int[]{1, 2}  new ArrayList<>(Arrays.asList("a"))  new HashMap<>() {{ put("a", 1); }}
    JavaScript  7  7n  0.5   true  [1, [2, 3]]  new Array(1, 2)  {a: 1, "b": 'c'}

What cannot be read is a variable's name or an expression, and stays a text.
"""

from __future__ import annotations

import re
from typing import Any

WHOLE, REAL = r"-?\d+", r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
NUMBERS = {  # language and type -> how it is written, the value in group 1
    ("java", "float"): rf"({REAL})[fF]", ("java", "double"): f"({REAL})", ("java", "long"): f"({WHOLE})[lL]",
    ("javascript", "float"): f"({REAL})", ("javascript", "Bigint"): f"({WHOLE})n",
}  # fmt: skip
LISTS = (
    re.compile(r"new\s+ArrayList\s*<[^>]*>\s*\(\s*(?:Arrays\.asList|List\.of)\s*\((.*)\)\s*\)", re.DOTALL),
    re.compile(r"(?:Arrays\.asList|List\.of)\s*\((.*)\)", re.DOTALL),
    re.compile(r"new\s+\w+\s*\[\s*\]\s*\{(.*)\}", re.DOTALL),
    re.compile(r"new\s+Array\s*\((.*)\)", re.DOTALL),
    re.compile(r"\[(.*)\]", re.DOTALL),
)
FILLED = re.compile(r"new\s+(ArrayList|HashMap)\s*<.*?>\s*\(\s*\)\s*(?:\{\s*\{(.*)\}\s*\})?", re.DOTALL)
STEP = re.compile(r"\s*(?:add|put)\s*\((.*)\)\s*", re.DOTALL)
OPEN, CLOSE = "([{", ")]}"


def read_literal(text: str, kind: str, language: str) -> Any:
    """The value of the described type that the text writes, or the text itself."""
    text = text.strip()
    if kind in ("byte", "short", "integer", "long", "float", "double", "Bigint"):
        found = re.fullmatch(NUMBERS.get((language, kind), f"({WHOLE})"), text)
        if found is None:
            return text
        return float(found[1]) if kind in ("float", "double") else int(found[1])
    if kind in ("boolean", "Boolean"):
        return {"true": True, "false": False}.get(text, text)
    if kind == "String" and language == "javascript":
        return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
    if kind in ("Array", "ArrayList", "array", "HashMap", "dict"):
        value = _value(text)
        return value if isinstance(value, (list, dict)) else text
    return text


def _value(text: str) -> Any:
    """Any literal within a collection."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    if number := re.fullmatch(rf"({WHOLE})[lLn]?", text):
        return int(number[1])
    if number := re.fullmatch(rf"({REAL})[fFdD]?", text):
        return float(number[1])
    if text in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[text]
    for form in LISTS:
        if found := form.fullmatch(text):
            return [_value(part) for part in _parts(found[1], ",")]
    if found := FILLED.fullmatch(text):
        steps = [STEP.fullmatch(step) for step in _parts(found[2] or "", ";")]
        if all(steps):
            given = [[_value(part) for part in _parts(step[1], ",")] for step in steps]
            return [its[0] for its in given] if found[1] == "ArrayList" else {its[0]: its[1] for its in given}
    if text.startswith("{") and text.endswith("}"):
        pairs = [_parts(part, ":") for part in _parts(text[1:-1], ",")]
        if all(len(pair) == 2 for pair in pairs):
            return {str(_value(key)): _value(value) for key, value in pairs}
    return text


def _parts(text: str, sign: str) -> list[str]:
    """The text split at a sign that stands in no brackets and no quotes; empty parts are left out."""
    parts, depth, quote = [""], 0, ""
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote and text[i - 1] != "\\" else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in OPEN) - (letter in CLOSE)
        if letter == sign and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
