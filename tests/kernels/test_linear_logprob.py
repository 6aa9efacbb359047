"""linear_logprob on one process: exact in float64 by both paths, as accurate as torch below, frugal, strict about inputs."""

import pytest
import torch
from nb_kernels import linear_logprob_torch, linear_logprob_triton
from nb_kernels.linear_logprob import Shard, cases, linear_logprob, reference, top_k_logprob

from tests.kernels.allocations import LiveBytes, canaries, guarded, launches_under_guard
from tests.kernels.interpreter_bf16 import bf16_interpreter

needs_interpreter = pytest.mark.skipif(not linear_logprob_triton.INTERPRETED, reason="float64 kernels run in the interpreter")
PATHS = ["torch", pytest.param("triton", marks=needs_interpreter)]
CASES = {name: (inputs, options) for name, inputs, options in cases("cpu", torch.float64)}


def error(found, expected):
    """Largest difference relative to the largest value."""
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def gradients(outputs, weights, inputs):
    return torch.autograd.grad(sum((o * w).sum() for o, w in zip(outputs, weights)), inputs)


def random_like(outputs):
    torch.manual_seed(1)
    return [torch.randn(o.shape, dtype=torch.float64).to(o.dtype) for o in outputs]


def small(T=37, V=300, H=24, dtype=torch.float64):
    torch.manual_seed(T)
    hidden, weight = torch.randn(T, H, dtype=dtype), torch.randn(V, H, dtype=dtype) * 0.7
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, V - 10, (T,))


def small_chunks(monkeypatch):
    """Several chunks of tokens and of vocabulary in both paths, several tiles in each run of the vocabulary."""
    for module in (linear_logprob_torch, linear_logprob_triton):
        monkeypatch.setattr(module, "TOKEN_CHUNK", 16)
        monkeypatch.setattr(module, "VOCAB_CHUNK", 112)
    monkeypatch.setattr(linear_logprob_triton, "FORWARD_CHUNK", 32)
    monkeypatch.setattr(linear_logprob_triton, "PROCESSORS", 1)
    monkeypatch.setitem(linear_logprob_triton.TILES, torch.float64, (16, 32, 16, 4, 1))
    monkeypatch.setattr(linear_logprob_torch, "ONE_PASS_LOGITS", 16 * 300)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
def test_float64_outputs_and_gradients_equal_autograd(monkeypatch, name, path):
    (hidden, weight, targets), options = CASES[name]
    if len(weight) > 100000:  # the interpreter takes a millisecond a tile
        monkeypatch.setitem(linear_logprob_triton.TILES, torch.float64, (16, 4096, 16, 4, 1))
    inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = reference(*inputs, targets, **options)
    found = linear_logprob(*inputs, targets, entropy=True, implementation=path, **options)
    weights = random_like(expected)
    for e, f in zip((*expected, *gradients(expected, weights, inputs)), (*found, *gradients(found, weights, inputs))):
        assert error(f, e) < 1e-12


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("entropy", [False, True])
def test_chunks_of_tokens_and_vocabulary_change_nothing(monkeypatch, path, entropy):
    hidden, weight, targets = small()
    targets[4] = targets[-1] = -100
    expected = reference(hidden, weight, targets, temperature=1.3)[: 1 + entropy]
    weights = random_like(expected)
    small_chunks(monkeypatch)
    found = linear_logprob(hidden, weight, targets, temperature=1.3, entropy=entropy, implementation=path)
    found = found if entropy else (found,)
    inputs = hidden, weight
    for e, f in zip((*expected, *gradients(expected, weights, inputs)), (*found, *gradients(found, weights, inputs))):
        assert error(f, e) < 1e-12


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("entropy", [False, True])
def test_strided_targets_and_the_expanded_gradient_of_a_sum(path, entropy):
    hidden, weight, targets = small()
    expected = reference(hidden, weight, targets)[: 1 + entropy]
    inputs = hidden, weight
    expected = (*expected, *torch.autograd.grad(sum(x.sum() for x in expected), inputs))
    targets = torch.stack([targets * 0, targets], 1)[:, 1]
    found = linear_logprob(*inputs, targets, entropy=entropy, implementation=path)
    found = found if entropy else (found,)
    for e, f in zip(expected, (*found, *torch.autograd.grad(sum(x.sum() for x in found), inputs))):
        assert error(f, e) < 1e-12


