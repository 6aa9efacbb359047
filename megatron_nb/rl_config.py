"""The configuration of a stage of reinforcement learning: what is refused before any work, and what a dry run prints."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_nb.data.prompts import PromptConfig
from megatron_nb.launch import LaunchConfig, world_of
from megatron_nb.losses.policy_gradient import PolicyConfig
from megatron_nb.model.gpt import check_layout
from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel.topology import ParallelConfig
from megatron_nb.rewards.advantage import CreditConfig
from megatron_nb.rewards.reward import RewardConfig, check_reward
from megatron_nb.rollout.collect import CollectConfig
from megatron_nb.rollout.engine import Sampling
from megatron_nb.rollout.engines import EngineConfig, check_lengths, check_sampling, check_staleness, describe_engine
from megatron_nb.rollout.heldout import EvaluationConfig
from megatron_nb.rollout.prompt_filter import PromptFilterConfig
from megatron_nb.training import memory
from megatron_nb.training.checkpoint import CheckpointConfig
from megatron_nb.training.metrics import LogConfig
from megatron_nb.training.optimizer import OptimizerConfig, describe, schedule_lengths
from megatron_nb.training.policy import UpdateConfig
from megatron_nb.training.watch import WatchConfig


@dataclass
class ReferenceConfig:
    """The frozen policy of the KL term."""

    checkpoint: str | None = None  # Hugging Face folder, run, or step folder; None: init_from


@dataclass
class RlConfig:
    """One stage of reinforcement learning."""

    name: str | None = None  # run folder runs_dir/name; None: derived from the configuration
    runs_dir: str = "runs"
    seed: int = 1234
    init_from: str | None = None  # Hugging Face folder, run, or step folder: weights, tokenizer and template
    num_steps: int = 200  # batches of rollouts
    stop_after_bad_steps: int = 5  # batches in a row of which an update was refused for NaN or inf
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    prompts: PromptConfig = field(default_factory=PromptConfig)
    prompt_filter: PromptFilterConfig | None = None  # before the first step: keep what the starting model solves sometimes
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: Sampling = Sampling(max_tokens=1024)  # stop_ids empty: the template's end of turn and the tokenizer's eos
    collect: CollectConfig = field(default_factory=CollectConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    heldout_reward: RewardConfig | None = None  # another judge of the held-out answers; never trained on
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    credit: CreditConfig = field(default_factory=CreditConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self):
        for name in ("num_steps", "stop_after_bad_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative: the generators take no such seed")
        check_layout(self.model, self.parallel)
        schedule_lengths(self.optimizer, self.num_steps * self.update.updates)
        check_sampling(self.sampling, self.policy.temperature)
        limits = {"model.max_position_embeddings": self.model.max_position_embeddings}
        limits["update.pack_tokens"] = self.update.pack_tokens
        if self.engine.kind == "native":
            limits["engine.native.max_sequence_length"] = self.engine.native.max_sequence_length
        check_lengths(self.prompts.max_tokens, self.sampling, self.collect, limits)
        corrected = self.policy.importance_cap is not None or self.policy.old == "behaviour"
        check_staleness(self.collect.staleness, self.engine, corrected)
        if self.collect.group_size == 1 and self.credit.advantage != "reinforce_pp":
            raise ValueError(
                f"collect.group_size=1 with credit.advantage={self.credit.advantage}: an advantage within a group needs two "
                "answers, so every one would be 0; raise group_size, or take algorithm=reinforce_pp"
            )
        if self.reference.checkpoint and self.policy.kl is None:
            raise ValueError("reference.checkpoint is set but policy.kl is null: only the KL term reads it; set policy.kl=k3")
        if self.heldout_reward is not None and not (self.prompts.heldout or self.prompts.heldout_share):
            raise ValueError("heldout_reward judges held-out prompts: set prompts.heldout.NAME.path or prompts.heldout_share")


def describe_job(config: RlConfig) -> str:
    """What the dry run prints below the configuration. ValueError when it cannot run or does not fit."""
    for reward in filter(None, (config.reward, config.heldout_reward)):
        check_reward(reward)
    world, p, c, pack = world_of(config), config.parallel, config.collect, config.update.pack_tokens
    data_size = p.data_size(world)
    plan = memory.plan(config.model, p, world, pack)
    if p.device_memory_gb:
        memory.check_fits(plan, p.device_memory_gb)
    layout, held = describe_engine(config.engine, config.model, p, world)
    rollouts, most = c.num_prompts * c.group_size, config.sampling.max_tokens
    lines = [
        f"model        {config.model.num_parameters:,} parameters, {config.model.dtype}, backend {config.model.backend}",
        f"ranks        {world} = data {data_size} * pipeline {p.pipeline} * context {p.context} * tensor {p.tensor}, "
        f"{p.communication}",
        f"engine       {layout}; staleness {c.staleness}, at most {c.concurrency} rollouts at once a replica",
        f"step         {c.num_prompts} prompts * {c.group_size} answers of at most {most} = {rollouts * most:,} tokens; "
        f"updates {config.update.updates}, packs of at most {pack}",
        f"reward       {', '.join(f'{name} ({term.kind})' for name, term in config.reward.terms.items())}",
        f"optimizer    {describe(config.optimizer)}, {config.optimizer.schedule} from {config.optimizer.lr:g}, "
        f"{config.num_steps} steps",
        f"memory of the fullest rank (pack of {pack} tokens, recompute {p.recompute})"
        + (f", device {p.device_memory_gb:g} GB" if p.device_memory_gb else ""),
        plan.table(),
        f"beside it    engine: {held}" + ("; reference: on the host, swapped in" if config.policy.kl else ""),
    ]
    return "\n".join(lines)
