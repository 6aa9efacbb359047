"""The trainer's side of a weight update: whole tensors, in buckets, from one rank to all servers at once.

`Sender` speaks vLLM's weight-transfer routes (init, start, update, finish), whose other side is rollout/vllm_worker.py. Two
ways: `files`, a folder of safetensors on a disk that both sides see, and `group`, a process group over TCP (gloo or NCCL).
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file

from megatron_nb.addresses import url_of
from megatron_nb.client import Client
from megatron_nb.rollout.weight_link import Link, Named, buckets, checksum, describe, flat

T = TypeVar("T")
FRESH = -1  # version of a server that has not been given weights
log = logging.getLogger(__name__)


class Sender:
    """Sends from one thread; its requests run on the engine's loop through `begin`."""

    def __init__(
        self, clients: list[Client], begin: Callable[[Awaitable[T]], Future[T]], *, transfer: str, folder: Path | None,
        backend: str, host: str | None, bucket_bytes: int, timeout_s: float,
    ):  # fmt: skip
        self.clients, self.begin, self.transfer, self.folder = clients, begin, transfer, folder
        self.backend, self.host, self.bucket_bytes, self.timeout_s = backend, host, bucket_bytes, timeout_s
        self.link: Link | None = None
        self.kept: dict[str, torch.Tensor] = {}  # a copy of what was sent last, for a server that is restarted

    def keep(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """These tensors, copied into this host's memory on the way."""
        self.kept = {}
        for name, tensor in tensors:
            self.kept[name] = torch.empty_like(tensor, device="cpu").copy_(tensor.detach())
            yield name, tensor

    def send_again(self, server: int, version: int) -> None:
        """What was sent last, to one server. Raises as `send`."""
        one = Sender(
            [self.clients[server]], self.begin, transfer=self.transfer, folder=self.folder, backend=self.backend,
            host=self.host, bucket_bytes=self.bucket_bytes, timeout_s=self.timeout_s,
        )  # fmt: skip
        try:
            one.send(self.kept.items(), version)
        finally:
            one.close()
            self.close()  # the server that died was a member

    def send(self, tensors: Iterable[Named], version: int) -> None:
        """All tensors, to all servers, checked on every worker.

        Afterwards the servers are paused still. RuntimeError when a worker holds something else than what was sent; errors
        of the client, and those of the link, pass through.
        """
        stream = buckets(tensors, self.bucket_bytes)
        try:
            states = self._all("/collective_rpc", {"method": "nb_forget"}, read=lambda answer: answer["results"])
            self._check(states)
            if any(state["version"] == FRESH for workers in states for state in workers):
                self.close()  # one was restarted, and is no member of the group any more
            sent = self._by_files(stream, version) if self.transfer == "files" else self._by_group(stream, version, states)
            self._all("/finish_weight_update", {})
        except BaseException:
            self.close()  # a member that waits in it must not meet the next update
            raise
        self._compare(sent, version)

    def close(self) -> None:
        """Leave the process group; the next `send` makes another."""
        if self.link is not None:
            self.link.close()
            self.link = None

    # ------------------------------------------------------------------ the two ways
    def _by_files(self, stream: Iterable[list[Named]], version: int) -> tuple[int, int]:
        """A folder that appears when it is complete; then the servers read it, a file at a time. The last one goes."""
        name = f"weights-v{version}"
        hidden, folder = self.folder / f".{name}.partial", self.folder / name
        for old in (hidden, folder):
            shutil.rmtree(old, ignore_errors=True)
        hidden.mkdir(parents=True)
        total, places = 0, {}
        for number, bucket in enumerate(stream):
            file = f"model-{number:05d}.safetensors"
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in bucket}, hidden / file)
            total += checksum(bucket)
            places |= dict.fromkeys((key for key, _ in bucket), file)
        (hidden / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        hidden.rename(folder)
        self._all("/start_weight_update", {})
        for file in sorted(set(places.values())):
            self._all("/update_weights", {"update_info": {"version": version, "file": str(folder.resolve() / file)}})
        for old in self.folder.glob("weights-v*"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)
        return total, len(places)

    def _by_group(self, stream: Iterable[list[Named]], version: int, states: list[list]) -> tuple[int, int]:
        if self.link is None:
            self._join([len(workers) for workers in states])
        self._all("/start_weight_update", {})
        total = count = 0
        for bucket in stream:
            total += checksum(bucket)
            count += len(bucket)
            info = {"version": version, "tensors": describe(bucket)}
            answers = self._begin("/update_weights", {"update_info": info})
            whole = flat(bucket, self.link.device)
            _together(answers, partial(self.link.broadcast, whole, partial(_failed, answers)))
        return total, count

    def _join(self, workers: list[int]) -> None:
        """One group: this process is rank 0, then the workers of each server in turn."""
        world = 1 + sum(workers)
        host = self.host or _own_address(url_of(self.clients[0].config.base_url))
        store, join = Link.opened(host, world, self.backend, self.timeout_s)
        info = {"host": host, "port": store.port, "world": world, "backend": self.backend, "timeout_s": self.timeout_s}
        bodies = [{"init_info": {**info, "first_rank": 1 + sum(workers[:i])}} for i in range(len(workers))]
        answers = self._begin("/init_weight_transfer_engine", *bodies)
        self.link = _together(answers, join)
        log.info("weights travel over %s from %s:%d to %d workers", self.backend, host, store.port, world - 1)

    # ------------------------------------------------------------------ requests
    def _begin(self, path: str, *bodies: Any, read: Callable[[Any], Any] = lambda answer: answer) -> Future[list[Any]]:
        """The same request to every server at once (or one body each). Never tried again: an update is not repeatable."""
        each = bodies if len(bodies) == len(self.clients) else bodies * len(self.clients)

        async def ask() -> list[Any]:
            once = {"timeout_s": self.timeout_s, "retries": 0}
            return await asyncio.gather(*(one.post(path, body, read, **once) for one, body in zip(self.clients, each)))

        return self.begin(ask())

    def _all(self, path: str, body: Any, **settings: Any) -> list[Any]:
        return self._begin(path, body, **settings).result()

    def _check(self, states: list[list[dict]]) -> None:
        for client, workers in zip(self.clients, states):
            modes = {state["logprobs_mode"] for state in workers}
            if modes != {"processed_logprobs"}:
                raise ValueError(
                    f"{client.config.base_url} has logprobs_mode={', '.join(modes)}, whose log-probs are not those of the "
                    "sampling temperature: start it with --logprobs-mode processed_logprobs, as tools/serve.sh does"
                )

    def _compare(self, sent: tuple[int, int], version: int) -> None:
        states = self._all("/collective_rpc", {"method": "nb_state"}, read=lambda answer: answer["results"])
        for client, workers in zip(self.clients, states):
            for rank, state in enumerate(workers):
                held = (state["checksum"], state["tensors"], state["version"])
                if held != (*sent, version):
                    raise RuntimeError(
                        f"{client.config.base_url}, worker {rank}: (checksum, tensors, version) = {held} after an update that "
                        f"sent {(*sent, version)}: the weights were not taken whole; see the server's log"
                    )


def _failed(answers: Future) -> bool:
    return answers.done() and answers.exception() is not None


def _together[T](answers: Future, act: Callable[[], T]) -> T:
    """`act()`, in which the servers take part while they work on `answers`; their error, when they met one, goes first."""
    try:
        result = act()
    except Exception:
        if _failed(answers):
            raise answers.exception() from None
        raise
    answers.result()
    return result


def _own_address(url: str) -> str:
    """The address under which the host of `url` reaches this one."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((parts.hostname, parts.port or 80))
        return probe.getsockname()[0]