@pytest.mark.parametrize("path", PATHS)
def test_the_stride_of_a_single_row_may_be_any_number(path):
    hidden, weight, targets = small(T=1)
    row = hidden.detach().flatten()[:, None].T.requires_grad_()  # strides (1, 1), yet contiguous to torch
    expected, found = (
        (x, *torch.autograd.grad(x.sum(), leaf))
        for x, leaf in (
            (reference(hidden, weight, targets)[0], hidden),
            (linear_logprob(row, weight, targets, implementation=path), row),
        )
    )
    assert row.stride(0) == 1 and all(error(f, e) < 1e-12 for e, f in zip(expected, found))


@needs_interpreter
def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    with launches_under_guard(monkeypatch, linear_logprob_triton, "row_statistics", "target_logits", "logit_gradients"):
        hidden, weight, targets = small()
        linear_logprob(hidden, weight, targets, implementation="triton").sum().backward()


@needs_interpreter
@pytest.mark.parametrize("T", [37, 38, 40])
def test_no_number_of_tokens_asks_for_another_variant_of_the_kernel(monkeypatch, T):
    starts = []

    class Watched(NoLaunch):
        def __getitem__(self, grid):
            return lambda hidden, weight, *rest, **options: starts.extend(x.data_ptr() % 16 for x in rest[:3])

    monkeypatch.setattr(linear_logprob_triton, "row_statistics", Watched())
    linear_logprob(*small(T), implementation="triton")
    assert len(starts) == 3 and not any(starts)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_shifted_logits_lose_no_digits(path, shift):
    hidden, weight, targets = small(T=19, V=300, H=24)
    with torch.no_grad():  # values on a coarse grid make every logit exact, so only the soft-max can lose digits
        hidden.mul_(256).round_().div_(256)[:, 0] = 1.0
        weight.mul_(256).round_().div_(256)[:, 0] = shift
    expected = reference(hidden, weight, targets)
    found = linear_logprob(hidden, weight, targets, entropy=True, implementation=path)
    weights = random_like(expected)
    dh, dw = gradients(found, weights, (hidden, weight))
    eh, ew = gradients(expected, weights, (hidden, weight))
    assert max(error(f, e) for f, e in zip(found, expected)) < 1e-12
    assert error(dw, ew) < 1e-12
    assert error(dh[:, 1:], eh[:, 1:]) < 1e-12  # the shifted column holds a sum that cancels to 0 from 1e4


@pytest.mark.parametrize("path", PATHS)
def test_masked_rows_and_padding_that_hold_nan_change_nothing(path):
    hidden, weight, targets = small()
    targets[3:9] = -100
    clean = linear_logprob(hidden, weight, targets, vocab_size=290, entropy=True, implementation=path)
    weights = random_like(clean)
    dh, dw = gradients(clean, weights, (hidden, weight))
    with torch.no_grad():
        hidden[3:9] = torch.nan
        weight[290:] = torch.inf
    dirty = linear_logprob(hidden, weight, targets, vocab_size=290, entropy=True, implementation=path)
    dirty_dh, dirty_dw = gradients(dirty, weights, (hidden, weight))
    for a, b in zip((*clean, dh, dw), (*dirty, dirty_dh, dirty_dw)):
        assert torch.equal(a, b)
    assert not dirty_dh[3:9].any() and not dirty_dw[290:].any() and not dirty[0][3:9].any() and not dirty[1][3:9].any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("T", [0, 5])
def test_nothing_kept_gives_zeros_and_zero_gradients(path, T):
    hidden, weight, targets = small(T=5)
    hidden = hidden[:T].detach().requires_grad_()
    out = linear_logprob(hidden, weight, torch.full_like(targets[:T], -100), entropy=True, implementation=path)
    dh, dw = gradients(out, [1.0, 1.0], (hidden, weight))
    assert out[0].shape == (T,) and not any(x.any() for x in (*out, dh, dw))


