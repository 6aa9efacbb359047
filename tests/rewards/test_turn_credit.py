"""Turn credit: values by hand, what the mean gradient follows on a stop/continue bandit, and what it does in training."""

import math

import numpy as np
import pytest
import torch

from megatron_nb.rewards.advantage import REDUCTIONS, CreditConfig, credit
from megatron_nb.rewards.episodes import Episode
from megatron_nb.rewards.turn_credit import TurnBaseline
from tests.rewards.made_rollouts import grouped, rollout
from tests.rewards.turn_bandit import END, GO, Bandit

FORMS = {"recipe": "grpo", "unbiased": "rloo", "gigpo": "grpo"}  # turn credit -> its usual advantage


def turn_rows():
    turns = {0: [(2, 0.9), (1, None), (2, 0.2)], 1: [(3, 0.4)], 2: [(1, 1.0), (2, None), (1, -1.0)]}
    return [rollout("g", i, r, (5,) * sum(n for n, _ in turns[i]), turns=turns[i], tools=(1,)) for i, r in enumerate([1, 0, 2])]


# ---------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize("form, advantage", FORMS.items())
def test_a_turn_weight_of_zero_is_the_plain_algorithm_bit_for_bit(form, advantage):
    rows = turn_rows()
    rows[0].turns[0].reward = math.inf  # whatever a critic says
    plain, _ = credit(grouped(*rows), CreditConfig(advantage=advantage))
    turned, _ = credit(grouped(*rows), CreditConfig(advantage=advantage, turn_credit=form, turn_weight=0.0), 0.3)
    for a, b in zip(plain, turned):
        assert a.advantage.tobytes() == b.advantage.tobytes() and a.loss_weight.tobytes() == b.loss_weight.tobytes()
        assert a.count == b.count and a.behaviour_logprob.tobytes() == b.behaviour_logprob.tobytes()
    heavy, _ = credit(grouped(*turn_rows()), CreditConfig(advantage=advantage, turn_credit=form, turn_weight=0.3), 0.3)
    assert any(a.advantage.tobytes() != b.advantage.tobytes() for a, b in zip(plain, heavy))


def test_the_recipe_adds_the_normalised_turn_reward():
    samples, _ = credit(grouped(*turn_rows()), CreditConfig(turn_credit="recipe", turn_weight=0.3))
    r = np.array([0.9, 0.2, 0.4, 1.0, -1.0])
    a = np.array([0.0, -1.0, 1.0]) / (2 / 3) ** 0.5
    added = 0.3 * (r - r.mean()) / r.std()
    assert samples[0].advantage[[2, 6]] == pytest.approx(a[0] + added[:2], abs=1e-5)
    assert samples[1].advantage[2:5] == pytest.approx([a[1] + added[2]] * 3, abs=1e-5)


def test_the_unbiased_credit_is_what_is_still_to_come_against_the_others():
    config = CreditConfig(advantage="rloo", turn_credit="unbiased", turn_weight=0.3, max_turns=10)
    samples, stats = credit(grouped(*turn_rows()), config, turn_baseline=0.1)
    to_go = np.array([[0.8 + 0.1, 0.1], [0.3, 0], [0.9 - 1.1, -1.1]])  # r - 0.1; a tool's turn is none
    added = 0.3 / 10 * (to_go - (to_go.sum(0) - to_go) / 2)
    a = [1 - 2 / 2, 0 - 3 / 2, 2 - 1 / 2]
    assert samples[0].advantage[[2, 6]] == pytest.approx(a[0] + added[0], abs=1e-6)
    assert samples[1].advantage[2] == pytest.approx(a[1] + added[1, 0], abs=1e-6)
    assert samples[2].advantage[[2, 5]] == pytest.approx(a[2] + added[2], abs=1e-6)
    assert stats["turn_baseline"] == 0.1 and stats["turn_reward_mean"] == pytest.approx(0.3)


def test_gigpo_compares_turns_that_began_in_the_same_state():
    """Three rollouts: 0 and 1 were told the same (8), 2 something else (7); all of them began with nothing."""
    rows = []
    for i, (reward, told, answer) in enumerate([(1, 8, 5), (0, 8, 6), (0, 7, 5)]):
        rows.append(rollout("g", i, reward, (5, told, answer), turns=[(1, None)] * 3, tools=(1,)))
    config = CreditConfig(advantage="dr_grpo", turn_credit="gigpo", turn_weight=0.5, discount=0.8)
    samples, _ = credit(grouped(*rows), config)
    a, first = np.array([2, -1, -1]) / 3, 0.8 * np.array([2, -1, -1]) / 3
    for i, later in enumerate([0.5, -0.5, 0.0]):  # the third is alone in its state
        assert samples[i].advantage[[2, 4]] == pytest.approx(a[i] + 0.5 * np.array([first[i], later]), abs=1e-6)
    scaled, _ = credit(grouped(*rows), CreditConfig(turn_credit="gigpo", turn_weight=0.5))
    assert scaled[0].advantage[4] == pytest.approx(scaled[0].advantage[2] - 0.5 * 2**0.5 + 0.5, abs=1e-5)


