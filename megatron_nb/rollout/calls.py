"""Tool calls in the text of a turn: reading and writing them in both wire formats, and keeping tool text from imitating them.

    hermes  <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>, several a turn; results in <tool_response> blocks
    mcp     <use_mcp_tool><server_name>..</server_name><tool_name>..</tool_name><arguments>{json}</arguments></use_mcp_tool>;
            results are the next user message, numbered when there are several

A call inside the thinking is none. A call that cannot be read becomes a problem: a sentence to be shown to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron_nb.data import schemas

WIRES = ("hermes", "mcp")
OPEN = {"hermes": "<tool_call>", "mcp": "<use_mcp_tool>"}
CLOSE = {"hermes": "</tool_call>", "mcp": "</use_mcp_tool>"}
REMEDY = {  # in words: as tool text, markers would be broken
    "hermes": 'Write one JSON object {"name": ..., "arguments": {...}} inside of a tool_call tag, and close the tag.',
    "mcp": "Write server_name, tool_name and arguments (one JSON object), each in its tag, inside of a use_mcp_tool tag, "
    "and close every tag.",
}
SERVER = "tools"  # the name that `describe` gives to the one server there is; any name is read
FIELDS = ("server_name", "tool_name", "arguments")
MARKERS = tuple(
    f"<{slash}{name}>"
    for name in ("tool_call", "tool_response", "use_mcp_tool", *FIELDS, "think", "tools")
    for slash in ("", "/")
)  # structure of either wire; the special tokens of a tokenizer come on top
NUMBERED = "[result {} of {}]\n"
SHOWN = 120  # characters of a bad call in a problem


@dataclass(frozen=True)
class Call:
    """One call as the model meant it."""

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True)
class Parsed:
    """What a turn says."""

    calls: list[Call] = field(default_factory=list)
    answer: str = ""  # without thinking and calls
    thinking: str = ""
    problems: list[str] = field(default_factory=list)  # calls that cannot be read, each a sentence for the model


def parse(text: str, wire: str, first: int = 0) -> Parsed:
    """The calls, the answer and the thinking of one turn. first: number of the turn's first call, for its id. Never raises."""
    thinking, said, closed = split_thinking(text)
    calls, problems, rest, at = [], [], [], 0
    if not closed and OPEN[wire] in thinking.rpartition("</think>")[2]:
        problems.append("The thinking is not closed, so a call in it does not count. Close it before the call.")
    while (found := said.find(OPEN[wire], at)) >= 0:
        rest.append(said[at:found])
        start = found + len(OPEN[wire])
        try:
            value, at = (_hermes if wire == "hermes" else _mcp)(said, start)
            calls.append(_call(value, f"call_{first + len(calls)}"))
        except _Malformed as error:
            problems.append(f"Call {len(calls) + len(problems) + 1} of the turn {error}. {REMEDY[wire]}")
            at = max(at, error.at)
    rest.append(said[at:])
    answer = "".join(rest)
    if CLOSE[wire] in answer:
        problems.append(f"A call is closed that was not opened. {REMEDY[wire]}")
    return Parsed(calls, answer.strip(), thinking, problems)


def split_thinking(text: str) -> tuple[str, str, bool]:
    """(thinking, what follows it, whether it is closed), as templates split it; the opening tag may stand in the prompt."""
    thinking, closed, said = text.rpartition("</think>")
    said, opened, endless = said.partition("<think>")
    thought = f"{thinking}{closed}{endless}".replace("</think>", "\n").replace("<think>", "\n")
    return thought.strip(), said, not opened


class _Malformed(Exception):
    """at: where reading goes on."""

    def __init__(self, reason: str, at: int):
        super().__init__(reason)
        self.at = at


def _json(text: str, start: int, closing: str) -> tuple[Any, int]:
    """(the JSON value at `start`, where `closing` begins after it). A `closing` inside of a JSON string does not count."""
    end = text.find(closing, start)
    after = len(text) if end < 0 else end + len(closing)
    begin = _BLANK.match(text, start).end()
    try:
        value, stop = _DECODER.raw_decode(text, begin)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # half a surrogate pair is no text, 1e400 no number
    except (ValueError, RecursionError) as error:
        said = " ".join(text[start : after - len(closing) if end >= 0 else after].split())[:SHOWN]
        raise _Malformed(f"is not valid JSON ({_why(error)}): {said or 'nothing'}", after) from error
    stop = _BLANK.match(text, stop).end()
    if not text.startswith(closing, stop):
        end = text.find(closing, stop)
        after = len(text) if end < 0 else end + len(closing)
        raise _Malformed(f"is not closed with {closing} right after its JSON", after)
    return value, stop


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_BLANK = re.compile(r"\s*")
_MCP_HEAD = re.compile(r"\s*<server_name>([^<]*)</server_name>\s*<tool_name>([^<]*)</tool_name>\s*<arguments>")
_MCP_TAIL = re.compile(r"</arguments>\s*</use_mcp_tool>")
_DECODER = json.JSONDecoder(parse_constant=_constant)


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).split(":")[0]


