"""Context parallelism: one zig-zag split over the whole pack, ring or all-gather attention, gathering over ranks.

The pack of T tokens is cut into 2C chunks; context rank r of C holds chunks r and 2C-1-r, so causal work is balanced.
Documents may have any length and may straddle chunks: every query carries `start`, the pack position where its document
begins, and may see keys `start <= position <= own position`. Only chunk offsets and the own rank's `start` are needed.

Legend: T tokens of the pack, t = T / C local tokens, N query heads, G key/value heads, D head size, C context ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from nb_kernels.attention import attention, attention_backward, attention_forward

from megatron_nb.records import Batch


def chunk_offsets(length: int, size: int, rank: int) -> list[tuple[int, int]]:
    """[(first pack position, tokens)] of the chunks that `rank` holds, in local order."""
    if size == 1:
        return [(0, length)]
    chunk, rest = divmod(length, 2 * size)
    if rest:
        raise ValueError(f"length={length} must be a multiple of 2 * context = {2 * size}: zig-zag gives each rank two chunks")
    return [(rank * chunk, chunk), ((2 * size - 1 - rank) * chunk, chunk)]


def zigzag(length: int, size: int, rank: int) -> torch.Tensor:
    """[T / C] pack positions held by `rank`, in local order."""
    return torch.cat([torch.arange(first, first + tokens) for first, tokens in chunk_offsets(length, size, rank)])


def split(batch: Batch, size: int, rank: int) -> Batch:
    """The part of a whole pack that context `rank` works on. Rank 0 alone carries the count."""
    if size == 1:
        return batch
    assert not batch.shared, "documents that share a prefix are not split over context ranks"
    index = zigzag(batch.pack_length, size, rank).to(batch.ids.device)
    fields = ("ids", "targets", "loss_weight", "index", "start")
    return replace(
        batch,
        **{name: getattr(batch, name)[index] for name in fields},
        streams={name: stream[index] for name, stream in batch.streams.items()},
        count=batch.count if rank == 0 else 0,
    )


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_over(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the group's ranks, differentiable: a rank's part gets the gradients that all ranks have of the sum.

    So a loss that one rank alone contributes reaches the parts of all. Every rank must take part in the backward pass.
    """
    return tensor if group.size() == 1 else _Sum.apply(tensor, group)


def _exchange(tensor: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, list[dist.Work]]:
    """Start sending `tensor` to the next rank of the ring and receiving its twin from the previous one."""
    size, rank = group.size(), group.rank()
    received = torch.empty_like(tensor)
    following, previous = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    operations = [dist.P2POp(dist.isend, tensor, following, group), dist.P2POp(dist.irecv, received, previous, group)]
    return received, dist.batch_isend_irecv(operations)


def _wait(work: list[dist.Work]) -> None:
    for item in work:
        item.wait()


def _chunks(length: int, size: int, rank: int):
    """Yield (slice of the local tokens, first pack position) per chunk of `rank`."""
    begin = 0
    for first, tokens in chunk_offsets(length, size, rank):
        yield slice(begin, begin + tokens), first
        begin += tokens


def _pairs(length: int, size: int, rank: int, source: int):
    """Yield (slice of own queries, first position, slice of the source's keys, first position) that causality permits.

    Document bounds are left to the kernels, which skip by tiles: reading them here would make the host wait for the device.
    """
    for mine, q_first in _chunks(length, size, rank):
        for theirs, k_first in _chunks(length, size, source):
            if k_first < q_first + mine.stop - mine.start:
                yield mine, q_first, theirs, k_first


def _accumulators(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [t, N, D], lse [t, N]) before any key, fp32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.zeros(q.shape, dtype=wide, device=q.device), torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)


