"""A sweep: its points get folders of their own, none stops the others, none that is done runs again, and one table has all."""

import json
import subprocess
import sys

import pytest

from megatron_nb import sft, sweep
from megatron_nb.config import compose
from megatron_nb.sweep import differing, name_of
from tools import sweep as table

SMALL = ["model=tiny", "parallel=cpu1", "context=2k", "data=files", "data.sources.a.path=rows.jsonl"]


def test_a_point_is_named_by_what_the_others_do_not_have():
    points = [["a=1", "optimizer.lr=1e-3", "model=tiny"], ["a=1", "optimizer.lr=2e-3", "model=tiny"]]
    assert [name_of(words) for words in differing(points)] == ["lr=1e-3", "lr=2e-3"]
    assert name_of(["data.path=/x/y z"]) == "path=y_z"


def test_points_whose_names_would_be_the_same_get_folders_of_their_own(tmp_path, monkeypatch, started):
    calls, _ = started
    multirun(monkeypatch, f"runs_dir={tmp_path}", "name=s", "data.tokenizer=/a/t,/b/t")
    assert len(set(calls)) == 2


@pytest.fixture
def started(monkeypatch):
    """The points that were run; those whose name is in `failing` fail."""
    calls, failing = [], set()

    def run(command):
        folder = command[command.index("--config-dir") + 1]
        name = folder.split("/")[-2]
        calls.append(name)
        if name in failing:
            return subprocess.CompletedProcess(command, 1)
        (sweep.Path(folder).parent / "summary.json").write_text('{"heldout_loss": 2.0, "seed": 1}')
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(sweep.subprocess, "run", run)
    yield calls, failing
    sweep.AFTER_SWEEP.clear()


def multirun(monkeypatch, *words):
    sweep.AFTER_SWEEP.clear()
    monkeypatch.setattr(sys, "argv", ["sft", "-m", *SMALL, *words])
    sft.main()


def test_a_point_that_fails_stops_no_other_and_runs_alone_by_the_same_command(tmp_path, monkeypatch, started):
    calls, failing = started
    words = [f"runs_dir={tmp_path}", "name=s", "optimizer.lr=1e-3,2e-3", "seed=1,2"]
    failing.add("lr=0.001-seed=2")
    with pytest.raises(SystemExit, match="1"):
        multirun(monkeypatch, *words)
    assert calls == ["lr=0.001-seed=1", "lr=0.001-seed=2", "lr=0.002-seed=1", "lr=0.002-seed=2"]
    failing.clear()
    calls.clear()
    multirun(monkeypatch, *words)
    assert calls == ["lr=0.001-seed=2"]
    monkeypatch.setattr(sys, "argv", ["sweep", str(tmp_path / "s")])
    table.main()
    lines = (tmp_path / "s" / "sweep.csv").read_text().splitlines()
    assert lines[0] == "point,optimizer.lr,seed,state,heldout_loss,seed" and len(lines) == 5
    assert (tmp_path / "s" / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_what_points_run_is_what_was_composed_for_them(tmp_path, monkeypatch, started):
    multirun(monkeypatch, f"runs_dir={tmp_path}", "name=s", "optimizer.lr=1e-3,2e-3")
    read = compose(sft.SftConfig, "job", folder=tmp_path / "s" / "lr=0.002" / "slurm")
    assert (read.optimizer.lr, read.name, read.runs_dir) == (0.002, "lr=0.002", str(tmp_path / "s"))


def test_a_dry_run_of_an_array_prints_points_and_script_and_writes_nothing(tmp_path, monkeypatch, started, capsys):
    more = ["launch=slurm", "parallel=cpu2", "launch.slurm.ranks_per_node=2", "launch.at_once=2", "--dry-run"]
    multirun(monkeypatch, f"runs_dir={tmp_path}", "name=s", "seed=1,2,3", *more)
    told = capsys.readouterr().out
    assert "#SBATCH --array=0-2%2" in told and "seed=3" in told and list(tmp_path.iterdir()) == []


def test_without_a_sweep_the_table_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sweep", str(tmp_path)])
    with pytest.raises(SystemExit, match="is no sweep"):
        table.main()


def test_a_metric_that_nobody_has_is_refused_with_those_there_are(tmp_path, monkeypatch):
    (tmp_path / "sweep.json").write_text(json.dumps([{"name": "a", "words": ["seed=1"]}]))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "summary.json").write_text('{"loss": 1.0}')
    monkeypatch.setattr(sys, "argv", ["sweep", str(tmp_path), "--metric", "accuracy"])
    with pytest.raises(SystemExit, match="accuracy.*they have loss"):
        table.main()
