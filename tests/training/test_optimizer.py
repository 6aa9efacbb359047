"""Adam, its schedule and the guarded update: the same at every layout, and nothing chosen silently."""
import math
import sys
import types

import pytest

LAYOUTS = {
    "dp2": (2, {}),
    "dp2-replicated": (2, {"distributed_optimizer": False}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "tp2-replicated": (2, {"tensor": 2, "distributed_optimizer": False}),
}


# ---------------------------------------------------------------------- schedule
class _Groups:
    """An optimizer as far as a schedule sees it."""

    def __init__(self):
        self.param_groups = [{}]


def _rates(num_steps: int, **settings) -> list[float]:
    from megatron_nb.training.optimizer import OptimizerConfig, schedule

    optimizer, rates = _Groups(), []
    scheduler = schedule(OptimizerConfig(**{"lr": 1.0, **settings}), optimizer, num_steps)
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    return rates


def test_warm_up_starts_above_zero_and_reaches_the_rate():
    rates = _rates(10, schedule="constant", warmup_steps=4)
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8] + [1.0] * 6)


def test_cosine_falls_from_the_rate_to_the_lowest():
    rates = _rates(9, schedule="cosine", min_lr=0.1, decay_steps=8)
    assert rates == pytest.approx([0.1 + 0.45 * (1 + math.cos(math.pi * k / 8)) for k in range(9)])


def test_wsd_is_flat_and_then_falls_by_the_square_root():
    rates = _rates(11, schedule="wsd", warmup_steps=2, decay_steps=10, anneal_steps=4)
    falling = [1 - math.sqrt(share) for share in (0.25, 0.5, 0.75, 1)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1, *falling])


@pytest.mark.parametrize("name", ["constant", "cosine", "wsd"])
def test_the_rate_is_a_function_of_consumed_steps_alone(name):
    from megatron_nb.training.optimizer import OptimizerConfig, schedule

    config = OptimizerConfig(lr=1.0, schedule=name, warmup_steps=3)
    expected = _rates(20, schedule=name, warmup_steps=3)
    for step in (0, 2, 3, 7, 19):
        optimizer = _Groups()
        schedule(config, optimizer, 20).step(step)
        assert optimizer.param_groups[0]["lr"] == expected[step]


REFUSED = [
    ({"backend": "fused"}, "must be torch, apex or te"),
    ({"schedule": "linear"}, "must be constant, cosine or wsd"),
    ({"min_lr": 1.0}, "must lie between 0 and optimizer.lr"),
    ({"warmup_steps": -1}, "must not be negative"),
    ({"overlap_param_gather": True}, "needs optimizer.overlap_grad_reduce"),
]


@pytest.mark.parametrize("settings, message", REFUSED)
def test_settings_that_cannot_be_are_refused(settings, message):
    from megatron_nb.training.optimizer import OptimizerConfig

    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings)


@pytest.mark.parametrize(
    "settings, message",
    [({"warmup_steps": 20}, "must be below the 20 steps"), ({"schedule": "wsd", "anneal_steps": 21}, "must lie in 1..20")],
)
def test_a_schedule_that_does_not_fit_the_job_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        _rates(20, **settings)


# ---------------------------------------------------------------------- backend
@pytest.mark.parametrize("backend", ["apex", "te"])
def test_a_missing_backend_is_an_error_with_a_remedy(backend):
    from megatron_nb.training.optimizer import adam_class

    with pytest.raises(ValueError, match=f"optimizer.backend={backend} but .* cannot be imported .*or optimizer.backend=torch"):
        adam_class(backend)


class FusedAdam:
    """Stands for apex's: what core passes, and nothing else."""

    def __init__(self, params, lr, weight_decay, betas, eps, capturable, adam_w_mode):
        pass


