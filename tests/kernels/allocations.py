"""Watch what a function allocates and where it launches: live bytes and largest tensor, NaN margins, the device's guard."""

import contextlib
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators made and that still live: `peak`, `largest`; `calls` counts operators by name."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = self.largest = 0
        self.known, self.calls = set(), {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self.known.add(tensor.untyped_storage()._cdata)  # an input, or already counted
        out = function(*args, **(kwargs or {}))
        self.calls[function.__name__] = self.calls.get(function.__name__, 0) + 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage):
        if storage._cdata in self.known:
            return
        size = storage.nbytes()
        self.known.add(storage._cdata)
        self.live += size
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
        weakref.finalize(storage, self._release, storage._cdata, size)

    def _release(self, key, size):
        self.known.discard(key)
        self.live -= size


MARGIN = 128  # elements; a multiple of 16 bytes in every dtype


def guarded(tensor):
    """A copy of `tensor` in the middle of a buffer of NaN (a large number for integers)."""
    buffer = tensor.new_full((tensor.numel() + 2 * MARGIN,), _canary(tensor.dtype))
    buffer[MARGIN : MARGIN + tensor.numel()] = tensor.detach().reshape(-1)
    return buffer[MARGIN : MARGIN + tensor.numel()].view(tensor.shape), buffer


def _canary(dtype):
    return torch.nan if dtype.is_floating_point else 1 << 30


def _intact(buffer):
    edge = torch.cat([buffer[:MARGIN], buffer[-MARGIN:]])
    return bool((edge.isnan() if buffer.dtype.is_floating_point else edge == 1 << 30).all())


@contextlib.contextmanager
def canaries():
    """Within, new_empty, new_zeros, empty_like and zeros_like allocate inside NaN margins, which must be intact at the end."""
    buffers = []
    saved = torch.Tensor.new_empty, torch.Tensor.new_zeros, torch.empty_like, torch.zeros_like

    def allocate(like, shape, dtype, value):
        buffer = torch.full((shape.numel() + 2 * MARGIN,), _canary(dtype), dtype=dtype, device=like.device)
        inner = buffer[MARGIN : MARGIN + shape.numel()]
        if value is not None:
            inner.fill_(value)
        buffers.append(buffer)
        return inner.view(shape)

    def new(value):
        plain = saved[0 if value is None else 1]

        def make(self, *shape, dtype=None, device=None):
            if device is not None:  # the interpreter's own
                return plain(self, *shape, dtype=dtype, device=device)
            shape = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
            return allocate(self, shape, dtype or self.dtype, value)

        return make

    def like(value):
        return lambda tensor, dtype=None: allocate(tensor, tensor.shape, dtype or tensor.dtype, value)

    torch.Tensor.new_empty, torch.Tensor.new_zeros, torch.empty_like, torch.zeros_like = new(None), new(0), like(None), like(0)
    try:
        yield buffers
    finally:
        torch.Tensor.new_empty, torch.Tensor.new_zeros, torch.empty_like, torch.zeros_like = saved
    assert buffers, "nothing was allocated within: the canaries watched nothing"
    assert all(map(_intact, buffers)), "a kernel wrote outside its buffer"


@contextlib.contextmanager
def launches_under_guard(monkeypatch, module, *names):
    """Within, these kernels of `module` must each be launched, and only inside torch.cuda.device_of(a tensor)."""
    inside, seen = [], set()

    @contextlib.contextmanager
    def device_of(tensor):
        inside.append(tensor)
        yield
        inside.pop()

    class Watched:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            assert inside, f"{self.name} is launched on the current device, wherever its tensors are"
            seen.add(self.name)
            return self.kernel[grid]

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for name in names:
        monkeypatch.setattr(module, name, Watched(name, getattr(module, name)))
    yield
    assert seen == set(names)
