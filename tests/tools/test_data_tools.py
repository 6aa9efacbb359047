"""The data tools: the demo of SFT has the same data every time and split by id; prepare_data reports and refuses."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_nb.data.formats import read
from megatron_nb.data.render import Renderer
from megatron_nb.data.rows import BadRow
from megatron_nb.data.split import held_out
from tests.data.data_tokenizers import chat, tiny, write_rows
from tools import prepare_data
from tools.demo_sft_data import accepted, build, parse_call

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    if importlib.util.find_spec("bfcl_eval") is None:
        pytest.skip("package bfcl-eval is not installed")
    folder = tmp_path_factory.mktemp("demo_sft")
    for seed, name in enumerate(("one", "two")):  # own processes: nothing may hang on hash seeds or on earlier state
        command = [sys.executable, str(ROOT / "tools/demo_sft_data.py"), "--out", str(folder / name)]
        subprocess.run(command, check=True, capture_output=True, env={"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": str(seed)})
    return folder


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_sft_demos_data_are_the_same_every_time(made):
    files = sorted(path.name for path in (made / "one").iterdir())
    assert files == ["agent.heldout.jsonl", "agent.train.jsonl", "tools.heldout.jsonl", "tools.train.jsonl"]
    assert all((made / "one" / name).read_bytes() == (made / "two" / name).read_bytes() for name in files)


def test_the_sft_demos_data_may_be_built_twice_in_one_process(made, tmp_path):
    for _ in range(2):  # the simulated services keep their state
        build(tmp_path)
        for file in tmp_path.iterdir():
            assert file.read_bytes() == (made / "one" / file.name).read_bytes()


def test_the_sft_demos_split_goes_by_id_and_leaves_nothing_out(made):
    for source, count in (("tools", 2351), ("agent", 200)):
        files = {part: made / "one" / f"{source}.{part}.jsonl" for part in ("train", "heldout")}
        parts = {part: [row["id"] for row in rows(file)] for part, file in files.items()}
        assert all(held_out(name) for name in parts["heldout"]) and not any(map(held_out, parts["train"]))
        assert len(parts["train"]) + len(parts["heldout"]) == len(set(parts["train"] + parts["heldout"])) == count


def test_every_row_of_the_sft_demo_renders_with_its_calls_trained(made):
    renderer = Renderer(tiny())
    for source in ("tools", "agent"):
        items = list(read(str(made / "one" / f"{source}.heldout.jsonl"), source))
        for item, found in zip(items, renderer(items), strict=True):
            assert not isinstance(found, BadRow), found
            calls = sum(len(message.get("tool_calls", [])) for message in item.messages)
            trained = "".join(renderer.tokenizer.decode(found[0].ids[start:stop]) for start, stop, *_ in found[0].spans)
            assert trained.count("<tool_call>\n") == calls > 0


def test_accepted_answers_take_the_first_value_and_leave_out_what_may_be_left_out():
    values = {"base": [10], "unit": ["units", ""], "deep": ["", True], "rows": [["a", "b"]], "nested": [{"x": [1, 2]}]}
    assert accepted(values) == {"base": 10, "unit": "units", "rows": ["a", "b"], "nested": {"x": 1}}
    assert parse_call("f('a', n=[1])", {"f": ["name", "n"]}) == ("f", {"name": "a", "n": [1]})
    with pytest.raises((AssertionError, ValueError, SyntaxError)):
        parse_call("f(open('x'))", {"f": ["name"]})


@pytest.fixture
def prepare(tmp_path, monkeypatch, capsys):
    """prepare(*arguments): (what it printed, its error or "")."""
    tiny().save_pretrained(tmp_path / "tokenizer")
    always = ["prepare_data.py", "--tokenizer", str(tmp_path / "tokenizer"), "--workers", "0"]
    always += ["--cache-dir", str(tmp_path / "cache")]

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [*always, *arguments])
        try:
            prepare_data.main()
        except SystemExit as error:
            return capsys.readouterr().out, str(error)
        return capsys.readouterr().out, ""

    return run


def test_prepare_data_builds_and_reports(tmp_path, prepare, caplog):
    good = write_rows(tmp_path / "good.jsonl", [chat("q " * number, "a") for number in range(1, 40)])
    printed, error = prepare("--source", f"good={good}", "--seq-len", "40", "--vocab-size", "400")
    assert not error
    assert "good" in printed and "39" in printed and "over 40" in printed
    assert "longer than seq_len=40" in caplog.text and "left out" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--source", "bad=bad.jsonl"], "role is 'bot'"),
        (["--source", "good=good.jsonl", "--weight", "god=1"], "did you mean 'good'"),
        (["--source", "good=good.jsonl", "--vocab-size", "10"], "beyond model.vocab_size=10"),
        (["--source", "good=good.jsonl", "--seq-len", "10", "--overlong", "error"], "longer than seq_len=10"),
        (["--source", "good"], "NAME=VALUE"),
        (["--source", "good=absent.jsonl"], "names no data file"),
    ],
)
def test_prepare_data_refuses_with_one_line_of_cause(tmp_path, prepare, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "good.jsonl", [chat("some question", "an answer")])
    write_rows(tmp_path / "bad.jsonl", [{"messages": [{"role": "bot", "content": "x"}]}])
    _, error = prepare(*arguments)
    assert error.startswith("error: ") and words in error
