"""Where a job's weights come from: a Hugging Face folder, a run, a step folder, or a fresh draw."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from megatron_nb.model.gpt import initialize_weights
from megatron_nb.model.hf import load_hf
from megatron_nb.model.hf_config import config_from_hf
from megatron_nb.model.shape import ModelConfig
from megatron_nb.training.checkpoint_folder import resolve
from megatron_nb.training.checkpoint_state import HAND_OVER_MAY_CHANGE, load_weights

log = logging.getLogger(__name__)

MAY_DIFFER = {"rope_theta", "max_position_embeddings", "dtype", "backend", "kernels"}  # a stage may set these anew


@dataclass(frozen=True)
class Origin:
    """What `init_from` names. Both None: a fresh draw."""

    hf_folder: Path | None  # tokenizer, templates and configurations; the weights too when step_folder is None
    step_folder: Path | None


def find_origin(init_from: str | None, model: ModelConfig) -> Origin:
    """Look `init_from` up and compare its shape with `model`, before anything is built. ValueError names the difference."""
    if init_from is None:
        return Origin(None, None)
    step = resolve(init_from)
    if step is None:
        folder = Path(init_from)
        theirs, origin, may_differ = config_from_hf(folder), Origin(folder, None), MAY_DIFFER
    else:
        folder, origin, may_differ = step, Origin(step / "hf", step), HAND_OVER_MAY_CHANGE
        theirs = ModelConfig.from_dict(yaml.safe_load((step / "config.yaml").read_text())["model"])
    different = [
        f"{field.name} is {getattr(theirs, field.name)} there, {getattr(model, field.name)} here"
        for field in fields(ModelConfig)
        if field.name not in may_differ and not _same(getattr(theirs, field.name), getattr(model, field.name))
    ]
    if different:
        raise ValueError(f"init_from={folder} holds another model ({'; '.join(different)}): choose its model= settings")
    return origin


def _same(a, b) -> bool:
    """Equality, but for a float that went through single precision on its way (1e-5 in a GGUF file)."""
    return math.isclose(a, b, rel_tol=1e-6) if isinstance(a, float) and isinstance(b, float) else a == b


def load_start(origin: Origin, chunks: list, model: ModelConfig, seed: int) -> None:
    """Weights of `origin` into the chunks of this rank. Before `optimize`, which copies them."""
    if origin.step_folder is not None:
        load_weights(origin.step_folder, chunks, model)
    elif origin.hf_folder is not None:
        load_hf(origin.hf_folder, chunks, model)
    else:
        log.info("no init_from: weights are drawn with seed %d", seed)
        initialize_weights(chunks, model, seed)
