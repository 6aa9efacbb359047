"""Rollouts by megatron-core's dynamic engine in the training processes: continuous batching over a paged cache.

The engine's model has its own process groups: `tensor` neighbouring ranks are a replica, whatever the trainer's layout.
The first rank of a replica leads: its asyncio loop runs the caller's coroutine and, between its turns, the steps. Before each
step it tells the other ranks of its replica what came in, so that all of them schedule alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch

from megatron_nb.model.hf import WeightSource
from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel.topology import ON_CPU, Topology
from megatron_nb.rollout.engine import Completion, Request, Stats, Stop
from megatron_nb.rollout.leader import portable
from megatron_nb.rollout.native_config import NativeConfig, cache_blocks, check, check_request, inference_config
from megatron_nb.rollout.native_cpu import CpuWrapper, fits
from megatron_nb.rollout.native_sampling import Sampler, Stream
from megatron_nb.rollout.native_sessions import SessionContext
from megatron_nb.rollout.native_weights import WeightSync, build_rollout, rollout_groups

# isort: split
import torch.distributed as dist
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron.core.inference.inference_request import DynamicInferenceRequest, Status
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

T = TypeVar("T")
News = tuple[list[tuple[Request, int]], list[str], list[str]]  # requests and how much of each is known, ended sessions, aborts
log = logging.getLogger(__name__)
HEARTBEAT_S = 60.0  # an idle leader speaks this often, so that no rank of its replica waits into a time-out
PATIENCE = timedelta(hours=12)  # for which a replica that is done waits for the others; a dead one shows at once


class NativeEngine:
    """An Engine (see engine.py). Colocated: it samples while the trainer stands still."""

    def __init__(self, config: NativeConfig, model: ModelConfig, topology: Topology):
        """Collective. ValueError when the layout or the budget cannot be."""
        padded_vocab = model.padded_vocab(topology.tensor_size)
        check(config, model, topology.world, padded_vocab)
        self.config, self.model, self.topology, self.version = config, model, topology, -1
        self.replica, self.replicas = topology.rank // config.tensor, topology.world // config.tensor
        self.leads = topology.rank % config.tensor == 0
        self.longest = config.max_sequence_length or model.max_position_embeddings
        self.blocks = cache_blocks(config, model)
        groups = rollout_groups(topology.world, config.tensor)
        self._world = dist.new_group(backend="gloo", timeout=PATIENCE)
        commands = [
            dist.new_group(range(first, first + config.tensor), backend="gloo", timeout=PATIENCE)
            for first in range(0, topology.world, config.tensor)
        ]
        self._commands = commands[self.replica]
        module = build_rollout(model, config.tensor, padded_vocab, groups, config.cuda_graphs)
        self._take = WeightSync(module, self._world)
        self.stats = Stats()
        context = SessionContext(module.config, inference_config(config, model, self.longest, groups), self.stats)
        context.kernels = model.kernels
        wrapped = (CpuWrapper if fits(model, config.tensor) else GPTInferenceWrapper)(module, context)
        wrapped.prep_model_for_inference()
        self._packs = wrapped if isinstance(wrapped, CpuWrapper) else None
        self.sampler = Sampler(wrapped, model.vocab_size, groups.tp)
        context.streams = self.sampler.streams
        self.core = DynamicInferenceEngine(self.sampler, context)
        InferenceMode.unset_active()
        self._loop = self.core._loop = asyncio.new_event_loop()
        self._numbers = 0  # of requests ever run by this replica
        self._main: asyncio.Task | None = None
        self._new: list[tuple[Request, asyncio.Future]] = []
        self._ended: list[str] = []  # sessions
        self._aborts: list[str] = []
        self._waiting: dict[str, asyncio.Future] = {}  # completions that coroutines on this leader wait for
        self._wake_up = asyncio.Event()

    # ------------------------------------------------------------------ what coroutines call
    async def generate(self, request: Request) -> Completion:
        """Sample one stream. ValueError for a request that can never be served, or whose id is running already."""
        if self._main is None:
            raise ValueError("generate must be awaited within run(main), on a rank that leads a replica")
        check_request(request, self.config, self.longest, self.blocks)
        if request.request_id in self._waiting:
            raise ValueError(f"request {request.request_id!r} is running already: give every request its own id")
        future = self._waiting[request.request_id] = self._loop.create_future()
        self._new.append((request, future))
        self._wake_up.set()
        try:
            return await future
        finally:
            del self._waiting[request.request_id]
            if future.cancelled():
                await self.abort(request.request_id)

    async def abort(self, request_id: str) -> None:
        """End a running request with Stop.ABORT; nothing when it is not running."""
        self._aborts.append(request_id)
        self._wake_up.set()

    async def end_session(self, session: str) -> None:
        """The stream does not go on: free what is kept of it. Nothing when there is none."""
        self._ended.append(session)
        self._wake_up.set()

    # ------------------------------------------------------------------ the loop
    def run(self, main: Callable[[], Awaitable[T]]) -> T | None:
        """Collective. `main()`'s result on leaders, None elsewhere; an exception on a leader is raised on every rank."""
        if self.version < 0:
            raise ValueError("the engine has no weights yet: call load_weights first")
        self.wake()
        if self._packs:
            self._packs.pack()
        InferenceMode.set_active()
        result, error = None, None
        try:
            if self.leads:
                result, error = self._loop.run_until_complete(self._lead(main))
            else:
                self._follow()
        except FloatingPointError as found:  # on every rank of the replica alike; the others shall hear of it
            error = found
        finally:
            InferenceMode.unset_active()
            self._drop_requests()
        errors: list = [None] * self.topology.world
        dist.all_gather_object(errors, portable(error), group=self._world)
        if error is not None:
            raise error
        for rank, other in enumerate(errors):
            if other is not None:
                other.add_note(f"raised on rank {rank}, which leads a replica")
                raise other
        return result

    async def _lead(self, main: Callable[[], Awaitable[T]]) -> tuple[T | None, BaseException | None]:
        self._wake_up.clear()
        self._main = task = asyncio.ensure_future(main())
        task.add_done_callback(lambda _: self._wake_up.set())
        try:
            while True:
                for _ in range(3):  # what a completion sets off may be a new request
                    await asyncio.sleep(0)
                if not (task.done() or self._new or self._ended or self._aborts or self.core.has_unfinished_requests()):
                    self._wake_up.clear()
                    try:
                        await asyncio.wait_for(self._wake_up.wait(), HEARTBEAT_S)
                    except TimeoutError:
                        self._tell(([], [], []))
                    continue
                if task.done():
                    break
                news = self._news()
                self._tell(news)
                await self._step(*news)
        finally:
            self._main = None
            left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for other in left:
                other.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if self._ended:
            news: News = [], self._ended, []
            self._tell(news)
            await self._step(*news)
        self._tell(None)
        error = asyncio.CancelledError("main was cancelled") if task.cancelled() else task.exception()
        return (None, error) if error is not None else (task.result(), None)

    def _follow(self) -> None:
        while (news := self._tell(None)) is not None:
            self._loop.run_until_complete(self._step(*news))

    def _tell(self, news: Any) -> Any:
        """The leader's news on every rank of its replica."""
        if self.config.tensor == 1:
            return news
        message = [news]
        dist.broadcast_object_list(message, group=self._commands, group_src=0)
        return message[0]

    def _news(self) -> News:
        """What has come in. Of a session's request only those ids go to the other ranks that they do not hold."""
        ended, aborts, later = self._ended, self._aborts, []
        new: list[tuple[Request, int]] = []
        running = {stream.request.session for stream in self.sampler.streams.values()} - {None}
        for request, future in self._new:
            session = request.session
            if future.done():
                continue
            if session in running and request.request_id in aborts:
                future.set_result(Completion([], [], [], Stop.ABORT))
            elif session in running:  # the session's last request, which was aborted, still takes one more step
                later.append((request, future))
            else:
                known = 0 if session is None or session in ended else self.core.context.known(request)
                rest = request.ids[known:]
                if wrong := [i for i in rest if not 0 <= i < self.model.vocab_size]:
                    name, size = request.request_id, self.model.vocab_size
                    future.set_exception(ValueError(f"request {name!r} holds id {wrong[0]}, outside the vocabulary of {size}"))
                    continue
                running |= {session} - {None}
                new.append((replace(request, ids=rest), known))
        self._new, self._ended, self._aborts = later, [], []
        return new, ended, aborts

    async def _step(self, new: list[tuple[Request, int]], ended: list[str], aborts: list[str]) -> None:
        """Take in requests, sample one token of each running one, hand out what has ended; alike on every rank."""
        for session in ended:
            self.core.context.end(session)
        for request, known in new:
            self._admit(request, known)
        for request_id in aborts:
            self._end(request_id)
        if self.core.has_unfinished_requests():
            result = await self.core.async_step()
            for record in result["finished_request_records"]:
                del self.sampler.streams[record.request_id]
        for stream in self.sampler.ended:
            waiting = self._waiting.get(stream.request.request_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(stream.completion())
        self.sampler.ended.clear()

    def _admit(self, request: Request, known: int) -> None:
        """known: ids of the session that come before request.ids and need not be read."""
        number, self._numbers = self._numbers, self._numbers + 1
        ids, prompt = None, torch.tensor(request.ids)
        if request.session is not None:
            ids = self.core.context.reopen(request.session, known)
            ids.extend(request.ids)
            prompt = ids.tensor
        inner = DynamicInferenceRequest(
            request_id=number,
            prompt="",
            prompt_tokens=prompt,
            sampling_params=SamplingParams(
                num_tokens_to_generate=request.sampling.max_tokens, termination_id=-1, skip_prompt_log_probs=True
            ),
            block_size_tokens=self.config.block_size,
            enable_prefix_caching=self.config.prefix_caching and not known,
        )
        if known:
            self.core.context.wait(request.session, inner)
        self.sampler.streams[number] = Stream(request, len(prompt), ids)
        self.core._add_request(inner)
        assert inner.status is not Status.FAILED, f"core refused request {request.request_id!r}, which check_request let pass"

    def _end(self, request_id: str) -> None:
        for number, stream in list(self.sampler.streams.items()):
            if stream.request.request_id == request_id and stream.stop is None:
                stream.stop = Stop.ABORT
                self.sampler.ended.append(stream)
                if number in self.core.waiting_request_ids and number != self.core.context.chunked_prefill_request_id:
                    self.core.waiting_request_ids.remove(number)
                    self.core.context.give_up(number)
                    del self.core.requests[number], self.sampler.streams[number]

    def _drop_requests(self) -> None:
        """Forget all requests; cached prefixes and sessions stay, as the weights do, unless requests were still running."""
        self._new, self._ended, self._aborts = [], [], []
        if self.core.has_unfinished_requests():
            self.core.reset()
        self.sampler.streams.clear()
        self.sampler.ended.clear()

    def start(self, main: Callable[[], Awaitable[T]]) -> Future[T] | None:
        """ValueError: ranks that train cannot sample at the same time."""
        raise ValueError("the native engine shares its ranks with the trainer and cannot run beside it: use engine=server")

    # ------------------------------------------------------------------ weights and memory
    def load_weights(self, source: WeightSource, version: int) -> None:
        """Collective. Take the weights of source.modules; no cached prefix or session survives. Wakes."""
        self._drop_requests()
        if self._packs:
            self._packs.drop()
        self._take(source.modules)
        if self.core.context.is_tensor_state_allocated:
            self.core.reset()  # forgets every cached block
        self.wake()
        self.version = self.sampler.version = version

    def sleep(self) -> None:
        """Collective. Free the cache and the packed copy of the weights; the weights stay."""
        self._drop_requests()
        if self._packs:
            self._packs.drop()
        self.core.context.deallocate_inference_state_buffers()
        if self.config.cuda_graphs:
            delete_cuda_graphs()
        if not ON_CPU:
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Collective. Undo `sleep`."""
        if not self.core.context.is_tensor_state_allocated:
            self.core.context.reinitialize_inference_state_buffers()
            self.core.reset()
            if self.config.cuda_graphs:
                self.core.create_cuda_graphs()

    def close(self) -> None:
        """Collective. End."""
        self.sleep()
        self._loop.run_until_complete(asyncio.sleep(0))  # core schedules notices that nobody waits for
        self._loop.close()
