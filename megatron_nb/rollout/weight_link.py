"""How weights travel from a trainer to the workers of servers: buckets of bytes, in a file or over a process group.

Both ends import this file, the servers' in an environment of their own: torch and the standard library only, Python >= 3.10.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

ALIGN = 16  # bytes; every dtype can be viewed at such an offset
LOOK_S = 0.002
CLOSE_S = 5.0

Named = tuple[str, torch.Tensor]


def buckets(tensors: Iterable[Named], limit: int) -> Iterator[list[Named]]:
    """Tensors in their order, in lists of at most `limit` bytes; a larger one is alone."""
    held: list[Named] = []
    size = 0
    for name, tensor in tensors:
        if held and size + _room(tensor) > limit:
            yield held
            held, size = [], 0
        held.append((name, tensor))
        size += _room(tensor)
    if held:
        yield held


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN


def describe(bucket: list[Named]) -> list[list]:
    """[name, dtype, shape] of each tensor, as JSON values."""
    return [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in bucket]


def flat(bucket: list[Named], device: torch.device) -> torch.Tensor:
    """The bucket as one [bytes] uint8 tensor."""
    whole = torch.zeros(sum(_room(tensor) for _, tensor in bucket), dtype=torch.uint8, device=device)
    offset = 0
    for _, tensor in bucket:
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        whole[offset : offset + raw.numel()].copy_(raw)
        offset += _room(tensor)
    return whole


def unflat(whole: torch.Tensor, description: list[list]) -> list[Named]:
    """The inverse of `flat`, as views."""
    bucket, offset = [], 0
    for name, dtype, shape in description:
        kind = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        bucket.append((name, whole[offset : offset + size].view(kind).view(shape)))
        offset += -(-size // ALIGN) * ALIGN
    return bucket


def flat_bytes(description: list[list]) -> int:
    """The length of the flat form."""
    sizes = (torch.Size(shape).numel() * getattr(torch, dtype).itemsize for _, dtype, shape in description)
    return sum(-(-size // ALIGN) * ALIGN for size in sizes)


def checksum(bucket: Iterable[Named]) -> int:
    """A number that changes with any value: the sum of all bit patterns, read as integers."""
    total = 0
    for _, tensor in bucket:
        width = {2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.uint8)
        total += int(tensor.detach().contiguous().view(-1).view(width).sum(dtype=torch.int64))
    return total


class Link:
    """A process group of one trainer (rank 0) and the workers of servers, beside whatever groups either has."""

    def __init__(self, store: dist.TCPStore, rank: int, world: int, backend: str, timeout_s: float):
        """Blocks until all have joined; raises RuntimeError after timeout_s."""
        self.store, self.backend, self.timeout_s = store, backend, timeout_s
        timeout = timedelta(seconds=timeout_s)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.group = dist.ProcessGroupNCCL(store, rank, world, options)
            self.device = torch.device("cuda", torch.cuda.current_device())
        else:
            self.group = dist.ProcessGroupGloo(store, rank, world, timeout)
            self.device = torch.device("cpu")
        options = dist.BarrierOptions()
        if self.device.type == "cuda":  # else NCCL takes rank modulo devices, which is not where this process works
            options.device_ids = [self.device.index]
        self.group.barrier(options).wait()  # the connections stand

    @classmethod
    def opened(cls, host: str, world: int, backend: str, timeout_s: float) -> tuple[dist.TCPStore, Callable[[], Link]]:
        """On the trainer: a store that the others can join at store.port, and what then makes the link."""
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        return store, lambda: cls(store, 0, world, backend, timeout_s)

    @classmethod
    def joined(cls, host: str, port: int, rank: int, world: int, backend: str, timeout_s: float) -> Link:
        """On a worker."""
        return cls(dist.TCPStore(host, port, timeout=timedelta(seconds=timeout_s)), rank, world, backend, timeout_s)

    def broadcast(self, whole: torch.Tensor, given_up: Callable[[], bool] = lambda: False) -> None:
        """Rank 0's bytes on all ranks. TimeoutError when they do not come; RuntimeError once `given_up()` says so."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        work = self.group.broadcast([whole], options)
        end = time.monotonic() + self.timeout_s
        while not work.is_completed():
            if given_up():
                raise RuntimeError("another member of the link has failed")
            if time.monotonic() > end:
                raise TimeoutError(f"the other members of the link did not take part within {self.timeout_s:g} s")
            time.sleep(LOOK_S)
        work.wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Drop the group. Gloo's goes only when what was begun in it has timed out, so nobody waits long for that.

        A little, though: a thread that is still at it while Python ends takes the process down with it.
        """
        held = [self.group]
        self.group = None
        dropping = threading.Thread(target=held.clear, daemon=True)
        dropping.start()
        dropping.join(CLOSE_S)
