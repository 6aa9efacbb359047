"""CUDA tensors on a machine without CUDA: CPU data with a label that says cuda:0, whose operations keep CUDA's rules.

Everything is computed, on the CPU and with true values; what is checked is where tensors live. An operation that mixes
labelled and plain tensors raises as on a GPU, so does `.numpy()`; pinned memory, generators and streams are accepted where
CUDA accepts them. The label is a wrapper that autograd takes for a meta tensor, so its engine asks for no device threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
aten = torch.ops.aten
FREE = {"copy_", "_to_copy", "_local_scalar_dense", "_foreach_copy_"}  # take tensors from any device
INDEXED = {"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
DONE = [0]  # operations on the GPU so far
STRICT = ("_fused_", "cat", "stack")  # where a CPU scalar is no number but a tensor on the wrong device


class WrongDevice(RuntimeError):
    """What a GPU would have refused."""


class Pretended(torch.Tensor):
    """A tensor that says it lives on cuda:0; `inner` holds its values."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pretended:
        with torch.inference_mode(inner.is_inference()):  # a view of a normal tensor is one too
            layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
            made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, **layout, device="meta")
        made.inner = inner
        return made

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)

    @property
    def data(self) -> Pretended:
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, Pretended):
            raise WrongDevice("the data of a CUDA tensor is set to a CPU tensor")
        torch.Tensor.data.__set__(self, other)  # sizes and strides
        self.inner = other.inner

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, *args, **kwargs):
        raise WrongDevice("numpy() of a CUDA tensor")

    __array__ = numpy

    def get_device(self) -> int:
        return 0

    def is_pinned(self, *args) -> bool:
        return False

    def pin_memory(self, *args):
        raise WrongDevice("only CPU tensors can be pinned")

    def record_stream(self, stream) -> None:
        pass

    def type(self, dtype=None, **kwargs):
        if dtype is None:
            return self.inner.type().replace("torch.", "torch.cuda.", 1)
        return self.to(dtype)

    def cuda(self, *args, **kwargs) -> Pretended:
        return self

    def to(self, *args, **kwargs):
        device, dtype, _, _ = torch._C._nn._parse_to(*(a for a in args if not isinstance(a, torch.Tensor)), **{
            name: value for name, value in kwargs.items() if name in ("device", "dtype", "non_blocking")
        })  # fmt: skip
        for other in args:
            if isinstance(other, torch.Tensor):
                device, dtype = other.device, other.dtype
        same = (device is None or device.type == "cuda") and dtype in (None, self.dtype) and not kwargs.get("copy")
        return self if same else super().to(*args, **kwargs)

    def __repr__(self, **kwargs) -> str:
        return f"cuda:{self.inner!r}"

    def __deepcopy__(self, memo):
        return Pretended(self.inner.clone())

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


