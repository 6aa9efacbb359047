"""Walks: heads by age and degree, hubs penalised, no page twice, what is no article left out; the bench runs."""

import math
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest

from megatron_nb.search.graph import Out
from megatron_nb.search.pages import KINDS, LINK_KINDS
from megatron_nb.synthesis.walk import WalkConfig, Walker, day_of
from tools import bench_walk
from tools.bench_walk import random_graph


@dataclass
class Graph:
    """A small graph from {page: pages}."""

    links: dict[int, list[int]]
    n: int
    date: np.ndarray = None
    titles: list[str] = field(default_factory=list)
    kind: np.ndarray = None
    types: list[int] | None = None

    def __post_init__(self):
        out = [sorted(self.links.get(page, [])) for page in range(self.n)]
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in out])])
        targets = np.array([target for row in out for target in row], np.int32)
        types = np.full(len(targets), LINK_KINDS.index("text")) if self.types is None else np.array(self.types)
        self.out = Out(offsets, targets, types)
        self.degree = (np.diff(offsets) + np.bincount(targets, minlength=self.n)).astype(np.int32)
        self.date = np.full(self.n, np.nan, np.float32) if self.date is None else np.asarray(self.date, np.float32)
        self.titles = self.titles or [f"Page {chr(65 + page % 26)}{page // 26}" for page in range(self.n)]
        self.kind = np.zeros(self.n, np.int8) if self.kind is None else np.asarray(self.kind)


def any_head(**more) -> WalkConfig:
    return WalkConfig(**{"min_steps": 1, "cutoff": "none", "min_degree": 0, "max_degree": 10**6, **more})


def ring(n: int, reach: int = 3) -> dict[int, list[int]]:
    return {page: [(page + step) % n for step in range(1, reach + 1)] for page in range(n)}


def share(found: np.ndarray, n: int) -> np.ndarray:
    return np.bincount(found, minlength=n) / len(found)


def test_heads_are_drawn_with_the_weight_of_their_age_within_the_window():
    date = np.array([1000, 990, 900, 700, 1001, np.nan, 1000], np.float32)  # 4 lies after the cutoff, 3 before the window
    graph = Graph(ring(7), 7, date)
    cutoff = day_of(1000)
    walker = Walker(graph, any_head(cutoff=cutoff, window_days=200, tau_days=50))
    pages, _ = walker.draw(20000, [0])
    weight = np.array([1, math.exp(-10 / 50), math.exp(-100 / 50), 0, 0, 0, 1])
    assert np.abs(share(pages[:, 0], 7) - weight / weight.sum()).max() < 0.015


def test_the_latest_date_is_the_cutoff_unless_one_is_given_and_a_date_to_come_is_not_the_latest():
    assert Walker(Graph(ring(4), 4, [10, 20, 30, np.nan]), any_head(cutoff="latest")).cutoff == 30
    assert Walker(Graph(ring(400), 400, [*range(399), 9000]), any_head(cutoff="latest")).cutoff == 396


def test_heads_lie_in_the_degree_band():
    links = ring(20, 2) | {0: list(range(1, 20))}
    graph = Graph(links, 20)
    walker = Walker(graph, any_head(min_degree=5, max_degree=5))
    assert len(walker.heads) and set(graph.degree[walker.heads]) == {5}


def test_a_step_has_weight_one_over_log_of_two_plus_degree():
    links = {0: [1, 2, 3]} | {page: [1] for page in range(4, 60)} | {page: [2] for page in range(60, 70)}
    graph = Graph(links, 70)
    pages, _ = Walker(graph, any_head()).draw(200000, [1])
    seen = share(pages[(pages[:, 0] == 0), 1], 4)[1:4]
    weight = 1 / np.log(2 + graph.degree[1:4])
    assert len(set(graph.degree[1:4])) == 3
    assert np.abs(seen - weight / weight.sum()).max() < 0.03


def test_a_step_that_cannot_come_back_keeps_the_chances_of_the_others():
    links = {0: [1], 1: [0, 2, 3], 2: [0], 3: [0]} | {page: [3] for page in range(4, 30)}
    graph = Graph(links, 30)
    pages, _ = Walker(graph, any_head(max_steps=2, min_steps=2)).draw(100000, [2])
    from_zero = pages[(pages[:, 0] == 0)]
    seen = share(from_zero[:, 2], 4)[2:4]
    weight = 1 / np.log(2 + graph.degree[2:4])
    assert np.abs(seen - weight / weight.sum()).max() < 0.04


