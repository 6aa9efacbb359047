"""How long a step of reinforcement learning takes: sampling, scoring, training and the way of the weights to the engines.

A decoding step reads all weights once and every running sequence's keys and values; a replica runs as many sequences as its
cache holds. A batch is over when its longest answer is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_nb.model.shape import ModelConfig
from tools.plan_layouts import Candidate
from tools.plan_time import Device, constants


@dataclass(frozen=True)
class Rollouts:
    """A batch: answers to `prompts` prompts, `group` each; token counts are means, `longest` is the limit of an answer."""

    prompts: int
    group: int
    prompt_tokens: int
    answer_tokens: int
    longest: int
    staleness: int = 0
    engine: str = "native"  # native: on the training ranks; server: on GPUs of its own
    engine_gpus: int = 0
    engine_tensor: int = 1
    concurrency: int = 256

    def __post_init__(self):
        if self.engine not in ("native", "server"):
            raise ValueError(f"--engine {self.engine}: must be native or server")
        if self.answer_tokens > self.longest:
            raise ValueError(f"--answer-tokens {self.answer_tokens} must be at most --max-answer {self.longest}")
        if self.staleness < 0:
            raise ValueError(f"--staleness {self.staleness} must not be negative")
        if self.engine == "native" and (self.staleness or self.engine_gpus):
            raise ValueError("--staleness and --engine-gpus need --engine server: ranks cannot sample while they train")
        if self.engine == "server" and self.engine_gpus < self.engine_tensor:
            raise ValueError(f"--engine-gpus {self.engine_gpus} must hold one engine of --engine-tensor {self.engine_tensor}")

    @property
    def answers(self) -> int:
        return self.prompts * self.group


@dataclass(frozen=True)
class RolloutPlan:
    """Seconds of a step by part, and what an engine holds."""

    replicas: int
    cache_gb: float  # on each GPU
    cache_tokens: int  # of a replica
    running: int  # sequences of a replica at once
    tokens_per_s: float  # sampled by a replica while it is full
    seconds: dict[str, float]  # prefill, decode, score, logprobs, train, sync, overhead
    step_s: float
    versions_behind: int  # the oldest weights that a trained token was sampled by


def cache_bytes_per_token(model: ModelConfig) -> int:
    return 2 * model.num_layers * model.num_query_groups * model.head_dim * (2 if model.dtype == "bf16" else 4)


def weight_bytes(model: ModelConfig) -> int:
    return model.num_parameters * (2 if model.dtype == "bf16" else 4)


def plan_rollouts(model: ModelConfig, batch: Rollouts, training: Candidate, gpus: int, device: Device) -> RolloutPlan:
    """gpus: of training. ValueError when an engine's GPU holds no sequence at its longest."""
    c = constants("rollout", "all")
    own = batch.engine == "server"
    replicas = (batch.engine_gpus if own else gpus) // batch.engine_tensor
    if not replicas:
        raise ValueError(f"--engine-tensor {batch.engine_tensor} must be at most --gpus {gpus}: an engine spans so many")
    held = training.memory.weights + training.memory.gradients + training.memory.optimizer
    room = device.memory_gb * 1e9 * c["memory_fraction"] - weight_bytes(model) / batch.engine_tensor - (0 if own else held)
    per_token = cache_bytes_per_token(model) / batch.engine_tensor
    cache_tokens = int(max(room, 0.0) / per_token)
    if cache_tokens < batch.prompt_tokens + batch.longest:
        raise ValueError(
            f"an engine's GPUs have {room / 1e9:.1f} GB for keys and values, {cache_tokens} tokens, a row at its longest is "
            f"{batch.prompt_tokens + batch.longest}: raise --engine-tensor, or give engines GPUs of their own (--engine server)"
        )
    share = math.ceil(batch.answers / replicas)
    mean = batch.prompt_tokens + batch.answer_tokens / 2  # while an answer grows
    running = max(1, min(share, batch.concurrency, int(cache_tokens / (batch.prompt_tokens + batch.answer_tokens))))

    def token_s(sequences: float) -> float:
        read = (weight_bytes(model) / batch.engine_tensor + sequences * mean * per_token) / (
            device.memory_tb_s * 1e12 * c["memory"])  # fmt: skip
        product = 2 * model.num_parameters * sequences / batch.engine_tensor / (device.peak_tflops * 1e12 * c["matmul"])
        reduce = 2 * model.num_layers * c["tensor_s"] if batch.engine_tensor > 1 else 0.0
        return max(read, product) + reduce + c["token_s"]

    longest = min(batch.longest, batch.answer_tokens * c["longest_over_mean"])
    bulk = share * batch.answer_tokens / running * token_s(running)
    # a wave ends with its longest answer: the last one runs with ever fewer neighbours, about a quarter of them on average
    tail = (longest - batch.answer_tokens) * token_s(max(1.0, running / 4))
    read_once = math.ceil(share / batch.group) * batch.prompt_tokens  # a group's prompt is read once
    prefill = 2 * model.num_parameters * read_once / batch.engine_tensor / (device.peak_tflops * 1e12 * c["matmul"])
    compute = training.step.total - training.step.seconds["data"] - training.step.seconds["optimizer"]
    network = device.network_gb_s if own or gpus > device.node_gpus else device.node_link_gb_s
    sync = weight_bytes(model) / batch.engine_tensor / (network * 1e9 * c["bucket_link"]) + c["sync_s"]
    seconds = {
        "prefill": prefill, "decode": bulk + tail, "score": c["score_s"], "logprobs": compute / 3,
        "train": training.step.total, "sync": sync,
    }  # fmt: skip
    sampling = prefill + bulk + tail + c["score_s"]
    training_s = seconds["logprobs"] + seconds["train"]
    parts = (max(sampling, training_s) if batch.staleness else sampling + training_s) + sync
    step_s = parts * c["overhead"]
    seconds["overhead"] = step_s - parts
    rate = running / token_s(running)
    return RolloutPlan(replicas, room / 1e9, cache_tokens, running, rate, seconds, step_s, batch.staleness)
