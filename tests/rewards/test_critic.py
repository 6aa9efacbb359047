"""The critic finds planted bad turns in real wiki trajectories, by rules and by an endpoint that reads the prompt."""

import asyncio
import random
from collections import Counter

import pytest

from megatron_nb.client import ClientConfig
from megatron_nb.rewards.critic import CriticConfig, judge_turns, loss_flags, model_critic
from megatron_nb.rewards.critic_rules import judge_by_rules
from megatron_nb.rewards.critic_steps import CRITERIA, Task, steps_of
from tests.rewards.critic_endpoint import CriticEndpoint
from tests.rewards.planted_turns import KINDS, TRUTH, episode_of
from tests.rewards.wiki_walker import Wiki, toolbox, walk_of


@pytest.fixture(scope="module")
def wiki(shared_data):
    return Wiki(shared_data / "wiki")


def episodes(wiki, seed: int, count: int, fresh: bool) -> list[tuple[dict, list[dict], list[str]]]:
    """(question row, messages, kind of each turn)"""
    rng, found = random.Random(seed), []

    async def make():
        while len(found) < count:
            walk = await walk_of(wiki, rng, rng.randint(2, 5))
            if walk:
                found.append((walk.row, *await episode_of(walk, rng, 0.35, fresh)))

    asyncio.run(make())
    return found


def tally(made, verdicts) -> dict[str, tuple[float, float]]:
    """Criterion -> (precision, recall) over all turns; printed, with the counts. Turns that may fail as well are left out."""
    counts: Counter = Counter()
    for (_, _, kinds), found in zip(made, verdicts, strict=True):
        for kind, verdict in zip(kinds, found, strict=True):
            must, may = TRUTH[kind]
            for name in set(CRITERIA) - set(may):
                counts[name, name in must, not getattr(verdict, name)] += 1
    measured = {}
    for name in CRITERIA:
        hit, false, missed = counts[name, True, True], counts[name, False, True], counts[name, True, False]
        measured[name] = hit / max(hit + false, 1), hit / max(hit + missed, 1)
        shares = "precision {:.3f} recall {:.3f}".format(*measured[name])
        print(f"{name:<6} {shares} ({hit} found, {false} false, {missed} missed)")
    return measured


def task_of(wiki, row) -> Task:
    return Task.of(row["question"], toolbox(wiki).schemas, row)


@pytest.mark.parametrize(("fresh", "seed"), [(False, 1), (True, 77)], ids=["wordings", "other wordings"])
def test_rules_find_planted_turns_with_precision_and_recall(wiki, fresh, seed):
    made = episodes(wiki, seed, 45, fresh)
    kinds = Counter(kind for _, _, kinds in made for kind in kinds)
    print(dict(kinds))
    assert sum(kinds[kind] for kind in KINDS) >= 100 and min(kinds[kind] for kind in KINDS) >= 15
    tasks = [task_of(wiki, row) for row, _, _ in made]
    steps = [steps_of(messages) for _, messages, _ in made]
    for least, judged in ((0.95, tasks), (0.7, [task.without_reference() for task in tasks])):
        measured = tally(made, [judge_by_rules(task, turns) for task, turns in zip(judged, steps)])
        assert all(precision >= 0.8 and recall >= least for precision, recall in measured.values())


def test_a_rule_that_is_taken_away_is_missed(wiki, monkeypatch):
    monkeypatch.setattr("megatron_nb.rewards.critic_rules.untrue", lambda step, memory: "")
    monkeypatch.setattr("megatron_nb.rewards.critic_memory.Memory.repeats", lambda self, call: None)
    monkeypatch.setattr("megatron_nb.rewards.critic_memory.Memory.novelty", lambda self, result: 1.0)
    made = episodes(wiki, 1, 25, False)
    measured = tally(made, [judge_by_rules(task_of(wiki, row).without_reference(), steps_of(said)) for row, said, _ in made])
    assert measured["logic"][1] < 0.5 and measured["gain"][1] < 0.5


def test_a_model_behind_an_endpoint_finds_planted_turns(wiki):
    made = episodes(wiki, 3, 40, False)
    assert sum(kind in KINDS for _, _, kinds in made for kind in kinds) >= 100
    server = CriticEndpoint()
    config = CriticConfig("endpoint", ClientConfig(server.url, "reader", concurrency=4))

    async def judge():
        model = model_critic(config)
        return [await judge_turns(task_of(wiki, row), steps_of(said), config, model) for row, said, _ in made]

    try:
        measured = tally(made, asyncio.run(judge()))
    finally:
        server.close()
    assert server.asked == sum(len(kinds) for _, _, kinds in made)
    assert all(precision >= 0.75 and recall >= 0.75 for precision, recall in measured.values())


def test_a_verdict_does_not_depend_on_later_turns(wiki):
    for row, said, _ in episodes(wiki, 5, 4, False):
        task, steps = task_of(wiki, row), steps_of(said)
        whole = judge_by_rules(task, steps)
        assert all(judge_by_rules(task, steps[:stop])[-1] == whole[stop - 1] for stop in range(1, len(steps) + 1))


def test_good_turns_are_trained_and_planted_ones_are_not(wiki):
    trained: Counter = Counter()
    for row, said, kinds in episodes(wiki, 7, 20, False):
        steps = steps_of(said)
        flags = loss_flags(steps, judge_by_rules(task_of(wiki, row), steps), right=kinds[-1] == "good")
        assert flags[-1] == (kinds[-1] == "good")
        trained.update((kind == "good", flag) for kind, flag in zip(kinds, flags) if kind != "fruitless")
    assert trained[True, 1] > 20 * trained[True, 0] and trained[False, 0] > 20 * trained[False, 1]
