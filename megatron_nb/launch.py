"""From a configuration to a running job. Locally that is torchrun itself; the way onto a cluster starts here too."""
from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from megatron_nb import services
from megatron_nb.config import ConfigError, diff, flatten, from_yaml, to_yaml
from megatron_nb.parallel.topology import Topology
from megatron_nb.run import Run, run_folder
from megatron_nb.services import ServiceConfig
from megatron_nb.slurm import Job, Site, SlurmConfig
from megatron_nb.sweep import gathered
from megatron_nb.training import memory, preflight
from megatron_nb.training.watchdog import Watchdog

# What a resumed run may change: how it runs, not what it computes. A derived name does not depend on these either.
FREE = ("name", "runs_dir", "num_steps", "launch", "log", "checkpoint", "parallel", "micro_batch_size")
FREE += ("data.workers", "data.loader_workers", "data.cache_dir", "data.changed")
FREE += ("engine.native", "engine.server", "collect.concurrency", "collect.timeout_s", "evaluation")
FREE += ("validate_every", "layer_norms_every", "stop_after_bad_steps", "rehearse", "replay_step")


@dataclass
class LaunchConfig:
    """How the job starts."""

    dry_run: bool = False  # print the resolved configuration, what it would need and the script, then stop
    kind: Literal["local", "slurm"] = "local"  # local: here; slurm: as a job of the cluster
    ranks: int | None = None  # local: processes that torchrun starts on this machine; null: this one, or torchrun's own
    hang_factor: float = 20.0  # no step within so many times the median: write the stacks, leave for a restart; 0: never
    hang_least_s: float = 1800.0  # but not before
    at_once: int | None = None  # points of a sweep that run at a time on the cluster; null: as many as it lets
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    services: dict[str, ServiceConfig] = field(default_factory=dict)  # servers beside the job; `service:NAME` is their address

    def __post_init__(self):
        if self.hang_factor < 0 or self.hang_least_s <= 0:
            told = f"launch.hang_factor={self.hang_factor}, launch.hang_least_s={self.hang_least_s}"
            raise ValueError(f"{told}: the first must be at least 0, the second above 0")
        if self.ranks is not None and self.ranks < 1:
            raise ValueError(f"launch.ranks={self.ranks} must be at least 1")


def world_of(config: Any) -> int:
    """Processes this job runs on, or is meant for. config: a job's dataclass with `launch` and `parallel`.

    ConfigError when a job for Slurm asks for more or fewer than its layout is made for.
    """
    started, launch, made_for = int(os.environ.get("WORLD_SIZE", "1")), config.launch, config.parallel.world
    if launch.kind == "slurm":
        asked = launch.slurm.nodes * launch.slurm.ranks_per_node
        if made_for not in (None, asked):
            raise ConfigError(
                f"launch.slurm.nodes={launch.slurm.nodes} * ranks_per_node={launch.slurm.ranks_per_node} = {asked} ranks, "
                f"but parallel.world={made_for}: set launch.slurm.nodes, or choose another layout with parallel="
            )
        if made_for is None and asked % config.parallel.model_ranks:
            copy, each = config.parallel.model_ranks, launch.slurm.ranks_per_node
            raise ConfigError(
                f"launch.slurm.nodes={launch.slurm.nodes} * ranks_per_node={each} = {asked} ranks, but a copy of the model "
                f"takes {copy}: set launch.slurm.nodes to a multiple of {math.lcm(copy, each) // each}, or choose another "
                "layout with parallel="
            )
        return asked
    if "RANK" not in os.environ and launch.ranks:
        return launch.ranks
    if not launch.dry_run:
        return started
    return made_for or max(started, config.parallel.model_ranks)


def elsewhere(config: Any, job: str, module: str, report: str) -> bool:
    """Whether nothing is left to do here: the dry run is printed, Slurm has the job, or torchrun's ranks have done it.

    config: a job's dataclass; job: its name in derived names; report: what a dry run prints below the configuration.
    Returns when all services beside the job are up. ConfigError when Slurm refuses, or when a service does not come up.
    """
    services.check(config.launch.services, config)
    if gathered(config, module):
        return True
    report += services.describe(config.launch.services)
    absent = preflight.missing(flatten(config)) if config.launch.kind == "slurm" else []
    report += "".join(f"\nnot here     {line}" for line in absent) + _gpus_asked_for(config)
    launch, first = config.launch, int(os.environ.get("RANK", "0")) == 0
    slurm = slurm_job(config, job, module) if launch.kind == "slurm" else None
    if launch.dry_run:
        script = f"\n\n{slurm.script}, for sbatch:\n{slurm.text()}" if slurm else ""
        print(f"{to_yaml(config)}\n{report}{script}" if first else "", end="")
        return True
    if slurm:
        if absent and Site.read(launch.slurm.site).container.image is None:  # a container may mount them from elsewhere
            raise ConfigError("the job would end at once:\n" + "\n".join(f"  {line}" for line in absent))
        job_id = slurm.submit()
        print(f"{report}\njob {job_id}: {slurm.script}\nsee it: python tools/status.py {slurm.run}")
        return True
    if launch.services and services.started():
        services.wait(launch.services, loud=first)
        return False
    if "RANK" in os.environ and launch.services:
        raise ConfigError("launch.services: torchrun's ranks cannot start them: leave torchrun out, and say launch.ranks=N")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={launch.ranks}"] if launch.ranks else []
    command = [sys.executable, *torchrun, "-m", module, *sys.argv[1:]]
    if launch.services:
        run = run_folder(config.runs_dir, config.name or derived_name(config, job))
        if code := services.run_beside(run, launch.services, command):
            sys.exit(code if code > 0 else 128 - code)
        return True
    if launch.ranks and "RANK" not in os.environ:
        os.execv(sys.executable, command)
    return False


