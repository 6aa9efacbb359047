"""From an AnswererConfig to a model that answers: the checkpoint loaded behind an engine, or the endpoint's client."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml

from megatron_nb.asking.askers import AnswererConfig, Asker, EndpointAsker, EngineAsker
from megatron_nb.data.tokenizer import load_tokenizer
from megatron_nb.model.gpt import build, check_layout
from megatron_nb.model.hf import LiveWeights
from megatron_nb.model.hf_config import config_from_hf
from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel.topology import ParallelConfig, Topology
from megatron_nb.rollout.engines import EngineConfig, build_engine
from megatron_nb.rollout.native import NativeConfig
from megatron_nb.rollout.native_config import cache_blocks, cache_gb_for
from megatron_nb.schema import flatten
from megatron_nb.training.checkpoint_folder import resolve
from megatron_nb.training.start import find_origin, load_start

Work = Callable[[Asker, int, int], Awaitable[None]]  # (who answers, which share of the questions, of how many shares)


def shape_of(path: str) -> ModelConfig:
    """The shape of a checkpoint of any kind. ValueError when there is none."""
    step = resolve(path)
    if step is None:
        return config_from_hf(path)
    return ModelConfig.from_dict(yaml.safe_load((step / "config.yaml").read_text())["model"])


def size_told(answerer: AnswererConfig, parallel: ParallelConfig) -> str:
    """Who answers, for a dry run; with its size where it is a checkpoint. ValueError when that cannot be cut so."""
    if not answerer.checkpoint:
        return answerer.told
    model = shape_of(answerer.checkpoint)
    check_layout(model, parallel)
    return f"{answerer.told}, {model.num_parameters:,} parameters"


def sequence_limit(model: ModelConfig, config: EngineConfig) -> int:
    """Tokens of a sequence at most, prompt and answer: by the model's positions, and by the native engine's cache."""
    if config.kind != "native":
        return model.max_position_embeddings
    native = config.native
    positions = native.max_sequence_length or model.max_position_embeddings
    return min(positions, cache_blocks(native, model) * native.block_size)


def check_room(answerer: AnswererConfig, engine: NativeConfig | EngineConfig, rows: dict[str, int] | None = None) -> None:
    """ValueError when what a checkpoint is to write does not fit a sequence. rows: name -> tokens of whole episodes, if any."""
    if not answerer.checkpoint:
        return
    engine = engine if isinstance(engine, EngineConfig) else EngineConfig(native=engine)
    model, native = shape_of(answerer.checkpoint), engine.native
    limit, positions = sequence_limit(model, engine), model.max_position_embeddings
    if engine.kind == "native":
        positions = native.max_sequence_length or positions
    if answerer.max_tokens >= positions:
        raise ValueError(
            f"an answer of max_tokens={answerer.max_tokens} leaves no room for a prompt in the {positions} tokens of a "
            "sequence: lower it"
        )
    for name, tokens in {f"an answer of max_tokens={answerer.max_tokens}": answerer.max_tokens + 1, **(rows or {})}.items():
        if limit < (wanted := min(tokens, positions)):  # an episode ends where the positions do, whatever it may have
            raise ValueError(
                f"{name} does not fit the {limit} tokens that the engine's kv_cache_gb={native.kv_cache_gb:g} holds: "
                f"give at least {cache_gb_for(wanted, native, model):g}, or lower it"
            )


def decides(answerer: AnswererConfig) -> dict[str, Any]:
    """What of an answerer's settings decides its answers."""
    told = flatten(answerer)
    if answerer.endpoint:
        return {key: told[key] for key in told if not key.startswith("endpoint.")} | {"endpoint": answerer.told}
    return told | {"checkpoint": str(resolve(answerer.checkpoint) or answerer.checkpoint)}


def identity(answerer: AnswererConfig) -> list[Any]:
    """What tells one model from another: where it is and, of a checkpoint, the sizes and times of its files."""
    if answerer.endpoint:
        return [answerer.endpoint.base_url, answerer.endpoint.model]
    folder = resolve(answerer.checkpoint) or Path(answerer.checkpoint).expanduser()
    files = sorted(file for file in (folder.rglob("*") if folder.is_dir() else [folder]) if file.is_file())
    told = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    digest = hashlib.blake2b(json.dumps(told).encode(), digest_size=8).hexdigest()
    return [str(folder.absolute()), digest, answerer.chat_template]


def with_asker(
    answerer: AnswererConfig, work: Work, place: Topology, seed: int, parallel: ParallelConfig,
    engine: NativeConfig | EngineConfig, max_prompt_tokens: int | None,
) -> None:  # fmt: skip
    """Run `work` with the model on every share of the questions. Collective; what work raises passes through."""
    if answerer.endpoint:
        asyncio.run(work(EndpointAsker(answerer), place.rank, place.world))
    else:
        engine = engine if isinstance(engine, EngineConfig) else EngineConfig(native=engine)
        _with_checkpoint(answerer, work, place, seed, parallel, engine, max_prompt_tokens)
        gc.collect()  # its memory, before the next model is loaded


def _with_checkpoint(
    answerer: AnswererConfig, work: Work, place: Topology, seed: int, parallel: ParallelConfig, config: EngineConfig,
    max_prompt_tokens: int | None,
) -> None:  # fmt: skip
    model = shape_of(answerer.checkpoint)
    origin = find_origin(answerer.checkpoint, model)
    tokenizer = load_tokenizer(str(origin.hf_folder), answerer.chat_template)
    check_room(answerer, config)
    longest = sequence_limit(model, config)
    chunks = build(model, parallel)
    load_start(origin, chunks, model, seed)
    engine = build_engine(config, model, place, longest, None)
    engine.load_weights(LiveWeights(chunks, model), version=0)
    room = longest - answerer.max_tokens
    asker = EngineAsker(engine, tokenizer, answerer, room if max_prompt_tokens is None else min(max_prompt_tokens, room))
    try:
        engine.run(lambda: work(asker, engine.replica, engine.replicas))
    finally:
        engine.close()