@pytest.mark.parametrize("missing", [None, "adam_w_mode"])
def test_a_backend_of_another_shape_is_refused(monkeypatch, missing):
    from megatron_nb.training.optimizer import adam_class

    package, module = types.ModuleType("apex"), types.ModuleType("apex.optimizers")
    module.FusedAdam = FusedAdam if missing is None else type("FusedAdam", (), {"__init__": lambda self, params, lr: None})
    monkeypatch.setitem(sys.modules, "apex", package)
    monkeypatch.setitem(sys.modules, "apex.optimizers", module)
    if missing is None:
        assert adam_class("apex") is FusedAdam
    else:
        with pytest.raises(ValueError, match="takes no .*adam_w_mode"):
            adam_class("apex")


def _backend_where_another_is_installed():
    import megatron.core.optimizer as core_optimizer
    from megatron.core.optimizer import distrib_optimizer

    from tests.training import tiny

    # what core's import leaves behind on a machine with Transformer Engine
    core_optimizer.Adam, core_optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.Adam, distrib_optimizer.HAVE_APEX_OR_TE, distrib_optimizer.USING_TE_OPTIMIZER = FusedAdam, True, True
    trainer = tiny.trainer({}, {})
    tiny.train(trainer, range(1))
    return type(trainer.optimizer.optimizer).__name__, distrib_optimizer.HAVE_APEX_OR_TE


def test_torch_is_used_when_named_even_where_another_is_installed(ranks):
    """Core would take the other one without a word."""
    assert ranks.run(1, _backend_where_another_is_installed) == [("AdamW", False)]


# ---------------------------------------------------------------------- one data-parallel rank
def _one_rank(distributed: bool, left_out: bool):
    """(losses and norms of three steps, weights, collectives that a whole step runs over gradients or parameters)."""
    import torch.distributed as dist
    from megatron.core.distributed import param_and_grad_buffer

    from megatron_nb.training import optimizer
    from tests.training import tiny

    leave_out, calls = optimizer._leave_out_transfers_within_one_rank, []
    names = [(dist, "all_reduce"), (param_and_grad_buffer, "dist_reduce_scatter_func"),
             (param_and_grad_buffer, "dist_all_gather_func")]  # fmt: skip
    originals = [getattr(module, name) for module, name in names]
    try:
        if not left_out:
            optimizer._leave_out_transfers_within_one_rank = lambda wrapped: None
        trainer = tiny.trainer({}, {"distributed_optimizer": distributed})
        large = sum(p.numel() for p in trainer.chunks[0].parameters()) // 2
        for (module, name), original in zip(names, originals):
            counting = lambda x, *a, original=original, **k: (calls.append(x.numel() > large), original(x, *a, **k))[1]  # noqa: E731
            setattr(module, name, counting)
        return tiny.train(trainer, range(3)), tiny.weights(trainer), sum(calls)
    finally:
        optimizer._leave_out_transfers_within_one_rank = leave_out
        for (module, name), original in zip(names, originals):
            setattr(module, name, original)


@pytest.mark.parametrize("distributed", [True, False])
def test_one_data_rank_moves_neither_gradients_nor_parameters_and_computes_the_same(ranks, distributed):
    without, weights, calls = ranks.run(1, _one_rank, distributed, True)[0]
    core, expected, core_calls = ranks.run(1, _one_rank, distributed, False)[0]
    assert without == core and all(weights[name].equal(expected[name]) for name in expected)
    assert calls == 0 < core_calls


# ---------------------------------------------------------------------- weight decay
def _decayed(parallel: dict):
    """Names of the parameters that a step without gradients shrinks."""
    from tests.training import tiny

    trainer = tiny.trainer({"qkv_bias": True, "qk_norm": True}, parallel, {"weight_decay": 0.5, "lr": 0.1, "warmup_steps": 0})
    for chunk in trainer.chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(1.0)
    trainer.optimizer.reload_model_params()
    before = tiny.weights(trainer)
    trainer.chunks[0].zero_grad_buffer()
    trainer.optimizer.step()
    after = tiny.weights(trainer)
    return {name for name in before if not after[name].equal(before[name])}, set(before)


@pytest.mark.parametrize("layout", ["dp2", "dp2-replicated"])
def test_weight_decay_spares_norms_and_biases(ranks, layout):
    world, parallel = LAYOUTS[layout]
    decayed, names = ranks.run(world, _decayed, parallel)[0]
    assert decayed == {name for name in names if not name.endswith((".bias", "norm.weight"))}
    assert any(name.endswith("linear_qkv.bias") for name in names) and any("q_layernorm" in name for name in names)


