"""What runs where CUDA exists, run where it does not: every tensor stands where a GPU, NCCL or a kernel asks for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cuda.scenes import values

ROOT = Path(__file__).parents[2]
KERNELS = {"row_statistics", "target_logits", "logit_gradients", "_token_terms", "_sequence_sums", "_rotate", "_backward_keys"}


def _played(rank: int, world: int, layout: dict, *scenes: str, interpret: bool = False) -> dict:
    """What the scenes told. They patch torch and so need a process of their own. interpret: kernels compute."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    environment["TRITON_INTERPRET"] = str(int(interpret))
    command = [sys.executable, "-W", "ignore", "-m", "tests.cuda.scenes", str(rank), str(world), json.dumps(layout), *scenes]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert Path(told["package"]).is_relative_to(ROOT), "another checkout was imported"
    return told


@pytest.mark.parametrize(
    ("rank", "world", "layout", "scenes"),
    [
        (0, 1, {}, ("sft", "around", "files", "overlap", "reward", "rl", "engine", "scorer")),
        (0, 4, {"tensor": 2, "context": 2, "context_method": "all_gather"}, ("sft", "around", "engine")),
        (4, 8, {"tensor": 2, "context": 2, "pipeline": 2}, ("sft", "around", "overlap", "reward", "rl")),
    ],
    ids=["alone", "tensor and context", "the last stage of a pipeline"],
)
def test_no_tensor_is_on_the_wrong_device_on_a_gpu(rank, world, layout, scenes):
    told = _played(rank, world, layout, *scenes)
    assert set(told["seconds"]) == set(scenes)
    assert "rl" not in scenes or set(told["launched"]) >= KERNELS, "a kernel took its torch path"
    assert "nccl all_reduce" in told["moved"], "nothing went over NCCL"


def test_a_gpu_path_with_interpreted_kernels_gives_the_numbers_of_the_cpu_path(ranks):
    """Training, policy updates with shared prompts and the paged engine, fp32: all kernels, and what calls them."""
    played = _played(0, 1, {}, "values", interpret=True)
    found, (expected,) = played["found"]["values"], ranks.run(1, values, {})
    assert set(played["launched"]) >= KERNELS | {"_merge", "_append_kv_cache_kernel"}
    assert found["ids"] == expected["ids"]
    for name in ("steps", "policy", "old", "logprobs"):
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, atol=2e-5, err_msg=name)


def test_faults_that_only_a_gpu_would_meet_are_found():
    _played(0, 1, {}, "planted")
