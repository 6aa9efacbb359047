"""From a configuration to a running job. Locally that is torchrun itself; the way onto a cluster starts here too."""
from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from megatron_nb.config import diff, flatten, from_yaml, to_yaml
from megatron_nb.run import Run, run_folder

# What a resumed run may change: how it runs, not what it computes. A derived name does not depend on these either.
FREE = ("name", "runs_dir", "num_steps", "launch", "log", "checkpoint", "parallel", "micro_batch_size")
FREE += ("data.workers", "data.loader_workers", "data.cache_dir", "data.changed")
FREE += ("engine.native", "engine.server", "collect.concurrency", "collect.timeout_s", "evaluation")
FREE += ("validate_every", "layer_norms_every", "stop_after_bad_steps", "rehearse", "replay_step")


@dataclass
class LaunchConfig:
    """How the job starts."""

    dry_run: bool = False  # print the resolved configuration and what it would need, then stop
    kind: Literal["local"] = "local"  # local: this process, or the ranks that torchrun started


def world_of(config: Any) -> int:
    """Processes this job runs on, or is meant for in a dry run. config: a job's dataclass with `launch` and `parallel`."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if not config.launch.dry_run:
        return started
    return config.parallel.world or max(started, config.parallel.model_ranks)


def derived_name(config: Any, job: str) -> str:
    """JOB-DIGEST: the same for every rank, restart and requeue of one configuration, so each finds its run folder again."""
    fixed = {key: value for key, value in flatten(config).items() if not is_free(key)}
    return f"{job}-{hashlib.blake2b(json.dumps(fixed, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()}"


def is_free(key: str, free: tuple[str, ...] = FREE) -> bool:
    """Whether a resumed run may change this dotted key."""
    return any(key == one or key.startswith(f"{one}.") for one in free)


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
