"""The stage synthesize_questions by its command: dry run, files, kill and resume, refused settings."""

import json
import os
import signal
import sys
import time

import pytest

from megatron_nb import synthesize, synthesize_questions
from megatron_nb.asking.ledger import Ledger
from megatron_nb.config import compose
from megatron_nb.search.corpus import Corpus
from megatron_nb.synthesis.question_verify import verify_chain
from tests.synthesis.small_wiki import small_corpus

STAGE = "synthesize_questions"


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    corpus = small_corpus(tmp_path_factory.mktemp("wiki"), pages=60)
    walk = ["walk.min_steps=2", "walk.max_steps=4", "walk.min_degree=0", "walk.cutoff=2019-12-31", "walk.window_days=4000"]
    return [f"corpus={corpus.folder}", "train=10", "heldout=4", *walk]


def run(words: list[str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["synthesize", "--config-name", STAGE, *words])
    synthesize.main()


def files_of(folder):
    return {name: (folder / "questions" / name).read_text() for name in ("questions.jsonl", "train.jsonl", "heldout.jsonl",
                                                                         "report.json", "README.md")}  # fmt: skip


def test_the_command_writes_verified_questions_a_card_and_a_summary(words, tmp_path, monkeypatch):
    run([*words, f"runs_dir={tmp_path}", "name=q"], monkeypatch)
    corpus = Corpus.open(words[0].removeprefix("corpus="))
    rows = [json.loads(line) for line in files_of(tmp_path / "q")["questions.jsonl"].splitlines()]
    assert len(rows) == 14 and all(verify_chain(corpus, row) is None for row in rows)
    assert all("2009-01-17" <= row["head_date"] <= "2019-12-31" for row in rows)  # 4000 days before the cutoff
    summary = json.loads((tmp_path / "q" / "summary.json").read_text())
    assert (summary["questions"], summary["questions_train"], summary["questions_heldout"]) == (14, 10, 4)
    assert summary["walks"] == 14 + sum(value for key, value in summary.items() if key.startswith("dropped_"))


def test_questions_for_reinforcement_learning_are_others_and_leave_the_first_as_they_were(words, tmp_path, monkeypatch):
    run([*words, f"runs_dir={tmp_path}", "name=plain"], monkeypatch)
    run([*words, f"runs_dir={tmp_path}", "name=q", "rl=6"], monkeypatch)
    assert files_of(tmp_path / "q")["train.jsonl"] == files_of(tmp_path / "plain")["train.jsonl"]
    parts = {part: [json.loads(line) for line in (tmp_path / "q" / "questions" / f"{part}.jsonl").read_text().splitlines()]
             for part in ("train", "rl", "heldout")}  # fmt: skip
    asked = {part: {(row["path"][-1]["title"], row["answer"]) for row in rows} for part, rows in parts.items()}
    assert len(asked["rl"]) == 6 and not asked["rl"] & asked["train"]
    held = {step["title"] for row in parts["heldout"] for step in row["path"]}
    assert not held & {step["title"] for row in parts["rl"] for step in row["path"]}


def test_a_killed_job_goes_on_to_the_same_files(words, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_nb.synthesis.questions.CHUNK", 4)
    run([*words, f"runs_dir={tmp_path}", "name=whole"], monkeypatch)
    child = os.fork()  # not a new interpreter: that would spend seconds on imports
    if child == 0:
        try:
            write, written = Ledger.__setitem__, []

            def write_or_die(self, key, row):
                write(self, key, row)
                written.append(key)
                if len(written) == 2:
                    os.kill(os.getpid(), signal.SIGKILL)

            monkeypatch.setattr(Ledger, "__setitem__", write_or_die)
            run([*words, f"runs_dir={tmp_path}", "name=killed"], monkeypatch)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL and not (tmp_path / "killed" / "summary.json").exists()
    run([*words, f"runs_dir={tmp_path}", "name=killed"], monkeypatch)
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    began = time.monotonic()
    run([*words, f"runs_dir={tmp_path}", "name=killed", "concurrency=7"], monkeypatch)  # nothing but files is left to do
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole") and time.monotonic() - began < 30


def test_another_seed_is_another_job_in_the_same_folder(words, tmp_path, monkeypatch):
    run([*words, f"runs_dir={tmp_path}", "name=q"], monkeypatch)
    first = files_of(tmp_path / "q")
    run([*words, f"runs_dir={tmp_path}", "name=q", "seed=2"], monkeypatch)
    assert files_of(tmp_path / "q")["questions.jsonl"] != first["questions.jsonl"]


def test_a_dry_run_tells_corpus_heads_writer_and_checks_and_does_nothing(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run([*words, "--dry-run", "solver.endpoint.base_url=http://nowhere:1", "solver.endpoint.model=strong"], monkeypatch)
    printed = capsys.readouterr().out
    for told in ("60 pages, 360 links", "dated at most 4000 days before 2019-12-31", "2 to 4 links over 360",
                 "train 10, heldout 4, apart by path", "templates, described", "strong: 4 tries closed-book"):  # fmt: skip
        assert told in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("train=-1", "train=-1 must be at least 0"),
        ("walk.min_steps=5", "min_steps=5 and max_steps=4"),
        ("walk.cutoff=yesterday", "must be an ISO day"),
        ("walk.tau=3", "walk.tau"),
        ("apart=nothing", "apart"),
        ("same_links=2", "same_links=2"),
        ("heldout_pages=1", "heldout_pages=1"),
        ("writer.tries=0", "tries=0"),
        ("solver.search_tries=-1", "search_tries=-1"),
    ],
)
def test_a_wrong_value_is_refused_before_any_work(words, word, rule):
    with pytest.raises(ValueError, match=rule):
        compose(synthesize_questions.QuestionsConfig, STAGE, [*words, word])


def test_quotes_are_written_by_templates_alone(words):
    with pytest.raises(ValueError, match="written by templates"):
        compose(synthesize_questions.QuestionsConfig, STAGE, [*words, "writer.form=quotes", "writer.endpoint.base_url=http://a:1"])


@pytest.mark.parametrize(
    ("words_", "told"),
    [(["corpus=/nowhere"], "/nowhere holds no finished corpus"), (["corpus="], "corpus is not given"),
     (["walk.min_degree=500", "walk.max_degree=600"], "no page can be")],  # fmt: skip
)
def test_what_no_walk_can_begin_from_is_refused_in_one_line(words, tmp_path, monkeypatch, capsys, words_, told):
    with pytest.raises(SystemExit) as stopped:
        run([*words, f"runs_dir={tmp_path}", *words_], monkeypatch)
    assert stopped.value.code == 1 and told in capsys.readouterr().err and not list(tmp_path.iterdir())
