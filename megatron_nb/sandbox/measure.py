"""The measuring driver: costs of one program at growing sizes. Runs inside the sandbox, sent there as source.

Input (stdin, JSON): {"source", "function", "generator", "reference", "seed", "budget_s", "wall_s", "memory_mb",
"mode": "ladder" | "once", "n"?}.
Output (stdout): JSON lines, each written when it is known, so a driver that is killed leaves what it had:
    {"load": CPU s of importing the program, "load_units": its operations}
    {"count": n, "units": operations, "digits": word operations of long integers, "cpu": s}
    {"cpu": n, "s": CPU of the call, without import and input, "make": CPU s of the input}
    {"end": "count"|"cpu", "why": "cap"|"clock"|"budget"|"generator"|"size"|"memory"|error, "n"}
Each figure comes from a fresh fork in which the program is imported and called once, so nothing is kept between calls; its
CPU time is what the kernel tells the parent, not what the program says. The input is made before the fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import random
import resource
import signal
import statistics
import sys
import time
import types
import zlib

from megatron_nb.sandbox.harness_program import HOME_OF, MODULES, find, names_in
from megatron_nb.sandbox.measure_child import Child
from megatron_nb.sandbox.measure_costs import FILENAME, Counter
from megatron_nb.sandbox.measure_rewrite import rewrite

LARGEST = 1 << 40
COUNT_SHARE, CPU_SHARE = 0.45, 0.4  # of the budget; the rest is for the checks from outside
CAP_SHARE = 0.12  # of the budget, for one run
MAKE_CAP_S = 0.1  # CPU of making one input
SMALL_UNITS = 20_000  # counts below it are the mean of several inputs


def say(**line) -> None:
    os.write(1, (json.dumps(line) + "\n").encode())


class Driver:
    def __init__(self, payload: dict):
        self.function, self.seed, self.memory = payload["function"], payload["seed"], payload["memory_mb"] * 3 // 4
        self.budget, self.wall = payload["budget_s"], payload["wall_s"]
        self.cap = CAP_SHARE * self.budget
        self.prefix = f"_{random.Random(self.seed).getrandbits(40):x}_"
        self.plain = compile(payload["source"], FILENAME, "exec")
        self.counting = rewrite(payload["source"], self.prefix) if payload["mode"] == "ladder" else None
        self.reference = compile(payload["reference"], FILENAME, "exec") if payload.get("reference") else None
        self.generator = {"__name__": "generator"}
        exec(compile(payload["generator"], "<generator>", "exec"), self.generator)

        given = [name for name in names_in(self.plain) if name in HOME_OF]  # what judges let solutions use without import
        self.given = {name: getattr(__import__(HOME_OF[name]), name) for name in given}
        self.given |= {name: __import__(name) for name in names_in(self.plain) if name in MODULES}
        self.stdin = None

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
        if not self.function:
            self.stdin = self.stdin or _nameless_file()
            os.truncate(self.stdin, 0)
            os.pwrite(self.stdin, made.encode(), 0)
        return made, time.process_time() - began

    def load(self, code, operations: dict, made):
        """Import the program; what is called then. A program of stdin and stdout does all its work when it is called."""
        module = types.ModuleType("candidate" if self.function else "__main__")
        module.__dict__.update(self.given, **operations)
        sys.modules[module.__name__] = module
        if self.function:
            exec(code, module.__dict__)
            return lambda: find(module, self.function.rpartition(".")[2])(*made)
        os.lseek(self.stdin, 0, os.SEEK_SET)
        os.dup2(self.stdin, 0)
        sys.stdin = open(0)  # noqa: SIM115
        return lambda: exec(code, module.__dict__)

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

        return Child(work, 1.6 * self.cap, self.memory)

    def time(self, made, run: bool = True) -> Child:
        def work():
            call = self.load(self.plain, {}, made)
            touch(made)
            if run:
                call()

        return Child(work, 2 * self.cap, self.memory)

    def ladder(self) -> None:
        base = min(self.time(self._smallest(), run=False).cpu for _ in range(3))
        say(load=base)
        began = time.monotonic()
        points = self.counts(spent() + COUNT_SHARE * self.budget, began + COUNT_SHARE * self.wall)
        if points and self.reference and self.function:
            self.answers(points)
        if len(points) > 2:
            self.cpus(points, base, spent() + CPU_SHARE * self.budget, began + (COUNT_SHARE + CPU_SHARE) * self.wall)
        say(spent=spent())

    def _smallest(self):
        for n in (3, 4, 8, 16):
            try:
                return self.make(n)[0]
            except Exception:  # noqa: S112
                continue
        return [] if self.function else ""

    def answers(self, points: list) -> None:
        """Whether the program answers as the reference does, at sizes up to the largest that was counted in moderate time."""
        tried, compared = [], 0
        for n, _, cpu in reversed(points):
            if compared == 2 or len(tried) == 8 or cpu > 0.3 * self.cap or (tried and n > tried[-1] / 3):
                continue
            tried.append(n)
            made, _ = self.make(n)
            given = []
            for code in (self.reference, self.plain):

                def work(code=code, made=made):
                    answer = self.load(code, {}, made)()
                    return b"%08x" % zlib.crc32(repr((answer, made)).encode())  # made: what was changed in place

                child = Child(work, 0.3 * self.cap, self.memory)
                given.append(child.said if child.status == "ok" else None)
                if given[0] is None:
                    break
            if given[0] and given[0] != given[1]:
                say(answers="differ", n=n)
                return
            compared += bool(given[0])

    def counts(self, until: float, end: float) -> list[tuple[int, float, float]]:
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
            wanted = 1 if told[0][0] > SMALL_UNITS or make_s > 0.02 else 10 if told[0][0] < 500 and n > 10 else 3
            while len(told) < wanted:
                more = self.count(n, self.make(n, len(told))[0])
                if more.status != "ok":
                    break
                told.append([float(x) for x in json.loads(more.said)])
            units, digits, loaded = (sum(column) / len(told) for column in zip(*told))
            noise = statistics.pstdev(t[0] for t in told) / max(units, 1) / math.sqrt(max(len(told) - 1, 1))
            say(count=n, units=units, digits=digits, load_units=loaded, cpu=child.cpu, noise=noise)
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
            room = (1.4 * self.cap / child.cpu) ** (1 / (step + 0.3))  # the factor of n that the cap leaves
            why = "cap" if room < min(1.2, following / n) else ""
            following = max(n + 1, min(following, round(n * room)))
            why = why or ("budget" if spent() > until or time.monotonic() > end else "generator" if make_s > MAKE_CAP_S else "")
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

    def cpus(self, points: list, base: float, until: float, end: float) -> None:
        """CPU times, from sizes where they can be told from the start of a process, up to the cap."""
        ratio = min(4.0, 3.0 ** (1 / max(_exponent(points), 0.3)))  # each about three times the cost of the last
        n = next((n for n, _, _ in points if all(cpu > base + 0.0012 for size, _, cpu in points if size >= n)), points[-3][0])
        timed, shrunk = [], 0
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
                if child.status == "cap" and len(timed) < 3 and shrunk < 4:  # heavier than its counts: smaller steps
                    shrunk, ratio = shrunk + 1, max(1.2, math.sqrt(ratio)) if timed else ratio
                    n = max(timed[-1] + 1, round(timed[-1] * ratio)) if timed else max(points[0][0], n >> 4)
                    break
                if child.status != "ok":
                    self._end("cpu", child.status, n, points)
                    return
                best = min(best, child.cpu)
                wanted -= 1 if best < idle + 0.01 else 2 if best < idle + 0.1 * self.budget else 4
            if best == math.inf:
                continue
            timed.append(n)
            say(cpu=n, s=max(best - idle, 0.0), make=make_s)
            n, late = max(n + 1, round(n * ratio)), time.monotonic() > end
            if late or (best - idle) * 3 > min(2 * self.cap, until - spent()) or n > LARGEST:
                self._end("cpu", "clock" if late else "budget", n, points)
                return


def _nameless_file() -> int:
    name = f"/tmp/.stdin-{os.getpid()}"
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)
    return file


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
    sys.set_int_max_str_digits(0)
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: the program cannot write into this process through /proc
    driver = Driver(payload)
    gc.collect()
    gc.freeze()
    gc.disable()
    if payload["mode"] == "ladder":
        driver.ladder()
        return
    made, _ = driver.make(payload["n"])
    driver.load(driver.plain, {}, made)()
    os._exit(0)
