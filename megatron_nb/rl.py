"""Reinforcement learning: rollouts of the policy, scored, credited, trained on.

python -m megatron_nb.rl --config-name rl_pointwise init_from=SFT_RUN prompts.sources.a.path=prompts.jsonl \
       reward.terms.model.settings.checkpoint=REWARD_RUN
torchrun --nproc-per-node N -m megatron_nb.rl --config-name rl_pairwise algorithm=gspo engine=server [overrides]
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_nb.config import flatten, job, to_yaml
from megatron_nb.data.prompts import PromptSet, open_prompts
from megatron_nb.data.tokenizer import load_tokenizer, tokenizer_digest
from megatron_nb.give_up import GivesUp
from megatron_nb.launch import elsewhere, look_around, open_run, watchdog
from megatron_nb.model.gpt import build
from megatron_nb.parallel import topology
from megatron_nb.parallel.topology import Topology
from megatron_nb.records import Group, Sample
from megatron_nb.rewards.advantage import credit
from megatron_nb.rewards.reward import RewardConfig, build_reward, find_judges, find_models
from megatron_nb.rewards.turn_credit import TurnBaseline
from megatron_nb.rl_config import RlConfig, compares, describe_job, peak_gb, sampling_of, versus
from megatron_nb.rollout.agent import Agent
from megatron_nb.rollout.calls import describe as describe_tools
from megatron_nb.rollout.collect import Collector, Interrupted
from megatron_nb.rollout.engine import Engine
from megatron_nb.rollout.engines import build_engine
from megatron_nb.rollout.heldout import Heldout
from megatron_nb.rollout.prompt_filter import filter_by_success
from megatron_nb.rollout.store import forget, write_step
from megatron_nb.rollout.toolbox import Toolbox
from megatron_nb.run import Run
from megatron_nb.schema import ConfigError
from megatron_nb.training import preflight
from megatron_nb.training.checkpoint import Checkpoints
from megatron_nb.training.checkpoint_folder import complete_steps
from megatron_nb.training.loop import save_or_leave
from megatron_nb.training.metrics import Metrics
from megatron_nb.training.policy import Policy
from megatron_nb.training.reference import Reference
from megatron_nb.training.signals import REQUEUE_EXIT, StopSignal
from megatron_nb.training.start import companions, find_origin, load_start
from megatron_nb.training.trainer import Trainer
from megatron_nb.training.watch import Watch

log = logging.getLogger(__name__)


@dataclass
class Stage:
    """The parts of a running stage."""

    config: RlConfig
    run: Run
    engine: Engine
    trainer: Trainer
    policy: Policy
    collector: Collector
    heldout: Heldout | None
    watch: Watch
    checkpoints: Checkpoints
    metrics: Metrics
    stop: StopSignal
    turn_baseline: TurnBaseline
    evaluated: int | None = None  # the last step after which the held-out prompts were answered
    finished: str | None = None  # why the run ends before its last step

    def state(self) -> dict[str, Any]:
        """What goes into a checkpoint beside the weights; plain JSON."""
        mine = {"evaluated": self.evaluated, "finished": self.finished}
        parts = {"collector": self.collector, "watch": self.watch, "turn_baseline": self.turn_baseline}
        return {**mine, **{name: part.state() for name, part in parts.items()}}


def train(stage: Stage, first: int) -> None:
    """The loop. Leaves by SystemExit when asked to stop."""
    config, engine, bad = stage.config, stage.engine, 0
    done, state = first, stage.state()  # what can be saved when the job is asked to stop while it samples
    try:
        evaluate(stage, first, None)
        for step in range(first + 1, config.num_steps + 1):
            if stage.finished:
                break
            state = stage.state()
            stage.metrics.start_step()
            groups, collected = stage.collector.collect(step)
            stage.stop.alive()
            samples, credited = credit(groups, config.credit, stage.turn_baseline.value)
            stage.turn_baseline.observe(credited.get("turn_reward_mean"))
            clock = [time.perf_counter()]
            if not config.collect.staleness:
                engine.sleep()
            updated = stage.policy.update(samples)
            clock.append(time.perf_counter())
            engine.load_weights(stage.trainer.weights(), version=step)
            clock.append(time.perf_counter())
            stage.collector.start_ahead(step + 1)
            done, state = step, stage.state()
            seconds = {"training_s": clock[1] - clock[0], "sync_s": clock[2] - clock[1]}
            tell(stage, step, groups, samples, collected | credited | updated | seconds)
            bad = count_refused(bad, step, updated, config.stop_after_bad_steps)
            stage.stop.alive()
            evaluate(stage, step, updated.get("kl_ref"))
            if stage.finished:
                stage.checkpoints.save(step, stage.trainer, stage.state())
            save_or_leave(stage.checkpoints, stage.stop, step, config.num_steps, stage.trainer, stage.state())
            saved = next(iter(complete_steps(stage.run.folder)), None)
            if stage.run.rank == 0 and saved is not None:
                forget(stage.run.folder, saved)
    except Interrupted:
        if done:  # nothing is trained yet otherwise; what was sampled is on disk
            stage.checkpoints.save(done, stage.trainer, state)
            stage.checkpoints.wait()
        log.warning("stopped after step %d of %d; the same command continues", done, config.num_steps)
        sys.exit(REQUEUE_EXIT)
    stage.checkpoints.wait()


def evaluate(stage: Stage, step: int, kl: float | None) -> None:
    """Answer and judge the held-out prompts when it is time, and watch for over-optimisation."""
    due = step % stage.config.evaluation.every == 0 or step == stage.config.num_steps
    if stage.heldout is None or not due or stage.evaluated == step:
        return
    told = stage.heldout.evaluate(step)
    stage.metrics.note(step, **told)
    reason = stage.watch.observe(
        step, told["heldout_reward"], told.get("heldout_judge"), kl if stage.config.policy.kl else None, told["heldout_length"],
        heldout_error=told.get("heldout_judge_error", 0.0),
    )  # fmt: skip
    stage.evaluated = step
    if stage.run.rank == 0:
        stage.watch.plot(stage.run.plots / "overoptimisation.png")
    if reason and step < stage.config.num_steps:
        stage.finished = reason
        log.warning("stopping early after step %d: %s", step, reason)


def tell(stage: Stage, step: int, groups: list[Group], samples: list[Sample], measured: dict[str, float]) -> None:
    """One step into console, files and wandb, and its rollouts into rollouts/step-N.jsonl."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if stage.run.rank == 0:
        write_step(stage.run.folder, step, groups, ratios=ratios_of(groups, samples))
    lengths = [len(rollout.prompt_ids) + len(rollout.ids) for rollout in rollouts]
    measured = {"loss": math.nan, "lr": math.nan, "grad_norm": math.nan} | measured
    measured |= {"trained_tokens": measured.pop("tokens", 0.0), "tokens": sum(lengths)}
    if stage.config.policy.kl is None:
        measured.pop("kl_ref", None)  # against nothing
    measured["generated_tokens_per_s"] = measured["generated_tokens"] / max(measured["generation_s"], 1e-9)
    stage.metrics.step(step, squared_lengths=sum(n * n for n in lengths), **measured)
    if step % stage.config.log.every == 0:
        names = ("reward_mean", "reward_std", "length_mean", "truncated", "entropy", "kl_ref", "mismatch_abs", "invalid")
        told = "  ".join(f"{name} {measured[name]:.4g}" for name in names if name in measured)
        log.info("  %s  generation %.3g s, scoring %.3g s, training %.3g s, sync %.3g s", told,
                 *(measured[f"{name}_s"] for name in ("generation", "scoring", "training", "sync")))  # fmt: skip


