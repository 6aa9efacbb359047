"""Steps of micro-batches: the same data at every number of ranks, after every resume, and nothing scored twice or never."""

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_nb.data.dataset import Dataset, open_datasets
from megatron_nb.data.feed import Layout
from megatron_nb.data.loader import Loader, Validation
from megatron_nb.data.packing import TENSORS
from megatron_nb.data.sources import DataConfig, SourceConfig
from tests.data.data_tokenizers import chat, tiny, write_rows

SEQ_LEN = 256


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loader")
    random = np.random.default_rng(0)
    for name, rows in (("a", 80), ("b", 50), ("v", 23)):
        made = [chat(f"{name} {n} " * random.integers(1, 12), "word " * random.integers(1, 12)) for n in range(rows)]
        write_rows(folder / f"{name}.jsonl", made)
    return DataConfig(
        sources={"a": SourceConfig(str(folder / "a.jsonl"), 3), "b": SourceConfig(str(folder / "b.jsonl"), 1)},
        validation={"v": SourceConfig(str(folder / "v.jsonl"))},
        cache_dir=str(folder / "cache"),
        workers=0,
        loader_workers=0,
        lookahead=32,
    )


@pytest.fixture(scope="module")
def datasets(settings):
    return open_datasets(settings, tiny(), SEQ_LEN, seed=1)


def loader(datasets, settings, **options):
    return Loader(datasets[0], settings, **{"global_batch_size": 5} | options)


def same(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second):
        for name in TENSORS:
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert one.sample_ids == other.sample_ids
        assert one.count == other.count
        assert all(torch.equal(one.streams[name], other.streams[name]) for name in one.streams | other.streams)


def names(batches):
    return [name for batch in batches for name in batch.sample_ids if name]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_dali_gives_the_steps_that_can_be_made_again_by_number(datasets, settings, workers):
    loads = loader(datasets, DataConfig(**vars(settings) | {"loader_workers": workers}), data_size=2, data_rank=1)
    steps = [next(loads) for _ in range(5)]
    loads.close()
    for number, step in enumerate(steps):
        same(step, loads.batch(number))
    assert names(steps[0]) != names(steps[1])


@pytest.mark.parametrize("taken", [1, 3])
def test_a_resumed_loader_gives_exactly_the_next_steps(datasets, settings, taken):
    loads = loader(datasets, settings)
    for _ in range(taken):
        next(loads)
    state = json.loads(json.dumps(loads.state()))  # plain values
    following = [next(loads) for _ in range(3)]
    resumed = loader(datasets, settings, state=state)
    for step in following:
        same(next(resumed), step)
    assert resumed.state() == loads.state()
    assert resumed.seen == loads.seen


def test_a_resume_does_not_plan_all_packs_again(datasets, settings):
    loads = loader(datasets, settings, global_batch_size=300)
    next(loads)
    resumed = loader(datasets, settings, global_batch_size=300, state=json.loads(json.dumps(loads.state())))
    assert resumed.plan.snapshot(300) == loads.plan.snapshot(300)
    assert resumed.plan.snapshot(300)[0] == 1  # the second block of packs, known before anything is planned
    same(resumed.batch(1), loads.batch(1))


def test_a_loader_that_was_killed_resumes_at_the_consumed_step_not_the_prefetched(datasets, settings):
    ahead = loader(datasets, DataConfig(**vars(settings) | {"loader_workers": 1}))
    next(ahead)
    state = ahead.state()  # DALI has read further by now
    ahead.close()
    same(next(loader(datasets, settings, state=state)), ahead.batch(1))


@pytest.mark.parametrize(("size", "micro_batch_size"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 3)])
def test_ranks_share_each_step_without_loss_and_run_equally_many_micro_batches(datasets, settings, size, micro_batch_size):
    alone = loader(datasets, settings)
    ranks = [
        loader(datasets, settings, data_rank=rank, data_size=size, micro_batch_size=micro_batch_size) for rank in range(size)
    ]
    for step in range(3):
        shares = [rank.batch(step) for rank in ranks]
        assert len({len(share) for share in shares}) == 1
        assert all(batch.pack_length == SEQ_LEN * micro_batch_size for share in shares for batch in share)
        assert sorted(names(batch for share in shares for batch in share)) == sorted(names(alone.batch(step)))
        total = sum(batch.count for share in shares for batch in share)
        assert total == sum(batch.count for batch in alone.batch(step))


def test_a_state_may_be_resumed_with_another_number_of_ranks(datasets, settings):
    loads = loader(datasets, settings)
    next(loads)
    ranks = [loader(datasets, settings, data_rank=rank, data_size=2, state=loads.state()) for rank in range(2)]
    assert sorted(names(next(ranks[0]) + next(ranks[1]))) == sorted(names(next(loads)))


