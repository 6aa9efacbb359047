"""Worker processes that start light and die with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import types
from collections.abc import Iterator


@contextlib.contextmanager
def light_start() -> Iterator[None]:
    """Processes spawned inside do not import the job's main module.

    A spawned process imports it anew otherwise: torch and megatron-core, seconds and most of a gigabyte for each worker,
    and a script without a `__main__` guard would start itself again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent is gone: spawned workers outlive a kill -9 otherwise."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
