"""A deterministic engine without a model: ids from a hash of the prefix, the seed and the weights' version.

It keeps the protocol of rollout/engine.py: concurrent requests take delays, `load_weights` ends running ones with
Stop.ABORT, `start` generates in a thread while the caller goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading

from megatron_nb.rollout.engine import Completion, Request, Stop

EOS = 1


class FakeEngine:
    """delay: seconds a token takes. hangs: request ids (their beginnings) that never end. on_generate: called first."""

    def __init__(self, delay=0.0, replica=0, replicas=1, leads=True, hangs=(), on_generate=lambda request: None, version=0):
        self.version, self.replica, self.replicas, self.leads = version, replica, replicas, leads
        self.delay, self.hangs, self.on_generate = delay, hangs, on_generate
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.running = self.most = 0
        self._epoch = 0  # of load_weights: requests of an earlier one end
        self._loop = None

    async def generate(self, request: Request) -> Completion:
        self.on_generate(request)
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        epoch, ids, logprobs, versions, stop = self._epoch, [], [], [], Stop.LENGTH
        try:
            await asyncio.sleep(self.delay)
            if any(request.request_id.startswith(name) for name in self.hangs):
                await asyncio.sleep(3600)
            while len(ids) < request.sampling.max_tokens:
                if epoch != self._epoch or request.request_id in self.aborted:
                    stop = Stop.ABORT
                    break
                draw = self._draw(request, ids)
                ids.append(draw % 50 + (1 if draw % 7 == 0 else 2))
                logprobs.append(-(draw % 1000) / 333)
                versions.append(self.version)
                if ids[-1] == EOS:
                    stop = Stop.EOS
                    break
                await asyncio.sleep(self.delay)
        finally:
            self.running -= 1
        return Completion(ids, logprobs, versions, stop)

    def _draw(self, request: Request, ids: list[int]) -> int:
        told = repr((request.ids + ids, request.seed, self.version)).encode()
        return int.from_bytes(hashlib.blake2b(told, digest_size=4).digest())

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def end_session(self, session: str) -> None: ...

    def run(self, main):
        return asyncio.run(main()) if self.leads else None

    def start(self, main):
        if not self.leads:
            return None
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(main(), self._loop)

    def load_weights(self, source, version: int) -> None:
        self.version, self._epoch = version, self._epoch + 1

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