# ---------------------------------------------------------------------- guard
def _poisoned_update(parallel: dict, poison: float):
    import torch.distributed as dist

    from megatron_nb.losses.next_token import NextToken
    from megatron_nb.training.optimizer import update
    from tests.training import tiny

    trainer = tiny.trainer({}, parallel)
    tiny.train(trainer, range(1))
    before = tiny.weights(trainer), tiny.moments(trainer)
    trainer.gradients(tiny.packs(1), NextToken())
    if dist.get_rank() == dist.get_world_size() - 1:  # on one rank only, in a part that its own optimizer holds
        (inner,) = trainer.optimizer.chained_optimizers
        parameter = next(iter(getattr(inner, "model_param_group_index_map", trainer.chunks[0].parameters())))
        first = inner._get_model_param_range_map(parameter)["param"].start if parallel.get("distributed_optimizer", True) else 0
        parameter.main_grad.view(-1)[first] = poison
    consumed = trainer.scheduler.num_steps
    result = update(trainer.optimizer, trainer.scheduler, trainer.chunks)
    after = tiny.weights(trainer), tiny.moments(trainer)
    unchanged = all(new[name].equal(old[name]) for new, old in zip(after, before) for name in old)
    return result.applied, math.isfinite(result.grad_norm), unchanged, trainer.scheduler.num_steps - consumed


@pytest.mark.parametrize("poison", [math.nan, -math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "cp2", "tp2-replicated"])
def test_a_gradient_that_is_not_finite_on_one_rank_stops_the_update_on_all(ranks, layout, poison):
    world, parallel = LAYOUTS[layout]
    results = ranks.run(world, _poisoned_update, parallel, poison)
    assert results == [(False, False, True, 1)] * world


# ---------------------------------------------------------------------- norms and the update itself
def _layer_norms(model: dict, parallel: dict):
    from megatron_nb.losses.next_token import NextToken
    from megatron_nb.training.optimizer import update
    from tests.training import tiny

    trainer = tiny.trainer(model, parallel)
    trainer.gradients(tiny.packs(0), NextToken())
    result = update(trainer.optimizer, trainer.scheduler, trainer.chunks, layer_norms=True)
    return result.layer_norms, result.grad_norm


@pytest.mark.parametrize("model", [{}, {"tied_embeddings": True, "qk_norm": True}], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_norms_are_those_of_the_whole_model(ranks, layout, model):
    single, total = ranks.run(1, _layer_norms, model, {})[0]
    assert {"embedding.word_embeddings.weight", "decoder.layers.0", "decoder.layers.3"} < set(single)
    assert math.sqrt(sum(norm**2 for norm in single.values())) == pytest.approx(total, rel=1e-6)
    world, parallel = LAYOUTS[layout]
    for norms, total_here in ranks.run(world, _layer_norms, model, parallel):
        assert norms == pytest.approx(single, rel=1e-5) and total_here == pytest.approx(total, rel=1e-5)


def _guarded_step(clip: float):
    from megatron_nb.losses.next_token import NextToken
    from megatron_nb.training.optimizer import update
    from tests.training import tiny

    trainer = tiny.trainer({}, {}, {"clip_grad": clip})
    for step in range(2):
        trainer.gradients(tiny.packs(step), NextToken())
        update(trainer.optimizer, trainer.scheduler, trainer.chunks)
    return tiny.weights(trainer)


def _core_step(clip: float):
    from megatron_nb.losses.next_token import NextToken
    from tests.training import tiny

    trainer = tiny.trainer({}, {}, {"clip_grad": clip})
    for step in range(2):
        trainer.gradients(tiny.packs(step), NextToken())
        trainer.optimizer.step()
        trainer.scheduler.step(1)
    return tiny.weights(trainer)


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_the_guarded_update_is_core_s_own_step(ranks, clip):
    ours, core = ranks.run(2, _guarded_step, clip)[0], ranks.run(2, _core_step, clip)[0]
    assert all(ours[name].equal(core[name]) for name in core)
