"""What a rollout engine is: token ids in, token ids and their log-probabilities out, by weights of a known version.

Every rank of the job makes the engine and calls `run`, `load_weights`, `sleep`, `wake` and `close` together. One rank of
each replica leads: there `run` runs the coroutine, which calls `generate` as often and as concurrently as it likes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

from megatron_nb.model.hf import WeightSource

T = TypeVar("T")


class Stop(StrEnum):
    """Why a completion ended."""

    EOS = "eos"  # one of `stop_ids` was sampled; it is the last id
    LENGTH = "length"  # max_tokens were sampled
    ABORT = "abort"  # stopped from outside, by `abort` or a weight update: what was sampled so far stands and can go on


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. RL permits temperature alone: the trainer's log-prob knows no truncated support."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self):
        rules = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "at least 0 (0 is greedy)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "at least 0 (0 is all)"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"sampling.{name}={getattr(self, name)!r} must be {rule}")


@dataclass(frozen=True)
class Request:
    """One stream of tokens to be sampled after `ids`. The seed decides the draw, whatever else runs beside it."""

    request_id: str
    ids: list[int]  # all of them, also those that the engine has read before
    sampling: Sampling
    seed: int
    # the stream that it goes on with: what the session's last request left in the cache is not read again as far as `ids`
    # begins alike. One request of a session at a time; `end_session` when the stream is over
    session: str | None = None


@dataclass(frozen=True)
class Completion:
    """What was sampled; ids, logprobs and versions are equally long."""

    ids: list[int]
    logprobs: list[float]  # of the sampled tokens, at the temperature of sampling
    versions: list[int]  # of the weights that sampled each token
    stop: Stop


@dataclass
class Stats:
    """Tokens by what the engine's model did with them, on this replica, since it was made.

    A stream of L ids in one session, however many turns, adds L - 1 to prefilled + decoded (nobody needs what follows its
    last id), plus what was lost and had to be read again, less what other streams had read already. Servers do not say what
    their prefix caches spare them: there every id of a request counts as prefilled.
    """

    prefilled: int = 0  # read as ids of a request
    decoded: int = 0  # read one by one, as they were sampled
    reused: int = 0  # ids of requests that did not have to be read: a session's, or a prefix that others share
    lost: int = 0  # dropped from the cache before their session or request was over: for want of memory, or new weights


class Engine(Protocol):
    """See the head of the file."""

    version: int  # of the weights it samples with; -1 before the first load_weights
    replica: int  # which replica this rank belongs to
    replicas: int
    leads: bool  # whether this rank runs the coroutines of its replica
    stats: Stats

    async def generate(self, request: Request) -> Completion:
        """Sample one stream. ValueError for a request that can never be served. Only within `run` or `start`, on a leader."""

    async def abort(self, request_id: str) -> None:
        """End a running request with Stop.ABORT; nothing when it is not running."""

    async def end_session(self, session: str) -> None:
        """The stream does not go on: free what is kept of it. Nothing when there is none."""

    def run(self, main: Callable[[], Awaitable[T]]) -> T | None:
        """Collective. `main()`'s result on leaders, None elsewhere; an exception on a leader is raised on every rank."""

    def start(self, main: Callable[[], Awaitable[T]]) -> Future[T] | None:
        """Like `run` without waiting: generation goes on while the ranks train. ValueError where the engine cannot."""

    def load_weights(self, source: WeightSource, version: int) -> None:
        """Collective. Take new weights; running requests end with Stop.ABORT first; no cached prefix or session survives."""

    def sleep(self) -> None:
        """Collective. Free the KV cache (and weights, where it can) while the ranks train."""

    def wake(self) -> None:
        """Collective. Undo `sleep`; `load_weights` wakes too."""

    def close(self) -> None:
        """Collective. End."""
