"""Rows -> Conversation: OpenAI messages, ShareGPT and plain text, with what is dirty in them mended and what is wrong refused.

Mended: tools wrapped twice or given as text, python type names in schemas, arguments null, list or text, missing call ids
(paired by position), consecutive assistant messages (merged), content null or in parts. Calls written as text inside
the content (for example the XML of an MCP turn) stay text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_nb.data import schemas
from megatron_nb.data.rows import BadRow, data_files, decode, raw_rows
from megatron_nb.records import Conversation

FORMATS = ("auto", "messages", "sharegpt", "text")
KEYS = {"messages": "messages", "sharegpt": "conversations", "text": "text"}
ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "function_call": "assistant", "tool_call": "assistant", "tool": "tool", "observation": "tool", "function": "tool",
    "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass
class Text:
    """A row of plain text: every token is trained."""

    text: str
    sample_id: str
    source: str


def parse(row: dict[str, Any], where: str, source: str, form: str = "auto", *, answers: bool = True) -> Conversation | Text:
    """The row, checked and mended. `form` is one of FORMATS; `answers=False` lets a prompt go without an assistant turn.

    A missing `loss` on an assistant turn means 1, unless another turn of the conversation says 1 itself: then only the
    flagged turns are trained. Raises BadRow.
    """
    if form == "auto":
        form = next((name for name, key in KEYS.items() if row.get(key) is not None), "")
    if not form or row.get(KEYS[form]) is None:
        wanted = KEYS[form] if form else "messages, conversations or text"
        raise BadRow.at(where, f"keys are {', '.join(map(str, row)) or 'none'}", f"the row needs {wanted}", "rename the key")
    name = str(row["id"]) if row.get("id") not in (None, "") else where.rpartition("/")[2]
    value = row[KEYS[form]]
    if form == "text":
        if not isinstance(value, str) or not value:
            raise BadRow.at(where, f"text is {str(value)[:40]!r}", "text must be a string that is not empty")
        return Text(value, name, source)
    if not isinstance(value, list) or not value:
        raise BadRow.at(where, f"{KEYS[form]} is {str(value)[:40]!r}", "it must be a list of messages that is not empty")
    messages = [_message(item, f"{where}: message {number}") for number, item in enumerate(value, 1)]
    if isinstance(row.get("system"), str) and row["system"] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": row["system"]})
    try:
        tools = schemas.tools(row.get("tools"))
    except ValueError as error:
        raise BadRow.at(where, str(error), "tools are a list of {name, description, parameters}") from error
    messages = _merged(messages)
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant" and not any(
            message.get(key) for key in ("content", "reasoning_content", "tool_calls")
        ):
            raise BadRow.at(
                where, f"assistant message {number} is empty", "a turn has content, reasoning_content or tool_calls"
            )
    _pair(messages, where)
    _flag(messages)
    if answers and not any(message["role"] == "assistant" for message in messages):
        raise BadRow.at(
            where,
            f"roles are {', '.join(message['role'] for message in messages)}",
            "a conversation to train on needs an assistant turn",
        )
    return Conversation(messages, name, source, tools)


def read(path: str, source: str, form: str = "auto", *, answers: bool = True) -> Iterator[Conversation | Text]:
    """Every row that `path` names, in order. Raises BadRow and ValueError."""
    for file in data_files(path):
        for where, raw in raw_rows(file):
            yield parse(decode(where, raw), where, source, form, answers=answers)


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise BadRow.at(where, f"found a {type(item).__name__}", "a message is an object with role and content")
    said = item.get("role", item.get("from"))
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise BadRow.at(
            where,
            f"role is {said!r}",
            f"known roles are {', '.join(ROLES)}",
            "rename the role, or leave such rows out with data.bad_rows=skip",
        )
    content = item.get("content", item.get("value"))
    if said in ("function_call", "tool_call"):
        return {"role": role, "content": "", "tool_calls": _calls(content, where), **_loss(item, where)}
    message = {"role": role, "content": _content(content, role, where)}
    if role == "tool":
        return message | {key: str(item[key]) for key in ("name", "tool_call_id") if item.get(key)}
    if role != "assistant":
        return message
    reasoning = next((item[key] for key in REASONING if item.get(key)), None)
    if reasoning is not None:
        message["reasoning_content"] = _content(reasoning, role, where)
    if calls := item.get("tool_calls") or item.get("function_call"):
        message["tool_calls"] = _calls(calls, where)
    return message | _loss(item, where)


def _content(value: Any, role: str, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "".join(part["text"] for part in value)
    if role == "tool":  # results are often objects
        return json.dumps(value, ensure_ascii=False)
    raise BadRow.at(where, f"content is {str(value)[:60]!r}", "content is a string, or a list of text parts")


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    try:
        if isinstance(value, str):
            value = json.loads(value)
        return [schemas.call(item) for item in (value if isinstance(value, list) else [value])]
    except ValueError as error:
        raise BadRow.at(where, str(error), "a call is {name, arguments} with arguments an object or its JSON text") from error


def _loss(item: dict[str, Any], where: str) -> dict[str, int]:
    flag = item.get("loss", item.get("weight"))
    if flag is None:
        return {}
    if flag not in (0, 1):
        raise BadRow.at(where, f"loss is {flag!r}", "loss of a turn is 0 or 1")
    return {"loss": int(flag)}


def _merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Consecutive assistant messages become one turn; it is trained when no part says 0."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        if not merged or message["role"] != "assistant" or merged[-1]["role"] != "assistant":
            merged.append(message)
            continue
        first = merged[-1]
        for key in ("content", "reasoning_content"):
            if text := "\n\n".join(part[key] for part in (first, message) if part.get(key)):
                first[key] = text
        if calls := first.get("tool_calls", []) + message.get("tool_calls", []):
            first["tool_calls"] = calls
        if flags := [part["loss"] for part in (first, message) if "loss" in part]:
            first["loss"] = min(flags)
    return merged


def _pair(messages: list[dict[str, Any]], where: str) -> None:
    """Gives every call an id and every result the id and name of its call, by id where there is one, else by position."""
    before, given = "", 0
    waiting: list[dict[str, Any]] | None = None  # calls without result yet; None where the last turn made none
    for number, message in enumerate(messages, 1):
        at = f"{where}: message {number} after merging"
        if message["role"] == "assistant":
            for call in message.get("tool_calls", []):
                call.setdefault("id", f"call_{given}")
                given += 1
            waiting = list(message["tool_calls"]) if message.get("tool_calls") else None
        elif message["role"] == "tool":
            if before not in ("assistant", "tool"):
                raise BadRow.at(
                    at,
                    f"a tool message after {before or 'nothing'}",
                    "a tool message follows an assistant turn or another tool message",
                )
            if waiting is not None:
                _answer(message, waiting, at)
        before = message["role"]


def _answer(message: dict[str, Any], waiting: list[dict[str, Any]], where: str) -> None:
    named = message.get("tool_call_id")
    if not waiting:
        raise BadRow.at(where, "a tool result without a call", "a turn has at most as many results as calls")
    call = next((call for call in waiting if call["id"] == named), None) if named else waiting[0]
    if call is None:
        known = ", ".join(call["id"] for call in waiting)
        raise BadRow.at(where, f"tool_call_id is {named!r}", f"the calls that wait for a result are {known}")
    waiting.remove(call)
    message["tool_call_id"] = call["id"]
    message.setdefault("name", call["function"]["name"])


def _flag(messages: list[dict[str, Any]]) -> None:
    turns = [message for message in messages if message["role"] == "assistant"]
    missing = 0 if any(turn.get("loss") == 1 for turn in turns) else 1
    for turn in turns:
        turn.setdefault("loss", missing)
