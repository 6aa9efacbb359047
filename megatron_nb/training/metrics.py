"""What a training run tells: a console line, metrics.jsonl, wandb and plots/training.png, all from rank 0.

    tokens/s/device = real tokens / seconds of the step / devices
    MFU             = ModelConfig.train_flops(tokens, sum of len_i^2) / seconds / devices / peak
                      6 operations per weight and token (head included, embedding table not), causal attention by the pairs
                      each document needs; recomputation, padding and the tail of a pack do not count as work

Both count documents, so packing shorter ones together changes the work reported, as it changes the work done.
"""
from __future__ import annotations

import json
import logging
import math
import os
import resource
import statistics
import sys
import time
import uuid
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any, Literal

import torch
from matplotlib.figure import Figure

from megatron_nb.model.shape import ModelConfig
from megatron_nb.records import Batch
from megatron_nb.run import Run, write_atomic

log = logging.getLogger(__name__)


@dataclass
class LogConfig:
    """What is told, and where."""

    every: int = 1  # steps between console lines; metrics.jsonl has every step
    plot_every: int = 100  # steps between drawings; the last step is always drawn
    wandb: Literal["auto", "online", "offline", "off"] = "auto"  # auto: online when a key is set up, else offline
    wandb_project: str = "megatron_nb"
    peak_tflops: float | None = None  # of one device in the model's dtype, for MFU; null: no MFU

    def __post_init__(self):
        for name in ("every", "plot_every", "peak_tflops"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"log.{name}={value} must be positive")


def work(packs: list[Batch]) -> tuple[int, int]:
    """(real tokens, sum of len_i^2) over the documents of `packs`; the tail fill of a pack is no document."""
    tokens = squared = 0
    for pack in packs:
        real = torch.tensor([bool(sample_id) for sample_id in pack.sample_ids], dtype=torch.bool)
        lengths = pack.cu_seqlens.diff()[real]
        tokens += int(lengths.sum())
        squared += int(lengths.square().sum())
    return tokens, squared


class Metrics:
    """The teller of one run. Steps are numbers of updates done: the first is 1, and a resume goes on after `first_step`."""

    def __init__(
        self, run: Run, config: LogConfig, model: ModelConfig, *, num_steps: int, devices: int, first_step: int = 0,
        settings: dict[str, Any] | None = None,
    ):  # fmt: skip
        """devices: processes of the world, one device each; settings: the flat configuration, for wandb."""
        self.run, self.config, self.model = run, config, model
        self.num_steps, self.devices = num_steps, devices
        self.tells = run.rank == 0
        self.rows: list[dict[str, Any]] = []
        self._wandb = self._file = None
        self._walls: list[float] = []  # seconds from step to step, pauses for saving and validation included
        if self.tells:
            self.rows = _read_up_to(run, first_step)
            self._file = run.metrics.open("a")
            self._wandb = _start_wandb(run, config, settings or {})
        self.start_step()
        self._last = self._began

    def start_step(self) -> None:
        """Start the step's clock; what ran since the last step (validation, a save) is not its work."""
        self._began = time.perf_counter()

    def step(
        self, step: int, *, loss: float, lr: float, grad_norm: float, tokens: int, squared_lengths: int, **more: float
    ) -> None:
        """Tell one update. tokens and squared_lengths: `work` summed over the data-parallel ranks."""
        if not self.tells:
            return
        now = time.perf_counter()
        seconds = max(now - self._began, 1e-9)
        self._walls = [*self._walls[-20:], now - self._last]
        self._last = self._began = now
        row = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens": tokens, "seconds": seconds}
        row["tokens_per_s_device"] = tokens / seconds / self.devices
        if self.config.peak_tflops:
            flops = self.model.train_flops(tokens, squared_lengths)
            row["mfu"] = flops / seconds / self.devices / (self.config.peak_tflops * 1e12)
        row["peak_memory_gb"] = _peak_memory() / 1e9
        self._write(step, {**row, **more})
        if step % self.config.every == 0 or step == self.num_steps:
            log.info(self._line(step, row))
        if step % self.config.plot_every == 0 and step != self.num_steps:
            self.plot()

    def note(self, step: int, **values: float) -> None:
        """Tell values that do not come with every step, such as heldout_loss."""
        if self.tells:
            self._write(step, values)
            log.info("  ".join([self._place(step), *(f"{name} {value:.4g}" for name, value in values.items())]))

    def close(self) -> dict[str, float]:
        """Draw the plots, close everything; returns the numbers for summary.json (empty before the first step)."""
        if not self.tells:
            return {}
        try:
            self._file.close()
            if self.rows:
                self.plot()
        except OSError as error:  # a full disk: what ended the job must not be hidden by this
            log.warning("the last metrics or plots were not written: %s", error)
        if self._wandb is not None:
            self._wandb.finish()
        steps = [row for row in self.rows if "seconds" in row]
        if not steps:
            return {}
        summary = {
            "steps": steps[-1]["step"],
            "tokens": sum(row["tokens"] for row in steps),
            "seconds_per_step": statistics.median(row["seconds"] for row in steps),
            "tokens_per_s_device": statistics.median(row["tokens_per_s_device"] for row in steps),
            "peak_memory_gb": max(row["peak_memory_gb"] for row in steps),
        }
        if "mfu" in steps[-1]:
            summary["mfu"] = statistics.median(row["mfu"] for row in steps if "mfu" in row)
        for name in sorted({name for row in self.rows for name in row if name.startswith("heldout")}):
            values = [row[name] for row in self.rows if row.get(name) is not None]
            if values:
                summary |= {f"{name}_before": values[0], f"{name}_after": values[-1]}
        losses = [row["loss"] for row in steps if row["loss"] is not None]
        return summary | ({"loss_first": losses[0], "loss_last": losses[-1]} if losses else {})

    def plot(self) -> None:
        """plots/training.png: loss (with held-out points), learning rate, throughput."""
        write_atomic(self.run.plots / "training.png", draw(self.rows, self.run.folder.name))

    def _write(self, step: int, values: dict[str, Any]) -> None:
        finite = {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}
        row = {"step": step, "time": round(time.time(), 3), **finite}
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log({"step": step, **values})

    def _place(self, step: int) -> str:
        return f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}"

    def _line(self, step: int, row: dict[str, Any]) -> str:
        wall = statistics.median(self._walls)
        return "  ".join(
            [
                self._place(step),
                f"loss {row['loss']:.4f}",
                f"lr {row['lr']:.2e}",
                f"grad {row['grad_norm']:.3f}",
                f"{row['tokens_per_s_device']:,.0f} tokens/s/device",
                *([f"MFU {row['mfu']:.1%}"] if "mfu" in row else []),
                f"{row['seconds']:.3g} s/step",
                f"{row['peak_memory_gb']:.1f} GB",
                f"left {duration(wall * (self.num_steps - step))}",
            ]
        )


