"""Which engine a job samples with, and what engines and training ask of each other; decided before any work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel.topology import ParallelConfig, Topology
from megatron_nb.rollout.collect import CollectConfig
from megatron_nb.rollout.engine import Engine, Sampling
from megatron_nb.rollout.native import NativeEngine
from megatron_nb.rollout.native_config import NativeConfig, check
from megatron_nb.rollout.server import ServerConfig, ServerEngine


@dataclass
class EngineConfig:
    """Who samples: the ranks themselves between two updates, or servers."""

    kind: Literal["native", "server"] = "native"
    native: NativeConfig = field(default_factory=NativeConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


def build_engine(
    config: EngineConfig, model: ModelConfig, place: Topology, longest: int,
    probe: Callable[[list[int], int, float], list[float]],
) -> Engine:  # fmt: skip
    """Collective. longest: tokens of prompt and answer; probe(ids, start, temperature): trainer's log-probs of ids[start:]."""
    if config.kind == "native":
        native = replace(config.native, max_sequence_length=config.native.max_sequence_length or longest)
        return NativeEngine(native, model, place)
    return ServerEngine(config.server, place, probe)


def describe_engine(config: EngineConfig, model: ModelConfig, parallel: ParallelConfig, world: int) -> tuple[str, str]:
    """(layout, memory on a rank) for a dry run. ValueError when the layout cannot be."""
    if config.kind == "server":
        return f"server, {', '.join(config.server.urls)}", "on the servers"
    native = config.native
    check(native, model, world, model.padded_vocab(parallel.tensor))
    weights = model.num_parameters * (2 if model.dtype == "bf16" else 4) / native.tensor / 1e9
    memory = f"{weights:.2f} GB weights and {native.kv_cache_gb:g} GB cache, which is freed while training"
    return f"native, {world // native.tensor} replicas of {native.tensor} tensor ranks", memory


def check_sampling(sampling: Sampling, temperature: float) -> None:
    """ValueError for what the trainer's log-prob cannot follow. temperature: at which the trainer takes it."""
    if sampling.top_p != 1 or sampling.top_k != 0:
        raise ValueError(
            f"sampling.top_p={sampling.top_p} and top_k={sampling.top_k} must be 1 and 0 (off) in RL: the trainer's log-prob "
            "knows no truncated support, so every ratio would be wrong; temperature may be set"
        )
    if sampling.temperature <= 0 or sampling.temperature != temperature:
        raise ValueError(
            f"sampling.temperature={sampling.temperature} must be above 0 and equal policy.temperature={temperature}: the "
            "trainer takes its log-probs at the temperature of the sampling"
        )


def check_lengths(prompt_tokens: int, sampling: Sampling, collect: CollectConfig, limits: dict[str, int | None]) -> None:
    """ValueError when prompt and answer may not fit into one of `limits` (name -> tokens, None for none)."""
    longest = prompt_tokens + sampling.max_tokens
    for name, limit in limits.items():
        if limit is not None and longest > limit:
            raise ValueError(
                f"prompts.max_tokens={prompt_tokens} + sampling.max_tokens={sampling.max_tokens} = {longest} must be at most "
                f"{name}={limit}: shorten the answers or the prompts, or raise it"
            )
    if collect.overlong is not None and collect.overlong.length > sampling.max_tokens:
        raise ValueError(
            f"collect.overlong.length={collect.overlong.length} must be at most sampling.max_tokens={sampling.max_tokens}: "
            "no answer is longer"
        )


def check_staleness(staleness: int, engine: EngineConfig, corrected: bool) -> None:
    """ValueError where batches of older weights cannot be sampled, or would be trained on uncorrected."""
    if staleness and engine.kind == "native":
        raise ValueError(
            f"collect.staleness={staleness} needs engine=server: the native engine's ranks cannot sample while they train; "
            "use collect.staleness=0"
        )
    if staleness and not corrected:
        raise ValueError(
            f"collect.staleness={staleness} needs policy.importance_cap, or policy.old=behaviour: tokens of older weights must "
            "be weighed by what the trainer's weights give them"
        )
