"""Every attack ends with the right status, reaches nothing, and leaves the worker, the machine and the next run clean."""

from __future__ import annotations

import os
import platform
import tempfile
import threading
import time
from pathlib import Path

import pytest

from megatron_nb.sandbox import processes
from megatron_nb.sandbox.execution import Job, Limits
from megatron_nb.sandbox.pool import IsolationMissing, Pool
from tests.sandbox.attack_programs import PRELUDE, attacks

SECRET = "hidden-of-the-judge"
CANARY = Job("print(sum(map(int, input().split())), len(__import__('os').listdir('/tmp')))", stdin=b"20 22\n")
IDLE = 4  # bubblewrap, the server, and the next run's two processes


@pytest.fixture(scope="module")
def pool():
    try:
        pool = Pool(1)
    except IsolationMissing as error:
        pytest.skip(str(error))
    with pool:
        yield pool


@pytest.fixture(scope="module")
def open_pool():
    with Pool(1, isolation="none") as pool:
        yield pool


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("judge") / "expected.txt"
    path.write_text(SECRET)
    return path


def job_of(attack, secret_file: Path) -> Job:
    bounds = {"time_s": 0.25, "memory_mb": 256, "processes": 16} | dict(attack.limits)
    limits = Limits(**{name: value if name == "time_s" else int(value) for name, value in bounds.items()})
    return Job(PRELUDE + attack.source, stdin=f"{secret_file}\n".encode(), limits=limits)


@pytest.mark.parametrize("attack", attacks(), ids=lambda attack: attack.name.replace(" ", "-"))
def test_an_attack_is_contained_judged_rightly_and_leaves_nothing(pool, secret_file, attack):
    if attack.name.startswith("call ") and platform.machine() != "x86_64":
        pytest.skip("the numbers of the calls are those of x86_64")
    job = job_of(attack, secret_file)
    begun = time.monotonic()
    execution = pool.submit(job).result(timeout=60)
    assert execution.status in attack.statuses, execution
    assert b"BREACH" not in execution.stdout, execution.stdout[:500]
    assert time.monotonic() - begun < job.limits.deadline_s + 1 + 1  # one more second for a worker that is busy elsewhere
    assert len(execution.stdout) <= job.limits.output_bytes
    assert len(execution.stderr) <= 8192
    worker = pool._workers[0]
    assert len(processes.descendants(worker.server.process.pid)) <= IDLE
    canary = pool.submit(CANARY).result(timeout=60)
    assert (canary.status, canary.stdout) == ("ok", b"42 1\n"), canary  # the one file is its own source
    for place in (tempfile.gettempdir(), "/tmp", "/", "/dev/shm", "/usr", "/etc"):
        assert not os.path.exists(os.path.join(place, "pwned-by-test"))


@pytest.mark.parametrize("attack", [attack for attack in attacks() if attack.harmless], ids=lambda attack: attack.name)
def test_without_isolation_the_same_attack_succeeds(open_pool, secret_file, attack):
    """The containment asserted above is the isolation's doing; only attacks that do no harm are tried."""
    execution = open_pool.submit(job_of(attack, secret_file)).result(timeout=60)
    assert execution.isolation == "none"
    assert b"BREACH" in execution.stdout, execution


def test_a_run_finds_nothing_of_the_run_before_in_its_memory(pool, secret_file):
    attack = next(attack for attack in attacks() if attack.name == "memory of the run before")
    for _ in range(3):
        first = Job("s = input(); t = s * 100; print(len(t))", stdin=b"hidden-of-the-run-" + b"before\n")
        assert pool.submit(first).result().status == "ok"
    assert b"BREACH" not in pool.submit(job_of(attack, secret_file)).result().stdout
    own = Job(PRELUDE + "kept = input()\n" + attack.source, stdin=b"hidden-of-the-run-before\n", limits=Limits(time_s=5))
    assert b"BREACH" in pool.submit(own).result().stdout  # the search itself works


def test_hostile_runs_do_not_disturb_a_neighbour():
    try:
        pool = Pool(2)
    except IsolationMissing as error:
        pytest.skip(str(error))
    hostile = [attack for attack in attacks() if attack.name in ("fork bomb", "kill everything", "stderr flood", "disk")]
    with pool:
        results = []

        def neighbour():
            for number in range(30):
                results.append(pool.submit(Job(f"print({number} * 2)")).result(timeout=60))

        thread = threading.Thread(target=neighbour)
        thread.start()
        for attack in hostile:
            assert pool.submit(job_of(attack, Path("/none"))).result(timeout=60).status in attack.statuses
        thread.join()
    assert [(result.status, result.stdout) for result in results] == [("ok", b"%d\n" % (2 * i)) for i in range(30)]
