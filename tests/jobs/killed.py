"""A job on ranks of the pool, counted in what it does, and killed at the n-th time: every kind of job is killed like that."""

import importlib
import os
import signal
import sys

import pytest

from tools.rank_pool import RankPool

ROWS = "asking.ledger.Ledger.__setitem__"  # what a job has finished, on disk
STEP = "training.trainer.Trainer.step"


def run_job(module: str, words: list[str], counted: str = ROWS, die_at: int | None = None) -> int:
    """What `torchrun -m megatron_nb.MODULE WORDS` runs on this rank; SIGKILL in place of the `die_at`th call of `counted`.

    How many calls there were.
    """
    import torch.distributed as dist

    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": str(dist.get_rank())}
    sys.argv = [module, *words]
    place, owner, method = counted.rsplit(".", 2)
    owner = getattr(importlib.import_module(f"megatron_nb.{place}"), owner)
    own, calls = getattr(owner, method), 0

    def call_or_die(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*args, **kwargs)

    setattr(owner, method, call_or_die)
    try:
        importlib.import_module(f"megatron_nb.{module}").main()
    finally:
        setattr(owner, method, own)
    return calls


def run_killed(world: int, module: str, words: list[str], die_at: int, counted: str = ROWS) -> None:
    """The same on `world` ranks of a pool of their own, one of which dies."""
    victims = RankPool(world)
    try:
        with pytest.raises(AssertionError, match="died"):
            victims.run(world, run_job, module, words, counted, die_at)
    finally:
        victims.close()
