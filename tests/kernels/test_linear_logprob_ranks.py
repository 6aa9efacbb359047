"""linear_logprob with the vocabulary over ranks equals one process, also where a rank holds padding only."""

import pytest
import torch
import torch.distributed as dist
from nb_kernels.linear_logprob import linear_logprob, reference, top_k_logprob

T, V, H = 29, 480, 16


def inputs(vocab_size):
    torch.manual_seed(0)
    hidden, weight = torch.randn(T, H, dtype=torch.float64), torch.randn(V, H, dtype=torch.float64)
    weight[vocab_size:] = torch.nan  # padding
    hidden[:, 0], weight[:vocab_size, 0] = 1.0, torch.linspace(-300, 300, vocab_size)  # shards of very different logits
    hidden[::2, 0] = 0.01  # and rows to which every shard matters
    targets = torch.randint(0, vocab_size, (T,))
    targets[5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets, torch.randn(2, T, dtype=torch.float64)


def on_a_rank(vocab_size, path, promise, reduce):
    hidden, weight, targets, (g, e) = inputs(vocab_size)
    shard = weight.detach().chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    logprob, entropy = linear_logprob(
        hidden, shard, targets, temperature=1.1, vocab_size=vocab_size, group=dist.group.WORLD, entropy=True,
        coefficient=g if promise else None, reduce_hidden_grad=reduce, implementation=path,
    )  # fmt: skip
    loss = (2 * g * logprob).sum() if promise else (2 * g * logprob + e * entropy).sum()
    loss.backward()
    return logprob.detach(), entropy.detach(), hidden.grad, shard.grad


def error(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("vocab_size", [480, 473, 200])  # 200: ranks 2 and 3 of 4 hold padding only
@pytest.mark.parametrize("path, promise", [("torch", False), ("torch", True), ("triton", False)])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_number_of_ranks_equals_one_process(ranks, world, path, promise, vocab_size):
    if path == "triton" and torch.cuda.is_available():
        pytest.skip("float64 kernels run in the interpreter")
    hidden, weight, targets, (g, e) = inputs(vocab_size)
    logprob, entropy = reference(hidden, weight, targets, temperature=1.1, vocab_size=vocab_size)
    (2 * g * logprob + (0 if promise else 1) * e * entropy).sum().backward()
    results = ranks.run(world, on_a_rank, vocab_size, path, promise, True)
    for r, (rank_logprob, rank_entropy, dhidden, dweight) in enumerate(results):
        assert error(rank_logprob, logprob) < 1e-12 and error(rank_entropy, entropy) < 1e-12
        assert error(dhidden, hidden.grad) < 1e-12
        expected = weight.grad.chunk(world)[r]
        assert float((dweight - expected).abs().max()) < 1e-12 * float(weight.grad.abs().max())
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0][:3], other[:3]))


@pytest.mark.parametrize("promise", [False, True])
def test_hidden_gradients_left_to_another_operator_sum_to_the_whole(ranks, promise):
    hidden, weight, targets, (g, e) = inputs(V)
    logprob, entropy = reference(hidden, weight, targets, temperature=1.1)
    (2 * g * logprob + (0 if promise else 1) * e * entropy).sum().backward()
    parts = [result[2] for result in ranks.run(2, on_a_rank, V, "torch", promise, False)]
    assert error(sum(parts), hidden.grad) < 1e-12 and not torch.equal(*parts)


def top_5_on_a_rank(vocab_size):
    hidden, weight, *_ = inputs(vocab_size)
    shard = weight.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()
    return top_k_logprob(hidden.detach(), shard, 5, vocab_size=vocab_size, group=dist.group.WORLD)


@pytest.mark.parametrize("vocab_size", [480, 200])
def test_top_k_over_ranks_equals_one_process(ranks, vocab_size):
    hidden, weight, *_ = inputs(vocab_size)
    expected = top_k_logprob(hidden.detach(), weight.detach(), 5, vocab_size=vocab_size)
    for ids, logprob in ranks.run(4, top_5_on_a_rank, vocab_size):
        assert torch.equal(ids, expected[0]) and error(logprob, expected[1]) < 1e-12
