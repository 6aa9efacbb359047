"""The native engine's model in its own process groups, and the way of the training weights into it.

Which part of which tensor goes from which rank to which is megatron-core's plan (megatron.core.resharding); it is made once
and kept. Here are the process groups, the module that is filled, and the copies over gloo.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_nb.model.gpt import _block_spec, core_config  # which installs the CPU layer before core is used
from megatron_nb.model.shape import ModelConfig
from megatron_nb.model.sharding import bare, named_parameters
from megatron_nb.parallel.topology import ON_CPU, ParallelConfig

# isort: split
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.resharding import ReshardPlan, build_local_reshard_plan, execute_reshard_plan
from megatron.core.resharding.copy_services.base import CopyService
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService

from megatron_nb.rollout.native_attention import RolloutAttention, RolloutRotary


def rollout_groups(world: int, tensor: int) -> ProcessGroupCollection:
    """Groups of a layout of neighbouring tensor ranks and replicas; the trainer's stay as they are. Collective."""
    mine, rank = ProcessGroupCollection(), dist.get_rank()
    replicas = [list(range(first, first + tensor)) for first in range(0, world, tensor)]
    layouts = {"tp": replicas, "dp": [list(r) for r in zip(*replicas)], "pp": [[r] for r in range(world)]}
    for name, lists in layouts.items():
        made = [dist.new_group(ranks) for ranks in lists]  # every rank makes every group, in one order
        setattr(mine, name, next(group for group, ranks in zip(made, lists) if rank in ranks))
    for name in ("cp", "ep", "embd", "pos_embd", "expt_dp"):
        setattr(mine, name, mine.pp)
    for name in ("mp", "tp_cp", "tp_ep", "tp_ep_pp", "expt_tp"):
        setattr(mine, name, mine.tp)
    mine.dp_cp = mine.dp
    return mine


def build_rollout(model: ModelConfig, tensor: int, padded_vocab: int, groups: ProcessGroupCollection, graphs: bool) -> GPTModel:
    """A model for sampling, weights not yet filled. Its vocabulary is padded as the trainer's is, so rows match rows."""
    config = core_config(model, ParallelConfig(tensor=tensor, sequence_parallel=False))
    if graphs:
        config.cuda_graph_impl = "local"
    spec = _block_spec(config, model, None)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.module = RolloutAttention
    module = GPTModel(
        config, spec, padded_vocab, model.max_position_embeddings,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope", rotary_base=model.rope_theta, pg_collection=groups,
    )  # fmt: skip
    assert len(module.decoder.layers) == model.num_layers, "the rollout model must hold every layer on every rank"
    module.rotary_pos_emb.__class__ = RolloutRotary
    module.rotary_pos_emb.inv_freq = config.inverse_frequencies.clone()
    if not ON_CPU:
        module.cuda(torch.cuda.current_device())
        module.rotary_pos_emb.inv_freq = module.rotary_pos_emb.inv_freq.cuda()
    return module.requires_grad_(False).eval()


class _Source:
    """The training chunks of this rank as one module under global names, as core's planner reads it."""

    def __init__(self, modules: list[torch.nn.Module]):
        self.modules = modules
        self.pg_collection = bare(modules[0]).pg_collection

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return named_parameters(self.modules)

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return iter(())  # names are global already, and the models have no persistent buffers


class CpuCopies:
    """Core's plan carried out between CPU tensors over gloo without core's staging: what lies together travels in place.

    A part whose rows are not neighbours in our module (a cut along columns) arrives in a buffer that is kept.
    """

    def __init__(self, plan: ReshardPlan, group: dist.ProcessGroup):
        self.plan, self.group, self.buffers = plan, group, {}

    def __call__(self, source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
        rank, sending, receiving, local = self.group.rank(), [], [], {}
        for op in self.plan.recv_ops:  # both sides list their messages in the order of the whole plan
            place = target[op.param_name].detach()[op.my_slice]
            if op.peer_rank == rank:
                local[op.task_id] = place
                continue
            landing = place
            if not place.is_contiguous():
                if op.task_id not in self.buffers:
                    self.buffers[op.task_id] = torch.empty(place.shape, dtype=place.dtype)
                landing = self.buffers[op.task_id]
            receiving.append((dist.irecv(_bytes(landing), group=self.group, group_src=op.peer_rank), landing, place))
        own = []
        for op in self.plan.send_ops:
            part = source[op.param_name].detach()[op.my_slice]
            if op.peer_rank == rank:
                own.append((local.pop(op.task_id), part))
            else:
                sending.append(dist.isend(_bytes(part.contiguous()), group=self.group, group_dst=op.peer_rank))
        assert not local, "core's plan copies a part within a rank that nobody sends"
        for place, part in own:  # while the others travel
            place.copy_(part)
        for work, landing, place in receiving:
            work.wait()
            if landing is not place:
                place.copy_(landing)
        for work in sending:
            work.wait()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Every back end moves bytes, not every one bf16."""
    return tensor.view(-1).view(torch.uint8)


def _in_order(copies: CopyService) -> CopyService:
    """Core's side stream copies what stays within a rank: not before the current stream has written it."""
    run = copies.run

    def run_in_order() -> None:
        copies._copy_stream.wait_stream(torch.cuda.current_stream())
        run()

    copies.run = run_in_order
    return copies


class WeightSync:
    """Fills the rollout module from training modules of any tensor, pipeline, context and data layout."""

    def __init__(self, module: GPTModel, group: dist.ProcessGroup):
        """group: the whole world over gloo."""
        self.module, self.group, self.source = module, group, None

    @torch.no_grad()
    def __call__(self, modules: list[torch.nn.Module]) -> None:
        """Collective. ValueError when the training model has another dtype."""
        if self.source is None or [*map(id, self.source.modules)] != [*map(id, modules)]:
            self._plan(_Source(modules))
        if ON_CPU:
            self.copies(dict(self.source.named_parameters()), dict(self.module.named_parameters()))
        else:
            execute_reshard_plan(self.plan, self.source, self.module, self.copies)

    def _plan(self, source: _Source) -> None:
        (theirs,) = {p.dtype for _, p in source.named_parameters()}
        (ours,) = {p.dtype for p in self.module.parameters()}
        if theirs != ours:
            raise ValueError(f"the training weights are {theirs}, the engine's are {ours}: build both from one model.dtype")
        self.source, self.plan = source, build_local_reshard_plan(source, self.module)
        if ON_CPU:
            self.copies = CpuCopies(self.plan, self.group)
        else:
            self.copies = _in_order(NCCLCopyService() if dist.get_backend() == "nccl" else GlooCopyService(self.group))
