"""Adam through megatron-core: data-parallel wrapper, distributed optimizer, learning-rate schedule, guarded update.

Core takes Transformer Engine's Adam where it is installed, else apex's, else torch's, without a word. Here the
configuration names one, and core is pinned to it.
"""
from __future__ import annotations

import importlib
import inspect
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_nb.model.sharding import named_parameters
from megatron_nb.parallel.topology import everywhere  # installs the CPU layer before core is used
from megatron_nb.training.traps import refuse_traps

# isort: split
import megatron.core.optimizer as core_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

# core asks callers to lay buffers out themselves and then does exactly that
logging.getLogger("megatron.core.distributed.distributed_data_parallel").setLevel(logging.ERROR)

FUSED_ADAM = {  # module that brings FusedAdam, what to do where it is missing
    "apex": ("apex.optimizers", "build apex from source (the package `apex` of the index is another project)"),
    "te": ("transformer_engine.pytorch.optimizers", "pip install megatron_nb[gpu]"),
}
FUSED_ADAM_ARGUMENTS = ("lr", "weight_decay", "betas", "eps", "capturable", "adam_w_mode")  # what core 0.19.2 passes


@dataclass
class OptimizerConfig:
    """AdamW and its schedule. A step count is a number of updates, so that a resumed run continues exactly."""

    backend: str = "torch"  # torch | apex | te
    lr: float = 1e-5
    min_lr: float = 0.0
    schedule: str = "cosine"  # constant | cosine | wsd (flat, then 1 - sqrt; arXiv 2405.18392)
    warmup_steps: int = 0
    decay_steps: int | None = None  # cosine and wsd end here at min_lr; None: the job's num_steps
    anneal_steps: int | None = None  # wsd: length of the final descent; None: a tenth of decay_steps
    weight_decay: float = 0.1  # of matrices; norms and biases never decay
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0  # 0: no clipping
    overlap_grad_reduce: bool = False  # reduce gradients while the backward pass still runs
    overlap_param_gather: bool = False  # gather updated parameters while the next forward pass runs

    def __post_init__(self):
        if self.backend not in ("torch", *FUSED_ADAM):
            raise ValueError(f"optimizer.backend={self.backend!r} must be torch, apex or te")
        if self.schedule not in ("constant", "cosine", "wsd"):
            raise ValueError(f"optimizer.schedule={self.schedule!r} must be constant, cosine or wsd")
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"optimizer.min_lr={self.min_lr} must lie between 0 and optimizer.lr={self.lr}")
        for name in ("warmup_steps", "weight_decay", "clip_grad"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must not be negative")
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("optimizer.overlap_param_gather=true needs optimizer.overlap_grad_reduce=true")


def adam_class(backend: str) -> type[torch.optim.Optimizer]:
    """The Adam that `backend` names; ValueError with the remedy where it is missing or of another shape."""
    if backend == "torch":
        return torch.optim.AdamW
    module, remedy = FUSED_ADAM[backend]
    try:
        adam = importlib.import_module(module).FusedAdam
    except (ImportError, AttributeError) as error:
        raise ValueError(f"optimizer.backend={backend} but {module}.FusedAdam cannot be imported ({error}): {remedy}, "
                         "or optimizer.backend=torch") from error
    missing = [name for name in FUSED_ADAM_ARGUMENTS if name not in inspect.signature(adam).parameters]
    if missing:
        raise ValueError(f"{module}.FusedAdam takes no {', '.join(missing)}, which megatron-core passes: "
                         f"install the release that setup.py pins, or optimizer.backend=torch")
    return adam


def pin_backend(backend: str) -> type[torch.optim.Optimizer]:
    """Make core build exactly this Adam, whatever else is installed; returns its class."""
    adam = adam_class(backend)
    for module, choices in (
        (core_optimizer, {"Adam": adam, "USING_PYTORCH_OPTIMIZER": backend == "torch"}),
        (distrib_optimizer, {"Adam": adam, "HAVE_APEX_OR_TE": backend != "torch",
                             "USING_TE_OPTIMIZER": backend == "te", "USING_APEX_OPTIMIZER": backend == "apex"}),
    ):
        for name, value in choices.items():
            assert hasattr(module, name), f"{module.__name__}.{name} is gone: optimizer.py pins the backend through it"
            setattr(module, name, value)
    return adam


def schedule_lengths(config: OptimizerConfig, num_steps: int) -> tuple[int, int]:
    """(steps to the end of the decay, steps of the final descent); ValueError when they do not fit together."""
    decay = num_steps if config.decay_steps is None else config.decay_steps
    anneal = max(1, decay // 10) if config.anneal_steps is None else config.anneal_steps
    if config.schedule == "constant":
        decay = max(decay, config.warmup_steps + 1)  # core asks for it, the constant schedule does not use it
    elif config.warmup_steps >= decay:
        raise ValueError(f"optimizer.warmup_steps={config.warmup_steps} must be below the {decay} steps of the whole schedule "
                         "(optimizer.decay_steps, or num_steps)")
    if config.schedule == "wsd" and not 0 < anneal <= decay - config.warmup_steps:
        raise ValueError(f"optimizer.anneal_steps={anneal} must lie in 1..{decay - config.warmup_steps}: "
                         f"it follows {config.warmup_steps} warm-up steps and ends at step {decay}")
    return decay, anneal


def schedule(config: OptimizerConfig, optimizer: MegatronOptimizer, num_steps: int) -> OptimizerParamScheduler:
    """Core's scheduler: update k (from 0) runs at rate(k). Call `.step(1)` after each update.

    Warm-up reaches lr at update `warmup_steps` and never runs an update at rate 0: rate(k) = lr * (k+1) / (warmup_steps+1).
    """
    decay, anneal = schedule_lengths(config, num_steps)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr / (config.warmup_steps + 1),
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=decay,
        lr_decay_style={"wsd": "WSD"}.get(config.schedule, config.schedule),
        wsd_decay_steps=anneal,
        lr_wsd_decay_style="minus_sqrt",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # the configuration decides; checkpoint.py says what differs
    )


def inner_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers core chains; one for a dense model, none for a rank without trained parameters."""
    return [inner for inner in getattr(optimizer, "chained_optimizers", [optimizer]) if not inner.is_stub_optimizer]


def _ready_torch_adam(optimizer: MegatronOptimizer) -> None:
    """Fused torch Adam (6.5 times faster than its loop on a CPU) with its state made now.

    Torch makes the state at the first update; saving before it, and loading into a fresh optimizer, both need it.
    """
    for inner in inner_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            group["fused"] = True
            for parameter in group["params"]:
                inner.optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _leave_out_transfers_within_one_rank(wrapped: list[DistributedDataParallel]) -> None:
    """A single data-parallel rank has the summed gradients and all parameters; gloo would copy them all the same."""
    for model in wrapped:
        if model.dp_cp_group.size() > 1 or model.ddp_config.overlap_grad_reduce:
            continue
        for group in model.bucket_groups:
            assert all(b.gradient_scaling_factor == 1.0 and not b.params_with_extra_main_grads for b in group.buckets)
            group.start_grad_sync = lambda force_all_reduce=False: None
            group.start_param_sync = lambda force_sync=False: None


def optimize(
    models: list[GPTModel], config: OptimizerConfig, num_steps: int, distributed_optimizer: bool = True
) -> tuple[list[DistributedDataParallel], MegatronOptimizer, OptimizerParamScheduler]:
    """Data-parallel wrappers, optimizer and schedule for this rank's model chunks.

    Weights given to `models` before this call count; when they change afterwards other than by `update`
    (load_weights, load_hf), call `optimizer.reload_model_params()`: bf16 training keeps fp32 copies.
    """
    adam = pin_backend(config.backend)
    core = models[0].config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed_optimizer,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
    )
    optimizer_config = core_optimizer.OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=core.bf16,
        params_dtype=core.params_dtype,
        use_distributed_optimizer=distributed_optimizer,
        overlap_param_gather=config.overlap_param_gather,
    )
    refuse_traps(core, optimizer_config, ddp_config)
    wrapped = [
        DistributedDataParallel(core, ddp_config, model, disable_bucketing=chunk > 0) for chunk, model in enumerate(models)
    ]
    _leave_out_transfers_within_one_rank(wrapped)
    optimizer = get_megatron_optimizer(optimizer_config, wrapped, use_gloo_process_groups=False)
    for inner in inner_optimizers(optimizer):
        assert type(inner.optimizer) is adam, f"{type(inner.optimizer)} was built, optimizer.backend={config.backend} is {adam}"
    if config.backend == "torch":
        _ready_torch_adam(optimizer)

    core.finalize_model_grads_func = finalize_model_grads
    if config.overlap_grad_reduce:  # only the last micro-batch may start the reduction
        core.no_sync_func = [model.no_sync for model in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped, optimizer, schedule(config, optimizer, num_steps)


@dataclass(frozen=True)
class Update:
    """What one update did. Not applied: a gradient held NaN or inf on some rank, and every rank left its weights alone."""

    applied: bool
    grad_norm: float  # before clipping, of the whole model
    layer_norms: dict[str, float] = field(default_factory=dict)


@torch.no_grad()
def update(
    optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler, models: list, layer_norms: bool = False
) -> Update:
    """Clip and apply the finalised gradients, unless one of them is not finite at any rank of any kind.

    The schedule moves on in both cases: it counts consumed steps.
    """
    optimizer.prepare_grads()
    by_layer = gradient_norms(optimizer, models) if layer_norms else {}
    # the norm is a sum over all ranks, so one NaN anywhere is seen everywhere and all ranks decide alike
    norm = float(optimizer.get_grad_norm())
    applied = math.isfinite(norm)
    if applied:
        for inner in inner_optimizers(optimizer):
            if inner.config.clip_grad > 0 and inner.get_parameters():
                clip_grad_by_total_norm_fp32(inner.get_parameters(), inner.config.clip_grad, norm)
        optimizer.step_with_ready_grads()
    scheduler.step(1)
    return Update(applied, norm, by_layer)


def _layer_of(name: str) -> str:
    """`decoder.layers.3.mlp.linear_fc1.weight` -> `decoder.layers.3`; other parameters stand for themselves."""
    parts = name.split(".")
    return ".".join(parts[:3]) if parts[:2] == ["decoder", "layers"] else name


def _held_gradients(inner: MegatronOptimizer, models: list) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, gradient) of what this rank's optimizer updates, each element of the whole model on exactly one rank.

    The distributed optimizer holds a slice of each parameter; only that slice of the gradient buffer is reduced.
    """
    for name, parameter in named_parameters(models):
        held = parameter
        if isinstance(inner, distrib_optimizer.DistributedOptimizer):
            if parameter not in inner.model_param_group_index_map:
                continue
            group, order = inner.model_param_group_index_map[parameter]
            held = inner.optimizer.param_groups[group]["params"][order]
        elif hasattr(parameter, "main_param"):
            held = parameter.main_param
        once = param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, tp_group=inner.tp_group)
        if once and held.grad is not None:
            yield name, held.grad


