"""The token cache: keyed by what matters, built once, whole or not at all, whoever is killed."""

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from megatron_nb.data import prepare as preparing
from megatron_nb.data.chatml import TEMPLATE
from megatron_nb.data.dataset import check_vocabulary, open_datasets
from megatron_nb.data.formats import read
from megatron_nb.data.render import Renderer
from megatron_nb.data.sources import DataConfig, SourceConfig
from tests.data.data_tokenizers import chat, tiny, write_rows

ROWS = [chat(f"question {number} " * (number % 7 + 1), f"answer {number}") for number in range(60)]


@pytest.fixture
def small_shards(monkeypatch):
    """Shards of a few rows, so that little data makes many."""

    def chunks(source):
        rows = [row for file in source.files for row in preparing.rows.raw_rows(file)]
        yield from (rows[start : start + 10] for start in range(0, len(rows), 10))

    monkeypatch.setattr(preparing.Source, "chunks", chunks)


def config(folder, **options):
    return DataConfig(sources={}, cache_dir=str(folder / "cache"), **{"workers": 0} | options)


def opened(file, settings, tokenizer=None, **source):
    (cache,) = preparing.prepare({"s": SourceConfig(str(file), **source)}, settings, tokenizer or tiny()).values()
    return cache


def test_a_cache_holds_what_rendering_gives(tmp_path, small_shards):
    file = write_rows(tmp_path / "rows.jsonl", [*ROWS[:-1], {"text": "plain words"}])
    cache = opened(file, config(tmp_path))
    expected = [row.sample("s") for rows in Renderer(tiny())(list(read(str(file), "s"))) for row in rows]
    assert len(cache) == len(expected) == 60
    assert cache.index["shards"] == 6
    for row, sample in enumerate(expected):
        found = cache.sample(row)
        assert found.sample_id == f"s/{sample.sample_id}" and found.source == "s"
        for name in ("ids", "loss_weight", "turn_id"):
            assert getattr(found, name).tolist() == getattr(sample, name).tolist()
            assert getattr(found, name).dtype == getattr(sample, name).dtype
    assert cache.lengths.tolist() == [len(sample) for sample in expected]
    assert cache.trained(10**6).tolist() == [int(sample.loss_weight[1:].sum()) for sample in expected]
    assert cache.index["tokens"] == sum(map(len, expected))


def test_a_sample_is_cut_to_a_limit_with_its_counts(tmp_path):
    cache = opened(write_rows(tmp_path / "rows.jsonl", ROWS), config(tmp_path))
    limit = int(np.median(cache.lengths))
    for row in range(len(cache)):
        cut, whole = cache.sample(row, limit), cache.sample(row)
        assert cut.ids.tolist() == whole.ids[:limit].tolist()
        assert cut.loss_weight.tolist() == whole.loss_weight[:limit].tolist()
        assert cache.trained(limit)[row] == cut.loss_weight[1:].sum()


def test_the_same_settings_read_the_cache_without_building(tmp_path, monkeypatch):
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    first = opened(file, config(tmp_path))
    monkeypatch.setattr(preparing.Workers, "build", None)
    assert opened(file, config(tmp_path, workers=3)).digest == first.digest


@pytest.mark.parametrize(
    "change", ["rows", "file name", "template", "tokenizer", "history", "keep_all_think", "bad_rows", "format"]
)
def test_whatever_matters_gives_another_cache(tmp_path, change):
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    first = opened(file, config(tmp_path))
    tokenizer, options, source = tiny(), {}, {}
    if change == "rows":
        write_rows(file, [chat("question X " * (n % 7 + 1), f"answer {n}") for n in range(60)])
    elif change == "file name":
        file = file.rename(tmp_path / "other.jsonl")
    elif change == "template":
        tokenizer = tiny(TEMPLATE.replace("Functions", "functions"))
    elif change == "tokenizer":
        tokenizer.add_tokens(["question"])
    elif change == "format":
        source = {"format": "messages"}
    else:
        options = {change: {"history": "per_turn", "keep_all_think": True, "bad_rows": "skip"}[change]}
    assert opened(file, config(tmp_path, **options), tokenizer, **source).folder != first.folder


