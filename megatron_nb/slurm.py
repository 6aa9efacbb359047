"""The way onto a Slurm cluster: a configuration and a site -> a script that needs none of this code -> a job.

slurm/job.sbatch.jinja is the script, slurm/site.yaml says what the cluster is like.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
import yaml

from megatron_nb.run import write_atomic
from megatron_nb.schema import ConfigError, build
from megatron_nb.services import ServiceConfig, write_plan

PROJECT = Path(__file__).parents[1]
TEMPLATE = PROJECT / "slurm" / "job.sbatch.jinja"
IMPORTS = f"export PYTHONPATH={shlex.quote(f'{PROJECT}:{PROJECT}/kernels')}${{PYTHONPATH:+:$PYTHONPATH}}"  # in a container
STAGE = "job"  # the resolved configuration, as a stage file in the run's folder `slurm`
WAITS = ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "STOPPED")
LATE_S = 60  # before its time limit a job whose ranks have not left yet goes back into the queue
PAUSES_S = (1.0, 2.0, 4.0, 8.0)  # between questions to a controller that does not answer
UNKNOWN_JOB = "Invalid job id"  # so squeue says of a job that it knows no more, and fails as well
REMEDIES = {  # what sbatch says -> what to do
    "account": "set account in the site file",
    "partition": "set partition in the site file (`sinfo` lists them)",
    "qos": "set qos in the site file (`sacctmgr show qos` lists them)",
    "node configuration": "ask for fewer nodes, GPUs or cores: launch.slurm.nodes, gpus and cpus_per_task of the site file",
    "time limit": "lower launch.slurm.time",
    "contact slurm controller": "nothing was submitted: give the same command again when `sinfo` answers",
    "timed out": "it may be in the queue all the same: look with `squeue --me` and scancel it before the same command again",
}


@dataclass
class SlurmConfig:
    """How a job is submitted; what is the same for all jobs of a cluster is in the site file."""

    nodes: int = 1
    ranks_per_node: int = 8  # GPUs of a node, or processes where there are none
    time: str = "04:00:00"  # of one allocation; a job that is not done is requeued
    grace_s: int = 300  # so long before that limit the job is told to save
    restarts: int = 3  # within an allocation, when a rank died after progress
    requeues: int = 100  # after which a job gives up
    after: list[str] = field(default_factory=list)  # job ids that must have ended well first
    site: str = str(PROJECT / "slurm" / "site.yaml")

    def __post_init__(self):
        for name, least in (("nodes", 1), ("ranks_per_node", 1), ("grace_s", 1), ("restarts", 0), ("requeues", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"launch.slurm.{name}={getattr(self, name)} must be at least {least}")


@dataclass
class Container:
    image: str | None = None
    mounts: list[str] = field(default_factory=list)


@dataclass
class Site:
    """See slurm/site.yaml."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus: str | None = None
    cpus_per_task: int | None = None
    memory: str | None = None
    exclusive: bool = False
    options: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)  # none: the environment that submits, unless there is a container
    container: Container = field(default_factory=Container)
    rendezvous: str = "hostname"
    numa_binding: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    rank_environment: dict[str, Any] = field(default_factory=dict)  # of the ranks alone: servers have other needs

    def __post_init__(self):
        if self.rendezvous not in ("hostname", "address"):
            raise ValueError(f"rendezvous={self.rendezvous!r} must be hostname or address")

    @classmethod
    def read(cls, path: str | Path) -> Site:
        """ConfigError naming the file, and the nearest key for one that is not known."""
        try:
            told = yaml.safe_load(Path(path).read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"launch.slurm.site={path}: cannot be read ({error}): copy slurm/site.yaml") from error
        for name in ("gpus", "memory"):  # 8 and 0 are fine too
            if told.get(name) is not None:
                told[name] = str(told[name])
        try:
            return build(cls, told)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error


