"""Servers beside a job: engines, judges, search, teachers. Started, found, watched, started again, and ended with it.

Each server has a keeper (keeper.py), a process that starts it, starts it again when it ended or hangs, and writes where it is
into RUN/services/NAME-K.json; addresses.py reads that. On Slurm the job's script starts the keepers, one srun a service; for
launch=local the process that was called does, and runs the job as its child. Ranks wait until every server is up.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_nb.addresses import FOLDER, NAME, START, TOKEN, name_in, records
from megatron_nb.run import write_atomic
from megatron_nb.schema import ConfigError, flatten, plain

LOOK_S = 0.5  # between two looks at what the keepers wrote
TELL_S = 30.0  # between two lines of a job that waits
PLAN = "plan.json"
FILLED = ("host", "port", "run", "replica")
PLACE = re.compile(r"\{([a-z_]+)\}")
ADDRESSES = "NB_ADDRESSES"  # in a job of Slurm: NODE=ADDRESS of each node
PR_SET_PDEATHSIG = 1


@dataclass
class ServiceConfig:
    """One kind of server, and how many of it."""

    command: list[str] = field(default_factory=list)  # {host}, {port}, {run}, {replica} and the names of values are filled in
    values: dict[str, str | None] = field(default_factory=dict)  # null: not given yet, so that it is missed by name
    nodes: int = 0  # of its own, beside launch.slurm.nodes; 0: it shares the job's first node, without GPUs
    per_node: int = 1  # replicas of a node, which share its GPUs evenly
    health: str = "/health"  # answers with 200 when it can be used
    environment: dict[str, Any] = field(default_factory=dict)  # filled in too
    image: str | None = None  # a container of its own, by enroot/pyxis, with a Python >= 3.12 that has httpx
    start_s: float = 1800.0  # until it is healthy; then it is started anew
    hung_s: float = 300.0  # without an answer; then it is started anew
    restarts: int = 20  # in one start of the job; then the job fails

    def __post_init__(self):
        if not self.command:
            raise ValueError("command is empty: give the words that start the server, with {port} where the port belongs")
        words = [*self.command, *map(str, self.environment.values())]
        if not any("{port}" in word for word in words):
            raise ValueError(f"command={self.command} has no {{port}}: each server is told a free one")
        unknown = sorted({name for word in words for name in PLACE.findall(word)} - {*FILLED, *self.values})
        if unknown:
            raise ValueError(f"command={self.command}: nothing is known to fill in for {unknown}: name it in values")
        if unset := [name for name, value in self.values.items() if value is None]:
            raise ValueError(f"values.{unset[0]} is null: give it, or the key that it is taken from (with services=engine the "
                             "model is init_from: give init_from=FOLDER)")  # fmt: skip
        for name, least in (("nodes", 0), ("per_node", 1), ("restarts", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.start_s <= 0 or self.hung_s <= 0:
            raise ValueError(f"start_s={self.start_s} and hung_s={self.hung_s} must be above 0")

    @property
    def replicas(self) -> int:
        return max(self.nodes, 1) * self.per_node


Services = dict[str, ServiceConfig]


def check(services: Services, config: Any) -> None:
    """ConfigError for a name that cannot be one, and for a `service:NAME` in `config` that no service has."""
    for name in services:
        if not NAME.fullmatch(name):
            raise ConfigError(f"launch.services.{name}: a name is made of small letters, digits and _")
    only = getattr(config, "only", None)  # of an evaluation's tasks: the others ask nobody
    for key, value in flatten(config).items():
        if only and key.startswith("tasks.") and key.split(".")[1] not in only:
            continue
        for one in value if isinstance(value, list) else [value]:
            name = name_in(one) if isinstance(one, str) else None
            if name is not None and name not in services:
                known = f"there are {', '.join(services)}" if services else "there are none: services=engine, judge, search"
                raise ConfigError(f"{key}={one}: launch.services has no {name!r}; {known}")


def describe(services: Services) -> str:
    """A line for each, for a dry run."""
    lines = []
    for name, one in services.items():
        where = f"{one.nodes} nodes of its own" if one.nodes else "beside the ranks of the first node"
        lines.append(f"service      {name}: {one.replicas} of `{' '.join(one.command)}`, {where}")
    return "".join(f"\n{line}" for line in lines)


def write_plan(run: Path, services: dict[str, Any]) -> None:
    """For the keepers: what to start. services: by name, plain."""
    (run / "services").mkdir(parents=True, exist_ok=True)
    write_atomic(run / "services" / PLAN, json.dumps(services, indent=1))


# ---------------------------------------------------------------------- of the job
def started() -> bool:
    """Whether the services of this process's job have keepers already."""
    return FOLDER in os.environ


def wait(services: Services, loud: bool) -> None:
    """Until every server is up; loud: tell of a long wait. ConfigError when one was given up, or not even begun in its time."""
    folder, start = Path(os.environ[FOLDER]), os.environ[START]
    began = told = time.monotonic()
    while True:
        states = {(one["name"], one["replica"]): one for one in records(folder, start)}
        missing = []
        for name, one in services.items():
            for replica in range(one.replicas):
                record = states.get((name, replica), {"state": "not begun", "said": ""})
                log = log_of(folder.parent, name, replica)
                if record["state"] == "given up":
                    raise ConfigError(f"service {name}-{replica} was given up: {record['said']}: see {log}")
                if record["state"] == "not begun" and time.monotonic() - began > one.start_s:
                    raise ConfigError(f"service {name}-{replica} was not begun in start_s={one.start_s:g}: see the job's log")
                if record["state"] != "up":
                    missing.append(f"{name}-{replica} ({record['state']}{', ' * bool(record['said'])}{record['said']}), {log}")
        if not missing:
            return
        if loud and time.monotonic() - told > TELL_S:
            told = time.monotonic()
            print(f"waiting for {told - began:.0f} s: {'; '.join(missing)}", flush=True)
        time.sleep(LOOK_S)


def run_beside(run: Path, services: Services, command: list[str]) -> int:
    """Run a job on this machine with its services; the job's exit code. Signals go on to the job, the services end with it."""
    write_plan(run, plain(services))
    start = f"{socket.gethostname()}-{os.getpid()}-{int(time.time())}"
    os.environ.pop(ADDRESSES, None)
    os.environ |= {FOLDER: str(run / "services"), START: start, TOKEN: secrets.token_urlsafe(24)}
    keepers = [
        subprocess.Popen(
            [sys.executable, "-m", "megatron_nb.keeper", str(run), name], env={**os.environ, "SLURM_PROCID": str(replica)},
            start_new_session=True, preexec_fn=dies_with_parent(signal.SIGUSR2),
        )  # fmt: skip
        for name, one in services.items() for replica in range(one.replicas)
    ]  # fmt: skip
    try:
        job = subprocess.Popen(command, preexec_fn=dies_with_parent(signal.SIGTERM))
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _: job.send_signal(number))
        signal.signal(signal.SIGINT, lambda *_: None)  # the terminal has told the job too
        return job.wait()
    finally:
        for keeper in keepers:
            keeper.send_signal(signal.SIGUSR2)
        for keeper in keepers:
            keeper.wait()


def log_of(run: Path, name: str, replica: int) -> Path:
    return run / "logs" / "services" / f"{name}-{replica}.log"


def dies_with_parent(number: int) -> Callable[[], None]:
    """What a child does first, so that it gets this signal when its parent goes, however that ends."""
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(PR_SET_PDEATHSIG, number)
