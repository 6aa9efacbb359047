"""What the native engine keeps of a session between its requests: keys and values in core's cache, and the ids they are of.

A request of a session that ends leaves its blocks to the session, the last one partly filled. The next request enters core's
schedule as if that part of its prompt had been read as an earlier chunk: nothing is copied, hashed or read again. What nobody
runs on is given up when running or waiting requests need the memory, least recently used first. Every rank of a replica does
the same in the same order.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from megatron_nb.rollout.engine import Request, Stats
from megatron_nb.rollout.native_attention import RolloutContext

# isort: split
from megatron.core.inference.inference_request import DynamicInferenceRequest


class Ids:
    """The ids of a stream: a list to compare with and a tensor for core, both growing by what is new."""

    def __init__(self):
        self.list: list[int] = []
        self._tensor = torch.empty(1024, dtype=torch.int64)

    def extend(self, new: list[int]) -> None:
        start, stop = len(self.list), len(self.list) + len(new)
        if stop > len(self._tensor):
            grown = torch.empty(max(stop, 2 * len(self._tensor)), dtype=torch.int64)
            grown[:start] = self._tensor[:start]
            self._tensor = grown
        self._tensor[start:stop] = torch.tensor(new, dtype=torch.int64)
        self.list += new

    def cut(self, length: int) -> None:
        del self.list[length:]

    @property
    def tensor(self) -> torch.Tensor:
        return self._tensor[: len(self.list)]


@dataclass
class Kept:
    """Keys and values of ids[:length] that no request of core's runs on."""

    ids: Ids
    length: int
    blocks: torch.Tensor  # [ceil(length / block size)]
    request: DynamicInferenceRequest | None = None  # waits to be scheduled, and will go on with them


def _shared(a: list[int], b: list[int]) -> int:
    """How many ids two streams have in common at their beginning; whole slices compare a hundred times faster than ids."""
    n, stride = min(len(a), len(b)), 4096
    for start in range(0, n, stride):
        stop = min(start + stride, n)
        if a[start:stop] != b[start:stop]:
            return next(i for i in range(start, stop) if a[i] != b[i])
    return n


