"""The measuring driver: costs of one program at growing sizes. Runs inside the sandbox, sent there as source.

Input (stdin, JSON): {"source", "function", "generator", "seed", "budget_s", "memory_mb", "mode": "ladder"|"once", "n"?}.
Output (stdout): JSON lines, each written when it is known, so a driver that is killed leaves what it had:
    {"load": CPU s of importing the program, "load_units": its operations}
    {"count": n, "units": operations, "digits": word operations of long integers, "cpu": s}
    {"cpu": n, "s": CPU of the call, without import and input, "make": CPU s of the input}
    {"end": "count"|"cpu", "why": "cap"|"budget"|"generator"|"size"|"memory"|error, "n"}
Each figure comes from a fresh fork in which the program is imported and called once, so nothing is kept between calls; its
CPU time is what the kernel tells the parent, not what the program says. The input is made before the fork.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import random
import resource
import select
import signal
import sys
import time

from megatron_nb.sandbox.measure_costs import FILENAME, Counter
from megatron_nb.sandbox.measure_rewrite import rewrite

LARGEST = 1 << 40
COUNT_SHARE, CPU_SHARE = 0.45, 0.4  # of the budget; the rest is for the checks from outside
CAP_SHARE = 0.12  # of the budget, for one run
WALL = 12  # a run may take this many times its CPU cap by the clock: cores are shared
MAKE_CAP_S = 0.15  # CPU of making one input
SMALL_UNITS = 20_000  # counts below it are the mean of several inputs


def say(**line) -> None:
    os.write(1, (json.dumps(line) + "\n").encode())


def entry(space: dict, function: str):
    """The function to call: global, or a method of a class ("Solution.f", or f of class Solution)."""
    owner, _, name = function.rpartition(".")
    if not owner and function not in space and "Solution" in space:
        owner = "Solution"
    return getattr(space[owner](), name) if owner else space[name]


class Child:
    """The end of a fork: status "ok", "cap" (of CPU), "clock", "memory", "error: ..."; its CPU seconds; what it reported."""

    def __init__(self, work, cap_s: float, memory_mb: int):
        reader, writer = os.pipe()
        self.cpu, self.said = 0.0, b""
        pid = os.fork()
        if not pid:
            os.close(reader)
            _be_child(work, writer, cap_s, memory_mb)
        os.close(writer)
        deadline = time.monotonic() + WALL * cap_s + 1.0
        while (left := deadline - time.monotonic()) > 0 and select.select([reader], [], [], left)[0]:
            part = os.read(reader, 65536)
            if not part:
                break
            self.said = (self.said + part)[:65536]
        if left <= 0:
            os.kill(pid, signal.SIGKILL)
        os.close(reader)
        while True:  # the pipe may be closed early
            done, status, usage = os.wait4(pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.0005)
        self.cpu = usage.ru_utime + usage.ru_stime
        ended_by = os.waitstatus_to_exitcode(status)
        self.status = "ok" if ended_by == 0 else self.said.decode(errors="replace")[:200] or f"error: ended with {ended_by}"
        if left <= 0 or ended_by == -signal.SIGPROF:
            self.status = "cap" if self.cpu > 0.8 * cap_s else "clock"


def _be_child(work, writer: int, cap_s: float, memory_mb: int) -> None:
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        sys.setrecursionlimit(1_000_000)
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20,) * 2)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cap_s)
        said = work()
    except MemoryError:
        os.write(writer, b"memory")
        os._exit(1)
    except BaseException as error:  # SystemExit of a program that ends by exit() too
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            os.write(writer, f"error: {type(error).__name__}: {str(error)[:100]}".encode())
            os._exit(1)
        said = b"exit"
    os.write(writer, said or b"")
    os._exit(0)


class Driver:
    def __init__(self, payload: dict):
        self.function, self.seed, self.memory = payload["function"], payload["seed"], payload["memory_mb"] * 3 // 4
        self.budget = payload["budget_s"]
        self.cap = CAP_SHARE * self.budget
        self.prefix = f"_{random.Random(self.seed).getrandbits(40):x}_"
        self.plain = compile(payload["source"], FILENAME, "exec")
        self.counting = rewrite(payload["source"], self.prefix) if payload["mode"] == "ladder" else None
        self.generator = {"__name__": "generator"}
        exec(compile(payload["generator"], "<generator>", "exec"), self.generator)

    def make(self, n: int, repeat: int = 0):
        """The input of size n and the CPU seconds it took; TimeoutError or what the generator raises."""
        random.seed(f"{self.seed} {n} {repeat}")
        signal.signal(signal.SIGVTALRM, _too_slow)
        signal.setitimer(signal.ITIMER_VIRTUAL, 6 * MAKE_CAP_S)
        began = time.process_time()
        try:
            made = self.generator["make"](n)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return made, time.process_time() - began

    def load(self, code, operations: dict, made):
        """Import the program; what is called then. A program of stdin and stdout does all its work when it is called."""
        space = {"__name__": "candidate" if self.function else "__main__", **operations}
        if self.function:
            exec(code, space)
            return lambda: entry(space, self.function)(*made)
        aside = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
        os.write(aside, made.encode())
        os.lseek(aside, 0, os.SEEK_SET)
        os.dup2(aside, 0)
        sys.stdin = open(0)  # noqa: SIM115
        return lambda: exec(code, space)

    def count(self, n: int, made) -> Child:
        def work():
            counter = Counter()
            counter.foreign()
            named = {self.prefix + name: f for name, f in counter.operations().items()}
            call = self.load(self.counting, named, made)
            loaded, counter.units[0], counter.digits[0] = counter.units[0], 0, 0
            with contextlib.suppress(SystemExit):
                call()
            return json.dumps([counter.units[0], counter.digits[0], loaded]).encode()

        return Child(work, self.cap, self.memory)

    def time(self, made, run: bool = True) -> Child:
        def work():
            call = self.load(self.plain, {}, made)
            touch(made)
            if run:
                call()

        return Child(work, 2 * self.cap, self.memory)

    def ladder(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()
        base = min(self.time(self._smallest(), run=False).cpu for _ in range(3))
        say(load=base)
        points = self.counts(spent() + COUNT_SHARE * self.budget)
        if len(points) > 2:
            self.cpus(points, base, spent() + CPU_SHARE * self.budget)
        say(spent=spent())

    def _smallest(self):
        for n in (3, 4, 8, 16):
            try:
                return self.make(n)[0]
            except Exception:  # noqa: S112
                continue
        return [] if self.function else ""

    def counts(self, until: float) -> list[tuple[int, float, float]]:
        """(n, units, CPU s of the counting run) up the ladder of sizes."""
        points: list[tuple[int, float, float]] = []
        start = random.Random(self.seed).randrange(8, 16)
        n, fine = 3, False
        while True:
            try:
                made, make_s = self.make(n)
            except Exception as error:
                if n <= 8:
                    n += 1
                    continue
                return self._end("count", f"generator: {type(error).__name__}", n, points)
            child = self.count(n, made)
            if child.status == "cap" and points and not fine and n > points[-1][0] + 1 and not self._expected(points, n):
                fine, n = True, max(points[-1][0] + 1, round(points[-1][0] * 1.12))  # it grew faster than the steps
                continue
            if child.status != "ok":
                if n <= 6 and child.status.startswith("error"):
                    n += 1
                    continue
                return self._end("count", child.status, n, points)
            try:
                told = [[float(x) for x in json.loads(child.said)]]
            except (ValueError, TypeError):
                return self._end("count", "error: no count came back", n, points)
            wanted = 1 if told[0][0] > SMALL_UNITS or make_s > 0.02 else 6 if told[0][0] < 500 and n > 10 else 3
            while len(told) < wanted:
                more = self.count(n, self.make(n, len(told))[0])
                if more.status != "ok":
                    break
                told.append([float(x) for x in json.loads(more.said)])
            units, digits, loaded = (sum(column) / len(told) for column in zip(*told))
            say(count=n, units=units, digits=digits, load_units=loaded, cpu=child.cpu)
            points.append((n, units, child.cpu))
            step = _exponent(points)
            if n < 10:
                following = n + 1
            elif fine:
                following = max(n + 1, round(n * 1.12))
            elif step > 2.6:
                following = max(n + 1, round(n * 1.25))
            elif n < 2 * start:
                following = 2 * start if n < start * 2 else 2 * n
            else:
                following = n * (4 if n > 20_000 and step < 0.75 else 2)
            why = "cap" if child.cpu * (following / n) ** (step + 0.3) > 2 * self.cap else ""
            why = why or ("budget" if spent() > until else "generator" if make_s > MAKE_CAP_S else "")
            if why or following > LARGEST:
                return self._end("count", why or "size", following, points)
            n = following

    def _end(self, phase: str, why: str, n: int, points: list) -> list:
        say(end=phase, why=why, n=n, cap=self.cap)
        return points

    def _expected(self, points: list, n: int) -> bool:
        """Whether the growth so far explains that a run at n takes more than the cap."""
        last_n, _, cpu = points[-1]
        return cpu * (n / last_n) ** (_exponent(points) + 0.5) > 0.5 * self.cap

    def cpus(self, points: list, base: float, until: float) -> None:
        """CPU times, from sizes where they can be told from the start of a process, up to the cap."""
        ratio = min(16.0, 3.0 ** (1 / max(_exponent(points), 0.3)))  # each about three times the cost of the last
        n = next((n for n, _, _ in points if all(cpu > base + 0.003 for size, _, cpu in points if size >= n)), points[-3][0])
        while True:
            try:
                made, make_s = self.make(n)
            except Exception as error:
                self._end("cpu", f"generator: {type(error).__name__}", n, points)
                return
            if make_s > 2 * MAKE_CAP_S:
                self._end("cpu", "generator", n, points)
                return
            idle = min(self.time(made, run=False).cpu for _ in range(2))
            best, wanted = math.inf, 4
            while wanted > 0:
                child = self.time(made)
                if child.status != "ok":
                    self._end("cpu", child.status, n, points)
                    return
                best = min(best, child.cpu)
                wanted -= 1 if best < idle + 0.01 else 2 if best < idle + 0.1 * self.budget else 4
            say(cpu=n, s=max(best - idle, 0.0), make=make_s)
            n, rest = max(n + 1, round(n * ratio)), until - spent()
            if (best - idle) * 3 > min(2 * self.cap, rest) or rest <= 0 or n > LARGEST:
                self._end("cpu", "budget", n, points)
                return


def touch(made) -> None:
    """Write to the memory of an input, as its use will: the first write after a fork copies a page, at the writer's cost."""
    if isinstance(made, (list, tuple)):
        for item in list(made):
            if isinstance(item, (list, tuple, dict)):
                touch(item)


def _too_slow(*_) -> None:
    raise TimeoutError("the generator takes too long")


def _exponent(points: list) -> float:
    """The power of n by which the cost grew last, as far as it shows; 0 when it did not grow."""
    if len(points) < 3:
        return 0.0
    (n0, u0, _), (n1, u1, _), (n2, u2, _) = points[-3:]
    if u2 <= u1:
        return 0.0
    if u1 <= u0:
        return math.log(u2 / max(u0, 1)) / math.log(n2 / n0)
    steeper = (u2 - u1) / (n2 - n1) / ((u1 - u0) / (n1 - n0))  # of a + b n^k this is the ratio of mean sizes to the k - 1
    return max(0.0, 1 + math.log(steeper) / math.log((n1 + n2) / (n0 + n1)))


def spent() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def main() -> None:
    payload = json.loads(sys.stdin.buffer.read())
    driver = Driver(payload)
    if payload["mode"] == "ladder":
        driver.ladder()
        return
    made, _ = driver.make(payload["n"])
    driver.load(driver.plain, {}, made)()
    os._exit(0)
