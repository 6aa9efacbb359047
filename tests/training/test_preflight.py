"""Before the first step: what is wrong with the machine is said once, on every rank alike, all of it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_nb.training.preflight import PACKAGES, Facts, agree, check, missing, page, problems

GOOD = [
    Facts(rank, f"n{rank // 2}", dict.fromkeys(PACKAGES, "1.0"), 1000.0, True, "H100", rank % 2, 2, 80.0) for rank in range(4)
]


def told(*everyone, free_gb=100.0, needed_gb=10.0, planned_gb=70.0):
    return problems(list(everyone), Path("/runs/a"), free_gb, needed_gb, planned_gb)


def test_a_sound_machine_has_no_problem():
    assert told(*GOOD) == []
    assert "4 ranks on 2 nodes (n0, n1), H100" in page(GOOD, 100, 10, 12.5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sees_folder": False}, "not seen by rank 3 on n1: runs_dir must be on a file system that all nodes share"),
        ({"versions": dict.fromkeys(PACKAGES, "1.0") | {"torch": "2.0"}}, "torch is 1.0 on n0, but 2.0 on n1"),
        ({"clock": 1060.0}, r"clocks differ from that of n0: n1 \+60 s"),
        ({"device_index": 2}, "rank 3 on n1 is the node's number 2 but sees 2 GPUs"),
        ({"device_memory_gb": 11.0}, "rank 3 on n1: 11.0 GB are free on its H100, 70.0 GB are planned"),
        ({"device": "A100"}, "different devices: A100, H100"),
    ],
)
def test_what_is_wrong_with_one_rank_is_named_with_rank_node_and_remedy(change, said):
    (line,) = told(*GOOD[:3], replace(GOOD[3], **change))
    assert re.search(said, line)


def test_everything_wrong_is_told_together():
    bad = replace(GOOD[3], sees_folder=False, clock=0.0)
    assert len(told(*GOOD[:3], bad, free_gb=1.0)) == 3


def _looks(folder: str, parameters: int) -> str:
    from megatron_nb.parallel import topology

    place = topology.initialize(topology.ParallelConfig(tensor=2), 1)
    try:
        check(Path(folder), place, parameters, 2, 0.1)
    except ValueError as error:
        return str(error)
    return ""


def test_a_full_disk_is_the_same_error_on_every_rank_and_room_is_none(ranks, tmp_path):
    assert ranks.run(2, _looks, str(tmp_path), 1000) == ["", ""]
    first, second = ranks.run(2, _looks, str(tmp_path), 10**15)
    assert first == second and "the checkpoints need" in first
    assert list(tmp_path.iterdir()) == []


def _agrees(digests: list[str]) -> str:
    from megatron_nb.parallel import topology

    place = topology.initialize(topology.ParallelConfig(tensor=2), 1)
    try:
        agree(tokenizer="a", data=digests[place.rank])
    except ValueError as error:
        return str(error)
    return ""


def test_a_rank_with_other_data_is_named_on_every_rank(ranks):
    assert ranks.run(2, _agrees, ["x", "x"]) == ["", ""]
    first, second = ranks.run(2, _agrees, ["x", "y"])
    assert first == second and re.search("the data of rank 1 on .* is another than that of rank 0", first)


def test_every_file_that_a_configuration_names_is_looked_for(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    here = {"data.sources.a.path": f"{tmp_path}/*.jsonl"}
    gone = {"data.sources.b.path": f"{tmp_path}/b", "init_from": "/no/run"}
    assert missing({"data.tokenizer": str(tmp_path), **here, "init_from": None, "name": "/no/path"}) == []
    lines = missing({"data.tokenizer": None, **here, **gone})
    assert [line.partition("=")[0] for line in lines] == list(gone)
    (line,) = missing({"data.tokenizer": None, **here, "init_from": None})
    assert "init_from and data.tokenizer are null" in line
