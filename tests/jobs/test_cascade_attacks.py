"""What goes wrong around a chain: a second command, torn files, odd names, signals at bad moments, stages out of order."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megatron_nb import cascade, chain_check, ledger, processes, slurm
from megatron_nb.chain import CascadeConfig, StageConfig, links_of
from megatron_nb.chain_check import changed_since, check_links, refuse
from megatron_nb.config import ConfigError, to_yaml
from megatron_nb.ledger import Gate, GateShut, Known, LedgerConfig, check_gate, write_chain
from megatron_nb.run import Lock
from megatron_nb.training.signals import REQUEUE_EXIT

SMALL = ["model=tiny", "parallel=cpu1", "context=2k", "data=files"]
TWO = {"one": StageConfig("sft"), "two": StageConfig("sft", start_from="one")}


def chain(folder, stages=TWO, **more):
    return CascadeConfig(more.pop("name", "a"), str(folder), stages, more.pop("words", SMALL), **more)


def done(link, summary="{}"):
    link.run.mkdir(parents=True, exist_ok=True)
    (link.run / "summary.json").write_text(summary)


@pytest.fixture
def begun(monkeypatch):
    """Names of the stages that were begun; each is done at once, unless `begun.lazy` names it."""

    class Begun(list):
        lazy = ()

    found = Begun()

    def run(module, words, ranks):
        folder = Path(words[0].removeprefix("--config-dir="))
        found.append(folder.name)
        if folder.name not in found.lazy:
            (folder / "summary.json").write_text("{}")
        return 0

    monkeypatch.setattr(cascade.processes, "run", run)
    monkeypatch.setattr(cascade, "check_links", lambda links: {})
    return found


# ------------------------------------------------------------------ files that are torn, or come from elsewhere
@pytest.mark.parametrize("torn", ["", '{"loss": 1', "[1]", "null"])
def test_a_stage_whose_summary_is_torn_is_not_done_and_its_gate_is_not_passed_by(tmp_path, begun, torn):
    one, two = links_of(chain(tmp_path, {**TWO, "one": StageConfig("sft", gate=Gate("loss", at_most=1.0))}))
    done(one, torn)
    assert not one.done
    write_chain(one.run.parent, [one.known, two.known])
    with pytest.raises(GateShut, match="one is done"):
        cascade.run_here([one, two])  # makes it again, and then looks at its gate
    assert begun == ["one"]


def test_a_summary_that_cannot_be_read_now_does_not_make_its_stage_be_trained_again(tmp_path):
    one, _ = links_of(chain(tmp_path))
    (one.run / "summary.json").mkdir(parents=True)  # EISDIR stands for EIO
    with pytest.raises(OSError):
        _ = one.done


def test_torn_ledger_and_chain_files_are_written_anew(tmp_path, begun):
    config = chain(tmp_path)
    cascade.run(config)
    for name in ("ledger.json", "chain.json"):
        (tmp_path / "a" / name).write_text('{"stages": [{"na')
    cascade.run(config)
    assert begun == ["one", "two"]
    assert [row["state"] for row in json.loads((tmp_path / "a" / "ledger.json").read_text())["stages"]] == ["done", "done"]


@pytest.mark.parametrize("value", ["NaN", '"high"', "null", "true"])
@pytest.mark.parametrize("bound", ["at_least", "at_most"])
def test_a_gate_is_shut_by_what_is_no_number(tmp_path, value, bound):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "summary.json").write_text(f'{{"reward": {value}, "before": 0.5}}')
    for gate in (Gate("reward", **{bound: 0.0}), Gate("reward", "before", **{bound: 0.0})):
        with pytest.raises(GateShut, match="its gate is reward.*(found nan|which its summary.json lacks)"):
            check_gate(tmp_path, "one", gate)


def test_a_job_that_ended_without_a_summary_fails_before_the_next_begins(tmp_path, monkeypatch):
    write_chain(tmp_path, [Known("one", "sft", None, Gate("loss", at_most=1.0))])
    monkeypatch.setattr(sys, "argv", ["ledger", str(tmp_path), "one"])
    with pytest.raises(SystemExit, match="one ended without its summary.json"):
        ledger.main()


def test_a_full_disk_is_told_in_a_line_by_the_ledger_of_a_job(tmp_path, monkeypatch):
    write_chain(tmp_path, [Known("one", "sft")])
    monkeypatch.setattr(sys, "argv", ["ledger", str(tmp_path), "one"])
    monkeypatch.setattr(ledger, "write_atomic", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(SystemExit, match="error: .*No space left"):
        ledger.main()


def test_a_stage_that_was_started_elsewhere_ends_the_chain(tmp_path, begun):
    begun.lazy = ("one",)
    links = links_of(chain(tmp_path))
    write_chain(links[0].run.parent, [link.known for link in links])
    with pytest.raises(ConfigError, match="one ended well, but wrote no .*one/summary.json"):
        cascade.run_here(links)
    assert begun == ["one"]


def test_a_stage_that_is_done_with_fewer_steps_is_told(tmp_path):
    one, _ = links_of(chain(tmp_path))
    done(one)
    (one.run / "config.yaml").write_text(to_yaml(replace(one.config, num_steps=30, launch=replace(one.config.launch, ranks=2))))
    assert changed_since(one) == {"num_steps": (30, one.config.num_steps)}


# ------------------------------------------------------------------ out of order
def test_a_stage_is_refused_whose_source_is_gone(tmp_path):
    one, two = links_of(chain(tmp_path))
    done(two)
    with pytest.raises(ConfigError, match="two is done, but one, which it is made from, is not: from_stage=one does both"):
        refuse([one, two], {})
    done(one)
    refuse([one, two], {})


def test_a_kill_while_runs_are_moved_aside_leaves_none_without_its_source(tmp_path, monkeypatch):
    links = links_of(chain(tmp_path, {**TWO, "three": StageConfig("sft", start_from="two")}))
    for link in links:
        done(link)
    rename, moved = type(tmp_path).rename, []

    def rename_or_die(path, to):
        if moved:
            raise KeyboardInterrupt
        moved.append(path.name)
        return rename(path, to)

    monkeypatch.setattr(type(tmp_path), "rename", rename_or_die)
    with pytest.raises(KeyboardInterrupt):
        cascade.move_aside(links)
    assert [link.done for link in links] == [True, True, False]


def test_from_a_stage_nothing_is_moved_when_a_check_refuses(tmp_path):
    config = chain(tmp_path, {"one": StageConfig("sft", ["data.sources.a.path=/no/such.jsonl"])}, from_stage="one")
    (one,) = links_of(config)
    done(one)
    with pytest.raises(ConfigError, match="not there: /no/such.jsonl: data.sources.a.path of one"):
        cascade.run(config)
    assert one.done and not list(one.run.parent.glob("*.before-*"))


def test_a_run_is_moved_aside_beside_those_before(tmp_path, begun):
    config = chain(tmp_path, from_stage="two")
    for number in range(3):
        cascade.run(config)
        if number == 1:
            (tmp_path / "a" / "two.before-1").rename(tmp_path / "a" / "two.before-2")  # a gap, as after a deletion
    assert begun == ["one", "two", "two", "two"]
    assert sorted(path.name for path in (tmp_path / "a").glob("two*")) == ["two", "two.before-1", "two.before-2"]


def test_a_run_that_is_written_now_is_not_moved_aside(tmp_path):
    one, two = links_of(chain(tmp_path))
    done(one)
    done(two)
    holder = Lock(two.run / "lock")
    try:
        with pytest.raises(ValueError, match="two is being written by process"):
            cascade.move_aside([one, two])
    finally:
        holder.release()
    assert one.done and two.done


# ------------------------------------------------------------------ two at once
def test_a_second_command_on_a_chain_is_refused_and_a_killed_one_is_not_waited_for(tmp_path, begun):
    config = chain(tmp_path, from_stage="one")
    held, tell = os.pipe()
    other = os.fork()
    if other == 0:
        with cascade.alone(tmp_path / "a"):
            os.write(tell, b"held")
            time.sleep(60)
        os._exit(0)
    try:
        assert os.read(held, 4) == b"held"
        with pytest.raises(ConfigError, match=f"is the chain of process {other} on .*, which is at work"):
            cascade.run(config)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    assert begun == []
    cascade.run(config)
    assert begun == ["one", "two"]


def queue(monkeypatch, state):
    """A Slurm that knows every job, as `state`; what was handed to it."""
    asked = []
    monkeypatch.setattr(slurm, "here", lambda: True)
    monkeypatch.setattr(slurm, "state", lambda job_id: state)
    monkeypatch.setattr(slurm.Job, "submit", lambda job: asked.append(job.title) or "8")
    monkeypatch.setattr(cascade.subprocess, "run", lambda command, **_: asked.append(" ".join(command)))
    return asked


def queued(link):
    (link.run / "slurm").mkdir(parents=True)
    (link.run / "slurm" / "job.json").write_text('{"id": "7"}')


def test_a_stage_that_waits_in_the_queue_is_not_run_here(tmp_path, begun, monkeypatch):
    queue(monkeypatch, "PENDING")
    links = links_of(chain(tmp_path))
    queued(links[0])
    with pytest.raises(ConfigError, match="one is job 7: action=cancel first"):
        cascade.run(chain(tmp_path))
    assert begun == []


def test_a_chain_that_was_cancelled_just_now_is_not_taken_for_one_that_runs(tmp_path, monkeypatch):
    asked = queue(monkeypatch, "COMPLETING")
    links = links_of(chain(tmp_path))
    queued(links[1])
    with pytest.raises(ConfigError, match="two is job 7, which ends just now"):
        cascade.submit(links, slurm.SlurmConfig())
    assert asked == []


def test_cancel_takes_the_last_first_and_needs_a_queue(tmp_path, monkeypatch):
    links = links_of(chain(tmp_path))
    monkeypatch.setattr(slurm, "here", lambda: False)
    with pytest.raises(ConfigError, match="no squeue on this machine"):
        cascade.cancel(links)
    asked = queue(monkeypatch, "PENDING")
    queued(links[0])
    cascade.cancel(links)
    assert asked == ["scancel 7"]


# ------------------------------------------------------------------ names
@pytest.mark.parametrize("name", ["a=b", "a+b", "jürgen", ".", "deep/er"])
def test_a_chain_may_have_any_name_that_a_run_may_have(tmp_path, name):
    rows = ["data.sources.a.path={one}/rows.jsonl", "data.sources.b.path='{chain}/my rows.jsonl'"]
    stages = {"one": StageConfig("sft"), "two": StageConfig("sft", rows, start_from="one")}
    one, two = links_of(chain(tmp_path, stages, name=name))
    assert two.config.init_from == str(one.run) and two.config.data.sources["a"].path == f"{one.run}/rows.jsonl"
    assert two.config.runs_dir == str(one.run.parent)
    assert two.config.data.sources["b"].path == f"{one.run.parent}/my rows.jsonl"


@pytest.mark.parametrize("folder", ["a,b", "it's", "my (runs) [1]", "a#b&c", "{x}", "~"])
def test_a_chain_may_lie_in_a_folder_of_any_name(tmp_path, folder):
    words = ["prompts.sources.a.path={one}/rows.jsonl", "pairs.parts={train: 0.9, heldout: 0.1}"]
    stages = {"one": StageConfig("sft", SMALL[2:]), "pairs": StageConfig("synthesize_preferences", words)}
    one, pairs = links_of(chain(tmp_path / folder, stages, words=SMALL[:2]))
    assert pairs.config.prompts.sources["a"].path == f"{one.run}/rows.jsonl" == str(tmp_path / folder / "a/one/rows.jsonl")
    assert pairs.config.pairs.parts == {"train": 0.9, "heldout": 0.1}


@pytest.mark.parametrize("name", ["a b", "", "../a", "a'b", "a;b", "a\nb"])
def test_a_name_that_no_run_may_have_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="name=.* must be made of"):
        links_of(chain(tmp_path, name=name))


@pytest.mark.parametrize("name", ["a b", "", "../a", "a/b", "chain.lock", "ä", "1"])
def test_a_stage_with_a_name_that_its_run_or_its_words_could_not_have_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="a stage's name must be made of"):
        chain(tmp_path, {name: StageConfig("sft")})


def test_a_wrong_word_of_the_ledger_is_called_that(tmp_path):
    with pytest.raises(ConfigError, match=r"ledger \(evaluate_one\): .*taskss"):
        links_of(chain(tmp_path, ledger=LedgerConfig(words=["taskss=recipe"])))
    with pytest.raises(ConfigError, match=r"ledger \(evaluate_one\): there is no stage file 'evaluat'"):
        links_of(chain(tmp_path, ledger=LedgerConfig("evaluat", ["only=[x]"])))


# ------------------------------------------------------------------ signals
class Job:
    """A stand-in for a job's module."""

    @staticmethod
    def main():
        what, folder = sys.argv[1:3]
        if what == "ends well when asked":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        if what == "has children":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child = subprocess.Popen(["sleep", "60"], start_new_session=True)
            with open(f"{folder}/child", "w") as file:
                file.write(str(child.pid))
        with open(f"{folder}/ready", "w"):
            pass
        time.sleep(60)


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setitem(sys.modules, "jobs_of_a_test", Job)
    return "jobs_of_a_test"