def test_a_file_changed_in_place_is_noticed(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    first = opened(file, config(tmp_path))
    write_rows(file, [chat("Question", "answer")] * 60)
    assert opened(file, config(tmp_path)).digest != first.digest


def test_all_bad_rows_are_found_before_anything_is_tokenised(tmp_path, small_shards):
    good = write_rows(tmp_path / "good.jsonl", ROWS)
    bad = write_rows(tmp_path / "bad.jsonl", [*ROWS, {"messages": [{"role": "bot"}]}, *ROWS, {"messages": []}])
    settings = config(tmp_path)
    with pytest.raises(ValueError) as error:
        preparing.prepare({"good": SourceConfig(str(good)), "bad": SourceConfig(str(bad))}, settings, tiny())
    assert "data source bad: 2 of 122 rows cannot be used" in str(error.value)
    assert "bad.jsonl:61: message 1: role is 'bot'" in str(error.value)
    assert "bad.jsonl:122: messages is '[]'" in str(error.value)
    assert not list((tmp_path / "cache").glob("*/0*"))


def test_bad_rows_can_be_left_out_and_are_counted(tmp_path, caplog):
    file = write_rows(tmp_path / "rows.jsonl", [*ROWS, {"messages": []}])
    with caplog.at_level(logging.WARNING):
        cache = opened(file, config(tmp_path, bad_rows="skip"))
    assert (cache.index["rows"], cache.index["samples"], cache.index["skipped"]) == (61, 60, 1)
    assert "1 bad rows left out" in caplog.text and "rows.jsonl:61" in caplog.text


def test_leaving_out_every_row_is_an_error(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [{"messages": []}] * 3)
    with pytest.raises(ValueError, match="3 of 3 rows cannot be used"):
        opened(file, config(tmp_path, bad_rows="skip"))


def test_samples_without_a_trained_token_are_named(tmp_path, caplog):
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "loss": 0}], "id": "silent"}
    file = write_rows(tmp_path / "rows.jsonl", [*ROWS[:3], row])
    with caplog.at_level(logging.WARNING):
        opened(file, config(tmp_path))
    assert "1 samples have no trained token" in caplog.text and "silent" in caplog.text


@pytest.mark.parametrize("place", ["sources", "validation"])
def test_a_source_without_any_trained_token_is_refused(tmp_path, place):
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "loss": 0}], "id": "silent"}
    silent = SourceConfig(str(write_rows(tmp_path / "silent.jsonl", [row] * 3)))
    settings = config(tmp_path)
    settings.sources["good"] = SourceConfig(str(write_rows(tmp_path / "rows.jsonl", ROWS[:3])))
    getattr(settings, place)["mute"] = silent
    with pytest.raises(ValueError, match="source mute: none of its 3 samples has a trained token.*silent"):
        open_datasets(settings, tiny(), 128, 1)


def test_wrong_weights_are_refused_before_anything_is_read(tmp_path):
    settings = config(tmp_path)
    settings.sources |= {"a": SourceConfig("nowhere", 1.0), "b": SourceConfig("nowhere", -1.0)}
    with pytest.raises(ValueError, match="weight of source 'b' is -1"):
        open_datasets(settings, tiny(), 128, 1)


def test_a_token_beyond_the_vocabulary_is_named(tmp_path):
    tokenizer = tiny()
    tokenizer.add_tokens(["zebra"])
    file = write_rows(tmp_path / "rows.jsonl", [*ROWS, chat("q", "a zebra", id="stripes")])
    cache = opened(file, config(tmp_path), tokenizer)
    with pytest.raises(ValueError, match="sample stripes holds token 400 .'zebra'., beyond model.vocab_size=400"):
        check_vocabulary(cache, tokenizer, 400)
    check_vocabulary(cache, tokenizer, 401)


def test_several_processes_give_the_same_cache_as_one(tmp_path, small_shards, monkeypatch):
    monkeypatch.setattr(preparing, "POOLED", 0)
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    alone = opened(file, config(tmp_path / "alone"))
    assert opened(file, config(tmp_path / "together", workers=2)).digest == alone.digest


