"""The pool outlives what breaks, and what it started does not outlive it."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from megatron_nb.sandbox import cgroup, processes
from megatron_nb.sandbox.execution import Job, Limits
from megatron_nb.sandbox.pool import IsolationMissing, Pool

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("isolation", ["bubblewrap", "none"])
def test_a_killed_worker_is_replaced_and_its_run_repeated_once(isolation):
    try:
        pool = Pool(2, isolation=isolation)
    except IsolationMissing as error:
        pytest.skip(str(error))
    with pool:
        kill_workers_under_a_run(pool)


def kill_workers_under_a_run(pool):
    sleep = Job("import time; time.sleep(1.5); print('whole')", limits=Limits(time_s=10))

    def kill_one():
        busy = [worker for worker in pool._workers if worker.server]
        for worker in busy:
            worker.server.process.kill()

    future = pool.submit(sleep)
    time.sleep(0.4)
    kill_one()
    assert future.result(timeout=60).stdout == b"whole\n"
    future = pool.submit(sleep)
    for _ in range(2):
        time.sleep(0.6)
        kill_one()
    execution = future.result(timeout=60)
    assert execution.status in ("infrastructure", "ok")  # ok: the second blow fell before the second start
    if execution.status == "infrastructure":
        assert "; then " in execution.detail
    assert pool.submit(Job("print(1)")).result(timeout=60).stdout == b"1\n"


def test_a_host_killed_by_force_takes_its_workers_along_and_the_next_pool_sweeps(tmp_path):
    source = (
        "import sys, time; from megatron_nb.sandbox.pool import Pool; from megatron_nb.sandbox.execution import Job, Limits\n"
        "pool = Pool(2); job = Job('import time; time.sleep(50)', limits=Limits(time_s=60))\n"
        "[pool.submit(job) for _ in range(2)]\n"
        "print(*(w.server.process.pid for w in pool._workers), flush=True); time.sleep(60)"
    )
    host = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    workers = [int(pid) for pid in host.stdout.readline().split()]
    if not workers:
        pytest.skip("no isolation here")
    time.sleep(0.5)
    below = [pid for worker in workers for pid in processes.descendants(worker)]
    host.send_signal(signal.SIGKILL)
    host.wait()
    host.stdout.close()
    assert len(below) >= 8
    end = time.monotonic() + 20
    while any(alive(pid) for pid in below) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in below)
    cgroup.sweep()
    parents = cgroup.Version1.parents(cgroup.MOUNT) or cgroup.Version2.parents(cgroup.MOUNT) or []
    assert not [path for parent in parents for path in parent.glob(f"{cgroup.PREFIX}{host.pid}-*")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("way", ["close", "garbage", "interpreter exit"])
def test_a_closed_pool_leaves_no_process_and_answers_what_was_queued(way):
    if way == "interpreter exit":
        source = "from megatron_nb.sandbox.pool import Pool; p = Pool(1); print(p._workers[0].server.process.pid)"
        result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=ROOT, timeout=60)
        if "IsolationMissing" in result.stderr:
            pytest.skip("no isolation here")
        assert (result.returncode, result.stderr) == (0, "")
        assert not alive(int(result.stdout))
        return
    try:
        pool = Pool(1)
    except IsolationMissing as error:
        pytest.skip(str(error))
    below = processes.descendants(pool._workers[0].server.process.pid)
    if way == "garbage":
        assert pool.submit(Job("print(1)")).result().status == "ok"
        del pool
        gc.collect()
    else:
        long = [pool.submit(Job("import time; time.sleep(60)", limits=Limits(time_s=60))) for _ in range(3)]
        time.sleep(0.3)
        begun = time.monotonic()
        pool.close()
        pool.close()
        assert time.monotonic() - begun < 10
        assert long[0].result().status == "infrastructure"
        with pytest.raises(CancelledError):
            long[2].result()
        with pytest.raises(RuntimeError, match="closed"):
            pool.submit(Job(""))
    assert not any(alive(pid) for pid in below)


def test_a_hang_occupies_its_worker_for_little_more_than_its_limit():
    with Pool(2, isolation="none") as pool:
        begun = time.monotonic()
        futures = [pool.submit(Job("import time; time.sleep(30)", limits=Limits(time_s=0.2))) for _ in range(10)]
        assert {future.result().status for future in futures} == {"time limit"}
        assert time.monotonic() - begun < 5 * (0.2 + 0.5)
