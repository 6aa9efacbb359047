"""A pretended GPU and NCCL around the job's code: import it before megatron_nb, in a process of its own.

torch.cuda answers as on a machine with one GPU; process groups are torch's fake ones (one rank of any world runs alone) that
remember whether they would be NCCL or gloo; Triton launches look at their arguments and compute nothing, unless
TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime import JITFunction
from triton.runtime.interpreter import GridExecutor
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.cuda.pretend import CUDA, DONE, Pretended, WrongDevice, enter

LAUNCHED: dict[str, int] = {}  # kernel -> launches
MOVED: dict[str, int] = {}  # "backend collective" -> calls
OPTIONS = ("num_warps", "num_stages", "num_ctas")  # of a launch
# of a kernel that did not run: what its caller divides by
FILL = {"row_statistics": {"L": 1.0}}


GUARDED = [0]  # device guards that are open


# ---------------------------------------------------------------------- torch.cuda
class _Stream(contextlib.nullcontext):
    cuda_stream, device = 0, CUDA

    def __init__(self, *args, **kwargs):
        super().__init__(self)
        self.seen = -1  # operations of the current stream that this one runs behind

    def _nothing(self, *args, **kwargs):
        return None

    synchronize = record_event = record = wait = _nothing

    def wait_stream(self, *args) -> None:
        self.seen = DONE[0]

    wait_event = wait_stream

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, other) -> float:
        return 0.0


@contextlib.contextmanager
def _on(stream: _Stream | None):
    """What runs on a side stream may read what the current one still writes, unless it waits for it."""
    if isinstance(stream, _Stream) and stream.seen != DONE[0]:
        raise WrongDevice("work is begun on a side stream that does not wait for the current stream")
    yield


@contextlib.contextmanager
def _guarded(tensor: torch.Tensor):
    GUARDED[0] += isinstance(tensor, Pretended)
    yield
    GUARDED[0] -= isinstance(tensor, Pretended)


class _Generator(torch.Generator):
    """torch.Generator(device="cuda") is refused without a GPU."""

    def __new__(cls, device: Any = "cpu"):
        return super().__new__(cls, "cpu")


def _rng_state(device: Any = None) -> torch.Tensor:
    with _disable_current_modes():
        return torch.Generator().get_state()[:16].clone()  # of CUDA: 16 bytes, on the host


def _set_rng_state(state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
    if isinstance(state, Pretended) or state.dtype != torch.uint8 or state.numel() != 16:
        raise WrongDevice(f"the CUDA generator takes 16 bytes on the host, got {list(state.shape)} on {state.device}")


def _nothing() -> Any:
    """A function for each name: torch's compiler, which is imported on the way, refuses one that it knows by two."""
    return lambda *args, **kwargs: None


def _install_cuda() -> None:
    cuda = torch.cuda
    for name, value in {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "_lazy_init": _nothing(),
        "is_initialized": lambda: True, "synchronize": _nothing(), "empty_cache": _nothing(), "set_device": _nothing(),
        "manual_seed": _nothing(), "manual_seed_all": _nothing(), "get_rng_state": _rng_state, "set_rng_state": _set_rng_state,
        "Stream": _Stream, "Event": _Stream, "current_stream": _Stream, "default_stream": _Stream,
        "stream": _on, "device_of": _guarded,
        "max_memory_allocated": lambda *a: 0, "memory_allocated": lambda *a: 0, "reset_peak_memory_stats": _nothing(),
        "mem_get_info": lambda device=None: (70 * 10**9, 80 * 10**9), "memory_stats": lambda *a: {},
        "get_device_name": lambda device=None: "Pretended H100", "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="Pretended H100", major=9, minor=0, multi_processor_count=132, total_memory=80 * 10**9
        ),
    }.items():  # fmt: skip
        setattr(cuda, name, value)
    cuda.random.get_rng_state, cuda.random.set_rng_state = _rng_state, _set_rng_state
    torch.Generator = _Generator
    torch.accelerator.current_stream = lambda device=None: _Stream()
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _nothing(), _nothing()
    torch.compile = lambda function=None, **options: (lambda f: f) if function is None else function  # core's jit_fuser