def test_states_of_histories_hold_all_that_was_told_and_those_of_observations_the_last():
    def told(*results, kind):
        ids = [token for result in results for token in (5, result)] + [6]
        row = rollout("g", 0, 1, ids, turns=[(1, None)] * len(ids), tools=range(1, len(ids), 2))
        return Episode([row]).states(kind)

    assert told(1, 2, kind="history")[-1] == told(1, 2, kind="history")[-1] != told(3, 2, kind="history")[-1]
    assert told(1, 2, kind="observation")[-1] == told(3, 2, kind="observation")[-1] != told(1, 3, kind="observation")[-1]
    assert len(set(told(1, 1, kind="history"))) == 3 and len(set(told(1, 1, kind="observation"))) == 2


def test_turns_go_on_counting_over_the_rows_of_a_rollout():
    whole = [rollout("g", 0, 1, (5,) * 3, turns=[(1, 0.1), (1, 0.5), (1, 0.9)]), rollout("g", 1, 0, (5,), turns=[(1, 0.3)])]
    later = rollout("g", 0, 1, (5, 5), segment=1, turns=[(1, 0.5), (1, 0.9)])
    cut = [rollout("g", 0, 1, (5,), turns=[(1, 0.1)]), later, whole[1]]
    for form in ("recipe", "unbiased"):
        config = CreditConfig(advantage=FORMS[form], turn_credit=form, turn_weight=0.5, max_turns=3)
        a, b = (np.concatenate([s.advantage[2:] for s in credit(grouped(*rows), config, 0.2)[0]]) for rows in (whole, cut))
        assert a.tolist() == b.tolist()


def test_a_useless_turn_is_not_rewarded_for_existing():
    """One more turn whose reward is the baseline changes nothing for the others, and gets only its rollout's advantage."""
    config = CreditConfig(advantage="rloo", turn_credit="unbiased", turn_weight=0.5, max_turns=4)
    short = [rollout("g", 0, 1, (5,), turns=[(1, 0.8)]), rollout("g", 1, 0, (5,), turns=[(1, 0.1)])]
    longer = [rollout("g", 0, 1, (5, 5), turns=[(1, 0.8), (1, 0.4)]), short[1]]
    a, b = (credit(grouped(*rows), config, turn_baseline=0.4)[0] for rows in (short, longer))
    assert a[0].advantage[2] == b[0].advantage[2] and a[1].advantage[2] == b[1].advantage[2]
    assert b[0].advantage[3] == longer[0].advantage == 1.0


def test_the_baseline_is_a_running_mean_that_a_checkpoint_keeps():
    baseline = TurnBaseline(0.5)
    assert baseline.value is None
    for mean in (0.4, None, 0.8):
        baseline.observe(mean)
    assert baseline.value == pytest.approx((0.5 * 0.4 + 0.8) / 1.5)
    again = TurnBaseline(0.5)
    again.restore(baseline.state())
    assert again == baseline
    plain = TurnBaseline(1.0)
    for mean in (1, 2, 6):
        plain.observe(mean)
    assert plain.value == 3


def test_before_there_is_a_baseline_turns_add_nothing_to_the_unbiased_form():
    config = CreditConfig(advantage="rloo", turn_credit="unbiased", turn_weight=0.5)
    for a, b in zip(credit(grouped(*turn_rows()), config)[0], credit(grouped(*turn_rows()), CreditConfig(advantage="rloo"))[0]):
        assert a.advantage.tobytes() == b.advantage.tobytes()


# ---------------------------------------------------------------------------------------------- the mean gradient
TURNS, OMEGA, BASELINE = 3, 0.4, 0.35
THETA = torch.tensor([0.4, -0.7, 0.2], dtype=torch.float64)
TABLE = {GO: [0.2, 0.7, -1.0], END: [0.9, -1.0, 0.6]}  # r_t of an action at a turn; the second END is not judged
BANDIT = Bandit(
    TURNS,
    reward=lambda path: {1: 0.3, 2: 1.0, 3: 0.0}[len(path)] + 0.5 * (path[-1] == GO),
    turn_rewards=lambda path: [None if (t, a) == (1, END) else TABLE[a][t] for t, a in enumerate(path)],
)


