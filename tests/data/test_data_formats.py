"""Rows -> Conversation: the formats, the dirt that is mended, and the faults that are refused."""

import json

import pytest

from megatron_nb.data.formats import Text, parse
from megatron_nb.data.rows import BadRow
from megatron_nb.data.schemas import schema

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


def call(name="f", arguments=None, **more):
    return {"type": "function", "function": {"name": name, "arguments": {} if arguments is None else arguments}, **more}


def calling(*calls):
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def parsed(messages, **more):
    return parse({"messages": messages, **more}, "dir/rows.jsonl:7", "source")


def test_openai_messages_with_tools():
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
    thinking = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    found = parsed([{"role": "system", "content": "s"}, USER, thinking], tools=[tool], id="row-1")
    assert found.tools == [tool]
    assert (found.sample_id, found.source) == ("row-1", "source")
    assert found.messages == [{"role": "system", "content": "s"}, USER, {**thinking, "loss": 1}]


def test_sharegpt_roles_calls_and_observations():
    rows = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "let me look"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "result"},
        {"from": "gpt", "value": "a"},
    ]
    found = parse({"conversations": rows, "tools": '[{"name": "f"}]'}, "rows.jsonl:1", "source")
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    turn, result = found.messages[2:4]
    assert turn["content"] == "let me look"  # merged with the call that follows
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert result["tool_call_id"] == turn["tool_calls"][0]["id"]
    assert found.tools[0]["function"]["name"] == "f"


def test_conversations_may_use_role_and_content():
    found = parse({"conversations": [USER, ANSWER], "system": "s"}, "rows.jsonl:1", "source")
    assert [message["content"] for message in found.messages] == ["s", "q", "a"]


def test_plain_text_rows():
    assert parse({"text": "words"}, "rows.jsonl:3", "source") == Text("words", "rows.jsonl:3", "source")


@pytest.mark.parametrize(
    "arguments", [{"x": 1}, '{"x": 1}', json.dumps('{"x": 1}'), [{"x": 1}]], ids=["object", "text", "text twice", "list"]
)
def test_arguments_become_an_object(arguments):
    found = parsed([USER, calling(call(arguments=arguments))])
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}


@pytest.mark.parametrize("arguments", [None, "", [], "null"])
def test_no_arguments_become_an_empty_object(arguments):
    row = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    assert parsed([USER, calling(row)]).messages[1]["tool_calls"][0]["function"]["arguments"] == {}


INNER = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
WRAPPED = {"type": "function", "function": INNER}


@pytest.mark.parametrize(
    "tools",
    [
        [INNER],
        [WRAPPED],
        [{"type": "function", "function": WRAPPED}],
        [[WRAPPED]],
        json.dumps([WRAPPED]),
        [json.dumps(WRAPPED)],
        json.dumps(json.dumps([WRAPPED])),
        WRAPPED,
    ],
)
def test_tools_are_unwrapped_however_often_they_are_wrapped(tools):
    assert parsed([USER, ANSWER], tools=tools).tools == [WRAPPED]


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_no_tools_is_none(tools):
    assert parsed([USER, ANSWER], tools=tools).tools is None


def test_python_type_names_become_json_schema_types():
    dirty = {
        "type": "dict",
        "properties": {
            "type": {"type": "str"},  # a property that is called type
            "n": {"type": "int"},
            "ratio": {"type": "float", "description": "type: float"},
            "names": {"type": "List[str]"},
            "rows": {"type": "list", "items": {"type": "dict"}},
            "maybe": {"type": "Optional[bool]"},
            "late": {"type": "str, optional"},
            "free": {"type": "any", "default": 1},
            "either": {"anyOf": [{"type": "tuple"}, {"type": "NoneType"}]},
            "several": {"type": ["str", "None"]},
            "java": {"type": "HashMap"},
        },
    }
    clean = schema(dirty)
    assert clean["type"] == "object"
    properties = clean["properties"]
    assert properties["type"] == {"type": "string"}
    assert properties["n"] == {"type": "integer"}
    assert properties["ratio"] == {"type": "number", "description": "type: float"}
    assert properties["names"] == {"type": "array", "items": {"type": "string"}}
    assert properties["rows"] == {"type": "array", "items": {"type": "object"}}
    assert properties["maybe"] == {"type": "boolean"}
    assert properties["late"] == {"type": "string"}
    assert properties["free"] == {"default": 1}
    assert properties["either"] == {"anyOf": [{"type": "array"}, {"type": "null"}]}
    assert properties["several"] == {"type": ["string", "null"]}
    assert properties["java"] == {"type": "HashMap"}


def test_parameters_without_a_schema_around_them_get_one():
    (tool,) = parsed([USER, ANSWER], tools=[{"name": "f", "parameters": {"x": {"type": "int"}}}]).tools
    assert tool["function"]["parameters"] == {"type": "object", "properties": {"x": {"type": "integer"}}}


