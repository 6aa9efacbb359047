"""Rollouts by vLLM servers over HTTP, token ids in and out. One rank leads: it samples from all servers and sends weights.

Its requests run on an event loop in a thread of their own, so generation goes on while the ranks train. Servers are started
by tools/serve.sh. No request lives through a weight update: each completion was sampled by the weights of one version. A
server that is restarted gets the weights again (server_care.py).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import aclosing
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_nb.addresses import expanded
from megatron_nb.client import Client, ClientConfig, RequestFailed, RequestRefused
from megatron_nb.model.hf import LiveWeights, WeightSource
from megatron_nb.parallel.topology import Topology
from megatron_nb.rollout.engine import Completion, Request, Stats, Stop
from megatron_nb.rollout.leader import of_leader, raise_on_every_rank
from megatron_nb.rollout.server_care import Care
from megatron_nb.rollout.server_config import ServerConfig, body_of, stream_of
from megatron_nb.rollout.server_probe import PROMPT, TEMPERATURE, apart, probe_answers
from megatron_nb.rollout.server_weights import FRESH, Sender

T = TypeVar("T")
log = logging.getLogger(__name__)
Probe = Callable[[list[int], int, float], list[float]]

PATIENCE = timedelta(hours=12)  # for which ranks wait for what the leader runs
DRAIN_S = 0.5  # for what a paused server still has to say
REST_S = 60.0  # for which a server that failed gets no new streams while others do
HOMES = 100_000  # streams whose server is remembered


class ServerEngine:
    """An Engine (see engine.py) of one replica, however many servers there are; rank 0 leads."""

    def __init__(self, config: ServerConfig, topology: Topology, probe: Probe | None = None):
        """Collective. probe(ids, start, temperature): the trainer's log-probs of ids[start:]; called on every rank."""
        self.config, self.topology, self.probe, self.stats = config, topology, probe, Stats()
        self.version, self.replica, self.replicas, self.leads = -1, 0, 1, topology.rank == 0
        self._world = dist.new_group(backend="gloo", timeout=PATIENCE) if topology.world > 1 else None
        self._broken: str | None = "the engine has no weights yet: call load_weights first"
        self._running: dict[str, asyncio.Task] = {}
        self._homes: OrderedDict[str, int] = OrderedDict()  # stream -> server, which holds its prefix in its cache
        self.urls = expanded(config.urls)
        self._busy, self._rest = [0] * len(self.urls), [0.0] * len(self.urls)
        if not self.leads:
            return
        many = {"timeout_s": config.timeout_s, "retries": config.retries, "concurrency": config.concurrency}
        few = {"timeout_s": config.update_timeout_s, "retries": config.retries, "deadline_s": config.update_timeout_s}
        self.clients = [Client(ClientConfig(url, config.model, **many)) for url in self.urls]
        self.controls = [Client(ClientConfig(url, config.model, **few)) for url in self.urls]  # never behind requests
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()  # whether requests may go out
        self._thread = threading.Thread(target=self._loop.run_forever, name="server-engine", daemon=True)
        self._thread.start()
        self.sender = Sender(
            self.controls, self._begin, transfer=config.transfer, folder=config.folder, backend=config.backend,
            host=config.host, bucket_bytes=config.bucket_mb * 2**20, timeout_s=config.update_timeout_s,
        )  # fmt: skip
        self.care = Care(self.controls, self.sender, config.away_s)

    # ------------------------------------------------------------------ what coroutines call
    async def generate(self, request: Request) -> Completion:
        """Sample one stream. ValueError for a request that can never be served, or whose id is running already.

        RequestFailed (an OSError) when no server answers; RuntimeError when a weight update has failed.
        """
        while True:
            await self._open.wait()
            self._require_whole()
            if request.request_id in self._running:
                raise ValueError(f"request {request.request_id!r} is running already: give every request its own id")
            server, losses, ids, logprobs = self._place(request), self.care.losses, [], []
            version, task = self.version, asyncio.create_task(self._sample(server, request, ids, logprobs))
            self._running[request.request_id] = task
            self._busy[server] += 1
            try:
                await asyncio.wait([task])
            finally:
                self._busy[server] -= 1
                del self._running[request.request_id]
                if not task.done():  # this coroutine was cancelled
                    task.cancel()
            if task.cancelled():
                stop = Stop.ABORT
            elif (error := task.exception()) is None:
                stop = task.result()
            elif isinstance(error, RequestRefused):
                raise ValueError(f"request {request.request_id!r}: {error}") from error
            elif not isinstance(error, RequestFailed):
                raise error
            else:
                self._homes.pop(stream_of(request), None)
                self._rest[server] = self._loop.time() + REST_S
                if not ids:
                    if all(rest > self._loop.time() for rest in self._rest):
                        await self.care.any_returned(error, losses)
                        self._rest = [0.0] * len(self.urls)
                    continue  # another server may do, or this one again
                stop = Stop.ABORT  # what came stands; the caller goes on from there
            self.stats.prefilled += len(request.ids)
            self.stats.decoded += max(len(ids) - 1, 0)
            return Completion(ids, logprobs, [version] * len(ids), stop)

    async def abort(self, request_id: str) -> None:
        """End a running request with Stop.ABORT: hanging up stops the server too. Nothing when it is not running."""
        if request_id in self._running:
            self._running[request_id].cancel()

    async def end_session(self, session: str) -> None:
        """Forget its server, whose cache drops what is not read again by itself."""
        self._homes.pop(session, None)

    def _place(self, request: Request) -> int:
        """The server that has read this stream's beginning; else the least busy one that has not just failed."""
        stream, now = stream_of(request), self._loop.time()
        if stream not in self._homes:
            order = sorted(range(len(self.clients)), key=lambda i: (self._rest[i] > now, self._busy[i]))
            self._homes[stream] = order[0]
        self._homes.move_to_end(stream)
        while len(self._homes) > HOMES:
            self._homes.popitem(last=False)
        return self._homes[stream]

    async def _sample(self, server: int, request: Request, ids: list[int], logprobs: list[float]) -> Stop:
        """Append what is sampled to `ids` and `logprobs` as it comes; nothing stays of what other weights have sampled."""
        body = {**body_of(self.config.model, request), "stream": True}
        events = self.clients[server].stream("/v1/completions", body, lambda: self._holds(server))
        reason = held = None
        try:
            async with aclosing(events) as events:
                async for event in events:
                    held = held or asyncio.create_task(self._holds(server))
                    for choice in event.get("choices", ()):
                        new, values = choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("token_logprobs") or []
                        if len(new) != len(values) or None in values:
                            raise ValueError(f"{self.urls[server]} gave {len(new)} token ids and {len(values)} log-probs")
                        ids += new
                        logprobs += values
                        reason = choice.get("finish_reason") or reason
        finally:
            if held is not None and not await held:
                ids.clear(), logprobs.clear()
        if held is not None and not held.result():
            raise RequestFailed(f"{self.urls[server]} was restarted while it sampled", self.urls[server])
        if reason == "stop":
            return Stop.EOS
        return Stop.LENGTH if reason == "length" else Stop.ABORT

    async def _holds(self, server: int) -> bool:
        """Whether the server holds the weights of self.version; see Care.holds."""
        try:
            return await self.care.holds(server)
        except RuntimeError as error:
            self._broken = str(error)
            raise

    # ------------------------------------------------------------------ running coroutines
    def run(self, main: Callable[[], Awaitable[T]]) -> T | None:
        """Collective. `main()`'s result on the leader, None elsewhere; its exception is raised on every rank."""
        result, error = None, None
        if self.leads:
            future = self._begin(self._guarded(main))
            try:
                result = future.result()
            except Exception as found:
                error = found
            except BaseException:  # the job is told to stop
                future.cancel()
                raise
        raise_on_every_rank(error, self._world)
        return result

    def start(self, main: Callable[[], Awaitable[T]]) -> Future[T] | None:
        """`main()` runs on while the ranks train; its future on the leader, None elsewhere."""
        return self._begin(self._guarded(main)) if self.leads else None

    async def _guarded(self, main: Callable[[], Awaitable[T]]) -> T:
        if self._open.is_set():
            self._require_whole()
            await asyncio.gather(*(self._holds(server) for server in range(len(self.clients))))
        elif self.version < 0:
            self._require_whole()
        return await main()

    def _begin(self, work: Awaitable[T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _require_whole(self) -> None:
        if self._broken is not None:
            raise RuntimeError(self._broken)

    # ------------------------------------------------------------------ weights
    def load_weights(self, source: WeightSource, version: int) -> None:
        """Collective. Running requests end with Stop.ABORT; then all servers take the weights, and are checked.

        A server that is restarted meanwhile is waited for. Raises what failed, on every rank; `generate` refuses from then on,
        until an update succeeds.
        """
        tensors, error = iter(()), None
        try:
            if self.topology.data_rank == self.topology.context_rank == 0:  # the copy of the model that rank 0 is part of
                tensors = _tensors(source)
            if self.leads:
                tensors = self.sender.keep(tensors)
                self._update(tensors, version)
        except Exception as found:
            error = found
        for _ in tensors:  # the ranks of the copy iterate together, to the end
            pass
        if error is not None and self.leads:
            error = self._update_again(error, version)
        try:
            raise_on_every_rank(error, self._world)
            if self.probe is not None and self.config.verify:
                self._verify()
            self.version, self._broken = version, None
            if self.leads:
                self.care.version = version
        finally:
            if self.leads:
                self.care.mends = True
                self._loop.call_soon_threadsafe(self._open.set)  # who waits goes on, or meets the refusal

    def _update(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._begin(self._pause(version)).result()
        self.sender.send(tensors, version)
        self._begin(self._resume()).result()

    def _update_again(self, error: Exception, version: int) -> Exception | None:
        """Where a server went away in the middle: all of it once more, when it is back. What failed, if anything."""
        try:
            if not self._begin(self.care.lost(first=self.version < 0)).result():
                return error
            log.warning("a server went away in the middle of an update (%s): waiting for it", error)
            self._update(self.sender.kept.items(), version)
        except Exception as found:
            return found
        return None

    async def _pause(self, version: int) -> None:
        """Nothing is sampled any more; every running request has ended with what it got so far."""
        self._open.clear()
        self._broken = f"the update to weights of version {version} failed, and what the servers hold is not fit for use"
        await self.care.settled()
        await self.care.all_there()
        await self._post("/pause", params={"mode": "abort"})
        if running := list(self._running.values()):
            _, left = await asyncio.wait(running, timeout=DRAIN_S)
            for task in left:
                task.cancel()
            await asyncio.wait(running)
        self.care.version = FRESH

    async def _resume(self) -> None:
        await self._post("/reset_prefix_cache", read=_was_reset)
        await self._post("/resume")

    async def _post(self, path: str, **settings: Any) -> None:
        await asyncio.gather(*(client.post(path, **settings) for client in self.controls))

    def _verify(self) -> None:
        """RuntimeError when a server's log-probs of what it samples are not the trainer's."""
        answers, error = [], None
        try:
            answers = self._begin(probe_answers(self.controls, self.config.model)).result() if self.leads else []
        except Exception as found:
            error = found
        raise_on_every_rank(error, self._world)
        answers = of_leader(answers, self._world)
        different = dict.fromkeys(tuple(ids) for ids, _ in answers)
        trainer = {ids: self.probe(list(ids), PROMPT, TEMPERATURE) for ids in different}
        raise_on_every_rank(apart(self.urls, answers, trainer, self.config.tolerance), self._world)

    # ------------------------------------------------------------------ the end
    def sleep(self) -> None:
        """Nothing: the servers' memory is not the trainer's."""

    def wake(self) -> None:
        """Nothing, as `sleep`."""

    def close(self) -> None:
        """Collective. End; running requests are abandoned. The servers stay."""
        if not self.leads or self._loop.is_closed():
            return
        self._begin(self._end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.sender.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for client in self.clients + self.controls:
            await client.close()


def _tensors(source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(source.hf_tensors(every_rank=False) if isinstance(source, LiveWeights) else source.hf_tensors())


def _was_reset(answer: Any) -> None:
    if answer and not answer.get("success", True):
        raise ValueError("blocks of the prefix cache are still held")
