"""Hugging Face weights in live modules that are cut over ranks, and back; checkpoints between topologies."""
import hashlib
import queue
import shutil
from dataclasses import replace

import pytest
import torch

from megatron_nb.model.global_tensors import COMPLETE, CONFIG
from megatron_nb.model.gpt import build, initialize_weights
from megatron_nb.model.hf import CheckpointWeights, LiveWeights, load_hf, load_weights, local_boxes
from megatron_nb.model.hf_config import config_from_hf
from megatron_nb.parallel import topology
from megatron_nb.parallel.topology import ParallelConfig
from tests.model.hf_folders import assert_same_weights, save_random, tensors_in
from tools import convert_hf

LAYOUTS = [dict(tensor=2), dict(pipeline=2), dict(tensor=2, pipeline=2), dict(pipeline=2, virtual_pipeline=2), dict(tensor=4)]
LAYOUTS += [dict(context=2), dict(tensor=2, context=2)]


def world_of(layout):
    return layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("context", 1)


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def live(folder, layout):
    """Modules at a layout with weights that are certainly not the folder's."""
    parallel, config = ParallelConfig(**layout), config_from_hf(folder)
    topology.initialize(parallel, seed=1)
    modules = build(config, parallel)
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.fill_(7.0)
    return modules, config


def load_and_read_back(folder, layout, every_rank):
    modules, config = live(folder, layout)
    load_hf(folder, modules, config)
    source = LiveWeights(modules, config)
    found = {name: digest(tensor) for name, tensor in source.hf_tensors(every_rank)}
    again = {name: digest(tensor) for name, tensor in source.hf_tensors(every_rank)}
    assert found == again
    boxes = local_boxes(modules, config)
    padding = [box.tensor[max(0, config.vocab_size - box.row) :] for box in boxes if box.entry.padded]
    assert all(not part.any() for part in padding)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_live_weights_at_every_layout_equal_the_folder_bit_for_bit(ranks, tmp_path, layout, tied):
    family = "qwen3" if tied else "qwen2"
    folder = save_random(tmp_path / "hf", family, heads=8, groups=4, tied=tied, layers=4, dtype=torch.bfloat16, shard="40KB")
    expected = {name: digest(tensor) for name, tensor in tensors_in(folder).items()}
    for found in ranks.run(world_of(layout), load_and_read_back, folder, layout, True):
        assert found == expected


def test_the_first_rank_alone_can_receive(ranks, tmp_path):
    folder = save_random(tmp_path / "hf", layers=4)
    first, *others = ranks.run(4, load_and_read_back, folder, dict(tensor=2, pipeline=2), False)
    assert first == {name: digest(tensor) for name, tensor in tensors_in(folder).items()}
    assert others == [{}, {}, {}]


