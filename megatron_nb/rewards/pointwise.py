"""The point-wise reward: what a reward model says of each answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from megatron_nb.client import Client, ClientConfig
from megatron_nb.data.preferences import answer_ids
from megatron_nb.data.tokenizer import load_tokenizer
from megatron_nb.records import Prompt, Rollout, Score
from megatron_nb.rewards.scorer import Batcher, load_scorer
from megatron_nb.rewards.text import final_answer


@dataclass
class Pointwise:
    """The score of (x, final answer) by a reward model: here, or at an endpoint that serves it (vLLM's /pooling).

    An empty answer and one cut by its length are scored like any other; `penalise_truncated` is taken off the latter. An
    answer longer than max_tokens makes its rollout invalid: it cannot be judged.
    """

    checkpoint: str  # a run, a step folder, or a Hugging Face folder with one label; with `url`, its tokenizer is read
    url: str | None = None
    model: str = ""  # its name at the url
    api_key_env: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_tokens: int | None = None  # of x and the answer; None: no limit
    penalise_truncated: float = 0.0
    device: Any = "cpu"  # given by the job

    def __post_init__(self):
        if self.penalise_truncated < 0:
            raise ValueError(f"penalise_truncated={self.penalise_truncated} must be at least 0: it is taken off")
        if self.url:
            self._client = Client(ClientConfig(self.url, self.model, self.api_key_env))
            self._tokenizer = load_tokenizer(self.checkpoint)
            return
        self._scorer = load_scorer(self.checkpoint, self.device, self.dtype)
        kind, self._tokenizer = self._scorer.kind, self._scorer.tokenizer
        if kind != "pointwise":
            raise ValueError(f"checkpoint={self.checkpoint!r} is of kind {kind}: the point-wise reward needs a pointwise one")
        self._batcher = Batcher(self._scorer.forward)

    async def score_rollout(self, prompt: Prompt, rollout: Rollout) -> Score:
        ids = answer_ids(prompt.conversation, final_answer(rollout.text), self._tokenizer)
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            return Score(None, reason=f"the conversation has {len(ids)} tokens, more than max_tokens={self.max_tokens}")
        score = await self._asked(ids) if self.url else (await self._batcher.scores([ids]))[0]
        if not math.isfinite(score):
            return Score(None, reason=f"the model gave {score}")
        if rollout.status == "length" and self.penalise_truncated:
            return Score(score - self.penalise_truncated, parts={"model": score}, reason="cut by its length")
        return Score(score)

    async def _asked(self, ids: list[int]) -> float:
        body = {"model": self.model, "input": [ids], "task": "classify", "use_activation": False}
        return await self._client.post("/pooling", body, _first_number)


def _first_number(answer: Any) -> float:
    data = answer["data"][0]["data"]
    if len(data) != 1:
        raise ValueError(f"{len(data)} numbers for one answer: a reward model has one label")
    return float(data[0])
