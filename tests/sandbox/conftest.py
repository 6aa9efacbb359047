"""One pool for the tests that run programs; they skip where this machine cannot isolate."""

import pytest

from megatron_nb.sandbox.judge import Judge
from megatron_nb.sandbox.pool import IsolationMissing, Pool


@pytest.fixture(scope="session")
def shared_pool():
    try:
        pool = Pool(2)
    except IsolationMissing as error:
        pytest.skip(f"no isolation here: {error}")
    with pool:
        yield pool


@pytest.fixture(scope="session")
def shared_judge(shared_pool):
    judge = Judge(shared_pool)
    yield judge
    judge.close()