def test_five_packs_on_two_ranks_are_three_micro_batches_each_and_the_last_is_fill():
    layouts = [Layout(5, data_rank=rank, data_size=2) for rank in range(2)]
    assert [layout.micro_batches() for layout in layouts] == [3, 3]
    assert [[layout.places(micro) for micro in range(3)] for layout in layouts] == [[[0], [2], [4]], [[1], [3], [None]]]
    assert Layout(5, data_size=2, micro_multiple=4).micro_batches() == 4


def test_fill_has_weight_zero(datasets, settings):
    last = loader(datasets, settings, data_rank=1, data_size=2).batch(0)[-1]
    assert last.count == 0 and not last.loss_weight.any() and last.sample_ids == [""]


def test_every_row_comes_once_per_epoch_without_weights(settings):
    sources = {name: SourceConfig(source.path) for name, source in settings.sources.items()}
    data, _ = open_datasets(DataConfig(**vars(settings) | {"sources": sources}), tiny(), SEQ_LEN, seed=1)
    loads = Loader(data, settings, global_batch_size=4)
    seen = [draw for step in range(60) for draw in loads._draws(step)]
    assert sorted(seen[: data.size]) != list(range(data.size))  # packs look ahead
    assert len(seen) > 2 * data.size
    assert sorted(seen) == sorted(set(seen))
    assert set(range(data.size)) <= set(seen)
    first = data.names(list(range(data.size)))
    assert len(set(first)) == data.size


@pytest.mark.parametrize(("size", "packing", "micro_multiple"), [(1, True, 1), (2, True, 1), (2, True, 4), (4, False, 1)])
def test_validation_scores_every_item_once_the_tail_too(datasets, settings, size, packing, micro_multiple):
    data = datasets[1]["v"]
    options = DataConfig(**vars(settings) | {"packing": packing})
    passes = [
        Validation(data, options, data_rank=rank, data_size=size, micro_multiple=micro_multiple, micro_batch_size=2)
        for rank in range(size)
    ]
    assert len({len(one) for one in passes}) == 1 and len(passes[0]) % micro_multiple == 0
    for _ in range(2):  # can be run again
        batches = [list(one) for one in passes]
        assert [len(one) for one in batches] == [len(one) for one in passes]
        assert sorted(names(batch for one in batches for batch in one)) == sorted(data.names(list(range(23))))
        assert sum(batch.count for one in batches for batch in one) == data.sizes(list(range(23)))[2].sum()


@pytest.mark.parametrize("change", ["rows", "weights", "seed", "seq_len", "global_batch_size"])
def test_changed_data_are_refused_by_name_or_restarted_loudly(datasets, settings, tmp_path, change, caplog):
    loads = loader(datasets, settings)
    next(loads)
    state = loads.state()
    sources, seed, seq_len, batch = dict(settings.sources), 1, SEQ_LEN, 5
    if change == "rows":
        sources["b"] = SourceConfig(str(write_rows(tmp_path / "b.jsonl", [chat("q", "other")] * 50)), 1)
    elif change == "weights":
        sources["b"] = SourceConfig(sources["b"].path, 2)
    else:
        seed, seq_len, batch = {"seed": (2, SEQ_LEN, 5), "seq_len": (1, 512, 5), "global_batch_size": (1, SEQ_LEN, 6)}[change]
    options = DataConfig(**vars(settings) | {"sources": sources})
    changed, _ = open_datasets(options, tiny(), seq_len, seed=seed)
    named = {"rows": "source b", "weights": "source a"}.get(change, change)
    with pytest.raises(ValueError, match=f"differ from those of the checkpoint at step 1 .*{named}.*data.changed=restart"):
        Loader(changed, options, global_batch_size=batch, state=state)
    options.changed = "restart"
    with caplog.at_level(logging.WARNING):
        restarted = Loader(changed, options, global_batch_size=batch, state=state)
    assert "DATA CHANGED" in caplog.text
    assert restarted.step == 1
    fresh = Loader(changed, options, global_batch_size=batch)
    same(next(restarted), fresh.batch(0))
    again = Loader(changed, options, global_batch_size=batch, state=restarted.state())
    same(next(again), fresh.batch(1))


def test_an_upgrade_that_gives_the_same_tokens_may_resume(datasets, settings, monkeypatch):
    from megatron_nb.data import prepare

    loads = loader(datasets, settings)
    next(loads)
    monkeypatch.setattr(prepare, "CODE", prepare.CODE[:-1])  # another key, hence another cache
    rebuilt, _ = open_datasets(settings, tiny(), SEQ_LEN, seed=1)
    assert rebuilt.caches["a"].folder != datasets[0].caches["a"].folder
    same(next(loader((rebuilt, {}), settings, state=loads.state())), loads.batch(1))


