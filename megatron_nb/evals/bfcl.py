"""Tool use as the Berkeley function-calling leaderboard scores it (V4): single calls by their AST, several turns by the state.

    group         weight  score
    non_live          10  mean of simple (itself the mean of its three languages), multiple, parallel, parallel_multiple
    live              10  all live calls together
    irrelevance       10  mean of irrelevance, live_irrelevance: nothing fits and nothing is called
    multi_turn        30  mean of its four categories
    agentic           40  web search and memory, which are not run here

`overall` counts a group that was not run as 0, as the leaderboard does; `overall_run` is the mean over those that were, and
`overall_weight` the share of the weights that they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_nb.asking.askers import Answer, Asker
from megatron_nb.evals.bfcl_match import check
from megatron_nb.evals.bfcl_rows import CATEGORIES, SEVERAL, category_of, package_folder, read_category, step_of
from megatron_nb.evals.stateful import Stage, Step, World, class_at
from megatron_nb.evals.statistics import mean_with_bounds
from megatron_nb.evals.task import Item, Outcome, Talk, Task, TaskConfig, Verdict, by_item
from megatron_nb.rollout.calls import plain

MORE = "There are more functions now, which you may use. Please go on."  # said where a turn brings functions, not words
WEIGHTS = {"non_live": 10, "live": 10, "irrelevance": 10, "multi_turn": 30, "agentic": 40}


@dataclass
class BfclConfig(TaskConfig):
    """path: the data folder of bfcl-eval; empty: that of the installed package."""

    categories: list[str] = field(default_factory=lambda: list(CATEGORIES))
    steps: int = 20  # of one turn of several; more fail the item
    classes: dict[str, str] = field(default_factory=dict)  # your own worlds of several turns: name -> module:Class
    dots: bool = True  # false: math.factorial is offered as math_factorial, for servers that refuse dots in names

    def __post_init__(self):
        super().__post_init__()
        if unknown := [name for name in self.categories if name not in CATEGORIES]:
            raise ValueError(f"categories: {', '.join(unknown)} unknown; known are {', '.join(CATEGORIES)}")
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be at least 1")


class Bfcl(Task):
    """See the head of the file. Greedy answers are the leaderboard's way: set temperature to 0."""

    Config = BfclConfig
    headline = "accuracy"

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.folder = Path(self.config.path) if self.config.path else package_folder()
        self._stage = Stage()

    def read(self) -> Sequence[Item]:
        config = self.config
        return [
            item for category in config.categories
            for item in read_category(self.folder, category, config.classes, config.dots)
        ]  # fmt: skip

    def check(self) -> None:
        """Raises ValueError for a class of a world that cannot be had."""
        super().check()
        for place in {place for item in self.items() for place in item.gold.get("classes", {}).values()}:
            class_at(place)

    def close(self) -> None:
        self._stage.close()

    async def score(self, item: Item, answer: Answer) -> Verdict:
        wrong = check(item.gold["category"], item.gold["functions"], item.gold["accepted"], answer.calls)
        if wrong and answer.problems:
            wrong = f"{wrong}; {answer.problems[0]}"
        told = "; ".join(f"{call.name}({call.arguments})" for call in answer.calls)
        return Verdict(float(not wrong), reason=wrong, answer=told or answer.said)

    async def attempt(self, item: Item, asker: Asker, index: int) -> Outcome:
        if item.gold["category"] not in SEVERAL:
            return await super().attempt(item, asker, index)
        gold, talk = item.gold, Talk(self, asker, item, index)
        world = World(gold["classes"], gold["scenario"], {"long_context": gold["category"].endswith("long_context")})
        tools, taken, made = list(item.tools or []), [], []  # taken: every step; made: those of each turn
        messages: list[dict[str, Any]] = self.prompt(Item(item.id, []))
        for number, turn in enumerate(gold["turns"]):
            tools += gold["later"].get(number, [])
            messages += turn or [{"role": "user", "content": MORE}]
            began = len(taken)
            if not await self._turn(talk, world, messages, tools, taken):
                reason = f"turn {number + 1} still calls functions after {self.config.steps} steps"
                return talk.outcome(0.0, "turns", reason=reason, messages=messages)
            made.append(taken[began:])
        right = [[step_of(text) for text in turn] for turn in gold["accepted"]]
        wrong = await self._stage.compare(world, made, right)
        return talk.outcome(float(not wrong), reason=wrong, messages=messages)

    async def _turn(self, talk: Talk, world: World, messages: list[dict[str, Any]], tools: list[dict[str, Any]],
                    taken: list[Step]) -> bool:  # fmt: skip
        """Let the model call functions until it calls none; False when the steps are used up. messages, taken: grow."""
        for _ in range(self.config.steps):
            answer = await talk.say(messages, tools)
            messages.append(answer.message())
            if not answer.calls:
                return True
            for call in answer.calls:
                text = await self._stage.take(world, taken, Step(call.name, call.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": plain(text)})
        return False

    def summarise(self, outcomes: list[Outcome]) -> dict[str, float]:
        told = mean_with_bounds(self.headline, by_item(outcomes))
        found: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            found.setdefault(category_of(outcome.item), []).append(outcome)
        shares = {name: [float(np.mean(its)) for its in by_item(of)] for name, of in found.items()}
        scores = {name: (float(np.mean(its)), len(its)) for name, its in shares.items() if its}
        return told | {name: score for name, (score, _) in scores.items()} | overall(scores)


def overall(scores: dict[str, tuple[float, int]]) -> dict[str, float]:
    """The groups' scores and their weighted mean, from category -> (score, items); see the head of the file."""
    live = [scores[name] for name in scores if name.startswith("live_") and "relevance" not in name]
    simple = _mean(scores, "simple_python", "simple_java", "simple_javascript")
    web, memory = (_mean(scores, *(name for name in scores if name.startswith(kind))) for kind in ("web_search", "memory"))
    of = {name: score for name, (score, _) in scores.items()}
    groups = {
        "non_live": _average(simple, *(of.get(name) for name in ("multiple", "parallel", "parallel_multiple"))),
        "live": sum(score * count for score, count in live) / sum(count for _, count in live) if live else None,
        "irrelevance": _mean(scores, "irrelevance", "live_irrelevance"),
        "multi_turn": _mean(scores, *SEVERAL),
        "agentic": _average(web, memory),
    }
    run = {name: score for name, score in groups.items() if score is not None}
    weight = sum(WEIGHTS[name] for name in run)
    total = sum(WEIGHTS[name] * score for name, score in run.items())
    told = {f"group_{name}": score for name, score in run.items()}
    return told | ({"overall": total / 100, "overall_run": total / weight, "overall_weight": weight / 100} if run else {})


def _mean(scores: dict[str, tuple[float, int]], *names: str) -> float | None:
    return _average(*(scores[name][0] if name in scores else None for name in names))


def _average(*values: float | None) -> float | None:
    """The mean of those there are."""
    given = [value for value in values if value is not None]
    return sum(given) / len(given) if given else None
