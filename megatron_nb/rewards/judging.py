"""The way from rewards and data tools to the judge: a pool in this process, or services that take over from each other.

A broken sandbox, or test, is tried again and then raises: no reward ever sees a verdict `infrastructure`. What has been judged
once (the same program, tests and limits) is not judged again in this process.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import dataclasses
import hashlib
import json
import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from megatron_nb.addresses import expanded
from megatron_nb.client import Client, ClientConfig, RequestFailed, RequestRefused
from megatron_nb.sandbox.execution import Limits
from megatron_nb.sandbox.judge import Judge, Verdict
from megatron_nb.sandbox.pool import Pool
from megatron_nb.sandbox.tests import Program, Test

if TYPE_CHECKING:
    from megatron_nb.sandbox.complexity import Estimate

T = TypeVar("T")
KEPT = 20_000  # answers that are remembered
PAUSE_S, MAX_PAUSE_S = 0.5, 30.0  # a service that failed is left alone: at first, and at most
FULL_S, MAX_FULL_S = 0.2, 5.0  # the same for one whose queue is full

log = logging.getLogger(__name__)


class JudgeFailed(RequestFailed):
    """No verdict, for no fault of the program: sandbox or test is broken (then `verdicts` holds all), or no service answers.

    A RequestFailed, because everything that may help has been tried: a reward's term does not try again on top.
    """

    def __init__(self, message: str, verdicts: list[Verdict] | None = None):
        super().__init__(message)
        self.verdicts = verdicts


@dataclass
class JudgeConfig:
    """Where programs are judged."""

    urls: list[str] = field(default_factory=list)  # judges: http://host:8700, service:judge; none: a pool in this process
    workers: int | None = None  # of that pool; None: one per core
    isolation: Literal["bubblewrap", "none"] = "bubblewrap"  # of that pool; none runs programs with nothing around them
    token_env: str | None = None  # the environment variable that holds the services' token
    attempt_s: float = 300.0  # of one request to a service, its time in the queue included
    retries: int = 4  # rounds over the services after the first, before nothing answers
    patience_s: float = 600.0  # to wait for a place while every queue is full

    def __post_init__(self):
        if self.retries < 0 or self.attempt_s <= 0 or self.patience_s < 0:
            raise ValueError(
                f"retries={self.retries} and patience_s={self.patience_s} must be at least 0, attempt_s={self.attempt_s} above"
            )
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers={self.workers} must be at least 1")


@dataclass
class _Service:
    client: Client
    under_way: int = 0
    failures: int = 0  # in a row
    rest_until: float = 0.0  # on the monotonic clock: it failed, or its queue is full


class CodeJudge:
    """See the head of the file. Usable from one event loop after another; nothing starts before the first question."""

    def __init__(self, config: JudgeConfig):
        self.config = config
        self._services = [
            _Service(Client(ClientConfig(url, api_key_env=config.token_env, timeout_s=config.attempt_s, retries=0)))
            for url in expanded(config.urls)
        ]
        self._judge: Judge | None = None
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Any] = OrderedDict()
        self._asked: dict[tuple[asyncio.AbstractEventLoop, str], _Shared] = {}

    async def verdicts(self, program: Program, tests: list[Test], limits: Limits, broken: bool = False) -> list[Verdict]:
        """One verdict per test, in order; `infrastructure` among them only if `broken` ones are wanted too.

        Raises JudgeFailed, RequestRefused (a service finds the row wrong), IsolationMissing.
        """
        row = judge_row_of(program, tests, limits)

        async def judged() -> list[Verdict]:
            if self._services:
                return await self._served("/judge", row, lambda answer: read_verdicts(answer, len(tests)))
            return _sound(await (await self._opened()).judge(program, tests, limits))

        key = _digest(["judge", row, dataclasses.asdict(limits), bool(self._services)])
        try:
            return copy.deepcopy(await self._once(key, judged))
        except JudgeFailed as error:
            if broken and error.verdicts is not None:
                return error.verdicts
            raise

    async def complexity(self, source: str, function: str, generator: str, reference: str = "") -> Estimate:
        """The empirical class of `function` in `source`; reference: a right solution, whose answers it must give on the way.

        Raises as `verdicts`.
        """
        row = {"program": source, "function": function, "generator": generator, "reference": reference}

        async def measured() -> Estimate:
            if self._services:
                return await self._served("/complexity", {"id": "", **row}, read_estimate)
            from megatron_nb.sandbox.complexity import estimate

            return await estimate((await self._opened()).pool, source, function, generator, reference=reference)

        known = await self._once(_digest(["complexity", row]), measured, lambda found: found.complexity != "unknown")
        return copy.deepcopy(known)

    async def check(self) -> None:
        """Find out now whether anything can be judged. Raises JudgeFailed, RequestRefused, IsolationMissing."""
        probe = f"print(input())  # {random.getrandbits(64)}"  # never judged before
        (verdict,) = await self.verdicts(Program(probe), [Test(stdin="1", stdout="1")], Limits())
        if verdict.verdict != "accepted":
            raise JudgeFailed(f"`print(input())` was judged {verdict.verdict!r} ({verdict.detail}): the sandbox is broken")

    def close(self) -> None:
        """End the pool; that happens at the end of the process anyway."""
        with self._lock:
            judge, self._judge = self._judge, None
        if judge is not None:
            atexit.unregister(self.close)
            judge.close()
            judge.pool.close()

    # ------------------------------------------------------------------ once for each question
    async def _once(
        self, key: str, work: Callable[[], Awaitable[T]], worth: Callable[[T], bool] = lambda result: True
    ) -> T:
        """What `work` gives, from memory when it gave something worth it, together with those who ask the same just now."""
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        place = asyncio.get_running_loop(), key
        if place not in self._asked:
            self._asked[place] = _Shared(asyncio.ensure_future(work()))
            self._asked[place].task.add_done_callback(lambda _: self._asked.pop(place, None))
        result = await self._asked[place].wait()
        if not worth(result):
            return result
        self._known[key] = result
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return result

    async def _opened(self) -> Judge:
        return self._judge or await asyncio.to_thread(self._open)

    def _open(self) -> Judge:
        with self._lock:
            if self._judge is None:
                self._judge = Judge(Pool(self.config.workers, self.config.isolation))
                atexit.register(self.close)
            return self._judge

    # ------------------------------------------------------------------ services
    async def _served(self, path: str, row: dict[str, Any], read: Callable[[Any], T]) -> T:
        """`read` of what one of the services answers. Raises JudgeFailed, and RequestRefused for a row that is wrong."""
        left, pause, began = (self.config.retries + 1) * len(self._services), FULL_S, time.monotonic()
        broke: list[_Service] = []  # gave verdicts of a broken sandbox, or test: each is asked once, a single one twice
        while True:
            now = time.monotonic()
            service = min(self._services, key=lambda one: (one in broke, max(one.rest_until, now), one.under_way))
            service.under_way += 1
            try:
                await asyncio.sleep(max(0.0, service.rest_until - now))
                result = await service.client.post(path, row, read)
                service.failures = 0
                return result
            except RequestRefused:
                raise
            except JudgeFailed:
                broke.append(service)
                if len(broke) >= max(2, len(self._services)):
                    raise
                continue
            except RequestFailed as error:
                failure = error
            finally:
                service.under_way -= 1
            if failure.status == 429:
                if time.monotonic() - began > self.config.patience_s:
                    raise JudgeFailed(f"every queue was full for patience_s={self.config.patience_s:g}: {failure}") from failure
                pause = min(2 * pause, MAX_FULL_S)
                _rest(service, pause)
                continue
            if service.rest_until <= time.monotonic():  # not yet told so by another question
                service.failures += 1
                _rest(service, min(PAUSE_S * 2 ** (service.failures - 1), MAX_PAUSE_S))
                log.warning("judge service failed: %s", failure)
            left -= 1
            if not left:
                urls = ", ".join(self.config.urls)
                raise JudgeFailed(f"none of the judge services {urls} gave a verdict; last: {failure}") from failure


class _Shared:
    """A task that several wait for; it ends when the last of them has gone."""

    def __init__(self, task: asyncio.Future):
        self.task, self.waiting = task, 0
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # it may be that nobody waits any more

    async def wait(self) -> Any:
        self.waiting += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self.waiting -= 1
            if not self.waiting:
                self.task.cancel()


def judge_row_of(program: Program, tests: list[Test], limits: Limits) -> dict[str, Any]:
    """The row that a service judges; bounds other than time and memory are the service's own."""
    return {
        "id": "", "language": program.language, "program": program.source, "tests": [test.row() for test in tests],
        "time_limit_s": limits.time_s, "memory_limit_mb": limits.memory_mb,
        **({"entry": program.entry} if program.entry else {}),
    }  # fmt: skip