def ratios_of(groups: list[Group], samples: list[Sample]) -> dict[str, list[float]]:
    """Trainer over engine for every token of a rollout's ids, where the trainer's log-probs were taken before the updates."""
    known = {sample.sample_id: sample for sample in samples if sample.old_logprob is not None}
    ratios = {}
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        sample = known.get(f"{rollout.rollout_id}/{rollout.segment}")
        if sample is not None:
            drift = np.where(sample.loss_weight != 0, sample.old_logprob - sample.behaviour_logprob, 0.0)
            ratios[sample.sample_id] = np.exp(drift)[len(rollout.prompt_ids) :].tolist()
    return ratios


def count_refused(bad: int, step: int, updated: dict[str, float], limit: int) -> int:
    """Steps in a row with a refused update, this one included; GivesUp when they reach `limit`."""
    bad = bad + 1 if updated.get("skipped") else 0
    if bad >= limit:
        raise GivesUp(
            f"{bad} steps in a row had an update refused for NaN or inf, the last is {step}: its samples are in the log, its "
            "rollouts in the run's folder. Lower optimizer.lr or clip more; tools/rollouts.py shows what was generated"
        )
    return bad


def scorer(config: RewardConfig | None, tokenizer: Any, place: Topology, engine: Engine) -> Any:
    """What scores groups: on leaders the reward, elsewhere a name that is never called. None without a configuration."""
    if config is None:
        return None
    return build_reward(config, tokenizer, place.device).score if engine.leads else "on the leaders"


def find_services(config: RlConfig) -> None:
    """Ask for all that rewards and tools stand on, before any model of ours is loaded. Raises ConfigError."""
    first = int(os.environ.get("RANK", "0")) == 0
    for reward in filter(None, (config.reward, config.heldout_reward)):
        find_models(reward)
        if first:
            find_judges(reward)
    if config.agent is None or not first:
        return
    try:
        toolbox = Toolbox(config.agent.tools)
        try:
            asyncio.run(toolbox.ready())
        finally:
            toolbox.close()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"agent.tools: they cannot be used: {error}") from error


def ask(config: RlConfig, tokenizer: Any) -> tuple[Agent | None, PromptSet]:
    """The agent, None without tools, and the prompts, with its tools in them."""
    if config.agent is None:
        return None, open_prompts(config.prompts, tokenizer, config.seed)
    agent = Agent(config.agent, tokenizer, keep_all_think=config.prompts.keep_all_think)
    tools = agent.toolbox.schemas
    told = describe_tools(tools, config.agent.wire)
    return agent, open_prompts(config.prompts, tokenizer, config.seed, tools, told)


