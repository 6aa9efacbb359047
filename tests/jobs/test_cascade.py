"""The chain of a recipe: words, gates, ledger, evaluations behind stages, checks before the first stage, processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_nb import cascade, config, ledger, processes
from megatron_nb.chain import CascadeConfig, StageConfig, links_of
from megatron_nb.chain_check import check_links, refuse
from megatron_nb.config import ConfigError, compose
from megatron_nb.launch import LaunchConfig
from megatron_nb.ledger import GATE_EXIT, Gate, GateShut, Known, LedgerConfig, check_gate, write_chain, write_ledger
from megatron_nb.slurm import SlurmConfig
from megatron_nb.training.signals import REQUEUE_EXIT

SMALL = ["model=tiny", "parallel=cpu1", "context=2k", "data=files"]


def chain(tmp_path, stages, **more):
    return CascadeConfig("a", str(tmp_path), stages, more.pop("words", SMALL), **more)


def done(root, name, summary, results=None):
    (root / name).mkdir(parents=True, exist_ok=True)
    (root / name / "summary.json").write_text(json.dumps(summary))
    if results is not None:
        (root / name / "results.json").write_text(json.dumps(results))


# ------------------------------------------------------------------ words
def test_words_of_the_chain_reach_the_stages_that_know_them(tmp_path):
    stages = {"q": StageConfig("synthesize_questions"), "sft": StageConfig("sft")}
    questions, sft = links_of(chain(tmp_path, stages, words=[*SMALL, "walk.max_steps=7", "seed=5"]))
    assert questions.config.walk.max_steps == 7 and (questions.config.seed, sft.config.seed) == (5, 5)
    assert sft.config.model.num_layers < 32 and sft.config.seq_len == 2048


def test_a_word_that_no_stage_knows_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no stage of the chain knows modle=tiny"):
        links_of(chain(tmp_path, {"sft": StageConfig("sft")}, words=[*SMALL, "modle=tiny"]))


def test_a_stage_waits_for_what_its_words_read_and_mappings_are_left_alone(tmp_path):
    rows = ["data.sources.a.path={pairs}/pairs/train.jsonl", "data.tokenizer={chain}/t"]
    stages = {
        "pairs": StageConfig("synthesize_preferences", ["pairs.parts={train: 0.9, heldout: 0.1}"]),
        "reward": StageConfig("reward_pointwise", rows),
    }
    pairs, reward = links_of(chain(tmp_path, stages, words=SMALL[:3]))
    assert pairs.config.pairs.parts == {"train": 0.9, "heldout": 0.1} and reward.waits_for == ["pairs"]
    assert reward.config.data.sources["a"].path == f"{tmp_path}/a/pairs/pairs/train.jsonl"
    assert reward.config.data.tokenizer == f"{tmp_path}/a/t"


@pytest.mark.parametrize(
    ("gate", "complaint"),
    [({"metric": "x"}, "give one of the two"), ({"metric": "x", "at_least": 0, "at_most": 1}, "give one of the two"),
     ({"at_least": 0}, "gate.metric is not set")],
    ids=["no bound", "two bounds", "no metric"],
)  # fmt: skip
def test_a_gate_has_a_metric_and_one_bound(gate, complaint):
    with pytest.raises(ValueError, match=complaint):
        Gate(**gate)


# ------------------------------------------------------------------ gates and ledger
@pytest.mark.parametrize(
    ("gate", "passes"),
    [(Gate("b", at_least=2.0), True), (Gate("b", at_least=2.1), False), (Gate("b", "a", at_least=0.6), False),
     (Gate("b", "a", at_least=0.5), True), (Gate("b", at_most=1.9), False), (Gate("c", at_most=1.0), False)],
    ids=["reached", "missed", "gain missed", "gain reached", "above", "not in the summary"],
)  # fmt: skip
def test_a_gate_lets_pass_what_its_bound_says(tmp_path, gate, passes):
    done(tmp_path, "one", {"a": 1.5, "b": 2.0})
    if passes:
        check_gate(tmp_path, "one", gate)
    else:
        with pytest.raises(GateShut, match=f"one is done, but the chain must not go on: its gate is {gate.metric}"):
            check_gate(tmp_path, "one", gate)
    check_gate(tmp_path, "not yet", gate)  # of a stage that is not done nothing is said


def test_the_ledger_tells_what_each_stage_changed_beside_the_model_it_started_from(tmp_path):
    write_chain(tmp_path, [
        Known("evaluate_base", "evaluate", evaluates=""), Known("pairs", "synthesize_preferences"),
        Known("sft", "sft", None, Gate("loss", at_most=1.0)), Known("evaluate_sft", "evaluate", evaluates="sft"),
        Known("reward", "reward_pointwise", "sft"), Known("rl", "rl_pointwise", "sft"),
        Known("evaluate_rl", "evaluate", evaluates="rl"), Known("agentic", "rl_agentic", "rl"),
    ])  # fmt: skip
    done(tmp_path, "evaluate_base", {}, {"code": {"pass@1": 0.1}})
    done(tmp_path, "sft", {"loss": 0.5})
    done(tmp_path, "evaluate_sft", {}, {"code": {"pass@1": 0.4, "n": 10}})
    done(tmp_path, "rl", {"reward_after": 1.0})
    done(tmp_path, "evaluate_rl", {}, {"code": {"pass@1": 0.3}, "math": {"accuracy": 0.9}})
    rows = {row["name"]: row for row in write_ledger(tmp_path)}
    assert list(rows) == ["pairs", "sft", "reward", "rl", "agentic"]
    assert rows["sft"]["gate"]["passed"] is True and rows["sft"]["gate"]["value"] == 0.5 and rows["sft"]["state"] == "done"
    assert rows["sft"]["changed"] == {"code": {"pass@1": pytest.approx(0.3)}}
    assert rows["rl"]["changed"] == {"code": {"pass@1": pytest.approx(-0.1)}}  # a regression that this stage has caused
    assert (rows["agentic"]["state"], rows["agentic"]["evaluation"]) == ("not started", None)
    saved = json.loads((tmp_path / "ledger.json").read_text())
    assert saved["base_evaluation"] == {"code": {"pass@1": 0.1}} and saved["stages"][1]["metrics"] == {"loss": 0.5}


def test_a_job_ends_with_the_gates_code_and_its_script_is_told_not_to_try_again(tmp_path, monkeypatch, capsys):
    write_chain(tmp_path, [Known("one", "sft", None, Gate("loss", at_most=1.0))])
    done(tmp_path, "one", {"loss": 2.0})
    monkeypatch.setenv("NB_STOPPED", str(tmp_path / "stopped"))
    monkeypatch.setattr(sys, "argv", ["ledger", str(tmp_path), "one"])
    with pytest.raises(SystemExit) as left:
        ledger.main()
    assert left.value.code == GATE_EXIT and "gate is loss <= 1, found 2" in capsys.readouterr().err
    assert "gate is loss <= 1" in (tmp_path / "stopped").read_text()
    assert json.loads((tmp_path / "ledger.json").read_text())["stages"][0]["state"] == "gate shut"


def test_a_shut_gate_ends_the_chain_before_the_next_stage_begins(tmp_path, monkeypatch):
    stages = {"one": StageConfig("sft", gate=Gate("loss", at_most=1.0)), "two": StageConfig("sft", start_from="one")}
    links, begun = links_of(chain(tmp_path, stages)), []

    def run(module, words, ranks):
        begun.append(Path(words[0].removeprefix("--config-dir=")).name)
        done(tmp_path / "a", begun[-1], {"loss": 2.0})
        return 0

    monkeypatch.setattr(cascade.processes, "run", run)
    write_chain(tmp_path / "a", [link.known for link in links])
    for _ in range(2):  # the same command again changes nothing
        with pytest.raises(GateShut, match="one is done"):
            cascade.run_here(links)
    assert begun == ["one"]
    links[0].gate = Gate("loss", at_most=3.0)
    cascade.run_here(links)
    assert begun == ["one", "two"]


def test_a_stage_file_edited_while_the_chain_runs_changes_no_stage_of_it(tmp_path, monkeypatch):
    shutil.copytree(config.STAGES, tmp_path / "conf")
    monkeypatch.setattr(config, "STAGES", tmp_path / "conf")
    links, taken = links_of(chain(tmp_path, {"one": StageConfig("sft"), "two": StageConfig("sft", ["num_steps=70"])})), []

    def run(module, words, ranks):
        folder, stage = (word.partition("=")[2] for word in words)
        taken.append(compose(type(links[0].config), stage, folder=folder))
        done(tmp_path / "a", Path(folder).name, {})
        for file in (tmp_path / "conf" / "sft.yaml", tmp_path / "conf" / "model" / "tiny.yaml"):
            file.write_text(file.read_text().replace("seed: ", "seed: 9").replace("num_layers: ", "num_layers: 9"))
        return 0

    monkeypatch.setattr(cascade.processes, "run", run)
    write_chain(tmp_path / "a", [link.known for link in links])
    cascade.run_here(links)
    assert taken == [link.config for link in links] and taken[1].num_steps == 70
    assert links_of(chain(tmp_path, {"one": StageConfig("sft")}))[0].config != taken[0]  # the next command takes the edit up


@pytest.mark.parametrize("recipe", ["cascade", "cascade_tiny"])
def test_every_stage_of_a_recipe_is_begun_with_just_what_was_composed(tmp_path, recipe):
    for link in links_of(compose(CascadeConfig, recipe, [f"runs_dir='{tmp_path}/a folder, odd'", "name=a"])):
        folder, stage = (word.partition("=")[2] for word in cascade.as_checked(link))
        assert compose(type(link.config), stage, folder=folder) == link.config, link.name


def test_every_policy_is_evaluated_behind_its_stage_and_others_are_not(tmp_path):
    tasks = LedgerConfig(words=["tasks.x.kind=math", "tasks.x.path=x.jsonl"], base="models/base")
    stages = {"sft": StageConfig("sft"), "reward": StageConfig("reward_pointwise", start_from="sft")}
    links = links_of(chain(tmp_path, stages, ledger=tasks))
    assert [link.name for link in links] == ["evaluate_base", "sft", "evaluate_sft", "reward"]
    assert links[2].config.checkpoint == f"{tmp_path}/a/sft" and links[2].waits_for == ["sft"]
    assert [link.evaluates for link in links] == ["", None, "sft", None]


# ------------------------------------------------------------------ before the first stage
def test_what_would_stop_a_later_stage_is_known_before_the_first(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    here = [f"data.sources.a.path={tmp_path}/rows.jsonl"]
    stages = {
        "fine": StageConfig("sft", here),
        "absent": StageConfig("sft", [f"data.sources.a.path={tmp_path}/nothing.jsonl"]),
        "later": StageConfig("sft", ["data.sources.a.path={fine}/made.jsonl"]),
        "wrong": StageConfig("sft", [*here, "data.sources.a.format=odd"]),
        "export": StageConfig("export_model", start_from="fine"),
    }
    links = links_of(chain(tmp_path, stages))
    checked = check_links(links)
    assert "parameters" in checked["fine"].report and not checked["fine"].problem and not checked["fine"].missing
    assert checked["absent"].missing == [("data.sources.a.path", f"{tmp_path}/nothing.jsonl")]
    assert not checked["later"].missing and not checked["later"].problem
    assert checked["export"].later == ["fine"] and not checked["export"].problem
    told = "(?s)none is begun.*wrong: .*format='odd'.*not there: .*/nothing.jsonl: data.sources.a.path of absent"
    with pytest.raises(ConfigError, match=told):
        refuse(links, checked)


def test_what_many_links_miss_is_named_once_with_all_of_them(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    rows = StageConfig("sft", [f"data.sources.a.path={tmp_path}/rows.jsonl"])
    riddles, other = f"{tmp_path}/riddles.jsonl", f"{tmp_path}/other.jsonl"
    words = ["tasks.riddles.kind=math", f"tasks.riddles.path={riddles}", "tasks.other.kind=math", f"tasks.other.path={other}"]
    wanted = LedgerConfig(headline=["riddles", "other"], of=[], words=words)
    own = StageConfig("sft", [f"data.sources.b.path={riddles}"])
    links = links_of(chain(tmp_path, {"one": rows, "two": rows, "own": own}, ledger=wanted))
    checked = check_links(links)
    cascade.describe(links, checked)
    said, by = capsys.readouterr().out, "headline_one, headline_two, headline_own"
    assert f"\n{riddles}: tasks.riddles.path of {by}; data.sources.b.path of own\n" in said
    assert f"\n{other}: tasks.other.path of {by}\n" in said
    assert said.count(f"{riddles}: ") == said.count(f"{other}: ") == 1 and "2 inputs are not there" in said
    with pytest.raises(ConfigError) as refused:
        refuse(links, checked)
    assert str(refused.value).count("not there: ") == 2


def test_what_an_earlier_stage_makes_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    stages = {
        "one": StageConfig("sft", [f"data.sources.a.path={tmp_path}/rows.jsonl"]),
        "two": StageConfig("sft", ["data.sources.a.path={one}/made.jsonl", "init_from=runs/nowhere"]),
    }
    links = links_of(chain(tmp_path, stages, launch=LaunchConfig(kind="slurm", slurm=SlurmConfig(ranks_per_node=1))))
    two = check_links(links)["two"]
    assert "no such file" not in two.report and "ranks" in two.report and two.missing == [("init_from", "runs/nowhere")]


# ------------------------------------------------------------------ processes
class Job:
    """A stand-in for a job's module: its main does what its words say."""

    @staticmethod
    def main():
        what, folder = sys.argv[1:3]
        rank = os.environ.get("RANK", "0")
        with open(f"{folder}/said", "a") as file:
            file.write(f"{what} {rank}/{os.environ.get('WORLD_SIZE', '1')} {os.getpid()}\n")
        if what == "wait":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(REQUEUE_EXIT))
            (open(f"{folder}/ready-{rank}", "w")).close()
            time.sleep(60)
        if what == "one fails":
            time.sleep(0 if rank == "1" else 60)
            sys.exit(3)


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setitem(sys.modules, "jobs_of_a_test", Job)
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    return "jobs_of_a_test"


