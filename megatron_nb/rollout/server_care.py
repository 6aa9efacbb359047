"""Which weights the servers hold, while streams run: a server that was restarted gets those of now again.

A server that dies takes its streams with it, so one question, asked after a stream's first token, says by which weights all of
that stream was sampled; streams that wait at the same time share one answer. What a restarted server has sampled is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from megatron_nb.client import Client, RequestFailed
from megatron_nb.rollout.server_weights import FRESH, Sender

LOOK_S = 1.0  # between two looks for a server that is away

log = logging.getLogger(__name__)


class Care:
    """Of one engine's servers. All coroutines run on the engine's loop."""

    def __init__(self, controls: list[Client], sender: Sender, away_s: float):
        self.controls, self.sender, self.away_s = controls, sender, away_s
        self.version = FRESH  # that all of them hold; FRESH while they are given others
        self.mends = True  # whether a restarted server is given the weights; not while an update goes on
        self.losses = 0  # answers that said: away, or restarted
        self._asked = [0] * len(controls)  # questions begun
        self._held = [False] * len(controls)  # the last answer
        self._gates = [asyncio.Lock() for _ in controls]
        self._mending: set[asyncio.Task] = set()

    async def holds(self, server: int) -> bool:
        """Whether this server holds the weights of `version`, at a moment after this call. One that has lost them gets them.

        RuntimeError when it holds those of somebody else.
        """
        asked = self._asked[server]
        async with self._gates[server]:
            if self._asked[server] == asked:  # nobody has begun to ask since
                self._asked[server] += 1
                self._held[server] = False
                self._held[server] = await self._ask(server)
            return self._held[server]

    async def _ask(self, server: int) -> bool:
        version = self.version
        try:
            held = {state["version"] for state in await self._state(server)}
        except RequestFailed:
            self.losses += 1
            return False
        if version != self.version or version == FRESH or held == {version}:
            return version == self.version != FRESH  # an update came between: the answer says nothing
        url = self.controls[server].config.base_url
        if held != {FRESH}:
            raise RuntimeError(
                f"{url} holds weights of version {sorted(held)}, not {version}: somebody else updates it; load_weights again"
            )
        self.losses += 1
        if not self.mends:
            return False
        mending = asyncio.create_task(self._mend(server))
        self._mending.add(mending)
        mending.add_done_callback(self._mending.discard)
        await asyncio.shield(mending)  # whoever asked may be cancelled
        return False

    async def _mend(self, server: int) -> None:
        """Give a restarted server the weights that the others have."""
        control, version = self.controls[server], self.version
        log.warning("%s was restarted: it gets the weights of version %d again", control.config.base_url, version)
        try:
            await control.post("/pause", params={"mode": "abort"})
            await asyncio.to_thread(self.sender.send_again, server, version)
            await control.post("/reset_prefix_cache")
            await control.post("/resume")
        except (OSError, TimeoutError) as error:
            log.warning("%s did not take them: %s", control.config.base_url, error)

    async def any_returned(self, error: Exception, losses: int) -> None:
        """Until some server holds the weights again. Raises `error` after away_s, and when nothing was lost since `losses`."""
        end = asyncio.get_running_loop().time() + self.away_s
        while not any([await self.holds(server) for server in range(len(self.controls))]):
            if asyncio.get_running_loop().time() > end:
                raise error
            await asyncio.sleep(LOOK_S)
        if self.losses == losses:
            raise error

    # ------------------------------------------------------------------ around an update
    async def settled(self) -> None:
        """Nothing is given to a single server any more, until `mends` is set again."""
        self.mends = False
        await asyncio.gather(*self._mending, return_exceptions=True)

    async def all_there(self) -> None:
        """Until every server answers. RequestFailed after away_s."""
        end = asyncio.get_running_loop().time() + self.away_s
        for control in self.controls:
            while True:
                try:
                    await control.get("/health", retries=0)
                    break
                except RequestFailed as error:
                    if error.status == 200:  # its words need not be JSON
                        break
                    if asyncio.get_running_loop().time() > end:
                        raise
                await asyncio.sleep(LOOK_S)

    async def lost(self, first: bool) -> bool:
        """Whether a server went away in the middle of an update; first: none has had weights before."""
        for server in range(len(self.controls)):
            try:
                held = {state["version"] for state in await self._state(server)}
            except RequestFailed:
                return True
            if FRESH in held and not first:
                return True
        return False

    async def _state(self, server: int) -> list[dict[str, Any]]:
        call = {"method": "nb_state"}
        return await self.controls[server].post("/collective_rpc", call, lambda answer: list(answer["results"]), retries=0)