@torch.no_grad()
def gradient_norms(optimizer: MegatronOptimizer, models: list) -> dict[str, float]:
    """L2 norm of the gradient by layer, over the whole model on every rank; after `prepare_grads`, before clipping."""
    squares: dict[str, float] = {_layer_of(name): 0.0 for name, _ in named_parameters(models)}
    for inner in inner_optimizers(optimizer):
        for name, gradient in _held_gradients(inner, models):
            squares[_layer_of(name)] += float(gradient.double().square().sum())
    every = everywhere(squares)
    # without the distributed optimizer every data-parallel rank holds the same gradients: count one model copy
    copies = dist.get_world_size() // optimizer.get_grad_stats_parallel_group().size()
    totals: dict[str, float] = {}
    for rank_squares in every:
        for name, value in rank_squares.items():
            totals[name] = totals.get(name, 0.0) + value / copies
    return {name: math.sqrt(value) for name, value in totals.items()}


@torch.no_grad()
def sync_parameters(models: list[DistributedDataParallel]) -> None:
    """Make every rank's parameters those of the last update. Call before evaluation, export, refit or a save.

    With overlap_param_gather core leaves them stale until the next forward pass.
    """
    for model in models:
        if model.ddp_config.overlap_param_gather:
            model.start_param_sync(force_sync=True)


def describe(config: OptimizerConfig) -> str:
    """What the dry run shows: the class that will really be used."""
    adam = adam_class(config.backend)
    fused = " (fused)" if config.backend == "torch" else ""
    return f"{adam.__module__}.{adam.__qualname__}{fused}"
