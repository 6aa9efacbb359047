"""The draw of the native engine against the distribution it draws from."""

import math

import pytest
import torch

from megatron_nb.rollout.engine import Sampling
from megatron_nb.rollout.native_sampling import draw, uniform

TOY = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -0.4, 0.9])  # a vocabulary of seven, padded to 256
DRAWS = 4000


def _logits(rows: int) -> torch.Tensor:
    logits = torch.full((rows, 256), 50.0)  # a padding row that were sampled would be sampled always
    logits[:, : len(TOY)] = TOY
    return logits


def _draws(sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    uniforms = [uniform(seed, 17) for seed in range(DRAWS)]
    return draw(_logits(DRAWS), [sampling] * DRAWS, uniforms, len(TOY))


def _chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * len(tokens)
    counts = torch.bincount(tokens, minlength=len(probabilities))
    seen = expected > 0
    assert not counts[~seen].any()
    return float(((counts - expected)[seen] ** 2 / expected[seen]).sum())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_sampled_frequencies_match_the_softmax(temperature):
    tokens, logprobs = _draws(Sampling(1, temperature=temperature))
    expected = (TOY / temperature).log_softmax(0)
    assert torch.allclose(logprobs, expected[tokens], atol=1e-6)
    assert _chi_square(tokens, expected.exp()) < 22.5  # six degrees of freedom, p = 0.001
    assert _chi_square(tokens, (TOY / temperature / 1.3).softmax(0)) > 22.5  # another one would be seen


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (dict(top_k=2), [2, 4]),
        (dict(top_k=1), [2]),
        (dict(top_p=0.5), [2, 4]),  # softmax: 0.45, 0.18, 0.15, ...: the one that crosses 0.5 still belongs to the set
        (dict(top_p=0.01), [2]),
        (dict(top_k=3, top_p=0.75), [2, 4]),  # of the three kept 0.57 + 0.23 reach 0.75
        (dict(top_k=100), list(range(7))),
    ],
)
def test_truncation_keeps_the_best_tokens_in_proportion_and_reports_the_plain_logprob(settings, kept):
    tokens, logprobs = _draws(Sampling(1, **settings))
    plain = TOY.softmax(0)
    truncated = torch.zeros_like(plain)
    truncated[kept] = plain[kept]
    assert _chi_square(tokens, truncated / truncated.sum()) < 22.5
    assert torch.allclose(logprobs, plain.log()[tokens], atol=1e-6)


def test_greedy_takes_the_largest_whatever_the_number_says():
    tokens, logprobs = _draws(Sampling(1, temperature=0))
    assert (tokens == 2).all()
    assert torch.allclose(logprobs, TOY.log_softmax(0)[2], atol=1e-6)


def test_rows_of_one_batch_do_not_see_each_other():
    kinds = [Sampling(1), Sampling(1, temperature=0), Sampling(1, top_k=2), Sampling(1, temperature=0.5, top_p=0.9)]
    samplings = [kinds[i % 4] for i in range(64)]
    uniforms = [uniform(i, 3) for i in range(64)]
    together = draw(_logits(64), samplings, uniforms, len(TOY))
    for i in range(64):
        alone = draw(_logits(1), samplings[i : i + 1], uniforms[i : i + 1], len(TOY))
        assert int(alone[0]) == int(together[0][i])
        assert float(alone[1]) == float(together[1][i])


def test_extreme_numbers_and_logits_stay_inside_the_vocabulary():
    for number in (0.0, 1 - 2.0**-48):
        for logits in (torch.full((1, 128), -1e30), torch.linspace(-80, 80, 128)[None].clone()):
            logits[0, 100] = 0.0
            token, logprob = draw(logits, [Sampling(1)], [number], 101)
            assert 0 <= int(token) < 101
            assert math.isfinite(float(logprob))


def test_numbers_depend_on_seed_and_position_and_are_even():
    numbers = torch.tensor([uniform(seed, position) for seed in (0, 1, -5, 2**70) for position in range(1000)])
    assert len(numbers.unique()) == 4000
    assert uniform(3, 8) == uniform(3, 8)
    assert abs(float(numbers.mean()) - 0.5) < 0.02
    assert float((numbers.histc(10, 0, 1) - 400).square().sum() / 400) < 27.9  # chi-square, nine degrees, p = 0.001
