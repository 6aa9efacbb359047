"""The state side of checkpoints: what a checkpoint holds of a job, and how it enters a job again at any topology.

Model tensors are stored under their names in the whole model and optimizer moments in the model's shapes
(`fully_reshardable`), so tensor, pipeline, virtual, context and data sizes may all change. Vocabulary padding depends on
the tensor size: rows beyond the stored ones are filled with zeros, stored padding is dropped.
"""
from __future__ import annotations

import dataclasses
import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml

from megatron_nb.model.shape import ModelConfig, differences, hand_over
from megatron_nb.model.sharding import bare
from megatron_nb.parallel import topology  # installs the CPU layer before core is used
from megatron_nb.parallel.topology import everywhere

# isort: split
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_nb.training.checkpoint_folder import FILES, DamagedCheckpoint, check_files, resolve
from megatron_nb.training.optimizer import inner_optimizers, sync_parameters
from megatron_nb.training.trainer import Trainer

log = logging.getLogger(__name__)



class ChangedRun(ValueError):
    """The model or the optimizer is not what the checkpoint was saved with."""


@dataclass(frozen=True)
class Resumed:
    """Where training goes on: `step` updates are done."""

    step: int
    data_state: dict[str, Any]
    folder: Path


def from_first_rank(function: Callable[[], Any]) -> Any:
    """Run on rank 0, return its result on every rank. What a disk or a user can get wrong is raised on every rank."""
    answer: list = [None, None]
    if dist.get_rank() == 0:
        try:
            answer = [function(), None]
        except (OSError, ValueError) as error:
            answer = [None, error]
    dist.broadcast_object_list(answer, src=0)
    result, error = answer
    if error:
        raise error
    return result


def check_together(folder: Path) -> None:
    """DamagedCheckpoint on every rank when any file is not as it was written; the ranks share the reading."""
    problem = None
    try:
        check_files(folder, dist.get_rank(), dist.get_world_size())
    except (DamagedCheckpoint, OSError) as error:
        problem = str(error)
    for found in everywhere(problem):
        if found:
            raise DamagedCheckpoint(found)


def replicas() -> dist.ProcessGroup:
    """Ranks that hold the same part of the model."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _layout() -> list[int]:
    place = topology.current()
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    return [place.tensor_size, place.pipeline_size, virtual, place.context_size, place.data_size]


def _model_state(chunks: list, metadata: dict[str, Any]) -> dict[str, Any]:
    """{"model": ...}, or one entry per virtual stage; the stored names are those of the whole model either way."""
    names = ["model"] if len(chunks) == 1 else [f"model{chunk}" for chunk in range(len(chunks))]
    metadata = {**metadata, "dp_cp_group": replicas()}
    return {name: bare(chunk).sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks)}


def _random_state() -> dict[str, Any]:
    """Every generator of this rank, in types that torch.load reads back without executing anything."""
    name, keys, *position = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": None if topology.ON_CPU else torch.cuda.get_rng_state(),
        "tensor_parallel": dict(get_cuda_rng_tracker().get_states()),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *position),
    }


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and not topology.ON_CPU:
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tensor_parallel"])
    version, values, gauss = state["python"]
    random.setstate((version, tuple(values), gauss))
    name, keys, *position = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *position))


def _random_object(data: dict[str, Any] | None) -> ShardedObject:
    return ShardedObject("rng", data, (dist.get_world_size(),), (dist.get_rank(),))


def _optimizer_is_sharded(trainer: Trainer) -> bool:
    return trainer.chunks[0].ddp_config.use_distributed_optimizer


def training_state(trainer: Trainer, step: int, data_state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state dict for core's save, content metadata) of a job after `step` updates. Collective."""
    text = json.dumps(data_state, sort_keys=True)
    assert len(set(everywhere(text))) == 1, "data_state differs between ranks: it must be the position of the whole job"
    sync_parameters(trainer.chunks)
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distributed_optimizer": _optimizer_is_sharded(trainer),
        "layout": _layout(),
    }
    state = _model_state(trainer.chunks, metadata)
    optimizer = trainer.optimizer.sharded_state_dict(state, metadata={**metadata, "dp_cp_group": replicas()})
    rest = {"scheduler": trainer.scheduler.state_dict(), "rng": _random_object(_random_state()), "data": text, "step": step}
    return {**state, "optimizer": optimizer, **rest}, metadata