@job(RlConfig)
def main(config: RlConfig) -> None:
    """Run the stage, or describe it."""
    report = describe_job(config)
    if elsewhere(config, "rl", "megatron_nb.rl", report):
        return
    find_services(config)
    origin = find_origin(config.init_from, config.model)
    frozen = find_origin(config.reference.checkpoint or config.init_from, config.model)
    place = topology.initialize(config.parallel, config.seed)
    with open_run(config, "rl") as run, StopSignal(place.device, watchdog(config, run, config.sampling_s(place.world))) as stop:
        log.info("%s\n%s", run.folder, report)
        look_around(config, run, place, config.update.pack_tokens, max(peak_gb(config, place.world).values()))
        own = bool(config.prompts.tokenizer or config.prompts.chat_template)
        tokenizer = load_tokenizer(config.prompts.tokenizer or str(origin.hf_folder or ""), config.prompts.chat_template)
        preflight.agree(tokenizer=tokenizer_digest(tokenizer))
        agent, prompts = ask(config, tokenizer)
        chunks = build(config.model, config.parallel)
        reference = None
        if config.policy.kl is not None:
            load_start(frozen, chunks, config.model, config.seed)
            reference = Reference(chunks)
        if not run.resumes:
            load_start(origin, chunks, config.model, config.seed)
        trainer = Trainer(
            chunks, config.optimizer, place, config.num_steps * config.update.updates,
            distributed_optimizer=config.parallel.distributed_optimizer,
        )  # fmt: skip
        hf_files = companions(origin.hf_folder, tokenizer, run.folder / "hf", own, place.rank)
        checkpoints = Checkpoints(run.folder, config.checkpoint, to_yaml(config), hf_files)
        resumed = checkpoints.resume(trainer)
        first = resumed.step if resumed else 0
        policy = Policy(trainer, config.policy, config.update, reference)
        engine = build_engine(config.engine, config.model, place, config.longest, policy.probe)
        engine.load_weights(trainer.weights(), version=first)
        collector = Collector(
            engine, prompts, scorer(config.reward, tokenizer, place, engine), config.collect,
            sampling_of(config, tokenizer), tokenizer, run.folder,
            seed=config.seed, num_steps=config.num_steps, stopping=lambda: stop.received is not None, agent=agent,
        )  # fmt: skip
        state = resumed.data_state if resumed else {}
        filter_prompts(config, collector, prompts, run)
        turn_baseline = TurnBaseline(config.credit.baseline_decay)
        if resumed:
            collector.restore(state["collector"])
            turn_baseline.restore(state["turn_baseline"])
        heldout = Heldout(
            collector, prompts.heldout, config.evaluation.samples, run.folder, writes=run.rank == 0,
            judge=scorer(config.heldout_reward, tokenizer, place, engine),
            versus=scorer(versus(config), tokenizer, place, engine),
            relative=(compares(config.reward), compares(config.heldout_reward)),
        ) if prompts.heldout else None  # fmt: skip
        metrics = Metrics(
            run, config.log, config.model,
            num_steps=config.num_steps, devices=place.world, first_step=first, settings=flatten(config),
        )  # fmt: skip
        stage = Stage(
            config, run, engine, trainer, policy, collector, heldout, Watch(config.watch, state.get("watch")), checkpoints,
            metrics, stop, turn_baseline, state.get("evaluated"), state.get("finished"),
        )  # fmt: skip
        try:
            train(stage, first)
        finally:
            measured = metrics.close()
            if agent:
                agent.close()
        engine.close()
        run.write_summary(config.seed, **measured, **summary(measured, metrics.rows), finished_early=int(bool(stage.finished)))


def filter_prompts(config: RlConfig, collector: Collector, prompts: PromptSet, run: Run) -> None:
    """Leave the collector the prompts that the starting model solves sometimes, if that is asked for."""
    if config.prompt_filter is None:
        return
    try:
        kept = filter_by_success(collector, prompts, config.prompt_filter, run.folder, run.rank == 0)
    except Interrupted:
        log.warning("stopped while filtering prompts; the same command continues")
        sys.exit(REQUEUE_EXIT)
    collector.prompts = prompts.only(kept)


def summary(measured: dict[str, float], rows: list[dict[str, Any]]) -> dict[str, float]:
    """reward_ and win_rate_ before and after: by the held-out judge, else the reward on held-out prompts, else in training."""
    rewards = [row["reward_mean"] for row in rows if row.get("reward_mean") is not None]
    told = {"reward_before": rewards[0], "reward_after": rewards[-1]} if rewards else {}
    for name, sources in {"reward": ("heldout_reward", "heldout_judge"), "win_rate": ("heldout_win_rate",)}.items():
        for when in ("before", "after"):
            told |= {f"{name}_{when}": measured[key] for s in sources if (key := f"{s}_{when}") in measured}
    return told


if __name__ == "__main__":
    main()
