"""Refinement: tasks and replies that could not be sent to a model."""

import asyncio
import json

import pytest

from megatron_nb.asking.ledger import Ledger
from megatron_nb.data.prompts import PromptSource
from megatron_nb.data.rows import BadRow
from megatron_nb.synthesis.refine import TaskConfig, read_tasks
from megatron_nb.synthesis.refine_calls import Calls, SameConfig
from tests.synthesis.test_refine import Script


@pytest.mark.parametrize("asked", ["", " \n", "What is \ud800?"])
def test_a_task_that_asks_nothing_or_cannot_be_sent_is_refused(tmp_path, asked):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": asked}]}) + "\n")
    with pytest.raises(BadRow, match="tasks.jsonl:1: the task is .*: a task is text that is not empty"):
        read_tasks(TaskConfig({"a": PromptSource(str(path))}))


def test_a_reply_with_half_a_letter_can_be_sent_on(tmp_path):
    ledger = Ledger(tmp_path, "half", 0)
    calls = Calls([ledger], Script(draft="5 \ud800"), SameConfig("normalised"), None, 0, 1)
    answer = asyncio.run(calls.ask("a/draft", [{"role": "user", "content": "x"}]))
    assert answer.text == "5 ?" and answer == asyncio.run(calls.ask("a/draft", [{"role": "user", "content": "x"}]))
    ledger.close()
