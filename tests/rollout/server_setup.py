"""Weights, requests and an engine for tests of the server engine in one process."""

from __future__ import annotations

import asyncio

import torch

from megatron_nb.parallel.topology import Topology
from megatron_nb.rollout.engine import Request, Sampling

ALONE = Topology(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, torch.device("cpu"))
PROMPT = [5, 17, 3, 99, 42]
SAMPLING = Sampling(max_tokens=8, temperature=0.7)


def llama(seed: int = 0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=120, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=256,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return model.eval()


class Weights:
    """A WeightSource over a transformers model. breaks_at: raises before that tensor."""

    modules = []

    def __init__(self, model, breaks_at=None):
        self.model, self.breaks_at = model, breaks_at

    def hf_tensors(self):
        for number, (name, tensor) in enumerate(self.model.state_dict().items()):
            if number == self.breaks_at:
                raise OSError("the source has gone")
            yield name, tensor


@torch.no_grad()
def logprobs_of(model, ids: list[int], start: int, temperature: float) -> list[float]:
    """Of ids[start:], as a trainer computes them."""
    logprobs = (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
    return [float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids))]


def ask(engine, *requests):
    async def main():
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return engine.run(main)


def request(name="g/0/0.0", ids=None, seed=1, sampling=SAMPLING) -> Request:
    return Request(name, ids or PROMPT, sampling, seed)
