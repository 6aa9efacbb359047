"""The run folder: one job at a time writes it, a later attempt of the same job continues it, nothing in it is half written.

    runs/NAME/config.yaml                   the resolved configuration of the last attempt
              logs/attempt-K/rank-R.log     what every process said; config.yaml of that attempt beside it
              metrics.jsonl  plots/  checkpoints/step-N/{COMPLETE, ...}
              lock                          who writes now: host, process, Slurm job; its mtime is the sign of life
              summary.json                  flat, finite numbers; there only when the last attempt finished

The lock works across hosts on a shared file system: it is made by link(2), which is atomic on NFS too, and refreshed by a
thread. A holder on this machine is asked for by process id and start time, so a killed job leaves no wait behind; one
elsewhere counts as gone when the lock has not been refreshed for STALE_S by the file server's own clock.
"""
from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import numbers
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_nb.give_up import GivesUp, last_steps

BEAT_S, STALE_S = 5.0, 60.0
NAME = re.compile(r"[\w.+=-]+(/[\w.+=-]+)*")

log = logging.getLogger(__name__)


class RunFolderError(ValueError):
    """The run folder cannot be used by this job."""


def run_folder(runs_dir: str | Path, name: str) -> Path:
    """runs_dir/name; ValueError for a name that would leave runs_dir or that a shell would not like."""
    if not NAME.fullmatch(name) or ".." in name.split("/"):
        raise ValueError(f"name={name!r} must be made of letters, digits and . _ + = - (and / between a run and its stage)")
    return (Path(runs_dir) / name).absolute()


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace `path` in one step: a reader, a kill or a full disk sees the old content or the new, never a part.

    OSError (with the path) when it cannot be written; what was there stays.
    """
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(aside, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise OSError(error.errno, f"{path} was not written and is as before: {error.strerror}") from error
    sync(path.parent)  # the rename itself survives a power cut


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_summary(folder: Path, *, seed: int, wall_s: float, **metrics: float) -> None:
    """Write folder/summary.json atomically: flat, finite numbers. ValueError for anything else."""
    summary = {**metrics, "seed": seed, "wall_s": wall_s}
    for key, value in summary.items():
        value = value.item() if hasattr(value, "item") else value
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError(f"summary.json: {key}={value!r} must be a finite number")
        summary[key] = int(value) if isinstance(value, numbers.Integral) else float(value)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "summary.json", json.dumps(summary, indent=2) + "\n")


class Run:
    """An open run folder. A context manager: leaving it notes the error, if any, in the rank's log and frees the lock."""

    def __init__(self, folder: Path, rank: int, attempt: int, resumes: bool, lock: Lock | None):
        self.folder, self.rank, self.attempt, self.resumes, self._lock = folder, rank, attempt, resumes, lock
        self.metrics, self.plots, self.checkpoints = folder / "metrics.jsonl", folder / "plots", folder / "checkpoints"
        self.logs = folder / "logs" / f"attempt-{attempt}"
        self._started = time.monotonic()
        self._handlers = _log_to(self.logs / f"rank-{rank}.log", rank)

    @classmethod
    def open(
        cls,
        folder: Path,
        config_yaml: str,
        *,
        rank: int = 0,
        share: Callable[[Any], Any] = lambda value: value,
        refuse: Callable[[Path], None] = lambda saved: None,
    ) -> Run:
        """Open `folder` for this job on every rank, as a new attempt.

        share: broadcasts rank 0's value to all ranks. refuse(path of the saved config.yaml): raises when the checkpoints in the
        folder belong to another configuration. RunFolderError, on every rank, when rank 0 may not have the folder.
        """
        lock = answer = None
        if rank == 0:
            try:
                (folder / "logs").mkdir(parents=True, exist_ok=True)
                lock = Lock(folder / "lock")
                resumes = any(folder.glob("checkpoints/step-*/COMPLETE"))
                if resumes and (folder / "config.yaml").exists():
                    refuse(folder / "config.yaml")
                attempt = 1 + max((int(path.name.split("-")[1]) for path in folder.glob("logs/attempt-*")), default=0)
                (folder / "logs" / f"attempt-{attempt}").mkdir()
                (folder / "summary.json").unlink(missing_ok=True)
                write_atomic(folder / "logs" / f"attempt-{attempt}" / "config.yaml", config_yaml)
                write_atomic(folder / "config.yaml", config_yaml)
                answer = (attempt, resumes, None)
            except ValueError as error:
                answer = (0, False, str(error))
            except OSError as error:
                answer = (0, False, f"cannot write the run folder {folder}: {error}")
        attempt, resumes, problem = share(answer)
        if problem:
            if lock is not None:
                lock.release()
            raise RunFolderError(problem)
        for name in ("plots", "checkpoints", f"logs/attempt-{attempt}"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        return cls(folder, rank, attempt, resumes, lock)

    def write_summary(self, seed: int, **metrics: float) -> None:
        """Write summary.json, the last act of a job: `metrics` with seed, wall_s (of this attempt) and attempts.

        ValueError for anything but finite numbers.
        """
        if self.rank == 0:
            wall = round(time.monotonic() - self._started, 3)
            write_summary(self.folder, seed=seed, wall_s=wall, attempts=self.attempt, **metrics)

    def close(self) -> None:
        for handler in self._handlers:
            logging.getLogger().removeHandler(handler)
            with contextlib.suppress(OSError):  # a full disk: what ended the job must not be hidden by this
                handler.close()
        self._handlers = []
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            if isinstance(error, GivesUp):
                error.add_note(last_steps(self.metrics))
            log.debug("stopped by %s", kind.__name__, exc_info=error)  # DEBUG: the file only, the console has it already
        self.close()


class Lock:
    """The right to write a run folder, taken on creation; RunFolderError when another job has it."""

    def __init__(self, path: Path):
        self.path, self.token = path, uuid.uuid4().hex
        job = os.environ.get("SLURM_JOB_ID")
        me = json.dumps({**_process(os.getpid()), "host": socket.gethostname(), "job": job, "token": self.token})
        while not self._link(me):
            holder = self._holder()
            if holder and self._gone(holder) and self._take_over(holder, me):
                break
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._stop.set()
        self._thread.join()
        if (self._holder() or {}).get("token") == self.token:
            self.path.unlink(missing_ok=True)

    def _link(self, content: str) -> bool:
        """Create the lock with its content in one step; False when there is one."""
        aside = self.path.with_name(f".lock.{self.token}")
        aside.write_text(content)
        try:
            os.link(aside, self.path)
        except OSError:  # over NFS a link may succeed and still report an error: the count of names tells
            if aside.stat().st_nlink == 1 and not self.path.exists():
                raise
        linked = aside.stat().st_nlink == 2
        aside.unlink()
        return linked

    def _holder(self) -> dict[str, Any] | None:
        """Who holds the lock, with "beat", its last sign of life; None when nobody does."""
        try:
            return _read_lock(self.path)
        except FileNotFoundError:
            return None

    def _gone(self, holder: dict[str, Any]) -> bool:
        """Whether the holder is dead; RunFolderError when it lives. Waits up to STALE_S for a holder on another machine."""
        me = _process(os.getpid())
        if holder.get("machine") == me["machine"]:
            if _process(holder["pid"]) == {name: holder[name] for name in me}:
                raise self._refusal(holder, "it is running")
            return True
        while (age := self._server_time() - holder["beat"]) <= STALE_S:
            log.warning("%s: written by %s %.0f s ago; waiting to see whether it still lives", self.path, _who(holder), age)
            time.sleep(min(BEAT_S, max(STALE_S - age, 0.01)))
            now = self._holder()
            if now is None or now.get("token") != holder.get("token"):
                return False  # another job took it over meanwhile: ask again
            if now["beat"] != holder["beat"]:
                raise self._refusal(holder, "it gave a sign of life just now")
        return True

    def _refusal(self, holder: dict[str, Any], sign: str) -> RunFolderError:
        stop = f"scancel {holder['job']}" if holder.get("job") else f"kill {holder.get('pid')}"
        return RunFolderError(
            f"{self.path.parent} is being written by {_who(holder)} ({sign}): two jobs in one run folder would spoil each "
            f"other's checkpoints. Choose another name=, or stop that one first ({stop})"
        )

    def _take_over(self, holder: dict[str, Any], content: str) -> bool:
        """Put our lock in the place of a dead holder's, and of nobody else's; False when another job was faster.

        Contenders queue on the dead lock's own file, and the path never stands empty, so nobody can slip in between.
        """
        aside = self.path.with_name(f".lock.{self.token}")
        try:
            with open(self.path) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                dead = os.fstat(file.fileno()).st_ino == self.path.stat().st_ino and _read_lock(self.path)
                if not dead or dead.get("token") != holder.get("token"):
                    return False
                aside.write_text(content)
                os.replace(aside, self.path)
        except FileNotFoundError:
            return False
        log.warning("%s: TAKEN OVER from %s, which is gone", self.path, _who(holder))
        return True

    def _server_time(self) -> float:
        """The file server's clock: hosts may disagree by more than STALE_S."""
        probe = self.path.with_name(f".lock.{self.token}")
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            try:
                if (self._holder() or {}).get("token") != self.token:
                    print(f"{self.path}: another job has taken this run folder; this one stops at once", file=sys.stderr)
                    os._exit(1)  # not a signal: its handler would save a checkpoint into the other job's folder
                os.utime(self.path)
            except OSError as error:
                log.warning("%s: no sign of life could be written: %s", self.path, error)


def _read_lock(path: Path) -> dict[str, Any]:
    with open(path) as file:  # opening asks an NFS server for the time; stat may answer from a cache
        beat = os.fstat(file.fileno()).st_mtime
        try:
            return {**json.load(file), "beat": beat}
        except ValueError:
            return {"beat": beat}  # not written here: somebody edited it


def _process(pid: int) -> dict[str, Any]:
    """What identifies a process: machine (boot and process namespace), id, start time (None when there is no such process)."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        machine = socket.gethostname()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        started = None if fields[0] in "ZX" else fields[19]
    except OSError:
        started = None
        if not Path("/proc/self/stat").exists():  # not Linux: ask by a signal that does nothing
            try:
                os.kill(pid, 0)
                started = "?"
            except OSError:
                pass
    return {"machine": machine, "pid": pid, "started": started}


def _who(holder: dict[str, Any]) -> str:
    job = f", Slurm job {holder['job']}" if holder.get("job") else ""
    return f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}{job}"


def _log_to(path: Path, rank: int) -> list[logging.Handler]:
    """Warnings and all that this project logs go into the rank's file; the console shows rank 0's, and others' errors."""
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    console = logging.StreamHandler()
    console.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    console.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
    for handler in (file, console):
        logging.getLogger().addHandler(handler)
    for name in ("megatron_nb", "__main__"):  # others stay at the root's level, WARNING
        logging.getLogger(name).setLevel(logging.DEBUG)
    return [file, console]
