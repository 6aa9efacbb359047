"""What a user of a real Slurm sees when something outside goes wrong: where it is said, and what to do. `make test-slurm`."""

import subprocess
import time
from contextlib import contextmanager

import pytest

from megatron_nb import slurm
from tests.slurm.cluster_run import SITE, needs_slurm, running_cluster

pytestmark = needs_slurm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Jobs of one node with one rank."""
    for one in running_cluster(tmp_path_factory.mktemp("messages"), 17340):
        one.always, one.nodes, one.ranks_per_node = ["parallel=cpu1", "global_batch_size=64"], 1, 1
        yield one


@contextmanager
def small_disk(folder, size):
    """`folder` as a file system of its own with so much room."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize(
    ("site", "said", "remedy"),
    [
        ("partition: nowhere", "invalid partition", "set partition in the site file"),
        ("partition: batch\ngpus: 99", "node configuration", "ask for fewer nodes"),
    ],
)
def test_what_slurm_refuses_is_said_with_its_remedy(cluster, tmp_path, site, said, remedy):
    (tmp_path / "site.yaml").write_text(site)
    told = cluster.main(*cluster.words("refused", f"launch.slurm.site={tmp_path}/site.yaml"), code=1)
    assert "Slurm refuses the job" in told and said in told and remedy in told and "Traceback" not in told


def test_a_job_with_the_wrong_account_waits_with_the_reason(cluster, tmp_path):
    """Without a database of accounts Slurm takes such a job and lets it wait; with one it refuses it: test_slurm_script.py."""
    (tmp_path / "site.yaml").write_text("partition: lab\naccount: nobody\n")
    job_id = cluster.submit("accounted", f"launch.slurm.site={tmp_path}/site.yaml")
    cluster.until("Slurm's reason", lambda: "account not known" in cluster.status("accounted"), 30)
    told = cluster.status("accounted")
    assert "accounted is waiting (pending): " in told and "set account in the site file" in told
    cluster.slurm_says("scancel", job_id)


def test_a_cancelled_job_is_called_so_with_the_checkpoint_that_it_goes_on_from(cluster):
    job_id = cluster.submit("cancelled", "checkpoint.every=2", "num_steps=1000")
    cluster.until("step 3", lambda: cluster.steps("cancelled") >= 3)
    cluster.slurm_says("scancel", job_id)
    cluster.ended(job_id, "CANCELLED")
    time.sleep(5)
    assert cluster.state(job_id) == "CANCELLED"  # its script did not put it into the queue again
    told = cluster.status("cancelled", code=1)
    assert "cancelled is cancelled: " in told and "the same command goes on from step-0000" in told


def test_missing_data_is_refused_before_the_job_is_submitted(cluster):
    told = cluster.main(*cluster.words("absent", "data.sources.a.path=/no/such.jsonl"), code=1)
    assert "data.sources.a.path=/no/such.jsonl: there is no such file" in told
    assert not (cluster.folder / "runs" / "absent").exists()


def test_data_that_vanish_before_the_job_begins_end_it_at_once_with_their_name(cluster, tmp_path):
    (tmp_path / "gone.jsonl").write_text((cluster.folder / "rows.jsonl").read_text())
    site = tmp_path / "site.yaml"
    site.write_text(f"{SITE}\noptions: [--begin=now+3]\n")  # three seconds later
    job_id = cluster.submit("vanished", f"data.sources.a.path={tmp_path}/gone.jsonl", f"launch.slurm.site={site}")
    (tmp_path / "gone.jsonl").unlink()
    cluster.ended(job_id, "FAILED")
    told = cluster.status("vanished", code=1)
    assert "vanished is failed: " in told and "gone.jsonl" in told and "Traceback" not in told


def test_a_disk_too_small_for_the_checkpoints_is_named_before_the_first_step(cluster, tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        job_id = cluster.submit("small", f"runs_dir={disk}")
        cluster.ended(job_id, "FAILED")
        told = " ".join(cluster.run("tools/status.py", str(disk / "small"), code=1).split())
        assert "the job cannot run here" in told and "make room, keep fewer" in told
        assert not (disk / "small" / "metrics.jsonl").exists()


def test_a_disk_that_fills_up_ends_the_job_and_the_checkpoint_before_stays(cluster, tmp_path):
    with small_disk(tmp_path / "disk", "16m") as disk:
        job_id = cluster.submit("full", f"runs_dir={disk}", "checkpoint.every=3", "num_steps=1000")
        cluster.until("a checkpoint", lambda: (disk / "full/checkpoints/step-00000003/COMPLETE").exists())
        subprocess.run(["dd", "if=/dev/zero", f"of={disk}/filler", "bs=64k"], capture_output=True)
        cluster.ended(job_id, "FAILED")
        told = " ".join(cluster.run("tools/status.py", str(disk / "full"), code=1).split())
        assert "full" in told and "make room, then start the same command again" in told
        assert list(disk.glob("full/checkpoints/step-*/COMPLETE"))


def test_a_job_for_a_node_that_is_down_waits_with_the_reason(cluster, tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text(f"{SITE}\noptions: [--nodelist=n4]\n")
    cluster.slurm.kill_node("n4")
    cluster.until("the loss of the node", lambda: "n4" in cluster.slurm_says("sinfo", "-h", "-t", "down", "-o", "%N"), 60)
    try:
        job_id = cluster.submit("unreachable", f"launch.slurm.site={site}")
        cluster.until("Slurm's reason", lambda: "n4" in cluster.status("unreachable"), 30)
        told = cluster.status("unreachable")
        assert "unreachable is waiting (pending): " in told and "sinfo -R" in told
        cluster.slurm_says("scancel", job_id)
    finally:
        cluster.slurm.start_node("n4")


def test_a_run_is_not_submitted_a_second_time_while_the_controller_is_away(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "PAUSES_S", (0.5,))
    site = tmp_path / "site.yaml"
    site.write_text(f"{SITE}\noptions: [--hold]\n")
    words = cluster.words("held", f"launch.slurm.site={site}")
    job_id = cluster.main(*words).rpartition("\njob ")[2].partition(":")[0]
    cluster.slurm.stop_controller()
    try:
        told = cluster.main(*words, code=1)
        assert f"whether job {job_id} waits or runs is not known" in told and "Unable to contact slurm controller" in told
        assert "held is not known: " in cluster.status("held", code=1)
    finally:
        cluster.slurm.start_controller()
    assert f"is the run of job {job_id}, which waits or runs" in cluster.main(*words, code=1)
    cluster.slurm_says("scancel", job_id)
    monkeypatch.setenv("SLURM_CONF", cluster.slurm.env["SLURM_CONF"])
    assert slurm.state("999999") is None  # forgotten, or never known
