"""Stopping on request: a scheduler's signal to one rank makes all ranks save at the same step and leave for requeue."""
from __future__ import annotations

import logging
import signal

import torch
import torch.distributed as dist

from megatron_nb.training.watchdog import Watchdog

log = logging.getLogger(__name__)

REQUEUE_EXIT = 85  # exit code that asks the scheduler to start the same command again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignal:
    """Notes SIGTERM and SIGUSR1; `agreed` tells all ranks alike. Use as a context in the main thread.

        with StopSignal(device) as stop:
            for step in ...:
                ...
                if stop.agreed():
                    save, wait, sys.exit(REQUEUE_EXIT)
    """

    def __init__(self, device: torch.device | str = "cpu", watchdog: Watchdog | None = None):
        """watchdog: told of every step, as `agreed` is called once in each."""
        self.watchdog = watchdog
        self.received: str | None = None  # of this rank
        self._device, self._before = device, {}

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.watchdog is not None:
            self.watchdog.__exit__()

    def alive(self) -> None:
        """A part of a step is done, on every rank alike: the watchdog counts from here."""
        if self.watchdog is not None:
            self.watchdog.alive()

    def _note(self, number: int, frame) -> None:
        self.received = signal.Signals(number).name  # nothing else is safe inside a handler

    def agreed(self) -> bool:
        """Whether any rank received a signal; one small all-reduce, called by every rank once per step."""
        flag = torch.tensor([self.received is not None], dtype=torch.int, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if self.watchdog is not None:
            self.watchdog.beat()
        if self.received:
            log.warning("rank %d received %s: all ranks save and leave for requeue", dist.get_rank(), self.received)
        return bool(flag.item())
