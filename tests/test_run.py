"""The run folder: one writer at a time whoever dies how, later attempts continue it, and no file in it is half written."""
from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_nb import run as run_module
from megatron_nb.run import Lock, Run, RunFolderError, run_folder, write_atomic

HOLD = (
    "import sys, time, pathlib; from megatron_nb.run import Run\n"
    "run = Run.open(pathlib.Path(sys.argv[1]), 'a: 1')\n"
    "print('open', flush=True); time.sleep(60)"
)


@pytest.fixture
def holder(tmp_path):
    """Another process that has the run folder open."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "r")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "open\n"
    yield process
    process.kill()
    process.wait()


def pretend_elsewhere(folder: Path, age: float = 0.0) -> Path:
    """A lock as a job on another machine wrote it, last refreshed `age` seconds ago."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "lock"
    lock.write_text(json.dumps({"machine": "far", "pid": 7, "started": "1", "host": "node9", "job": "42", "token": "theirs"}))
    os.utime(lock, (time.time() - age,) * 2)
    return lock


def test_a_second_job_is_refused_and_told_who_writes_and_what_to_do(tmp_path, holder):
    with pytest.raises(RunFolderError, match=rf"process {holder.pid} on .*two jobs.*name=.*kill {holder.pid}"):
        Run.open(tmp_path / "r", "a: 2")
    assert (tmp_path / "r" / "config.yaml").read_text() == "a: 1"


def test_the_same_process_cannot_open_a_run_twice(tmp_path):
    with Run.open(tmp_path / "r", "a: 1"), pytest.raises(RunFolderError, match="it is running"):
        Run.open(tmp_path / "r", "a: 1")


def test_a_killed_jobs_folder_is_free_at_once(tmp_path, holder, caplog):
    holder.send_signal(signal.SIGKILL)  # and not reaped yet: a zombie does not hold a run
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    begin = time.monotonic()
    with Run.open(tmp_path / "r", "a: 1") as run:
        assert run.attempt == 2
    assert time.monotonic() - begin < 1
    assert "TAKEN OVER" in caplog.text


def test_a_reused_process_id_does_not_hold_a_run(tmp_path):
    (tmp_path / "logs").mkdir()
    me = {**run_module._process(os.getpid()), "started": "1", "host": "h", "job": None, "token": "old"}
    (tmp_path / "lock").write_text(json.dumps(me))
    Run.open(tmp_path, "a: 1").close()


def test_a_job_elsewhere_that_beats_keeps_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "BEAT_S", 0.1)
    lock = pretend_elsewhere(tmp_path / "r")
    beat = threading.Timer(0.05, lambda: os.utime(lock))
    beat.start()
    with pytest.raises(RunFolderError, match="node9, Slurm job 42.*sign of life.*scancel 42"):
        Run.open(tmp_path / "r", "a: 1")
    beat.join()


def test_a_job_elsewhere_that_fell_silent_loses_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "BEAT_S", 0.1)
    monkeypatch.setattr(run_module, "STALE_S", 0.5)
    pretend_elsewhere(tmp_path / "r")
    begin = time.monotonic()
    Run.open(tmp_path / "r", "a: 1").close()
    assert time.monotonic() - begin > 0.4
    pretend_elsewhere(tmp_path / "r", age=100)
    begin = time.monotonic()
    Run.open(tmp_path / "r", "a: 1").close()
    assert time.monotonic() - begin < 0.4


def test_an_unreadable_lock_is_judged_by_its_age(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "STALE_S", 0.2)
    (tmp_path / "lock").write_text("not json")
    Run.open(tmp_path, "a: 1").close()


def test_of_many_jobs_that_find_a_dead_holder_exactly_one_gets_the_run(tmp_path):
    for round_ in range(10):
        folder = tmp_path / str(round_)
        pretend_elsewhere(folder, age=1000)
        start, locks, refused = threading.Barrier(8), [], []

        def contend(start=start, folder=folder, locks=locks, refused=refused):
            start.wait()
            try:
                locks.append(Lock(folder / "lock"))
            except RunFolderError:
                refused.append(1)

        threads = [threading.Thread(target=contend) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(locks), len(refused)) == (1, 7)
        locks[0].release()
        assert list(folder.iterdir()) == []


def test_taking_over_leaves_a_lock_alone_that_another_job_made_meanwhile(tmp_path):
    fresh = pretend_elsewhere(tmp_path)
    contender = Lock.__new__(Lock)
    contender.path, contender.token = fresh, "mine"
    assert not contender._take_over({"token": "long dead"}, "{}")
    assert json.loads(fresh.read_text())["token"] == "theirs"


