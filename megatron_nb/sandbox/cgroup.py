"""A control group per worker: memory, CPU time and process count of everything in it, in version 1 or 2 of the kernel's.

Groups are children of the group this process is in, so that a limit on the process (Slurm's, a container's) holds for
the programs too. Without the right to make them `create` returns None and the pool watches processes one by one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megatron_nb.sandbox.processes import status

MOUNT = Path("/sys/fs/cgroup")
PREFIX = "megatron-sandbox-"
HOST = "megatron-host"  # version 2: the leaf this process moves to, since a group with processes cannot limit its children
CONTROLLERS = ("memory", "pids", "cpuacct")


def create(name: str, mount: Path = MOUNT) -> Version1 | Version2 | None:
    """A new group named PREFIX + this process + name; None when this machine does not let us."""
    name = f"{PREFIX}{os.getpid()}-{started(os.getpid())}-{name}"
    for version in (Version1, Version2):
        parents = version.parents(mount)
        if parents is None:
            continue
        with suppress(OSError):
            return version([parent / name for parent in parents])
    return None


def sweep(mount: Path = MOUNT) -> None:
    """Remove the empty groups that processes left which are no more, here and in the groups beside this process's."""
    for parent in {*(Version1.parents(mount) or []), *(Version2.parents(mount) or [])}:
        for folder in [*parent.glob(PREFIX + "*"), *(parent.parent.glob(f"*/{PREFIX}*") if parent.parent != mount else [])]:
            owner = re.match(r"(\d+)-(\d+)-", folder.name[len(PREFIX) :])
            if owner and started(int(owner[1])) != int(owner[2]):
                with suppress(OSError):
                    folder.rmdir()


def started(pid: int) -> int | None:
    """When a process started, in clock ticks after boot: tells it from a later one with its number."""
    with suppress(OSError):
        return int(status(pid)[19])
    return None


def own_groups() -> Iterator[tuple[str, str]]:
    """(controllers, path) of the groups this process is in."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            yield controllers, path.lstrip("/")


class Group:
    """Folders of one group; the versions differ in file names only."""

    def __init__(self, folders: list[Path]):
        self.folders = folders
        self.limits: tuple[int, int] | None = None
        self.joined = True
        self.files: dict[str, int] = {}
        made = []
        try:
            for folder in folders:
                folder.mkdir()
                made.append(folder)
        except OSError:
            for folder in made:
                folder.rmdir()
            raise

    def add(self, pid: int) -> None:
        """Move a process here; `joined` turns false when the kernel refuses, and the group must not be relied on."""
        for folder in self.folders:
            try:
                (folder / "cgroup.procs").write_text(str(pid))
            except OSError:
                self.joined = False

    def read(self, folder: Path, name: str) -> bytes:
        """A file of the group, kept open: it is read several times in every run."""
        if name not in self.files:
            self.files[name] = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self.files[name], 4096, 0)

    def close(self) -> bool:
        """Remove the group; False while a process lives in it."""
        while self.files:
            os.close(self.files.popitem()[1])
        for folder in self.folders:
            with suppress(OSError):
                folder.rmdir()
        return not any(folder.exists() for folder in self.folders)

    def limit(self, memory_bytes: int, processes: int) -> None:
        """Bound the group from now on."""
        if self.limits != (memory_bytes, processes):
            self._limit(memory_bytes, processes)
            self.limits = memory_bytes, processes


class Version1(Group):
    """One hierarchy per controller."""

    @staticmethod
    def parents(mount: Path) -> list[Path] | None:
        found = {name: (mount / name / path, mount / name) for names, path in own_groups() for name in names.split(",")}
        # a container sees its own group mounted at the top, under a path that only the host knows
        parents = [next((path for path in found.get(name, ()) if path.is_dir()), None) for name in CONTROLLERS]
        return None if None in parents else parents

    def __init__(self, folders: list[Path]):
        super().__init__(folders)
        self.memory, self.pids, self.cpu = folders

    def _limit(self, memory_bytes: int, processes: int) -> None:
        swap = self.memory / "memory.memsw.limit_in_bytes"  # must never be below the limit of memory alone
        order = [self.memory / "memory.limit_in_bytes", swap]
        for file in order if self.limits is None or memory_bytes < self.limits[0] else order[::-1]:
            with suppress(FileNotFoundError, PermissionError):
                file.write_text(str(memory_bytes))
        (self.pids / "pids.max").write_text(str(processes))

    def cpu_s(self) -> float:
        return int(self.read(self.cpu, "cpuacct.usage")) / 1e9

    def memory_bytes(self) -> int:
        return int(self.read(self.memory, "memory.usage_in_bytes"))

    def reset_peak(self) -> None:
        (self.memory / "memory.max_usage_in_bytes").write_text("0")

    def peak_bytes(self) -> int:
        return int(self.read(self.memory, "memory.max_usage_in_bytes"))

    def shared_bytes(self) -> int:
        """What lies in file systems in memory."""
        return _field(self.read(self.memory, "memory.stat"), b"shmem")

    def kills(self) -> int:
        """How many processes the kernel has ended for want of memory."""
        return _field(self.read(self.memory, "memory.oom_control"), b"oom_kill")


class Version2(Group):
    """The unified hierarchy, where a parent was delegated to us."""

    @staticmethod
    def parents(mount: Path) -> list[Path] | None:
        own = next((mount / path for names, path in own_groups() if not names), None)
        if own is None or not (own / "cgroup.controllers").is_file():
            return None
        if own.name == HOST:
            own = own.parent
        needed = {"memory", "pids"}
        if not needed <= set((own / "cgroup.controllers").read_text().split()):
            return None
        with suppress(OSError):
            control = own / "cgroup.subtree_control"
            if not needed <= set(control.read_text().split()):
                _leave(own)
                control.write_text("+memory +pids")
            return [own]
        return None

    def _limit(self, memory_bytes: int, processes: int) -> None:
        (self.folders[0] / "memory.max").write_text(str(memory_bytes))
        with suppress(OSError):
            (self.folders[0] / "memory.swap.max").write_text("0")
        (self.folders[0] / "pids.max").write_text(str(processes))

    def cpu_s(self) -> float:
        return _field(self.read(self.folders[0], "cpu.stat"), b"usage_usec") / 1e6

    def memory_bytes(self) -> int:
        return int(self.read(self.folders[0], "memory.current"))

    def reset_peak(self) -> None:
        """Before Linux 6.12 the peak cannot be reset: it is then the highest of the worker's runs so far."""
        with suppress(OSError):
            if "memory.peak" not in self.files:
                self.files["memory.peak"] = os.open(self.folders[0] / "memory.peak", os.O_RDWR | os.O_CLOEXEC)
            os.pwrite(self.files["memory.peak"], b"0", 0)  # resets what is read through this descriptor

    def peak_bytes(self) -> int:
        with suppress(OSError):
            return int(self.read(self.folders[0], "memory.peak"))
        return self.memory_bytes()

    def shared_bytes(self) -> int:
        return _field(self.read(self.folders[0], "memory.stat"), b"shmem")

    def kills(self) -> int:
        return _field(self.read(self.folders[0], "memory.events"), b"oom_kill")


def _leave(own: Path) -> None:
    """Move this process into a leaf, when nobody else is in its group."""
    if (own / "cgroup.procs").read_text().split() == [str(os.getpid())]:
        (own / HOST).mkdir(exist_ok=True)
        (own / HOST / "cgroup.procs").write_text(str(os.getpid()))


def _field(text: bytes, name: bytes) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(name + b" ")), 0)