def test_sizes_count_real_tokens_and_squares_without_fill(datasets, settings):
    loads = loader(datasets, settings)
    for step in range(3):
        batches = next(loads)
        lengths = [
            int(stop - start)
            for batch in batches
            for start, stop, name in zip(batch.cu_seqlens, batch.cu_seqlens[1:], batch.sample_ids)
            if name
        ]
        size = loads.size(step)
        assert (size.samples, size.tokens) == (len(lengths), sum(lengths))
        assert size.squares == sum(length**2 for length in lengths)
        assert size.trained == sum(batch.count for batch in batches)
        assert size.tokens < sum(batch.pack_length for batch in batches)


def test_what_each_source_gave_is_counted(datasets, settings):
    loads = loader(datasets, settings)
    given = [name.split("/")[0] for _ in range(20) for name in names(next(loads))]
    assert {name: seen.samples for name, seen in loads.seen.items()} == {name: given.count(name) for name in "ab"}
    assert abs(given.count("a") / len(given) - 0.75) < 0.05
    assert sum(seen.tokens for seen in loads.seen.values()) == sum(loads.size(step).tokens for step in range(20))
    assert sum(seen.trained for seen in loads.seen.values()) == sum(loads.size(step).trained for step in range(20))


def test_padded_mode_gives_one_sample_per_pack(datasets, settings):
    loads = Loader(datasets[0], DataConfig(**vars(settings) | {"packing": False}), global_batch_size=3)
    for batch in next(loads):
        assert batch.sample_ids[1:] == [""] and batch.pack_length == SEQ_LEN


@pytest.mark.parametrize("policy", ["truncate", "drop", "error"])
def test_overlong_samples_do_what_the_policy_says_and_no_token_goes_missing(datasets, policy, caplog):
    caches = datasets[0].caches
    limit = int(np.median(caches["a"].lengths))
    over = sum(int((cache.lengths > limit).sum()) for cache in caches.values())
    if policy == "error":
        with pytest.raises(ValueError, match="longer than seq_len=.*first a.jsonl:.*data.overlong=truncate or drop"):
            Dataset(caches, limit, policy)
        return
    with caplog.at_level(logging.WARNING):
        data = Dataset(caches, limit, policy, endless=False)
    assert "tokens lost" in caplog.text
    packed = sum(len(sample) for sample in data.samples(list(range(data.size))))
    lost = sum(counts["truncated_tokens"] + counts["dropped_tokens"] for counts in data.counts.values())
    assert packed + lost == sum(counts["tokens"] for counts in data.counts.values())
    assert sum(counts["truncated_samples"] + counts["dropped_samples"] for counts in data.counts.values()) == over
    assert data.size == sum(map(len, caches.values())) - (over if policy == "drop" else 0)


def test_validation_data_that_are_training_data_are_warned_of(settings, caplog):
    options = DataConfig(**vars(settings) | {"validation": {"v": SourceConfig(settings.sources["a"].path)}})
    with caplog.at_level(logging.WARNING):
        open_datasets(options, tiny(), SEQ_LEN, seed=1)
    assert "validation source v is the same data as training source a" in caplog.text


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("overlong", "cut", "data.overlong='cut' must be one of error, truncate, drop"),
        ("bad_rows", "ignore", "data.bad_rows='ignore'"),
        ("history", "all", "data.history='all'"),
        ("changed", "yes", "data.changed='yes'"),
        ("workers", -1, "data.workers=-1 must be at least 0"),
        ("lookahead", 0, "data.lookahead=0 must be at least 1"),
        ("sources", {}, "data.sources is empty"),
        ("sources", {"a": SourceConfig("x", format="csv")}, "data source a: format='csv'"),
    ],
)
def test_a_setting_that_no_run_could_use_is_refused(settings, setting, value, words):
    with pytest.raises(ValueError, match=words):
        DataConfig(**vars(settings) | {setting: value}).validate()


def test_the_worker_process_never_loads_torch():
    code = "import sys, megatron_nb.data.feed; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _load_and_wait(settings, tokenizer, note):
    data, _ = open_datasets(settings, tokenizer, SEQ_LEN, seed=1)
    loads = Loader(data, settings, global_batch_size=2)
    next(loads)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    workers = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    note.with_suffix(".new").write_text(" ".join(workers))
    note.with_suffix(".new").rename(note)
    time.sleep(600)


def test_a_killed_job_leaves_no_worker_behind(settings, tmp_path):
    options = DataConfig(**vars(settings) | {"loader_workers": 1})
    job = multiprocessing.get_context("spawn").Process(target=_load_and_wait, args=(options, tiny(), tmp_path / "workers"))
    job.start()
    try:
        end = time.monotonic() + 120
        while not (tmp_path / "workers").exists():
            assert job.is_alive() and time.monotonic() < end
            time.sleep(0.1)
    finally:
        os.kill(job.pid, signal.SIGKILL)
        job.join()
    workers = [int(pid) for pid in (tmp_path / "workers").read_text().split()]
    assert workers
    end = time.monotonic() + 20
    while any(_runs(pid) for pid in workers):
        assert time.monotonic() < end, "a worker outlived its job"
        time.sleep(0.1)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
