"""One term of a reward: the class its YAML names, its settings checked, its methods called within bounds.

A failure is a verdict too, never a number: an exception, None, NaN or a time-out gives Score(None) with the cause as reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import inspect
import logging
import math
import numbers
import pickle
import time
import typing
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megatron_nb.client import RequestFailed
from megatron_nb.records import Group, Rollout, Score
from megatron_nb.rewards.deadline import Workers
from megatron_nb.schema import ConfigError, build

BUILT_IN = {
    "pointwise": "megatron_nb.rewards.pointwise.Pointwise",
    "pairwise": "megatron_nb.rewards.pairwise.Pairwise",
    "judge": "megatron_nb.rewards.judge.Judge",
    "math": "megatron_nb.rewards.answer.MathAnswer",
    "search_answer": "megatron_nb.rewards.answer_search.SearchAnswer",
    "pass_rate": "megatron_nb.rewards.code.PassRate",
    "gated_complexity": "megatron_nb.rewards.code.GatedComplexity",
    "exact": "megatron_nb.rewards.rules.Exact",
    "regex": "megatron_nb.rewards.rules.Regex",
    "format": "megatron_nb.rewards.rules.Format",
    "length": "megatron_nb.rewards.rules.Length",
    "repetition": "megatron_nb.rewards.rules.Repetition",
    "language": "megatron_nb.rewards.rules.Language",
    "critic": "megatron_nb.rewards.critic.Critic",
}
METHODS = {  # name -> what it is called with
    "score": "(group)",
    "score_rollout": "(prompt, rollout)",
    "score_episode": "(prompt, rows)",
    "score_texts": "(prompt, texts)",
    "score_ids": "(prompt, ids)",
}
GIVEN = ("tokenizer", "device")  # parameters of a constructor that are filled in when the settings do not
SINGLE = ("score_rollout", "score_episode")  # methods that give one verdict
SLOW_S = 10.0  # after which, or after half its time, the log says what is waited for
SHOWN = 8  # rollouts named in a line of the log

log = logging.getLogger(__name__)


# ------------------------------------------------------------------ from the configuration
def find(kind: str, key: str) -> Callable[..., Any]:
    """The class (or function) that `kind` names. ConfigError when there is none."""
    path = BUILT_IN.get(kind, kind)
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigError(f"{key}.kind={kind!r} must be one of {', '.join(BUILT_IN)}, or your own package.module.Class")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        remedy = "its folder must be on PYTHONPATH" if isinstance(error, ImportError) else f"{module} has no {name!r}"
        raise ConfigError(f"{key}.kind={kind!r} cannot be imported ({type(error).__name__}: {error}): {remedy}") from error


def settings_of(target: Callable[..., Any], settings: dict[str, Any], key: str) -> dict[str, Any]:
    """The settings as what the annotations of the constructor (or function) say. ConfigError as for any other key."""
    constructor = target if inspect.isfunction(target) or dataclasses.is_dataclass(target) else target.__init__
    hints = typing.get_type_hints(constructor)
    skipped = 2 if inspect.isfunction(target) else 0
    fields = []
    for parameter in list(inspect.signature(target).parameters.values())[skipped:]:
        if parameter.name in GIVEN and parameter.name not in settings:
            continue
        default = {} if parameter.default is parameter.empty else {"default_factory": lambda value=parameter.default: value}
        fields.append((parameter.name, hints.get(parameter.name, Any), dataclasses.field(**default)))
    schema = dataclasses.make_dataclass(target.__name__, fields, kw_only=True)
    schema.__module__ = target.__module__  # where an error says that a key lives
    checked = build(schema, settings, f"{key}.settings")
    return {name: getattr(checked, name) for name in settings}


def method_of(target: Any, key: str) -> str:
    """The one of METHODS that the class has, "" for a function. ConfigError when it has none or wants other arguments."""
    name = "" if inspect.isfunction(target) else next((name for name in METHODS if hasattr(target, name)), None)
    if name is None:
        wanted = ", ".join(f"{name}{arguments}" for name, arguments in METHODS.items())
        raise ConfigError(f"{key}: {target.__name__} must have one of the methods {wanted}; it has none of them")
    arguments = METHODS[name or "score_rollout"].strip("()").split(", ")
    given = ([] if name == "" else ["self"]) + arguments
    signature = inspect.signature(getattr(target, name) if name else target)
    try:
        signature.bind_partial(*given) if name == "" else signature.bind(*given)
    except TypeError as error:
        what = f"{target.__name__}.{name}" if name else target.__name__
        raise ConfigError(f"{key}: {what}{signature} must take {METHODS[name or 'score_rollout']} ({error})") from error
    return name


class Term:
    """A scorer with its name, its bounds and the way to call it."""

    def __init__(self, name: str, scorer: Any, method: str, timeout_s: float, retries: int, workers: Workers, places: int):
        self.name, self.timeout_s, self.retries, self._workers, self._places = name, timeout_s, retries, workers, places
        self.method = method or "score_rollout"
        self._call = getattr(scorer, method) if method else scorer
        self.scorer = scorer
        function = scorer.func if hasattr(scorer, "func") else self._call  # within a partial
        self._is_async = inspect.iscoroutinefunction(function)
        if not self._is_async:
            try:
                self._pickled = pickle.dumps(self._call)
            except Exception as error:
                raise ConfigError(
                    f"reward.terms.{name}: a plain method runs in worker processes, and {type(scorer).__name__} cannot be sent "
                    f"there ({error}): keep such things out of its attributes, or make the method `async def`"
                ) from error
        self._gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
        self._waiting: dict[str, float] = {}  # whose verdict is waited for -> since when
        self._told = 0.0

    async def scores(self, group: Group, asked: list[Rollout], rows: dict[int, list[Rollout]]) -> list[Score]:
        """A Score for each of `asked`, the last rows of their episodes. What compares the rollouts of a group sees them all.

        rows: by the rollout's index all rows of its episode.
        Raises ValueError when the scorer gives another number of verdicts than it was asked for.
        """
        if self.method in SINGLE:
            whole = self.method == "score_episode"
            calls = (self._verdicts((group.prompt, rows[one.index] if whole else one), [one]) for one in asked)
            return [scores[0] for scores in await asyncio.gather(*calls)]
        if self.method == "score":
            every = await self._verdicts((group,), group.rollouts)
            found = {id(rollout): score for rollout, score in zip(group.rollouts, every)}
            return [found[id(rollout)] for rollout in asked]
        streams = [rollout.text if self.method == "score_texts" else rollout.ids for rollout in asked]
        return await self._verdicts((group.prompt, streams), asked)

    async def _verdicts(self, arguments: tuple, rollouts: list[Rollout]) -> list[Score]:
        try:
            answer = await self._within_bounds(arguments, [rollout.rollout_id for rollout in rollouts])
        except Exception as error:
            cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            return [Score(None, reason=cause) for _ in rollouts]
        if self.method in SINGLE:
            return [as_score(answer)]
        if not isinstance(answer, Sequence) and hasattr(answer, "tolist"):
            answer = answer.tolist()  # of an array or tensor
        is_list = isinstance(answer, Sequence) and not isinstance(answer, str)
        given = len(answer) if is_list else f"a {type(answer).__name__}, not a list of"
        if given != len(rollouts):
            raise ValueError(
                f"reward.terms.{self.name} gave {given} rewards for the {len(rollouts)} rollouts of {rollouts[0].group_id}: "
                "one each is needed"
            )
        return [as_score(value) for value in answer]

    async def _within_bounds(self, arguments: tuple, names: list[str]) -> Any:
        began = time.monotonic()
        self._waiting |= dict.fromkeys(names, began)
        try:
            if not self._is_async:
                return await self._told_of(
                    self._workers.call(self._pickled, self.timeout_s, self.retries, *arguments), None
                )
            gate = self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._places))
            async with gate:
                return await self._tried(arguments)
        finally:
            for name in names:
                self._waiting.pop(name, None)

    async def _tried(self, arguments: tuple) -> Any:
        """The answer of a coroutine; what raises is tried again while attempts and time are left."""
        deadline, attempt = time.monotonic() + self.timeout_s, 0
        while True:
            try:
                return await self._told_of(self._call(*arguments), deadline)
            except (TimeoutError, RequestFailed):  # the second has been tried again by the client
                raise
            except Exception:
                pause = 0.5 * 2**attempt
                if attempt >= self.retries or time.monotonic() + pause >= deadline:
                    raise
            attempt += 1
            await asyncio.sleep(pause)

    async def _told_of(self, work: Awaitable[Any], deadline: float | None) -> Any:
        """The result of `work`, or TimeoutError at the deadline whatever it does; a long wait is logged on the way."""
        task = asyncio.ensure_future(work)
        slow = min(SLOW_S, self.timeout_s / 2)
        try:
            while not task.done():
                left = math.inf if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no answer in {self.timeout_s:g} s")
                await asyncio.wait({task}, timeout=min(slow, left))
                if not task.done():
                    self._tell(slow)
        except BaseException:
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody waits for it any more
            task.cancel()
            raise
        return task.result()

    def _tell(self, slow: float) -> None:
        now = time.monotonic()
        if now - self._told < slow:
            return
        self._told = now
        names = list(self._waiting)
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        longest = now - min(self._waiting.values())
        log.warning("reward.terms.%s: waiting for %s since %.1f s; timeout_s=%g", self.name, shown, longest, self.timeout_s)


def as_score(value: Any) -> Score:
    """What a scorer gave, as a Score; whatever is no finite number becomes None with the cause."""
    if isinstance(value, Score):
        every = [value.reward, *(value.turn_rewards or ())]
        if value.reward is None:
            return value if value.reason else dataclasses.replace(value, reason="it gave None without a reason")
        if bad := [one for one in every if not _is_number(one)]:
            return Score(None, reason=f"it gave {bad[0]!r}, which is no finite number")
        return dataclasses.replace(value, reward=float(value.reward))
    if hasattr(value, "item"):  # of numpy or torch
        value = value.item()
    if _is_number(value):
        return Score(float(value))
    return Score(None, reason="it gave None" if value is None else f"it gave {value!r:.80}, which is no finite number")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def make_term(
    name: str, config: Any, timeout_s: float, retries: int, places: int, workers: Workers, given: dict[str, Any]
) -> Term:
    """The term that a TermConfig describes; `given` holds what GIVEN names. ConfigError for what cannot be."""
    key = f"reward.terms.{name}"
    target = find(config.kind, key)
    settings, method = settings_of(target, config.settings, key), method_of(target, key)
    if inspect.isfunction(target):
        return Term(name, functools.partial(target, **settings), method, timeout_s, retries, workers, places)
    wanted = {one: given[one] for one in GIVEN if one in inspect.signature(target).parameters and one not in settings}
    return Term(name, target(**settings, **wanted), method, timeout_s, retries, workers, places)