@pytest.mark.parametrize("seed", range(3))
def test_no_walk_visits_a_page_twice_and_every_step_is_a_link(seed):
    graph = random_graph(300, 1500, seed)  # hubs: many redraws, many dead ends
    pages, steps = Walker(graph, any_head(max_steps=9)).draw(2000, [seed])
    for row, length in zip(pages, steps):
        walked = row[: length + 1].tolist()
        assert -1 not in walked and (row[length + 1 :] == -1).all() and len(set(walked)) == len(walked)
        for source, target in zip(walked, walked[1:]):
            assert target in graph.out.targets[graph.out.offsets[source] : graph.out.offsets[source + 1]]
    assert steps.max() == 9


def test_a_walk_in_a_dead_end_is_short_and_one_forced_around_a_ring_is_whole():
    pages, steps = Walker(Graph({0: [1], 1: [0]}, 2), any_head(min_steps=3)).draw(50, [0])
    assert (steps == 1).all() and (pages[:, 2:] == -1).all()
    _, steps = Walker(Graph(ring(6, 1), 6), any_head(min_steps=5, max_steps=5)).draw(50, [0])
    assert (steps == 5).all()


def test_lengths_are_between_the_limits():
    _, steps = Walker(Graph(ring(40), 40), any_head(min_steps=2, max_steps=4)).draw(3000, [0])
    assert set(steps) == {2, 3, 4}


def test_lists_disambiguation_calendar_and_excluded_pages_are_neither_heads_nor_steps():
    titles = ["A", "B", "Mercury", "List of A", "1999", "12th century", "May 3", "C", "D", "1984 (novel)"]
    kinds = [KINDS.index({2: "disambiguation", 3: "list"}.get(page, "article")) for page in range(10)]
    graph = Graph({page: [p for p in range(10) if p != page] for page in range(10)}, 10, titles=titles, kind=kinds)
    pages, _ = Walker(graph, any_head(max_steps=3), without=[7]).draw(2000, [0])
    assert set(pages[pages >= 0]) == {0, 1, 8, 9}


def test_links_of_lists_and_tables_are_not_followed():
    types = [LINK_KINDS.index(kind) for kind in ("infobox", "lead", "text", "list", "table")]
    graph = Graph({0: [1, 2, 3, 4, 5]}, 6, types=types)
    pages, _ = Walker(graph, any_head()).draw(500, [0])
    assert set(pages[:, 1]) == {1, 2, 3}


def test_the_same_seed_draws_the_same_walks():
    walker = Walker(random_graph(200, 2000, 0), any_head())
    first, again, other = (walker.draw(100, seed)[0] for seed in ([1, 2], [1, 2], [1, 3]))
    assert (first == again).all() and (first != other).any()


@pytest.mark.parametrize(
    ("config", "date", "told"),
    [
        (any_head(min_degree=50), [1.0] * 4, "0 of 4 have 50 to"),
        (any_head(cutoff="1990-01-01", window_days=3), [1.0] * 4, "within 3 days before cutoff=1990-01-01"),
        (any_head(cutoff="latest"), None, "none of them a date"),
    ],
)
def test_a_graph_without_heads_is_refused_with_what_was_found(config, date, told):
    with pytest.raises(ValueError, match=told):
        Walker(Graph(ring(4), 4, date), config)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"min_steps": 6, "max_steps": 5}, "min_steps=6 and max_steps=5"),
        ({"min_steps": 0}, "1 <= min"),
        ({"tau_days": 0}, "more than 0"),
        ({"cutoff": "soon"}, "cutoff='soon' must be an ISO day"),
        ({"min_degree": 9, "max_degree": 8}, "min_degree=9"),
    ],
)
def test_a_setting_no_walk_can_use_is_refused(setting, told):
    with pytest.raises(ValueError, match=told):
        WalkConfig(**setting)


def test_the_bench_runs(monkeypatch, tmp_path):
    words = ["--links", "5000", "--pages", "500", "--walks", "200", "--rounds", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_walk", *words])
    with pytest.raises(SystemExit) as stopped:
        bench_walk.main()
    assert stopped.value.code in (False, True) and "steps_per_minute" in (tmp_path / "summary.json").read_text()
