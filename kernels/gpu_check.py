"""Prove and time the kernels on a Hopper GPU, in at most eight minutes: python kernels/gpu_check.py [--minutes 8].

Needs torch and Triton only. In this order, while time is left:
  1. checks, each in a process of its own, 16 at a time, so that all variants compile side by side and a fault stops one check:
     outputs and gradients in bf16, fp16, fp32 against float64, held to 1.5 (fp32: 2) times eager torch's error in that dtype;
     blocks merged as context-parallel ranks do; 262144 tokens on sampled rows; 20 repeats that must agree in every bit;
  2. bench.py --short, alone on the GPU, from the compiled kernels' cache;
  3. a short table, last. Exit code 1 if a check fails, dies or finds no time.
--rehearse runs part 1 on the CPU at toy sizes, on the torch paths: it proves this script, not the kernels.
"""
import argparse
import contextlib
import fcntl
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
PROCESSES = 16
REPEATS = 20
ROWS = 4096  # of a case that bench.py times at more: float64 copies of 16 checks share the GPU's memory


def error(found, exact):
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30))


@contextlib.contextmanager
def turn():
    """Checks hold whole references one at a time and give the memory back: a vocabulary's in float64 takes a dozen GB."""
    import torch

    with open(os.environ.get("GPU_CHECK_TURN", os.devnull), "w") as lock:
        if "GPU_CHECK_TURN" in os.environ:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


def passes(function, leaves, *rest):
    """Outputs and gradients; the upstream gradient is the same for every dtype."""
    import torch

    leaves = [x.detach().requires_grad_() for x in leaves]
    outputs = function(*leaves, *rest)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(1)
    upstream = [torch.randn(o.shape, device=o.device, dtype=torch.float64).to(o.dtype) for o in outputs]
    return [o.detach() for o in outputs] + list(torch.autograd.grad(outputs, leaves, upstream))


def against_float64(what, ours, reference, leaves, *rest, to=lambda x: x.double()):
    """Rows (what, our error, eager torch's error)."""
    wide = [to(x) if hasattr(x, "is_floating_point") and x.is_floating_point() else x for x in rest]
    with turn():
        exact = passes(reference, [x.double() for x in leaves], *wide)
        eager = [error(p, e) for p, e in zip(passes(reference, leaves, *rest), exact)]
    found = passes(ours, leaves, *rest)
    with turn():
        return [(f"{what} [{i}]", error(f, e), p) for i, (f, p, e) in enumerate(zip(found, eager, exact))]


def attention_cases(device, dtype, rehearse):
    from nb_kernels.attention import cases

    for name, (q, k, v, bounds) in cases("cpu" if rehearse else device, dtype):
        if len(q) <= 4096:  # the reference holds all scores of a document
            yield name, (q, k, v), bounds


def attention(device, dtype, rehearse, window=None):
    from nb_kernels.attention import attention, reference

    for name, leaves, bounds in attention_cases(device, dtype, rehearse):
        ours, eager = (lambda *x, f=f: f(*x, window=window) for f in (attention, reference))
        yield from against_float64(name, ours, eager, leaves, bounds)


def attention_blocks(device, dtype, rehearse):
    """Two simulated context ranks: four chunks, every pair of them, merged in fp32."""
    import torch
    from nb_kernels.attention import attention_backward, attention_forward, document_starts, reference

    T, lengths, N, G, D = (64, [1, 40, 23], 2, 1, 64) if rehearse else (2048, [1, 1300, 747], 10, 2, 128)
    q, k, v, dout = (torch.randn(T, h, D, device=device, dtype=dtype) for h in (N, G, G, N))
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0)
    start, scale = document_starts(bounds), D**-0.5
    out, lse = torch.zeros(q.shape, device=device), torch.full(q.shape[:2], -math.inf, device=device)
    chunks = [slice(c * T // 4, (c + 1) * T // 4) for c in (0, 3, 1, 2)]
    pairs = [(a, b) for a in chunks for b in chunks]
    pairs = [(a, b, {"start": start[a], "q_offset": a.start, "k_offset": b.start, "scale": scale}) for a, b in pairs]
    for a, b, where in pairs:
        attention_forward(q[a], k[b], v[b], out[a], lse[a], **where)
    delta, grads = (dout.float() * out).sum(-1), [torch.zeros(x.shape, device=device) for x in (q, k, v)]
    for a, b, where in pairs:
        attention_backward(dout[a], q[a], k[b], v[b], lse[a], delta[a], grads[0][a], grads[1][b], grads[2][b], **where)
    results = []
    for kind in (torch.float64, dtype):
        leaves = [x.to(kind).requires_grad_() for x in (q, k, v)]
        y = reference(*leaves, bounds)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dout.to(kind))])
    for i, (found, exact, eager) in enumerate(zip([out, *grads], *results)):
        yield f"4 x 4 blocks [{i}]", error(found, exact), error(eager, exact)