def _mapped(change, value: Any) -> Any:
    """`value` with its tensors changed, in lists and tuples too: of arguments there is nothing deeper."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(change, item) for item in value])
    return value


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(found.append, list(values))
    return found


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.inner if isinstance(tensor, Pretended) else tensor


def _label(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, Pretended) else Pretended(tensor)


def _is_cuda(device: Any) -> bool:
    # meta: what autograd's own formulas ask for, since they see the wrapper's device
    return device is not None and torch.device(device).type in ("cuda", "meta")


def check(function, args: tuple, kwargs: dict) -> bool:
    """Whether the result lives on the GPU. WrongDevice when a GPU would refuse the operation."""
    name = function._schema.name.split("::")[1]
    tensors = _tensors((*args, *kwargs.values()))
    cuda = [t for t in tensors if isinstance(t, Pretended)]
    if kwargs.get("pin_memory") and _is_cuda(kwargs.get("device")):
        raise WrongDevice(f"{name}: only CPU tensors can be pinned")
    if name == "copy_":
        return isinstance(args[0], Pretended)
    if kwargs.get("device") is not None:
        return _is_cuda(kwargs["device"])
    if not cuda:
        return False
    if name in FREE:
        return True
    if name in INDEXED:
        if not isinstance(args[0], Pretended):
            raise WrongDevice(f"{name}: a CPU tensor is indexed by, or given, CUDA tensors")
        plain = [t for t in args[2:3] if isinstance(t, torch.Tensor) and not isinstance(t, Pretended) and t.dim()]
    else:
        places = [a for a in enumerate(function._schema.arguments) if a[1].alias_info and a[1].alias_info.is_write]
        written = _tensors([args[i] if i < len(args) else kwargs.get(a.name) for i, a in places])
        exact = name.startswith(STRICT)
        plain = [t for t in tensors if not isinstance(t, Pretended) and (t.dim() or exact or any(t is w for w in written))]
    if plain:
        shapes = [f"{'cuda' if isinstance(t, Pretended) else 'cpu'} {list(t.shape)} {t.dtype}" for t in tensors]
        raise WrongDevice(f"{name} mixes devices: {', '.join(shapes)}")
    return True


def run(function, args: tuple, kwargs: dict) -> Any:
    """The operation on the values; its result labelled as CUDA would."""
    if not kwargs and not any(isinstance(a, (Pretended, list, tuple)) for a in args):
        return function(*args)  # most of what happens on the host
    on_gpu = check(function, args, kwargs)
    plain_args, plain_kwargs = _mapped(_inner, args), {name: _mapped(_inner, value) for name, value in kwargs.items()}
    if "device" in plain_kwargs and plain_kwargs["device"] is not None:
        plain_kwargs["device"] = CPU
    plain_kwargs.pop("pin_memory", None)
    name = function._schema.name.split("::")[1]
    if name == "_to_copy":
        plain_kwargs.pop("non_blocking", None)
    if name in ("_pin_memory",):
        return args[0]
    if name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"):  # what a kernel would fill
        result = function(*plain_args, **plain_kwargs).zero_()
    elif function._overloadname.startswith("dtype") and name in ("mm", "bmm", "addmm", "baddbmm"):  # no CPU kernel
        result = _wide_product(name, plain_args, plain_kwargs)
    else:
        result = function(*plain_args, **plain_kwargs)
    if on_gpu:
        DONE[0] += 1
        result = _mapped(_label, result)
    if not any(isinstance(a, Pretended) for a in _tensors((*args, *kwargs.values()))):
        return result
    return return_and_correct_aliasing(function, args, kwargs, result) if on_gpu else result


def _wide_product(name: str, args: tuple, kwargs: dict) -> torch.Tensor:
    factors = [a for a in args if isinstance(a, torch.Tensor)]
    dtype = next((a for a in args if isinstance(a, torch.dtype)), kwargs.get("out_dtype"))
    result = getattr(torch, name)(*(f.to(dtype) for f in factors))
    return kwargs["out"].copy_(result) if "out" in kwargs else result


class PretendCuda(TorchDispatchMode):
    """Enter it in every thread that computes."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


def _maker(function):
    """A function that makes a tensor of Python values: those never reach the dispatcher."""

    def made(data, *args, **kwargs):
        if isinstance(data, (list, tuple)):
            data = _mapped(lambda t: t.item(), data)
        if _is_cuda(kwargs.get("device")):
            return function(data, *args, **{**kwargs, "device": CPU}).to(CUDA)
        return function(data, *args, **kwargs)

    return made


class PretendFunctions(TorchFunctionMode):
    """What never reaches the dispatcher: the number of the device that "cuda" means."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.new_tensor and isinstance(args[0], Pretended):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, "device": CUDA, **kwargs})
        if function is torch.Tensor.cuda:
            return args[0].to(CUDA)
        if function is torch.Tensor.to:
            args = tuple(CUDA if isinstance(a, (str, torch.device)) and _is_cuda(a) else a for a in args)
            kwargs = {n: CUDA if n == "device" and _is_cuda(a) else a for n, a in kwargs.items()}
        return function(*args, **kwargs)


def enter() -> None:
    """From here on this thread has a GPU."""
    torch.tensor, torch.as_tensor = _maker(torch.tensor), _maker(torch.as_tensor)
    PretendFunctions().__enter__()
    PretendCuda().__enter__()
