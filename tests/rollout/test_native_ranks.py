"""The native engine over several ranks: weights from any layout, tensor-parallel replicas, errors that reach every rank."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_nb.model.hf_names import tensors_of
from megatron_nb.model.sharding import cut_dimension, unshard
from megatron_nb.rollout.engine import Request, Sampling
from tests.model.hf_folders import save_random, tensors_in
from tests.rollout.native_setup import another, engine_of, prompts_of, sample

LAYOUTS = {
    "tp2": (2, dict(tensor=2)),
    "pp2": (2, dict(pipeline=2)),
    "vpp2": (2, dict(pipeline=2, virtual_pipeline=2)),
    "cp2": (2, dict(context=2)),
    "dp2": (2, {}),
    "tp2pp2": (4, dict(tensor=2, pipeline=2)),
}
CASES = [(name, tensor) for name in LAYOUTS for tensor in (1, 2)]
# the table has Transformer Engine's names, which fuses norms into the layers after them
FUSED = {"self_attention.linear_qkv.layer_norm": "input_layernorm.", "mlp.linear_fc1.layer_norm": "pre_mlp_layernorm."}
FUSED = {f"{fused}_weight": f"{alone}weight" for fused, alone in FUSED.items()}
PROMPTS = prompts_of([1, 20, 16, 7])


def _held(engine) -> dict[str, torch.Tensor]:
    """What a replica of the engine holds, under Hugging Face names, on every rank."""
    module, config = engine.core.controller.inference_wrapped_model.model, engine.model
    group = module.pg_collection.tp
    whole, found = {}, {}
    for name, parameter in module.named_parameters():
        pieces = [torch.empty_like(parameter) for _ in range(group.size())]
        dist.all_gather(pieces, parameter.detach().clone(), group=group)
        whole[name] = unshard(name, pieces, cut_dimension(parameter))
    for entry, layer in tensors_of(config):
        ours = entry.ours.replace("*", str(layer))
        for fused, alone in FUSED.items():
            ours = ours.replace(fused, alone)
        found |= entry.split(whole[ours], config, layer)
    return found


def _moved(folder: Path, layout: dict, tensor: int):
    engine, source = engine_of(folder, layout, tensor=tensor, max_concurrency=8)
    expected = tensors_in(folder)
    for version in range(2):
        if version:  # the plan is kept, the values are new
            for module in source.modules:
                for parameter in module.parameters():
                    parameter.data.mul_(0.5)
            expected = dict(source.hf_tensors())
            plan = engine._take.plan
            engine.load_weights(source, version)
            assert engine._take.plan is plan
        held = _held(engine)
        assert held.keys() >= expected.keys()
        for name, value in expected.items():
            assert torch.equal(held[name], value), (name, version)
    engine.load_weights(source, 2)
    greedy = sample(engine, PROMPTS, Sampling(12, temperature=0))
    drawn = sample(engine, PROMPTS, Sampling(12, temperature=0.8))
    assert (greedy is None) == (not engine.leads)
    assert engine.replicas == dist.get_world_size() // tensor
    engine.close()
    return engine.replica, greedy, drawn


@pytest.mark.parametrize(("name", "tensor"), CASES, ids=[f"{name}-to-tp{tensor}" for name, tensor in CASES])
def test_weights_of_every_layout_arrive_exactly_and_sample_alike(ranks, tmp_path, name, tensor):
    family = "qwen3" if name in ("pp2", "tp2pp2") else "llama"  # norms of q and k, which tensor ranks share
    folder = save_random(tmp_path, family, layers=4, tied=name in ("pp2", "vpp2"))
    world, layout = LAYOUTS[name]
    found = ranks.run(world, _moved, folder, layout, tensor)
    (_, alone_greedy, alone_drawn), *_ = ranks.run(1, _alone, folder)
    for rank, (replica, greedy, drawn) in enumerate(found):
        assert replica == rank // tensor
        if rank % tensor == 0:
            assert [c.ids for c in greedy] == [c.ids for c in alone_greedy]
            assert [c.ids for c in drawn] == [c.ids for c in alone_drawn]
            difference = np.array([c.logprobs for c in drawn]) - np.array([c.logprobs for c in alone_drawn])
            assert np.abs(difference).max() < 1e-4


def _alone(folder: Path):
    engine, source = engine_of(folder)
    for module in source.modules:
        for parameter in module.parameters():
            parameter.data.mul_(0.5)
    engine.load_weights(source, 2)
    return 0, sample(engine, PROMPTS, Sampling(12, temperature=0)), sample(engine, PROMPTS, Sampling(12, temperature=0.8))


def _errors(folder: Path):
    """Layout of 2 replicas of 2 ranks, trained at tensor 2."""
    engine, source = engine_of(folder, dict(tensor=2), tensor=2, max_concurrency=4)
    found = []

    def attempt(main):
        try:
            found.append(engine.run(main))
        except Exception as error:
            found.append((type(error).__name__, str(error)))

    async def fails():
        await engine.generate(Request("x", [1, 2], Sampling(2), 0))
        if engine.replica == 1:
            raise KeyError("lost")
        return "fine"

    async def unpicklable():
        class Odd(Exception):
            pass

        raise Odd(f"replica {engine.replica}")

    async def idle():
        await asyncio.sleep(0.3 * (1 + engine.replica))  # the replicas end at different times
        return engine.replica

    async def wrong():
        await engine.generate(Request("x", [1], Sampling(1000), 0))

    for main in (fails, unpicklable, wrong, idle):
        attempt(main)
    found.append(another(source, max_concurrency=4).replicas)
    try:
        another(source, tensor=4, max_concurrency=4)
    except ValueError as error:
        found.append(str(error))
    return found


def test_an_exception_on_one_leader_is_raised_on_every_rank_and_the_engine_goes_on(ranks, tmp_path):
    found = ranks.run(4, _errors, save_random(tmp_path, "llama"))
    for rank, (fails, unpicklable, wrong, idle, replicas, refused) in enumerate(found):
        assert fails == ("KeyError", "'lost'")
        assert "replica 0" in unpicklable[1] or rank == 2
        assert wrong[0] == "ValueError"
        assert "max_tokens 1000" in wrong[1]
        assert idle == (rank // 2 if rank % 2 == 0 else None)
        assert replicas == 4
        assert "engine: tensor=4 must divide model.num_query_groups=2" in refused
