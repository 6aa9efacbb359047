"""Supervised fine-tuning: next-token loss on assistant turns, packed conversations, 2k to 256k tokens.

python -m megatron_nb.sft [overrides]                              one process
torchrun --nproc-per-node N -m megatron_nb.sft [overrides]         N ranks
python -m megatron_nb.sft context=256k parallel=h100_256k --dry-run
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from megatron_nb.config import flatten, job, to_yaml
from megatron_nb.data.dataset import Dataset, open_datasets
from megatron_nb.data.loader import Loader, Validation
from megatron_nb.data.packing import collate, pack
from megatron_nb.data.sources import DataConfig
from megatron_nb.data.tokenizer import load_tokenizer, tokenizer_digest
from megatron_nb.launch import LaunchConfig, elsewhere, look_around, open_run, watchdog, world_of
from megatron_nb.losses.next_token import NextToken
from megatron_nb.model.gpt import build, check_layout
from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel import topology
from megatron_nb.parallel.topology import ON_CPU, ParallelConfig
from megatron_nb.records import Sample
from megatron_nb.training import memory, preflight
from megatron_nb.training.checkpoint import CheckpointConfig, Checkpoints
from megatron_nb.training.loop import count_bad, save_or_leave
from megatron_nb.training.metrics import LogConfig, Metrics
from megatron_nb.training.optimizer import OptimizerConfig, describe, schedule_lengths
from megatron_nb.training.signals import StopSignal
from megatron_nb.training.start import companions, find_origin, load_start
from megatron_nb.training.trainer import StepResult, Trainer

log = logging.getLogger(__name__)


@dataclass
class SftConfig:
    """One stage of supervised fine-tuning."""

    name: str | None = None  # run folder runs_dir/name; None: derived from the configuration
    runs_dir: str = "runs"
    seed: int = 1234
    init_from: str | None = None  # Hugging Face folder, run, or step folder: weights, tokenizer and template
    seq_len: int = 32768  # tokens of a pack
    num_steps: int = 1000
    global_batch_size: int = 64  # packs per update
    micro_batch_size: int = 1  # packs per forward pass
    validate_every: int = 100  # updates between held-out losses; the first and the last are always taken
    layer_norms_every: int | None = None  # updates between reports of gradient norms by layer
    stop_after_bad_steps: int = 5  # updates in a row that were refused for NaN or inf
    rehearse: bool = False  # run the largest step once before the first one, to meet the memory peak early
    replay_step: int | None = None  # report on the batch of this step with the weights of the newest checkpoint, and stop
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self):
        for name in ("seq_len", "num_steps", "global_batch_size", "micro_batch_size", "validate_every", "stop_after_bad_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("replay_step", "layer_norms_every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1 (steps count from 1), or null for none")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative: the generators take no such seed")
        check_layout(self.model, self.parallel)
        schedule_lengths(self.optimizer, self.num_steps)
        self.parallel.check_pack_length(self.seq_len)
        if self.seq_len > self.model.max_position_embeddings:
            raise ValueError(
                f"seq_len={self.seq_len} is above model.max_position_embeddings={self.model.max_position_embeddings}: "
                "a document could be as long as a pack; raise the latter with a rope_theta that was made for it"
            )


def describe_job(config: SftConfig) -> str:
    """What the dry run prints below the configuration. ValueError when it cannot run or does not fit."""
    config.data.validate()
    world = world_of(config)
    p, data_size = config.parallel, config.parallel.data_size(world)
    packs_per_rank = -(-config.global_batch_size // data_size)
    plan = memory.plan(config.model, p, world, config.seq_len * config.micro_batch_size)
    if p.device_memory_gb:
        memory.check_fits(plan, p.device_memory_gb)
    tokens = config.seq_len * config.global_batch_size
    flops = config.global_batch_size * config.model.train_flops(config.seq_len, config.seq_len**2)
    return "\n".join(
        [
            f"model        {config.model.num_parameters:,} parameters, {config.model.dtype}, backend {config.model.backend}",
            f"ranks        {world} = data {data_size} * pipeline {p.pipeline} * context {p.context} * tensor {p.tensor}, "
            f"{p.communication}",
            f"step         {config.global_batch_size} packs of {config.seq_len} = {tokens:,} tokens; "
            f"{-(-packs_per_rank // config.micro_batch_size)} micro-batches a rank; at most {flops / 1e12:,.4g} TFLOP",
            f"optimizer    {describe(config.optimizer)}, {config.optimizer.schedule} from {config.optimizer.lr:g}, "
            f"{config.num_steps} steps",
            f"memory of the fullest rank (pack of {config.seq_len * config.micro_batch_size} tokens, recompute {p.recompute})"
            + (f", device {p.device_memory_gb:g} GB" if p.device_memory_gb else ""),
            plan.table(),
        ]
    )


def rehearse(trainer: Trainer, config: SftConfig) -> None:
    """Forward and backward of one full pack per pipeline stage: what will not fit fails here, before the first step."""
    row = Sample(np.zeros(config.seq_len, np.int64), np.ones(config.seq_len, np.float32), sample_id="rehearsal")
    packs = [collate([pack([row], config.seq_len)] * config.micro_batch_size)] * config.parallel.pipeline
    trainer.gradients(packs, NextToken())
    if torch.cuda.is_available():
        log.info("rehearsal: peak %.1f GB of device memory", torch.cuda.max_memory_allocated() / 1e9)


def heldout(trainer: Trainer, sets: dict[str, Dataset], config: SftConfig) -> dict[str, float]:
    """Loss per trained token of every held-out source and of all of them, every item once."""
    t, p, losses, total, tokens = trainer.topology, config.parallel, {}, 0.0, 0
    for name, dataset in sets.items():
        passes = Validation(
            dataset, config.data, micro_batch_size=config.micro_batch_size, data_rank=t.data_rank, data_size=t.data_size,
            multiple=p.pack_multiple, micro_multiple=p.pipeline,
        )  # fmt: skip
        value, count = trainer.evaluate(list(passes), NextToken())
        losses[f"heldout_loss_{name}"] = value / max(count, 1)
        total, tokens = total + value, tokens + count
    return {"heldout_loss": total / max(tokens, 1), **losses} if sets else {}


def replay(trainer: Trainer, loader: Loader, step: int) -> None:
    """Print the loss of the batch of `step`, numbered as in the log, micro-batch by micro-batch; weights stay as they are."""
    stages = trainer.topology.pipeline_size
    for number, batch in enumerate(loader.batch(step - 1)):  # the loader counts from 0
        total, count, *_ = trainer.gradients([batch] * stages, NextToken())
        names = ", ".join(sample_id for sample_id in batch.sample_ids if sample_id)
        mean, tokens = total / max(count, 1), count // stages
        log.info("step %d, micro-batch %d: loss %.6f over %d tokens: %s", step, number, mean, tokens, names)


def train(
    trainer: Trainer, loader: Loader, sets: dict[str, Dataset], checkpoints: Checkpoints, metrics: Metrics, stop: StopSignal,
    config: SftConfig, first: int,
) -> None:  # fmt: skip
    """The loop. Leaves by SystemExit when asked to stop."""
    loss, bad = NextToken(), 0
    if sets and first == 0:
        metrics.note(0, **heldout(trainer, sets, config))
    for step in range(first + 1, config.num_steps + 1):
        metrics.start_step()
        wants_norms = config.layer_norms_every is not None and step % config.layer_norms_every == 0
        size = loader.size(loader.step)
        result = trainer.step(next(loader), loss, layer_norms=wants_norms)
        bad = count_bad(bad, step, result, config.stop_after_bad_steps)
        tell(metrics, step, result, size)
        if sets and (step == config.num_steps or step % config.validate_every == 0):
            metrics.note(step, **heldout(trainer, sets, config))
        save_or_leave(checkpoints, stop, step, config.num_steps, trainer, {"loader": loader.state()})
    checkpoints.wait()


def tell(metrics: Metrics, step: int, result: StepResult, size) -> None:
    """One step into console, files and wandb."""
    norms = {f"grad_norm/{name}": value for name, value in result.layer_norms.items()}
    metrics.step(
        step, loss=result.loss, lr=result.lr, grad_norm=result.grad_norm, tokens=size.tokens, squared_lengths=size.squares,
        trained_tokens=result.count, skipped=float(bool(result.skipped)), **norms,
    )  # fmt: skip


def seen_shares(loader: Loader) -> Iterable[tuple[str, float]]:
    """The mixture as it was really seen: share of tokens by source."""
    total = sum(seen.tokens for seen in loader.seen.values()) or 1
    return [(f"share_{name}", seen.tokens / total) for name, seen in loader.seen.items()]


@job(SftConfig, "sft")
def main(config: SftConfig) -> None:
    """Run the stage, or describe it."""
    report = describe_job(config)
    if elsewhere(config, "sft", "megatron_nb.sft", report):
        return
    origin = find_origin(config.init_from, config.model)
    place = topology.initialize(config.parallel, config.seed)
    with open_run(config, "sft") as run, StopSignal(place.device, watchdog(config, run)) as stop:
        log.info("%s\n%s", run.folder, report)
        look_around(config, run, place, config.seq_len * config.micro_batch_size)
        tokenizer = load_tokenizer(
            config.data.tokenizer or (str(origin.hf_folder) if origin.hf_folder else None), config.data.chat_template
        )
        training, sets = open_datasets(config.data, tokenizer, config.seq_len, config.seed, config.model.vocab_size)
        preflight.agree(tokenizer=tokenizer_digest(tokenizer), data=str(training.fingerprint()))

        chunks = build(config.model, config.parallel)
        if not run.resumes:
            load_start(origin, chunks, config.model, config.seed)
        trainer = Trainer(
            chunks, config.optimizer, place, config.num_steps, distributed_optimizer=config.parallel.distributed_optimizer
        )
        if config.rehearse:
            rehearse(trainer, config)
        own = bool(config.data.tokenizer or config.data.chat_template)
        hf_files = companions(origin.hf_folder, tokenizer, run.folder / "hf", own, place.rank)
        checkpoints = Checkpoints(run.folder, config.checkpoint, to_yaml(config), hf_files)
        resumed = checkpoints.resume(trainer)
        loader = Loader(
            training, config.data,
            global_batch_size=config.global_batch_size, micro_batch_size=config.micro_batch_size,
            data_rank=place.data_rank, data_size=place.data_size,
            multiple=config.parallel.pack_multiple, micro_multiple=config.parallel.pipeline,
            device=None if ON_CPU else place.device,
            state=resumed.data_state["loader"] if resumed else None,
        )  # fmt: skip
        if config.replay_step is not None:
            replay(trainer, loader, config.replay_step)
            return
        first = resumed.step if resumed else 0
        metrics = Metrics(
            run,
            config.log,
            config.model,
            num_steps=config.num_steps,
            devices=place.world,
            first_step=first,
            settings=flatten(config),
        )
        try:
            train(trainer, loader, sets, checkpoints, metrics, stop, config, first)
        finally:
            loader.close()
            measured = metrics.close()
        run.write_summary(config.seed, **measured, **dict(seen_shares(loader)))


if __name__ == "__main__":
    main()