def settings(form, advantage=None, reduction="constant", omega=OMEGA):
    return CreditConfig(
        advantage=advantage or FORMS[form], reduction=reduction, max_tokens=1,
        turn_credit=form, turn_weight=omega, max_turns=TURNS,
    )


@pytest.mark.parametrize("two_rows", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_the_mean_gradient_of_the_unbiased_form_is_that_of_its_objective(size, two_rows):
    bandit = Bandit(BANDIT.turns, BANDIT.reward, BANDIT.turn_rewards, two_rows)
    slope = bandit.slope(THETA, OMEGA, BASELINE)
    assert torch.allclose(bandit.mean_gradient(THETA, settings("unbiased"), BASELINE, size), slope, atol=1e-6)
    # turns of one token each: normalising their lengths divides by the number of turns alone
    normalised = bandit.mean_gradient(THETA, settings("unbiased", reduction="turn_constant"), BASELINE, size)
    assert torch.allclose(normalised * TURNS, slope, atol=1e-6)
    assert not torch.allclose(bandit.mean_gradient(THETA, settings("unbiased"), 0.0, size), slope, atol=1e-3)  # another b


def test_what_the_other_forms_follow_is_another_gradient_and_its_bias_is_told(capsys):
    slope, angles = BANDIT.slope(THETA, OMEGA, BASELINE), {}
    lines = [f"gradient of J by finite differences: {_shown(slope)}"]
    cases = [("recipe", "grpo", "constant"), ("recipe", "rloo", "constant"), ("gigpo", "grpo", "constant")]
    cases += [("unbiased", "rloo", reduction) for reduction in REDUCTIONS]
    for form, advantage, reduction in cases:
        mean = BANDIT.mean_gradient(THETA, settings(form, advantage, reduction), BASELINE)
        angles[form, advantage, reduction] = math.degrees(math.acos(min(1.0, float(torch.cosine_similarity(mean, slope, 0)))))
        bias = f"bias {_shown(mean - slope)}, " if reduction == "constant" else ""  # the others have another scale too
        angle = f"{angles[form, advantage, reduction]:.2f} degrees off"
        lines.append(f"{form:8} {advantage:4} {reduction:13} mean {_shown(mean)}, {bias}{angle}")
    with capsys.disabled():
        print("", *lines, sep="\n")
    right = {case for case, angle in angles.items() if angle < 0.01}
    assert right == {("unbiased", "rloo", "constant"), ("unbiased", "rloo", "turn_constant")}
    assert angles["recipe", "rloo", "constant"] > 5


def _shown(values):
    return "[" + ", ".join(f"{value:+.4f}" for value in values.tolist()) + "]"


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_rollout_of_two_rows_pulls_as_it_does_in_one_under_every_reduction(reduction):
    cut = Bandit(BANDIT.turns, BANDIT.reward, BANDIT.turn_rewards, two_rows=True)
    groups = [[(GO, GO, END), (END,)], [(GO, END), (GO, GO, GO)]]
    one, two = (b.gradient(groups, THETA, settings("unbiased", reduction=reduction), BASELINE) for b in (BANDIT, cut))
    assert torch.allclose(one, two, atol=1e-7) and one.abs().max() > 1e-3


# ---------------------------------------------------------------------------------------------- training
def lengths(form, baseline, steps=12):
    """Mean turns before and after training where every turn but the last earns BASELINE, the last 0, and R is always 1."""
    bandit = Bandit(4, reward=lambda path: 1.0, turn_rewards=lambda path: [BASELINE] * (len(path) - 1) + [0.0])
    theta = torch.full((4,), -0.2, dtype=torch.float64)
    config = CreditConfig(
        advantage=FORMS[form], turn_credit=form, turn_weight=0.5, max_turns=4, reduction="constant", max_tokens=1
    )
    before = bandit.mean_length(theta)
    for _ in range(steps):
        theta = theta + 4.0 * bandit.mean_gradient(theta, config, baseline)
    return before, bandit.mean_length(theta)


def test_useless_turns_do_not_lengthen_episodes_in_training_but_do_under_the_recipe_and_with_another_baseline(capsys):
    found = {case: lengths(*case) for case in (("unbiased", BASELINE), ("unbiased", 0.0), ("recipe", BASELINE))}
    with capsys.disabled():
        told = (f"{form:8} b={b}: {before:.3f} -> {after:.3f} turns" for (form, b), (before, after) in found.items())
        print("", *told, sep="\n")
    before, after = found["unbiased", BASELINE]
    assert abs(after - before) < 1e-4
    for before, after in (found["recipe", BASELINE], found["unbiased", 0.0]):
        assert after - before > 0.3
