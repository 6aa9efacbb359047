"""Each algorithm, from rewards to the gradient, on a bandit of three tokens; KL estimators; importance weights; refusals."""

import math

import numpy as np
import pytest
import torch

from megatron_nb.data.packing import pack
from megatron_nb.losses.policy_gradient import PolicyConfig, PolicyGradient
from megatron_nb.records import Sample
from megatron_nb.rewards.advantage import CreditConfig, credit
from tests.rewards.made_rollouts import grouped, rollout

THETA = torch.tensor([0.3, -0.5, 0.1], dtype=torch.float64)  # of the policy: softmax over three tokens, whatever stood before
OLD = torch.tensor([0.0, 0.1, -0.2], dtype=torch.float64)
ENGINE = torch.tensor([0.05, 0.0, -0.1], dtype=torch.float64)
ANSWERS = {"a": [([0, 1], 1.0), ([2], 0.0), ([1, 1, 0], 0.3)], "b": [([2, 0], 0.2), ([1], 0.9)]}
CAP = 1.02  # some importance weights are above it


def logp(theta):
    return torch.log_softmax(theta, 0)


def rollouts():
    return [
        rollout(g, i, reward, answer, prompt=(0,), logprob=logp(ENGINE)[answer].tolist())
        for g, answers in ANSWERS.items()
        for i, (answer, reward) in enumerate(answers)
    ]


def gradient(credit_settings, policy_settings, old=OLD, one_pack=True):
    """d (sum / count) / d theta through credit, pack and PolicyGradient."""
    samples, _ = credit(grouped(*rollouts()), CreditConfig(eps=0.0, **credit_settings))
    if old is not None:
        for s in samples:
            s.old_logprob = logp(old)[s.ids].float().numpy()
    theta = THETA.clone().requires_grad_()
    loss = PolicyGradient(PolicyConfig(**policy_settings))
    total, count = 0.0, 0
    for part in [samples] if one_pack else [[s] for s in samples]:
        batch = pack(part)
        p = logp(theta)
        entropy = -(p.exp() * p).sum().expand(len(batch.targets))
        value, n, _ = loss((p[batch.targets], entropy), batch)
        total, count = total + value, count + n
    return torch.autograd.grad(total / count, theta)[0]


def score(token):
    """[3] gradient of the token's log-prob."""
    return torch.eye(3, dtype=torch.float64)[token] - logp(THETA).exp()


def tokens():
    """(group, rollout, its rewards in the group, token, ratio to old, importance, length) of every sampled token."""
    r, q = (logp(THETA) - logp(OLD)).exp(), (logp(OLD) - logp(ENGINE)).exp()
    for g, answers in ANSWERS.items():
        for i, (answer, _) in enumerate(answers):
            for token in answer:
                yield g, i, token, float(r[token]), min(float(q[token]), CAP), answer


def plain(group, i):
    rewards = np.array([reward for _, reward in ANSWERS[group]])
    return rewards[i] - rewards.mean()


def normalised(group, i):
    return plain(group, i) / np.std([reward for _, reward in ANSWERS[group]])


def leave_one_out(group, i):
    rewards = [reward for _, reward in ANSWERS[group]]
    return rewards[i] - np.mean(rewards[:i] + rewards[i + 1 :])


def over_batch(group, i):
    everything = np.array([reward for answers in ANSWERS.values() for _, reward in answers])
    return (ANSWERS[group][i][1] - everything.mean()) / everything.std()


def slope(ratio, advantage, low, high):
    """d min(r A, clip(r) A) / d log r."""
    return 0.0 if (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low) else ratio * advantage


def grpo():  # mean over answers of the mean over their tokens
    return -sum(q * slope(r, normalised(g, i), 0.2, 0.2) * score(t) / len(s) for g, i, t, r, q, s in tokens()) / 5


def dr_grpo():  # sum over tokens, divided by a constant
    return -sum(q * slope(r, plain(g, i), 0.2, 0.2) * score(t) for g, i, t, r, q, _ in tokens()) / (5 * 4)