def duration(seconds: float) -> str:
    """3723 -> '1 h 02 min'; 83 -> '1 min 23 s'."""
    seconds = round(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 60} min {seconds % 60:02d} s" if seconds >= 60 else f"{seconds} s"


def draw(rows: list[dict[str, Any]], title: str) -> bytes:
    """The PNG of a run's rows (those of metrics.jsonl)."""
    figure = Figure(figsize=(9, 8), dpi=120, layout="constrained")
    figure.suptitle(title)
    loss, lr, speed = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    for axis in (loss, lr, speed):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    steps = [row for row in rows if "seconds" in row]
    x, losses = [row["step"] for row in steps], [math.nan if row["loss"] is None else row["loss"] for row in steps]
    dots = {"marker": "o", "markersize": 3} if len(steps) < 50 else {}
    loss.plot(x, losses, color="C0", alpha=0.35 if len(steps) >= 50 else 1.0, linewidth=1.2, label="training", **dots)
    if len(steps) >= 50:
        loss.plot(x, smooth(losses, len(steps) // 40), color="C0", linewidth=1.8, label="training, smoothed")
    heldout = sorted({name for row in rows for name in row if name.startswith("heldout_loss")})
    for i, name in enumerate(heldout):
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        loss.plot(*zip(*points), color=f"C{i + 1}", marker="o", markersize=4, linewidth=1.2, label=name.replace("_", " "))
    loss.set_ylabel("loss")
    loss.legend(frameon=False)
    lr.plot(x, [row["lr"] for row in steps], color="C2", linewidth=1.5)
    lr.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    lr.set_ylabel("learning rate")
    rates = [row["tokens_per_s_device"] for row in steps]
    speed.plot(x, rates, color="C4", linewidth=1.2, **dots)
    speed.set_ylabel("tokens / s / device")
    speed.set_ylim(0, 1.15 * max(rates, default=1.0))
    speed.set_xlabel("step")
    speed.xaxis.get_major_locator().set_params(integer=True)
    image = BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def smooth(values: list[float], span: int) -> list[float]:
    """Exponential moving mean over about `span` values, unbiased at the start, blind to NaN."""
    total = weight = 0.0
    means, keep = [], 1 - 1 / max(span, 1)
    for value in values:
        if not math.isnan(value):
            total, weight = keep * total + value, keep * weight + 1
        means.append(total / weight if weight else math.nan)
    return means


def _read_up_to(run: Run, step: int) -> list[dict[str, Any]]:
    """The rows of earlier attempts up to `step`; later ones, which a resume repeats, and a torn line leave the file."""
    lines = run.metrics.read_text().splitlines() if run.metrics.exists() else []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["step"] <= step:
            rows.append(row)
    if len(rows) < len(lines):
        log.info("metrics.jsonl: %d rows after step %d are dropped: they will be computed again", len(lines) - len(rows), step)
        write_atomic(run.metrics, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


def _peak_memory() -> int:
    """Bytes: of the device, or of this process where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _start_wandb(run: Run, config: LogConfig, settings: dict[str, Any]) -> Any:
    """The wandb run of this run folder (the same id over all attempts), or None when it is off."""
    mode = config.wandb if config.wandb != "auto" else os.environ.get("WANDB_MODE", "auto")
    if mode in ("off", "disabled"):
        return None
    import wandb  # half a second, and only rank 0 tells

    asked = mode
    if asked == "auto":
        mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
    name = run.folder / "wandb_id"
    if not name.exists():
        write_atomic(name, uuid.uuid4().hex[:8])
    quiet = wandb.Settings(silent=True, console="off", init_timeout=30)
    start = partial(wandb.init, project=config.wandb_project, name=run.folder.name, id=name.read_text(), resume="allow",
                    dir=run.folder, config=settings, settings=quiet)  # fmt: skip
    try:
        started = start(mode=mode)
    except wandb.Error as error:
        if asked != "auto":
            raise
        log.warning("wandb: the server does not answer (%s); this attempt is kept offline", error)
        wandb.teardown()  # its service still holds the id
        mode, started = "offline", start(mode="offline")
    started.define_metric("*", step_metric="step")  # a resume repeats steps, which wandb's own counter would refuse
    log.info("wandb: %s", started.url if mode == "online" else f"offline; `wandb sync {run.folder}/wandb/offline-run-*`")
    return started
