"""A chain on a real local Slurm whose first stage is not good enough: the second never trains, and both say why."""

import json
import re

import pytest

from megatron_nb import cascade
from tests.slurm.cluster_run import needs_slurm, running_cluster

pytestmark = needs_slurm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    yield from running_cluster(tmp_path_factory.mktemp("slurm"), 17700)


def test_a_shut_gate_fails_its_job_and_cancels_the_next_before_it_trains(cluster):
    left_out = ("name=", "runs_dir=", "num_steps=", "launch", "parallel")
    words = [word for word in cluster.words("gate") if not word.startswith(left_out)]
    words = [*words, "parallel=cpu1", "num_steps=4", "launch.slurm.nodes=1", "launch.slurm.ranks_per_node=1"]
    (cluster.folder / "chain.yaml").write_text(
        "defaults: [CascadeConfig, {launch: local}, _self_]\nstages:\n"
        "  one: {stage: sft, gate: {metric: loss_last, at_most: 0.1}}\n  two: {stage: sft, start_from: one}\n"
    )
    command = [
        f"--config-dir={cluster.folder}", "--config-name=chain", "name=gate", f"runs_dir={cluster.folder}/runs",
        f"words={json.dumps(words)}", "launch=slurm", f"launch.slurm.site={cluster.site}",
    ]  # fmt: skip
    jobs = dict(re.findall(r"(\w+) is job (\d+)", cluster.main(*command, main=cascade.main)))
    cluster.ended(jobs["one"], "FAILED")
    cluster.ended(jobs["two"], "CANCELLED")
    assert cluster.steps("gate/two") == 0
    assert "one is done, but the chain must not go on: its gate is loss_last <= 0.1" in cluster.log("gate/one")
    one, two = json.loads((cluster.folder / "runs/gate/ledger.json").read_text())["stages"]
    assert (one["state"], one["gate"]["passed"], two["state"]) == ("gate shut", False, "not started")
    said = cluster.main(*command, main=cascade.main, code=86)  # the same command again submits nothing
    assert "is job" not in said and "its gate is loss_last <= 0.1" in said