def dapo():  # mean over all tokens, clipped higher above
    return -sum(q * slope(r, normalised(g, i), 0.2, 0.28) * score(t) for g, i, t, r, q, _ in tokens()) / 9


def gspo():  # the ratio of an answer is the geometric mean of its tokens' ratios
    total = 0.0
    for g, answers in ANSWERS.items():
        for i, (answer, _) in enumerate(answers):
            x = (logp(THETA) - logp(OLD))[answer]
            q = (logp(OLD) - logp(ENGINE))[answer].exp().clamp(max=CAP).mean()
            total = total - q * slope(float(x.mean().exp()), normalised(g, i), 0.1, 0.1) * sum(map(score, answer)) / len(answer)
    return total / 5


def cispo():  # the clipped ratio is a weight; every token keeps its gradient
    return -sum(q * min(r, 1.1) * normalised(g, i) * score(t) for g, i, t, r, q, _ in tokens()) / 9


def rloo():
    return -sum(q * slope(r, leave_one_out(g, i), 0.2, 0.2) * score(t) for g, i, t, r, q, _ in tokens()) / (5 * 4)


def reinforce_pp():
    return -sum(q * slope(r, over_batch(g, i), 0.2, 0.2) * score(t) for g, i, t, r, q, _ in tokens()) / 9


CONSTANT = dict(reduction="constant", max_tokens=4)
ALGORITHMS = {  # name -> (analytic gradient, credit settings, policy settings)
    "grpo": (grpo, dict(reduction="sequence"), dict(clip_high=0.2)),
    "dr_grpo": (dr_grpo, dict(advantage="dr_grpo", **CONSTANT), dict(clip_high=0.2)),
    "dapo": (dapo, {}, {}),
    "gspo": (gspo, dict(reduction="sequence"), dict(ratio="sequence", clip_low=0.1, clip_high=0.1)),
    "cispo": (cispo, {}, dict(objective="cispo", clip_low=1.0, clip_high=0.1)),
    "rloo": (rloo, dict(advantage="rloo", **CONSTANT), dict(clip_high=0.2)),
    "reinforce_pp": (reinforce_pp, dict(advantage="reinforce_pp"), dict(clip_high=0.2)),
}


@pytest.mark.parametrize("one_pack", [True, False])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_on_a_bandit_of_three_tokens_is_the_analytic_one(name, one_pack):
    analytic, credit_settings, policy_settings = ALGORITHMS[name]
    found = gradient(credit_settings, dict(importance_cap=CAP, **policy_settings), one_pack=one_pack)
    assert torch.allclose(found, analytic(), atol=1e-6) and analytic().norm() > 1e-3


def test_the_bandit_meets_every_clip():
    """Else the gradients above would prove little."""
    ratios = [(r, normalised(g, i)) for g, i, _, r, _, _ in tokens()]
    assert any(r > 1.28 and a > 0 for r, a in ratios) and any(r < 0.8 and a < 0 for r, a in ratios)
    assert any(q == CAP for *_, q, _ in tokens()) and any(q < CAP for *_, q, _ in tokens())


@pytest.mark.parametrize("cap", [None, CAP])
@pytest.mark.parametrize("name", ["dapo", "dr_grpo", "cispo", "reinforce_pp", "grpo"])
def test_on_policy_the_coefficient_is_the_gradient(name, cap):
    _, credit_settings, policy_settings = ALGORITHMS[name]
    samples, _ = credit(grouped(*rollouts()), CreditConfig(**credit_settings))
    batch = pack(samples)
    loss = PolicyGradient(PolicyConfig(importance_cap=cap, **policy_settings))
    logprob = logp(THETA)[batch.targets].requires_grad_()
    total, _, metrics = loss((logprob, torch.ones_like(logprob)), batch)
    found = torch.autograd.grad(total, logprob)[0]
    coefficient, every = loss.coefficient(batch), slice(None)
    expected = coefficient if cap is None else coefficient(logprob.detach(), every).where(batch.loss_weight != 0, 0)
    assert torch.allclose(found.float(), expected.float(), rtol=1e-6, atol=0) and found.abs().max() > 0
    assert metrics["ratio"] == metrics["tokens"] == 9


