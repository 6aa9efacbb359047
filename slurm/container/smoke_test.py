"""Is the image whole? Versions as pinned, extensions compiled for this torch, and on a GPU: each of them computes.

    python /opt/smoke_test.py        in the container; exit 1 with a line for everything that is wrong; seconds
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

PACKAGES = {"TORCH": "torch", "TRANSFORMER_ENGINE": "transformer-engine", "FLASH_ATTN": "flash-attn"}
EXTENSIONS = ("transformer_engine_torch", "flash_attn_2_cuda", "amp_C")  # the last is apex's
NEEDED = ("megatron.core", "transformers", "hydra", "wandb", "nvidia.dali", "tantivy", "math_verify")
TOLERANCE = 0.02  # bf16 against float32, of the largest value


def pinned() -> dict[str, str]:
    """versions.env, which lies beside this file."""
    lines = (Path(__file__).parent / "versions.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def versions() -> None:
    """The versions that were asked for, and a CUDA that is torch's."""
    wanted = pinned()
    for key, package in PACKAGES.items():
        found = importlib.metadata.version(package)
        assert found.split("+")[0] == wanted[key], f"{package} is {found}, versions.env says {wanted[key]}"
    compiler = os.environ.get("CUDA_VERSION", "none")
    assert compiler.startswith(torch.version.cuda), f"CUDA of the image is {compiler}, that of torch {torch.version.cuda}"
    for name in EXTENSIONS:
        assert importlib.util.find_spec(name), f"the compiled module {name} is missing"
    for name in NEEDED:
        assert importlib.util.find_spec(name), f"{name} is missing"


def near(found: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    error = float((found.float() - exact).abs().max() / exact.abs().max())
    assert error < TOLERANCE, f"{what}: off by {error:.3g} of the largest value, {TOLERANCE} is allowed"


def transformer_engine() -> None:
    """A linear layer, forward and backward, beside torch's in float32."""
    import transformer_engine.pytorch as te

    layer = te.Linear(256, 512, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = layer(x)
    near(out, x.float() @ layer.weight.float().T, "transformer_engine's Linear")
    out.float().sum().backward()
    near(x.grad, layer.weight.float().sum(0).expand(64, -1), "its gradient")


def flash_attention() -> None:
    """Causal attention with grouped queries, beside torch's in float32."""
    from flash_attn import flash_attn_func

    q = torch.randn(1, 256, 20, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 256, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = flash_attn_func(q, k, v, causal=True)
    first, *rest = (x.float().transpose(1, 2) for x in (q, k, v))
    exact = F.scaled_dot_product_attention(first, *(x.repeat_interleave(5, 1) for x in rest), is_causal=True)
    near(found, exact.transpose(1, 2), "flash_attn")


def apex_adam() -> None:
    """One step of apex's fused Adam, beside torch's."""
    from apex.optimizers import FusedAdam

    start, gradient = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    ends = []
    for kind in (FusedAdam, torch.optim.AdamW):
        weight = torch.nn.Parameter(start.clone())
        weight.grad = gradient.clone()
        kind([weight], lr=0.01, weight_decay=0.1).step()
        ends.append(weight.detach())
    near(ends[0], ends[1], "apex's FusedAdam")


def kernels() -> None:
    """The project's own, on a few shapes, and that libraries still take what the project passes them."""
    subprocess.run([sys.executable, "tools/check_backends.py"], check=True)
    subprocess.run([sys.executable, "kernels/gpu_check.py", "--minutes", "2"], check=True)


def nccl() -> None:
    """An all-reduce over the GPUs of this machine."""
    code = (
        "import torch, torch.distributed as d, os; r = int(os.environ['LOCAL_RANK']); torch.cuda.set_device(r);"
        "d.init_process_group('nccl'); x = torch.ones(1 << 20, device='cuda'); d.all_reduce(x);"
        "assert float(x[0]) == d.get_world_size(); d.destroy_process_group()"
    )
    count = f"--nproc-per-node={torch.cuda.device_count()}"
    subprocess.run(["torchrun", "--standalone", count, "--no-python", sys.executable, "-c", code], check=True)


def main() -> None:
    checks: list[Callable[[], None]] = [versions]
    if torch.cuda.is_available():
        checks += [transformer_engine, flash_attention, apex_adam, nccl]
        checks += [kernels] if Path("kernels/gpu_check.py").exists() else []
    failed = []
    for check in checks:
        try:
            check()
            print(f"ok       {check.__name__}")
        except Exception as error:  # the next check may still tell something
            failed.append(check.__name__)
            print(f"FAILED   {check.__name__}: {error}")
            traceback.print_exc(limit=-1)
    if not torch.cuda.is_available():
        print("no GPU here: only versions and files were looked at; run this again on a node")
    sys.exit(f"error: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