class _RingAttention(torch.autograd.Function):
    """Keys and values go round the ring; (out, lse) and the travelling dk, dv stay in fp32, so ring size costs no accuracy."""

    @staticmethod
    def forward(ctx, q, k, v, start, length, group, scale, implementation):
        size, rank = group.size(), group.rank()
        out, lse = _accumulators(q)
        block = torch.stack([k, v])
        for step in range(size):
            work = []
            if step + 1 < size:
                arriving, work = _exchange(block, group)
            for mine, q_first, theirs, k_first in _pairs(length, size, rank, (rank - step) % size):
                attention_forward(
                    q[mine], block[0, theirs], block[1, theirs], out[mine], lse[mine],
                    start=start[mine], q_offset=q_first, k_offset=k_first, scale=scale, implementation=implementation,
                )  # fmt: skip
            if work:
                _wait(work)
                block = arriving
        ctx.save_for_backward(q, k, v, out, lse, start)
        ctx.rest = length, group, scale, implementation
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, start = ctx.saved_tensors
        length, group, scale, implementation = ctx.rest
        size, rank = group.size(), group.rank()
        dout = dout.contiguous()
        delta = (dout.to(out.dtype) * out).sum(-1)
        dq = torch.zeros_like(out)
        block = torch.stack([k, v])
        carried = torch.zeros(block.shape, dtype=out.dtype, device=q.device)
        sending: list[dist.Work] = []
        for step in range(size):
            work = []
            if step + 1 < size:
                arriving, work = _exchange(block, group)
            own = torch.zeros_like(carried)
            for mine, q_first, theirs, k_first in _pairs(length, size, rank, (rank - step) % size):
                attention_backward(
                    dout[mine], q[mine], block[0, theirs], block[1, theirs], lse[mine], delta[mine],
                    dq[mine], own[0, theirs], own[1, theirs],
                    start=start[mine], q_offset=q_first, k_offset=k_first, scale=scale, implementation=implementation,
                )  # fmt: skip
            _wait(sending)  # what the ranks before us found for this block
            own += carried
            carried, sending = _exchange(own, group)
            if work:
                _wait(work)
                block = arriving
        _wait(sending)  # the last hand-over brings every gradient home
        return dq.to(q.dtype), carried[0].to(k.dtype), carried[1].to(v.dtype), None, None, None, None, None


class _GatheredAttention(torch.autograd.Function):
    """Every rank holds all keys and values for the length of the call: one collective, no ring latency."""

    @staticmethod
    def forward(ctx, q, k, v, start, length, group, scale, implementation):
        size, rank = group.size(), group.rank()
        out, lse = _accumulators(q)
        key, value = _GatheredAttention._in_order(k, v, length, group)
        for mine, q_first in _chunks(length, size, rank):
            attention_forward(
                q[mine], key, value, out[mine], lse[mine],
                start=start[mine], q_offset=q_first, k_offset=0, scale=scale, implementation=implementation,
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse, start)
        ctx.rest = length, group, scale, implementation
        return out.to(q.dtype)

    @staticmethod
    def _in_order(k, v, length, group):
        """All ranks' [t, G, D] as [T, G, D] in pack order."""
        block = torch.stack([k, v])
        parts = [torch.empty_like(block) for _ in range(group.size())]
        dist.all_gather(parts, block, group=group)
        whole = torch.empty((2, length, *k.shape[1:]), dtype=k.dtype, device=k.device)
        for source, part in enumerate(parts):
            for theirs, first in _chunks(length, group.size(), source):
                whole[:, first : first + theirs.stop - theirs.start] = part[:, theirs]
        return whole.unbind(0)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, start = ctx.saved_tensors
        length, group, scale, implementation = ctx.rest
        size, rank = group.size(), group.rank()
        dout = dout.contiguous()
        delta = (dout.to(out.dtype) * out).sum(-1)
        key, value = _GatheredAttention._in_order(k, v, length, group)
        dq = torch.zeros_like(out)
        whole = torch.zeros((2, *key.shape), dtype=out.dtype, device=q.device)
        for mine, q_first in _chunks(length, size, rank):
            attention_backward(
                dout[mine], q[mine], key, value, lse[mine], delta[mine], dq[mine], whole[0], whole[1],
                start=start[mine], q_offset=q_first, k_offset=0, scale=scale, implementation=implementation,
            )  # fmt: skip
        dist.all_reduce(whole, group=group)
        dk, dv = whole[:, zigzag(length, size, rank).to(whole.device)]
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None


METHODS = {"ring": _RingAttention, "all_gather": _GatheredAttention}


def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    cu_seqlens: torch.Tensor,
    group: dist.ProcessGroup,
    scale: float,
    method: str = "ring",
    implementation: str = "auto",
) -> torch.Tensor:
    """Causal attention inside each document of a pack that is split over `group`.

    q [t, N, D]; k, v [t, G, D]; start [t] pack position where the query's document begins; cu_seqlens [S + 1] of the
    whole pack; implementation as in nb_kernels.attention. Returns [t, N, D] in q's dtype. Ring attention: arXiv 2310.01889.
    """
    if group.size() == 1:
        return attention(q, k, v, cu_seqlens, scale=scale, implementation=implementation)
    length = q.shape[0] * group.size()
    return METHODS[method].apply(q.contiguous(), k.contiguous(), v.contiguous(), start, length, group, scale, implementation)
