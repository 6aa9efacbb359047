"""Stages on a real Slurm: four virtual nodes on this machine (tools/local_slurm.py). `make test-slurm`."""

import json
import re

import pytest
import torch

from megatron_nb import cascade
from tests.jobs.test_resume_job import GOLDEN
from tests.slurm.cluster_run import needs_slurm, running_cluster

pytestmark = needs_slurm
SMALL = ["parallel=cpu2", "launch.slurm.ranks_per_node=1"]  # the chain: two nodes with a rank each


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    yield from running_cluster(tmp_path_factory.mktemp("slurm"), 17300)


def test_two_nodes_of_two_ranks_train_like_four_ranks_of_this_machine_bit_for_bit(cluster):
    cluster.ended(cluster.submit("far"))
    words = [word for word in cluster.words("near") if not word.startswith("launch")]
    cluster.run("-m", "megatron_nb.sft", *words, "launch.ranks=4")
    assert cluster.losses("far") == cluster.losses("near")
    assert cluster.losses("far") == pytest.approx(GOLDEN, abs=1e-5)  # of two ranks, in another order of sums


def test_a_sweep_is_an_array_with_a_limit_and_a_point_that_fails_stops_no_other(cluster):
    """Six points of two nodes; the file of three of them has no good row."""
    few = cluster.words("sweep", "num_steps=2", "optimizer.warmup_steps=1")
    words = ["-m", "megatron_nb.sft", "-m", *few, "launch.at_once=2"]
    rows = str(cluster.folder / "rows.jsonl")
    broken = cluster.folder / "broken.jsonl"
    broken.write_text("{}\n")
    said = cluster.run(*words, "optimizer.lr=1e-3,1e-2,3e-2", f"data.sources.a.path={rows},{broken}")
    job_id = said.rpartition("\njob ")[2].split()[0]
    running = []

    def over():
        states = cluster.slurm_says("squeue", "-h", "-r", "-t", "all", "-j", job_id, "-o", "%T").split()
        running.append(states.count("RUNNING"))
        return len(states) == 6 and not set(states) - {"COMPLETED", "FAILED"}

    cluster.until("the end of the sweep", over)
    assert max(running) == 2
    root = cluster.folder / "runs" / "sweep"
    cluster.run("tools/sweep.py", str(root))
    table = [line.split(",") for line in (root / "sweep.csv").read_text().splitlines()]
    state = table[0].index("state")
    assert [row[state] for row in table[1:]] == ["done"] * 3 + ["failed"] * 3
    assert (root / "sweep.png").exists()
    broken.write_text((cluster.folder / "rows.jsonl").read_text())
    again = cluster.run(*words, "optimizer.lr=1e-3,1e-2,3e-2", f"data.sources.a.path={rows},{broken}")
    assert "6 points, 3 of them done" in again
    cluster.slurm_says("scancel", again.rpartition("\njob ")[2].split()[0])


def chain_words(cluster, name):
    """A chain of three fine-tunings as words of the cascade."""
    words = [word for word in cluster.words(name) if not word.startswith(("name=", "runs_dir=", "num_steps=", "launch"))]
    words = [*words, *SMALL, "num_steps=6", "checkpoint.every=2", "global_batch_size=64", "launch.slurm.nodes=2"]
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
        said = cluster.main(*chain_words(cluster, name), main=cascade.main)
        jobs[name] = dict(re.findall(r"(\w+) is job (\d+)", said))
        assert list(jobs[name]) == ["one", "two", "three"]
        if name == "calm":
            cluster.ended(jobs[name]["three"])
            assert "is job" not in cluster.main(*chain_words(cluster, name), main=cascade.main)  # all is done
    storm = jobs["storm"]
    cluster.until("step 3 of the second stage", lambda: cluster.steps("storm/two") >= 3)
    urgent = cluster.slurm_says(
        "sbatch", "--parsable", "-p", "urgent", "-N4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 5"
    ).strip()
    cluster.until("the preemption", lambda: cluster.state(storm["two"]) != "RUNNING", 60)
    cluster.ended(urgent)
    cluster.until("step 3 of the last stage", lambda: cluster.steps("storm/three") >= 3)
    node = cluster.slurm_says("squeue", "-h", "-j", storm["three"], "-o", "%B").strip()
    cluster.slurm.kill_node(node)
    cluster.until("the requeue", lambda: cluster.state(storm["three"]) != "RUNNING", 120)
    cluster.slurm.start_node(node)
    cluster.ended(storm["three"])
    for stage in ("one", "two", "three"):
        assert cluster.losses(f"storm/{stage}") == cluster.losses(f"calm/{stage}")
    storms, calms = cluster.weights("storm/three"), cluster.weights("calm/three")
    assert storms.keys() == calms.keys() and all(torch.equal(storms[key], calms[key]) for key in calms)
    said = cluster.run("tools/status.py", str(cluster.folder / "runs" / "storm"), "--json")
    assert [one["state"] for one in json.loads(said)] == ["done"] * 3
