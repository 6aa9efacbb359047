"""Servers beside a job on a real Slurm: an engine on a node of its own, killed in mid-step. `make test-slurm`."""

import json
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from megatron_nb import rl
from megatron_nb.addresses import records
from megatron_nb.config import compose
from megatron_nb.model.hf_config import config_to_hf
from megatron_nb.rl import RlConfig
from tests.slurm.cluster_run import TINY, needs_slurm, running_cluster

pytestmark = needs_slurm
STEPS = 3
TOKEN_S = 0.1  # of the engine: six answers of sixteen tokens, two at once, are five seconds in which it can be killed


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    yield from running_cluster(tmp_path_factory.mktemp("services"), 17500)


@pytest.fixture(scope="module")
def words(cluster) -> list[str]:
    """An RL stage of two ranks on one node, its engine on another; but for the name."""
    folder = cluster.folder
    draw, some = random.Random(5), ["some", "words", "of", "a", "question", "and", "an", "answer", "long", "short"]
    with (folder / "prompts.jsonl").open("w") as file:
        for number in range(12):
            file.write(json.dumps({"id": f"p{number}", "prompt": " ".join(draw.choices(some, k=draw.randint(1, 6)))}) + "\n")
    model = compose(RlConfig, "rl_pointwise", [*TINY, "parallel=cpu1", "answers=short"]).model
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config_to_hf(model)))
    stub = ["python", "-m", "tests.rollout.serve_stub", str(folder / "model"), "{port}", "--host", "{host}", "--token-s",
            str(TOKEN_S)]  # fmt: skip
    return [
        "--config-name", "rl_pointwise", *TINY, "parallel=cpu2", "answers=short", f"runs_dir={folder}/runs",
        f"prompts.sources.a.path={folder}/prompts.jsonl", f"prompts.tokenizer={folder}/tokenizer", "prompts.heldout_share=0",
        "collect.num_prompts=2", "collect.group_size=3", "collect.concurrency=2", "sampling.max_tokens=16",
        "collect.overlong=null", "~reward.terms.model", "reward.terms.words.kind=tests.jobs.rl_reward.Distinct",
        f"num_steps={STEPS}", "checkpoint.every=100", "optimizer.lr=2e-2", "optimizer.warmup_steps=0", "log.wandb=off",
        "update.pack_tokens=512", "engine=server", "engine.server.urls=[service:engine]",
        f"launch.services.engine.command={json.dumps(stub)}", "launch.services.engine.nodes=1",
        "launch.services.engine.restarts=2", "launch.slurm.nodes=1", "launch.slurm.ranks_per_node=2",
        f"launch.slurm.site={cluster.site}",
    ]  # fmt: skip


def engine(run: Path) -> dict:
    """What is written of the engine; {} before anything is."""
    return (records(run / "services") or [{}])[0]


def submit(cluster, words, name) -> tuple[str, Path]:
    said = cluster.main(*words, "launch=slurm", f"name={name}", main=rl.main)
    return said.rpartition("\njob ")[2].partition(":")[0], cluster.folder / "runs" / name


def processes_of(run: Path) -> list[str]:
    """Keepers, servers and ranks of this run's jobs that are still there."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("NB_RUN") == str(run):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def kill_in_mid_step(cluster, run: Path, steps: int) -> dict:
    """Kill the engine's process while it samples; what was written of it."""
    cluster.until(f"step {steps}", lambda: cluster.steps(run.name) >= steps)
    time.sleep(8 * TOKEN_S)
    told = engine(run)
    assert told["state"] == "up"
    os.kill(told["pid"], signal.SIGKILL)
    return told


def whole(cluster, run: Path) -> list[dict]:
    """The rows of a run whose every step is there, every rollout sampled by the trainer's weights."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "mismatch_abs" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["invalid_share"] == 0 and row["mismatch_abs"] < 1e-3 for row in rows)
    return rows


def test_an_engine_on_its_own_node_that_is_killed_in_mid_step_is_restarted_and_the_step_completes(cluster, words):
    job_id, run = submit(cluster, words, "killed")
    told = kill_in_mid_step(cluster, run, 1)
    cluster.ended(job_id)
    whole(cluster, run)
    after = engine(run)
    assert (after["restarts"], after["state"], after["url"]) == (1, "stopped", told["url"])
    trainers = cluster.slurm_says("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%B").split()
    assert after["node"] not in trainers and told["pid"] != after["pid"]
    assert "start 0, attempt 0" in cluster.log("killed") and "attempt 1" not in cluster.log("killed")
    assert "gets the weights of version" in (run / "logs" / "attempt-1" / "rank-0.log").read_text()
    assert "start 2 on" in (run / "logs" / "services" / "engine-0.log").read_text()
    assert processes_of(run) == []


def test_services_start_anew_with_a_requeued_job_and_end_with_a_cancelled_one(cluster, words):
    job_id, run = submit(cluster, words, "requeued")
    cluster.until("step 1", lambda: cluster.steps(run.name) >= 1)
    first = engine(run)
    cluster.slurm_says("scancel", "--signal=USR1", "--batch", job_id)
    cluster.until("the requeue", lambda: engine(run)["start"] != first["start"])
    cluster.until("step 2", lambda: cluster.steps(run.name) >= 2)
    assert engine(run)["start"] == f"{job_id}.1" and not psutil.pid_exists(first["pid"])
    assert processes_of(run)
    cluster.slurm_says("scancel", job_id)
    cluster.ended(job_id, "CANCELLED")
    cluster.until("the end of its servers", lambda: not processes_of(run), 60)


def test_a_service_that_cannot_start_ends_the_job_with_its_log_named(cluster, words):
    job_id, run = submit(cluster, [*words, "launch.services.engine.command=[/no/such,'{port}']"], "broken")
    cluster.ended(job_id, "FAILED")
    said = cluster.log("broken")
    assert "engine-0 was given up: /no/such cannot be started" in said and "engine-0.log" in said
    assert "Traceback" not in said.partition("engine-0 was given up")[0]