def _build_slowly(file, folder, shards, seconds):
    """Top level, for another process: builds small shards and waits after some of them."""
    build = preparing._build

    def slow(task, source, renderer):
        if task[0] == shards:
            (folder / "waiting").touch()
            time.sleep(seconds)
        with open(folder / "built", "a") as note:
            note.write(f"{os.getpid()} {task[0]}\n")
        return build(task, source, renderer)

    def chunks(source):
        rows = [row for file in source.files for row in preparing.rows.raw_rows(file)]
        yield from (rows[start : start + 10] for start in range(0, len(rows), 10))

    preparing._build, preparing.Source.chunks = slow, chunks
    opened(file, config(folder))


def _start(*arguments):
    process = multiprocessing.get_context("spawn").Process(target=_build_slowly, args=arguments)
    process.start()
    return process


def _wait_for(path, seconds=120):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.05)


def test_a_killed_builder_leaves_finished_shards_that_the_next_one_uses(tmp_path, small_shards, monkeypatch):
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    process = _start(file, tmp_path, 3, 600)
    _wait_for(tmp_path / "waiting")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert sorted(path.name for path in folder.iterdir()) == ["00000", "00001", "00002"]
    (folder / "00003.part").mkdir()  # as left by a kill while a shard is written
    written = []
    write = preparing.cache.write_shard
    monkeypatch.setattr(preparing.cache, "write_shard", lambda part, *rest: (written.append(part.name), write(part, *rest)))
    cache = opened(file, config(tmp_path))
    assert written == ["00003.part", "00004.part", "00005.part"]
    assert cache.digest == opened(file, config(tmp_path / "fresh")).digest


def test_of_two_ranks_one_builds_and_the_other_waits(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    first = _start(file, tmp_path, 2, 3)
    _wait_for(tmp_path / "waiting")
    second = _start(file, tmp_path, 2, 0)
    for process in (first, second):
        process.join()
        assert process.exitcode == 0
    built = [line.split() for line in (tmp_path / "built").read_text().splitlines()]
    assert sorted(shard for _, shard in built) == list("012345")
    assert {pid for pid, _ in built} == {str(first.pid)}


def test_a_worker_that_dies_is_an_error_with_a_remedy(tmp_path, small_shards, monkeypatch):
    monkeypatch.setattr(preparing, "POOLED", 0)
    monkeypatch.setattr(preparing, "_build", _die)
    with pytest.raises(RuntimeError, match="a tokenising process died.*run again, with fewer data.workers"):
        opened(write_rows(tmp_path / "rows.jsonl", ROWS), config(tmp_path, workers=2))


def _die(task, source, renderer):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_full_disk_is_an_error_that_keeps_finished_shards(tmp_path, small_shards, monkeypatch):
    write = preparing.cache.write_shard

    def full(part, *rest):
        if part.name.startswith("00002"):
            raise OSError(28, "No space left on device")
        write(part, *rest)

    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.setattr(preparing.cache, "write_shard", full)
    with pytest.raises(RuntimeError, match="No space left on device.*finished shards are kept"):
        opened(file, config(tmp_path))
    monkeypatch.setattr(preparing.cache, "write_shard", write)
    assert len(opened(file, config(tmp_path))) == 60


def test_the_index_says_what_it_was_built_from(tmp_path):
    cache = opened(write_rows(tmp_path / "rows.jsonl", ROWS), config(tmp_path))
    key = json.loads((cache.folder / "index.json").read_text())["key"]
    assert key["history"] == "full" and key["files"][0][0] == "rows.jsonl"


def test_a_script_without_a_main_guard_is_not_started_again_by_its_workers(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [chat("word", "answer")] * 9)
    tiny().save_pretrained(tmp_path / "tokenizer")
    script = tmp_path / "script.py"
    script.write_text(
        f"""
open({str(tmp_path / "started")!r}, "a").write("x")
from megatron_nb.data import prepare
from megatron_nb.data.dataset import open_datasets
from megatron_nb.data.loader import Loader
from megatron_nb.data.sources import DataConfig, SourceConfig
from megatron_nb.data.tokenizer import load_tokenizer
prepare.POOLED = 0
config = DataConfig({{"s": SourceConfig({str(file)!r})}}, cache_dir={str(tmp_path / "cache")!r}, workers=2)
data, _ = open_datasets(config, load_tokenizer({str(tmp_path / "tokenizer")!r}), 256, 1)
assert next(Loader(data, config, global_batch_size=1))[0].count
"""
    )
    subprocess.run([sys.executable, str(script)], check=True, timeout=200)
    assert (tmp_path / "started").read_text() == "x"
