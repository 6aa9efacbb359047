"""The zig-zag split, ring and all-gather attention, and the rotary table of a pack."""

import numpy as np
import pytest
import torch

from megatron_nb.data.packing import pack
from megatron_nb.parallel.context import context_attention, split, zigzag
from megatron_nb.records import Sample

LENGTHS = [7, 1, 30, 5, 21]  # 64 tokens; documents straddle every chunk border


def a_pack(lengths=LENGTHS, length=64):
    random = np.random.default_rng(0)
    rows = [Sample(random.integers(0, 99, n), np.ones(n, np.float32), sample_id=f"d{i}") for i, n in enumerate(lengths)]
    return pack(rows, length, 8)


def test_zigzag_gives_rank_0_the_first_and_last_chunk_and_keeps_labels_across_ranks():
    whole = pack([Sample(np.arange(100, 116), np.ones(16, np.float32), sample_id="a")], 16, 4)
    first, second = split(whole, 2, 0), split(whole, 2, 1)
    assert first.index.tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert second.index.tolist() == list(range(4, 12))
    assert first.targets[3] == 104, "the label of token 3 is token 4, which the other rank holds"
    assert (first.count, second.count) == (15, 0), "context rank 0 alone carries the count"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_split_keeps_every_token_once(size):
    whole = a_pack()
    index = torch.cat([split(whole, size, rank).index for rank in range(size)])
    assert sorted(index.tolist()) == list(range(64))


def test_a_length_that_does_not_divide_is_refused_with_the_rule():
    with pytest.raises(ValueError, match=r"length=60 must be a multiple of 2 \* context = 8"):
        zigzag(60, 4, 0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rotary_rows_restart_in_every_document_bit_equal_to_cores_own_table(size):
    """RoPE is relative: a missing restart changes no loss and no gradient, so the table itself is compared."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from nb_kernels.rotary import tables

    from megatron_nb.model.attention import bounds, inverse_frequencies
    from megatron_nb.model.shape import ModelConfig

    model = ModelConfig(head_dim=16, num_attention_heads=4, num_query_groups=4, rope_theta=7e7)
    core = RotaryEmbedding(16, 1.0, rotary_base=7e7, use_cpu_initialization=True)
    assert torch.equal(core.inv_freq, inverse_frequencies(model)), "ours must round as core does"
    whole, found = a_pack(), torch.zeros(2, 64, 8)
    for rank in range(size):
        part = split(whole, size, rank)
        found[:, part.index] = torch.stack(tables(bounds(part).positions, inverse_frequencies(model), torch.float32))
    angles = torch.cat([core.get_emb(n)[:, 0, 0, :8] for n in LENGTHS])
    assert torch.equal(found, torch.stack([angles.cos(), angles.sin()]))


def _attend(method, lengths, heads, groups):
    import torch.distributed as dist

    torch.manual_seed(0)
    size, rank = dist.get_world_size(), dist.get_rank()
    total = sum(lengths)
    q, k, v, dout = (torch.randn(total, n, 8, dtype=torch.float64) for n in (heads, groups, groups, heads))
    begin = torch.tensor([0, *lengths]).cumsum(0)
    start = torch.repeat_interleave(begin[:-1], torch.tensor(lengths))

    # dense float64 reference, whose mask is written out
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    position = torch.arange(total)
    allowed = (position[None] <= position[:, None]) & (position[None] >= start[:, None])
    scores = torch.einsum("ind,jnd->nij", leaves[0], leaves[1].repeat_interleave(heads // groups, 1)) * 8**-0.5
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    expected = torch.einsum("nij,jnd->ind", weights, leaves[2].repeat_interleave(heads // groups, 1))
    expected.backward(dout)

    mine = zigzag(total, size, rank)
    local = [x[mine].clone().requires_grad_() for x in (q, k, v)]
    out = context_attention(*local, start[mine], begin, dist.group.WORLD, 8**-0.5, method)
    out.backward(dout[mine])
    gaps = [(out - expected[mine]).abs().max()] + [(a.grad - b.grad[mine]).abs().max() for a, b in zip(local, leaves)]
    return max(map(float, gaps))


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("lengths", [LENGTHS, [64], [1] * 64, [63, 1]], ids=["mixed", "one", "singles", "tail"])
def test_context_attention_equals_dense_attention_in_float64(ranks, method, size, lengths):
    assert max(ranks.run(size, _attend, method, lengths, 4, 2)) < 1e-12
