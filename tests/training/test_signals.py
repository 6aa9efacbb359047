"""One rank is told to stop; all ranks stop at the same step."""
import os
import signal

import pytest


def _steps_until_stop(number: int, stopped_rank: int):
    import torch.distributed as dist

    from megatron_nb.training.signals import StopSignal

    before = signal.getsignal(number)
    with StopSignal() as stop:
        for step in range(6):
            if step == 3 and dist.get_rank() == stopped_rank:
                os.kill(os.getpid(), number)
            if stop.agreed():
                break
    return step, stop.received, signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(ranks, number):
    assert ranks.run(2, _steps_until_stop, number, 1) == [(3, None, True), (3, number.name, True)]


def test_without_a_signal_nobody_stops(ranks):
    assert ranks.run(2, _steps_until_stop, signal.SIGTERM, -1) == [(5, None, True)] * 2