def when_ready(folder, ask):
    """`ask` in a thread, when the job of the test is at work."""

    def wait():
        end = time.monotonic() + 30
        while not (folder / "ready").exists() and time.monotonic() < end:
            time.sleep(0.02)
        ask()

    threading.Thread(target=wait).start()


@pytest.fixture
def heard():
    """SIGHUP counts, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_no_stage_begins_behind_one_that_ended_well_after_the_chain_was_asked_to_stop(job, heard, tmp_path, number):
    when_ready(tmp_path, lambda: os.kill(os.getpid(), number))
    assert processes.run(job, ["ends well when asked", str(tmp_path)]) == REQUEUE_EXIT


def test_nohup_is_heeded(job, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with processes._handing_on([]) as asked:
            os.kill(os.getpid(), signal.SIGHUP)
        assert asked == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_kills_the_stage_with_what_it_began(job, tmp_path):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    when_ready(tmp_path, twice)
    assert processes.run(job, ["has children", str(tmp_path)]) == -signal.SIGKILL
    child = int((tmp_path / "child").read_text())
    end = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_signal_while_a_stage_starts_is_not_lost(job, tmp_path, monkeypatch):
    """The copy is asked before it has answers of its own: it must not take that for this process's."""
    start = processes.multiprocessing.process.BaseProcess.start

    def start_and_ask(process):
        start(process)
        os.kill(process.pid, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(processes.multiprocessing.process.BaseProcess, "start", start_and_ask)
    began = time.monotonic()
    assert processes.run(job, ["waits", str(tmp_path)]) in (-signal.SIGTERM, -signal.SIGKILL)
    assert time.monotonic() - began < 30


def nothing_to_say(module, config):
    return "", ""


def test_processes_that_check_a_chain_end_with_it(tmp_path, monkeypatch):
    links = links_of(chain(tmp_path))
    monkeypatch.setattr(chain_check, "_dry_run", nothing_to_say)
    monkeypatch.setattr(chain_check, "_judged", lambda *_: time.sleep(60))
    checker = os.fork()
    if checker == 0:
        check_links(links)
        os._exit(0)
    end, workers = time.monotonic() + 30, []
    while len(workers) < 2:
        assert time.monotonic() < end
        workers = psutil.Process(checker).children()
    os.kill(checker, signal.SIGKILL)
    os.waitpid(checker, 0)
    _, left = psutil.wait_procs(workers, timeout=20)
    assert [one.pid for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
