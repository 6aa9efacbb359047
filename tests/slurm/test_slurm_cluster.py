"""Stages on a real Slurm: four virtual nodes on this machine (tools/local_slurm.py). `make test-slurm`."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.jobs.test_resume_job import GOLDEN
from tests.slurm.cluster_run import Cluster, local_slurm, why_not

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500), pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    slurm = local_slurm(folder / "cluster", 17300)
    yield Cluster(slurm, folder)
    slurm.down()


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """The losses of a job that nothing happened to."""
    cluster.ended(cluster.submit("undisturbed"))
    return cluster.losses("undisturbed")


def test_two_nodes_of_two_ranks_train_like_four_ranks_of_this_machine_bit_for_bit(cluster, undisturbed):
    words = [word for word in cluster.words("local") if not word.startswith("launch")]
    cluster.run(*words, "launch.ranks=4")
    assert undisturbed == cluster.losses("local")
    assert undisturbed == pytest.approx(GOLDEN, abs=1e-5)  # of two ranks, in another order of sums


def test_a_run_that_has_a_job_is_not_submitted_again(cluster):
    job_id = cluster.submit("twice")
    assert f"is the run of job {job_id}" in cluster.run(*cluster.words("twice"), code=1)
    cluster.slurm_says("scancel", job_id)
    cluster.ended(job_id, "CANCELLED")
    cluster.ended(cluster.submit("twice"))


def test_a_signal_makes_all_ranks_save_the_job_waits_again_and_goes_on(cluster, undisturbed):
    job_id = cluster.submit("signalled", "checkpoint.every=100")
    cluster.until("step 2", lambda: cluster.steps("signalled") >= 2)
    cluster.slurm_says("scancel", "--signal=USR1", "--batch", job_id)
    cluster.ended(job_id)
    assert cluster.losses("signalled") == undisturbed
    assert "start 1, attempt 0" in cluster.log("signalled")


def test_a_rank_that_dies_is_started_again_within_the_allocation(cluster, undisturbed):
    job_id = cluster.submit("killed", "checkpoint.every=2", "num_steps=10")
    cluster.until("step 4", lambda: cluster.steps("killed") >= 4)
    os.kill(cluster.ranks("killed")[-1], signal.SIGKILL)
    cluster.ended(job_id)
    assert cluster.losses("killed")[-1] == undisturbed[-1]
    assert "start 0, attempt 1" in cluster.log("killed")


def test_a_time_limit_shorter_than_the_work_costs_no_step(cluster, undisturbed):
    """The limit itself is in minutes: the signal that Slurm sends before it is sent by hand, three times."""
    job_id = cluster.submit("limited", "checkpoint.every=100")
    for start in range(3):
        cluster.until(f"steps of start {start}", lambda start=start: cluster.steps("limited") >= 2 * (start + 1))
        cluster.slurm_says("scancel", "--signal=USR1", "--batch", job_id)
        cluster.until("the next start", lambda: cluster.state(job_id) in ("PENDING", "COMPLETED"))
    cluster.ended(job_id)
    assert cluster.losses("limited") == undisturbed


def test_a_lost_node_costs_no_run(cluster, undisturbed):
    job_id = cluster.submit("node", "checkpoint.every=2")
    cluster.until("step 3", lambda: cluster.steps("node") >= 3)
    name = cluster.slurm_says("squeue", "-h", "-j", job_id, "-o", "%B").strip()
    cluster.slurm.kill_node(name)
    try:
        cluster.until("the requeue", lambda: cluster.state(job_id) != "RUNNING", 120)
        cluster.ended(job_id)
    finally:
        cluster.slurm.start_node(name)
        time.sleep(2)
    assert cluster.losses("node")[-1] == undisturbed[-1]


@pytest.mark.parametrize(
    ("site", "remedy"),
    [("partition: nowhere", "set partition in the site file"), ("gpus: 99\npartition: batch", "ask for fewer nodes")],
)
def test_what_slurm_refuses_is_said_with_its_remedy(cluster, tmp_path, site, remedy):
    (tmp_path / "site.yaml").write_text(site)
    said = cluster.run(*cluster.words("refused", f"launch.slurm.site={tmp_path}/site.yaml"), code=1)
    assert "Slurm refuses the job" in said and remedy in said and "Traceback" not in said


def test_a_sweep_is_an_array_with_a_limit_and_a_point_that_fails_stops_no_other(cluster):
    """Six points of two nodes; the file of three of them has no good row."""
    words = [*cluster.words("sweep", "num_steps=4", "checkpoint.every=100"), "launch.at_once=2"]
    rows = str(cluster.folder / "rows.jsonl")
    broken = cluster.folder / "broken.jsonl"
    broken.write_text("{}\n")
    said = cluster.run("-m", *words, "optimizer.lr=1e-3,1e-2,3e-2", f"data.sources.a.path={rows},{broken}")
    job_id = said.rpartition("\njob ")[2].split()[0]
    running = []

    def over():
        states = cluster.slurm_says("squeue", "-h", "-r", "-t", "all", "-j", job_id, "-o", "%T").split()
        running.append(states.count("RUNNING"))
        return len(states) == 6 and not set(states) - {"COMPLETED", "FAILED"}

    cluster.until("the end of the sweep", over, 600)
    assert max(running) == 2
    root = cluster.folder / "runs" / "sweep"
    subprocess.run([sys.executable, "tools/sweep.py", str(root)], check=True, env=cluster.slurm.env)
    table = [line.split(",") for line in (root / "sweep.csv").read_text().splitlines()]
    state = table[0].index("state")
    assert [row[state] for row in table[1:]] == ["done"] * 3 + ["failed"] * 3
    assert (root / "sweep.png").exists()
    broken.write_text((cluster.folder / "rows.jsonl").read_text())
    again = cluster.run("-m", *words, "optimizer.lr=1e-3,1e-2,3e-2", f"data.sources.a.path={rows},{broken}")
    assert "6 points, 3 of them done" in again
    cluster.slurm_says("scancel", again.rpartition("\njob ")[2].split()[0])


def chain_words(cluster, name):
    """A chain of three fine-tunings as words of the cascade."""
    words = [word for word in cluster.words(name) if not word.startswith(("name=", "runs_dir=", "num_steps=", "launch"))]
    words = [*words, "num_steps=6", "checkpoint.every=2", "launch.slurm.nodes=2", "launch.slurm.ranks_per_node=2"]
    (cluster.folder / "chain.yaml").write_text(
        "defaults: [CascadeConfig, {launch: local}, _self_]\nstages:\n  one: {stage: sft}\n"
        "  two: {stage: sft, start_from: one, words: [seed=2]}\n"
        "  three: {stage: sft, start_from: two, words: [seed=3]}\n"
    )
    return [
        f"--config-dir={cluster.folder}", "--config-name=chain", f"name={name}", f"runs_dir={cluster.folder}/runs",
        f"words={json.dumps(words)}", "launch=slurm", f"launch.slurm.site={cluster.site}",
    ]  # fmt: skip


def test_a_chain_survives_preemption_and_a_lost_node_with_the_weights_of_an_undisturbed_one(cluster):
    jobs = {}
    for name in ("calm", "storm"):
        said = cluster.run(*chain_words(cluster, name), module="megatron_nb.cascade")
        jobs[name] = dict(re.findall(r"(\w+) is job (\d+)", said))
        assert list(jobs[name]) == ["one", "two", "three"]
        if name == "calm":
            cluster.ended(jobs[name]["three"], seconds=400)
            assert "is job" not in cluster.run(*chain_words(cluster, name), module="megatron_nb.cascade")  # all is done
    storm = jobs["storm"]
    cluster.until("step 3 of the second stage", lambda: cluster.steps("storm/two") >= 3, 400)
    urgent = cluster.slurm_says(
        "sbatch", "--parsable", "-p", "urgent", "-N4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 5"
    ).strip()
    cluster.until("the preemption", lambda: cluster.state(storm["two"]) != "RUNNING", 60)
    cluster.ended(urgent)
    cluster.until("step 3 of the last stage", lambda: cluster.steps("storm/three") >= 3, 400)
    node = cluster.slurm_says("squeue", "-h", "-j", storm["three"], "-o", "%B").strip()
    cluster.slurm.kill_node(node)
    cluster.until("the requeue", lambda: cluster.state(storm["three"]) != "RUNNING", 120)
    cluster.slurm.start_node(node)
    cluster.ended(storm["three"], seconds=400)
    for stage in ("one", "two", "three"):
        assert cluster.losses(f"storm/{stage}") == cluster.losses(f"calm/{stage}")
    storms, calms = cluster.weights("storm/three"), cluster.weights("calm/three")
    assert storms.keys() == calms.keys() and all(torch.equal(storms[key], calms[key]) for key in calms)
    said = subprocess.run([sys.executable, "tools/status.py", str(cluster.folder / "runs" / "storm"), "--json"],
                          capture_output=True, text=True, env=cluster.slurm.env)  # fmt: skip
    assert [one["state"] for one in json.loads(said.stdout)] == ["done"] * 3
