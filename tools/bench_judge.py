"""Measures the judge: tests per second under full isolation beside other ways, latency, and what hanging programs cost.

    python tools/bench_judge.py [--programs 100] [--hang-programs 1000] [--rounds 3] [--peer DIR] [--out runs/bench-judge]

Throughput: small Python programs of 20 stdin tests each, every source different: the judge; one bubblewrap for each test (of a
fifth of the programs, as many at a time as there are workers); and with --peer, the folder of a LiveCodeBench checkout, that
project's own runner (no isolation, a process for each program). In turns, medians. Latency: one test after the other of a
program seen before, and of programs never seen. Hangs: each program hangs on one of its 20 tests (in turns a loop and a sleep)
at a limit of 0.2 s; the ratio is to (limits of the hanging tests + CPU of the rest) / workers. Writes summary.json.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_nb.run import write_summary
from megatron_nb.sandbox.execution import Limits
from megatron_nb.sandbox.judge import Judge, Verdict
from megatron_nb.sandbox.pool import Pool
from megatron_nb.sandbox.tests import Program, Test

TESTS = 20  # of each program
HANG_S = 0.2
AT_ONCE = 64  # programs that are handed to the judge at the same time
WALLS = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--ro-bind", "/usr", "/usr",
         "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin", "--proc", "/proc",
         "--dev", "/dev", "--tmpfs", "/tmp", "--clearenv"]  # fmt: skip
SMALL = [  # a program over numbers on one line, and what it prints
    ("values = list(map(int, input().split()))\nprint(sum(values))", sum),
    ("values = sorted(map(int, input().split()))\nprint(values[len(values) // 2])", lambda v: sorted(v)[len(v) // 2]),
    ("from collections import Counter\nprint(max(Counter(input().split()).values()))", lambda v: max(map(v.count, v))),
    ("total = 0\nfor x in map(int, input().split()):\n    total = total * 31 % 1000 + x\nprint(total)",
     lambda v: functools.reduce(lambda total, x: total * 31 % 1000 + x, v, 0)),
]  # fmt: skip
HANGING = """import time
values = list(map(int, input().split()))
if values[0] < 0:
    %s
print(sum(values))
"""
PEER = """
import json, sys, time
from lcb_runner.evaluation.compute_code_generation_metrics import evaluate_generations
work = json.load(open(sys.argv[1]))
began = time.perf_counter()
results, _ = evaluate_generations(work["samples"], work["programs"], False, work["workers"], 6)
seconds = time.perf_counter() - began
good = sum(result is True for found in results.values() for results_of in found for result in results_of)
print(json.dumps([good, seconds]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100, help="for throughput; default %(default)s")
    parser.add_argument("--hang-programs", type=int, default=1000, help="of 20 tests each; default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--latency", type=int, default=200, help="single tests; default %(default)s")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="default: one per core")
    parser.add_argument("--peer", type=Path, help="folder of a LiveCodeBench checkout")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-judge"))
    arguments = parser.parse_args()
    began = time.perf_counter()
    with Pool(arguments.workers) as pool:
        asyncio.run(judged(pool, small_programs(1, "start")))
        start_ms = 1000 * (time.perf_counter() - began)
        print(f"{arguments.workers} workers, isolation {pool.isolation}")
        rates = throughput(pool, arguments)
        latency = {"start_ms": start_ms, **asyncio.run(latencies(pool, arguments.latency))}
        hang = asyncio.run(hangs(pool, arguments.hang_programs, arguments.workers))
    metrics = {**rates, "speedup_vs_bwrap": rates["tests_per_s"] / rates["bwrap_tests_per_s"], **latency, **hang}
    found = Table("figure", "value", title="judge")
    for name, value in metrics.items():
        found.add_row(name, f"{value:,.3g}" if value < 100 else f"{value:,.0f}")
    if arguments.peer is None:
        found.add_row("livecodebench_tests_per_s", "not given (--peer)")
    Console(width=None if sys.stdout.isatty() else 100).print(found)
    write_summary(arguments.out, seed=0, wall_s=time.perf_counter() - began, workers=arguments.workers, **metrics)


def small_programs(count: int, round_name: str) -> list[tuple[Program, list[Test]]]:
    """Different programs with 20 tests each, all of which they pass."""
    made = []
    for number in range(count):
        source, answer = SMALL[number % len(SMALL)]
        lines = [[(number * 7 + place * 13 + step * step) % 100 + 1 for step in range(10)] for place in range(TESTS)]
        tests = [Test.read({"stdin": " ".join(map(str, line)) + "\n", "stdout": f"{answer(line)}\n"}) for line in lines]
        made.append((Program(f"# {round_name} {number}\n{source}\n"), tests))
    return made


