"""grpo_loss: exact in float64 by both paths, right in every branch by hand, indifferent to what stands at masked positions."""

import math

import pytest
import torch
import torch.distributed as dist
from nb_kernels import grpo_loss_triton
from nb_kernels.grpo_loss import METRICS, Objective, cases, grpo_loss, reference
from nb_kernels.linear_logprob import linear_logprob

from tests.kernels.allocations import canaries, guarded, launches_under_guard

needs_interpreter = pytest.mark.skipif(not grpo_loss_triton.INTERPRETED, reason="float64 kernels run in the interpreter")
PATHS = ["torch", pytest.param("triton", marks=needs_interpreter)]
torch.manual_seed(0)
CASES = {name: (streams, options) for name, streams, options in cases("cpu", torch.float64)}


def error(found, expected):
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def both(streams, options, path, dtype=torch.float64):
    """(loss, d_logprob, d_entropy) by grpo_loss's gradients, and by autograd of the reference in float64 and in dtype."""
    results = []
    for kind in (dtype, dtype, torch.float64):
        s = {k: v.to(dtype).to(kind) if v.is_floating_point() else v for k, v in streams.items()}
        leaves = s["logprob"].clone().requires_grad_(), s["entropy"].clone().requires_grad_()
        s |= {"logprob": leaves[0], "entropy": leaves[1]}
        if not results:
            loss = grpo_loss(**s, options=Objective(**options), implementation=path).loss
        else:
            loss = reference(**s, **options)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    return results


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
def test_float64_loss_and_gradients_equal_autograd(name, path):
    found, expected, _ = both(*CASES[name], path)
    for f, e in zip(found, expected):
        assert error(f, e) < 1e-12


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("T2500")])
def test_float32_error_is_at_most_twice_torchs_own(name, path):
    found, eager, expected = both(*CASES[name], path, torch.float32)
    floors = 5e-7, 1e-7, 1e-7  # the loss is a sum that cancels, so its last digits are luck on both sides
    for f, t, e, floor in zip(found, eager, expected, floors):
        assert error(f, e) <= max(2 * error(t, e), floor)


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("T63")])
@needs_interpreter
def test_metrics_of_both_paths_agree(name):
    streams, options = CASES[name]
    metrics = [grpo_loss(**streams, options=Objective(**options), implementation=path).metrics for path in ("torch", "triton")]
    assert list(metrics[0]) == list(METRICS)
    for key in METRICS:
        torch.testing.assert_close(metrics[0][key], metrics[1][key], rtol=1e-12, atol=1e-12)


@needs_interpreter
@pytest.mark.parametrize("name", ["dual-clip-k2-T63", "gspo-k3-tis-T2500"])
def test_no_kernel_reads_or_writes_outside_its_buffers(name):
    streams, options = CASES[name]
    expected = grpo_loss(**streams, options=Objective(**options), implementation="torch")
    inputs = {k: guarded(v)[0] for k, v in streams.items()}
    with canaries():
        found = grpo_loss(**inputs, options=Objective(**options), implementation="triton")
    for field in ("loss", "d_logprob", "d_entropy"):
        assert error(getattr(found, field), getattr(expected, field)) < 1e-12


@needs_interpreter
def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    streams, options = CASES["gspo-k1-T63"]
    with launches_under_guard(monkeypatch, grpo_loss_triton, "_sequence_sums", "_token_terms"):
        grpo_loss(**streams, options=Objective(**options), implementation="triton")


@pytest.mark.parametrize("path", PATHS)
def test_strided_bounds_of_sequences_are_those_bounds(path):
    streams, options = CASES["gspo-k1-T63"]
    strided = torch.stack([streams["cu_seqlens"], streams["cu_seqlens"] * 0], 1)[:, 0]
    losses = [
        grpo_loss(**streams | {"cu_seqlens": bounds}, options=Objective(**options), implementation=path).loss
        for bounds in (streams["cu_seqlens"], strided)
    ]
    assert torch.equal(*losses)