def test_a_job_whose_run_was_taken_stops_itself(tmp_path):
    code = "from megatron_nb import run as r; r.BEAT_S = 0.05\n" + HOLD
    words = [sys.executable, "-c", code, str(tmp_path / "r")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "open\n"
    lock = tmp_path / "r" / "lock"
    before = lock.stat().st_mtime_ns
    time.sleep(0.3)
    assert lock.stat().st_mtime_ns > before and process.poll() is None
    write_atomic(lock, json.dumps({"token": "other"}))
    assert process.wait(5) == 1
    assert "another job has taken this run folder" in process.stderr.read()


def test_attempts_count_up_and_keep_their_logs_and_configurations(tmp_path):
    for attempt in (1, 2, 11):
        if attempt == 11:
            (tmp_path / "logs" / "attempt-10").mkdir()
        with Run.open(tmp_path, f"a: {attempt}") as run:
            assert run.attempt == attempt
            assert run.logs == tmp_path / "logs" / f"attempt-{attempt}"
        assert (run.logs / "config.yaml").read_text() == f"a: {attempt}"
        assert (run.logs / "rank-0.log").exists()
    assert (tmp_path / "config.yaml").read_text() == "a: 11"


def test_each_rank_logs_to_its_own_file_and_the_console_is_rank_0s(tmp_path, capfd):
    answers = []
    first = Run.open(tmp_path, "a: 1", share=lambda value: answers.append(value) or value)
    log = logging.getLogger("megatron_nb.some.module")
    log.info("from the first")
    first.close()
    with pytest.raises(RuntimeError), Run.open(tmp_path, "", rank=3, share=lambda _: answers[0]) as run:
        log.info("quiet")
        log.debug("details")
        log.error("loud")
        raise RuntimeError("the end")
    assert run.attempt == 1
    console = capfd.readouterr().err
    assert console == "from the first\nrank 3: loud\n"
    third = (tmp_path / "logs" / "attempt-1" / "rank-3.log").read_text()
    assert all(word in third for word in ("quiet", "details", "loud", "RuntimeError: the end", "Traceback"))
    assert "from the first" in (tmp_path / "logs" / "attempt-1" / "rank-0.log").read_text()


def test_a_refusal_reaches_every_rank_changes_nothing_and_frees_the_lock(tmp_path):
    Run.open(tmp_path, "a: 1").close()
    (tmp_path / "checkpoints" / "step-00000005").mkdir()
    (tmp_path / "checkpoints" / "step-00000005" / "COMPLETE").touch()

    def refuse(saved: Path) -> None:
        raise ValueError(f"not the same: {saved.read_text()}")

    answers = []
    with pytest.raises(RunFolderError, match="not the same: a: 1"):
        Run.open(tmp_path, "a: 2", refuse=refuse, share=lambda value: answers.append(value) or value)
    with pytest.raises(RunFolderError, match="not the same: a: 1"):
        Run.open(tmp_path, "a: 2", rank=1, share=lambda _: answers[0])
    assert (tmp_path / "config.yaml").read_text() == "a: 1"
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["attempt-1"]
    assert not (tmp_path / "lock").exists()


def test_a_run_resumes_only_when_it_has_a_complete_checkpoint(tmp_path):
    def refuse(saved: Path) -> None:
        raise ValueError("asked")

    Run.open(tmp_path, "a: 1").close()
    (tmp_path / "checkpoints" / "step-00000005").mkdir()
    with Run.open(tmp_path, "a: 2", refuse=refuse) as run:
        assert not run.resumes
    (tmp_path / "checkpoints" / "step-00000005" / "COMPLETE").touch()
    with Run.open(tmp_path, "a: 2") as run:
        assert run.resumes


def test_summary_is_flat_finite_numbers_with_seed_and_time(tmp_path):
    with Run.open(tmp_path, "a: 1") as run:
        run.write_summary(seed=7, loss=np.float32(0.5), steps=np.int64(3), fell=True)
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert {key: summary[key] for key in ("loss", "steps", "fell", "seed", "attempts")} == {
            "loss": 0.5,
            "steps": 3,
            "fell": 1,
            "seed": 7,
            "attempts": 1,
        }
        assert summary["wall_s"] >= 0
        for bad in (float("nan"), float("inf"), None, "1", [1]):
            with pytest.raises(ValueError, match="summary.json: loss=.* must be a finite number"):
                run.write_summary(seed=7, loss=bad)
        assert json.loads((tmp_path / "summary.json").read_text()) == summary
    with Run.open(tmp_path, "a: 1"):  # a new attempt has not finished yet
        assert not (tmp_path / "summary.json").exists()


def test_a_reader_sees_the_old_content_or_the_new_and_never_a_mixture(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, "old" * 1000)
    with path.open() as reader:
        start = reader.read(3)
        write_atomic(path, "new")
        assert start + reader.read() == "old" * 1000
    assert path.read_text() == "new"


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="file was not written and is as before: No space left"):
        write_atomic(path, "new" * 1000)
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_a_run_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunFolderError, match="cannot write the run folder"):
        Run.open(tmp_path / "runs" / "r", "a: 1")


@pytest.mark.parametrize("name", ["", "../x", "a/../b", "/abs", "a b", "a//b", "a\n", "$(x)"])
def test_a_name_cannot_leave_the_runs_folder(name):
    with pytest.raises(ValueError, match="name="):
        run_folder("runs", name)


def test_a_stage_of_a_cascade_nests_in_its_run():
    assert run_folder("runs", "all/sft-32k") == Path("runs/all/sft-32k").absolute()
