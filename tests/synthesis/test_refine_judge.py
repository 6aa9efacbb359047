"""Final answers compared by a judge: its verdict is kept, and its loss is no verdict."""

import asyncio

import pytest

from megatron_nb.asking.ledger import Ledger
from megatron_nb.synthesis.refine_calls import Calls, NotAnswered, SameConfig, open_same
from tests.synthesis.refine_stub import Stub

PAIRS = [("18 eggs", "eighteen, or 18", True), ("18", "19", False)]


def same(folder, url: str, *pairs, ask: bool = True) -> list[bool | None]:
    config = SameConfig("judge", judge={"url": url, "model": "stub", "retries": 0}, timeout_s=20)

    async def go():
        ledger = Ledger(folder, "all", 0)
        try:
            calls = Calls([ledger], None, config, open_same(config) if ask else None, 7, 1)
            return [await calls.is_same("a1/final", "How many?", one, other) for one, other, _ in pairs]
        finally:
            ledger.close()

    return asyncio.run(go())


def test_a_judge_compares_once_and_what_is_lost_with_it_is_compared_by_the_next_attempt(tmp_path):
    stub = Stub()
    url = stub.url
    try:
        assert same(tmp_path, url, *PAIRS) == [expected for _, _, expected in PAIRS]
        asked = stub.asked.total()
        assert same(tmp_path, url, *PAIRS) == [True, False] and stub.asked.total() == asked == 2
    finally:
        stub.close()
    with pytest.raises(OSError, match="no verdict: same: RequestFailed"):
        same(tmp_path, url, ("20", "20", True))
    with pytest.raises(NotAnswered):
        same(tmp_path, url, ("20", "20", True), ask=False)
    assert same(tmp_path, url, *PAIRS, ask=False) == [True, False]
