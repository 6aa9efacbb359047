"""Where a job's weights come from: a Hugging Face folder, a run, a step folder, or a fresh draw."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_nb.model.gpt import initialize_weights
from megatron_nb.model.hf import load_hf
from megatron_nb.model.hf_config import config_from_hf
from megatron_nb.model.hf_files import copy_companions
from megatron_nb.model.shape import ModelConfig, differences, hand_over
from megatron_nb.run import write_atomic
from megatron_nb.training.checkpoint_folder import resolve
from megatron_nb.training.checkpoint_state import load_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """What `init_from` names. Both None: a fresh draw."""

    hf_folder: Path | None  # tokenizer, templates and configurations; the weights too when step_folder is None
    step_folder: Path | None
    model: ModelConfig | None = None  # as it was saved there


def find_origin(init_from: str | None, model: ModelConfig) -> Origin:
    """Look `init_from` up and compare its shape with `model`, before anything is built. ValueError names the difference."""
    if init_from is None:
        return Origin(None, None)
    step = resolve(init_from)
    if step is None:
        folder = Path(init_from)
        theirs = config_from_hf(folder)
        origin = Origin(folder, None, theirs)
    else:
        theirs = ModelConfig.from_dict(yaml.safe_load((step / "config.yaml").read_text())["model"])
        folder, origin = step, Origin(step / "hf", step, theirs)
    different = differences(theirs, model, hand_over(model))
    if different:
        raise ValueError(f"init_from={folder} holds another model ({'; '.join(different)}): choose its model= settings")
    return origin


def companions(
    origin: Path | None, tokenizer: Any, folder: Path, own: bool, rank: int, config: dict[str, Any] | None = None
) -> Path:
    """The folder of what travels with the weights: `origin`, or `folder` written anew. Collective.

    own: the tokenizer or its template is not the origin's; config: a config.json to stand there in the place of the origin's.
    """
    if origin is not None and not own and config is None:
        return origin
    if rank == 0:
        if origin is not None:
            copy_companions(origin, folder)
        tokenizer.save_pretrained(folder)
        if config is not None:
            write_atomic(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    torch.distributed.barrier()
    return folder


def load_start(origin: Origin, chunks: list, model: ModelConfig, seed: int) -> None:
    """Weights of `origin` into the chunks of this rank. Before `optimize`, which copies them."""
    new_head = origin.model is not None and origin.model.head != model.head
    if new_head:
        log.info("the score head is drawn anew with seed %d: init_from is a language model, whose own head is left out", seed)
        initialize_weights(chunks, model, seed, only="score.weight")
    if origin.step_folder is not None:
        load_weights(origin.step_folder, chunks, model, fresh=("output_layer",) if new_head else ())
    elif origin.hf_folder is not None:
        load_hf(origin.hf_folder, chunks, model)
    else:
        log.info("no init_from: weights are drawn with seed %d", seed)
        initialize_weights(chunks, model, seed)
