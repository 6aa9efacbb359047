"""What training has met of an evaluation is found in rows of any format, named by file and line, and never looked for twice."""

from __future__ import annotations

import json

import pytest
import yaml

from megatron_nb.evals import overlap
from megatron_nb.evals.harness import read_excluded
from megatron_nb.evals.overlap import find_overlaps, own_texts, stages_in
from megatron_nb.evals.task import Item
from tools import overlap as tool

LONG = "A farmer has seventeen sheep and all but nine of them run away during the storm, so how many are left in the field?"
OTHER = "Which two rivers meet below the old mill, and who built the first bridge that crossed both of them at one place?"
FORM = "Reason step by step and write the final answer into a box at the very end of what you say, on a line of its own."


def item(name: str, text: str) -> Item:
    return Item(name, [{"role": "system", "content": LONG}, {"role": "user", "content": text}])


def row_file(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def met(root, path, items, **settings):
    return find_overlaps(root, {"sft": {"a": path}}, items, **{"workers": 0, **settings})


ROWS = {
    "messages": {"messages": [{"role": "user", "content": f"Please: {LONG}"}, {"role": "assistant", "content": "9"}]},
    "answer": {"messages": [{"role": "user", "content": "Tell me a riddle."}, {"role": "assistant", "content": LONG.upper()}]},
    "sharegpt": {"conversations": [{"from": "human", "value": LONG}, {"from": "gpt", "value": "9"}]},
    "prompt": {"prompt": LONG, "answer": "9"},
    "preference": {"prompt": [{"role": "user", "content": LONG}], "chosen": "9", "rejected": "8"},
    "text": {"text": f"Exercise 3. {LONG} Solution: nine."},
}


@pytest.mark.parametrize("form", list(ROWS))
def test_an_item_is_found_in_rows_of_every_format_and_named_by_file_and_line(tmp_path, form):
    path = row_file(tmp_path / "rows.jsonl", {"prompt": "Something else."}, ROWS[form])
    report = met(tmp_path, path, {"riddles": [item("r1", LONG), item("r2", OTHER)]})
    assert json.loads((tmp_path / "overlap.json").read_text()) == {"riddles": ["r1"]}
    assert report["tasks"] == {"riddles": {"items": 2, "excluded": 1, "stages": {"sft": 1}}}
    (pair,) = report["pairs"]
    assert (pair["task"], pair["item"], pair["by"], pair["where"]) == ("riddles", "r1", "words", f"{path}:2")


def test_what_is_no_text_of_a_row_meets_nothing(tmp_path):
    numbers = " ".join(map(str, range(20)))
    row = {"prompt": "Sort them.", "tests": [{"stdin": numbers}], "tools": [{"description": LONG}], "id": LONG}
    report = met(tmp_path, row_file(tmp_path / "rows.jsonl", row), {"t": [item("a", f"Sort {numbers}"), item("b", LONG)]})
    assert report["tasks"]["t"]["excluded"] == 0


def test_a_short_question_is_found_without_the_form_that_its_task_adds(tmp_path):
    asked = ["What is seven times eight?", "Who wrote Faust?"]
    items = {"short": [item(str(k), f"{FORM} {text} {FORM}") for k, text in enumerate(asked)]}
    rows = {"prompt": asked[1]}, {"prompt": f"{asked[0]} Tell me."}, {"prompt": f"{FORM} What is the tallest tree? {FORM}"}
    report = met(tmp_path, row_file(tmp_path / "rows.jsonl", *rows), items)
    assert [(pair["item"], pair["where"][-1]) for pair in report["pairs"]] == [("1", "1")]
    report = met(tmp_path, row_file(tmp_path / "form.jsonl", {"prompt": f"{FORM} {asked[0]} {FORM}"}), items)
    assert [pair["item"] for pair in report["pairs"]] == ["0"]


def test_own_texts_cut_what_all_begin_and_end_with_and_nothing_of_a_single_one():
    assert own_texts(["say: a b now", "say: c now"], 2) == [["a b"], ["c", "say c", "c now"]]
    assert own_texts(["say a", "say a b"], 9) == [[""], ["b"]]
    assert own_texts(["say: a now"], 9) == [["say a now"]]
    assert own_texts(["x a b y z", "x c d e y z"], 4) == [["a b", "x a b y", "a b y z"], ["c d e", "x c d e", "c d e y"]]


@pytest.mark.parametrize(("text", "found"), [("Of seventeen sheep nine run away; a farmer has how many left?", True),
                                             ("Count the bridges of the town.", False)])  # fmt: skip
def test_an_id_counts_where_the_words_are_alike(tmp_path, text, found):
    path = row_file(tmp_path / "rows.jsonl", {"task_id": "riddle/7", "prompt": text})
    report = met(tmp_path, path, {"riddles": [item("riddle/7", "A farmer has seventeen sheep; nine run away. How many left?")]})
    assert [pair["by"] for pair in report["pairs"]] == (["id"] if found else [])


@pytest.fixture
def many(tmp_path, monkeypatch):
    """Rows of three batches, an item in the first and in the last; the calls of look_through."""
    monkeypatch.setattr(overlap, "BATCH", 10)
    rows = [{"prompt": f"question {k}"} for k in range(25)]
    rows[3], rows[24] = {"prompt": LONG}, {"prompt": OTHER}
    looked, original = [], overlap.look_through

    def look_through(look, part):
        if part.begin == look_through.dies_at:
            raise KeyboardInterrupt
        looked.append(part.begin)
        return original(look, part)

    look_through.dies_at = None
    monkeypatch.setattr(overlap, "look_through", look_through)
    return row_file(tmp_path / "rows.jsonl", *rows), looked, look_through


ITEMS = {"riddles": [item("r1", LONG), item("r2", OTHER), item("r3", "Never seen by anybody at all.")]}


def test_a_scan_goes_on_where_it_was_stopped_and_does_nothing_twice(tmp_path, many):
    path, looked, look_through = many
    look_through.dies_at = 20
    with pytest.raises(KeyboardInterrupt):
        met(tmp_path, path, ITEMS)
    assert looked == [0, 10] and not (tmp_path / "overlap.json").exists()
    look_through.dies_at = None
    report = met(tmp_path, path, ITEMS)
    assert looked == [0, 10, 20] and report["tasks"]["riddles"]["excluded"] == 2
    assert met(tmp_path, path, ITEMS) == report and looked == [0, 10, 20]


def test_changed_rows_and_changed_items_are_looked_at_anew(tmp_path, many):
    path, looked, _ = many
    met(tmp_path, path, ITEMS)
    with open(path, "a") as file:
        file.write(json.dumps({"prompt": "Never seen by anybody at all."}) + "\n")
    assert met(tmp_path, path, ITEMS)["tasks"]["riddles"]["excluded"] == 3
    before = len(looked)
    met(tmp_path, path, {"riddles": [item("r1", OTHER)]})
    assert len(looked) == before + 3


def test_processes_find_what_one_finds(tmp_path, monkeypatch):
    monkeypatch.setattr(overlap, "BATCH", 50)
    path = row_file(tmp_path / "rows.jsonl", *[{"prompt": f"question {k}"} for k in range(450)], {"prompt": LONG})
    (tmp_path / "one").mkdir()
    assert met(tmp_path, path, ITEMS, workers=2) == met(tmp_path / "one", path, ITEMS)


def test_rows_and_paths_that_cannot_be_read_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\nnonsense\n')
    stages = {"sft": {"a": str(path)}, "rl": {"b": str(tmp_path / "later.jsonl")}}
    report = find_overlaps(tmp_path, stages, ITEMS, workers=0)
    assert "rl, source b" in report["missing"][0] and "later.jsonl" in report["missing"][0]
    assert f"{path}:2" in report["bad_rows"][0]
    with pytest.raises(ValueError, match="no training rows to look through"):
        find_overlaps(tmp_path, {"rl": stages["rl"]}, ITEMS, workers=0)


@pytest.fixture
def cascade(tmp_path):
    """Three stages: sft trained on the item, rl holds it out only, a chain's old sft was moved aside."""
    bad, good = row_file(tmp_path / "bad.jsonl", {"prompt": LONG}), row_file(tmp_path / "good.jsonl", {"prompt": "Hello."})
    configs = {
        "sft": {"data": {"sources": {"a": {"path": bad}, "b": {"path": good}}, "validation": {"v": {"path": "gone"}}}},
        "rl": {"prompts": {"sources": {"a": {"path": good}}, "heldout": {"a": {"path": bad}}}},
        "sft.before-1": {"data": {"sources": {"c": {"path": bad}}}},
        "evaluate_rl": {"tasks": {"riddles": {"path": bad}}},
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def test_stages_in_names_what_is_trained_on_and_nothing_else(cascade):
    assert stages_in(cascade) == {"sft": {"a": str(cascade / "bad.jsonl"), "b": str(cascade / "good.jsonl")},
                                  "rl": {"a": str(cascade / "good.jsonl")}}  # fmt: skip
    assert list(stages_in(cascade / "rl")) == ["rl"]


def test_the_tool_refuses_a_headline_task_that_was_trained_on_and_its_file_excludes(cascade, capsys):
    path = row_file(cascade / "task.jsonl", {"problem": LONG, "answer": "9"}, {"problem": OTHER, "answer": "0"})
    words = ["tasks.riddles.kind=math", f"tasks.riddles.path={path}"]
    assert tool.main([str(cascade), "--workers", "0", *words]) == 0
    assert "sft 1" in capsys.readouterr().out
    assert tool.main([str(cascade), "--workers", "0", "--headline", "riddles", *words]) == 1
    assert f"take out {cascade / 'bad.jsonl'}:1" in capsys.readouterr().err
    excluded = read_excluded(str(cascade / "overlap.json"), ["riddles"])
    assert len(excluded["riddles"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "tasks.t.kind=math"], "is no folder"),
        ([".", "--training", "x", "tasks.t.kind=math", "tasks.t.path=task.jsonl"], "NAME=PATH"),
        ([".", "--tasks-of", "rl", "tasks.t.kind=math"], "give either it or words"),
        ([".", "--headline", "u", "tasks.t.kind=math", "tasks.t.path=task.jsonl"], "there is no such task; there are t"),
        (["."], "tasks is empty"),
    ],
)
def test_what_the_tool_cannot_do_is_said_with_a_remedy(cascade, monkeypatch, capsys, arguments, message):
    row_file(cascade / "task.jsonl", {"problem": LONG, "answer": "9"})
    monkeypatch.chdir(cascade)
    assert tool.main(arguments) == 2
    assert message in capsys.readouterr().err
