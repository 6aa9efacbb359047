"""prepare_code: data sets of problems become prompts; what happened is told by rule; a stopped run goes on where it was."""

import json
import sys

import pytest

from megatron_nb.data.prompts import PromptConfig, PromptSource, open_prompts
from megatron_nb.rewards.judging import JudgeFailed
from megatron_nb.sandbox.judge import Verdict
from tests.data.data_tokenizers import tiny, write_rows
from tools import prepare_code


class FakeJudge:
    """Runs nothing: a reference is the JSON list of the inputs it fails on; "broken" ones are `infrastructure`."""

    asked: list[str] = []
    alive_for = 10**9
    sandbox_lives = True

    def __init__(self, config):
        self.config = config

    async def verdicts(self, program, tests, limits, broken=False):
        if len(FakeJudge.asked) >= FakeJudge.alive_for:
            raise JudgeFailed("none of the judge services answers")
        FakeJudge.asked.append(program.source)
        fails = json.loads(program.source)
        return [Verdict("infrastructure" if f"broken {test.stdin}" in fails else "wrong answer" if test.stdin in fails
                        else "accepted", detail="why", cpu_s=0.1, peak_memory_mb=9) for test in tests]  # fmt: skip

    async def check(self):
        if not FakeJudge.sandbox_lives:
            raise JudgeFailed("the sandbox is broken")

    def close(self):
        pass


@pytest.fixture
def prepare(tmp_path, monkeypatch, capsys):
    """prepare(*arguments): its error or ""; programs are not run."""
    monkeypatch.setattr(prepare_code, "CodeJudge", FakeJudge)
    monkeypatch.setattr(FakeJudge, "asked", [])

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["prepare_code.py", "--out", str(tmp_path / "out/code.jsonl"), *arguments])
        try:
            prepare_code.main()
        except SystemExit as error:
            return str(error)
        return ""

    return run


def taco(name, fails=(), statement=None, tests="ab"):
    text = statement or f"{name} " + " ".join(f"{name}{number}" for number in range(20))
    return {"name": name, "question": text, "solutions": [json.dumps(list(fails))],
            "input_output": {"inputs": list(tests), "outputs": list(tests)}}  # fmt: skip


def written(tmp_path):
    rows = [json.loads(line) for line in (tmp_path / "out/code.jsonl").read_text().splitlines()]
    return rows, json.loads((tmp_path / "out/code.jsonl.report.json").read_text())


def test_rows_are_read_decontaminated_cleaned_and_reported_by_rule(tmp_path, prepare):
    rows = [
        taco("good"),
        taco("twice", statement=taco("good")["question"].replace(" ", " \n")),
        taco("seen", statement="before " + " ".join(f"hidden{n}" for n in range(13)) + " after"),
        taco("half", fails="a"),
        taco("bad", fails="ab"),
        {"question": "x", "input_output": "{"},
    ]
    train = write_rows(tmp_path / "train.jsonl", rows)
    secret = taco("secret", statement=" ".join(f"hidden{n}" for n in range(30)))
    evaluation = write_rows(tmp_path / "evaluation.jsonl", [secret, taco("unmet")])
    error = prepare("--source", f"taco={train}", "--against", f"exam={evaluation}", "--bad-rows", "skip")
    assert error == ""
    rows, report = written(tmp_path)
    assert [(row["id"], len(row["tests"])) for row in rows] == [("taco/good", 2), ("taco/half", 1)]
    counts = report["sources"]["taco"]
    assert (counts["rows"], counts["kept"], counts["tests"]) == (6, 2, 3)
    assert counts["rules"] == {
        "statement given twice": 1, "overlaps with an evaluation set": 1, "reference fails the test": 3,
        "reference fails every test": 1, "bad row": 1,
    }  # fmt: skip
    assert report["decontamination"]["sets"] == {"exam": {"texts": 2, "met": 1}}
    (pair,) = report["decontamination"]["pairs"]
    assert (pair["id"], pair["set"], pair["item"]) == ("taco/seen", "exam", "secret") and pair["excerpt"].startswith("hidden0 ")
    (bad,) = [row for row in report["rows"] if "bad row" in row["rules"]]
    assert bad["where"].endswith("train.jsonl:6") and "input_output is '{'" in bad["notes"][0]
    assert not (tmp_path / "out/code.jsonl.progress").exists()
    assert len(FakeJudge.asked) == 3  # what goes anyway costs no run


def test_its_rows_are_prompts_with_tests_for_the_reward(tmp_path, prepare):
    assert prepare("--source", f"t={write_rows(tmp_path / 'a.jsonl', [taco('one'), taco('two')])}") == ""
    prompts = open_prompts(PromptConfig({"code": PromptSource(str(tmp_path / "out/code.jsonl"))}, max_tokens=2000), tiny(), 1)
    assert len(prompts) == 2
    assert prompts.training[0].data["tests"] == [{"stdin": "a", "stdout": "a"}, {"stdin": "b", "stdout": "b"}]
    assert {"time_limit_s", "memory_limit_mb", "language", "reference"} <= set(prompts.training[0].data)