def _gpus_asked_for(config: Any) -> str:
    """A line for the report when a job that needs GPUs does not ask Slurm for them."""
    parallel, site_file = getattr(config, "parallel", None), config.launch.slurm.site
    if config.launch.kind != "slurm" or parallel is None or parallel.communication != "nccl":
        return ""
    site = Site.read(site_file)
    if site.gpus is not None or any("gpu" in option or "gres" in option for option in site.options):
        return ""
    return f"\nno GPUs      {site_file} asks for none (gpus: null): right only where a node always comes with its own"


def slurm_job(config: Any, job: str, module: str) -> Job:
    """The stage as Slurm gets it. Its ranks read the configuration of now, whatever becomes of the stage files."""
    config.name = config.name or derived_name(config, job)
    run = run_folder(config.runs_dir, config.name).absolute()
    resolved = to_yaml(replace(config, launch=replace(config.launch, kind="local", dry_run=False, ranks=None)))
    return Job(config.name, module, run, config.launch.slurm, resolved, services=config.launch.services)


def derived_name(config: Any, job: str) -> str:
    """JOB-DIGEST: the same for every rank, restart and requeue of one configuration, so each finds its run folder again."""
    fixed = {key: value for key, value in flatten(config).items() if not is_free(key)}
    return f"{job}-{hashlib.blake2b(json.dumps(fixed, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()}"


def is_free(key: str, free: tuple[str, ...] = FREE) -> bool:
    """Whether a resumed run may change this dotted key."""
    return any(key == one or key.startswith(f"{one}.") for one in free)


def watchdog(config: Any, run: Run, longest_s: float = 0.0) -> Watchdog:
    """What ends a hang of this rank. config: a job's dataclass; longest_s: that a part of a step may take by its own rules."""
    least_s = max(config.launch.hang_least_s, longest_s)
    return Watchdog(run.logs / f"stacks-rank-{run.rank}.txt", config.launch.hang_factor, least_s)


def look_around(config: Any, run: Run, place: Topology, pack_tokens: int, planned: float | None = None) -> None:
    """Collective. ValueError with everything that would make this job fail later.

    pack_tokens: of a micro-batch; planned: GB of the fullest rank, where more than the trainer lives on its device.
    """
    if planned is None:
        planned = memory.plan(config.model, config.parallel, place.world, pack_tokens).total / 1e9
    preflight.check(run.folder, place, config.model.num_parameters, config.checkpoint.keep_last or 1, planned)


def open_run(config: Any, job: str) -> Run:
    """The run folder of `config` on every rank, once torch.distributed is up: locked, logged to, a new attempt.

    config: a job's dataclass with `name` (None: derived and filled in) and `runs_dir`. RunFolderError on every rank when
    another job has the folder, or when its checkpoints were made with another configuration. With data.changed=restart the
    data may be another: the loader starts it anew.
    """
    config.name = config.name or derived_name(config, job)
    folder = run_folder(config.runs_dir, config.name)
    ranks = dist.is_available() and dist.is_initialized()

    def share(value: Any) -> Any:
        box = [value]
        if ranks:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def refuse(saved: Path) -> None:
        free = FREE + ("data",) * (getattr(getattr(config, "data", None), "changed", "") == "restart")
        changed = {key: pair for key, pair in diff(from_yaml(saved, type(config)), config).items() if not is_free(key, free)}
        if changed:
            lines = "\n".join(f"  {key}: {old!r} there, {new!r} now" for key, (old, new) in changed.items())
            raise ValueError(
                f"{folder} holds checkpoints of another configuration:\n{lines}\n"
                "Give a new name=, or init_from= that run to start from its weights, or set these keys back to continue it"
            )

    return Run.open(folder, to_yaml(config), rank=dist.get_rank() if ranks else 0, share=share, refuse=refuse)