def one_token(ratio, advantage, path="torch", behaviour_ratio=None, **options):
    """Loss, its gradient and metrics for one token sampled at log-prob -2."""
    logprob = torch.tensor([-2.0 + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    behaviour = None if behaviour_ratio is None else torch.tensor([-2.0 - math.log(behaviour_ratio)])
    one = torch.ones(1, dtype=torch.float64)
    result = grpo_loss(
        logprob, advantage * one, one, old=-2 * one, behaviour=behaviour, options=Objective(**options), implementation=path
    )
    result.loss.backward()
    return float(result.loss), float(logprob.grad), {k: float(v) for k, v in result.metrics.items() if v}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "ratio, advantage, dual, loss, slope, clipped",
    [
        (1.5, 1.0, None, -1.28, 0.0, "clip_high"),
        (1.5, -1.0, None, 1.5, 1.5, None),
        (0.5, -1.0, None, 0.8, 0.0, "clip_low"),
        (0.5, 1.0, None, -0.5, -0.5, None),
        (1.1, 2.0, None, -2.2, -2.2, None),
        (1.5, -1.0, 1.3, 1.3, 0.0, "clip_dual"),
        (1.5, 1.0, 1.3, -1.28, 0.0, "clip_high"),
    ],
)
def test_the_clip_stops_the_gradient_on_the_right_side(path, ratio, advantage, dual, loss, slope, clipped):
    found_loss, found_slope, metrics = one_token(ratio, advantage, path, dual_clip=dual)
    assert (found_loss, found_slope) == pytest.approx((loss, slope), abs=1e-12)
    assert [name for name in ("clip_low", "clip_high", "clip_dual") if name in metrics] == ([clipped] if clipped else [])


@pytest.mark.parametrize("path", PATHS)
def test_cispo_keeps_the_gradient_of_clipped_tokens(path):
    loss, slope, metrics = one_token(1.5, 1.0, path, objective="cispo")
    assert (loss, slope) == pytest.approx((-1.28 * (-2 + math.log(1.5)), -1.28), abs=1e-12) and metrics["clip_high"] == 1


@pytest.mark.parametrize("path", PATHS)
def test_importance_between_engine_and_trainer_is_truncated_and_always_measured(path):
    _, plain, metrics = one_token(1.1, 1.0, path, behaviour_ratio=3.0)
    assert plain == pytest.approx(-1.1) and metrics["importance"] == pytest.approx(3.0, rel=1e-6)
    assert metrics["kl_behaviour"] == pytest.approx(3 - 1 - math.log(3), rel=1e-6) and "importance_capped" not in metrics
    _, capped, metrics = one_token(1.1, 1.0, path, behaviour_ratio=3.0, importance_cap=2.0)
    assert capped == pytest.approx(-2.2) and metrics["importance_capped"] == 1
    assert one_token(1.1, 1.0, path, behaviour_ratio=0.5, importance_cap=2.0)[1] == pytest.approx(-0.55, rel=1e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "d, value, slope",
    [(0.5, 0.14872, 1 - math.exp(0.5)), (-0.5, 0.10653, 1 - math.exp(-0.5)), (0.0, 0.0, 0.0), (200.0, math.exp(20) - 21, 0.0)],
)
def test_k3_has_its_known_values_and_stays_finite(path, d, value, slope):
    one = torch.ones(1, dtype=torch.float64)
    logprob = (-3 * one).requires_grad_()
    options = Objective(kl="k3", kl_coefficient=1.0)
    result = grpo_loss(logprob, 0 * one, one, ref=(d - 3) * one, options=options, implementation=path)
    result.loss.backward()
    assert float(result.loss) == pytest.approx(value, abs=1e-5, rel=1e-9)
    assert float(logprob.grad) == pytest.approx(slope, abs=1e-12)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("far", ["old", "behaviour", "ref"])
def test_exponents_beyond_the_limit_give_autograds_gradients_of_the_clamp(path, kl, far):
    streams, _ = CASES["dual-clip-k2-T63"]
    streams = streams | {far: streams[far] + torch.linspace(-45, 45, 63, dtype=torch.float64)}
    found, expected, _ = both(streams, dict(kl=kl, kl_coefficient=0.1, kl_grad="unbiased", importance_cap=1e5), path)
    for f, e in zip(found, expected):
        assert error(f, e) < 1e-12


def expected_gradient(kl, kl_grad, off_policy):
    """Of the KL loss, exact: one token per action, weighted by the probability of sampling it. Also that of both KLs."""
    torch.manual_seed(3)
    theta, ref, old = (torch.log_softmax(torch.randn(9, dtype=torch.float64), -1) for _ in range(3))
    theta.requires_grad_()
    logprob = torch.log_softmax(theta, -1)
    sampler = old if off_policy else logprob.detach()
    result = grpo_loss(
        logprob, torch.zeros(9), sampler.exp(), old=old if off_policy else None, ref=ref,
        options=Objective(kl=kl, kl_coefficient=1.0, kl_grad=kl_grad),
    )  # fmt: skip
    forward, backward = (logprob.exp() * (logprob - ref)).sum(), (ref.exp() * (ref - logprob)).sum()
    return [torch.autograd.grad(loss, theta, retain_graph=True)[0] for loss in (result.loss, forward, backward)]


@pytest.mark.parametrize("kl, wanted", [("k1", "zero"), ("k2", "policy || ref"), ("k3", "ref || policy")])
def test_kl_estimators_as_losses_have_their_stated_expected_gradients(kl, wanted):
    found, policy_ref, ref_policy = expected_gradient(kl, "plain", off_policy=False)
    expected = {"zero": torch.zeros(9), "policy || ref": policy_ref, "ref || policy": ref_policy}[wanted]
    torch.testing.assert_close(found, expected.double(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("kl", ["k1", "k3"])
def test_unbiased_kl_gradients_follow_kl_of_policy_to_reference(kl, off_policy):
    found, policy_ref, _ = expected_gradient(kl, "unbiased", off_policy)
    torch.testing.assert_close(found, policy_ref, rtol=1e-10, atol=1e-12)


def test_sums_add_over_micro_batches_and_divide_by_the_global_count():
    logprob, advantage, weight = torch.full((4,), -1.0), torch.tensor([1.0, -1, -1, -1]), torch.ones(4)
    whole = grpo_loss(logprob, advantage, weight)
    parts = [grpo_loss(logprob[i], advantage[i], weight[i]) for i in (slice(0, 1), slice(1, 4))]
    assert float(whole.loss / whole.metrics["tokens"]) == pytest.approx(0.5)
    assert float(sum(p.loss for p in parts) / sum(p.metrics["tokens"] for p in parts)) == pytest.approx(0.5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_fully_masked_streams_of_nan_give_zero_loss_and_zero_gradients(path, ratio):
    nan = torch.full((7,), torch.nan, dtype=torch.float64)
    logprob, entropy = nan.clone().requires_grad_(), nan.clone().requires_grad_()
    options = Objective(ratio=ratio, importance_cap=2.0, kl="k3", kl_coefficient=1.0, entropy_coefficient=1.0)
    result = grpo_loss(
        logprob, nan, torch.zeros(7), old=nan, behaviour=nan, ref=nan, entropy=entropy, cu_seqlens=torch.tensor([0, 3, 7]),
        options=options, implementation=path,
    )  # fmt: skip
    result.loss.backward()
    assert float(result.loss) == 0 and not logprob.grad.any() and not entropy.grad.any()
    assert not any(result.metrics.values())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("stream", ["logprob", "advantage", "weight", "old", "behaviour", "ref", "entropy"])
def test_a_value_that_is_not_finite_where_it_counts_is_refused_by_name_and_position(path, stream, bad):
    streams = {k: torch.full((5,), -1.0) for k in ("logprob", "advantage", "old", "behaviour", "ref", "entropy", "weight")}
    streams[stream][3] = bad
    with pytest.raises(ValueError, match=rf"{stream}\[3\]=-?(nan|inf) must be finite"):
        grpo_loss(**streams, options=Objective(kl="k3"), implementation=path)


@needs_interpreter
@pytest.mark.parametrize("options", [{}, dict(dual_clip=1.5, kl="k3", kl_coefficient=0.1, entropy_coefficient=0.01)])
def test_a_policy_step_from_hidden_states_equals_dense_autograd_by_both_paths(options):
    torch.manual_seed(0)
    T, V, H = 33, 200, 16
    hidden, weight = torch.randn(T, H, dtype=torch.float64), torch.randn(V, H, dtype=torch.float64)
    targets = torch.randint(0, V, (T,))
    log_p = torch.log_softmax(hidden @ weight.T, -1)
    sampled = log_p.gather(1, targets[:, None])[:, 0]
    advantage, noise, drift = torch.randn(3, T, dtype=torch.float64)
    streams = dict(advantage=advantage, weight=noise.abs(), old=sampled + 0.3 * noise, ref=sampled + drift)

    def step(policy):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = policy(*leaves)
        return loss, *torch.autograd.grad(loss, leaves)

    def dense(h, w):
        log_p = torch.log_softmax(h @ w.T, -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return reference(log_p.gather(1, targets[:, None])[:, 0], entropy=entropy, **streams, **options)

    def fused(path):
        def policy(h, w):
            logprob, entropy = linear_logprob(h, w, targets, entropy=True, implementation=path)
            return grpo_loss(logprob, entropy=entropy, **streams, options=Objective(**options), implementation=path).loss

        return policy

    expected = step(dense)
    for path in ("torch", "triton"):
        for found, e in zip(step(fused(path)), expected):
            assert error(found, e) < 1e-12


def split_step(cut, name):
    """This rank's tokens of a case, cut into 2 * world chunks of which it holds one from each end (zig-zag)."""
    streams, options = cut
    world, rank = dist.get_world_size(), dist.get_rank()
    T = len(streams["logprob"])
    edges = [T * i // (2 * world) for i in range(2 * world + 1)]
    index = torch.cat([torch.arange(edges[c], edges[c + 1]) for c in (rank, 2 * world - 1 - rank)])
    local = {k: v[index] for k, v in streams.items() if k != "cu_seqlens"}
    bounds = torch.searchsorted(index, streams["cu_seqlens"])
    result = grpo_loss(**local, cu_seqlens=bounds, group=dist.group.WORLD, options=Objective(**options), implementation=name)
    return index, result.loss, result.d_logprob, result.metrics


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_sequence_ratios_over_context_parallel_ranks_equal_one_process(ranks, world, path):
    if path == "triton" and torch.cuda.is_available():
        pytest.skip("float64 kernels run in the interpreter")
    case = CASES["gspo-k3-tis-T63"]
    whole = grpo_loss(**case[0], options=Objective(**case[1]))
    found = torch.zeros_like(whole.d_logprob)
    results = ranks.run(world, split_step, case, path)
    for index, _, d_logprob, _ in results:
        found[index] = d_logprob
    assert error(found, whole.d_logprob) < 1e-12
    assert error(sum(r[1] for r in results), whole.loss) < 1e-12
    for key in METRICS:
        torch.testing.assert_close(sum(r[3][key] for r in results), whole.metrics[key], rtol=1e-12, atol=1e-12)


ONES = torch.ones(4)
BAD = {
    "shape": (dict(advantage=torch.ones(3)), {}, r"advantage \(3,\)"),
    "logprob type": (dict(logprob=torch.ones(4, dtype=torch.int64)), {}, "float32 or float64"),
    "missing ref": ({}, dict(kl="k3"), "ref is missing"),
    "missing behaviour": ({}, dict(importance_cap=2.0), "behaviour is missing"),
    "missing entropy": ({}, dict(entropy_coefficient=0.1), "entropy is missing"),
    "missing bounds": ({}, dict(ratio="sequence"), "cu_seqlens is missing"),
    "bounds not to T": (dict(cu_seqlens=torch.tensor([0, 3])), dict(ratio="sequence"), "end at T=4"),
    "bounds elsewhere": (dict(cu_seqlens=torch.tensor([0, 4], device="meta")), dict(ratio="sequence"), "must be on cpu"),
    "bounds decrease": (dict(cu_seqlens=torch.tensor([0, 3, 2, 4])), dict(ratio="sequence"), "not decrease"),
    "unknown kl": ({}, dict(kl="k4"), "kl='k4' must be"),
    "unknown ratio": ({}, dict(ratio="turn"), "ratio='turn' must be"),
    "unknown objective": ({}, dict(objective="ppo"), "objective='ppo' must be"),
    "dual clip": ({}, dict(dual_clip=0.9), "dual_clip=0.9 must be above 1"),
    "cispo with dual clip": ({}, dict(objective="cispo", dual_clip=3.0), "no dual clip"),
    "kl coefficient without kl": ({}, dict(kl_coefficient=0.1), "kl_coefficient=0.1 must be 0 without"),
    "kl gradient": ({}, dict(kl="k1", kl_grad="straight"), "kl_grad='straight' must be"),
    "negative clip": ({}, dict(clip_low=-0.1), "clip_low=-0.1 must be at least 0"),
    "implementation": (dict(implementation="cuda"), {}, "implementation='cuda'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_value_and_rule(name):
    change, options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        grpo_loss(**dict(logprob=ONES, advantage=ONES, weight=ONES) | change, options=Objective(**options))