# ---------------------------------------------------------------------- torch.distributed
_BACKENDS: dict[Any, str] = {}  # process group -> what it would be


def _backend(group: Any = None) -> str:
    return _BACKENDS[group if group is not None else dist.group.WORLD]


class _Work:
    def wait(self, *args) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _seen(name: str, group: Any, *values: Any) -> None:
    """Check that what a collective moves lives where its group's back end looks for it."""
    backend = _backend(group)
    MOVED[f"{backend} {name}"] = MOVED.get(f"{backend} {name}", 0) + 1
    for tensor in tree_leaves(values):
        if isinstance(tensor, torch.Tensor) and isinstance(tensor, Pretended) != (backend == "nccl"):
            raise WrongDevice(f"{name} over {backend} of a tensor on {tensor.device}, {list(tensor.shape)}")
        if isinstance(tensor, torch.Tensor) and not tensor.is_contiguous():
            raise WrongDevice(f"{name} over {backend} of a tensor that is not contiguous, strides {tensor.stride()}")


def _object_seen(name: str, group: Any) -> None:
    """Over NCCL objects travel through the thread's current device, which is device 0 in every thread but the main one."""
    _seen(name, group)
    if _backend(group) == "nccl" and threading.current_thread() is not threading.main_thread():
        raise WrongDevice(f"{name} over nccl in a thread of its own, whose current device is not the rank's")


def _size(group: Any) -> int:
    return dist.get_world_size(group)


def _rank(group: Any) -> int:
    return dist.get_rank(group)


def _done(async_op: bool) -> _Work | None:
    return _Work() if async_op else None


# every rank is taken to hold what this one holds; sums are left as they are
def _all_reduce(tensor, op=None, group=None, async_op=False):
    _seen("all_reduce", group, tensor)
    return _done(async_op)


def _broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    _seen("broadcast", group, tensor)
    return _done(async_op)


def _all_gather(tensors, tensor, group=None, async_op=False):
    _seen("all_gather", group, tensors, tensor)
    for each in tensors:
        each.copy_(tensor)
    return _done(async_op)


def _gather(tensor, gather_list=None, dst=None, group=None, async_op=False, group_dst=None):
    _seen("gather", group, tensor, gather_list)
    return _done(async_op)


def _all_gather_into_tensor(output, tensor, group=None, async_op=False):
    _seen("all_gather_into_tensor", group, output, tensor)
    for part in output.view(-1).chunk(_size(group)):
        if part.data_ptr() != tensor.data_ptr():
            part.copy_(tensor.reshape(-1))
    return _done(async_op)


def _reduce_scatter_tensor(output, tensor, op=None, group=None, async_op=False):
    _seen("reduce_scatter_tensor", group, output, tensor)
    part = tensor.view(-1).chunk(_size(group))[_rank(group)]
    if part.data_ptr() != output.data_ptr():
        output.view(-1).copy_(part)
    return _done(async_op)


def _send(tensor, dst=None, group=None, tag=0, group_dst=None):
    _seen("send", group, tensor)
    return _Work()


def _recv(tensor, src=None, group=None, tag=0, group_src=None):
    _seen("recv", group, tensor)
    return _Work()


def _batch_isend_irecv(operations):
    for operation in operations:
        _seen("batch_isend_irecv", operation.group, operation.tensor)
    return [_Work() for _ in operations]


def _all_gather_object(object_list, obj, group=None):
    _object_seen("all_gather_object", group)
    object_list[:] = [obj] * _size(group)


def _gather_object(obj, object_gather_list=None, dst=None, group=None, group_dst=None):
    _object_seen("gather_object", group)
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * _size(group)


def _broadcast_object_list(object_list, src=None, group=None, device=None, group_src=None):
    _object_seen("broadcast_object_list", group)


