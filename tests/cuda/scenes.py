"""Pieces of the jobs on a pretended GPU, in a process of their own: python -m tests.cuda.scenes RANK WORLD LAYOUT SCENE ..."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

from tests.cuda import machine

if __name__ == "__main__":
    machine.install(int(sys.argv[1]), int(sys.argv[2]))

import numpy as np
import pytest
import torch
import yaml

import megatron_nb
from megatron_nb.parallel import topology
from tests.cuda.pretend import CUDA, Pretended, WrongDevice
from tests.training import tiny

# isort: split
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as core_random

MODEL = dict(dtype="bf16", num_layers=2, num_attention_heads=4, num_query_groups=2, head_dim=16)


def _trainer(layout: dict, optimizer: dict | None = None, **model):
    topology.destroy()
    made = tiny.trainer({**MODEL, **model}, {"communication": "nccl", **layout}, optimizer)
    assert all(type(p) is Pretended for chunk in made.chunks for p in chunk.parameters())
    return made


def _step(trainer, packs, loss, **options) -> None:
    result = trainer.step(packs, loss, **options)
    assert not result.skipped, f"the step was refused: {result}"


# ---------------------------------------------------------------------- scenes
def sft(layout: dict) -> None:
    """Two steps, one that reports norms, and an evaluation."""
    from megatron_nb.losses.next_token import NextToken

    made = _trainer(layout)
    for step in range(2):
        _step(made, tiny.packs(step), NextToken(), layer_norms=step == 1)
    made.evaluate(tiny.packs(2), NextToken())


def overlap(layout: dict) -> None:
    """Gradients reduced and parameters gathered beside the computation, activations computed again; fp32."""
    from megatron_nb.losses.next_token import NextToken

    overlapping = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    made = _trainer({**layout, "recompute": "full"}, overlapping, dtype="fp32")
    for step in range(2):
        _step(made, tiny.packs(step), NextToken())
    made.evaluate(tiny.packs(2), NextToken())


def around(layout: dict) -> None:
    """What a job does beside its steps: the look at the machine, the stop signal, what a save gathers, weights for others."""
    from megatron_nb.losses.next_token import NextToken
    from megatron_nb.model.gpt import check_layout
    from megatron_nb.rollout.weight_link import checksum, describe, flat, unflat
    from megatron_nb.training import metrics, preflight
    from megatron_nb.training.checkpoint_state import _random_state, _restore_random_state, training_state
    from megatron_nb.training.signals import StopSignal

    made = _trainer(layout)
    place = made.topology
    _step(made, tiny.packs(0), NextToken())
    preflight.MESSAGE = dict.fromkeys(preflight.MESSAGE, 1 << 10)
    preflight._facts(place, True)
    preflight._all_reduce(place.device)
    with StopSignal(place.device) as stop:
        assert not stop.agreed()
    metrics._peak_memory()
    _restore_random_state(_random_state())
    training_state(made, 1, {})
    with mock.patch.object(torch.distributed, "is_initialized", lambda: False):
        for words, changed, settings in (
            ("gloo is for ranks on CPUs", {"WORLD_SIZE": "2"}, {}),
            ("sees 1 GPUs", {"LOCAL_RANK": "1"}, {"communication": "nccl"}),
        ):
            with mock.patch.dict(os.environ, changed), pytest.raises(ValueError, match=words):
                topology.join_world(topology.ParallelConfig(**settings))
    with pytest.raises(ValueError, match="offload_activations=true needs Transformer Engine"):
        check_layout(made.model, topology.ParallelConfig(offload_activations=True))
    if place.pipeline_size == 1:  # the other stages would hold the rest
        bucket = list(made.weights().hf_tensors())
        whole = flat(bucket, CUDA)
        assert checksum(unflat(whole, describe(bucket))) == checksum(bucket)


def files(layout: dict) -> None:
    """A save, a resume and a further step, weights from a checkpoint and from a Hugging Face folder. On one rank."""
    from megatron_nb.losses.next_token import NextToken
    from megatron_nb.model.hf import load_hf
    from megatron_nb.model.sharding import bare
    from megatron_nb.training.checkpoint import CheckpointConfig, Checkpoints
    from megatron_nb.training.checkpoint_folder import step_folder
    from megatron_nb.training.checkpoint_state import load_weights
    from megatron_nb.training.export import export_hf
    from tools.compare_logits import our_logits

    made, model = _trainer(layout), tiny.model_config(**MODEL)
    _step(made, tiny.packs(0), NextToken())
    with tempfile.TemporaryDirectory() as run:
        text = yaml.safe_dump({"model": dataclasses.asdict(model)})
        for background in (False, True):
            saved = Checkpoints(Path(run), CheckpointConfig(async_save=background), text)
            saved.save(1 + background, made, {})
            saved.wait()
        made = _trainer(layout)
        Checkpoints(Path(run), CheckpointConfig(), text).resume(made)
        _step(made, tiny.packs(1), NextToken())
        folder, chunks = step_folder(Path(run), 2), [bare(chunk) for chunk in made.chunks]
        load_weights(folder, chunks, model)
        export_hf(folder, Path(run) / "hf")
        load_hf(Path(run) / "hf", chunks, model)
        topology.destroy()
        with mock.patch.object(topology, "destroy"):
            our_logits(folder, model, [("some", torch.arange(9), 3)], "bf16")


def reward(layout: dict) -> None:
    """Both kinds of reward model: a step and a judgement of held-out rows."""
    from megatron_nb.data.pairs import Unit, packs_of
    from megatron_nb.losses.reward import Pairwise, PairwiseConfig, Pointwise
    from megatron_nb.records import Sample
    from megatron_nb.training import reliability

    made = _trainer(layout, head="score")
    sample = lambda n, label, pair: Sample(np.arange(n), np.zeros(n, np.float32), f"{pair}{n}", pair_id=pair, label=label)  # noqa: E731
    units = [Unit([sample(9 + i, 1.0, f"p{i}"), sample(5 + i, 1.0, f"p{i}")], (9, 5)) for i in range(4)]
    t = made.topology
    for loss, some in ((Pairwise(PairwiseConfig()), units), (Pointwise(), [*units, Unit([sample(7, 0.5, "")], (7,))])):
        packs = packs_of(some, 64, t.data_rank, t.data_size, made.parallel.pack_multiple, t.pipeline_size)
        _step(made, packs, loss)
        reliability.judge(made, packs, loss)


def rl(layout: dict) -> None:
    """Updates of a policy: on-policy in one pass, and with old and reference log-probs, in two mini-batches."""
    from megatron_nb.training.policy import Policy, PolicyConfig, UpdateConfig
    from megatron_nb.training.reference import Reference
    from tests.training.test_policy_shared_prompts import rows

    made = _trainer(layout)
    losses = (
        (PolicyConfig(importance_cap=None), 1),
        (PolicyConfig(kl="k3", kl_coefficient=0.1, entropy_coefficient=0.01), 2),
        (PolicyConfig(ratio="sequence", clip_low=0.02, clip_high=0.03), 2),
        (PolicyConfig(objective="cispo", old="behaviour"), 1),
    )
    for loss, mini_batches in losses:
        frozen = Reference(made.chunks) if loss.kl else None
        policy = Policy(made, loss, UpdateConfig(mini_batches=mini_batches, pack_tokens=240), frozen)
        told = policy.update(rows())
        assert not told["skipped"], told
    policy.probe(list(range(12)), 5, 0.7)


def engine(layout: dict) -> None:
    """The native engine: prompts in chunks, shared prefixes, sessions, new weights, sleep."""
    from megatron_nb.rollout.engine import Request, Sampling
    from megatron_nb.rollout.native import NativeConfig, NativeEngine

    made = _trainer(layout)
    small = dict(kv_cache_gb=0.01, block_size=16, max_concurrency=4, step_tokens=32, max_sequence_length=128)
    config = NativeConfig(tensor=layout.get("tensor", 1), **small)
    native = NativeEngine(config, made.model, made.topology)

    async def main():
        long = [Request(f"r{i}", list(range(35 + i)), Sampling(max_tokens=2, temperature=0.7 * i), i) for i in range(5)]
        await asyncio.gather(*map(native.generate, long))
        ids = list(range(20))
        for turn in range(2):
            found = await native.generate(Request(f"s{turn}", ids, Sampling(max_tokens=2, top_p=0.9), turn, session="s"))
            ids = ids + found.ids + [1, 2, 3]
        await native.end_session("s")

    for version in range(2):
        native.load_weights(made.weights(), version)
        native.run(main)
        native.sleep()
    native.close()


def scorer(layout: dict) -> None:
    """A trained reward model that scores rollouts."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from megatron_nb.rewards.scorer import LastLogits
    from megatron_nb.training.hf_reward import RewardModel

    sizes = dict(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    model = LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=1, pad_token_id=0)).to(CUDA)
    for forward in (RewardModel(model, "pairwise", 20.0), LastLogits(model)):
        assert not isinstance(forward([[1, 2, 3], [4, 5]]), Pretended)


