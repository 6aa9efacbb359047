"""A real Slurm of several virtual nodes on one machine, to be thrown away: for tests, and to rehearse a launch on a laptop.

Needs root and Debian's packages slurmctld, slurmd, slurm-client, munge (RUNLEVEL=1 apt-get install keeps their services off).

python tools/local_slurm.py up [--nodes 4] [--gpus 8] [--folder DIR]     then: eval $(python tools/local_slurm.py env)
python tools/local_slurm.py kill-node n2 | start-node n2 | down
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import socket
import string
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

TEMPLATE = Path(__file__).parents[1] / "slurm" / "local.conf"
PROGRAMS = ("munged", "munge", "slurmctld", "slurmd", "sinfo", "scontrol", "scancel", "squeue")
PACKAGES = "slurmctld slurmd slurm-client munge"
ADDRESS = "127.0.0.1"
LOOK_S = 0.05


class LocalSlurm:
    """The cluster in `folder`. Node names n1..nN; partitions batch (preemptable) and urgent."""

    def __init__(self, folder: Path):
        self.folder, self.conf = folder, folder / "slurm.conf"
        self.env = {**os.environ, "SLURM_CONF": str(self.conf)}

    def up(self, nodes: int, gpus: int, cpus: int, memory_mb: int, grace_s: int, port: int) -> None:
        """Start it and wait until every node is idle. RuntimeError naming what is missing, or what did not come up."""
        check_host()
        if self.conf.exists():
            self.down()
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("state", "log", "dev", *(f"spool.n{i}" for i in range(1, nodes + 1))):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        self._configure(nodes, gpus, cpus, memory_mb, grace_s, port)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        paths = {"socket": "munge.sock", "pid-file": "munged.pid", "seed-file": "munge.seed", "log-file": "log/munged.log"}
        self._run("munged", "--force", f"--key-file={key}", *(f"--{name}={self.folder / path}" for name, path in paths.items()))
        self._wait("munged", 10, lambda: self._says("munge", "-S", str(self.folder / "munge.sock"), "-n") is not None)
        self.start_controller()
        for number in range(1, nodes + 1):
            self._run("slurmd", "-N", f"n{number}")
        self._wait("its nodes", 60, lambda: self.idle_nodes() == nodes)

    def start_controller(self) -> None:
        self._run("slurmctld")
        self._wait("slurmctld", 30, lambda: self._says("scontrol", "ping") is not None)

    def stop_controller(self) -> None:
        """The nodes and what runs on them stay."""
        running = _from_pid_file(self.folder / "slurmctld.pid")
        self._run("scontrol", "shutdown", "slurmctld")
        psutil.wait_procs(running, timeout=30)

    def idle_nodes(self) -> int:
        told = self._says("sinfo", "-h", "-N", "-p", "batch", "-t", "idle", "-o", "%N")
        return len((told or "").split())

    def start_node(self, name: str) -> None:
        self._pid_file(name).unlink(missing_ok=True)
        self._run("slurmd", "-N", name)

    def kill_node(self, name: str) -> None:
        """A power cut: its slurmd, their step daemons and every process of its jobs go at once."""
        victims = [*self._slurmd(name)]
        for process in self._members():
            with_name = _environ(process).get("SLURMD_NODENAME") == name
            if with_name:
                victims.append(process)
                victims += [parent for parent in _parents(process) if parent.name() == "slurmstepd"]
        for victim in {process.pid: process for process in victims}.values():
            _signal(victim, signal.SIGKILL)
        self._pid_file(name).unlink(missing_ok=True)

    def down(self) -> None:
        """Cancel its jobs, stop its daemons, leave no process behind. The folder with its logs stays."""
        if self._says("scontrol", "ping") is not None:
            self._says("scancel", "-f", "--user=root")
            self._wait("the end of its jobs", 10, lambda: not self._says("squeue", "-h", "-t", "R,CG,S"), strict=False)
        daemons = [process for path in self.folder.glob("*.pid") for process in _from_pid_file(path)]
        for process in daemons:
            _signal(process, signal.SIGTERM)
        _, alive = psutil.wait_procs(daemons, timeout=10)
        for process in [*alive, *self._members()]:
            _signal(process, signal.SIGKILL)
        for path in self.folder.glob("*.pid"):
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ how
    def _configure(self, nodes: int, gpus: int, cpus: int, memory_mb: int, grace_s: int, port: int) -> None:
        host = socket.gethostname().split(".")[0]
        lines = (f"NodeName=n{i} NodeHostname={host} NodeAddr={ADDRESS} Port={port + i}" for i in range(1, nodes + 1))
        self.conf.write_text(string.Template(TEMPLATE.read_text()).safe_substitute(
            HOST=host, ADDRESS=ADDRESS, PORT=port, FOLDER=self.folder, CPUS=cpus, MEMORY=memory_mb, GPUS=gpus, GRACE=grace_s,
            RANGE=f"n[1-{nodes}]", NODES="\n".join(lines), NAMES="NAMES",
        ))  # fmt: skip
        for number in range(gpus):  # Slurm wants a device of that name for each GPU: /dev/null by another name
            subprocess.run(["mknod", str(self.folder / "dev" / f"nvidia{number}"), "c", "1", "3"], check=True)
        devices = f"{self.folder}/dev/nvidia[0-{gpus - 1}]"
        (self.folder / "gres.conf").write_text(
            f"NodeName=n[1-{nodes}] Name=gpu Type=h100 Flags=nvidia_gpu_env File={devices}\n" if gpus else ""
        )

    def _run(self, *words: str) -> None:
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} failed with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")

    def _says(self, *words: str) -> str | None:
        """What a command prints; None when it fails."""
        try:
            done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=10)
        except subprocess.TimeoutExpired:
            return None
        return done.stdout if done.returncode == 0 else None

    def _wait(self, what: str, seconds: float, done: Callable[[], bool], strict: bool = True) -> None:
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                if strict:
                    logs = "".join(f"\n{path}:\n{path.read_text()[-800:]}" for path in sorted(self.folder.glob("log/*.log")))
                    raise RuntimeError(f"{what} did not come up within {seconds:g} s{logs}")
                return
            time.sleep(LOOK_S)

    def _pid_file(self, name: str) -> Path:
        return self.folder / f"slurmd.{name}.pid"

    def _slurmd(self, name: str) -> list[psutil.Process]:
        return _from_pid_file(self._pid_file(name))

    def _members(self) -> list[psutil.Process]:
        """Processes that belong to this cluster and no other, its client commands left out."""
        mine = []
        for process in psutil.process_iter():
            told = _environ(process)
            if told.get("SLURM_CONF") == str(self.conf) and ("SLURMD_NODENAME" in told or process.name() == "slurmstepd"):
                mine.append(process)
        return mine


def check_host() -> None:
    """RuntimeError naming what this machine lacks and the remedy."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        remedy = f"RUNLEVEL=1 apt-get install --no-install-recommends {PACKAGES}"
        raise RuntimeError(f"not installed: {', '.join(missing)}: {remedy}")
    if os.geteuid() != 0:
        raise RuntimeError("Slurm's daemons start jobs for other users and must run as root: use sudo, or a container as root")


