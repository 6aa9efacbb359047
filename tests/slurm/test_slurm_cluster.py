"""Stages on a real Slurm: four virtual nodes on this machine (tools/local_slurm.py). `make test-slurm`."""

import os
import signal
import time

import pytest

from tests.jobs.test_resume_job import GOLDEN
from tests.slurm.cluster_run import Cluster, local_slurm, why_not

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


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