@pytest.mark.parametrize("path", PATHS)
def test_no_kernel_reads_or_writes_outside_its_buffers(monkeypatch, path):
    hidden, weight, targets = small()
    targets[4] = -100
    expected = linear_logprob(hidden, weight, targets, entropy=True, implementation="torch", vocab_size=291)
    weights = random_like(expected)
    expected = (*expected, *gradients(expected, weights, (hidden, weight)))
    inputs, buffers = zip(*map(guarded, (hidden, weight, targets)))
    h, w = (x.detach().requires_grad_() for x in inputs[:2])
    small_chunks(monkeypatch)
    with canaries():
        found = linear_logprob(h, w, inputs[2], entropy=True, implementation=path, vocab_size=291)
        found = (*found, *gradients(found, weights, (h, w)))
    for e, f in zip(expected, found):
        assert error(f, e) < 1e-12
    assert all(torch.equal(b[: len(b) // 2].isnan(), guarded(t)[1][: len(b) // 2].isnan()) for b, t in zip(buffers, inputs))


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", PATHS)
def test_error_is_at_most_twice_torchs_own_in_the_same_dtype(path, dtype):
    hidden, weight, targets = small(T=65, V=1000, H=64)
    with torch.no_grad():
        weight.mul_(0.5)
    low = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
    exact = [x.detach().double().requires_grad_() for x in low]
    expected = reference(*exact, targets, temperature=0.9)
    weights = random_like(expected)
    expected = (*expected, *gradients(expected, weights, exact))
    eager = reference(*low, targets, temperature=0.9)
    eager = (*eager, *gradients(eager, weights, low))
    with bf16_interpreter():
        found = linear_logprob(*low, targets, temperature=0.9, entropy=True, implementation=path)
        found = (*found, *gradients(found, weights, low))
    for name, e, ours, torchs in zip(("logprob", "entropy", "dhidden", "dweight"), expected, found, eager):
        assert error(ours, e) <= 2 * error(torchs, e), name


@pytest.mark.parametrize("path", PATHS)
def test_repeats_are_equal_bit_for_bit(path):
    hidden, weight, targets = small(dtype=torch.float32)

    def once():
        out = linear_logprob(hidden, weight, targets, entropy=True, implementation=path)
        return (*out, *gradients(out, [1.0, 0.1], (hidden, weight)))

    first = once()
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(first, once()))


@pytest.mark.parametrize("law", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_formed_in_the_forward_pass_equal_those_of_two_passes(monkeypatch, dtype, law):
    small_chunks(monkeypatch)
    hidden, weight, targets = small(dtype=dtype)
    targets[7] = -100
    coefficient = torch.randn(len(targets), dtype=torch.float64)
    logprob = linear_logprob(hidden, weight, targets, temperature=0.8, vocab_size=299)
    promise, factor = coefficient, coefficient
    if law:

        def promise(found, rows):
            return factor[rows] * found.exp()

        coefficient = factor * logprob.detach().exp()
    expected = (logprob, *gradients([logprob], [3 * coefficient], (hidden, weight)))
    one, entropy = linear_logprob(
        hidden, weight, targets, temperature=0.8, vocab_size=299, coefficient=promise, entropy=True
    )
    assert not entropy.requires_grad
    found = (one, *gradients([one], [3 * coefficient], (hidden, weight)))
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for e, f in zip(expected, found):
        assert error(f, e.double()) < bound and f.dtype == e.dtype
    whole = linear_logprob(hidden, weight, targets, temperature=0.8, vocab_size=299, entropy=True)[1]
    assert error(entropy, whole.double()) < min(bound, 1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_a_broken_promise_raises(path):
    hidden, weight, targets = small()
    coefficient = torch.ones(len(targets))
    logprob = linear_logprob(hidden, weight, targets, coefficient=coefficient, implementation=path)
    with pytest.raises(ValueError, match="s \\* coefficient"):
        (logprob * torch.linspace(1, 1.001, len(targets))).sum().backward()
    linear_logprob(hidden, weight, targets, coefficient=coefficient, implementation=path).mean().backward()


def test_gradients_that_exist_once_cannot_be_asked_for_twice():
    hidden, weight, targets = small()
    loss = linear_logprob(hidden, weight, targets, coefficient=torch.ones(len(targets))).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match="second backward"):
        loss.backward()


def test_the_promise_computes_the_logits_once(monkeypatch):
    hidden, weight, targets = small(T=64)
    monkeypatch.setattr(linear_logprob_torch, "TOKEN_CHUNK", 16)
    products = {}
    for promise in (None, torch.ones(64)):
        with LiveBytes() as watch:
            linear_logprob(hidden, weight, targets, coefficient=promise).sum().backward()
        products[promise is not None] = sum(n for name, n in watch.calls.items() if name.startswith(("mm", "addmm")))
    assert products == {False: 4 * 4, True: 3 * 4}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("promise", [False, True])
@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_frozen_halves_are_skipped(path, promise, frozen):
    hidden, weight, targets = small(dtype=torch.float32)
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    coefficient = torch.ones(len(targets)) if promise else None
    with LiveBytes() as watch:
        logprob = linear_logprob(hidden, weight, targets, coefficient=coefficient, implementation=path)
        if frozen != "both":
            logprob.sum().backward()
    assert logprob.requires_grad == (frozen != "both")
    assert (hidden.grad is None) == (frozen != "weight") and (weight.grad is None) == (frozen != "hidden")
    products = sum(n for name, n in watch.calls.items() if name.startswith(("mm", "addmm")))
    logits = 1 if path == "triton" else 0  # its own products of logits are kernels, not operators
    expected = {True: 1, False: 2 if promise and path == "torch" else 3}[frozen == "both"]
    assert products == expected - logits - (frozen != "both" and logits)


@pytest.mark.parametrize("path", PATHS)
def test_rows_without_gradient_cost_nothing(monkeypatch, path):
    hidden, weight, targets = small(T=64)
    small_chunks(monkeypatch)
    logprob = linear_logprob(hidden, weight, targets, implementation=path)
    backend = {"torch": linear_logprob_torch, "triton": linear_logprob_triton}[path]
    seen = []
    plain = backend.backward
    monkeypatch.setattr(backend, "backward", lambda *a: (seen.append(a[3]), plain(*a))[1])
    logprob[::16].sum().backward()
    assert seen[0].tolist() == [0, 16, 32, 48]
    assert hidden.grad.abs().sum(1).nonzero()[:, 0].tolist() == [0, 16, 32, 48]


@pytest.mark.parametrize("promise", [False, True])
def test_workspace_does_not_grow_with_tokens_and_logits_are_never_whole(monkeypatch, promise):
    V, H = 1024, 16
    monkeypatch.setattr(linear_logprob_torch, "VOCAB_CHUNK", 256)
    monkeypatch.setattr(linear_logprob_torch, "ONE_PASS_LOGITS", 128 * V)

    def workspace(T):
        hidden, weight, targets = small(T=T, V=V, H=H, dtype=torch.float32)
        coefficient = torch.ones(T) if promise else None
        with LiveBytes() as watch:
            linear_logprob(hidden, weight, targets, coefficient=coefficient, implementation="torch").sum().backward()
        assert watch.largest < max(4 * T * V / 2, 1 << 20)
        return watch.peak - 4 * hidden.numel() - 4 * weight.numel()

    vectors = 4 * 24 * (8192 - 1024)  # two dozen vectors of length T
    assert workspace(8192) - vectors < 1.05 * workspace(1024)


class NoLaunch:
    """Stands for a kernel: takes any launch and does nothing."""

    def __getitem__(self, grid):
        return lambda *arguments, **options: None


def test_the_triton_path_allocates_the_same_for_8k_and_256k_tokens_of_the_3b_model(monkeypatch):
    for kernel in ("row_statistics", "target_logits", "logit_gradients"):
        monkeypatch.setattr(linear_logprob_triton, kernel, NoLaunch())
    monkeypatch.setattr(linear_logprob_triton, "_accumulate", lambda out, a, b: None)
    V, H = 166144, 2560
    shard = Shard(temperature=1.0, first=0, valid=V, group=None, reduce_hidden_grad=True)

    def workspace(T):
        hidden, weight = (torch.empty(n, H, dtype=torch.bfloat16, device="meta") for n in (T, V))
        targets, g = torch.empty(T, dtype=torch.int64, device="meta"), torch.empty(T, device="meta")
        with LiveBytes() as forward:
            _, ent, m, l = linear_logprob_triton.forward(hidden, weight, targets, None, True, shard)
        with LiveBytes() as backward:
            linear_logprob_triton.backward(hidden, weight, targets, None, m, l, ent, g, g, shard, True, True)
        return forward.peak, backward.peak - 2 * T * H

    (forward, backward), (long_forward, long_backward) = workspace(8192), workspace(262144)
    assert long_forward - forward < 4 * 24 * (262144 - 8192) and long_backward < 1.01 * backward
    assert backward < 4 * V * H + 2 * V * H + 2 * 2**29  # dweight summed in float32, dweight itself, a workspace


@needs_interpreter
def test_more_tokens_than_a_grid_axis_can_count(monkeypatch):
    T = 70000
    monkeypatch.setattr(linear_logprob_triton, "FORWARD_CHUNK", 1 << 20)
    monkeypatch.setattr(linear_logprob_triton, "TARGET_BLOCK", 1024)
    monkeypatch.setitem(linear_logprob_triton.TILES, torch.float64, (4096, 16, 16, 4, 1))
    hidden, weight = torch.randn(T, 2, dtype=torch.float64), torch.randn(16, 2, dtype=torch.float64)
    targets = torch.randint(0, 16, (T,))
    found = linear_logprob(hidden, weight, targets, implementation="triton")
    assert error(found, reference(hidden, weight, targets)[0]) < 1e-12


@needs_interpreter
def test_offsets_beyond_32_bits():
    V, H = (1 << 22) + 64, 512  # more than 2^31 elements; pages that nobody writes cost no memory
    hidden, weight = torch.randn(5, H, dtype=torch.float16), torch.empty(V, H, dtype=torch.float16)
    targets = torch.tensor([0, 7, V - 40, V - 1, 1 << 21])
    weight[targets] = torch.randn(5, H, dtype=torch.float16)
    found = torch.empty(5)
    linear_logprob_triton.target_logits[(1,)](
        hidden, weight, targets, found, 5, 0, V, H=H, BT=16, BH=128, ACC=linear_logprob_triton.tl.float32
    )
    torch.testing.assert_close(found, (hidden.float() * weight[targets].float()).sum(1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("k", [1, 5, 290])
def test_top_k_equals_sorting_whole_log_probabilities(monkeypatch, k):
    small_chunks(monkeypatch)
    hidden, weight, _ = small()
    ids, logprob = top_k_logprob(hidden, weight, k, temperature=0.7, vocab_size=290)
    expected = torch.log_softmax(hidden @ weight[:290].T / 0.7, -1).sort(-1, descending=True)
    assert torch.equal(ids, expected.indices[:, :k]) and error(logprob, expected.values[:, :k]) < 1e-12
    with pytest.raises(ValueError, match="k=291 must be in"):
        top_k_logprob(hidden, weight, 291, vocab_size=290)


BAD = {
    "shapes": (lambda h, w, t: (h[:, :-1].contiguous(), w, t, {}), r"must be \[T, H\]"),
    "dtypes": (lambda h, w, t: (h.float(), w, t, {}), "one floating dtype"),
    "integer weights": (lambda h, w, t: (h.long(), w.long(), t, {}), "one floating dtype"),
    "too few targets": (lambda h, w, t: (h, w, t[1:], {}), "one per hidden row"),
    "32-bit targets": (lambda h, w, t: (h, w, t.int(), {}), "int64"),
    "devices": (lambda h, w, t: (h, w.to("meta"), t, {}), "move them to one device"),
    "strided hidden": (lambda h, w, t: (h.T.contiguous().T, w, t, {}), "contiguous"),
    "target too large": (lambda h, w, t: (h, w, t.clone().fill_(300), {}), r"targets\[0\]=300 must be in \[0, 300\)"),
    "target of padding": (lambda h, w, t: (h, w, t.clone().fill_(299), dict(vocab_size=299)), r"in \[0, 299\)"),
    "negative target": (lambda h, w, t: (h, w, t.clone().fill_(-1), {}), r"targets\[0\]=-1"),
    "vocabulary": (lambda h, w, t: (h, w, t, dict(vocab_size=301)), r"vocab_size=301 must be in \[1, 300\]"),
    "temperature": (lambda h, w, t: (h, w, t, dict(temperature=0.0)), "temperature=0.0"),
    "coefficient": (lambda h, w, t: (h, w, t, dict(coefficient=torch.ones(3))), "coefficient"),
    "implementation": (lambda h, w, t: (h, w, t, dict(implementation="cuda")), "implementation='cuda'"),
    "misaligned rows": (
        lambda h, w, t: (h[:, :23].contiguous(), w[:, :23].contiguous(), t, dict(implementation="triton")),
        "not a multiple of 16|TRITON_INTERPRET",
    ),
    "misaligned start": (
        lambda h, w, t: (torch.empty(h.numel() + 1).double()[1:].view_as(h), w, t, dict(implementation="triton")),
        "hidden starts at .* not a multiple of 16|TRITON_INTERPRET",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_value_and_rule(name):
    change, message = BAD[name]
    hidden, weight, targets, options = change(*(x.detach() for x in small()))
    with pytest.raises(ValueError, match=message):
        linear_logprob(hidden, weight, targets, **options)
