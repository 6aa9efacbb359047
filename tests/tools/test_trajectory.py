"""Looking at trajectories: what happened is shown, from traces and from rows of messages; no text can break the page."""

import json
from html.parser import HTMLParser

import pytest

from megatron_nb.records import Group, Score
from megatron_nb.rollout.calls import Call, write
from megatron_nb.rollout.store import write_step
from megatron_nb.rollout.trace import append
from tests.rollout.agent_setup import Pages, agent_of, call, play, prompt_of
from tools import trajectory, trajectory_html
from tools.trajectory_read import read

NASTY = "</div></details><script>alert(1)</script> [bold red]not markup[/] & \x1b[31mred \u202eright to left"


@pytest.fixture
def traced(tmp_path):
    """A run's folder: an episode that ended well, and one whose tools failed, with the scores of the step."""
    pages = Pages({"Loire": NASTY}, {"down": OSError("no route")})
    path = tmp_path / "rollouts" / "trace-step-00000003.replica-0.jsonl"
    first = f"<think>\nhm\n</think>\n\nLook.{call()}<tool_call>{{bad</tool_call>"
    turns = [first, call("open_page", title="X"), "It is Nantes."]
    prompt, groups = prompt_of((agent := agent_of(search=pages)).tokenizer, text=f"Where? {NASTY}"), []
    for name, said in (("a", turns), ("b", [call(query="down")])):
        _, rows = play(agent, said, prompt, trace=lambda row, name=name: append(path, {**row, "rollout_id": f"{name}/0"}))
        for row in rows:
            row.group_id, row.score = name, row.score or Score(0.75, None, {"answer": 1.0})
        for number, turn in enumerate(t for row in rows for t in row.turns if t.kind == "assistant"):
            turn.reward = number / 4
        groups.append(Group(name, prompt, rows))
    write_step(tmp_path, 3, groups)
    return path


def test_a_trace_is_shown_with_its_turns_calls_results_and_scores(traced, capsys):
    good, bad = read(traced)
    assert (good.name, good.status, good.reward, good.count("ok"), good.count("error")) == ("a/0", "done", 0.75, 1, 2)
    assert [turn.reward for turn in good.said] == [0.0, 0.25, 0.5] and good.said[0].thinking == "hm"
    assert (bad.status, bad.reward) == ("invalid", None) and "search failed" in bad.reason and bad.count("failed") == 1
    assert trajectory.main([str(traced), "--limit", "0"]) == 0
    shown = capsys.readouterr().out
    expected = ("a/0", "b/0", "invalid", "reward 0.75", '{"query": "river"}', "cannot be read", "Error: ", "It is Nantes.")
    assert not [told for told in expected if told not in shown]
    assert "[bold red]not markup" in shown and "\x1b[31mred" not in shown and "\u202e" not in shown
    assert trajectory.main([str(traced), "--status", "invalid"]) == 0 and "no route" in capsys.readouterr().out
    assert trajectory.main([str(traced.parents[1]), "--show", "1"]) == 0  # the newest trace of a run
    assert "no route" in capsys.readouterr().out


class Tags(HTMLParser):
    """The tags of a page, and whether they are closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], set()

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_holds_everything_and_nothing_said_becomes_markup(traced, tmp_path):
    page = tmp_path / "page.html"
    assert trajectory.main([str(traced), "--html", str(page)]) == 0
    tags = Tags()
    tags.feed(text := page.read_text())
    assert tags.open == [] and not tags.seen & {"script", "img", "link", "iframe", "bold"}
    assert "default-src 'none'" in text and "It is Nantes." in text and "no route" in text and "&lt;script&gt;" in text
    assert "http" not in text.replace("http-equiv", "")


@pytest.mark.parametrize("wire", ["hermes", "mcp"])
def test_rows_of_messages_are_shown_with_what_is_trained_and_what_the_critic_said(tmp_path, wire):
    made = Call("search", {"query": "river"}, "call_0")
    asked = [{"role": "user", "content": "Where?"}]
    if wire == "hermes":
        function = {"name": made.name, "arguments": json.dumps(made.arguments)}
        said = {"role": "assistant", "content": "Look.", "reasoning_content": "hm", "tool_calls": [{"function": function}]}
        answer = {"role": "tool", "name": "search", "content": "Error: nothing"}
    else:
        said = {"role": "assistant", "content": f"<think>\nhm\n</think>\n\nLook.\n{write(made, wire)}"}
        answer = {"role": "user", "content": "Error: nothing"}
    end = {"role": "assistant", "content": "Nantes.", "loss": 1}
    verdict = {"logic": 1, "gain": 0, "reasons": {"logic": "fine", "gain": "nothing new"}}
    path = tmp_path / "trajectories.jsonl"
    row = {"id": "q", "messages": [*asked, {**said, "loss": 0}, answer, end], "critic": [verdict]}
    path.write_text(json.dumps(row) + "\n{")
    (one,) = read(path)
    first, tool, last = one.turns
    assert (first.thinking, first.text, first.calls, first.loss) == ("hm", "Look.", [("search", '{"query": "river"}')], 0)
    assert first.verdict == "logic 1; gain 0: nothing new"
    assert tool.results[0]["status"] == "error" and (last.text, last.loss) == ("Nantes.", 1)
    assert "nothing new" in trajectory_html.page("t", [one])


def test_half_a_surrogate_pair_is_shown_as_missing(tmp_path, capsys):
    path, half = tmp_path / "x.jsonl", "half \ud83d pair"
    path.write_text(json.dumps({"id": half, "messages": [{"role": role, "content": half} for role in ("user", "assistant")]}))
    assert trajectory.main([str(path)]) == 0 and "half \ufffd pair" in capsys.readouterr().out
    assert trajectory.main([str(path), "--html", str(tmp_path / "x.html")]) == 0


@pytest.mark.parametrize("text", ["", "{}\n{}\n", "not json\n{}\n", "[" * 100_000 + "\n{}\n"])
def test_files_without_trajectories_are_refused_by_name(tmp_path, capsys, text):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    assert trajectory.main([str(path)]) == 2 and "x.jsonl" in capsys.readouterr().err
    assert trajectory.main([str(tmp_path / "no.jsonl")]) == 2 and trajectory.main([str(tmp_path)]) == 2