def _hermes(text: str, start: int) -> tuple[Any, int]:
    value, stop = _json(text, start, CLOSE["hermes"])
    return value, stop + len(CLOSE["hermes"])


def _mcp(text: str, start: int) -> tuple[Any, int]:
    """Fields in their order; the arguments' JSON decides where the call ends, whatever stands inside of its strings."""
    end = text.find(CLOSE["mcp"], start)
    after = len(text) if end < 0 else end + len(CLOSE["mcp"])
    head = _MCP_HEAD.match(text, start)
    if head is None:
        raise _Malformed("lacks <server_name>, <tool_name> or <arguments>, in this order", after)
    value, stop = _json(text, head.end(), "</arguments>")
    tail = _MCP_TAIL.match(text, stop)
    if tail is None:
        raise _Malformed(f"is not closed with {CLOSE['mcp']}", after)
    return {"name": head[2].strip(), "arguments": value}, tail.end()


def _call(value: Any, identity: str) -> Call:
    try:
        if not isinstance(value, dict):
            raise ValueError("it is no object")
        function = schemas.call(value)["function"]
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"cannot be read: {' '.join(str(error).split())[:SHOWN]}", 0) from error
    return Call(function["name"], function["arguments"], identity)


def write(call: Call, wire: str) -> str:
    """The call as a model writes it."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    if wire == "hermes":
        name = json.dumps(call.name, ensure_ascii=False)
        return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
    return (
        f"<use_mcp_tool>\n<server_name>{SERVER}</server_name>\n<tool_name>{call.name}</tool_name>\n"
        f"<arguments>\n{arguments}\n</arguments>\n</use_mcp_tool>"
    )


def describe(tools: list[dict[str, Any]], wire: str) -> str:
    """What the system message says about the tools; "" for hermes, whose template writes them."""
    if wire == "hermes":
        return ""
    form = "\n".join(["<use_mcp_tool>", f"<server_name>{SERVER}</server_name>", "<tool_name>NAME</tool_name>", "<arguments>",
                      "{...}", "</arguments>", "</use_mcp_tool>"])  # fmt: skip
    parts = [f"# Tools\n\nA tool is called by ending the turn with\n{form}\nIts result is the next user message."]
    parts.append(f"## Server {SERVER}")
    for tool in tools:
        function = tool["function"]
        schema = json.dumps(function["parameters"], ensure_ascii=False)
        parts.append(f"### Tool {function['name']}\n{function.get('description', '')}\nArguments: {schema}")
    return "\n\n".join(parts)


def joined(texts: list[str]) -> str:
    """The user message of the MCP wire that holds these results."""
    if len(texts) == 1:
        return texts[0]
    return "\n\n".join(NUMBERED.format(number, len(texts)) + text for number, text in enumerate(texts, 1))


def results(text: str, wire: str) -> list[str]:
    """The results in the decoded text of a tool turn, with or without the template's frame around them."""
    if wire == "hermes":
        return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text, re.DOTALL)
    body = re.search(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.DOTALL)
    body = body[1] if body else text
    head = re.match(r"\[result 1 of ([1-9]\d{0,8})\]\n", body)
    return _numbered(body, int(head[1])) if head else [body]


def _numbered(body: str, count: int) -> list[str]:
    """Parts of `joined`; the whole body where one is missing. What a result itself says in that form was broken by `plain`."""
    spans, at = [], 0
    for number in range(1, count + 1):
        mark = NUMBERED.format(number, count)
        if (place := body.find(mark, at)) < 0:
            return [body]
        at = place + len(mark)
        spans.append((place, at))
    stops = [place - 2 for place, _ in spans[1:]] + [len(body)]
    return [body[start:stop] for (_, start), stop in zip(spans, stops)]


def plain(text: str, special: Iterable[str] = ()) -> str:
    """The text as data: every marker of either wire, special token and <|name|> is broken by a space after its first character.

    Nothing in it can be read as structure afterwards, neither by `parse` and `results` nor by a tokenizer.
    """
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate could be neither encoded nor written
    pattern = _pattern(frozenset(special))
    while pattern.search(text):  # a space may complete another token, in principle
        text = pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
    return text


_PATTERNS: dict[frozenset[str], re.Pattern] = {}


def _pattern(special: frozenset[str]) -> re.Pattern:
    if special not in _PATTERNS:
        tokens = {token for token in special if len(token) > 1 and not token[1].isspace() and not token.isspace()}
        names = sorted({*MARKERS, *tokens}, key=len, reverse=True)
        shapes = r"|\[result \d+ of \d+\]|<\|[^\s<>|]{1,40}\|>"  # the last: a special token of most tokenizers, known or not
        _PATTERNS[special] = re.compile("|".join(map(re.escape, names)) + shapes, re.IGNORECASE)
    return _PATTERNS[special]
