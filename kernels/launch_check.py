"""Take every launcher through the JIT without a GPU: python kernels/launch_check.py [--triton 3.6.0] [--long].

compile_check compiles kernels from tables; this runs the public functions themselves, on CPU tensors, under a stand-in for the
driver that names an sm_90 device and launches nothing. So it covers what happens between a tensor and the compiler: the binding
of arguments, arguments of 1 that the JIT makes constants, tensor descriptors, grids. Results are garbage and are not looked at.
A launch over an empty or negative grid, or a kernel that does not compile, fails.
"""
import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]


def install():
    """Let Triton compile for sm_90 and launch nothing; returns the list that every launch is written to."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        get_current_device = get_current_stream = staticmethod(lambda device=0: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

    driver.set_active(Driver())
    launches, run = [], JITFunction.run

    def warm(self, *args, grid, warmup, **options):
        if min(grid) < 1 or len(grid) > 1:
            raise ValueError(f"{self.__name__} is launched over {grid}: one axis of at least one program is the rule")
        launches.append(f"{self.__module__.split('.')[-1]}.{self.__name__}")
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = warm
    return launches


def calls(long):
    """(what, function, leaves): the public functions at toy sizes, with the sizes of 1 that specialise."""
    import torch
    from nb_kernels.attention import attention, attention_backward, attention_forward, document_starts
    from nb_kernels.attention_paged import attention_paged
    from nb_kernels.attention_paged import cases as paged_cases
    from nb_kernels.grpo_loss import Objective, grpo_loss
    from nb_kernels.linear_logprob import linear_logprob
    from nb_kernels.rms_norm import rms_norm
    from nb_kernels.rotary import rotary
    from nb_kernels.swiglu import swiglu

    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16).requires_grad_()

    triton = {"implementation": "triton"}
    heads = [(20, 4, 128, [5, 300])]
    heads += [(1, 1, 64, [1]), (3, 1, 96, [70]), (2, 1, 256, [33]), (2, 2, 24, [17, 1])] * long
    for N, G, D, lengths in heads:
        q, k, v = (leaf(sum(lengths), h, D) for h in (N, G, G))
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        yield f"attention {N} {G} {D} {lengths}", lambda q, k, v, b=bounds: attention(q, k, v, b, **triton), (q, k, v)

        def blocks(q, k, v, bounds=bounds):
            where = {"start": document_starts(bounds), "q_offset": 0, "k_offset": 0, "scale": 0.1, **triton}
            q, k, v = q.detach(), k.detach(), v.detach()
            out, lse = torch.zeros(q.shape), torch.zeros(q.shape[:2])
            attention_forward(q, k, v, out, lse, **where)
            attention_backward(q, q, k, v, lse, lse, *(torch.zeros(x.shape) for x in (q, k, v)), **where)

        yield f"attention blocks {N} {G} {D} {lengths}", blocks, (q, k, v)
    for name, inputs in paged_cases("cpu", torch.bfloat16):
        for runs in (1, 3) if long else (1,):
            yield f"attention_paged {name} {runs}", lambda i=inputs, r=runs: attention_paged(*i, runs=r, **triton), ()
    one = torch.tensor([[0, 1]]).int(), torch.tensor([17]), torch.tensor([0, 1])
    cache = torch.randn(3, 16, 1, 128, dtype=torch.bfloat16)
    yield "attention_paged of one", lambda: attention_paged(leaf(1, 1, 128), cache, cache, *one, runs=2, **triton), ()
    for T, H in [(7, 2560), (1, 1)] + [(3, 100)] * long:
        leaves = leaf(T, H), leaf(H), leaf(T, H)
        yield f"rms_norm {T} {H}", lambda x, w: rms_norm(x, w, **triton), leaves[:2]
        yield f"rms_norm + residual {T} {H}", lambda x, w, r: rms_norm(x, w, residual=r, **triton), leaves
    for T, N, D, P in [(5, 4, 128, 64), (1, 1, 2, 1)] + [(5, 3, 96, 24)] * long:
        for turned in (False, True):
            positions, turns = torch.arange(T), torch.rand(P)
            given = lambda x, t=positions, f=turns, i=turned: rotary(x, t, f, interleaved=i, **triton)  # noqa: E731
            yield f"rotary {T} {N} {D} {turned}", given, (leaf(T, N, D),)
    for T, F in ((2, 10496), (1, 1)):
        yield f"swiglu {T} {F}", lambda x: swiglu(x, **triton), (leaf(T, 2 * F),)
    for T, H, V in [(70, 64, 1000), (1, 8, 8)]:
        ids = torch.randint(0, V, (T,))
        for entropy in (False, True):
            given = lambda h, w, i=ids, e=entropy: linear_logprob(h, w, i, entropy=e, **triton)  # noqa: E731
            yield f"linear_logprob {T} {H} {V} {entropy}", given, (leaf(T, H), leaf(V, H))
    for T in (70, 1):
        streams = {n: torch.zeros(T) for n in ("advantage", "old", "behaviour", "ref")} | {"weight": torch.ones(T)}
        streams |= {"cu_seqlens": torch.tensor([0, T]), **triton}
        for options in ({"kl": "k3", "kl_coefficient": 0.1}, {"ratio": "sequence"}):
            given = lambda x, s=streams, o=options: grpo_loss(x, options=Objective(**o), **s).loss  # noqa: E731
            yield f"grpo_loss {T} {options}", given, (torch.zeros(T, requires_grad=True),)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--long", action="store_true", help="more head sizes and odd widths")
    parser.add_argument("--triton", help="another version, fetched as compile_check does")
    arguments = parser.parse_args()
    from compile_check import CACHE, fetch

    version = arguments.triton or "installed"
    if os.environ.get("TRITON_INTERPRET") or arguments.triton:  # both are read at the import of triton
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        env["TRITON_CACHE_DIR"] = str(CACHE / f"compiled-{version}")
        if arguments.triton:
            env["PYTHONPATH"] = str(fetch(version))
        return subprocess.run([sys.executable, __file__, *["--long"] * arguments.long], env=env).returncode
    import importlib
    import pkgutil

    import nb_kernels
    import torch

    launches = install()
    for module in pkgutil.iter_modules(nb_kernels.__path__):
        imported = importlib.import_module(f"nb_kernels.{module.name}")
        if hasattr(imported, "INTERPRETED"):
            imported.INTERPRETED = True  # lets CPU tensors in
        if hasattr(imported, "_refuse"):
            imported._refuse = lambda streams: None  # grpo_loss looks whether its results are finite
    for what, function, leaves in calls(arguments.long):
        before = len(launches)
        out = function(*leaves)
        if leaves and out is not None:
            out = out if isinstance(out, tuple) else (out,)
            torch.autograd.grad([o.sum() for o in out], leaves)
        print(f"ok   {what}: {', '.join(launches[before:])}", flush=True)
        if len(launches) == before:
            raise ValueError(f"{what} launched nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
