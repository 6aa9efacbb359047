"""GPU part of bench.py: every kernel at the 3B model's sizes, beside peers, against ceilings measured in the same run.

A measurement is (kernel, case, way, call, forward and backward work, unit): work in FLOPs for matrix kernels, else in bytes
that must move. Attention's backward has 7 products of which 5 are counted, as is usual.
"""

import torch
import triton

TERA, GIGA = 1e12, 1e9


def ceilings():
    """{TFLOP/s: of a large bf16 matrix product, GB/s: of a copy}."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return {
        "TFLOP/s": 2 * 8192**3 / seconds(lambda: a @ b) / TERA,
        "GB/s": 2 * source.numel() / seconds(lambda: target.copy_(source)) / GIGA,
    }


def seconds(call):
    """Median time of a call."""
    return triton.testing.do_bench(call, warmup=50, rep=200, return_mode="median") / 1e3


def both_passes(call, leaves):
    """A call that also runs the backward pass, with a fixed upstream gradient."""
    upstream = []

    def run():
        out = call()
        if not upstream:
            upstream.append(torch.randn_like(out))
        torch.autograd.grad(out, leaves, upstream[0])

    return run


def leaf(*shape, scale=1.0):
    return (scale * torch.randn(*shape, device="cuda", dtype=torch.bfloat16)).requires_grad_()


def linear_logprob_ways(T, V=166144, H=2560):
    from nb_kernels.linear_logprob import linear_logprob

    hidden, weight = leaf(T, H), leaf(V, H, scale=H**-0.5)
    targets = torch.randint(0, V, (T,), device="cuda")
    ways = {
        "ours": lambda: linear_logprob(hidden, weight, targets, implementation="triton"),
        "ours, entropy": lambda: sum(linear_logprob(hidden, weight, targets, entropy=True, implementation="triton")),
        "torch linear_cross_entropy, chunked": lambda: torch.nn.functional.linear_cross_entropy(
            hidden, weight, targets, options=torch.nn.LinearCrossEntropyOptions()
        ),
    }
    if T <= 8192:
        ways["torch, whole logits"] = lambda: torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="none")
        ways["ours, torch path"] = lambda: linear_logprob(hidden, weight, targets, implementation="torch")

    def liger():
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return liger_fused_linear_cross_entropy(hidden, weight, targets)

    ways["Liger fused linear cross entropy"] = liger
    for way, call in ways.items():
        yield "linear_logprob", f"T {T}, V {V}, H {H}", way, call, (hidden, weight), 2 * T * V * H, 8 * T * V * H, "TFLOP/s"


def attention_ways(T, N=20, G=4, D=128):
    from nb_kernels.attention import attention
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = leaf(T, N, D), leaf(T, G, D), leaf(T, G, D)
    bounds = torch.tensor([0, T], device="cuda")
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]

    def sdpa(backend):
        def call():
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)

        return call

    flex_call = []

    def flex():
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if not flex_call:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cuda")
            compiled = torch.compile(flex_attention)
            flex_call.append(lambda: compiled(*heads, block_mask=mask, enable_gqa=True))
        return flex_call[0]()

    ways = {
        "ours": lambda: attention(q, k, v, bounds),
        "torch SDPA, flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "torch SDPA, cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
        "torch FlexAttention": flex,
    }
    work = 4 * T * T * N * D / 2
    for way, call in ways.items():
        yield "attention", f"causal T {T}, {N} heads over {G}, D {D}", way, call, (q, k, v), work, 3.5 * work, "TFLOP/s"


def memory_bound_ways(T=32768, H=2560, F=10496, N=20, D=128):
    from nb_kernels.grpo_loss import Objective, grpo_loss
    from nb_kernels.rms_norm import reference as norm_reference
    from nb_kernels.rms_norm import rms_norm
    from nb_kernels.rotary import frequencies, rotary
    from nb_kernels.swiglu import reference as swiglu_reference
    from nb_kernels.swiglu import swiglu

    x, w = leaf(T, H), leaf(H)
    for way, call in {"ours": lambda: rms_norm(x, w), "torch eager": lambda: norm_reference(x, w)}.items():
        yield "rms_norm", f"T {T}, H {H}", way, call, (x, w), 4 * T * H, 10 * T * H, "GB/s"
    for way, call in {"torch rms_norm": lambda: torch.nn.functional.rms_norm(x, (H,), w)}.items():
        yield "rms_norm", f"T {T}, H {H}", way, call, (x, w), 4 * T * H, 10 * T * H, "GB/s"
    gate = leaf(T, 2 * F)
    for way, call in {"ours": lambda: swiglu(gate), "torch eager": lambda: swiglu_reference(gate)}.items():
        yield "swiglu", f"T {T}, F {F}", way, call, (gate,), 6 * T * F, 16 * T * F, "GB/s"
    q, positions = leaf(T, N, D), torch.arange(T, device="cuda")
    turn = frequencies(D, 7e7, device="cuda")
    turned = lambda: rotary(q, positions, turn)  # noqa: E731
    yield "rotary", f"T {T}, {N} heads of {D}", "ours", turned, (q,), 4 * T * N * D, 8 * T * N * D, "GB/s"
    many = 262144
    streams = torch.randn(6, many, device="cuda")
    logprob = streams[0].clone().requires_grad_()
    options = Objective(kl="k3", kl_coefficient=0.1, importance_cap=2.0)

    def policy(path):
        old, behaviour, ref = streams[0] + 0.1 * streams[3], streams[0] + 0.1 * streams[4], streams[5]
        given = dict(old=old, behaviour=behaviour, ref=ref, options=options, implementation=path)
        return lambda: grpo_loss(logprob, streams[1], streams[2].abs(), **given).loss

    for way, path in (("ours", "triton"), ("ours, torch path", "torch")):
        yield "grpo_loss", f"T {many}, k3, capped importance", way, policy(path), (logprob,), 28 * many, 40 * many, "GB/s"


def run(short=False):
    """Rows {kernel, case, way, unit, forward, both, forward_ms, both_ms, of_ceiling}; `short` for a check of minutes."""
    top = ceilings()
    rows = [{"kernel": "ceiling", "case": unit, "way": "torch", "unit": unit, "both": value} for unit, value in top.items()]
    groups = [lambda: linear_logprob_ways(8192), lambda: attention_ways(8192), memory_bound_ways, lambda: attention_ways(32768)]
    if not short:
        groups += [lambda: linear_logprob_ways(32768)]
    for group in groups:
        for kernel, case, way, call, leaves, forward_work, work, unit in group():
            row = {"kernel": kernel, "case": case, "way": way, "unit": unit}
            per = TERA if unit == "TFLOP/s" else GIGA
            try:
                with torch.no_grad():
                    row["forward_ms"] = 1e3 * seconds(call)
                row["both_ms"] = 1e3 * seconds(both_passes(call, leaves))
                row["forward"] = forward_work / row["forward_ms"] * 1e3 / per
                row["both"] = work / row["both_ms"] * 1e3 / per
                backward = row["both_ms"] - row["forward_ms"]
                row["backward"] = (work - forward_work) / backward * 1e3 / per
                row["of_ceiling"] = row["both"] / top[unit]
            except Exception as error:  # a peer that is absent or refuses must not end the run
                row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            rows.append(row)
            print(line(row), flush=True)
        torch.cuda.empty_cache()
    return rows


def line(row):
    if "error" in row:
        return f"| {row['kernel']} | {row['case']} | {row['way']} | {row['error']} | | | |"
    if "forward" not in row:
        return f"| {row['kernel']} | {row['case']} | {row['way']} | | | {row['both']:.0f} {row['unit']} | |"
    cells = f"{row['forward']:.0f} | {row['backward']:.0f} | {row['both']:.0f} {row['unit']} | {100 * row['of_ceiling']:.0f} %"
    return f"| {row['kernel']} | {row['case']} | {row['way']} | {cells} |"


def markdown(rows):
    head = ["| kernel | case | way | forward | backward | both | of ceiling |", "|" + " --- |" * 7]
    return "\n".join(head + [line(row) for row in rows])
