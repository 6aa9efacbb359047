"""The configuration of a stage of reinforcement learning: what is refused before any work, what a dry run prints, and what
follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_nb.data.prompts import PromptConfig
from megatron_nb.data.turns import Template
from megatron_nb.launch import LaunchConfig, world_of
from megatron_nb.losses.policy_gradient import PolicyConfig
from megatron_nb.model.gpt import check_layout
from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel.topology import ParallelConfig
from megatron_nb.rewards.advantage import CreditConfig
from megatron_nb.rewards.reward import RewardConfig, check_reward
from megatron_nb.rewards.term import BUILT_IN
from megatron_nb.rollout.agent import AgentConfig
from megatron_nb.rollout.collect import CollectConfig
from megatron_nb.rollout.engine import Sampling
from megatron_nb.rollout.engines import EngineConfig, check_lengths, check_sampling, check_staleness, describe_engine
from megatron_nb.rollout.heldout import EvaluationConfig
from megatron_nb.rollout.native_config import cache_blocks, cache_gb_for
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
    sampling: Sampling = Sampling(max_tokens=1024)  # of a turn; stop_ids empty: the template's end and the tokenizer's eos
    agent: AgentConfig | None = None  # tools, and how long an episode may be; None: one turn without tools
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
        if self.agent is None:
            check_lengths(self.prompts.max_tokens, self.sampling, self.collect, limits)
        else:
            self._check_rows(limits)
        self._check_turn_credit()
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


    @property
    def longest(self) -> int:
        """Tokens of a row at most, prompt included."""
        return self.agent.max_tokens if self.agent else self.prompts.max_tokens + self.sampling.max_tokens

    def sampling_s(self, world: int) -> float:
        """Seconds that a batch, or the held-out prompts, may take to be answered and scored within all time-outs."""
        c, replicas = self.collect, world // self.engine.native.tensor if self.engine.kind == "native" else 1
        rounds = c.max_generation_batches if c.dynamic_sampling else 1
        asked = max(c.num_prompts * c.group_size, self.prompts.heldout_limit * self.evaluation.samples)
        waves = math.ceil(asked / replicas / c.concurrency)
        rewards = [reward for reward in (self.reward, self.heldout_reward) if reward]
        scoring = 2 * sum(reward.timeout_s * (1 + reward.retries) for reward in rewards)  # gates, then the others
        return rounds * (waves * c.timeout_s + scoring)

    def _check_rows(self, limits: dict[str, int | None]) -> None:
        """ValueError when an agent's row may not fit into one of `limits`, or a prompt not into a row."""
        for name, limit in limits.items():
            if limit is not None and self.longest > limit:
                raise ValueError(f"agent.max_tokens={self.longest} must be at most {name}={limit}: raise it or cut rows")
        if self.prompts.max_tokens >= self.longest:
            raise ValueError(
                f"prompts.max_tokens={self.prompts.max_tokens} must be less than agent.max_tokens={self.longest}: a row "
                "holds the prompt with its tools and all turns"
            )

    def _check_turn_credit(self) -> None:
        """ValueError where groups are chosen by what the unbiased form must not choose by."""
        if self.credit.turn_credit == "unbiased" and self.credit.turn_weight and self.collect.dynamic_sampling:
            raise ValueError(
                "collect.dynamic_sampling=true with credit.turn_credit=unbiased: dropping groups by their rewards biases the "
                "gradient, and their turns would teach something; set collect.dynamic_sampling=false"
            )


def describe_job(config: RlConfig) -> str:
    """What the dry run prints below the configuration. ValueError when it cannot run or does not fit."""
    for reward in filter(None, (config.reward, config.heldout_reward)):
        check_reward(reward)
    check_turn_rewards(config)
    world, p, c, pack = world_of(config), config.parallel, config.collect, config.update.pack_tokens
    data_size = p.data_size(world)
    plan = memory.plan(config.model, p, world, pack)
    if p.device_memory_gb:
        memory.check_fits(plan, p.device_memory_gb)
    layout, held = describe_engine(config.engine, config.model, p, world)
    if config.engine.kind == "native":
        check_cache(config)
    scorers, whole = scorer_gb(config), peak_gb(config, world)
    if p.device_memory_gb:
        check_peak(config, whole)
    rollouts, most = c.num_prompts * c.group_size, config.sampling.max_tokens
    step = f"{c.num_prompts} prompts * {c.group_size} answers of at most {most} = {rollouts * most:,} tokens"
    if config.agent is not None:
        step = f"{c.num_prompts} prompts * {c.group_size} episodes"
    lines = [
        f"model        {config.model.num_parameters:,} parameters, {config.model.dtype}, backend {config.model.backend}",
        f"ranks        {world} = data {data_size} * pipeline {p.pipeline} * context {p.context} * tensor {p.tensor}, "
        f"{p.communication}",
        f"engine       {layout}; staleness {c.staleness}, at most {c.concurrency} rollouts at once a replica",
        f"step         {step}; updates {config.update.updates}, packs of at most {pack}",
        f"reward       {', '.join(f'{name} ({term.kind})' for name, term in config.reward.terms.items())}",
        *describe_agent(config),
        f"optimizer    {describe(config.optimizer)}, {config.optimizer.schedule} from {config.optimizer.lr:g}, "
        f"{config.num_steps} steps",
        f"memory of the fullest rank (pack of {pack} tokens, recompute {p.recompute})"
        + (f", device {p.device_memory_gb:g} GB" if p.device_memory_gb else ""),
        plan.table(),
        f"beside it    engine: {held}" + (f"; reward models: {scorers:.2f} GB" if scorers else "")
        + ("; reference: on the host, swapped in" if config.policy.kl else ""),
        f"with these   {', '.join(f'{gb:.1f} GB while {name}' for name, gb in whole.items())}",
    ]
    return "\n".join(lines)