def _scatter_object_list(output, objects=None, src=None, group=None, group_src=None):
    _object_seen("scatter_object_list", group)
    output[0] = objects[_rank(group)]


def _barrier(group=None, async_op=False, device_ids=None, timeout=None):
    _object_seen("barrier", group)
    return _done(async_op)


@contextlib.contextmanager
def _coalescing(group=None, device=None, async_ops=False):
    yield _Work()


def _install_distributed(rank: int, world: int) -> None:
    start, new_group = dist.init_process_group, dist.new_group

    def init_process_group(backend=None, **kwargs):
        start("fake", store=FakeStore(), rank=rank, world_size=world)
        _BACKENDS[dist.group.WORLD] = backend

    def new(ranks=None, timeout=None, backend=None, **kwargs):
        group = new_group(ranks, backend="fake")
        _BACKENDS[group] = backend or _backend()
        return group

    found = {
        "init_process_group": init_process_group, "new_group": new, "get_backend": _backend, "all_reduce": _all_reduce,
        "broadcast": _broadcast, "all_gather": _all_gather, "gather": _gather, "send": _send, "isend": _send, "recv": _recv,
        "irecv": _recv, "all_gather_into_tensor": _all_gather_into_tensor, "_all_gather_base": _all_gather_into_tensor,
        "reduce_scatter_tensor": _reduce_scatter_tensor, "_reduce_scatter_base": _reduce_scatter_tensor,
        "batch_isend_irecv": _batch_isend_irecv, "all_gather_object": _all_gather_object, "gather_object": _gather_object,
        "broadcast_object_list": _broadcast_object_list, 
        "scatter_object_list": _scatter_object_list, "barrier": _barrier, "_coalescing_manager": _coalescing,
    }  # fmt: skip
    for module in (dist, dist.distributed_c10d):
        for name, value in found.items():
            if hasattr(module, name):
                setattr(module, name, value)


# ---------------------------------------------------------------------- Triton
def _look_at(function: Any, grid: tuple, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments by name, after a look at where they live."""
    name = function.__name__
    if function.__module__.startswith("nb_kernels") and not GUARDED[0]:
        raise WrongDevice(f"kernel {name} is launched on whatever device is the current one: use torch.cuda.device_of")
    bound = inspect.signature(function).bind(*args, **{n: v for n, v in kwargs.items() if n not in OPTIONS}).arguments
    for argument, value in bound.items():
        tensor = getattr(value, "base", value)  # of a descriptor
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, Pretended):
            raise WrongDevice(f"kernel {name} is given {argument} on the CPU, {list(tensor.shape)}")
    assert all(isinstance(size, int) and size > 0 for size in grid), f"kernel {name} is launched on grid {grid}"
    LAUNCHED[name] = LAUNCHED.get(name, 0) + 1
    return bound


def _install_triton() -> None:
    interpret = GridExecutor.__call__

    def launch(self, *args, grid, warmup, **kwargs):
        for argument, value in _look_at(self.fn, grid, args, kwargs).items():
            if argument in FILL.get(self.fn.__name__, ()):
                value.fill_(FILL[self.fn.__name__][argument])

    def launch_interpreted(self, *args, **kwargs):
        bound = _look_at(self.fn, self.grid, args, kwargs)
        with _disable_current_modes():
            interpret(self, **{name: _values_of(value) for name, value in bound.items()})

    JITFunction.run, GridExecutor.__call__ = launch, launch_interpreted


def _values_of(argument: Any) -> Any:
    if isinstance(argument, TensorDescriptor):
        return dataclasses.replace(argument, base=_values_of(argument.base))
    return argument.inner if isinstance(argument, Pretended) else argument


def install(rank: int = 0, world: int = 1) -> None:
    """Once in a process, before megatron_nb is imported; what computes in other threads is not looked at."""
    _install_cuda()
    _install_distributed(rank, world)
    _install_triton()
    enter()
