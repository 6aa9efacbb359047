"""Every spelling that data sets and models use lands on the right rung, and what cannot be known is None."""

from __future__ import annotations

import pytest

from megatron_nb.sandbox.ladder import LADDER, dominant, parse_class, rank

SPELLINGS = {
    "1": ["O(1)", "constant", "1", "o(1)", "O(26)"],
    "log n": ["O(log n)", "O(logN)", "logn", "O(log2(n))", "logarithmic", "O(log^2 n)", "O(log(log(n)))", "O(log_2 n)"],
    "sqrt n": ["O(sqrt(n))", "O(√n)", "O(n^(1/2))", "O(n^0.5)", "O(sqrt n)"],
    "n": ["O(n)", "linear", "O(N)", "O(n+m)", "O(V+E)", "O(|V| + |E|)", "O(len(s))", "O(2n)", "O(n/2)", "O(n α(n))",
          "O(nums.length)"],
    "n log n": ["O(n log n)", "O(N*logN)", "O(n*log(n))", "nlogn", "O(n + m log m)", "O((n+m) log (n+m))", "linearithmic",
                "O(n log^2 n)", "O(log(n!))", "$O(n \\log n)$", "O(n + n log n)"],
    "n sqrt n": ["O(n sqrt(n))", "O(n√n)", "O(n^1.5)", "O(n*sqrt(n))"],
    "n^2": ["O(n^2)", "O(n**2)", "O(n²)", "quadratic", "O(n*n)", "O(n2)", "O(n^{2})", "O(n^2 + n log n)", "O(n^2 - n)"],
    "n^2 log n": ["O(n^2 log n)", "O(n^2*log(n))"],
    "n^3": ["O(n^3)", "cubic", "O(n^2.8)", "O(n³)"],
    "n^k": ["O(n^4)", "O(n^k)", "polynomial"],
    "2^n": ["O(2^n)", "exponential", "np", "O(3^n)", "O(n*2^n)", "O(2**n)", "O(2^(n/2))", "O(k^n)"],
    "n!": ["O(n!)", "factorial", "O(n*n!)", "O(n^n)"],
}  # fmt: skip


@pytest.mark.parametrize(("spelling", "rung"), [(s, rung) for rung, spellings in SPELLINGS.items() for s in spellings])
def test_every_spelling_is_read(spelling, rung):
    assert parse_class(spelling) == rung


@pytest.mark.parametrize(
    "spelling", ["O(n*m)", "O(nm)", "O(n log k)", "O(n*W)", "hello world", "", "O()", "O(n", "unknown", "???"]
)
def test_what_needs_constraints_or_is_no_class_is_none(spelling):
    assert parse_class(spelling) is None


@pytest.mark.parametrize(
    ("expression", "constraints", "rung"),
    [
        ("O(n*m)", {"n": 1e5, "m": 1e5}, "n^2"),
        ("n*m", {"n": 1e5, "m": 20}, "n"),  # m is a constant beside n
        ("n*m", {"n": 1e6, "m": 1e3}, "n sqrt n"),
        ("O(V+E)", {"V": 1e5, "E": 2e5}, "n"),
        ("E log V", {"V": 1e5, "E": 2e5}, "n log n"),
        ("n * 2^k", {"n": 1e3, "k": 20}, "2^n"),
        ("n*m", {"n": 1e5}, None),  # nothing is known of m
        ("n*m*k", {"n": 10, "m": 10, "k": 10}, "n^3"),
    ],
)
def test_several_variables_reduce_by_their_bounds(expression, constraints, rung):
    assert dominant(expression, constraints) == rung


def test_ranks_rise_along_the_ladder_and_other_names_are_refused():
    assert [rank(name) for name in LADDER] == list(range(12))
    with pytest.raises(ValueError, match="O\\(n\\).*not on the ladder"):
        rank("O(n)")


@pytest.mark.parametrize("name", LADDER)
def test_a_rung_is_a_spelling_of_itself(name):
    assert parse_class(name) == name and parse_class(f"O({name})") == name
