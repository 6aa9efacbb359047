"""Fixtures of the tests of the server engine."""

import pytest

from megatron_nb.rollout.server import ServerConfig, ServerEngine
from tests.rollout.server_setup import ALONE, llama
from tests.rollout.stub_server import StubServer


@pytest.fixture
def stub():
    """A server that holds a tiny model."""
    with StubServer(model=llama()) as server:
        yield server


@pytest.fixture
def engine_of(tmp_path):
    """engine_of(stubs..., **settings): engines that are closed after the test."""
    made = []

    def make(*stubs, probe=None, **settings):
        usual = {"transfer": "files", "folder": tmp_path / "weights", "retries": 0, "timeout_s": 20.0, "away_s": 0}
        engine = ServerEngine(ServerConfig(urls=[stub.url for stub in stubs], **(usual | settings)), ALONE, probe)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()