class SessionContext(RolloutContext):
    """Core's cache and scheduling, in which the blocks of sessions outlive their requests.

    streams: the running requests by core's number (native_sampling.Stream); those of sessions hold their Ids.
    """

    def __init__(self, model_config, inference_config, stats: Stats):
        self.stats, self.streams = stats, {}
        self.kept: OrderedDict[str, Kept] = OrderedDict()  # by session, least recently used first
        self._driven_out = False  # whether what is released belongs to requests that core interrupts
        super().__init__(model_config, inference_config)

    # ------------------------------------------------------------------ between requests
    def known(self, request: Request) -> int:
        """How many leading ids of a session's request need not be read; at least its last one must."""
        kept = self.kept.get(request.session)
        if kept is None:
            return 0
        n = min(_shared(kept.ids.list, request.ids), len(request.ids) - 1)
        block, inside = divmod(n, self.block_size_tokens)
        if inside and self.enable_prefix_caching and self.kv_block_allocator.block_hashes[kept.blocks[block]] != -1:
            n -= inside  # others may read this block by its hash: it is not written to
        return n

    def reopen(self, session: str, known: int) -> Ids:
        """The session's ids, cut to the `known` first, to be extended by those of its next request."""
        if not known:
            self.end(session)
            return Ids()
        kept = self.kept[session]
        self.kept.move_to_end(session)
        used = -(-known // self.block_size_tokens)
        self.kv_block_allocator.release_memory_blocks(kept.blocks[used:])
        kept.blocks, kept.length = kept.blocks[:used], known
        kept.ids.cut(known)
        return kept.ids

    def wait(self, session: str, request: DynamicInferenceRequest) -> None:
        """The request will go on with what is kept, if that is still there when its turn comes."""
        kept = self.kept[session]
        kept.request, request.finished_chunk_token_count = request, kept.length
        request.remaining_prompt_tokens = request.prompt_tokens[kept.length :]

    def give_up(self, number: int) -> None:
        """A request is gone before it was scheduled: what was kept for it stays kept."""
        for kept in self.kept.values():
            if kept.request is not None and kept.request.request_id == number:
                kept.request = None
                kept.ids.cut(kept.length)

    def end(self, session: str) -> None:
        """Free what is kept of a session, and keep nothing of what it runs."""
        for stream in self.streams.values():
            if stream.request.session == session:
                stream.ids_kept = None
        if session in self.kept:
            self._free(session)

    # ------------------------------------------------------------------ memory
    def _free(self, session: str) -> int:
        """Free what is kept of a session; a request that waits with it will be read from its beginning. Ids that it held."""
        kept = self.kept.pop(session)
        self.kv_block_allocator.release_memory_blocks(kept.blocks)
        if (request := kept.request) is not None:
            request.finished_chunk_token_count, request.remaining_prompt_tokens = 0, request.prompt_tokens
            if self.enable_prefix_caching:
                request._compute_block_hashes()
        return kept.length

    def _drop(self, but: DynamicInferenceRequest | None = None) -> bool:
        """Free what the least recently used session keeps, except for one request; False when there is none."""
        for session, kept in self.kept.items():
            if but is None or kept.request is not but:
                self.stats.lost += self._free(session)
                return True
        return False

    def check_availability(self, req):
        found = super().check_availability(req)
        # without memory for it nothing is gained by making room while its place is taken
        while not found[2] and (found[0] or self.chunked_prefill_request_id == req.request_id) and self._drop(but=req):
            found = super().check_availability(req)
        return found

    def resume_paused_requests(self, active_request_count, newly_paused_request_ids):
        # core takes new blocks for running requests from what is free at once: not from cached prefixes, not from sessions
        allocator, wanted = self.kv_block_allocator, self.paused_request_count
        while allocator.total_avail < wanted:
            cached = int(allocator.get_evictable_block_count()) if self.enable_prefix_caching else 0
            if cached:
                allocator.evict_lru_blocks(min(wanted - allocator.total_avail, cached))
            elif not self._drop():
                break
        return super().resume_paused_requests(active_request_count, newly_paused_request_ids)

    # ------------------------------------------------------------------ core's schedule
    def add_request(self, req, prefill_chunk_length=None):
        for session, kept in self.kept.items():
            if kept.request is req:
                del self.kept[session]
                self.request_to_kv_block_ids[self.total_request_count, : len(kept.blocks)] = kept.blocks
                self.stats.reused += kept.length
                break
        before, skipped = self.active_token_count, self.prefix_cache_prefill_skipped_tokens
        super().add_request(req, prefill_chunk_length)
        self.stats.prefilled += self.active_token_count - before
        self.stats.reused += self.prefix_cache_prefill_skipped_tokens - skipped

    def initialize_attention_state(self, *, construct_graph_dimensions=None, **options):
        if construct_graph_dimensions is None:
            self.stats.decoded += self.num_decode_requests
        return super().initialize_attention_state(construct_graph_dimensions=construct_graph_dimensions, **options)

    def evict_overflow_paused_requests(self, *args):
        self._driven_out = True
        try:
            return super().evict_overflow_paused_requests(*args)
        finally:
            self._driven_out = False

    def release_memory_blocks_from_request_indexes(self, request_indexes):
        for row in request_indexes.tolist():
            length = int(self.request_kv_length_offsets[row] + self.request_query_lengths[row])
            if self._driven_out:
                self.stats.lost += length
            else:
                self._keep(self.streams[int(self.request_ids[row])], self.request_to_kv_block_ids[row], length)
        super().release_memory_blocks_from_request_indexes(request_indexes)

    def _keep(self, stream, row: torch.Tensor, length: int) -> None:
        """Take the blocks of a request's first `length` ids out of its row, for its session."""
        ids, session = stream.ids_kept, stream.request.session
        if ids is None:
            return
        ids.extend(stream.ids)
        ids.cut(length)
        used = -(-length // self.block_size_tokens)
        assert session not in self.kept, f"two requests of session {session!r} ran at once"
        self.kept[session] = Kept(ids, length, row[:used].clone())
        row[:used] = -1

    # ------------------------------------------------------------------ the end of everything
    def _forget(self) -> None:
        self.stats.lost += sum(kept.length for kept in self.kept.values())
        self.kept.clear()

    def reset(self, *args, **options):
        self._forget()
        super().reset(*args, **options)

    def deallocate_inference_state_buffers(self):
        self._forget()
        super().deallocate_inference_state_buffers()
