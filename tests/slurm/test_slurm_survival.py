"""What a job on a real Slurm survives, and what it must not try again. `make test-slurm`."""

import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.slurm.cluster_run import SITE, needs_slurm, running_cluster

pytestmark = needs_slurm
SLEEPER = "import signal, time\nsignal.signal(signal.SIGUSR2, lambda *_: time.sleep(3600))\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Jobs of two nodes with a rank each, whose steps are long enough to be disturbed."""
    for one in running_cluster(tmp_path_factory.mktemp("survival"), 17320):
        one.always, one.ranks_per_node = ["parallel=cpu2", "global_batch_size=64"], 1
        yield one


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """The losses of a job that nothing happened to."""
    cluster.ended(cluster.submit("undisturbed"))
    return cluster.losses("undisturbed")


def test_a_time_limit_shorter_than_the_work_costs_no_step_and_keeps_the_wandb_run(cluster, undisturbed):
    """The limit itself is in minutes: the signal that Slurm sends before it is sent by hand, three times."""
    job_id = cluster.submit("limited", "checkpoint.every=100", "log.wandb=offline")
    for start in range(3):
        cluster.until(f"steps of start {start}", lambda start=start: cluster.steps("limited") >= 2 * (start + 1))
        cluster.slurm_says("scancel", "--signal=USR1", "--batch", job_id)
        cluster.until("the next start", lambda: cluster.state(job_id) in ("PENDING", "COMPLETED"))
    cluster.ended(job_id)
    assert "start 3, attempt 0" in cluster.log("limited")
    assert cluster.losses("limited") == undisturbed
    kept = {path.name.rpartition("-")[2] for path in cluster.folder.glob("runs/limited/wandb/offline-run-*")}
    assert kept == {(cluster.folder / "runs/limited/wandb_id").read_text()}
    assert len(list(cluster.folder.glob("runs/limited/wandb/offline-run-*"))) == 4


def test_a_rank_that_dies_is_started_again_within_the_allocation(cluster, undisturbed):
    job_id = cluster.submit("killed", "checkpoint.every=2")
    cluster.until("step 4", lambda: cluster.steps("killed") >= 4)
    os.kill(cluster.ranks("killed")[-1], signal.SIGKILL)
    cluster.ended(job_id)
    assert cluster.losses("killed") == undisturbed
    assert "start 0, attempt 1" in cluster.log("killed")


def test_a_rank_that_hangs_ends_the_step_which_starts_again_with_the_stacks_of_all_written_down(cluster, undisturbed):
    (cluster.folder / "sitecustomize.py").write_text(SLEEPER)
    site = cluster.folder / "hang.yaml"
    path, ours = f"export PATH={shlex.quote(sys.prefix)}/bin:$PATH", f"export PYTHONPATH={cluster.folder}"
    site.write_text(f"{SITE}\nsetup: ['{path}', '{ours}']\n")
    soon = ["launch.hang_least_s=8", "launch.hang_factor=8"]
    job_id = cluster.submit("hung", f"launch.slurm.site={site}", "checkpoint.every=2", *soon)
    cluster.until("step 4", lambda: cluster.steps("hung") >= 4)
    os.kill(cluster.ranks("hung")[-1], signal.SIGUSR2)
    cluster.ended(job_id)
    stacks = [path.read_text() for path in sorted(cluster.folder.glob("runs/hung/logs/attempt-1/stacks-rank-*.txt"))]
    assert len(stacks) == 2 and sum("sitecustomize.py" in text for text in stacks) == 1
    assert "no step for" in cluster.log("hung") and "start 0, attempt 1" in cluster.log("hung")
    assert cluster.losses("hung") == undisturbed


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
    assert cluster.losses("node") == undisturbed


def test_a_second_job_does_not_get_the_run_folder_of_a_first(cluster):
    first = cluster.submit("twice", "num_steps=10000", "checkpoint.every=10000")  # longer than any start of a second
    assert f"is the run of job {first}" in cluster.main(*cluster.words("twice"), code=1)
    cluster.until("step 1", lambda: cluster.steps("twice") >= 1)
    second = cluster.slurm_says("sbatch", "--parsable", f"{cluster.folder}/runs/twice/slurm/job.sbatch").strip()
    cluster.ended(second, "FAILED")
    said = Path(f"{cluster.folder}/runs/twice/slurm/job-{second}.log").read_text()
    assert "is being written by process" in said and f"Slurm job {first}" in said and f"scancel {first}" in said
    assert "attempt 1" not in said  # the first one's steps are not its own
    before = cluster.steps("twice")
    cluster.until("further steps of the first", lambda: cluster.steps("twice") > before + 1)
    cluster.slurm_says("scancel", first)
    cluster.ended(first, "CANCELLED")


def test_a_streak_of_nan_ends_the_job_with_a_report_and_is_not_tried_again(cluster):
    words = ["optimizer.lr=1e30", "optimizer.warmup_steps=0", "optimizer.clip_grad=1e30", "stop_after_bad_steps=2"]
    cluster.ended(cluster.submit("diverged", *words), "FAILED")
    assert "attempt 1" not in cluster.log("diverged")
    told = cluster.status("diverged", code=1)
    assert "diverged is failed: " in told and "2 steps in a row were refused for NaN or inf" in told
    assert "Lower optimizer.lr" in told and "step 1 loss 5.9" in told  # what to do, and what led up to it


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_goes_on_to_the_same_weights(cluster, undisturbed):
    whole = cluster.weights("undisturbed")
    last = cluster.folder / "runs/undisturbed/checkpoints/step-00000010"
    file = next(last.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    cluster.ended(cluster.submit("undisturbed"))
    assert "DAMAGED CHECKPOINT" in cluster.log("undisturbed") and last.with_name(f"damaged-{last.name}").exists()
    assert cluster.losses("undisturbed") == undisturbed
    again = cluster.weights("undisturbed")
    assert again.keys() == whole.keys() and all(torch.equal(again[key], whole[key]) for key in whole)