def throughput(pool: Pool, arguments: argparse.Namespace) -> dict[str, float]:
    """Tests per second of each way, medians over the rounds."""
    ways: dict[str, Callable[[list[tuple[Program, list[Test]]]], tuple[float, int]]] = {
        "tests_per_s": lambda work: seconds(lambda: asyncio.run(judged(pool, work))),
        "bwrap_tests_per_s": lambda work: seconds(lambda: one_bwrap_each(work[: max(1, len(work) // 5)], arguments.workers)),
    }
    if arguments.peer is not None:
        ways["livecodebench_tests_per_s"] = lambda work: by_livecodebench(work, arguments.peer, arguments.workers)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds):
        for name, way in ways.items():
            taken, count = way(small_programs(arguments.programs, f"round {number} {name}"))
            rates[name].append(count / taken)
    return {name: statistics.median(values) for name, values in rates.items()}


def seconds(work: Callable[[], int]) -> tuple[float, int]:
    began = time.perf_counter()
    count = work()
    return time.perf_counter() - began, count


async def judged(pool: Pool, work: list[tuple[Program, list[Test]]]) -> int:
    """Judge all of them, which have to be accepted; how many tests."""
    return sum(map(len, await verdicts_of(pool, work, Limits(), lambda number, place: "accepted")))


async def verdicts_of(
    pool: Pool, work: list[tuple[Program, list[Test]]], limits: Limits, wanted: Callable[[int, int], str]
) -> list[list[Verdict]]:
    """Verdicts by program and test. SystemExit when one is not what is `wanted` for its place."""
    judge, gate = Judge(pool), asyncio.Semaphore(AT_ONCE)

    async def one(program: Program, tests: list[Test]) -> list[Verdict]:
        async with gate:
            return await judge.judge(program, tests, limits)

    found = await asyncio.gather(*(one(*given) for given in work))
    for number, verdicts in enumerate(found):
        for place, verdict in enumerate(verdicts):
            if verdict.verdict != wanted(number, place):
                raise SystemExit(f"error: {verdict.verdict!r} ({verdict.detail}), not {wanted(number, place)!r}: {verdict}")
    return found


def one_bwrap_each(work: list[tuple[Program, list[Test]]], workers: int) -> int:
    """A bubblewrap and a Python for every test."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as threads:
        python = shutil.which("python3", path="/usr/bin")

        def run(place: int, test: Test) -> bool:
            command = [*WALLS, "--ro-bind", f"{folder}/{place}.py", "/main.py", python, "-I", "/main.py"]
            found = subprocess.run(command, input=test.stdin.encode(), capture_output=True, env={}, timeout=60)
            return found.stdout.split() == test.stdout.encode().split()

        for place, (program, _) in enumerate(work):
            Path(folder, f"{place}.py").write_text(program.source)
        pairs = [(place, test) for place, (_, tests) in enumerate(work) for test in tests]
        right = sum(threads.map(lambda pair: run(*pair), pairs))
    if right != len(pairs):
        raise SystemExit(f"error: {len(pairs) - right} of {len(pairs)} tests failed with one bubblewrap each")
    return len(pairs)


def by_livecodebench(work: list[tuple[Program, list[Test]]], peer: Path, workers: int) -> tuple[float, int]:
    """(seconds, tests) of the other project's own runner, in a process of its own."""
    pairs = [([test.stdin for test in tests], [test.stdout for test in tests]) for _, tests in work]
    samples = [{"input_output": json.dumps({"inputs": given, "outputs": wanted, "fn_name": None})} for given, wanted in pairs]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"samples": samples, "programs": [[program.source] for program, _ in work], "workers": workers}, file)
        file.flush()
        command = [sys.executable, "-c", PEER, file.name]
        found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(peer)})
    if found.returncode:
        raise SystemExit(f"error: --peer {peer}: {found.stderr[-1000:]}")
    good, taken = json.loads(found.stdout.splitlines()[-1])
    if good != sum(len(tests) for _, tests in work):
        raise SystemExit(f"error: --peer {peer}: it accepts {good} of {len(work) * TESTS} tests")
    return taken, good


async def latencies(pool: Pool, count: int) -> dict[str, float]:
    """Median milliseconds of one test of a program seen before, and of one never seen."""
    judge, ((program, tests),) = Judge(pool), small_programs(1, "warm")

    async def timed(program: Program, test: Test) -> float:
        began = time.perf_counter()
        (verdict,) = await judge.judge(program, [test], Limits())
        assert verdict.verdict == "accepted", verdict
        return 1000 * (time.perf_counter() - began)

    await timed(program, tests[0])
    warm = [await timed(program, tests[place % TESTS]) for place in range(count)]
    cold = [await timed(program, tests[0]) for program, tests in small_programs(count, "cold")]
    return {"warm_ms": statistics.median(warm), "cold_ms": statistics.median(cold)}


async def hangs(pool: Pool, count: int, workers: int) -> dict[str, float]:
    """Seconds with one hanging test in 20, and the ratio to what cannot be avoided."""
    work = []
    for number in range(count):
        source = f"# hang {number}\n" + HANGING % ("while True: pass" if number % 2 else "time.sleep(100)")
        rows = [{"stdin": f"{place} {number}\n", "stdout": f"{place + number}\n"} for place in range(1, TESTS)]
        rows.insert(number % TESTS, {"stdin": "-1\n", "stdout": ""})
        work.append((Program(source), [Test.read(row) for row in rows]))
    began = time.perf_counter()
    found = await verdicts_of(
        pool, work, Limits(time_s=HANG_S), lambda number, place: "time limit" if place == number % TESTS else "accepted"
    )
    taken = time.perf_counter() - began
    rest = sum(verdict.cpu_s for verdicts in found for verdict in verdicts if verdict.verdict == "accepted")
    return {"hang_s": taken, "hang_ratio": taken / ((count * HANG_S + rest) / workers)}


if __name__ == "__main__":
    main()