def read_verdicts(answer: dict[str, Any], count: int) -> list[Verdict]:
    """The verdicts of a judged row. ValueError for another number of them, JudgeFailed for `infrastructure`."""
    names = {"verdicts": "verdict", "details": "detail", **{name: name for name in ("cpu_s", "wall_s", "peak_memory_mb")}}
    columns = [answer[key] for key in names]
    if any(len(column) != count for column in columns):
        raise ValueError(f"{[len(column) for column in columns]} values for {count} tests")
    return _sound([Verdict(**dict(zip(names.values(), values)), isolation=answer["isolation"]) for values in zip(*columns)])


def read_estimate(answer: dict[str, Any]) -> Estimate:
    """The estimate of a row's complexity."""
    from megatron_nb.sandbox.complexity import Estimate

    return Estimate(answer["class"], answer["confidence"], answer["reason"], [tuple(point) for point in answer["points"]])


def _sound(verdicts: list[Verdict]) -> list[Verdict]:
    broken = [verdict for verdict in verdicts if verdict.verdict == "infrastructure"]
    if broken:
        raise JudgeFailed(f"the judge itself failed in {len(broken)} of {len(verdicts)} tests: {broken[0].detail}", verdicts)
    return verdicts


def _rest(service: _Service, seconds: float) -> None:
    service.rest_until = time.monotonic() + seconds * random.uniform(0.5, 1.0)


def _digest(said: Any) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