def attention_long(device, dtype, rehearse):
    """262144 tokens in three documents: sampled rows of out and dq, sampled keys of dk and dv, in float64 by hand."""
    import torch
    from nb_kernels.attention import attention_backward, attention_forward, document_starts

    T, N, G, D = (512, 2, 1, 16) if rehearse else (262144, 5, 1, 128)
    first = T * 3 // 4 + 1
    q, k, v, dout = (torch.randn(T, h, D, device=device, dtype=dtype) for h in (N, G, G, N))
    start = document_starts(torch.tensor([0, first, first + 1, T], device=device))
    out, lse = torch.zeros(q.shape, device=device), torch.full(q.shape[:2], -math.inf, device=device)
    where = {"start": start, "q_offset": 0, "k_offset": 0, "scale": D**-0.5}
    attention_forward(q, k, v, out, lse, **where)
    delta, grads = (dout.float() * out).sum(-1), [torch.zeros(x.shape, device=device) for x in (q, k, v)]
    attention_backward(dout, q, k, v, lse, delta, *grads, **where)
    rows = torch.tensor([0, 1, first - 1, first, first + 1, T // 2, T - 2, T - 1])
    sampled = {"out": ([], []), "dq": ([], []), "dk": ([], []), "dv": ([], [])}
    for i in rows.tolist():
        a = int(start[i])
        p = torch.softmax(torch.einsum("nd,jd->nj", q[i].double(), k[a : i + 1, 0].double()) * D**-0.5, -1)
        ds = p * (torch.einsum("nd,jd->nj", dout[i].double(), v[a : i + 1, 0].double()) - delta[i].double()[:, None])
        _add(sampled["out"], out[i], p @ v[a : i + 1, 0].double())
        _add(sampled["dq"], grads[0][i], ds @ k[a : i + 1, 0].double() * D**-0.5)
        b = T if a > first else first + (a == first)  # the end of the document
        s = torch.einsum("ind,d->in", q[i:b].double(), k[i, 0].double()) * D**-0.5
        p = torch.exp(s - lse[i:b].double())
        ds = p * (torch.einsum("ind,d->in", dout[i:b].double(), v[i, 0].double()) - delta[i:b].double())
        _add(sampled["dk"], grads[1][i], torch.einsum("in,ind->d", ds, q[i:b].double())[None] * D**-0.5)
        _add(sampled["dv"], grads[2][i], torch.einsum("in,ind->d", p, dout[i:b].double())[None])
    for name, (found, exact) in sampled.items():
        yield f"T {T} {name}", error(torch.cat(found), torch.cat(exact)), 2 * torch.finfo(dtype).eps


def _add(lists, found, exact):
    for items, item in zip(lists, (found.double(), exact)):
        items.append(item)


def attention_paged(device, dtype, rehearse):
    from nb_kernels.attention_paged import attention_paged, cases, reference

    for name, (q, k, v, *rest) in cases("cpu" if rehearse else device, dtype):
        if int(rest[1].max()) <= 8192:
            with turn():
                exact = reference(q.double(), k.double(), v.double(), *rest)
                eager = error(reference(q, k, v, *rest), exact)
            yield name, error(attention_paged(q, k, v, *rest), exact), eager


def linear_logprob(device, dtype, rehearse):
    """Both outputs and both gradients; the 3B model's vocabulary and width at 1024 tokens."""
    from nb_kernels.linear_logprob import cases, linear_logprob, reference

    for name, (hidden, weight, targets), options in cases("cpu" if rehearse else device, dtype):
        if rehearse and len(weight) > 2000:
            continue
        targets, hidden = targets[:1024], hidden[:1024]
        if "32768" not in name:
            ours = lambda h, w, o=options, t=targets: linear_logprob(h, w, t, entropy=True, **o)  # noqa: E731
            eager = lambda h, w, o=options, t=targets: reference(h, w, t, **o)  # noqa: E731
            yield from against_float64(name, ours, eager, (hidden, weight))


def grpo_loss(device, dtype, rehearse):
    import torch
    from nb_kernels.grpo_loss import Objective, cases, grpo_loss, reference

    for name, streams, options in cases("cpu" if rehearse else device, dtype):
        ours = lambda lp, e, s=streams, o=options: grpo_loss(**s | {"logprob": lp, "entropy": e}, options=Objective(**o)).loss  # noqa: E731
        leaves = streams["logprob"], streams["entropy"]
        wide = {k: x.double() if x.is_floating_point() else x for k, x in streams.items()}
        eager = lambda lp, e, s=streams, w=wide, o=options: reference(  # noqa: E731
            **(w if lp.dtype == torch.float64 else s) | {"logprob": lp, "entropy": e}, **o
        )
        rows = against_float64(name, ours, eager, leaves)
        yield from [(what, found, max(torchs, 4e-7)) for what, found, torchs in rows]  # the last digits of a sum that cancels


def rms_norm(device, dtype, rehearse):
    from nb_kernels.rms_norm import cases, reference, rms_norm

    for name, (x, weight, residual) in cases("cpu" if rehearse else device, dtype):
        leaves = (x[:ROWS], weight) if residual is None else (x[:ROWS], weight, residual[:ROWS])
        ours, eager = (lambda x, w, r=None, f=f: f(x, w, residual=r) for f in (rms_norm, reference))
        yield from against_float64(name, ours, eager, leaves)


def swiglu(device, dtype, rehearse):
    from nb_kernels.swiglu import cases, reference, swiglu

    for name, (x,) in cases("cpu" if rehearse else device, dtype):
        yield from against_float64(name, swiglu, reference, (x[:ROWS],))


def rotary(device, dtype, rehearse):
    """At the model's own angles, which are float32 products."""
    import torch
    from nb_kernels.rotary import cases, rotary

    for name, (x, positions, frequencies, interleaved) in cases("cpu" if rehearse else device, dtype):
        x, positions, frequencies = x[-ROWS:], positions[-ROWS:], frequencies.float()
        angle = (positions[:, None].float() * frequencies)[:, None]
        P = frequencies.numel()
        first, second = (slice(0, 2 * P, 2), slice(1, 2 * P, 2)) if interleaved else (slice(0, P), slice(P, 2 * P))

        def eager(x, angle=angle, first=first, second=second):
            angle, y = angle.to(torch.promote_types(x.dtype, torch.float32)), x.clone()
            a, b, c, s = x[..., first], x[..., second], angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            y[..., first], y[..., second] = a * c - b * s, b * c + a * s
            return y

        ours = lambda x, p=positions, f=frequencies, i=interleaved: rotary(x, p, f, interleaved=i)  # noqa: E731
        yield from against_float64(name, ours, eager, (x,))


def norm(x, weight):
    from nb_kernels.rms_norm import rms_norm

    return rms_norm(x, weight)


def repeats(device, dtype, rehearse):
    """Every kernel 20 times over: 0 where all runs agree in every bit, else 1."""
    import torch
    from nb_kernels.attention import attention
    from nb_kernels.attention_paged import attention_paged, cases
    from nb_kernels.linear_logprob import linear_logprob
    from nb_kernels.swiglu import swiglu

    T, H, V = (40, 32, 1000) if rehearse else (4096, 2560, 166144)
    make = lambda *shape: torch.randn(*shape, device=device, dtype=dtype)  # noqa: E731
    bounds = torch.tensor([0, T // 3, T // 3 + 1, T], device=device)
    targets = torch.randint(0, V, (T,), device=device)
    decode = next(inputs for name, inputs in cases("cpu" if rehearse else device, dtype) if name.startswith("decode"))
    for name, call, leaves in (
        ("attention", lambda q, k, v: attention(q, k, v, bounds), (make(T, 10, 128), make(T, 2, 128), make(T, 2, 128))),
        ("attention_paged", lambda q: attention_paged(q, *decode[1:]), (decode[0],)),
        ("linear_logprob", lambda h, w: linear_logprob(h, w, targets, entropy=True), (make(T, H), make(V, H) * H**-0.5)),
        ("rms_norm", norm, (make(T, H), make(H))),
        ("swiglu", swiglu, (make(T, 2 * H),)),
    ):
        run = (lambda c=call, x=leaves: [c(*x)]) if name == "attention_paged" else (lambda c=call, x=leaves: passes(c, x))
        first = run()
        same = all(torch.equal(a, b) for _ in range(2 if rehearse else REPEATS - 1) for a, b in zip(first, run()))
        yield f"{name}, repeats agree", float(not same), 0.0


CHECKS = {  # what compiles longest goes first
    "linear_logprob": (linear_logprob, ("bfloat16", "float16", "float32")),
    "attention": (attention, ("bfloat16", "float16", "float32")),
    "attention, window 100": (lambda *a: attention(*a, window=100), ("bfloat16",)),
    "attention, blocks": (attention_blocks, ("bfloat16", "float16")),
    "repeats": (repeats, ("bfloat16",)),
    "attention, 262144": (attention_long, ("bfloat16",)),
    "attention_paged": (attention_paged, ("bfloat16", "float16")),
    "grpo_loss": (grpo_loss, ("float32",)),
    "rms_norm": (rms_norm, ("bfloat16", "float16", "float32")),
    "rotary": (rotary, ("bfloat16", "float16", "float32")),
    "swiglu": (swiglu, ("bfloat16", "float16", "float32")),
}


def one(name, dtype, rehearse):
    """Child process: run one check, print its rows as JSON on the last line."""
    import torch

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    kind = getattr(torch, dtype)
    rows = [row for row in CHECKS[name][0]("cpu" if rehearse else "cuda", kind, rehearse)]
    allowed, floor = (2.0, 5e-7) if kind == torch.float32 else (1.5, 0.0)  # one number may be exact in torch by luck
    verdicts = [(what, e, eager, bool(e <= allowed * max(eager, floor if eager else 0.0))) for what, e, eager in rows]
    print("\n" + json.dumps(verdicts))


def line(name, dtype, done, seconds):
    """One row of the table: the worst ratio of a check, or why it has none."""
    title = f"{name} {dtype}"
    if done is None:
        return False, f"FAIL {title:34} no time left"
    rows = [text for text in done.stdout.splitlines() if text.startswith("[[")]
    if done.returncode or not rows:
        return False, f"FAIL {title:34} died with {done.returncode}: {' '.join(done.stderr.split())[-300:]}"
    verdicts = json.loads(rows[-1])
    wrong = [v for v in verdicts if not v[3]]
    what, found, eager, _ = max(wrong or verdicts, key=lambda v: v[1] / max(v[2], 1e-30))
    text = f"{title:34} {len(verdicts):3} compared, {len(wrong)} wrong; worst {what}: {found:.1e}, torch {eager:.1e}"
    return not wrong, f"{'FAIL' if wrong else 'ok  '} {text}; {seconds:.0f} s"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, toy sizes, torch paths")
    parser.add_argument("--only", default="", help="checks whose name holds this; no bench")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return one(*arguments.one, arguments.rehearse)
    deadline = time.monotonic() + 60 * arguments.minutes - 15
    import torch
    import triton

    if not arguments.rehearse and not torch.cuda.is_available():
        print("gpu_check needs a CUDA device; --rehearse runs the script itself on the CPU", file=sys.stderr)
        return 2
    device = "cpu, rehearsal" if arguments.rehearse else torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, Triton {triton.__version__}, ptxas {triton.knobs.nvidia.ptxas.version}"
    print(f"{device}, {versions}, {time.strftime('%Y-%m-%d')}", flush=True)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)

    def check(item):
        begin, left = time.monotonic(), deadline - time.monotonic()
        command = [sys.executable, __file__, "--one", *item, *(["--rehearse"] if arguments.rehearse else [])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=max(left, 0.01))
        except subprocess.TimeoutExpired:
            done = None
        ok, text = line(*item, done, time.monotonic() - begin)
        print(text, flush=True)
        return ok, text

    items = [(name, dtype) for name, (_, dtypes) in CHECKS.items() for dtype in dtypes if arguments.only in name]
    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(min(PROCESSES, os.cpu_count() or 1)) as pool:
        env["GPU_CHECK_TURN"] = lock.name
        results = list(pool.map(check, items))
    bench = ""
    if not arguments.rehearse and not arguments.only:
        print("bench.py --short:", flush=True)
        command = [sys.executable, HERE / "bench.py", "--short"]
        try:  # its rows go to the screen as they come
            subprocess.run(command, env=env, timeout=max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            bench = "bench.py ran out of time: its rows so far stand above\n"
    print("\n" + bench + "\n".join(text for _, text in results))
    failed = sum(not ok for ok, _ in results)
    print(f"{len(results)} checks, {failed} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
