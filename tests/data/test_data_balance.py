"""Micro-batches of RL rows: nothing lost, equal counts, equal cost, little fill."""

import numpy as np
import pytest

from megatron_nb.data.balance import balanced, plan
from megatron_nb.records import Sample


def rows(lengths, **streams):
    return [Sample(np.arange(n), np.ones(n, np.float32), f"r{i}", count=1, **streams) for i, n in enumerate(lengths)]


def packs(samples, data_size=1, **settings):
    """All data ranks' packs."""
    settings = dict(max_tokens=64, attention_length=100.0) | settings
    return [balanced(samples, data_rank=rank, data_size=data_size, **settings) for rank in range(data_size)]


@pytest.mark.parametrize("data_size, micro_multiple, multiple", [(1, 1, 1), (2, 1, 8), (4, 2, 4), (3, 1, 1)])
@pytest.mark.parametrize("number", [1, 5, 40])
def test_every_row_is_in_one_pack_and_ranks_have_equally_many_packs_of_one_length(data_size, micro_multiple, multiple, number):
    lengths = np.random.default_rng(number).integers(2, 60, number).tolist()
    shares = packs(rows(lengths), data_size, micro_multiple=micro_multiple, multiple=multiple)
    found = sorted(name for share in shares for pack in share for name in pack.sample_ids if name)
    assert found == sorted(f"r{i}" for i in range(number))
    assert len({len(share) for share in shares}) == 1 and len(shares[0]) % micro_multiple == 0
    for share in shares:
        assert len({pack.pack_length for pack in share}) == 1
        assert share[0].pack_length <= 64 and share[0].pack_length % multiple == 0
    assert sum(pack.count for share in shares for pack in share) == number


def test_ranks_without_rows_get_packs_of_weight_zero_with_the_same_streams():
    samples = rows([9], advantage=np.ones(9, np.float32))
    (full,), (empty,) = packs(samples, 2)
    assert empty.count == 0 and not empty.loss_weight.any() and empty.sample_ids == [""]
    assert empty.streams.keys() == full.streams.keys()


def test_no_more_packs_than_needed_are_made():
    assert [len(share) for share in plan([16] * 32, 2, 64, 100.0)] == [4, 4]


def test_cost_counts_squares_not_only_tokens():
    """Two long rows and many short ones of as many tokens: by tokens alone the long ones would share a rank."""
    lengths = [1000, 1000] + [100] * 40
    cost = lambda share: sum(lengths[i] + lengths[i] ** 2 / 50 for places in share for i in places)  # noqa: E731
    for attention_length, balanced_costs in ((50.0, True), (1e12, False)):
        shares = plan(lengths, 2, 8000, attention_length)
        spread = abs(cost(shares[0]) - cost(shares[1])) / cost(shares[0])
        assert (spread < 0.05) or not balanced_costs


def test_long_tailed_rows_give_ranks_equal_cost_and_packs_little_fill():
    lengths = np.random.default_rng(0).lognormal(6, 1, 256).astype(int).clip(10, 8000).tolist()
    shares = plan(lengths, 4, 16384, 3000.0)
    costs = [sum(lengths[i] + lengths[i] ** 2 / 3000 for places in share for i in places) for share in shares]
    assert max(costs) / min(costs) < 1.02
    for share in shares:
        used = [sum(lengths[i] for i in places) for places in share]
        assert max(used) / np.mean(used) < 1.05


def test_a_row_that_is_too_long_is_refused_by_name():
    with pytest.raises(ValueError, match="sample r1 has 61 tokens, a pack holds max_tokens=63 in multiples of 4"):
        packs(rows([5, 61]), max_tokens=63, multiple=4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_every_rank_refuses_a_stream_that_is_not_finite_where_it_counts_naming_the_sample(bad):
    samples = rows([9, 9, 9], advantage=np.ones(9, np.float32))
    samples[1].advantage = samples[1].advantage.copy()
    samples[1].advantage[4] = bad
    for rank in range(3):
        with pytest.raises(ValueError, match=r"sample r1: advantage\[4\].* the step is refused"):
            balanced(samples, data_rank=rank, data_size=3, max_tokens=64, attention_length=100.0)
    samples[1].loss_weight[4] = 0
    packs(samples, 3)
