"""After an update: whether servers give what they sample the log-probs that the trainer gives it."""

from __future__ import annotations

import asyncio
import random

import torch

from megatron_nb.client import Client
from megatron_nb.rollout.engine import Request, Sampling
from megatron_nb.rollout.server_config import body_of

PROMPT, ANSWER, TEMPERATURE = 48, 16, 0.7  # tokens of both

Answers = list[tuple[list[int], list[float]]]


async def probe_answers(controls: list[Client], model: str) -> Answers:
    """(prompt and answer, log-probs of the answer) of every server."""
    ids = random.Random(0).choices(range(5, 95), k=PROMPT)
    body = body_of(model, Request("probe", ids, Sampling(ANSWER, TEMPERATURE), seed=1))
    choices = await asyncio.gather(*(client.complete(**body) for client in controls))
    return [(ids + choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]


def apart(
    urls: list[str], answers: Answers, trainer: dict[tuple[int, ...], list[float]], tolerance: float
) -> RuntimeError | None:
    """What to raise when a server's log-probs are further from the trainer's than `tolerance` on average."""
    for url, (ids, logprobs) in zip(urls, answers, strict=True):
        distance = torch.tensor(logprobs).sub(torch.tensor(trainer[tuple(ids)])).abs().mean().item()
        if not distance <= tolerance:
            return RuntimeError(
                f"{url}: log-probs after the update differ from the trainer's by {distance:.3g} on average, "
                f"engine.server.tolerance={tolerance:g}: see that the server's model, dtype and "
                "--logprobs-mode processed_logprobs are right"
            )
    return None