def test_a_stopped_run_goes_on_where_it_was_and_gives_the_same(tmp_path, prepare, monkeypatch):
    good = [taco(f"p{number}", fails="a" if number % 2 else "") for number in range(40)]
    train = write_rows(tmp_path / "train.jsonl", [*good, taco("again", statement=good[0]["question"])])
    exam = write_rows(tmp_path / "exam.jsonl", [taco("x", statement=good[3]["question"])])
    command = ["--source", f"t={train}", "--against", f"exam={exam}"]
    assert prepare(*command) == ""
    whole, FakeJudge.asked = written(tmp_path), []
    (tmp_path / "out/code.jsonl").unlink()

    monkeypatch.setattr(FakeJudge, "alive_for", 25)
    assert "none of the judge services answers" in prepare(*command)
    assert not (tmp_path / "out/code.jsonl").exists()
    progress = tmp_path / "out/code.jsonl.progress"
    done = progress.read_text().count("\n") - 1
    assert 5 < done <= 26
    progress.write_text(progress.read_text() + '{"where": "cut o')  # killed while it wrote
    monkeypatch.setattr(FakeJudge, "alive_for", 10**9)
    FakeJudge.asked = []
    assert prepare(*command) == ""
    assert written(tmp_path) == whole and len(FakeJudge.asked) <= 40 - done + 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [(lambda rows: rows, "other settings"), (lambda rows: [taco("new"), *rows[1:]], "train.jsonl:1 is not what it was")],
)
def test_going_on_with_other_settings_or_other_data_is_refused(tmp_path, prepare, monkeypatch, change, complaint):
    rows = [taco(f"p{number}") for number in range(30)]
    command = ["--source", f"t={write_rows(tmp_path / 'train.jsonl', rows)}"]
    monkeypatch.setattr(FakeJudge, "alive_for", 20)
    assert "error: " in prepare(*command)
    write_rows(tmp_path / "train.jsonl", change(rows))
    assert complaint in prepare(*command, *(["--margin", "9"] if complaint == "other settings" else []))


def test_a_bad_row_may_be_left_out_after_all_and_what_was_done_is_kept(tmp_path, prepare):
    rows = [taco(f"p{number}") for number in range(30)]
    command = ["--source", f"t={write_rows(tmp_path / 'train.jsonl', [*rows, {'question': 'x'}])}"]
    assert "--bad-rows skip" in prepare(*command)
    done, FakeJudge.asked = (tmp_path / "out/code.jsonl.progress").read_text().count("\n") - 1, []
    assert prepare(*command, "--bad-rows", "skip") == ""
    assert done > 0 and len(FakeJudge.asked) <= 30 - done and len(written(tmp_path)[0]) == 30


def test_a_folder_is_no_place_for_rows(tmp_path, prepare):
    (tmp_path / "out/code.jsonl").mkdir(parents=True)
    assert "is a folder" in prepare("--source", f"t={write_rows(tmp_path / 'a.jsonl', [taco('p')])}")


def test_broken_tests_go_but_a_broken_sandbox_stops_the_work(tmp_path, prepare, monkeypatch):
    command = ["--source", f"t={write_rows(tmp_path / 'a.jsonl', [taco('p', fails=['broken a'])])}"]
    monkeypatch.setattr(FakeJudge, "sandbox_lives", False)
    assert prepare(*command) == "error: the sandbox is broken"
    monkeypatch.setattr(FakeJudge, "sandbox_lives", True)
    assert prepare(*command) == ""
    rows, report = written(tmp_path)
    assert len(rows[0]["tests"]) == 1 and report["sources"]["t"]["rules"] == {"test is broken": 1}


def test_without_cleaning_nothing_runs(tmp_path, prepare):
    assert prepare("--source", f"t={write_rows(tmp_path / 'a.jsonl', [taco('p', fails='ab')])}", "--no-clean") == ""
    assert FakeJudge.asked == [] and len(written(tmp_path)[0]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--source", "bad=bad.jsonl"], "bad.jsonl:2: input_output is None"),
        (["--source", "good"], "NAME=PATH"),
        (["--source", "good=absent.jsonl"], "names no data file"),
        (["--source", "good=good.jsonl", "--against", "bad=bad.jsonl"], "bad.jsonl:2"),
        (["--source", "good=good.jsonl", "--margin", "0"], "margin=0.0 must be more than 0"),
        (["--source", "good=failing.jsonl"], "no row is left: {'reference fails the test': 2, "),
        (["--source", "good=good.jsonl", "--token-env", "ABSENT_TOKEN", "--judge-url", "http://x"], "ABSENT_TOKEN"),
    ],
)
def test_it_refuses_with_one_line_of_cause(tmp_path, prepare, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "good.jsonl", [taco("p")])
    write_rows(tmp_path / "bad.jsonl", [taco("p"), {"question": "x", "input_output": ""}])
    write_rows(tmp_path / "failing.jsonl", [taco("p", fails="ab")])
    if "ABSENT_TOKEN" in words:
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
    error = prepare(*arguments)
    assert error.startswith("error: ") and words in error


def test_it_shows_rate_and_time_left(tmp_path, prepare, monkeypatch, caplog):
    monkeypatch.setattr(prepare_code, "TELL_S", 0.0)
    with caplog.at_level("INFO"):
        assert prepare("--source", f"t={write_rows(tmp_path / 'a.jsonl', [taco(f'p{n}') for n in range(20)])}") == ""
    assert "20/20 rows, 20 kept" in caplog.text and "rows/s, about 0 s left" in caplog.text


def test_help_tells_every_option(prepare, capsys):
    prepare("--help")
    said = capsys.readouterr().out
    assert "--against NAME=PATH" in said and "goes on where it was" in said
