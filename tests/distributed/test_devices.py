"""Which device a rank takes, before the groups are up."""

import pytest
import torch

from megatron_nb.parallel import topology
from megatron_nb.parallel.topology import ParallelConfig, join_world


@pytest.mark.parametrize("communication", ["nccl", "gloo"])
def test_every_rank_of_a_node_takes_a_device_of_its_own_over_any_back_end(monkeypatch, communication):
    taken = []
    monkeypatch.setattr(topology, "ON_CPU", False)
    monkeypatch.setattr(topology.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(topology.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("RANK", "11")
    monkeypatch.setenv("LOCAL_RANK", "3")
    join_world(ParallelConfig(communication=communication))
    assert taken == [3]
