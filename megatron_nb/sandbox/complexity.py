"""The time complexity of a function, found by running it: a class of the ladder with a confidence, or an honest "unknown".

Two kinds of evidence are taken in the sandbox (measure.py): exact counts of operations, which name the class, and CPU times
of the program as it was written, which must grow as the counts do. CPU time of separate runs, measured from outside of the
sandbox, must agree with what was measured in it. Where these disagree the answer is "unknown" with the reason, except where
CPU time shows work that the counts cannot see and its growth names a class by itself.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
from dataclasses import dataclass, field
from typing import Any

from megatron_nb.sandbox.execution import Execution, Job, Limits
from megatron_nb.sandbox.harness import MEASURE
from megatron_nb.sandbox.ladder import UNKNOWN, rank
from megatron_nb.sandbox.measure_fit import FUNCTIONS, Fit, fit
from megatron_nb.sandbox.pool import Pool

LIMITS = Limits(time_s=20.0, memory_mb=2048, output_bytes=1 << 20, processes=8, disk_mb=256)
CLEAR_S = 0.0008  # CPU times under it are lost in the start of a process
CACHE_FACTOR, CACHE_S = 6.0, 1e-6  # cost per operation may grow this much from the smallest to the largest size, and more
MOST_FACTOR = 10.0  # (up to this) while it stays under what a few reads from memory take: caches, pages, busy neighbours
HIDDEN_POWER = 0.5  # ... and by this power of n; more of both is work that the counts do not see
SLOPES = ((0.8, 1.12, "n"), (1.12, 1.35, "n log n"), (1.4, 1.65, "n sqrt n"), (1.75, 2.3, "n^2"), (2.6, 3.3, "n^3"))
SMALL_N, SMALL_FACTOR, SMALL_POWER = 20_000, 3.5, 0.6  # up to that size caches explain less: less growth shows hidden work
LEAST_S_PER_UNIT = 1e-11  # no machine does a counted operation faster: memory is copied at some tens of GB/s
DIGITS_SHARE = 0.25  # sizes where long integers take more than this of the work are left out: humans count them as 1
IMPORT_S = 0.5  # of CPU; more is work hidden in the import
IMPORT_UNITS = 100_000  # counted while the program is imported; more is a table made ahead of the call
OUTSIDE_FACTOR, OUTSIDE_S = 2.5, 0.06  # CPU measured outside may exceed that measured inside by this factor and this much


@dataclass
class Estimate:
    """What was found. points: (n, operations or None, CPU seconds or None) as measured."""

    complexity: str  # of LADDER, or "unknown"
    confidence: float  # 0..1
    reason: str
    points: list[tuple[int, float | None, float | None]] = field(default_factory=list)


async def estimate(
    pool: Pool,
    source: str,
    function: str,
    generator: str,
    budget_s: float = 2.5,
    limits: Limits = LIMITS,
    seed: int | None = None,
    reference: str = "",
) -> Estimate:
    """The class of `function` in `source` on the inputs that make(n) of `generator` gives. Never raises for what they do.

    function "": a program of stdin and stdout, and make(n) returns the text of stdin; reading it is part of the cost.
    budget_s: CPU seconds to spend on measuring. seed: of sizes and inputs; by default another one each time.
    reference: source of a right solution with the same function: other answers than its own, where a case has one right
    answer, make the result "unknown", so a program cannot be fast by being wrong on large inputs.
    """
    payload = {
        "source": source, "function": function, "generator": generator, "reference": reference, "mode": "ladder",
        "budget_s": budget_s, "wall_s": limits.time_s, "memory_mb": limits.memory_mb,
        "seed": random.getrandbits(32) if seed is None else seed,
    }  # fmt: skip
    run = await pool.run(_job(payload, limits))
    lines = _lines(run)
    found = assess(lines)
    if found.complexity == UNKNOWN:
        return Estimate(UNKNOWN, 0.0, f"{found.reason}{_ended(run)}", found.points)
    timed = [line for line in lines if "make" in line]
    if not timed:
        return found
    low, high = timed[0], max(timed, key=lambda line: line["cpu"])
    runs = await asyncio.gather(*(pool.run(_job({**payload, "mode": "once", "n": t["cpu"]}, limits)) for t in (low, high)))
    problem = _outside(low, high, *runs)
    return Estimate(UNKNOWN, 0.0, problem, found.points) if problem else found


async def run_once(pool: Pool, source: str, function: str, generator: str, n: int, limits: Limits) -> Execution:
    """One run of the program on make(n), without any measurement inside."""
    bounds = {"budget_s": limits.time_s, "wall_s": limits.time_s, "memory_mb": limits.memory_mb}
    task = {"source": source, "function": function, "generator": generator, "mode": "once", "n": n, "seed": 0}
    return await pool.run(_job({**task, **bounds}, limits))


def _job(payload: dict[str, Any], limits: Limits) -> Job:
    return Job(MEASURE, stdin=json.dumps(payload).encode(), limits=limits)


def _lines(run: Execution) -> list[dict[str, Any]]:
    lines = []
    for text in run.stdout.splitlines():
        try:
            line = json.loads(text)
            numbers = [line[key] for key in ("count", "units", "digits", "noise", "s", "make", "load", "spent") if key in line]
            if isinstance(line, dict) and all(isinstance(x, (int, float)) and 0 <= x < 1e18 for x in numbers):
                lines.append(line)
        except (ValueError, TypeError):
            continue
    return lines


def _ended(run: Execution) -> str:
    if run.status == "ok":
        return ""
    last = "".join(run.stderr.decode(errors="replace").strip().splitlines()[-1:])
    told = last or run.detail if run.status == "runtime error" else run.detail or last  # the exception, not its exit code
    return f"; the measurement ended by {run.status} {told}"[:300]


def assess(lines: list[dict[str, Any]]) -> Estimate:
    """What the lines of the driver say, before the check from outside."""
    counts = [line for line in lines if "count" in line]
    timed = [line for line in lines if "make" in line]
    points = [(c["count"], c["units"], None) for c in counts] + [(t["cpu"], None, t["s"]) for t in timed]

    def unknown(reason: str) -> Estimate:
        return Estimate(UNKNOWN, 0.0, reason, points)

    ends = {line["end"]: line for line in lines if "end" in line}
    stack = ("error: ended with -11", "error: RecursionError")  # a limit of the machine, not a fault of the program
    failed = next((e for e in ends.values() if e["why"].startswith("error") and not e["why"].startswith(stack)), None)
    if failed:
        return unknown(f"at n={failed['n']} the program fails: {failed['why']}")
    wrong = next((line for line in lines if "answers" in line), None)
    if wrong:
        return unknown(f"at n={wrong['n']} the program does not answer as the reference does")
    if not any("spent" in line for line in lines):
        return unknown("the measurement did not come to its end")
    load = next((line["load"] for line in lines if "load" in line), 0.0)
    if load > IMPORT_S or any(c["load_units"] > IMPORT_UNITS for c in counts):
        return unknown(f"importing the program does {max((c['load_units'] for c in counts), default=0):.0f} operations "
                       f"({load:.2f} s): a table made ahead of the call hides its cost")  # fmt: skip
    plain = [c for c in counts if c["digits"] <= DIGITS_SHARE * c["units"]]
    bounded = len(plain) >= 6 and len(plain) < len(counts)
    kept = plain if bounded else counts
    noise = statistics.median(c["noise"] for c in kept[len(kept) // 2 :]) if kept else 0.0
    found = fit([(c["count"], c["units"] + (0 if bounded else c["digits"])) for c in kept], noise)
    if found.complexity is None:
        end = ends.get("count", {})
        return unknown(found.reason + (f" (stopped at n={end['n']}: {end['why']})" if end else ""))
    if bounded:
        timed = [t for t in timed if t["cpu"] <= kept[-1]["count"]]
    problem = _jump(kept, found, ends) if not bounded else ""
    if problem:
        return unknown(problem)
    end = ends.get("cpu", {"why": ""})
    if end["why"] in ("cap", "clock") and found.complexity in FUNCTIONS and sum(t["s"] >= CLEAR_S for t in timed) < 3:
        return unknown(f"at n={end['n']} the program runs far longer than while its operations were counted")
    for t in timed:  # counting only adds to the work
        counted = next((c for c in counts if c["count"] >= t["cpu"]), None)
        if counted and t["s"] > 2 * counted["cpu"] + 0.005:
            return unknown(f"at n={t['cpu']} the program takes {t['s']:.3f} s, and {counted['cpu']:.3f} s while it is counted")
    return _beside_cpu(found, kept, timed, points)


def _jump(counts: list[dict], found: Fit, ends: dict[str, dict]) -> str:
    """Why the end of a ladder is not explained by the growth before it: "" when it is."""
    end, last = ends.get("count"), counts[-1]
    if end and end["why"] == "cap" and found.complexity in FUNCTIONS:
        grown = _cost(found.complexity, end["n"]) / max(_cost(found.complexity, last["count"]), 1e-9)
        if last["cpu"] * grown * 12 < end["cap"]:
            return f"at n={end['n']} the cost is far above what {found.complexity} up to n={last['count']} leads to"
    return ""


def _cost(name: str, n: float) -> float:
    return FUNCTIONS[name](max(n, 2))


def _beside_cpu(found: Fit, counts: list[dict], timed: list[dict], points: list) -> Estimate:
    """The class by counts, unless CPU time grows faster than they do."""
    name = found.complexity
    estimate = Estimate(name, found.confidence, f"counts follow {name} to {found.error:.1%}", points)
    timed = [{**t, "s": min(later["s"] for later in timed[at:])} for at, t in enumerate(timed)]  # noise only adds
    clear = [(t["cpu"], t["s"]) for t in timed if t["s"] >= CLEAR_S]
    lost = [t["cpu"] for t in timed if clear and t["cpu"] < clear[0][0]]
    if lost and len(clear) < 3:
        clear.insert(0, (lost[-1], CLEAR_S))  # at most, so growth is not made larger by it
    if name in ("2^n", "n!") or len(clear) < 3:
        return estimate
    model = _units(counts, name)
    (n0, s0), (n1, s1) = clear[0], clear[-1]
    if s1 / model(n1) < LEAST_S_PER_UNIT:
        return Estimate(UNKNOWN, 0.0, f"{model(n1):.3g} operations in {s1:.3g} s are more than can be", points)
    growth = s1 / model(n1) / (s0 / model(n0))
    power = math.log(max(growth, 1e-9)) / math.log(n1 / n0)
    latency = growth < MOST_FACTOR and s1 / model(n1) < CACHE_S
    small = n1 <= SMALL_N and growth >= SMALL_FACTOR and power >= SMALL_POWER
    if not small and (growth < CACHE_FACTOR or latency or power < HIDDEN_POWER):
        return estimate
    slope = _slope(clear[-3:])
    by_cpu = next((c for low, high, c in SLOPES if low <= slope <= high), "n^k" if slope > 3.6 else None)
    what = f"CPU time per counted operation grows {growth:.0f}-fold from n={n0} to {n1}: slope {slope:.2f}, counts say {name}"
    if by_cpu is None or rank(by_cpu) <= rank(name):
        return Estimate(UNKNOWN, 0.0, what, points)
    return Estimate(by_cpu, 0.5, what, points)


def _units(counts: list[dict], name: str):
    """n -> operations: as counted, between sizes by the power that leads from one to the next, beyond them by the class."""
    known = sorted((c["count"], max(c["units"], 1.0)) for c in counts)

    def model(n: float) -> float:
        if n >= known[-1][0]:
            return known[-1][1] * max(_cost(name, n) / _cost(name, known[-1][0]), 1.0)
        above = next(i for i, (size, _) in enumerate(known) if size > n)
        (n0, c0), (n1, c1) = known[max(above - 1, 0)], known[above]
        return c1 if n0 == n1 else c0 * (c1 / c0) ** (math.log(n / n0) / math.log(n1 / n0))

    return model


def _slope(clear: list[tuple[int, float]]) -> float:
    """The median power of n over all pairs of points."""
    pairs = [(a, b) for i, a in enumerate(clear) for b in clear[i + 1 :]]
    return statistics.median(math.log(b[1] / a[1]) / math.log(b[0] / a[0]) for a, b in pairs)


def _outside(low: dict, high: dict, run_low: Execution, run_high: Execution) -> str:
    """How CPU measured from outside contradicts the driver's own: "" when it does not."""
    for t, run in ((low, run_low), (high, run_high)):
        if run.status != "ok":
            return f"a run at n={t['cpu']} outside of the measurement ended by {run.status} {run.detail}"[:300]
    inside = high["s"] + high["make"] - low["s"] - low["make"]
    outside = run_high.cpu_s - run_low.cpu_s
    if outside > OUTSIDE_FACTOR * inside + OUTSIDE_S or outside < inside / OUTSIDE_FACTOR - OUTSIDE_S:
        sizes = f"from n={low['cpu']} to {high['cpu']}"
        return f"{sizes} CPU time grows by {outside:.3f} s outside, by {inside:.3f} s in the measurement"
    return ""
