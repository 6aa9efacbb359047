"""Scores from judged pairs of answers, as Arena-Hard gives them: both orders, strong wins three times, Bradley-Terry.

Two games a question: the model's answer stands second in one and first in the other. A verdict is one of

    A>>B  A>B  A=B  B>A  B>>A         a strong win or loss (>>) counts as three, a tie as half a win

    P(model beats baseline) = sigmoid(strength + style . coefficients)     maximum likelihood over all counted games

With one model and no style that is the weighted mean of its wins. With style it is the win rate at equal style: how much
longer, and how much denser in headers, lists and bold text, an answer is than the other's (arXiv 2406.11939; densities and
the +1 as in Arena-Hard 2.0). Bounds come from resampling questions: the games of one question are not independent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STRONG = 3  # games that a strong win or loss counts as
VERDICTS = {  # how the first answer did, and how much it counts
    "A>>B": (1.0, STRONG), "A>B": (1.0, 1), "A=B": (0.5, 1), "B>A": (0.0, 1), "B>>A": (0.0, STRONG),
    "A<<B": (0.0, STRONG), "A<B": (0.0, 1), "B=A": (0.5, 1), "B<A": (1.0, 1), "B<<A": (1.0, STRONG),
}  # fmt: skip
STYLE = ("length", "headers", "lists", "bold")
COUNTED = {
    "headers": re.compile(r"^#{1,6}\s", re.MULTILINE),
    "lists": re.compile(r"^[^\S\n]*(?:[-*+]|\d+[.)])\s", re.MULTILINE),
    "bold": re.compile(r"\*\*[^*\n]+\*\*|__[^_\n]+__"),
}
CODE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
RIDGE = 1e-6  # of the strengths: keeps a model that always wins finite, and moves no other digit that is shown
STEPS = 100  # of Newton's method


@dataclass(frozen=True)
class Game:
    """One judgment, from the model's side."""

    item: str  # the question
    win: float  # 1, 0.5 or 0
    weight: float = 1.0
    style: tuple[float, ...] = ()  # how the model's answer differs from the baseline's, by STYLE
    player: str = "model"
    opponent: str = "baseline"


def game(item: str, verdict: str, model_first: bool, style: tuple[float, ...] = (), **players: str) -> Game:
    """The game that a verdict decides. ValueError for an unknown verdict."""
    if verdict not in VERDICTS:
        raise ValueError(f"verdict {verdict!r} must be one of {', '.join(VERDICTS)}")
    win, weight = VERDICTS[verdict]
    return Game(item, win if model_first else 1 - win, weight, style, **players)


def style_of(text: str) -> dict[str, float]:
    """Length in words, and counts of markdown outside of code blocks."""
    prose = CODE.sub(" ", text)
    return {"length": float(len(text.split())), **{name: float(len(found.findall(prose))) for name, found in COUNTED.items()}}


def style_difference(one: dict[str, float], other: dict[str, float]) -> tuple[float, ...]:
    """By STYLE, each in [-1, 1]: of the lengths relative to their sum, of the densities relative to their sum + 1."""
    a, b = max(one["length"], 1.0), max(other["length"], 1.0)
    told = [(a - b) / (a + b)]
    for name in STYLE[1:]:
        dense, thin = one[name] / a, other[name] / b
        told.append((dense - thin) / (dense + thin + 1))
    return tuple(told)


def win_rate(games: Sequence[Game], counts: np.ndarray | None = None) -> float:
    """Weighted mean of the wins. counts: how often each game is taken; once by default."""
    weight = np.array([one.weight for one in games]) * (1.0 if counts is None else counts)
    return float(weight @ np.array([one.win for one in games]) / weight.sum()) if weight.sum() else float("nan")


def bradley_terry(
    games: Sequence[Game], anchor: str = "baseline", style: bool = False, counts: np.ndarray | None = None
) -> tuple[dict[str, float], np.ndarray]:
    """(strength of every player in nats above the anchor's, coefficients of the standardised style differences)."""
    names = sorted({name for one in games for name in (one.player, one.opponent)} - {anchor})
    column = {name: place for place, name in enumerate(names)}
    x = np.zeros((len(games), len(names)))
    for row, one in enumerate(games):
        for name, sign in ((one.player, 1.0), (one.opponent, -1.0)):
            if name != anchor:
                x[row, column[name]] += sign
    if style:
        x = np.hstack([x, _standardised(np.array([one.style for one in games]))])
    weight = np.array([one.weight for one in games]) * (1.0 if counts is None else counts)
    found = _logistic(x, np.array([one.win for one in games]), weight)
    return {anchor: 0.0} | dict(zip(names, map(float, found))), found[len(names) :]


def _standardised(features: np.ndarray) -> np.ndarray:
    """[games, features] in units of each feature's standard deviation; not centred, since 0 is equal style."""
    spread = features.std(axis=0)
    return features / np.where(spread > 0, spread, 1.0)


def _logistic(x: np.ndarray, win: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The coefficients that maximise sum weight (win log p + (1 - win) log(1 - p)) - RIDGE/2 |c|^2, p = sigmoid(x c)."""
    c = np.zeros(x.shape[1])

    def loss(c: np.ndarray) -> float:
        z = x @ c
        return float(weight @ (np.logaddexp(0.0, z) - win * z) + RIDGE / 2 * c @ c)

    for _ in range(STEPS):
        p = 1 / (1 + np.exp(-np.clip(x @ c, -500, 500)))
        slope = x.T @ (weight * (p - win)) + RIDGE * c
        bend = (x.T * (weight * p * (1 - p))) @ x + RIDGE * np.eye(len(c))
        step, size, now = np.linalg.solve(bend, slope), 1.0, loss(c)
        while size > 1e-8 and loss(c - size * step) > now:
            size /= 2
        c = c - size * step
        if np.abs(size * step).max() < 1e-12:
            break
    return c


def bootstrap(games: Sequence[Game], rounds: int, seed: int, style: bool = False, share: float = 0.95) -> tuple[float, float]:
    """Bounds of the model's win rate that hold `share` of the rounds; questions are drawn, not games."""
    items = sorted({one.item for one in games})
    place = {item: number for number, item in enumerate(items)}
    of = np.array([place[one.item] for one in games], dtype=np.int64)
    rng, rates = np.random.default_rng(seed), []
    for _ in range(rounds):
        counts = rng.multinomial(len(items), np.full(len(items), 1 / len(items)))[of]
        rates.append(style_win_rate(games, counts) if style else win_rate(games, counts))
    low, high = np.nanquantile(rates, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def style_win_rate(games: Sequence[Game], counts: np.ndarray | None = None) -> float:
    """The model's win rate against the baseline at equal style."""
    strength = bradley_terry(games, style=True, counts=counts)[0]["model"]
    return float(1 / (1 + np.exp(-strength)))


def arena_scores(games: Sequence[Game], rounds: int, seed: int, style: bool = False) -> dict[str, float]:
    """win_rate with its bounds, and what the orders say: win rate by place, and how often the first answer won."""
    if not games:
        return {}
    low, high = bootstrap(games, rounds, seed)
    told = {"win_rate": win_rate(games), "win_rate_low": low, "win_rate_high": high}
    if style:
        low, high = bootstrap(games, min(rounds, 200), seed, style=True)
        told |= {"style_win_rate": style_win_rate(games), "style_win_rate_low": low, "style_win_rate_high": high}
    return told
