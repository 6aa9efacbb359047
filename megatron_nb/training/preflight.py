"""What would make a job fail hours later, looked at on every rank before the first step; one page when something is wrong.

Seen on every rank: the run folder is the same one, versions are the same, clocks agree, devices are there and hold what is
planned, the disk has room for the checkpoints; later, that tokenizer and data are the same. Told, not judged: the bandwidth of
an all-reduce. Where a job is submitted: that the files it names are there.
"""

from __future__ import annotations

import glob
import importlib.metadata
import logging
import platform
import shutil
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_nb.parallel.topology import ON_CPU, Topology, everywhere, local_rank
from megatron_nb.run import write_atomic

log = logging.getLogger(__name__)
PACKAGES = ("torch", "triton", "megatron-core", "transformers", "numpy")
CLOCKS_S = 10.0  # by which clocks of nodes may differ: locks and logs compare times of several
STATE_BYTES = 16  # of a parameter in a checkpoint: fp32 master and two moments, weights, and some room
SHARED_S = 30.0  # that a network file system may take to show a file of another node
MESSAGE = {True: 1 << 20, False: 1 << 26}  # floats of the all-reduce, on a CPU and on a GPU
ROUNDS = 3
NO_FILE = ": there is no such file or folder"


@dataclass
class Facts:
    """What one rank sees."""

    rank: int
    host: str
    versions: dict[str, str]
    clock: float  # seconds since the epoch, taken right behind a barrier
    sees_folder: bool
    device: str
    device_index: int
    devices: int
    device_memory_gb: float | None  # free now; None on a CPU


def check(folder: Path, place: Topology, num_parameters: int, checkpoints: int, planned_gb: float) -> None:
    """Collective. ValueError, on every rank alike, with everything that is wrong.

    folder: of the run, made by rank 0. checkpoints: kept at a time. planned_gb: of the fullest rank.
    """
    token = [uuid.uuid4().hex if place.rank == 0 else ""]
    dist.broadcast_object_list(token, src=0)
    sign = folder / ".preflight"
    if place.rank == 0:
        write_atomic(sign, token[0])
    everyone = everywhere(_facts(place, _appears(sign, token[0])))
    free_gb = [shutil.disk_usage(folder).free / 1e9 if place.rank == 0 else 0.0]
    dist.broadcast_object_list(free_gb, src=0)
    needed_gb = num_parameters * STATE_BYTES * (checkpoints + 1) / 1e9  # one is being written while the others are kept
    found = problems(everyone, folder, free_gb[0], needed_gb, planned_gb)
    rate = _all_reduce(place.device)
    if place.rank == 0:
        sign.unlink(missing_ok=True)
        log.info("%s", page(everyone, free_gb[0], needed_gb, rate))
    if found:
        raise ValueError("the job cannot run here:\n" + "\n".join(f"  {line}" for line in found))


def problems(everyone: list[Facts], folder: Path, free_gb: float, needed_gb: float, planned_gb: float) -> list[str]:
    """A line for each thing that is wrong, with its remedy."""
    first, found = everyone[0], []
    if blind := [f"{one.rank} on {one.host}" for one in everyone if not one.sees_folder]:
        found.append(
            f"{folder} of rank 0 on {first.host} is not seen by rank {_some(blind)}: "
            "runs_dir must be on a file system that all nodes share"
        )
    for package in PACKAGES:
        version = first.versions[package]
        others = [f"{one.versions[package]} on {one.host}" for one in everyone if one.versions[package] != version]
        if others:
            found.append(f"{package} is {version} on {first.host}, but {_some(others)}: use one environment")
    off = [f"{one.host} {one.clock - first.clock:+.0f} s" for one in everyone if abs(one.clock - first.clock) > CLOCKS_S]
    if off:
        found.append(f"clocks differ from that of {first.host}: {_some(off)}: locks would be taken for dead ones; set up NTP")
    for one in everyone:
        if one.devices and one.device_index >= one.devices:
            found.append(
                f"rank {one.rank} on {one.host} is the node's number {one.device_index} but sees {one.devices} GPUs: "
                "ask for as many as launch.slurm.ranks_per_node (gpus in the site file)"
            )
        if one.device_memory_gb is not None and one.device_memory_gb < planned_gb:
            found.append(
                f"rank {one.rank} on {one.host}: {one.device_memory_gb:.1f} GB are free on its {one.device}, "
                f"{planned_gb:.1f} GB are planned: another process holds it, or take a smaller layout"
            )
    kinds = {one.device for one in everyone}
    if len(kinds) > 1:
        found.append(f"the ranks have different devices: {', '.join(sorted(kinds))}: the slowest would set the pace")
    if free_gb < needed_gb:
        found.append(
            f"{folder}: {free_gb:.1f} GB are free, the checkpoints need {needed_gb:.1f} GB: make room, keep fewer "
            "(checkpoint.keep_last), or choose another runs_dir"
        )
    return found