def scorer_gb(config: RlConfig) -> float:
    """Of the reward models on a leader's device, each taken to be as large as the policy: they are not read yet."""
    held = {}
    for reward in filter(None, (config.reward, config.heldout_reward)):
        for term in reward.terms.values():
            if term.kind in ("pointwise", "pairwise") and not term.settings.get("url"):
                dtype = term.settings.get("dtype", "float32")
                held[term.settings.get("checkpoint"), dtype] = 4 if dtype == "float32" else 2
    return replace(config.model, head="score").num_parameters * sum(held.values()) / 1e9


def peak_gb(config: RlConfig, world: int) -> dict[str, float]:
    """GB of the fullest rank, with all that lives on its device beside the trainer: {"training": ..., "sampling": ...}."""
    plan, native = memory.plan(config.model, config.parallel, world, config.update.pack_tokens), config.engine.native
    weights = cache = 0.0
    if config.engine.kind == "native":
        weights = config.model.num_parameters * (2 if config.model.dtype == "bf16" else 4) / native.tensor / 1e9
        cache = native.kv_cache_gb * 2**30 / 1e9
    beside = weights + scorer_gb(config)
    return {
        "training": plan.total / 1e9 + beside,
        "sampling": (plan.weights + plan.gradients + plan.optimizer) / 1e9 + beside + cache,
    }


def check_peak(config: RlConfig, whole: dict[str, float]) -> None:
    """ValueError when trainer, engine and reward models do not fit a device together."""
    device_gb = config.parallel.device_memory_gb
    when, most = max(whole.items(), key=lambda pair: pair[1])
    if most > device_gb * (1 - memory.RESERVE):
        remedy = "lower engine.native.kv_cache_gb, " if when == "sampling" else "raise parallel.context or parallel.tensor, "
        raise ValueError(
            f"with engine and reward models the fullest rank needs {most:.1f} GB while {when}, a device has {device_gb:g} GB "
            f"of which {device_gb * (1 - memory.RESERVE):.1f} can be used: {remedy}raise "
            "engine.native.tensor, set dtype=bfloat16 in the settings of reward models, or take engine=server"
        )


def check_turn_rewards(config: RlConfig) -> None:
    """ValueError when turns are to be credited and no term can say what they are worth."""
    credit, kinds = config.credit, {term.kind for term in config.reward.terms.values()}
    if credit.turn_credit in ("recipe", "unbiased") and credit.turn_weight and kinds <= set(BUILT_IN) - {"critic"}:
        raise ValueError(
            f"credit.turn_credit={credit.turn_credit} with credit.turn_weight={credit.turn_weight:g}, but no term of the "
            "reward gives turn rewards: add reward.terms.turns.kind=critic (weight 0), or set credit.turn_weight=0"
        )


def check_cache(config: RlConfig) -> None:
    """ValueError when the native engine's cache does not hold one row at its longest."""
    native = config.engine.native
    held = cache_blocks(native, config.model) * native.block_size
    if held < config.longest:
        raise ValueError(
            f"engine.native.kv_cache_gb={native.kv_cache_gb:g} holds {held} tokens, a row may have {config.longest}: give at "
            f"least {cache_gb_for(config.longest, native, config.model):g}, or more engine.native.tensor ranks"
        )


def describe_agent(config: RlConfig) -> list[str]:
    """Lines on the agent and on the credit of its turns."""
    agent, credit, lines = config.agent, config.credit, []
    if agent is not None:
        source = agent.tools.search or (agent.tools.service and agent.tools.service.base_url) or "no pages"
        lines.append(
            f"agent        at most {agent.max_turns} turns of {config.sampling.max_tokens}, rows of {agent.max_tokens:,} "
            f"tokens, {agent.context}, {agent.wire}; tools {', '.join(agent.tools.names)} over {source}"
        )
    if credit.turn_credit is not None:
        lines.append(f"turn credit  {credit.turn_credit}, weight {credit.turn_weight:g}, reduction {credit.reduction}")
    return lines


def compares(reward: RewardConfig | None) -> bool:
    """Whether a reward compares the answers of a group with each other."""
    terms = reward.terms.values() if reward else ()
    return any(term.kind == "pairwise" and term.settings.get("mode") == "group" for term in terms)


def versus(config: RlConfig) -> RewardConfig | None:
    """The judge of two answers for the win rate: the pair-wise terms of the held-out judge, or else of the reward."""
    for reward in filter(None, (config.heldout_reward, config.reward)):
        terms = {name: term for name, term in reward.terms.items() if term.kind == "pairwise"}
        if terms:
            share, how = sum(term.weight for term in terms.values()), {"mode": "group", "references": None}
            return replace(reward, terms={
                name: replace(term, weight=term.weight / share, gate=False, settings=term.settings | how)
                for name, term in terms.items()
            })  # fmt: skip
    return None


def sampling_of(config: RlConfig, tokenizer: Any) -> Sampling:
    """The sampling with what ends a turn: the template's end, and the tokenizer's own."""
    if config.sampling.stop_ids:
        return config.sampling
    end = tokenizer.convert_tokens_to_ids(Template(tokenizer, config.prompts.keep_all_think).end)
    return replace(config.sampling, stop_ids=tuple(sorted({end, tokenizer.eos_token_id} - {None})))