def test_ranks_have_the_environment_of_torchrun(job, tmp_path):
    assert processes.run(job, ["say", str(tmp_path)], ranks=2) == 0
    assert sorted(line.rsplit(" ", 1)[0] for line in (tmp_path / "said").read_text().splitlines()) == ["say 0/2", "say 1/2"]


def test_a_rank_that_fails_takes_the_others_with_it(job, tmp_path):
    began = time.monotonic()
    assert processes.run(job, ["one fails", str(tmp_path)], ranks=2) == 3
    assert time.monotonic() - began < 30


def until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_stage_is_asked_to_leave_when_the_chain_is(job, tmp_path):
    def ask():
        until(lambda: (tmp_path / "ready-0").exists())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=ask).start()
    assert processes.run(job, ["wait", str(tmp_path)]) == REQUEUE_EXIT


def test_a_stage_leaves_when_the_chain_was_killed(job, tmp_path):
    chain_of_two = os.fork()
    if chain_of_two == 0:
        processes.run(job, ["wait", str(tmp_path)])
        os._exit(0)
    until(lambda: (tmp_path / "ready-0").exists())
    stage = int((tmp_path / "said").read_text().split()[-1])
    os.kill(chain_of_two, signal.SIGKILL)
    os.waitpid(chain_of_two, 0)

    def gone() -> bool:
        told = subprocess.run(["ps", "-o", "stat=", "-p", str(stage)], capture_output=True, text=True).stdout.strip()
        return not told or told.startswith("Z")

    until(gone)
