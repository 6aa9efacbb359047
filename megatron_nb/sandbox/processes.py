"""What /proc says about a run's processes from outside: all there is where no control group counts them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def waited_s(pid: int | str) -> float | None:
    """Seconds for which a process's first thread, or the thread "PID/task/TID", was ready to run and had no core.

    None while that cannot be told: it is ready now, and the kernel adds a wait at its end; or it is over.
    """
    with suppress(OSError, ValueError, IndexError):
        waited = int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[1]) / 1e9
        return None if status(pid)[0] in (b"R", b"Z", b"X") else waited
    return None


def waited_in_all_s(first: int) -> float | None:
    """The same, summed over all threads of the run whose first process is `first`: its first thread may wait for the others."""
    total = 0.0
    with suppress(OSError):
        for pid in descendants(int(status(first)[1]))[1:]:
            for thread in os.listdir(f"/proc/{pid}/task"):
                waited = waited_s(f"{pid}/task/{thread}")
                if waited is None and (pid == first or status(pid)[0] not in (b"Z", b"X")):
                    return None
                total += waited or 0.0
        return None if waited_s(first) is None else total  # looking takes time, in which the run may have ended
    return None


def descendants(root: int) -> list[int]:
    """`root` and every process below it, dead ones that nobody waited for included."""
    below: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                below.setdefault(int(status(int(entry.name))[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += below.get(pid, [])
    return found


def spent(first: int) -> tuple[float, int]:
    """(CPU seconds, bytes of memory) of the run whose first process is `first`.

    A run is everything below the server except the server: its orphans go to the process beside the first one.
    """
    seconds, memory, pids = 0.0, 0, []
    with suppress(OSError):
        pids = descendants(int(status(first)[1]))[1:]
    for pid in pids:
        with suppress(OSError):
            seconds += sum(map(int, status(pid)[11:15])) * TICK_S
            memory += int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * PAGE
    return seconds, memory


def shared_memory_counted_once(first: int) -> int:
    """Bytes of a run's memory, shared pages divided by their users: slow, and what counts."""
    total = 0
    with suppress(OSError):
        for pid in descendants(int(status(first)[1]))[1:]:
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    total += int(line.split()[1]) << 10 if line.startswith(("Pss:", "SwapPss:")) else 0
    return total


def status(pid: int | str) -> list[bytes]:
    """Fields of /proc/PID/stat from the state on: 1 is the parent, 11 to 14 the CPU times with those of reaped children,
    19 when it started, in clock ticks after boot.
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
