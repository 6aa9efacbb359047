"""A judge service in a thread of this process, with work that the test decides."""

import asyncio
import contextlib
import http.client
import json
import threading

from megatron_nb.sandbox.service import Service, ServiceConfig


class Running:
    """`with Running(judge, ...)`: judge(row) is a coroutine that gives the row's answer; kill() ends it as kill -9 would."""

    def __init__(self, judge, complexity=None, workers=1, **settings):
        self.config = ServiceConfig(port=0, **settings)
        self.service = Service(self.config, {"/judge": judge, "/complexity": complexity or judge}, workers, "made up")
        self._ready, self._leave = threading.Event(), None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    async def _main(self):
        self.loop, self._leave = asyncio.get_running_loop(), asyncio.Event()
        with contextlib.suppress(asyncio.CancelledError):
            async with self.service:
                self._ready.set()
                await self._leave.wait()

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_):
        self.stop()
        self._thread.join(20)
        assert not self._thread.is_alive(), "the service did not end"

    @property
    def url(self):
        return self.service.url

    def stop(self):
        """Ask it to go down, as SIGTERM does; returns at once."""
        with contextlib.suppress(RuntimeError):  # it is down already
            self.loop.call_soon_threadsafe(self._leave.set)

    def kill(self):
        """Cut every connection and close the port without a word."""

        def cut():
            self.service._server.close()
            for transport in [task.get_coro().cr_frame.f_locals["writer"].transport for task in self.service._connections]:
                transport.abort()
            for task in self.service._under_way:
                task.cancel()

        self.loop.call_soon_threadsafe(cut)

    def connect(self):
        return http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=20)

    def ask(self, method, path, body=None, token=None, raw=None):
        """(status, the answer's text or JSON, headers)"""
        connection = self.connect()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request(method, path, raw if raw is not None else json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, json.loads(text) if "json" in response.getheader("Content-Type") else text, response.headers

    def judge(self, rows, **options):
        return self.ask("POST", "/judge", rows, **options)


async def echo(row):
    """Accepts every test of the row; `sleep_s` of it takes that long."""
    await asyncio.sleep(row.get("sleep_s", 0))
    tests = row.get("tests", [])
    return {"id": row.get("id"), "verdicts": ["accepted"] * len(tests), "passed": len(tests), "total": len(tests),
            "cpu_s": [0.25] * len(tests)}  # fmt: skip