def values(layout: dict) -> dict[str, list]:
    """Numbers that do not depend on the device: losses and gradient norms, log-probs with shared prompts, greedy answers."""
    from megatron_nb.losses.next_token import NextToken
    from megatron_nb.rollout.engine import Request, Sampling
    from megatron_nb.rollout.native import NativeConfig, NativeEngine
    from megatron_nb.training.policy import Policy, PolicyConfig, UpdateConfig
    from tests.training.test_policy_shared_prompts import rows

    topology.destroy()
    communication = "gloo" if topology.ON_CPU else "nccl"
    shape = {**MODEL, "dtype": "fp32", "kernels": "auto" if topology.ON_CPU else "triton"}
    made = tiny.trainer(shape, {"communication": communication, **layout})
    results = [made.step([tiny.pack(step)], NextToken()) for step in range(2)]
    samples = rows()[:6]
    policy = Policy(made, PolicyConfig(ratio="sequence", kl=None), UpdateConfig(mini_batches=2, pack_tokens=400))
    told = policy.update(samples)
    native = NativeEngine(NativeConfig(kv_cache_gb=0.01, block_size=16, step_tokens=64), made.model, made.topology)
    native.load_weights(made.weights(), 0)

    async def main():
        asked = [Request(f"r{i}", list(range(3 + 20 * i)), Sampling(max_tokens=4, temperature=i), i) for i in range(2)]
        return await asyncio.gather(*map(native.generate, asked))

    answers = native.run(main)
    native.close()
    return {
        "steps": [[result.loss, result.grad_norm] for result in results],
        "policy": [told[name] for name in ("loss", "grad_norm", "entropy", "ratio_mean", "mismatch_kl")],
        "old": [float(value) for sample in samples for value in sample.old_logprob],
        "ids": [token for answer in answers for token in answer.ids],
        "logprobs": [value for answer in answers for value in answer.logprobs],
    }