def _from_pid_file(path: Path) -> list[psutil.Process]:
    try:
        return [psutil.Process(int(path.read_text()))]
    except (OSError, ValueError, psutil.Error):
        return []


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _parents(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.parents()
    except psutil.Error:
        return []


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error):  # gone already
        process.send_signal(number)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("up", "down", "kill-node", "start-node", "env"))
    parser.add_argument("node", nargs="?", help="of kill-node and start-node: n1, n2, ...")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/local-slurm"), help="where it lives (%(default)s)")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=8, help="pretend GPUs of a node (%(default)s)")
    parser.add_argument("--cpus", type=int, default=16, help="of a node, whatever the machine has (%(default)s)")
    parser.add_argument("--memory-mb", type=int, default=4000, help="of a node (%(default)s)")
    parser.add_argument("--grace-s", type=int, default=5, help="that a preempted job is given (%(default)s)")
    parser.add_argument("--port", type=int, default=17000, help="of the controller; the nodes take those above (%(default)s)")
    args = parser.parse_args()
    cluster = LocalSlurm(args.folder.absolute())
    if args.command in ("kill-node", "start-node") and not args.node:
        parser.error(f"{args.command} needs a node's name")
    try:
        if args.command == "up":
            cluster.up(args.nodes, args.gpus, args.cpus, args.memory_mb, args.grace_s, args.port)
            print(f"{args.nodes} nodes are up; in your shell: export SLURM_CONF={cluster.conf}", file=sys.stderr)
        elif args.command == "env":
            print(f"export SLURM_CONF={cluster.conf}")
        elif args.command == "down":
            cluster.down()
        elif args.command == "kill-node":
            cluster.kill_node(args.node)
        else:
            cluster.start_node(args.node)
    except RuntimeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