def save_live(folder, layout, out):
    """What a training job does: core itself writes what live ranks hold."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()  # core's own spawns a process, which the pool's ranks may not
    modules, config = live(folder, layout)
    load_hf(folder, modules, config)
    if torch.distributed.get_rank() == 0:
        out.mkdir()
    torch.distributed.barrier()
    state = {f"model{i}" if len(modules) > 1 else "model": module.sharded_state_dict() for i, module in enumerate(modules)}
    dist_checkpointing.save({**state, "step": 7}, str(out))


def load_live(checkpoint, folder, layout, streaming):
    """Load a checkpoint as a job does (or box by box) and tell every tensor."""
    from megatron.core import dist_checkpointing

    modules, config = live(folder, layout)
    if streaming:
        load_weights(CheckpointWeights(checkpoint), modules, config)
    else:
        names = [f"model{i}" if len(modules) > 1 else "model" for i in range(len(modules))]
        state = {name: module.sharded_state_dict() for name, module in zip(names, modules)}
        loaded = dist_checkpointing.load(state, str(checkpoint))
        for name, module in zip(names, modules):
            module.load_state_dict(loaded[name], strict=False)
    boxes = local_boxes(modules, config)
    assert all(not box.tensor[max(0, config.vocab_size - box.row) :].any() for box in boxes if box.entry.padded)
    return {name: digest(tensor) for name, tensor in LiveWeights(modules, config).hf_tensors()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("saved, loaded", [(1, 4), (4, 1), (2, 2)])
def test_an_import_padded_for_one_tensor_size_loads_at_another(ranks, tmp_path, tied, saved, loaded):
    # 301 rows are padded to 384 at tensor 1, to 512 at 2 and at 4
    folder = save_random(tmp_path / "hf", heads=8, groups=4, tied=tied, layers=4)
    convert_hf.import_hf(folder, tmp_path / "checkpoint", tensor=saved)
    expected = {name: digest(tensor) for name, tensor in tensors_in(folder).items()}
    for layout in (dict(tensor=loaded), dict(pipeline=2, virtual_pipeline=2)):
        for streaming in (False, True):
            found = ranks.run(world_of(layout), load_live, tmp_path / "checkpoint", folder, layout, streaming)
            assert all(one == expected for one in found)


@pytest.mark.parametrize("layout", [dict(tensor=2, pipeline=2), dict(tensor=4), dict(pipeline=2, virtual_pipeline=2)], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_live_ranks_saved_exports_bit_for_bit(ranks, tmp_path, layout, tied):
    folder = save_random(tmp_path / "hf", "qwen2", heads=8, groups=4, tied=tied, layers=4, dtype=torch.bfloat16)
    checkpoint = tmp_path / "checkpoint"
    ranks.run(world_of(layout), save_live, folder, layout, checkpoint)
    convert_hf.import_hf(folder, tmp_path / "imported")  # for its config.yaml
    shutil.copy(tmp_path / "imported" / CONFIG, checkpoint / CONFIG)
    (checkpoint / COMPLETE).touch()
    convert_hf.export_hf(checkpoint, tmp_path / "out")
    assert_same_weights(folder, tmp_path / "out")


def load_into_another_shape(folder):
    modules, config = live(folder, {})
    load_hf(folder, modules, replace(config, rope_theta=7e7, max_position_embeddings=4096))  # what training may change
    with pytest.raises(ValueError, match="norm_epsilon is 1e-05 there, 1e-06 here"):
        load_hf(folder, modules, replace(config, norm_epsilon=1e-6))
    with pytest.raises(ValueError, match="in the live model"):
        load_weights(None, modules, replace(config, ffn_hidden_size=64))


def test_a_folder_or_a_configuration_of_another_model_is_refused(ranks, tmp_path):
    ranks.run(1, load_into_another_shape, save_random(tmp_path / "hf"))


def drawn(folder, layout):
    parallel, config = ParallelConfig(**layout), config_from_hf(folder)
    topology.initialize(parallel, seed=1)
    modules = build(config, parallel)
    initialize_weights(modules, config, seed=3)
    return {name: digest(tensor) for name, tensor in LiveWeights(modules, config).hf_tensors()}


def test_fresh_weights_do_not_depend_on_the_layout(ranks, tmp_path):
    folder = save_random(tmp_path / "hf", layers=4)
    (alone,) = ranks.run(1, drawn, folder, {})
    assert all(one == alone for one in ranks.run(4, drawn, folder, dict(tensor=2, pipeline=2)))


def logits_at(folder, tensor, ids, first):
    """[T, V] on every rank."""
    from megatron_nb.model.attention import bounds
    from megatron_nb.records import Batch

    (model,), config = live(folder, dict(tensor=tensor))
    load_hf(folder, [model], config)
    start, length = torch.zeros_like(ids), len(ids)
    pack = Batch(ids, ids, torch.zeros(length), torch.arange(length) + first, start, torch.tensor([0, length]), 0)
    with torch.no_grad():
        part = model(ids[None], None, None, packed_seq_params=bounds(pack))[0].contiguous()
    parts = [torch.empty_like(part) for _ in range(tensor)]
    torch.distributed.all_gather(parts, part)
    return torch.cat(parts, -1)[:, : config.vocab_size].numpy()


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("family, heads, groups", [("llama", 10, 2), ("qwen2", 8, 2), ("qwen3", 4, 4), ("llama", 16, 2)])
def test_logits_equal_transformers_also_beyond_the_original_context(ranks, tmp_path, tensor, family, heads, groups):
    import transformers

    folder = save_random(tmp_path / "hf", family, heads=heads, groups=groups, context=48)
    ids = torch.randint(301, (64,), generator=torch.Generator().manual_seed(0))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for first in (0, 40):
        with torch.no_grad():
            expected = reference(ids[None], position_ids=torch.arange(first, first + 64)[None]).logits[0]
        for found in ranks.run(tensor, logits_at, folder, tensor, ids, first):
            assert (torch.from_numpy(found) - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max())


def test_llama3_scaling_gives_transformers_logits(ranks, tmp_path):
    import transformers

    settings = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
    folder = save_random(tmp_path / "hf", context=8192, original_max_position_embeddings=8192, **settings)
    ids = torch.arange(64)
    with torch.no_grad():
        positions = torch.arange(9000, 9064)[None]
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder)(ids[None], position_ids=positions).logits[0]
    (found,) = ranks.run(1, logits_at, folder, 1, ids, 9000)
    assert (torch.from_numpy(found) - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max())

