"""The script that goes to sbatch: what it says follows from configuration and site, and a dry run touches nothing."""

import json
import shlex
import signal
import subprocess
import sys
import time

import pytest

from megatron_nb import sft, slurm
from megatron_nb.config import ConfigError, compose
from megatron_nb.launch import slurm_job
from megatron_nb.services import ServiceConfig
from megatron_nb.slurm import PROJECT, Job, Site, SlurmConfig

SMALL = ["model=tiny", "parallel=cpu4", "context=2k", "data=files", "data.sources.a.path=rows.jsonl", "launch=slurm"]


def job(tmp_path, site="", **settings):
    (tmp_path / "site.yaml").write_text(site)
    config = SlurmConfig(site=str(tmp_path / "site.yaml"), **settings)
    return Job("a-run", "megatron_nb.sft", tmp_path / "runs" / "a run", config, "seed: 1\n")


def options(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_a_script_asks_for_what_configuration_and_site_say_and_for_nothing_else(tmp_path):
    site = "partition: gpu\naccount: lab\ngpus: 8\ncpus_per_task: 96\nmemory: 0\nexclusive: true\noptions: [--exclude=n7]\n"
    text = job(tmp_path, site, nodes=4, time="02:00:00", grace_s=90).text()
    folder = tmp_path / "runs" / "a run" / "slurm"
    assert options(text) == [
        "--job-name=a-run", "--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=96", "--mem=0",
        "--time=02:00:00", "--partition=gpu", "--account=lab", "--signal=B:USR1@90", f"--output={folder}/job-%j.log",
        "--open-mode=append", "--requeue", "--exclusive", "--exclude=n7",
    ]  # fmt: skip
    bare = options(job(tmp_path).text())
    assert not [line for line in bare if line.startswith(("--partition", "--gpus", "--mem", "--account", "--cpus"))]


FULL = "container: {image: a.sqsh}\nnuma_binding: node\nrendezvous: address\nsetup: [module load x]"


@pytest.mark.parametrize("site", ["", FULL])
def test_bash_can_read_every_script(tmp_path, site):
    text = job(tmp_path, site).text()
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert subprocess.run(["bash", "-n"], input=text.split("<<'NODE'\n")[1].split("\nNODE\n")[0], text=True).returncode == 0


def test_a_container_stands_on_srun_with_its_mounts_in_one_list(tmp_path):
    text = job(tmp_path, "container: {image: nb.sqsh, mounts: ['/a:/a', '/b:/c']}").text()
    words = shlex.split(next(line for line in text.splitlines() if "srun" in line and "--label" in line))
    assert "--container-image=nb.sqsh" in words and "--no-container-mount-home" in words
    mounts = next(word for word in words if word.startswith("--container-mounts=")).partition("=")[2].split(",")
    run = tmp_path / "runs" / "a run"
    assert mounts[-3:] == [f"{run}:{run}", "/a:/a", "/b:/c"] and f"{PROJECT}:{PROJECT}" in mounts
    assert f"export PYTHONPATH={PROJECT}:{PROJECT}/kernels" in text  # and is what the ranks import


def test_environment_values_are_quoted(tmp_path):
    assert "export A='x y; rm -rf z'" in job(tmp_path, "environment: {A: 'x y; rm -rf z'}").text().splitlines()


def test_a_dry_run_prints_the_script_and_touches_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["launch.slurm.nodes=2", "launch.slurm.ranks_per_node=2", "name=mine", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["sft", *SMALL, *words])
    sft.main()
    text = capsys.readouterr().out
    assert "#SBATCH --nodes=2" in text and f"\nrun={tmp_path}/runs/mine\n" in text
    assert list(tmp_path.iterdir()) == []


def test_what_the_ranks_read_is_the_resolved_configuration_with_a_local_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["launch.slurm.nodes=2", "launch.slurm.ranks_per_node=2", "optimizer.lr=0.5"]
    config = compose(sft.SftConfig, "sft", [*SMALL, *words])
    made = slurm_job(config, "sft", "megatron_nb.sft")
    (tmp_path / "job.yaml").write_text(made.config_yaml)
    read = compose(sft.SftConfig, "job", folder=tmp_path)
    assert (read.name, read.optimizer.lr, read.launch.kind) == (made.title, 0.5, "local")


@pytest.mark.parametrize(
    ("site", "complaint"),
    [
        ("partitoin: gpu", "partition"),
        ("rendezvous: dns", "hostname or address"),
        ("container: {imge: a}", "image"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_site_file_that_cannot_be_used_is_named_with_its_mistake(tmp_path, site, complaint):
    (tmp_path / "site.yaml").write_text(site)
    with pytest.raises(ConfigError, match=complaint) as error:
        Site.read(tmp_path / "site.yaml")
    assert "site.yaml" in str(error.value)


def test_a_job_of_another_size_than_its_layout_is_refused():
    config = compose(sft.SftConfig, "sft", [*SMALL, "launch.slurm.nodes=3", "launch.slurm.ranks_per_node=2"])
    with pytest.raises(ConfigError, match="= 6 ranks, but parallel.world=4"):
        sft.describe_job(config)


def test_a_job_of_too_few_nodes_for_one_copy_is_told_how_many_it_takes():
    words = ["context=256k", "data=mixture_256k", "parallel=h100_256k", "launch=slurm"]
    with pytest.raises(ConfigError, match="= 8 ranks, but a copy .* takes 32: set launch.slurm.nodes to a multiple of 4"):
        sft.describe_job(compose(sft.SftConfig, "sft", words))
    assert "64 = data 2" in sft.describe_job(compose(sft.SftConfig, "sft", [*words, "launch.slurm.nodes=8"]))


def test_a_node_that_takes_minutes_for_an_update_at_256k_is_told_in_time():
    words = ["context=256k", "data=mixture_256k", "parallel=h100_8_256k", "launch=slurm", "data.tokenizer=t"]
    made = slurm_job(compose(sft.SftConfig, "sft", words), "sft", "megatron_nb.sft")
    assert "--signal=B:USR1@1200" in options(made.text())


def test_what_is_for_the_ranks_alone_does_not_reach_their_servers(tmp_path):
    site = "environment: {BOTH: 1}\nrank_environment: {ONLY: 'a b'}\ncontainer: {image: a.sqsh}"
    made = job(tmp_path, site)
    made.services = {"engine": ServiceConfig(["serve", "{port}"], nodes=1)}
    text = made.text()
    ranks = text.split("<<'NODE'\n")[1].split("\nNODE\n")[0]
    assert "export ONLY='a b'" in ranks and text.count("ONLY") == 1 and "\nexport BOTH=1\n" in text.replace(ranks, "")


def test_the_shipped_site_keeps_from_servers_what_they_do_not_take_well():
    site = Site.read(PROJECT / "slurm" / "site.yaml")
    assert not {"PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"} & set(site.environment)
    assert site.rank_environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("kept", ["checkpoints/step-1/COMPLETE", "rollouts/pending/a.jsonl", ""])
def test_a_step_longer_than_the_grace_goes_on_in_the_queue_when_something_was_kept(tmp_path, monkeypatch, kept):
    made, asked = job(tmp_path, grace_s=2), tmp_path / "asked"
    made.folder.mkdir(parents=True)
    programs(
        tmp_path, monkeypatch, scontrol=f"[ $1 = show ] && echo n1 || echo $* >> {asked}", squeue="echo RUNNING",
        srun=f"trap '' USR1; touch {tmp_path}/sampling; for ((i = 0; i < 50; i++)); do sleep 0.1; done; exit 85",
    )  # fmt: skip
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    with subprocess.Popen(["bash", "-c", made.text()], stderr=subprocess.PIPE, text=True) as script:
        while not (tmp_path / "sampling").exists():
            time.sleep(0.05)
        if kept:
            (made.run / kept).parent.mkdir(parents=True)
            (made.run / kept).touch()
        script.send_signal(signal.SIGUSR1)
        time.sleep(2.5)
        assert asked.exists() == bool(kept)
        said = script.communicate(timeout=60)[1]
    assert ("not left within the grace of 2 s: launch.slurm.grace_s" in said) == bool(kept)
    assert asked.read_text().splitlines()[0] == "requeue 7"  # at the latest when the step ends


@pytest.mark.parametrize("made", ["", "metrics.jsonl", "rollouts/pending/a.jsonl", "outcomes/parts/a.jsonl"])
def test_a_step_whose_rank_died_starts_again_only_when_something_was_made(tmp_path, monkeypatch, made):
    one = job(tmp_path, restarts=5)
    one.folder.mkdir(parents=True)
    file = one.run / made if made else tmp_path / "elsewhere"
    file.parent.mkdir(parents=True, exist_ok=True)
    quoted = shlex.quote(str(file))
    programs(
        tmp_path, monkeypatch, scontrol="echo n1", squeue="echo RUNNING",
        srun=f"echo begun >> {tmp_path}/srun-log; [ -s {quoted} ] || echo row > {quoted}; exit 1",
    )  # fmt: skip
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    assert subprocess.run(["bash", "-c", one.text()], capture_output=True).returncode == 1
    assert (tmp_path / "srun-log").read_text().count("begun") == (2 if made else 1)  # the second start made nothing


def test_without_slurm_a_submission_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no sbatch on this machine"):
        job(tmp_path).submit()
    assert not (tmp_path / "runs").exists()


def programs(folder, monkeypatch, **does):
    """Programs of these names come before those of the system."""
    for name, script in does.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("Invalid account or account/partition combination specified", "set account in the site file"),
        ("Invalid qos specification", "set qos in the site file"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "lower launch.slurm.time"),
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)", "nothing was submitted"),
        ("Batch job submission failed: Socket timed out on send/recv operation", "it may be in the queue all the same"),
    ],
)
def test_what_sbatch_refuses_is_said_with_its_remedy(tmp_path, monkeypatch, said, remedy):
    programs(tmp_path, monkeypatch, squeue="", sbatch=f"echo 'sbatch: error: {said}' >&2; exit 1")
    with pytest.raises(ConfigError, match="Slurm refuses the job") as error:
        job(tmp_path).submit()
    assert said in str(error.value) and remedy in str(error.value)


AWAY = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
GONE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.fixture
def had_job(tmp_path, monkeypatch):
    """A job whose run was submitted before; what sbatch is called with is written down. Pauses are short."""
    monkeypatch.setattr(slurm, "PAUSES_S", (0.0, 0.0))
    programs(tmp_path, monkeypatch, sbatch=f"echo called >> {tmp_path}/submitted; echo 8")
    again = job(tmp_path)
    again.folder.mkdir(parents=True)
    (again.folder / "job.json").write_text(json.dumps({"id": "7"}))
    return again


def test_a_run_is_not_submitted_again_while_the_controller_does_not_say_what_became_of_its_job(had_job, tmp_path, monkeypatch):
    programs(tmp_path, monkeypatch, squeue=f"echo asked >> {tmp_path}/asked; {AWAY}")
    with pytest.raises(ConfigError, match="whether job 7 waits or runs is not known.*failed 3 times.*Unable to contact.*sinfo"):
        had_job.submit()
    assert not (tmp_path / "submitted").exists() and (tmp_path / "asked").read_text().count("asked") == 3
    assert json.loads((had_job.folder / "job.json").read_text())["id"] == "7"


def test_a_controller_that_is_away_for_a_moment_is_asked_again(had_job, tmp_path, monkeypatch):
    programs(tmp_path, monkeypatch, squeue=f"[ -e {tmp_path}/back ] && echo RUNNING && exit; touch {tmp_path}/back; {AWAY}")
    assert slurm.running(had_job.run) == "7"


@pytest.mark.parametrize("forgotten", [GONE, "echo", "echo COMPLETED"])
def test_a_run_whose_job_has_ended_or_is_forgotten_is_submitted_again(had_job, tmp_path, monkeypatch, forgotten):
    programs(tmp_path, monkeypatch, squeue=forgotten)
    assert had_job.submit() == "8" and (tmp_path / "submitted").read_text() == "called\n"


def test_the_status_calls_a_run_not_known_while_the_controller_does_not_answer(had_job, tmp_path, monkeypatch):
    from tools import status

    programs(tmp_path, monkeypatch, squeue=AWAY)
    (had_job.run / "lock").touch()
    told = status.status_of(had_job.run, "one", 5)
    assert told.state == "not known" and "whether job 7 waits or runs is not known" in told.reason
    (had_job.run / "lock").unlink()
    (had_job.run / "logs" / "attempt-1").mkdir(parents=True)
    (had_job.folder / "stopped-7.txt").write_text("no such file")  # the job itself says so: it has ended
    assert status.status_of(had_job.run, "one", 5).reason == "no such file"
