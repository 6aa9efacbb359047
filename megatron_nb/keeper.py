"""Keeps one server beside a job alive; services.py says what that is for.

    python -m megatron_nb.keeper RUN NAME        replica $SLURM_PROCID of what RUN/services/plan.json calls NAME

A keeper stops its server at SIGUSR2, which its parent sends, and the kernel when that has gone. SIGTERM means that the job
was told to stop: its ranks may still sample for a step to save, so the server stays until SIGUSR2, or until Slurm kills all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_nb.addresses import START
from megatron_nb.client import Client, ClientConfig, RequestFailed
from megatron_nb.run import write_atomic
from megatron_nb.schema import build
from megatron_nb.services import ADDRESSES, FILLED, PLACE, PLAN, ServiceConfig, dies_with_parent, log_of

LOOK_S = 0.5  # between two looks whether a server lives
HEALTH_S = 5.0  # between two questions for its health, once it is up
ANSWER_S = 10.0  # for an answer to that
END_S = 10.0  # from SIGTERM to SIGKILL
PROJECT, DEVICES = Path(__file__).parents[1], Path("/dev")
REST_S, MAX_REST_S = 1.0, 60.0  # before the first start again, and at most


class Keeper:
    """Keeps one server alive; see the head of the file."""

    def __init__(self, run: Path, name: str, replica: int, config: ServiceConfig):
        self.run, self.name, self.replica, self.config = run, name, replica, config
        self.path = run / "services" / f"{name}-{replica}.json"
        self.log = log_of(run, name, replica)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.stopping = self.been_up = False
        self.starts, self.port = 0, 0
        self.server: subprocess.Popen | None = None
        signal.signal(signal.SIGUSR2, self._stop)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def keep(self) -> int:
        """Until told to stop: 0. 1 when the server was given up."""
        rest = REST_S
        while not self.stopping:
            self.starts += 1
            self._begin()
            why = self._watch()
            self._end()
            if self.stopping:
                break
            if self.starts > self.config.restarts:
                self._write("given up", f"{why}, after restarts={self.config.restarts}")
                return 1
            self._write("down", f"{why}; it starts again in {rest:g} s")
            self._sleep(rest)
            rest = min(2 * rest, MAX_REST_S)
        self._write("stopped", "")
        return 0

    def _begin(self) -> None:
        if not self.been_up:  # later the address stands: the ranks know it
            self.port = _free_port()
        address = _address()
        host = "127.0.0.1" if address == "127.0.0.1" else "0.0.0.0"
        own = dict(zip(FILLED, map(str, (host, self.port, self.run, self.replica)), strict=True))
        self.url = f"http://{address}:{self.port}"
        filled = self.config.values | own
        words = [_filled(word, filled) for word in self.config.command]
        words[0] = sys.executable if words[0] == "python" else _program(words[0])
        environment = {name: _filled(str(value), filled) for name, value in self.config.environment.items()}
        with self.log.open("a") as log:
            log.write(f"---- {datetime.now():%F %T} start {self.starts} on {socket.gethostname()}: {' '.join(words)}\n")
            log.flush()
            try:
                self.server = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                    env={**os.environ, **_devices(self.config), **environment}, preexec_fn=dies_with_parent(signal.SIGKILL),
                )  # fmt: skip
            except OSError as error:
                self.server = None
                log.write(f"{error}\n")
        self._write("starting", "")

    def _watch(self) -> str:
        """Returns when the server has ended, hangs, or is to stop; why."""
        if self.server is None:
            return f"{self.config.command[0]} cannot be started"
        began = heard = asked = time.monotonic()
        up, said = False, ""
        while not self.stopping:
            if (code := self.server.poll()) is not None:
                return f"it ended with {code}"
            now = time.monotonic()
            if not up or now - asked > HEALTH_S:
                asked = now
                healthy, said = _health(self.url, self.config.health)
                if healthy:
                    heard = time.monotonic()
                    if not up:
                        up = self.been_up = True
                        self._write("up", "")
            if not up and now - began > self.config.start_s:
                return f"it was not healthy within start_s={self.config.start_s:g} ({said})"
            if up and now - heard > self.config.hung_s:
                return f"it has not been healthy for hung_s={self.config.hung_s:g} ({said})"
            self._sleep(LOOK_S)
        return "the job ends"

    def _end(self) -> None:
        """The server and all that it started."""
        if self.server is None:
            return
        _kill(self.server.pid, signal.SIGTERM)
        end = time.monotonic() + END_S
        while self.server.poll() is None and time.monotonic() < end:
            time.sleep(LOOK_S / 10)
        _kill(self.server.pid, signal.SIGKILL)
        self.server.wait()

    def _stop(self, *_: Any) -> None:
        self.stopping = True

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.stopping and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_S / 5))

    def _write(self, state: str, said: str) -> None:
        """state: starting | up | down | given up | stopped"""
        record = {
            "name": self.name, "replica": self.replica, "url": self.url, "state": state, "said": said,
            "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()), "pid": self.server.pid if self.server else None,
            "restarts": self.starts - 1, "start": os.environ[START], "since": datetime.now().isoformat(timespec="seconds"),
        }  # fmt: skip
        write_atomic(self.path, json.dumps(record, indent=1))
        print(f"service {self.name}-{self.replica} is {state}: {said or self.url}", file=sys.stderr, flush=True)


def _health(url: str, path: str) -> tuple[bool, str]:
    """Whether a server answers with success, and what it said if not."""

    async def ask() -> None:
        client = Client(ClientConfig(url, timeout_s=ANSWER_S, retries=0))
        try:
            await client.get(path)
        finally:
            await client.close()

    try:
        asyncio.run(ask())
    except RequestFailed as error:
        return error.status == 200, str(error)  # success is enough: what it says need not be JSON
    return True, ""


def _filled(word: str, values: dict[str, str]) -> str:
    return PLACE.sub(lambda place: values[place[1]], word)


def _program(name: str) -> str:
    """A script of this project has its name from the project's folder, wherever the job starts; another one as it stands."""
    ours = PROJECT / name
    return str(ours) if "/" in name and not Path(name).is_file() and ours.is_file() else name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _address() -> str:
    """Where the ranks find this node: as the job's script says of all its nodes (NODE=ADDRESS ...); without one, here."""
    told = dict(pair.split("=") for pair in os.environ.get(ADDRESSES, "").split())
    return told[os.environ["SLURMD_NODENAME"]] if told else "127.0.0.1"


def _devices(config: ServiceConfig) -> dict[str, str]:
    """The share of this replica in the GPUs of its node."""
    if ADDRESSES not in os.environ:
        return {}
    if not config.nodes:
        return {"CUDA_VISIBLE_DEVICES": ""}
    if config.per_node == 1:
        return {}
    # a site that does not hand out GPUs by Slurm sets nothing: then all of the node's are there
    devices = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one] or _gpus()
    if not devices:
        return {}
    each, mine = len(devices) // config.per_node, int(os.environ["SLURM_LOCALID"])
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[mine * each : (mine + 1) * each])}


def _gpus() -> list[str]:
    """The numbers of this node's GPUs, by what the driver has put into /dev."""
    return [str(number) for number, _ in enumerate(DEVICES.glob("nvidia[0-9]*"))]


def _kill(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def main() -> int:
    """Command line of a keeper."""
    run, name = Path(sys.argv[1]), sys.argv[2]
    config = build(ServiceConfig, json.loads((run / "services" / PLAN).read_text())[name])
    return Keeper(run, name, int(os.environ.get("SLURM_PROCID", "0")), config).keep()


if __name__ == "__main__":
    sys.exit(main())
