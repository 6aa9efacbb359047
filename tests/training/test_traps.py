"""Every trap of megatron-core 0.19.2 that is known has a test with its name; most fail silently or late without it."""
import dataclasses

import pytest


def _core_configurations(**parallel):
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    from megatron_nb.model.gpt import core_config
    from megatron_nb.parallel.topology import ParallelConfig
    from tests.training.tiny import model_config

    return core_config(model_config(), ParallelConfig(**parallel)), OptimizerConfig(lr=1.0), DistributedDataParallelConfig()


TRAPS = {
    "batch_p2p_comm_with_interleaved_pipeline": (0, {"batch_p2p_comm": True}, "batch_p2p_comm=True"),
    "native_cross_entropy_fusion": (0, {"cross_entropy_loss_fusion": True}, "native cross-entropy"),
    "gradient_accumulation_fusion_without_apex": (0, {"gradient_accumulation_fusion": True}, "needs apex's"),
    "variable_lengths_with_the_default_dispatcher": (0, {"variable_seq_lengths": True}, "moe_token_dispatcher_type='alltoall'"),
    "averages_per_micro_batch": (0, {"calculate_per_token_loss": False}, "calculate_per_token_loss=False"),
    "optimizer_offload_without_a_gpu": (1, {"optimizer_cpu_offload": True}, "optimizer_cpu_offload=True"),
    "fp16_without_loss_scaling": (1, {"fp16": True}, "fp16 needs loss scaling"),
    "param_gather_overlap_set_in_one_configuration": (2, {"overlap_param_gather": True}, "overlap_param_gather differs"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_trap_is_refused_before_the_first_step(trap):
    from megatron_nb.training.traps import refuse_traps

    configurations = _core_configurations(pipeline=2, virtual_pipeline=2)
    refuse_traps(*configurations)
    number, settings, message = TRAPS[trap]
    for name, value in settings.items():
        assert name in {field.name for field in dataclasses.fields(configurations[number])}, f"core has no {name} any more"
        setattr(configurations[number], name, value)
    with pytest.raises(AssertionError, match=message):
        refuse_traps(*configurations)


def _two_values(model: dict):
    from megatron_nb.losses.next_token import NextToken
    from tests.training import tiny

    class TwoValues(NextToken):
        def __call__(self, logprob, batch):
            total, _, metrics = super().__call__(logprob, batch)
            return total, metrics

    class FloatCount(NextToken):
        def __call__(self, logprob, batch):
            total, count, metrics = super().__call__(logprob, batch)
            return total, float(count), metrics

    trainer, messages = tiny.trainer(model, {}), []
    for loss in (TwoValues(), FloatCount()):
        try:
            trainer.step(tiny.packs(0), loss)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_trap_a_loss_of_two_values_is_refused_because_core_would_see_zero_tokens(ranks):
    (messages,) = ranks.run(1, _two_values, {})
    assert len(messages) == 2 and "zero tokens" in messages[0] and "integer count" in messages[1]


# ---------------------------------------------------------------------- overlap
def _overlapped(sync: bool):
    """Difference of the parameters seen after two overlapped steps from those of plain steps; then over all ranks."""
    from megatron_nb.training.optimizer import sync_parameters
    from tests.training import tiny

    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    trainer = tiny.trainer({}, {}, overlap)
    tiny.train(trainer, range(2))
    if sync:
        sync_parameters(trainer.chunks)
    return tiny.weights(trainer)


def _plain():
    from tests.training import tiny

    trainer = tiny.trainer({}, {})
    tiny.train(trainer, range(2))
    return tiny.weights(trainer)


def test_trap_overlap_param_gather_leaves_parameters_stale_until_synced(ranks):
    plain = ranks.run(2, _plain)[0]
    stale, synced = ranks.run(2, _overlapped, False)[0], ranks.run(2, _overlapped, True)[0]
    assert not all(stale[name].equal(plain[name]) for name in plain), "core syncs by itself now: drop sync_parameters"
    assert all(synced[name].equal(plain[name]) for name in plain)


def _save_overlapped(run: str):
    from pathlib import Path

    import yaml

    from megatron_nb.training.checkpoint import CheckpointConfig, Checkpoints
    from tests.training import tiny

    trainer = tiny.trainer({}, {}, {"overlap_grad_reduce": True, "overlap_param_gather": True})
    tiny.train(trainer, range(2))
    config_yaml = yaml.safe_dump({"model": dataclasses.asdict(tiny.model_config())})
    Checkpoints(Path(run), CheckpointConfig(), config_yaml).save(2, trainer, {"position": 0})


def test_trap_a_checkpoint_saved_under_overlap_holds_the_last_update(ranks, tmp_path):
    from tests.training.test_checkpoint import _load_weights

    plain = ranks.run(2, _plain)[0]
    ranks.run(2, _save_overlapped, str(tmp_path))
    saved = ranks.run(1, _load_weights, str(tmp_path), {}, {})[0]
    assert all(saved[name].equal(plain[name]) for name in plain)


# ---------------------------------------------------------------------- faults of core that parallel/mends.py mends
def test_trap_recompute_without_transformer_engine_asks_for_fp8():
    from megatron_nb.parallel import topology  # noqa: F401  mends on import

    # isort: split
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    assert CheckpointWithoutOutput().fp8 is False


def _reload_own_state():
    """Steps of Adam's state after loading an optimizer's own state, with and without tensors shared."""
    from tests.training import tiny

    trainer = tiny.trainer({}, {})
    tiny.train(trainer, range(2))
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
    steps = [state["step"] for state in trainer.optimizer.optimizer.state.values()]
    return [float(step) for step in steps], len({step.data_ptr() for step in steps})


def test_trap_every_parameter_has_a_step_tensor_of_its_own_after_a_load(ranks):
    """Core gives all parameters one tensor, which torch's Adam then raises once per parameter."""
    ((steps, different),) = ranks.run(1, _reload_own_state)
    assert steps == [2.0] * len(steps) and different == len(steps)


def _set_state_without_step():
    import torch

    from tests.training import tiny

    trainer = tiny.trainer({}, {})
    (inner,) = trainer.optimizer.chained_optimizers
    parameter = next(iter(inner.model_param_group_index_map))
    stored = {key: torch.full_like(value, 2.0) for key, value in inner._get_main_param_and_optimizer_states(parameter).items()}
    step = stored.pop("step")
    with torch.no_grad():
        inner._set_main_param_and_optimizer_states(parameter, stored)
    now = inner._get_main_param_and_optimizer_states(parameter)
    return all(now[key].equal(value) for key, value in stored.items()) and float(now["step"]) == 0.0 != float(step)


def test_trap_loaded_moments_come_without_a_step(ranks):
    """A reshardable checkpoint stores the step once per group; core asks for one with every parameter's moments."""
    assert ranks.run(1, _set_state_without_step) == [True]


def _fresh_state():
    from tests.training import tiny

    trainer = tiny.trainer({}, {})
    states = trainer.optimizer.optimizer.state
    parameters = trainer.optimizer.get_parameters()
    ready = all(float(states[parameter]["step"]) == 0.0 and not states[parameter]["exp_avg"].any() for parameter in parameters)
    trainer.optimizer.sharded_state_dict(
        {"model": trainer.chunks[0].module.sharded_state_dict()}, metadata={"distrib_optim_sharding_type": "fully_reshardable"}
    )
    return ready


def test_trap_adam_has_its_state_before_the_first_save_or_load(ranks):
    """Torch makes it at the first update; core asserts on saving and fails on loading without it."""
    assert ranks.run(1, _fresh_state) == [True]