def refuse_other_model(folder: Path, current: dict[str, Any], may_change: frozenset[str] = frozenset()) -> None:
    """ChangedRun, with the differences, unless the checkpoint's model is `current`; what may change is logged."""
    saved = ModelConfig.from_dict(yaml.safe_load((folder / "config.yaml").read_text())["model"])
    refused = differences(saved, ModelConfig(**current), may_change)
    if refused:
        raise ChangedRun(f"{folder} holds another model ({'; '.join(refused)}): use its model settings, or another checkpoint")
    changed = differences(saved, ModelConfig(**current), frozenset())
    if changed and dist.get_rank() == 0:
        log.warning("%s: %s", folder, "; ".join(changed))


def load_training_state(folder: Path, trainer: Trainer) -> Resumed:
    """Everything of a checkpoint into `trainer` and this process's generators."""
    common = dist_checkpointing.load_common_state_dict(str(folder))
    metadata = common["content_metadata"]
    if metadata["distributed_optimizer"] != _optimizer_is_sharded(trainer):
        raise ChangedRun(
            f"{folder} was saved with parallel.distributed_optimizer={metadata['distributed_optimizer']}: "
            "its moments are stored in that form, set it back"
        )
    state = _model_state(trainer.chunks, metadata)
    names = list(state)
    metadata_here = {**metadata, "dp_cp_group": replicas()}
    state["optimizer"] = trainer.optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata_here)
    same_layout = metadata["layout"] == _layout()
    if same_layout:
        state["rng"] = _random_object(None)
    loaded = dist_checkpointing.load(state, str(folder))
    for name, chunk in zip(names, trainer.chunks):
        bare(chunk).load_state_dict(loaded[name])
    _load_optimizer(trainer.optimizer, loaded["optimizer"])
    _load_schedule(trainer.scheduler, loaded["scheduler"])
    if same_layout:
        _restore_random_state(loaded["rng"])
    elif dist.get_rank() == 0:
        log.warning("layout (tensor, pipeline, virtual, context, data) was %s, is %s: random generators start afresh",
                    metadata["layout"], _layout())  # fmt: skip
    return Resumed(loaded["step"], json.loads(loaded["data"]), folder)


def _load_optimizer(optimizer: MegatronOptimizer, saved: dict[str, Any]) -> None:
    (inner,) = inner_optimizers(optimizer)
    state = saved.get("optimizer", saved).get("state")
    if state is not None and isinstance(inner.optimizer, torch.optim.AdamW):
        state.setdefault("common_step", torch.tensor(0.0))  # core leaves a step of 0 out, and torch misses it
    optimizer.load_state_dict(saved)


def _load_schedule(scheduler: OptimizerParamScheduler, saved: dict[str, Any]) -> None:
    """The number of consumed steps from the checkpoint; the schedule's shape from the configuration: num_steps may grow."""
    here = scheduler.state_dict()
    edited = [f"{name} {saved[name]} -> {here[name]}" for name in saved if name != "num_steps" and saved[name] != here[name]]
    if edited and dist.get_rank() == 0:
        log.warning("the schedule changed since the checkpoint, the new one counts: %s", "; ".join(edited))
    scheduler.num_steps = 0  # core adds the saved number to it
    scheduler.load_state_dict(saved)


def load_weights(path: str | Path, chunks: list, model: ModelConfig, fresh: tuple[str, ...] = ()) -> Path:
    """Weights only, from a step or run folder, at any topology; returns the step folder. For init_from and the like.

    fresh: parameters whose name contains one of these words keep their values (a new head). ChangedRun for another model;
    rotary base, length and dtype may differ. When called after `optimize`, follow with optimizer.reload_model_params().
    """
    folder = from_first_rank(partial(resolve, path))  # a run may grow: all ranks must take the same step
    if folder is None:
        raise ValueError(f"{path} is no checkpoint of ours: a Hugging Face folder is read by model/hf.py")
    refuse_other_model(folder, dataclasses.asdict(model), hand_over(model))
    if (folder / FILES).is_file():  # an import from Hugging Face has none
        check_together(folder)

    def is_fresh(name: str) -> bool:
        return any(word in name for word in (*fresh, "_extra_state"))  # the latter is Transformer Engine's, without weights

    metadata = dist_checkpointing.load_content_metadata(str(folder)) or {}
    state = _model_state(chunks, metadata)
    wanted = {part: {name: value for name, value in tensors.items() if not is_fresh(name)} for part, tensors in state.items()}
    loaded = dist_checkpointing.load(wanted, str(folder))
    for part, chunk in zip(state, chunks):
        result = bare(chunk).load_state_dict(loaded[part], strict=False)
        missing = [name for name in result.missing_keys if not is_fresh(name)]
        assert not missing and not result.unexpected_keys, f"{folder}: missing {missing}, unexpected {result.unexpected_keys}"
    return folder
