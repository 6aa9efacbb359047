"""Samples -> Batch: one shift, documents that know nothing of each other, and values that must be finite."""

import numpy as np
import pytest
import torch

from megatron_nb.data.packing import collate, pack
from megatron_nb.records import Sample


def sample(name, ids, weight=None, **streams):
    ids = np.asarray(ids, np.int64)
    weight = np.ones(len(ids)) if weight is None else weight
    return Sample(ids, np.asarray(weight, np.float32), name, **{key: np.asarray(value) for key, value in streams.items()})


A = sample("a", [1, 2, 3, 4], [0, 0, 1, 1], turn_id=[-1, -1, 0, 0])
B = sample("b", [5, 6, 7], [0, 1, 1], turn_id=[-1, 0, 1])


def test_targets_weights_and_streams_shift_once_within_each_document():
    batch = pack([A, B], 10)
    assert batch.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 0, 0]
    assert batch.targets.tolist() == [2, 3, 4, 0, 6, 7, 0, 0, 0, 0]
    assert batch.loss_weight.tolist() == [0, 1, 1, 0, 1, 1, 0, 0, 0, 0]
    assert batch.streams["turn_id"].tolist() == [-1, 0, 0, -1, 0, 1, -1, -1, -1, -1]
    assert batch.count == 4
    kinds = (batch.ids, batch.targets, batch.loss_weight, batch.index, batch.start, batch.cu_seqlens)
    assert [tensor.dtype for tensor in kinds] == [torch.int64, torch.int64, torch.float32] + [torch.int64] * 3


def test_the_last_token_of_a_sample_never_predicts_the_first_of_the_next():
    batch = pack([sample("a", [1, 2]), sample("b", [3, 4])])
    assert batch.targets.tolist() == [2, 0, 4, 0]
    assert batch.loss_weight.tolist() == [1, 0, 1, 0]


def test_positions_restart_and_the_fill_is_a_document_of_its_own():
    batch = pack([A, B], 10)
    assert batch.cu_seqlens.tolist() == [0, 4, 7, 10]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2]
    assert batch.start.tolist() == [0] * 4 + [4] * 3 + [7] * 3
    assert batch.sample_ids == ["a", "b", ""]
    assert batch.pack_length == 10


def test_without_a_length_the_pack_is_the_smallest_multiple():
    assert pack([A, B], multiple=8).pack_length == 8
    assert pack([A, B]).cu_seqlens.tolist() == [0, 4, 7]


def test_an_empty_pack_has_weight_zero_everywhere():
    batch = pack([], 8, streams=["turn_id"])
    assert batch.count == 0 and not batch.loss_weight.any()
    assert batch.cu_seqlens.tolist() == [0, 8] and batch.sample_ids == [""]
    assert batch.streams["turn_id"].tolist() == [-1] * 8


def test_count_is_the_number_of_trained_targets_not_the_sum_of_weights():
    assert pack([sample("a", [1, 2, 3, 4], [1, 0.25, 0, 0.5])]).count == 2


def test_collated_packs_are_the_pack_of_all_their_documents():
    whole = collate([pack([A, B], 10), pack([B], 10)])
    assert whole.pack_length == 20
    assert whole.cu_seqlens.tolist() == [0, 4, 7, 10, 13, 20]
    assert whole.index.tolist() == list(range(20))
    assert whole.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 1, 2, *range(7)]
    assert whole.sample_ids == ["a", "b", "", "b", ""]
    assert whole.count == 6
    assert whole.targets.tolist() == pack([A, B], 10).targets.tolist() + pack([B], 10).targets.tolist()


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
def test_a_value_that_is_not_finite_changes_nothing_where_it_is_masked(bad):
    weight, clean = [0, 0, 1, 1], [0.0, 0.0, 0.5, 0.25]
    dirty = [bad, bad, 0.5, 0.25]
    expected = pack([sample("a", [1, 2, 3, 4], weight, advantage=clean, ref_logprob=clean)])
    found = pack([sample("a", [1, 2, 3, 4], weight, advantage=dirty, ref_logprob=dirty)])
    for name in ("advantage", "ref_logprob"):
        assert torch.equal(found.streams[name], expected.streams[name])


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("stream", ["advantage", "behaviour_logprob"])
def test_a_value_that_is_not_finite_where_it_is_trained_is_refused_with_the_sample(bad, stream):
    with pytest.raises(ValueError, match=f"sample rollout-7: {stream}.2.=.*on a trained token"):
        pack([sample("rollout-7", [1, 2, 3], [0, 0, 1], **{stream: [0, 0, bad]})])


def test_a_weight_that_is_not_finite_is_refused_with_the_sample():
    with pytest.raises(ValueError, match="sample rollout-7: loss_weight.1.=nan"):
        pack([sample("rollout-7", [1, 2], [0, np.nan])])


def test_samples_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="2 samples of 7 tokens do not fit a pack of 6"):
        pack([A, B], 6)


def test_a_length_that_cannot_be_cut_evenly_is_refused():
    with pytest.raises(ValueError, match="seq_len=1000 must be a multiple of 16"):
        pack([A], 1000, 16)


def test_samples_of_a_pack_carry_the_same_streams():
    with pytest.raises(ValueError, match="sample plain: turn_id is missing"):
        pack([A, sample("plain", [1, 2])])
    with pytest.raises(ValueError, match="sample short: loss_weight has 1 values for 2 tokens"):
        pack([sample("short", [1, 2], [1])])
