"""A rank that hangs ends itself and says where; one that works does not."""

import subprocess
import sys
import time

import pytest

from megatron_nb.training.watchdog import HANG_EXIT, Watchdog

PROGRAM = """
import sys, time
from pathlib import Path
from megatron_nb.training.watchdog import Watchdog
dog = Watchdog(Path(sys.argv[1]), factor=3, least_s=0.3)
def where_it_hangs():
    time.sleep(60)
for _ in range(5):
    dog.beat()
    time.sleep(0.05)
where_it_hangs()
"""


def test_a_rank_without_steps_writes_its_stacks_and_leaves(tmp_path):
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "stacks")], timeout=50, capture_output=True, text=True)
    assert done.returncode == HANG_EXIT and time.monotonic() - began < 40
    assert "where_it_hangs" in (tmp_path / "stacks").read_text()


def test_the_limit_grows_with_the_steps_and_never_falls_below_the_least(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    dog = Watchdog(tmp_path / "stacks", factor=10, least_s=5)
    dog._watch = lambda: None
    for _ in range(4):
        dog.beat()
        clock[0] += 2
    assert dog.limit_s == 20  # ten times the median of 2 s
    dog.least_s = 50
    assert dog.limit_s == 50


def test_a_part_of_a_step_that_is_done_is_a_sign_of_life_and_no_step(tmp_path, monkeypatch):
    clock, left = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    dog = Watchdog(tmp_path / "stacks", factor=10, least_s=5)
    dog._leave = left.append
    looks = iter([False, True])
    dog._over.wait = lambda seconds: next(looks)
    watch, dog._watch = dog._watch, lambda: None
    dog.alive()  # before the first step: nothing is watched yet
    dog.beat()
    clock[0] = 4
    dog.alive()
    clock[0] = 8
    watch()
    assert left == [] and dog._steps == []
    looks = iter([False, True])
    clock[0] = 9.5
    watch()
    assert left == [5.5]


@pytest.mark.parametrize("factor", [0, 5])
def test_a_rank_that_works_or_is_not_watched_goes_on(tmp_path, factor):
    with Watchdog(tmp_path / "stacks", factor=factor, least_s=2) as dog:
        for _ in range(4):
            dog.beat()
            time.sleep(0.02)
    assert not (tmp_path / "stacks").exists()
