"""A stage in processes of this machine, begun as copies of the one that has loaded everything already.

On a machine without devices a stage is forked: torch and all jobs are imported, so it starts in no time, and its ranks need no
torchrun. With devices a copy would inherit a driver that cannot be used after a fork, so there the stage is a fresh Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait

import psutil
import torch

from megatron_nb.parallel.topology import ON_CPU
from megatron_nb.training.signals import REQUEUE_EXIT

log = logging.getLogger(__name__)
ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
GRACE_S = 10.0  # for the other ranks to see by themselves that one has died
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run(module: str, words: list[str], ranks: int = 1) -> int:
    """The exit code of `torchrun --nproc-per-node RANKS -m module words`; of the first rank that failed.

    A signal that asks this process to stop asks the stage to save and leave; a second one kills it with all that it began.
    REQUEUE_EXIT when the stage ended well all the same: whoever asked wants no next one. It ends with this process.
    """
    fork = multiprocessing.get_context("fork")
    worlds = _worlds(ranks) if ON_CPU else [{}]  # a fresh Python calls torchrun itself
    stage = [fork.Process(target=_stage, args=(module, words, world, os.getpid()), name=module) for world in worlds]
    with _handing_on(stage) as asked:
        _start(stage)
        code, since = 0, None
        while alive := [process for process in stage if process.exitcode is None]:
            wait([process.sentinel for process in alive], timeout=None if since is None else GRACE_S)
            code = code or _failed(stage)
            if code not in (0, REQUEUE_EXIT):
                since = since or time.monotonic()
                if time.monotonic() - since >= GRACE_S:
                    for process in alive:
                        process.kill()
    return code or _failed(stage) or (REQUEUE_EXIT if asked else 0)  # a sentinel speaks before there is an exit code


def _start(stage: list[multiprocessing.Process]) -> None:
    """Signals wait meanwhile, here and in the copies: until its own answers are set, a copy would take one for this process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKED)
    try:
        for process in stage:
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _failed(stage: list[multiprocessing.Process]) -> int:
    """The exit code of a rank that has failed; 0 when none has."""
    return next((process.exitcode for process in stage if process.exitcode), 0)


@contextlib.contextmanager
def _handing_on(stage: list[multiprocessing.Process]) -> Iterator[list[int]]:
    """Signals to this process go to the stage; gives those that came."""
    asked: list[int] = []

    def hand_on(number: int, frame) -> None:
        asked.append(number)
        for process in stage:
            if process.pid is None or process.exitcode is not None:
                continue
            if len(asked) == 1:
                os.kill(process.pid, signal.SIGTERM)
            else:
                kill_tree(process.pid)

    ignored = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else []  # nohup
    before = {number: signal.signal(number, hand_on) for number in ASKED if number not in ignored}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _worlds(ranks: int) -> list[dict[str, str]]:
    """The environment of every rank, as torchrun would set it."""
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _stage(module: str, words: list[str], world: dict[str, str], parent: int) -> None:
    """In the copy: be `python -m module words`."""
    os.setpgid(0, 0)  # a terminal tells a whole group of Ctrl-C and of its own end: that is for the parent, who hands it on
    for number in ASKED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED)
    die_with(parent)
    for handler in list(logging.getLogger().handlers):
        logging.getLogger().removeHandler(handler)
    sys.argv = [module, *words]
    if not ON_CPU:
        os.execv(sys.executable, [sys.executable, "-m", module, *words])
    os.environ.update(world)
    if world and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as torchrun has it
    importlib.import_module(module).main()


def die_with(parent: int) -> None:
    """Be asked to leave when the parent is gone, however it went; Linux only."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != parent:
        sys.exit(REQUEUE_EXIT)


def kill_tree(pid: int) -> None:
    """SIGKILL for a process and all below it: ranks of torchrun have sessions of their own, and do not end with it."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    os.kill(pid, signal.SIGKILL)  # first, or it would begin anew what ends below it
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
