"""Measures walks over a random graph whose degrees are as uneven as a wiki's.

    python tools/bench_walk.py [--links 1000000] [--pages 100000] [--walks 200000] [--rounds 3] [--out FOLDER]

Targets are drawn with weight 1 / rank, so that hubs exist. Prints steps per minute of each round and the time to set up; writes
summary.json; fails when the median is under one million steps per minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_nb.run import write_summary  # noqa: E402
from megatron_nb.search.graph import Out  # noqa: E402
from megatron_nb.synthesis.walk import WalkConfig, Walker  # noqa: E402

GOAL = 1e6  # steps per minute


@dataclass
class RandomGraph:
    """As the graph of a corpus (search/graph.py)."""

    titles: list[str]
    out: Out
    degree: np.ndarray
    date: np.ndarray
    kind: np.ndarray


def random_graph(pages: int, links: int, seed: int) -> RandomGraph:
    """`links` links, targets with weight 1 / rank; a tenth of the pages is no article."""
    rng = np.random.default_rng(seed)
    sources = np.sort(rng.integers(0, pages, links))
    weight = np.cumsum(1 / np.arange(1, pages + 1))
    targets = np.searchsorted(weight, rng.uniform(0, weight[-1], links)).astype(np.int32)
    out = np.bincount(sources, minlength=pages)
    degree = (out + np.bincount(targets, minlength=pages)).astype(np.int32)
    kind = (rng.uniform(size=pages) < 0.1).astype(np.int8)  # article or not
    date = rng.uniform(15000, 20000, pages).astype(np.float32)
    rows = Out(np.concatenate([[0], np.cumsum(out)]).astype(np.int32), targets, rng.integers(0, 3, links).astype(np.uint8))
    return RandomGraph([f"Page {number}" for number in range(pages)], rows, degree, date, kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", type=int, default=1_000_000)
    parser.add_argument("--pages", type=int, default=100_000)
    parser.add_argument("--walks", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-walk"))
    arguments = parser.parse_args()
    began = time.monotonic()
    graph = random_graph(arguments.pages, arguments.links, arguments.seed)
    start = time.perf_counter()
    walker = Walker(graph, WalkConfig())
    setup_s = time.perf_counter() - start
    print(f"{arguments.links:,} links, {arguments.pages:,} pages, {len(walker.heads):,} heads: set up in {setup_s:.2f} s")
    rates = []
    for number in range(arguments.rounds):
        start = time.perf_counter()
        _, steps = walker.draw(arguments.walks, [arguments.seed, number])
        rates.append(60 * int(steps.sum()) / (time.perf_counter() - start))
        print(f"round {number + 1}: {steps.sum():,} steps, {rates[-1]:,.0f} steps a minute", flush=True)
    rate = statistics.median(rates)
    write_summary(arguments.out, seed=arguments.seed, wall_s=time.monotonic() - began, steps_per_minute=rate, setup_s=setup_s)
    print(f"median {rate:,.0f} steps a minute, {'target reached' if rate >= GOAL else f'TARGET MISSED: {GOAL:,.0f}'}")
    sys.exit(rate < GOAL)


if __name__ == "__main__":
    main()
