"""Attention behind shared prefixes against dense attention of every document's own whole row."""

import pytest
import torch

from megatron_nb.model.shared_prefix import merged, whole

LENGTHS = [1, 6, 1, 9, 4, 3, 8, 8, 70, 2]
PREFIX = {1: 0, 2: 0, 6: 5, 7: 5, 8: 5}  # document -> the one it goes on from
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
SHARED = [(BOUNDS[1], BOUNDS[3], BOUNDS[0], BOUNDS[1]), (BOUNDS[6], BOUNDS[9], BOUNDS[5], BOUNDS[6])]


def _inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BOUNDS[-1], heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2, 4)]


def _dense(q, k, v, start, shared, scale):
    seen = torch.zeros(len(q), len(q), dtype=torch.bool)
    for i, (a, b) in enumerate(zip(BOUNDS, BOUNDS[1:])):
        seen[a:b, a:b] = torch.ones(b - a, b - a).tril().bool()
        if i in PREFIX:
            seen[a:b, BOUNDS[PREFIX[i]] : BOUNDS[PREFIX[i] + 1]] = True
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = torch.einsum("inx,jnx->nij", q, k).mul(scale).masked_fill(~seen, -torch.inf)
    return torch.einsum("nij,jnx->inx", scores.softmax(-1), v)


@pytest.mark.parametrize("way", [whole, merged])
def test_documents_see_their_prefix_and_themselves_and_gradients_add_up(way):
    start = torch.repeat_interleave(torch.tensor(BOUNDS[:-1]), torch.tensor(LENGTHS))
    found = []
    for attend in (way, _dense):
        *qkv, dout = _inputs()
        qkv = [x.requires_grad_() for x in qkv]
        out = attend(*qkv, start, SHARED, 0.3)
        found.append([out, *torch.autograd.grad(out, qkv, dout)])
    for mine, theirs in zip(*found):
        assert float((mine - theirs).abs().max()) < 1e-12