@dataclass
class Job:
    """One stage on its way: everything the script is made of."""

    title: str  # name of the run
    module: str  # such as megatron_nb.sft
    run: Path  # absolute
    config: SlurmConfig
    config_yaml: str  # resolved, of the run
    points: dict[str, str] = field(default_factory=dict)  # of a sweep: run folder -> configuration, instead of the one above
    at_once: int | None = None  # points at a time
    services: dict[str, ServiceConfig] = field(default_factory=dict)
    finish: str = ""  # a command that the first node runs when the ranks have ended well; where it fails the job has failed

    @property
    def folder(self) -> Path:
        return self.run / "slurm"

    @property
    def script(self) -> Path:
        return self.folder / f"{STAGE}.sbatch"

    @property
    def points_file(self) -> Path | None:
        """The run folders of an array; its own for every submission, as requeued points of an earlier one read theirs."""
        digest = hashlib.blake2b("\n".join(self.points).encode(), digest_size=4).hexdigest()
        return self.folder / f"points-{digest}.txt" if self.points else None

    @property
    def nodes(self) -> int:
        """The ranks' and, behind them, those of services."""
        return self.config.nodes + sum(one.nodes for one in self.services.values())

    def text(self) -> str:
        """The script. ConfigError for a site file that cannot be used."""
        config, site = self.config, Site.read(self.config.site)
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
        environment.filters["quote"] = lambda value: shlex.quote(str(value))
        return environment.from_string(TEMPLATE.read_text()).render(
            title=self.title, nodes=config.nodes, all_nodes=self.nodes, ranks_per_node=config.ranks_per_node,
            module=self.module, stage_name=STAGE,
            command=f"python -m {self.module}", template=TEMPLATE, site_file=config.site, options=self._options(site),
            run=self.run, points=self.points_file, folder=Path.cwd(), restarts=config.restarts, requeues=config.requeues,
            environment=site.environment, rank_environment=site.rank_environment, rendezvous=site.rendezvous,
            numa_binding=site.numa_binding, setup=_setup(site),
            srun=_container(site.container, self.run), cpus=site.cpus_per_task, services=self._services(site),
            finish=self.finish, grace_s=config.grace_s, late_s=max(config.grace_s - LATE_S, config.grace_s // 2),
        )  # fmt: skip

    def _services(self, site: Site) -> list[dict[str, Any]]:
        """What the script says of each: which nodes of the job, how many servers, their cores and their container."""
        told, first = [], self.config.nodes
        for name, one in self.services.items():
            container = replace(site.container, image=one.image) if one.image else site.container
            told.append({
                "name": name, "command": shlex.join(one.command), "first": first if one.nodes else 0,
                "nodes": max(one.nodes, 1), "per_node": one.per_node,
                "cpus": site.cpus_per_task and max(site.cpus_per_task // one.per_node, 1),
                "srun": _container(container, self.run), "setup": [IMPORTS] if one.image else _setup(site),
            })  # fmt: skip
            first += one.nodes
        return told

    def _options(self, site: Site) -> list[str]:
        config = self.config
        told = {
            "job-name": self.title, "nodes": self.nodes, "ntasks-per-node": 1, "gpus-per-node": site.gpus,
            "cpus-per-task": site.cpus_per_task, "mem": site.memory, "time": config.time, "partition": site.partition,
            "account": site.account, "qos": site.qos, "constraint": site.constraint,
            "signal": f"B:USR1@{config.grace_s}", "output": self.folder / f"{STAGE}-{'%A_%a' if self.points else '%j'}.log",
            "open-mode": "append",
        }  # fmt: skip
        if self.points:
            told["array"] = f"0-{len(self.points) - 1}" + (f"%{self.at_once}" if self.at_once else "")
        flags = ["--requeue", *(["--exclusive"] if site.exclusive else [])]
        return [f"--{name}={value}" for name, value in told.items() if value is not None] + flags + site.options

    def submit(self) -> str:
        """Write script and configuration into the run folder and hand them to sbatch; the job's id.

        ConfigError when the run has a job already, when there is no sbatch, or when Slurm refuses.
        """
        text = self.text()
        if not here():
            raise ConfigError("launch=slurm: there is no sbatch on this machine: submit from a login node, or use launch=local")
        runs = self.points or {str(self.run): self.config_yaml}
        for run, config_yaml in runs.items():
            if (other := running(Path(run))) is not None:
                raise ConfigError(
                    f"{run} is the run of job {other}, which waits or runs: two jobs would write one folder. "
                    f"Give another name=, or `scancel {other}` first"
                )
            (Path(run) / "slurm").mkdir(parents=True, exist_ok=True)
            write_atomic(Path(run) / "slurm" / f"{STAGE}.yaml", config_yaml)
            if self.services:
                write_plan(Path(run), yaml.safe_load(config_yaml)["launch"]["services"])
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.points_file is not None:
            write_atomic(self.points_file, "".join(f"{run}\n" for run in self.points))
        write_atomic(self.script, text)
        command = ["sbatch", "--parsable", *_after(self.config.after), str(self.script)]
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_JOB", "SLURM_STEP"))}
        done = subprocess.run(command, capture_output=True, text=True, env=outside)
        if done.returncode:
            said = done.stderr.strip().removeprefix("sbatch: error: ")
            remedy = next((remedy for word, remedy in REMEDIES.items() if word in said.lower()), f"the script is {self.script}")
            raise ConfigError(f"Slurm refuses the job: {said}: {remedy} ({self.config.site})")
        job_id = done.stdout.strip().split(";")[0]
        for number, run in enumerate(runs):
            mine = f"{job_id}_{number}" if self.points else job_id
            write_atomic(Path(run) / "slurm" / "job.json", json.dumps({"id": mine}))
        return job_id


def running(run: Path) -> str | None:
    """The id of the job that has this run folder and has not ended; None when there is none. ConfigError as `state`."""
    try:
        job_id = json.loads((run / "slurm" / "job.json").read_text())["id"]
    except (OSError, ValueError, KeyError):
        return None
    return job_id if state(job_id) in WAITS else None


def here() -> bool:
    """Whether this machine can talk to a Slurm."""
    return shutil.which("squeue") is not None


def state(job_id: str, patient: bool = True) -> str | None:
    """What the controller says of a job, such as RUNNING; None when it knows it no more.

    ConfigError when it does not answer, for then nobody knows: a stage must not be submitted twice because it is away.
    patient: it is asked again a few times before that.
    """
    command = ["squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T"]
    pauses = PAUSES_S if patient else ()
    for pause in (*pauses, None):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0 or UNKNOWN_JOB in done.stderr:
            return (done.stdout.split() or [None])[0]
        if pause is not None:
            time.sleep(pause)
    raise ConfigError(
        f"whether job {job_id} waits or runs is not known: `{shlex.join(command)}` failed {len(pauses) + 1} times: "
        f"{done.stderr.strip()}: give the same command again when `sinfo` answers"
    )


def _after(job_ids: list[str]) -> list[str]:
    return [f"--dependency=afterok:{':'.join(job_ids)}", "--kill-on-invalid-dep=yes"] if job_ids else []


def _setup(site: Site) -> list[str]:
    """How a node comes to its Python: in a container this project's folder, which is mounted; else this environment."""
    if site.container.image:
        return [IMPORTS, *site.setup]
    return site.setup or [f"export PATH={shlex.quote(sys.prefix)}/bin:$PATH"]


def _container(container: Container, run: Path) -> str:
    """srun's words of pyxis, with a space behind. The project, this folder and the run are always mounted."""
    if container.image is None:
        return ""
    here, ours = Path.cwd(), [PROJECT]
    for folder in (here, run):
        if not any(folder.is_relative_to(mounted) for mounted in ours):
            ours.append(folder)
    mounts = ",".join([*(f"{folder}:{folder}" for folder in ours), *container.mounts])
    words = [f"--container-image={container.image}", f"--container-mounts={mounts}", f"--container-workdir={here}"]
    return shlex.join([*words, "--no-container-mount-home"]) + " "
