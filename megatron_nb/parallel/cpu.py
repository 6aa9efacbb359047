"""What megatron-core needs to run without CUDA: the same training code on gloo and CPU tensors.

`install()` patches torch.cuda queries that core calls unconditionally, and rewrites `device="cuda"` where core writes it
into a call. It does nothing where CUDA exists. The release of megatron-core is pinned and every patched symbol is
asserted, so that an upgrade fails here and not in the numbers.

Two rules learned the hard way: never replace factory functions such as torch.zeros globally (that silently corrupts
rotary tables built under `with torch.device("meta")`), and re-enter the function mode around the autograd engine, since
activation recompute runs core's forward code there.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CORE_RELEASE = "0.19.2"
CPU = torch.device("cpu")


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class CudaAsCpu(TorchFunctionMode):
    """Rewrites only calls that would raise on a machine without CUDA. Thread-local: enter it in every thread that runs core."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if function is torch.Tensor.cuda or function is torch.Tensor.pin_memory:
            return args[0]
        if function is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = function(args[0])
            # core's optimizers tell dtypes apart by "torch.cuda.FloatTensor"; other callers get the true name
            from_core = sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core")
            return name.replace("torch.", "torch.cuda.", 1) if from_core else name
        return function(*args, **kwargs)


class _Stream:
    """A stream on a machine that has none: work is done when the call returns."""

    cuda_stream, device = 0, CPU

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return False

    def query(self) -> bool:
        return True

    def record_event(self, event=None):
        return event or _Event()

    def _nothing(self, *args, **kwargs):
        pass

    wait_stream = wait_event = synchronize = _nothing


class _Event:
    def __init__(self, *args, **kwargs):
        self.seconds = 0.0

    def record(self, *args):
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return (other.seconds - self.seconds) * 1e3  # ms, as torch.cuda.Event

    def _nothing(self, *args, **kwargs):
        pass

    wait = synchronize = _nothing


def _patch(owner: Any, name: str, value: Any) -> None:
    where = getattr(owner, "__name__", repr(owner))
    assert hasattr(owner, name), f"{where}.{name} is gone: parallel/cpu.py patches it for megatron-core {CORE_RELEASE}"
    setattr(owner, name, value)


def install() -> bool:
    """Patch once; returns whether this process runs without CUDA. Call before any module of megatron.core is used."""
    if torch.cuda.is_available():
        return False
    if getattr(install, "done", False):
        return True
    found = megatron.core.__version__.split("+")[0]
    assert found == CORE_RELEASE, f"megatron-core {found} found, parallel/cpu.py knows {CORE_RELEASE}: install that release"

    cuda = torch.cuda
    _patch(cuda, "current_device", lambda: CPU)
    _patch(cuda, "device_count", lambda: 1)
    _patch(cuda, "set_device", lambda device: None)
    for name in ("synchronize", "empty_cache"):
        _patch(cuda, name, lambda *args, **kwargs: None)
    for name in ("current_stream", "default_stream"):
        _patch(cuda, name, lambda *args, **kwargs: _Stream())
    _patch(cuda, "Stream", _Stream)
    _patch(cuda, "Event", _Event)
    _patch(cuda, "stream", lambda stream: contextlib.nullcontext())
    _patch(torch.Tensor, "record_stream", lambda tensor, stream: None)
    _patch(torch.nn.Module, "cuda", lambda module, device=None: module)

    # core keeps its tensor-parallel random states through the CUDA generator: here that is the default CPU generator
    _patch(cuda, "manual_seed", lambda seed: torch.manual_seed(seed) and None)
    for owner in (cuda, cuda.random):
        _patch(owner, "get_rng_state", lambda device=None: torch.get_rng_state())
        _patch(owner, "set_rng_state", lambda state, device=None: torch.set_rng_state(state))

    barrier = dist.barrier
    _patch(dist, "barrier", lambda group=None, async_op=False, device_ids=None: barrier(group=group, async_op=async_op))

    run_engine = torch.autograd._engine_run_backward

    def run_engine_in_mode(*args, **kwargs):
        with CudaAsCpu():
            return run_engine(*args, **kwargs)

    _patch(torch.autograd, "_engine_run_backward", run_engine_in_mode)
    CudaAsCpu().__enter__()

    import megatron.core.tensor_parallel.random as core_random

    _patch(core_random, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state))
    install.done = True
    return True
