"""A chain of stages: who waits for whom, what each is told, and that nothing is run twice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_nb import cascade
from megatron_nb.cascade import move_aside, run_here
from megatron_nb.chain import CascadeConfig, StageConfig, links_of
from megatron_nb.config import ConfigError
from megatron_nb.ledger import write_chain

SMALL = ["model=tiny", "parallel=cpu1", "context=2k", "data=files"]


def chain(tmp_path, **stages):
    return CascadeConfig("a", str(tmp_path), {name: StageConfig(**stage) for name, stage in stages.items()}, SMALL)


def written(config):
    links = links_of(config)
    write_chain(links[0].run.parent, [link.known for link in links])
    return links


def test_a_stage_starts_from_the_run_it_names_and_reads_what_others_made(tmp_path):
    first = {"stage": "sft", "words": ["data.sources.a.path=a.jsonl"]}
    second = {"stage": "sft", "start_from": "one", "words": ["data.sources.a.path={one}/rows.jsonl"]}
    one, two = links_of(chain(tmp_path, one=first, two=second))
    assert one.config.init_from is None and two.config.init_from == str(one.run) and two.waits_for == ["one"]
    assert two.config.data.sources["a"].path == f"{one.run}/rows.jsonl"
    assert (two.run, two.config.name, two.config.runs_dir) == (tmp_path / "a" / "two", "two", str(tmp_path / "a"))


@pytest.mark.parametrize(
    ("stage", "complaint"),
    [
        ({"stage": "sft", "words": ["optimiser.lr=1"]}, "stages.two.*optimiser"),
        ({"stage": "sft", "words": ["name={three}"]}, "stages.two.*no stage before it is named 'three'"),
        ({"stage": "sfft"}, "stages.two.*'sfft'"),
        ({"stage": "cascade"}, "stages.two.*none of the jobs"),
    ],
)
def test_a_stage_with_wrong_words_is_named(tmp_path, stage, complaint):
    with pytest.raises(ConfigError, match=complaint):
        links_of(chain(tmp_path, one={"stage": "sft"}, two=stage))


def test_a_stage_can_wait_only_for_one_before_it(tmp_path):
    with pytest.raises(ValueError, match="stages.one waits for 'two', which is no stage before it"):
        chain(tmp_path, one={"stage": "sft", "start_from": "two"}, two={"stage": "sft"})


@pytest.fixture
def started(monkeypatch):
    """The stages that were started; each succeeds unless its name is in `failing`."""
    calls, failing = [], {}

    def run(module, words, ranks):
        folder = Path(words[0].removeprefix("--config-dir="))
        calls.append(folder.name)
        code = failing.pop(folder.name, 0)
        if not code:
            (folder / "summary.json").write_text("{}")
        return code

    monkeypatch.setattr(cascade.processes, "run", run)
    return calls, failing


def test_a_chain_ends_with_the_stage_that_fails_and_goes_on_there(tmp_path, started):
    calls, failing = started
    links = written(chain(tmp_path, one={"stage": "sft"}, two={"stage": "sft", "start_from": "one"}, three={"stage": "sft"}))
    failing["two"] = 85
    with pytest.raises(SystemExit, match="85"):
        run_here(links)
    assert calls == ["one", "two"]
    run_here(links)
    assert calls == ["one", "two", "two", "three"]
    run_here(links)
    assert len(calls) == 4  # all is done


def test_from_a_stage_on_everything_is_made_again_and_nothing_is_lost(tmp_path, started):
    calls, _ = started
    links = written(chain(tmp_path, one={"stage": "sft"}, two={"stage": "sft"}, three={"stage": "sft"}))
    run_here(links)
    move_aside(links[1:])
    run_here(links)
    assert calls == ["one", "two", "three", "two", "three"]
    assert (tmp_path / "a" / "two.before-1" / "summary.json").exists()


def test_the_command_describes_the_whole_recipe_and_writes_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["cascade", f"runs_dir={tmp_path}", "--dry-run"])
    cascade.main()
    told = capfd.readouterr().out
    assert told.count("to do") == 39 and "PROBLEM" not in told and f"init_from={tmp_path}/cascade/sft_32k" in told
    assert list(tmp_path.iterdir()) == []


def test_the_status_of_a_chain_has_a_line_for_every_stage_and_the_reason_of_a_failure(tmp_path):
    root = tmp_path / "a"
    (root / "one").mkdir(parents=True)
    (root / "chain.json").write_text(json.dumps({"stages": ["one", "two", "three"]}))
    (root / "one" / "summary.json").write_text("{}")
    (root / "two" / "logs" / "attempt-1").mkdir(parents=True)
    (root / "two" / "logs" / "attempt-1" / "rank-0.log").write_text("fine\nValueError: no such file rows.jsonl\n")
    (root / "two" / "metrics.jsonl").write_text('{"step": 3, "seconds": 2.0, "loss": 1.5}\n{"step": 4, "sec')
    done = subprocess.run([sys.executable, "tools/status.py", str(root), "--json"], capture_output=True, text=True)
    assert done.returncode == 1
    one, two, three = json.loads(done.stdout)
    assert (one["state"], two["state"], three["state"]) == ("done", "stopped", "not started")
    assert two["step"] == 3 and two["last"] == {"loss": 1.5} and "no such file rows.jsonl" in two["reason"]


def test_the_status_calls_a_stage_by_its_shut_gate(tmp_path):
    (tmp_path / "one").mkdir()
    gate = {"metric": "reward", "minus": None, "at_least": 0.5, "at_most": None}
    links = [{"name": "one", "stage": "sft", "gate": gate}]
    (tmp_path / "chain.json").write_text(json.dumps({"stages": ["one"], "links": links}))
    for reward, state, code in ((0.4, "gate shut", 1), (0.6, "done", 0)):
        (tmp_path / "one" / "summary.json").write_text(json.dumps({"reward": reward}))
        done = subprocess.run([sys.executable, "tools/status.py", str(tmp_path), "--json"], capture_output=True, text=True)
        (told,) = json.loads(done.stdout)
        assert (told["state"], done.returncode) == (state, code)
        assert ("reward >= 0.5, found 0.4" in told["reason"]) == bool(code)
