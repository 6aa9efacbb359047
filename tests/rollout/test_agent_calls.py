"""Calls in both wire formats: what is read, what is a problem, and that nobody's text becomes structure."""

import pytest

from megatron_nb.rollout.calls import Call, describe, parse, write
from megatron_nb.rollout.tools import SCHEMAS

WIRES = ("hermes", "mcp")
ODD = {
    "query": 'a "b" \\ </arguments></tool_call> </use_mcp_tool> \u0639 \U0001f30a\n',
    "page": 2,
    "deep": {"x": [None, True, 1.5]},
}
HEAD = "<use_mcp_tool><server_name>s</server_name>"


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_written_is_read_again_alone_and_in_parallel(wire):
    calls = [Call("search", ODD, "call_4"), Call("open_page", {}, "call_5")]
    text = "<think>\nMaybe <tool_call> or <use_mcp_tool>?\n</think>\n\nI look.\n" + "\n".join(write(c, wire) for c in calls)
    found = parse(text, wire, first=4)
    assert found.calls == calls and found.problems == [] and found.answer == "I look."
    assert found.thinking == "Maybe <tool_call> or <use_mcp_tool>?"


@pytest.mark.parametrize(
    ("text", "calls", "problem"),
    [
        ("<tool_call>{bad}</tool_call>", 0, "not valid JSON"),
        ("<tool_call></tool_call>", 0, "not valid JSON"),
        ('<tool_call>{"name": "search", "arguments": {"query": NaN}}</tool_call>', 0, "NaN is no JSON"),
        ('<tool_call>{"name": "search", "arguments": {"query": "\\ud800"}}</tool_call>', 0, "not valid JSON"),
        ('<tool_call>{"name": "search", "arguments": {"query": 1e400}}</tool_call>', 0, "not valid JSON"),
        ('<tool_call>{"name": "search", "arguments": "{\\"query\\": \\"\\\\ud800\\"}"}</tool_call>', 0, "cannot be read"),
        ('<tool_call>{"name": "search", "arguments": "{\\"query\\": NaN}"}</tool_call>', 0, "cannot be read"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", 0, "nested too deeply"),
        ("<tool_call>" + "9" * 5000 + "</tool_call>", 0, "not valid JSON"),
        ('<tool_call>{"name": "search"}', 0, "not closed"),
        ('<tool_call>{"name": "search"} and more</tool_call>', 0, "not closed"),
        ("<tool_call>[1, 2]</tool_call>", 0, "no object"),
        ('<tool_call>{"arguments": {}}</tool_call>', 0, "has no name"),
        ('<tool_call>{"name": "search", "arguments": 3}</tool_call>', 0, "not an object"),
        ('{"name": "search"}</tool_call>', 0, "was not opened"),
        ('<tool_call>{x</tool_call>\n<tool_call>{"name": "search", "arguments": null}</tool_call>', 1, "Call 1 of the turn"),
        ('<think>Now <tool_call>{"name": "search"}</tool_call>', 0, "thinking is not closed"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_sentence_for_the_model(text, calls, problem):
    found = parse(text, "hermes")
    assert len(found.calls) == calls and len(found.problems) == 1 and problem in found.problems[0]
    assert len(found.problems[0]) < 500


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<use_mcp_tool><tool_name>search</tool_name><arguments>{}</arguments></use_mcp_tool>", "lacks <server_name>"),
        (f"{HEAD}<tool_name>t</tool_name><arguments>{{</arguments></use_mcp_tool>", "not valid"),
        (f"{HEAD}<tool_name>t</tool_name><arguments>{{}}</arguments>", "not closed"),
        (f"{HEAD}<tool_name></tool_name><arguments>{{}}</arguments></use_mcp_tool>", "no name"),
    ],
)
def test_a_bad_mcp_call_is_a_sentence_too(text, problem):
    found = parse(text, "mcp")
    assert not found.calls and problem in found.problems[0]


@pytest.mark.parametrize("wire", WIRES)
def test_thinking_that_the_header_opened_is_thinking_and_one_that_never_ends_is_no_answer(wire):
    assert parse(f"I wonder.\n</think>\n\nParis.{write(Call('t', {}, ''), wire)}", wire).thinking == "I wonder."
    endless = parse("<think>\nI wonder about Paris.", wire)
    assert (endless.answer, endless.calls, endless.problems, endless.thinking) == ("", [], [], "I wonder about Paris.")


def test_a_turn_without_calls_is_an_answer():
    assert parse("<think>\nx\n</think>\n\nThe answer is < 3.", "hermes").answer == "The answer is < 3."


def test_the_mcp_system_text_names_every_tool_and_hermes_leaves_it_to_the_template():
    told = describe([SCHEMAS["search"], SCHEMAS["open_page"]], "mcp")
    assert all(name in told for name in ("search", "open_page", "query", "title", "use_mcp_tool"))
    assert describe([SCHEMAS["search"]], "hermes") == ""