@pytest.mark.parametrize(
    "settings",
    [dict(old="behaviour"), dict(importance_cap=None, ratio="sequence"), dict(ratio="sequence"),
     dict(importance_cap=None, kl="k3", kl_coefficient=0.1), dict(importance_cap=None, entropy_coefficient=0.1)],
)  # fmt: skip
def test_no_coefficient_where_the_gradient_depends_on_the_log_probs(settings):
    samples, _ = credit(grouped(*rollouts()), CreditConfig())
    assert PolicyGradient(PolicyConfig(**settings)).coefficient(pack(samples)) is None
    samples[0].old_logprob = np.zeros(len(samples[0]), np.float32)
    assert PolicyGradient(PolicyConfig(importance_cap=None)).coefficient(pack(samples[:1])) is None


# ---------------------------------------------------------------------------------------------- one row by hand
def one_row(logprob, advantage=1.0, weight=1.0, **streams):
    """A Batch of one trained token for each value: ([T] log-probs as the model would give them, batch)."""
    values = np.atleast_1d(np.asarray(logprob, np.float64))
    n = len(values)
    shaped = {name: np.concatenate([[0], np.broadcast_to(value, n)]).astype(np.float32) for name, value in streams.items()}
    shaped["advantage"] = np.concatenate([[0], np.broadcast_to(advantage, n)]).astype(np.float32)
    weights = np.concatenate([[0], np.broadcast_to(weight, n)]).astype(np.float32)
    sample = Sample(np.arange(n + 1), weights, "row", **shaped)
    return torch.tensor([*values, 0.0], dtype=torch.float64), pack([sample])


def test_truncated_importance_weights_and_mismatch_equal_a_hand_computation():
    behaviour, old = np.array([-1.0, -2.0, -0.5]), np.array([-0.8, -2.3, 0.5])
    logprob, batch = one_row(old, advantage=[1.0, -2.0, 3.0], behaviour_logprob=behaviour, old_logprob=old)
    logprob.requires_grad_()
    total, count, metrics = PolicyGradient(PolicyConfig(importance_cap=1.5))((logprob, torch.ones(4)), batch)
    weights = [math.exp(0.2), math.exp(-0.3), 1.5]  # exp(1) is cut
    assert float(total) == pytest.approx(-(weights[0] - 2 * weights[1] + 3 * weights[2]), rel=1e-6) and count == 3
    slopes = torch.autograd.grad(total, logprob)[0].tolist()
    assert slopes == pytest.approx([-weights[0], 2 * weights[1], -3 * weights[2], 0], rel=1e-6)
    ratios = np.exp(old - behaviour)
    expected = {
        "importance": ratios.sum(), "importance_squared": (ratios**2).sum(), "importance_capped": 1, "mismatch_abs": 1.5,
        "mismatch_kl": (ratios - 1 - (old - behaviour)).sum(),
    }  # fmt: skip
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize("settings", [dict(), dict(importance_cap=None), dict(old="behaviour"), dict(ratio="sequence")])
def test_the_mismatch_is_measured_whatever_the_loss_uses(settings):
    logprob, batch = one_row([-1.0, -2.0], behaviour_logprob=[-1.1, -1.8])
    _, _, metrics = PolicyGradient(PolicyConfig(**settings))((logprob, torch.ones(3)), batch)
    assert float(metrics["mismatch_abs"]) == pytest.approx(0.3, rel=1e-5) and metrics["mismatch_kl"] > 0