def missing(settings: dict[str, Any]) -> list[str]:
    """A line for every file or folder that a flat configuration names and that is not here, and for no tokenizer at all."""
    found = [
        f"{key}={value}{NO_FILE}"
        for key, value in settings.items()
        if isinstance(value, str) and value and _names_a_file(key) and not glob.glob(str(Path(value).expanduser()))
    ]
    tokenizers = [key for key in settings if key in ("data.tokenizer", "prompts.tokenizer")]
    if tokenizers and not settings.get("init_from") and not any(settings[key] for key in tokenizers):
        found.append(f"init_from and {tokenizers[0]} are null: rows are turned into tokens by a tokenizer, name one of the two")
    return found


def _names_a_file(key: str) -> bool:
    section, _, last = key.rpartition(".")
    if last == "path":
        return section.split(".")[0] in ("data", "prompts")
    return key == "init_from" or last in ("tokenizer", "checkpoint")


def agree(**facts: str) -> None:
    """Collective. ValueError, on every rank alike, when a fact (tokenizer, data) is another one on some rank."""
    everyone = everywhere((socket.gethostname(), facts))
    host, first = everyone[0]
    for name in facts:
        others = [f"rank {rank} on {there}" for rank, (there, found) in enumerate(everyone) if found[name] != first[name]]
        if others:
            raise ValueError(
                f"the {name} of {_some(others)} is another than that of rank 0 on {host}: every rank must read the same files, "
                "on a file system that all nodes share or from equal copies"
            )


def page(everyone: list[Facts], free_gb: float, needed_gb: float, rate: float) -> str:
    """What a run's log says of its machine."""
    hosts = list(dict.fromkeys(one.host for one in everyone))
    versions = "  ".join(f"{name} {version}" for name, version in everyone[0].versions.items())
    shown = _some(hosts)
    return (
        f"machine      {len(everyone)} ranks on {len(hosts)} nodes ({shown}), {everyone[0].device}\n"
        f"versions     {versions}\n"
        f"disk         {free_gb:.1f} GB free, checkpoints need {needed_gb:.1f} GB\n"
        f"all-reduce   {rate:.2f} GB/s over all ranks"
    )


def _facts(place: Topology, sees_folder: bool) -> Facts:
    gpus = 0 if ON_CPU else torch.cuda.device_count()
    free = None if ON_CPU else torch.cuda.mem_get_info(place.device)[0] / 1e9
    name = platform.machine() + " CPU" if ON_CPU else torch.cuda.get_device_name(place.device)
    dist.barrier()
    now = time.time()
    versions = {package: _version(package) for package in PACKAGES} | {"python": platform.python_version()}
    return Facts(place.rank, socket.gethostname(), versions, now, sees_folder, name, local_rank(), gpus, free)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _appears(sign: Path, token: str) -> bool:
    """Whether this rank comes to see what rank 0 wrote."""
    end = time.monotonic() + SHARED_S
    while True:
        try:
            if sign.read_text() == token:
                return True
        except OSError:
            pass
        if time.monotonic() > end:
            return False
        time.sleep(0.1)


def _all_reduce(device: torch.device) -> float:
    """GB/s that a rank sends and receives in an all-reduce: 2 (n - 1) / n bytes for each byte of the message."""
    world = dist.get_world_size()
    message = torch.ones(MESSAGE[ON_CPU], device=device)
    times = []
    for _ in range(ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(message)
        float(message[0])  # waits for the device
        times.append(time.perf_counter() - began)
        message.fill_(1.0)
    return 2 * (world - 1) / world * message.numel() * 4 / min(times) / 1e9


def _some(names: list[str], shown: int = 4) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