# ---------------------------------------------------------------------- planted faults
def _flag_on_the_host(self, device="cpu", watchdog=None):
    self.watchdog, self.received, self._device, self._before = watchdog, None, "cpu", {}


def _host_index(batch, size, rank):
    moved = batch.to(CUDA)
    return dataclasses.replace(moved, ids=moved.ids + torch.arange(len(moved.ids)))


def _logprobs_on_the_host(self, packs, loss):
    whole = torch.zeros(len(packs), packs[0].pack_length)
    torch.distributed.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return list(whole)


def _numpy_of_cuda(self, samples, stream="old_logprob", temperature=None):
    torch.zeros(3, device=self.trainer.topology.device).numpy()


def _pinned_on_the_device(self, modules):
    self.frozen = [torch.empty_like(p).pin_memory() for module in modules for p in module.parameters()]


def _objects_from_a_thread(batch, device):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(topology.everywhere, 1).result()


def planted(layout: dict) -> None:
    """Faults that only a GPU would meet; each must be found, by the words given."""
    from megatron_nb.records import Batch
    from megatron_nb.rollout import native_weights
    from megatron_nb.training import trainer
    from megatron_nb.training.policy import Policy
    from megatron_nb.training.reference import Reference
    from megatron_nb.training.signals import StopSignal

    no_guard = lambda tensor: contextlib.nullcontext()  # noqa: E731
    for owner, attribute, faulty, scene, words in (
        (Batch, "to", lambda batch, device: batch, sft, "embedding mixes devices"),
        (Batch, "to", _objects_from_a_thread, sft, "in a thread of its own"),
        (trainer, "split", _host_index, sft, "add mixes devices"),
        (torch.cuda, "device_of", no_guard, sft, "whatever device is the current one"),
        (StopSignal, "__init__", _flag_on_the_host, around, "all_reduce over nccl of a tensor on cpu"),
        (trainer.Trainer, "logprobs", _logprobs_on_the_host, rl, "all_reduce over nccl of a tensor on cpu"),
        (Policy, "logprobs", _numpy_of_cuda, rl, "numpy() of a CUDA tensor"),
        (Reference, "__init__", _pinned_on_the_device, rl, "only CPU tensors can be pinned"),
        (native_weights, "_in_order", lambda copies: copies, engine, "does not wait for the current stream"),
    ):
        right = getattr(owner, attribute)
        setattr(owner, attribute, faulty)
        try:
            scene(layout)
        except WrongDevice as error:
            assert words in str(error), f"{attribute}: found {error}, not {words!r}"
        else:
            raise AssertionError(f"a planted fault was not found: {words!r} by {attribute}")
        finally:
            setattr(owner, attribute, right)


def main() -> None:
    assert not topology.ON_CPU
    core_random._set_cuda_rng_state = machine._set_rng_state
    layout, told, found = json.loads(sys.argv[3]), {}, {}
    topology.join_world(topology.ParallelConfig(**layout, communication="nccl"))
    for name in sys.argv[4:]:
        began = time.perf_counter()
        found[name] = globals()[name](layout)
        told[name] = round(time.perf_counter() - began, 2)
    report = {"package": megatron_nb.__file__, "seconds": told, "launched": machine.LAUNCHED, "moved": machine.MOVED}
    print(json.dumps({**report, "found": found}))


if __name__ == "__main__":
    main()
