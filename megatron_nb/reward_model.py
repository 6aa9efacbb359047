"""Reward models: a scalar head on the policy architecture, trained on preference pairs (or graded answers, point-wise).

python -m megatron_nb.reward_model --config-name reward_pointwise init_from=SFT_RUN data.sources.a.path=pairs.jsonl
torchrun --nproc-per-node N -m megatron_nb.reward_model --config-name reward_pairwise [overrides]
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_nb.config import flatten, job, to_yaml
from megatron_nb.data.pairs import PairConfig, PairLoader, Unit, open_pairs, packs_of
from megatron_nb.data.preferences import special_tokens
from megatron_nb.data.tokenizer import load_tokenizer, tokenizer_digest
from megatron_nb.launch import LaunchConfig, elsewhere, look_around, open_run, watchdog, world_of
from megatron_nb.losses.reward import Pairwise, PairwiseConfig, Pointwise, bounded, ramp
from megatron_nb.model.gpt import build, check_layout
from megatron_nb.model.hf_config import config_to_hf, read_json
from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel import topology
from megatron_nb.parallel.topology import ParallelConfig
from megatron_nb.run import Run, write_atomic
from megatron_nb.training import memory, preflight, reliability
from megatron_nb.training.checkpoint import CheckpointConfig, Checkpoints
from megatron_nb.training.loop import count_bad, save_or_leave
from megatron_nb.training.metrics import LogConfig, Metrics
from megatron_nb.training.optimizer import OptimizerConfig, describe, schedule_lengths
from megatron_nb.training.signals import StopSignal
from megatron_nb.training.start import Origin, companions, find_origin, load_start
from megatron_nb.training.trainer import StepResult, Trainer

log = logging.getLogger(__name__)


@dataclass
class RewardModelConfig:
    """One stage of reward modelling."""

    name: str | None = None  # run folder runs_dir/name; None: derived from the configuration
    runs_dir: str = "runs"
    seed: int = 1234
    init_from: str | None = None  # Hugging Face folder, run, or step folder: weights, tokenizer and template
    kind: str = "pointwise"  # pointwise: scores one answer | pairwise: compares two
    seq_len: int = 16384  # tokens of a pack at most; a pair lies in one pack whole
    num_steps: int = 1000
    global_batch_size: int = 128  # pairs (and graded answers) per update
    validate_every: int = 100  # updates between judgements of the held-out rows; the first and the last are always taken
    stop_after_bad_steps: int = 5  # updates in a row that were refused for NaN or inf
    loss: PairwiseConfig = field(default_factory=PairwiseConfig)  # of pairwise; pointwise has no constants
    model: ModelConfig = field(default_factory=lambda: ModelConfig(head="score"))
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: PairConfig = field(default_factory=PairConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self):
        for name in ("seq_len", "num_steps", "global_batch_size", "validate_every", "stop_after_bad_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative: the generators take no such seed")
        if self.kind not in ("pointwise", "pairwise"):
            raise ValueError(f"kind={self.kind!r} must be one of pointwise, pairwise")
        if self.model.head != "score":
            raise ValueError(f"model.head={self.model.head!r} must be 'score': a reward model gives one number per document")
        check_layout(self.model, self.parallel)
        schedule_lengths(self.optimizer, self.num_steps)
        self.parallel.check_pack_length(self.seq_len)
        if self.seq_len > self.model.max_position_embeddings:
            raise ValueError(
                f"seq_len={self.seq_len} is above model.max_position_embeddings={self.model.max_position_embeddings}: "
                "a document could be as long as a pack; lower the former"
            )

    @property
    def pairwise(self) -> bool:
        return self.kind == "pairwise"


def describe_job(config: RewardModelConfig) -> str:
    """What the dry run prints below the configuration. ValueError when it cannot run or does not fit."""
    config.data.validate()
    world, p = world_of(config), config.parallel
    data_size = p.data_size(world)
    plan = memory.plan(config.model, p, world, config.seq_len)
    if p.device_memory_gb:
        memory.check_fits(plan, p.device_memory_gb)
    layout = f"data {data_size} * pipeline {p.pipeline} * context {p.context} * tensor {p.tensor}"
    return "\n".join(
        [
            f"model        {config.model.num_parameters:,} parameters, score head, {config.model.dtype}, "
            f"backend {config.model.backend}",
            f"ranks        {world} = {layout}, {p.communication}",
            f"step         {config.global_batch_size} pairs in packs of at most {config.seq_len} tokens, {config.kind}",
            f"optimizer    {describe(config.optimizer)}, {config.optimizer.schedule} from {config.optimizer.lr:g}, "
            f"{config.num_steps} steps",
            f"memory of the fullest rank (pack of {config.seq_len} tokens, recompute {p.recompute})"
            + (f", device {p.device_memory_gb:g} GB" if p.device_memory_gb else ""),
            plan.table(),
        ]
    )


def choose_padding(tokenizer: Any, units: list[Unit]) -> int:
    """The padding token for those who score in batches by transformers; the tokenizer gets it too.

    It must not end a document: transformers scores the last token that is no padding. ValueError when every one does.
    """
    last = {int(sample.ids[-1]) for unit in units for sample in unit.samples}
    others = tokenizer.convert_tokens_to_ids(special_tokens(tokenizer))
    for token in (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, *others):
        if token is not None and token not in last:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(token)
            return token
    raise ValueError(
        f"every special token of the tokenizer ends a document ({sorted(last)[:8]}): padding must be another token; "
        "add a padding token to the tokenizer"
    )


def export_config(config: RewardModelConfig, origin: Origin, padding: int) -> dict[str, Any]:
    """config.json of the reward model: by it transformers and training/hf_reward.py know what it is."""
    file = origin.hf_folder / "config.json" if origin.hf_folder else None
    raw = config_to_hf(config.model, read_json(file) if file and file.is_file() else None)
    raw.pop("reward_bound", None)
    bound = {"reward_bound": config.loss.bound} if config.pairwise else {}
    return raw | {"pad_token_id": padding, "reward_kind": config.kind, **bound}


def new_loss(config: RewardModelConfig) -> Pointwise | Pairwise:
    return Pairwise(config.loss) if config.pairwise else Pointwise()


def judge(trainer: Trainer, units: list[Unit], config: RewardModelConfig) -> tuple[float, reliability.Judged]:
    """(mean held-out loss, with the whole lambda; scores of every held-out row)."""
    t, p, size = trainer.topology, config.parallel, config.global_batch_size
    total, count, scores = 0.0, 0, {}
    for begin in range(0, len(units), size):
        part = units[begin : begin + size]
        packs = packs_of(part, config.seq_len, t.data_rank, t.data_size, p.pack_multiple, p.pipeline)
        value, rows, found = reliability.judge(trainer, packs, new_loss(config))
        total, count = total + value, count + rows
        scores |= {(begin + number, sign): score for (number, sign), score in found.items()}
    pairs = [number for number, unit in enumerate(units) if len(unit.samples) == 2]
    graded = [number for number, unit in enumerate(units) if len(unit.samples) == 1]
    both = torch.tensor([[scores[number, sign] for number in pairs] for sign in (1, -1)], dtype=torch.float64)
    first, second = (bounded(both, config.loss.bound) if config.pairwise else both).numpy()
    return total / max(count, 1), reliability.Judged(
        first,
        second,
        np.array([units[number].samples[0].label == 1 for number in pairs], bool),
        np.array([units[number].lengths for number in pairs], np.float64).reshape(-1, 2),
        np.array([scores[number, 0] for number in graded]),
        np.array([units[number].samples[0].label for number in graded]),
        np.array([units[number].lengths[0] for number in graded], np.float64),
    )


def tell_heldout(run: Run, metrics: Metrics, step: int, trainer: Trainer, units: list[Unit], config: RewardModelConfig) -> None:
    """Judge the held-out rows: numbers into the log, the reliability plot into plots/. Collective."""
    loss, judged = judge(trainer, units, config)
    measures = {f"heldout_{name}": value for name, value in reliability.report(judged, config.pairwise).items()}
    metrics.note(step, heldout_loss=loss, **measures)
    if run.rank == 0 and judged.strict.any():
        plot = reliability.draw(reliability.probabilities(judged, config.pairwise), f"{run.folder.name}, step {step}")
        write_atomic(run.plots / "reliability.png", plot)


def tell(metrics: Metrics, step: int, result: StepResult, units: list[Unit]) -> None:
    """One step into console, files and wandb."""
    lengths = [len(sample) for unit in units for sample in unit.samples]
    means = dict(result.metrics)
    strict, correct = means.pop("strict"), means.pop("correct")
    means.pop("loss")
    metrics.step(
        step, loss=result.loss, lr=result.lr, grad_norm=result.grad_norm, tokens=sum(lengths),
        squared_lengths=sum(n * n for n in lengths), pairs=len(units), skipped=float(bool(result.skipped)),
        accuracy=correct / strict if strict else float("nan"), **means,
    )  # fmt: skip


def train(
    run: Run, trainer: Trainer, loader: PairLoader, heldout: list[Unit], checkpoints: Checkpoints, metrics: Metrics,
    stop: StopSignal, config: RewardModelConfig, first: int,
) -> None:  # fmt: skip
    """The loop. Leaves by SystemExit when asked to stop."""
    loss, bad = new_loss(config), 0
    if heldout and first == 0:
        tell_heldout(run, metrics, 0, trainer, heldout, config)
    for step in range(first + 1, config.num_steps + 1):
        metrics.start_step()
        if config.pairwise:
            loss.ramp = ramp(step, config.num_steps)
        units = loader.drawn()
        result = trainer.step(next(loader), loss)
        bad = count_bad(bad, step, result, config.stop_after_bad_steps)
        tell(metrics, step, result, units)
        if heldout and (step == config.num_steps or step % config.validate_every == 0):
            tell_heldout(run, metrics, step, trainer, heldout, config)
        save_or_leave(checkpoints, stop, step, config.num_steps, trainer, {"loader": loader.state()})
    checkpoints.wait()


@job(RewardModelConfig)
def main(config: RewardModelConfig) -> None:
    """Run the stage, or describe it."""
    report = describe_job(config)
    if elsewhere(config, f"reward_{config.kind}", "megatron_nb.reward_model", report):
        return
    origin = find_origin(config.init_from, config.model)
    place = topology.initialize(config.parallel, config.seed)
    with open_run(config, f"reward_{config.kind}") as run, StopSignal(place.device, watchdog(config, run)) as stop:
        log.info("%s\n%s", run.folder, report)
        look_around(config, run, place, config.seq_len)
        tokenizer = load_tokenizer(
            config.data.tokenizer or (str(origin.hf_folder) if origin.hf_folder else None), config.data.chat_template
        )
        training, heldout = open_pairs(config.data, tokenizer, config.seq_len, config.pairwise, config.model.vocab_size)
        padding = choose_padding(tokenizer, [unit for units in (*training.values(), heldout) for unit in units])

        chunks = build(config.model, config.parallel)
        if not run.resumes:
            load_start(origin, chunks, config.model, config.seed)
        trainer = Trainer(
            chunks, config.optimizer, place, config.num_steps, distributed_optimizer=config.parallel.distributed_optimizer
        )
        settings = export_config(config, origin, padding)
        hf_files: Path = companions(origin.hf_folder, tokenizer, run.folder / "hf", True, place.rank, settings)
        checkpoints = Checkpoints(run.folder, config.checkpoint, to_yaml(config), hf_files)
        resumed = checkpoints.resume(trainer)
        loader = PairLoader(
            training, config.data, tokenizer,
            batch=config.global_batch_size, seq_len=config.seq_len, seed=config.seed,
            data_rank=place.data_rank, data_size=place.data_size,
            multiple=config.parallel.pack_multiple, micro_multiple=config.parallel.pipeline,
            state=resumed.data_state["loader"] if resumed else None,
        )  # fmt: skip
        preflight.agree(tokenizer=tokenizer_digest(tokenizer), data=str(loader.fingerprint))
        first = resumed.step if resumed else 0
        metrics = Metrics(
            run, config.log, config.model,
            num_steps=config.num_steps, devices=place.world, first_step=first, settings=flatten(config),
        )  # fmt: skip
        try:
            train(run, trainer, loader, heldout, checkpoints, metrics, stop, config, first)
        finally:
            measured = metrics.close()
        run.write_summary(config.seed, **measured, heldout_rows=len(heldout))


if __name__ == "__main__":
    main()
