"""What a run tells: work counted over documents, one row per step whatever was killed, plots, and one wandb id."""
from __future__ import annotations

import json
import logging
import math
import time

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from megatron_nb.model.shape import ModelConfig
from megatron_nb.records import Batch
from megatron_nb.run import Run
from megatron_nb.training import metrics as metrics_module
from megatron_nb.training.metrics import LogConfig, Metrics, duration, smooth, work

TINY = ModelConfig(
    num_layers=2, hidden_size=8, num_attention_heads=2, num_query_groups=1, head_dim=4, ffn_hidden_size=16, vocab_size=32
)
OFF = LogConfig(wandb="off", peak_tflops=1e-6)


@pytest.fixture
def run(tmp_path):
    with Run.open(tmp_path / "demo", "a: 1") as run:
        yield run


def pack(lengths: list[int], fill: int) -> Batch:
    """A pack of documents and a tail of `fill` positions without a sample."""
    bounds = torch.tensor([0, *np.cumsum(lengths + ([fill] if fill else []))])
    tokens = torch.zeros(int(bounds[-1]), dtype=torch.int64)
    names = [f"sample-{i}" for i in range(len(lengths))] + [""] * bool(fill)
    return Batch(tokens, tokens, tokens.float(), tokens, tokens, bounds, 0, names)


def tell(metrics: Metrics, steps: range, **more: float) -> None:
    for step in steps:
        metrics.start_step()
        metrics.step(step, loss=5.0 - step, lr=1e-5, grad_norm=1.0, tokens=100, squared_lengths=5000, **more)


def rows(run: Run) -> list[dict]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def test_work_counts_documents_and_not_the_fill():
    assert work([pack([3, 5], fill=8), pack([4], fill=0), pack([], fill=16)]) == (12, 9 + 25 + 16)


def test_mfu_counts_weights_once_a_token_and_attention_by_the_pairs_of_each_document():
    per_layer = 8 * (2 + 2 * 1 + 2) * 4 + 3 * 8 * 16  # q, k, v, o and the gated MLP
    weights = 2 * per_layer + 8 * 32  # the head too
    pairs = 2 * 2 * 4 * (9 + 25) / 2  # layers * heads * head size * causal pairs
    assert TINY.train_flops(8, 9 + 25) == 6 * weights * 8 + 12 * pairs
    assert ModelConfig().train_flops(262144, 262144**2) / 262144 == pytest.approx(150e9, rel=0.01)


def test_throughput_and_mfu_are_per_device_and_only_over_the_step_itself(run, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: clock[0])
    metrics = Metrics(run, OFF, TINY, num_steps=2, devices=4)
    for step in (1, 2):
        clock[0] += 100.0  # validation, a save
        metrics.start_step()
        clock[0] += 2.0
        metrics.step(step, loss=1.0, lr=1e-5, grad_norm=1.0, tokens=800, squared_lengths=640)
    summary = metrics.close()
    assert [row["tokens_per_s_device"] for row in rows(run)] == [100.0, 100.0]
    assert summary["mfu"] == pytest.approx(TINY.train_flops(800, 640) / 2 / 4 / 1e6)
    assert summary["tokens"] == 1600 and summary["seconds_per_step"] == 2.0


def test_without_a_peak_no_mfu_is_told(run, caplog):
    caplog.set_level(logging.INFO)
    metrics = Metrics(run, LogConfig(wandb="off"), TINY, num_steps=1, devices=1)
    tell(metrics, range(1, 2))
    assert "mfu" not in metrics.close()
    assert "MFU" not in caplog.text


def test_console_line_has_place_loss_rate_and_time_left(run, caplog):
    caplog.set_level(logging.INFO)
    metrics = Metrics(run, LogConfig(wandb="off", peak_tflops=1.0, every=5), TINY, num_steps=12, devices=1)
    tell(metrics, range(1, 13))
    lines = [line for line in caplog.messages if line.startswith("step")]
    assert [line.split()[:2] for line in lines] == [["step", "5/12"], ["step", "10/12"], ["step", "12/12"]]
    for word in ("loss -5.0000", "lr 1.00e-05", "grad 1.000", "tokens/s/device", "MFU", "s/step", "left"):
        assert word in lines[1]
    metrics.close()


