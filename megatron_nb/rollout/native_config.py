"""What the native engine is told, what cannot be, and how core hears it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_nb.model.gpt import DTYPES  # which installs the CPU layer before core is used
from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel.topology import ON_CPU
from megatron_nb.rollout.engine import Request
from megatron_nb.rollout.native_attention import FLASH

# isort: split
from megatron.core.inference.config import InferenceConfig, KVCacheManagementMode, PrefixCachingEvictionPolicy
from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass
class NativeConfig:
    """How rollouts are laid out over the ranks and what they may use."""

    tensor: int = 1  # ranks of one replica; the world's other ranks are further replicas
    max_concurrency: int = 64  # requests of a replica that run at once; more wait their turn
    kv_cache_gb: float = 4.0  # of keys and values on each rank
    block_size: int = 256  # tokens of a cache block, the unit in which prefixes are shared; flash-attn wants multiples of 256
    prefix_caching: bool = True  # prompts that begin alike are read once, until the next weights
    max_sequence_length: int | None = None  # prompt and completion; None: the model's positions
    step_tokens: int = 8192  # read or sampled in one step by a replica; longer prompts are read in chunks
    cuda_graphs: bool = False  # capture the decoding step (GPU only)

    def __post_init__(self):
        for name in ("tensor", "max_concurrency", "block_size", "step_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine: {name}={getattr(self, name)} must be at least 1")
        if self.kv_cache_gb <= 0:
            raise ValueError(f"engine: kv_cache_gb={self.kv_cache_gb} must be positive")
        if self.max_sequence_length is not None and self.max_sequence_length < 2:
            raise ValueError(f"engine: max_sequence_length={self.max_sequence_length} must be at least 2: prompt and answer")
        if self.step_tokens < self.max_concurrency:
            raise ValueError(
                f"engine: step_tokens={self.step_tokens} must be at least max_concurrency={self.max_concurrency}: "
                "every running request takes one token a step"
            )
        if self.max_concurrency % self.tensor:
            raise ValueError(f"engine: max_concurrency={self.max_concurrency} must be a multiple of its tensor={self.tensor}")


def check(config: NativeConfig, model: ModelConfig, world: int, padded_vocab: int) -> None:
    tensor = config.tensor
    if world % tensor:
        raise ValueError(f"engine: tensor={tensor} must divide the {world} processes: every replica has equally many ranks")
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        if getattr(model, name) % tensor:
            raise ValueError(f"engine: tensor={tensor} must divide model.{name}={getattr(model, name)}")
    if padded_vocab % tensor:
        raise ValueError(f"engine: tensor={tensor} must divide the trainer's padded vocabulary of {padded_vocab} rows")
    if getattr(model, "head", "vocabulary") != "vocabulary":
        raise ValueError(f"model.head={model.head!r} cannot be sampled from: an engine needs head=vocabulary")
    longest = config.max_sequence_length or model.max_position_embeddings
    if longest > model.max_position_embeddings:
        raise ValueError(
            f"engine: max_sequence_length={longest} must be at most "
            f"model.max_position_embeddings={model.max_position_embeddings}"
        )
    if config.cuda_graphs and ON_CPU:
        raise ValueError("engine: cuda_graphs=true needs a GPU: there is none here")
    if FLASH and config.block_size % 256:
        raise ValueError(f"engine: block_size={config.block_size} must be a multiple of 256 for flash-attn's paged cache")


def _block_bytes(config: NativeConfig, model: ModelConfig) -> int:
    """Of a cache block on each rank."""
    itemsize = DTYPES[model.dtype].itemsize
    return 2 * itemsize * model.num_layers * config.block_size * model.num_query_groups * model.head_dim // config.tensor


def cache_gb_for(tokens: int, config: NativeConfig, model: ModelConfig) -> float:
    """kv_cache_gb at which a sequence of so many tokens fits, rounded up to three digits."""
    gb = _block_bytes(config, model) * (math.ceil(tokens / config.block_size) + 1) / 2**30  # core keeps one for padding
    digits = 2 - math.floor(math.log10(gb))
    return math.ceil(gb * 10**digits) / 10**digits


def cache_blocks(config: NativeConfig, model: ModelConfig) -> int:
    """Blocks that requests may use on each rank; ValueError when the budget holds none."""
    block_bytes = _block_bytes(config, model)
    blocks = int(config.kv_cache_gb * 2**30) // block_bytes - 1  # core keeps one for padding
    if blocks < 1:
        raise ValueError(
            f"engine: kv_cache_gb={config.kv_cache_gb} holds no block of {config.block_size} tokens beside the one that core "
            f"keeps: give at least {2 * block_bytes / 2**30:.3g}, or a smaller block_size"
        )
    return blocks


def check_request(request: Request, config: NativeConfig, longest: int, blocks: int) -> None:
    """ValueError for a request whose size can never be served: by `longest` tokens in a sequence, `blocks` in the cache."""
    name, prompt, sampling = request.request_id, len(request.ids), request.sampling
    if not prompt:
        raise ValueError(f"request {name!r} has no ids: at least one token must be given")
    total = prompt + sampling.max_tokens
    if total > longest:
        raise ValueError(
            f"request {name!r}: prompt {prompt} + max_tokens {sampling.max_tokens} = {total} must be at most "
            f"max_sequence_length={longest}: ask for fewer tokens"
        )
    if math.ceil(total / config.block_size) > blocks:
        raise ValueError(
            f"request {name!r}: {total} tokens do not fit into the cache of {blocks} blocks of {config.block_size}: raise the "
            "engine's kv_cache_gb"
        )


def inference_config(config: NativeConfig, model: ModelConfig, longest: int, groups: ProcessGroupCollection) -> InferenceConfig:
    """NativeConfig in core's terms."""
    return InferenceConfig(
        block_size_tokens=config.block_size,
        buffer_size_gb=config.kv_cache_gb,
        max_requests=config.max_concurrency,
        max_tokens=config.step_tokens,
        max_sequence_length=longest,
        kv_cache_management_mode=KVCacheManagementMode.RECOMPUTE,  # to sleep is to free
        num_cuda_graphs=16 if config.cuda_graphs else None,
        use_cuda_graphs_for_non_decode_steps=False,
        pg_collection=groups,
        materialize_only_last_token_logits=True,
        enable_chunked_prefill=True,
        enable_prefix_caching=config.prefix_caching,
        prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
    )