def test_results_without_ids_are_paired_by_position_and_with_ids_by_id():
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    found = parsed([USER, calling(call("f"), call("g")), *results])
    ids = [made["id"] for made in found.messages[1]["tool_calls"]]
    assert len(set(ids)) == 2
    assert [(message["tool_call_id"], message["name"]) for message in found.messages[2:]] == [(ids[0], "f"), (ids[1], "g")]

    named = [{"role": "tool", "content": "2", "tool_call_id": "b"}, {"role": "tool", "content": "1", "tool_call_id": "a"}]
    found = parsed([USER, calling(call("f", id="a"), call("g", id="b")), *named])
    assert [message["name"] for message in found.messages[2:]] == ["g", "f"]


def test_consecutive_assistant_messages_are_merged():
    found = parsed([USER, {**ANSWER, "reasoning_content": "r"}, calling(call("f")), calling(call("g"))])
    (turn,) = found.messages[1:]
    assert (turn["content"], turn["reasoning_content"]) == ("a", "r")
    assert [made["function"]["name"] for made in turn["tool_calls"]] == ["f", "g"]


def test_calls_written_as_text_stay_text():
    xml = "<use_mcp_tool><server_name>s</server_name><tool_name>t</tool_name><arguments>{}</arguments></use_mcp_tool>"
    found = parsed([USER, {"role": "assistant", "content": xml}, {"role": "user", "content": "result"}])
    assert found.messages[1]["content"] == xml
    hermes = {"role": "assistant", "content": '<tool_call>{"name": "f"}</tool_call>'}
    assert parsed([USER, hermes, {"role": "tool", "content": {"ok": True}}]).messages[2]["content"] == '{"ok": true}'


def test_content_in_parts_and_null():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = parsed([{"role": "user", "content": parts}, calling(call())])
    assert [message["content"] for message in found.messages] == ["ab", ""]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((None, None), [1, 1]),
        ((0, None), [0, 1]),
        ((1, None), [1, 0]),  # only flagged turns are trained
        ((None, 1), [0, 1]),
        ((0, 1), [0, 1]),
        ((True, False), [1, 0]),
        ((0, 0), [0, 0]),
    ],
)
def test_per_turn_loss(flags, expected):
    turns = [ANSWER | ({} if flag is None else {"loss": flag}) for flag in flags]
    found = parsed([USER, turns[0], USER, turns[1]])
    assert [message["loss"] for message in found.messages if message["role"] == "assistant"] == expected


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "bot", "content": "x"}, ANSWER], ["message 1", "role is 'bot'", "known roles are system"]),
        ([{"content": "x"}], ["role is None"]),
        ([{"role": "tool", "content": "x"}, ANSWER], ["message 1", "a tool message after nothing"]),
        ([USER, {"role": "tool", "content": "x"}, ANSWER], ["message 2", "a tool message after user"]),
        ([USER], ["roles are user", "needs an assistant turn"]),
        ([USER, {"role": "assistant", "content": ""}], ["assistant message 2 is empty"]),
        ([USER, {"role": "assistant", "content": 3}], ["message 2", "content is '3'"]),
        ([USER, {"role": "user", "content": [{"type": "image_url"}]}], ["message 2", "list of text parts"]),
        ([USER, calling({"function": {"arguments": {}}})], ["message 2", "has no name"]),
        ([USER, calling(call(arguments="{x}"))], ["message 2", "arguments an object"]),
        ([USER, calling(call(arguments=[1, 2]))], ["message 2", "[1, 2]"]),
        ([USER, calling(call()), {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}], ["without a call"]),
        (
            [USER, calling(call(id="a")), {"role": "tool", "content": "1", "tool_call_id": "b"}],
            ["tool_call_id is 'b'", "are a"],
        ),
        ([USER, {**ANSWER, "loss": 2}], ["message 2", "loss is 2"]),
        ([USER, "hello"], ["message 2", "found a str"]),
        ([], ["list of messages that is not empty"]),
    ],
)
def test_a_wrong_row_is_refused_with_place_value_and_rule(messages, words):
    with pytest.raises(BadRow) as error:
        parsed(messages)
    for word in ["dir/rows.jsonl:7", *words]:
        assert word in str(error.value), str(error.value)


def test_tools_without_a_name_are_refused():
    with pytest.raises(BadRow, match="has no name"):
        parsed([USER, ANSWER], tools=[{"description": "d"}])


def test_a_prompt_needs_no_assistant_turn():
    assert parse({"messages": [USER]}, "rows.jsonl:1", "source", answers=False).messages == [USER]


def test_an_explicit_format_wants_its_key():
    with pytest.raises(BadRow, match="needs conversations"):
        parse({"messages": [USER, ANSWER]}, "rows.jsonl:1", "source", "sharegpt")