def test_time_left_counts_pauses_too(run, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    clock = [0.0]
    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: clock[0])
    metrics = Metrics(run, OFF, TINY, num_steps=10, devices=1)
    for step in range(1, 6):
        clock[0] += 8.0
        metrics.start_step()
        clock[0] += 2.0
        metrics.step(step, loss=1.0, lr=1e-5, grad_norm=1.0, tokens=8, squared_lengths=8)
    assert caplog.messages[-1].endswith("left 50 s")
    metrics.close()


def test_a_resume_continues_the_rows_without_a_gap_or_a_double(run):
    metrics = Metrics(run, OFF, TINY, num_steps=9, devices=1)
    tell(metrics, range(1, 8))  # killed after step 7; the last checkpoint is of step 5
    with run.metrics.open("a") as file:
        file.write('{"step": 8, "lo')
    metrics._file.close()
    resumed = Metrics(run, OFF, TINY, num_steps=9, devices=1, first_step=5)
    tell(resumed, range(6, 10))
    assert [row["step"] for row in rows(run)] == list(range(1, 10))
    assert resumed.close()["tokens"] == 900  # the summary is of the whole run


def test_rows_are_json_even_when_the_loss_is_not_a_number(run):
    metrics = Metrics(run, OFF, TINY, num_steps=2, devices=1)
    metrics.step(1, loss=math.nan, lr=1e-5, grad_norm=math.inf, tokens=8, squared_lengths=8)
    metrics.step(2, loss=1.0, lr=1e-5, grad_norm=1.0, tokens=8, squared_lengths=8)
    assert [(row["loss"], row["grad_norm"]) for row in rows(run)] == [(None, None), (1.0, 1.0)]
    summary = metrics.close()
    assert all(math.isfinite(value) for value in summary.values())
    run.write_summary(seed=1, **summary)


def test_plot_shows_loss_heldout_rate_and_throughput(run):
    metrics = Metrics(run, LogConfig(wandb="off", plot_every=3), TINY, num_steps=8, devices=1)
    tell(metrics, range(1, 4))
    first = (run.plots / "training.png").read_bytes()
    metrics.note(3, heldout_loss=2.5)
    tell(metrics, range(4, 9))
    metrics.close()
    picture = imread(run.plots / "training.png")
    assert (run.plots / "training.png").read_bytes() != first
    assert picture.shape[:2] == (960, 1080)
    colours = {tuple(pixel) for pixel in (picture[..., :3].reshape(-1, 3) * 255).round().astype(int).tolist()}
    # training, held-out, learning rate, throughput: each line is there
    assert {(31, 119, 180), (255, 127, 14), (44, 160, 44), (148, 103, 189)} <= colours


def test_other_ranks_stay_silent(tmp_path, run):
    other = Run.open(tmp_path / "demo", "", rank=1, share=lambda _: (1, False, None))
    metrics = Metrics(other, OFF, TINY, num_steps=2, devices=2)
    tell(metrics, range(1, 3))
    metrics.note(2, heldout_loss=1.0)
    assert metrics.close() == {}
    other.close()
    assert not run.metrics.exists()


def test_a_resumed_run_keeps_its_wandb_id(run):
    config = LogConfig(wandb="offline")
    for first in (0, 2):
        metrics = Metrics(run, config, TINY, num_steps=4, devices=1, first_step=first, settings={"seed": 1})
        tell(metrics, range(first + 1, first + 3))
        metrics.close()
        time.sleep(1.1 if first == 0 else 0)  # wandb names the folders by the second
    folders = sorted(path.name for path in (run.folder / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert {name.rsplit("-", 1)[1] for name in folders} == {(run.folder / "wandb_id").read_text()}


def test_wandb_can_be_turned_off_by_its_own_variable(run, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    Metrics(run, LogConfig(), TINY, num_steps=1, devices=1).close()
    assert not (run.folder / "wandb").exists()


@pytest.mark.parametrize("field", ["every", "plot_every", "peak_tflops"])
def test_settings_that_mean_nothing_are_refused(field):
    with pytest.raises(ValueError, match=f"log.{field}=0 must be positive"):
        LogConfig(**{field: 0})


def test_durations_read_well():
    read = [duration(seconds) for seconds in (0.4, 59.6, 83, 3723, 90000)]
    assert read == ["0 s", "1 min 00 s", "1 min 23 s", "1 h 02 min", "25 h 00 min"]


def test_smoothing_is_unbiased_and_blind_to_nan():
    assert smooth([2.0] * 5, 3) == pytest.approx([2.0] * 5)
    assert smooth([math.nan, 1.0, math.nan], 10)[1:] == [1.0, 1.0]
