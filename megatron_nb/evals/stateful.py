"""Python objects as a world of tools: calls change its state, and two ways through it end alike or not.

A world is plain data (class names and what they begin with), and playing calls in it begins anew each time: so it can be
done in a worker that is killed at a deadline, and nothing that a model calls hangs or spoils an evaluation. Public methods
of the classes are the tools; public attributes are the state. `_load_scenario(values, **settings)`, where a class has it,
sets the beginning (the form of the package bfcl-eval; a class of your own gives the same).
"""

from __future__ import annotations

import copy
import importlib
import json
import pickle
from dataclasses import dataclass, field
from typing import Any

from megatron_nb.rewards.deadline import WorkerLost, Workers

DEADLINE_S = 20.0  # of all calls of an attempt so far
FAILED = "Error during execution: "


@dataclass(frozen=True)
class Step:
    """One call. places: arguments that are given by their place."""

    name: str
    arguments: dict[str, Any]
    places: tuple[Any, ...] = ()


@dataclass(frozen=True)
class World:
    """Where calls are played."""

    classes: dict[str, str]  # name -> module:Class
    scenario: dict[str, Any] = field(default_factory=dict)  # name -> what its object begins with
    settings: dict[str, Any] = field(default_factory=dict)  # for every _load_scenario


def class_at(place: str) -> type:
    """The class at module:Class. ValueError when it cannot be had."""
    module, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"class {place!r} cannot be had ({error}): install its package, or mend `classes`") from error


def begin(world: World) -> dict[str, Any]:
    """Name -> a new object. Raises as `class_at`."""
    made = {}
    for name, place in world.classes.items():
        made[name] = class_at(place)()
        if hasattr(made[name], "_load_scenario"):
            made[name]._load_scenario(copy.deepcopy(world.scenario.get(name, {})), **world.settings)
    return made


def take(objects: dict[str, Any], step: Step) -> str:
    """Make the call; its result, or what went wrong, as the text that a model is shown."""
    method = None
    if not step.name.startswith("_"):
        method = next((found for one in objects.values() if callable(found := getattr(one, step.name, None))), None)
    if method is None:
        return f"{FAILED}there is no function {step.name!r}"
    try:
        result = method(*copy.deepcopy(step.places), **copy.deepcopy(step.arguments))
    except Exception as error:  # whatever the arguments broke: the model is told
        return f"{FAILED}{error}"
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except (TypeError, ValueError):
            return str(result)
    return result if isinstance(result, str) else str(result)


def play(world: World, steps: list[Step]) -> list[str]:
    """The results of calls made one after the other from the beginning."""
    objects = begin(world)
    return [take(objects, step) for step in steps]


def compare(world: World, made: list[list[Step]], right: list[list[Step]], results: bool = True) -> str:
    """What tells the calls that were made, turn by turn, from the right ones; "" when nothing does.

    After every turn for which there are right calls the states must be equal, some call must have been made, and every result
    of the right calls must be among those had so far. results=False: after every turn the states must be equal, nothing more.
    """
    mine, theirs, had = begin(world), begin(world), []
    for number, (calls, wanted) in enumerate(zip(made, right, strict=True), 1):
        had += [take(mine, step) for step in calls]
        needed = [take(theirs, step) for step in wanted]
        if not wanted and results:
            continue
        if not calls and results:
            return f"turn {number}: nothing is called"
        if wrong := _states_differ(mine, theirs):
            return f"turn {number}: {wrong}"
        if results and (missing := _missing(needed, had)):
            return f"turn {number}: no call has given {missing[0][:200]!r}"
    return ""


def _states_differ(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    for name, other in theirs.items():
        for key, value in vars(other).items():
            if not key.startswith("_") and getattr(mine[name], key, None) != value:
                return f"{key} of {name} is {str(getattr(mine[name], key, None))[:120]}, not {str(value)[:120]}"
    return ""


def _missing(needed: list[str], had: list[str]) -> list[str]:
    """Of the needed texts those that were not had, each as often as it is needed."""
    left, missing = list(had), []
    for text in needed:
        if text in left:
            left.remove(text)
        else:
            missing.append(text)
    return missing


class Stage:
    """Worlds played in worker processes."""

    def __init__(self, workers: int = 2):
        self._workers = Workers(workers)
        self._play, self._compare = pickle.dumps(play), pickle.dumps(compare)

    async def take(self, world: World, before: list[Step], step: Step) -> str:
        """The result of a call after those before it, to which it is added unless it never ends. Raises ValueError."""
        try:
            results = await self._workers.call(self._play, DEADLINE_S, 1, world, [*before, step])
        except (TimeoutError, WorkerLost):
            return f"{FAILED}no result within {DEADLINE_S:g} s"
        before.append(step)
        return results[-1]

    async def compare(self, world: World, made: list[list[Step]], right: list[list[Step]], results: bool = True) -> str:
        """As `compare`; what never ends differs. Raises ValueError."""
        try:
            return await self._workers.call(self._compare, DEADLINE_S, 1, world, made, right, results)
        except (TimeoutError, WorkerLost) as error:
            return f"the calls do not come to an end: {error}"

    def close(self) -> None:
        self._workers.close()
