"""Many runs in a row leave no process, descriptor, file, control group or memory behind."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest

from megatron_nb.sandbox import cgroup, processes
from megatron_nb.sandbox.execution import Job, Limits
from megatron_nb.sandbox.pool import IsolationMissing, Pool

PROGRAMS = [
    (Job("print(sum(map(int, input().split())))", stdin=b"1 2"), "ok"),
    (Job("open('/tmp/x', 'wb').write(bytes(1 << 18))\nimport os\nif os.fork() == 0:\n os.setsid()\n while True: pass"), "ok"),
    (Job("1 / 0"), "runtime error"),
    (Job("print('x' * 5000)", limits=Limits(output_bytes=100)), "output limit"),
    (Job("x = bytearray(b'x') * (1 << 22)", files=(("data", bytes(1000)),)), "ok"),
    (Job("import os; os.kill(os.getpid(), 9)"), "runtime error"),
]
HANG = (Job("import time; time.sleep(60)", limits=Limits(time_s=0.05)), "time limit")


def state(pool: Pool) -> dict[str, int]:
    gc.collect()
    groups = cgroup.Version1.parents(cgroup.MOUNT) or cgroup.Version2.parents(cgroup.MOUNT) or []
    name = f"{cgroup.PREFIX}{os.getpid()}-*"
    inside = [pid for worker in pool._workers for pid in processes.descendants(worker.server.process.pid)]
    resident = lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * processes.PAGE >> 10  # noqa: E731
    servers = [pid for pid in inside if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "descriptors of the servers": max(len(os.listdir(f"/proc/{pid}/fd")) for pid in servers),
        "processes": len(inside),
        "groups": sum(len(list(parent.glob(name))) for parent in groups),
        "files": len([entry for entry in os.listdir(tempfile.gettempdir()) if entry.startswith(f"sandbox-{os.getpid()}-")]),
        "KiB here": resident(os.getpid()),
        "KiB of the servers": max(resident(pid) for pid in servers),
        "KiB in the groups": sum(worker.group.memory_bytes() >> 10 for worker in pool._workers if worker.group),
    }


@pytest.mark.parametrize(
    ("runs", "isolation"),
    [(300, "bubblewrap"), (100, "none"), pytest.param(10_000, "bubblewrap", marks=[pytest.mark.slow, pytest.mark.timeout(0)])],
)
def test_runs_in_a_row_leave_nothing(runs, isolation):
    others = state_outside()  # of pools that other tests share
    try:
        pool = Pool(2, isolation=isolation)
    except IsolationMissing as error:
        pytest.skip(str(error))
    with pool:
        for job, status in [*PROGRAMS, HANG] * 4:
            assert pool.submit(job).result().status == status, job
        before = state(pool)
        for start in range(0, runs, 50):
            batch = [*[PROGRAMS[number % len(PROGRAMS)] for number in range(start, start + 49)], HANG]
            futures = [pool.submit(job) for job, _ in batch]
            results = [future.result() for future in futures]
            assert [result.status for result in results] == [status for _, status in batch], results
            del futures, results
        after = state(pool)
    gone = state_outside()
    for name in ("descriptors", "descriptors of the servers", "processes", "groups", "files"):
        assert after[name] <= before[name] + (2 if name == "processes" else 0), (name, before, after)
    for name in ("KiB here", "KiB of the servers", "KiB in the groups"):
        assert after[name] < before[name] + 6_000, (name, before, after)
    assert gone == others


def state_outside() -> int:
    groups = cgroup.Version1.parents(cgroup.MOUNT) or cgroup.Version2.parents(cgroup.MOUNT) or []
    folders = [entry for entry in os.listdir(tempfile.gettempdir()) if entry.startswith(f"sandbox-{os.getpid()}-")]
    return sum(len(list(parent.glob(f"{cgroup.PREFIX}{os.getpid()}-*"))) for parent in groups) + len(folders)
