"""Answers kept in a folder by everything that decides them, for all runs that ask the same model the same."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from megatron_nb.asking.askers import Answer, Asker
from megatron_nb.records import Conversation
from megatron_nb.rollout.calls import Call
from megatron_nb.rollout.engine import Sampling
from megatron_nb.run import write_atomic


class CachedAsker:
    """An asker that looks into `folder` first. identity: names the model; two models never share one.

    The name of a question is left out of what decides: its seed is in. Attributes of the asker are this one's too.
    """

    def __init__(self, asker: Asker, folder: Path, identity: Any):
        self.asker, self.folder, self.identity, self.told = asker, folder, identity, asker.told

    def __getattr__(self, name: str) -> Any:
        return getattr(self.asker, name)

    async def ask(self, conversation: Conversation, name: str, seed: int, sampling: Sampling | None = None) -> Answer:
        drawn = dataclasses.astuple(sampling) if sampling else None
        decides = [self.identity, conversation.messages, conversation.tools, drawn, seed]
        key = hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()
        file = self.folder / key[:2] / f"{key}.json"
        if file.exists():
            row = json.loads(file.read_text())
            return Answer(**row | {"calls": [Call(**call) for call in row["calls"]]})
        answer = await self.asker.ask(conversation, name, seed, sampling)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(dataclasses.asdict(answer)))
        return answer