def test_a_ratio_against_the_engine_needs_no_importance_weight():
    logprob, batch = one_row([-1.0], behaviour_logprob=[-1.1])
    total, _, _ = PolicyGradient(PolicyConfig(old="behaviour", importance_cap=0.5))((logprob, torch.ones(2)), batch)
    assert float(total) == pytest.approx(-math.exp(0.1), rel=1e-6)


# ---------------------------------------------------------------------------------------------- KL estimators
REFERENCE = torch.tensor([1.6, -1.5, 0.0], dtype=torch.float64)


def exact(direction):
    theta = THETA.clone().requires_grad_()
    p, q = logp(theta), logp(REFERENCE)
    value = {"policy || ref": (p.exp() * (p - q)).sum(), "ref || policy": (q.exp() * (q - p)).sum(), "zero": 0 * p.sum()}
    return torch.autograd.grad(value[direction], theta)[0]


@pytest.mark.parametrize(
    "kl, kl_grad, direction",
    [("k1", "plain", "zero"), ("k2", "plain", "policy || ref"), ("k3", "plain", "ref || policy"),
     ("k1", "unbiased", "policy || ref"), ("k3", "unbiased", "policy || ref")],
)  # fmt: skip
def test_the_expected_gradient_of_a_kl_estimator_lies_within_3_sigma_of_the_exact_one(kl, kl_grad, direction):
    """20000 sampled tokens; each one's gradient is d loss / d logprob times its score."""
    sampled = torch.multinomial(logp(THETA).exp(), 20000, replacement=True, generator=torch.Generator().manual_seed(1))
    own, ref = logp(THETA)[sampled].numpy(), logp(REFERENCE)[sampled].numpy()
    logprob, batch = one_row(own, advantage=0.0, behaviour_logprob=own, ref_logprob=ref)
    logprob.requires_grad_()
    loss = PolicyGradient(PolicyConfig(kl=kl, kl_coefficient=1.0, kl_grad=kl_grad))
    slopes = torch.autograd.grad(loss((logprob, torch.ones_like(logprob)), batch)[0], logprob)[0][:-1]
    each = slopes[:, None] * torch.stack([score(t) for t in range(3)])[sampled]  # [n, 3]
    sigma = each.std(0) / len(each) ** 0.5
    assert ((each.mean(0) - exact(direction)).abs() <= 3 * sigma).all()
    others = [d for d in ("zero", "policy || ref", "ref || policy") if d != direction]
    assert all(((each.mean(0) - exact(d)).abs() > 3 * sigma).any() for d in others), "the directions can be told apart"


# ---------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_a_masked_position_may_hold_anything_and_a_trained_one_makes_the_sum_nan(ratio, bad):
    logprob, batch = one_row([-1.0, -2.0, -3.0], weight=[1, 0, 1], behaviour_logprob=[-1, np.nan, -3])
    loss = PolicyGradient(PolicyConfig(ratio=ratio))
    clean, _, expected = loss((logprob, torch.ones(4)), batch)
    logprob[1] = bad
    dirty, _, metrics = loss((logprob, torch.ones(4)), batch)
    assert torch.equal(clean, dirty) and all(torch.equal(metrics[n], expected[n]) for n in expected)
    logprob[2] = bad
    assert loss((logprob, torch.ones(4)), batch)[0].isnan()


@pytest.mark.parametrize(
    "settings, rule",
    [
        (dict(old="engine"), "policy.old='engine' must be policy or behaviour"),
        (dict(temperature=0.0), "policy.temperature=0.0 must be above 0"),
        (dict(objective="ppo"), "policy.objective='ppo' must be 'clip' or 'cispo'"),
        (dict(kl_coefficient=0.1), "policy.kl_coefficient=0.1 must be 0 without"),
        (dict(objective="cispo", ratio="sequence"), "policy.objective='cispo' has token ratios"),
    ],
)
def test_bad_settings_are_refused_with_the_rule(settings, rule):
    with pytest.raises(ValueError, match=rule):
        PolicyConfig(**settings)
