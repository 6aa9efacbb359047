"""The ladder of time complexities, and how the many spellings of a class are read.

A class is read as a sum of terms, each a product of powers of variables, of logarithms, exponentials and factorials.
Logarithms beyond those of the ladder are dropped (n log^2 n is "n log n", log log n is "log n"); a power between two
rungs counts as the upper one (n^2.8 is "n^3"); n^4 and higher are "n^k"; every exponential is "2^n".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

LADDER: tuple[str, ...] = (
    *("1", "log n", "sqrt n", "n", "n log n", "n sqrt n", "n^2", "n^2 log n", "n^3", "n^k", "2^n", "n!"),
)
UNKNOWN = "unknown"
WORDS = {  # labels that data sets use in place of a formula
    "constant": "1", "logarithmic": "log n", "sqrt": "sqrt n", "square root": "sqrt n", "linear": "n",
    **dict.fromkeys(["linearithmic", "loglinear", "log-linear", "log linear", "quasilinear"], "n log n"),
    "quadratic": "n^2", "cubic": "n^3", "polynomial": "n^k", "exponential": "2^n", "factorial": "n!",
    **dict.fromkeys(["np", "np-hard", "np hard"], "2^n"), "n^k": "n^k", "n^c": "n^k",
}  # fmt: skip
TOKEN = re.compile(r"\d+(?:\.\d+)?|log|lg|ln|sqrt|min|max|alpha|[a-z_]+?(?=log|lg\b|ln\b|sqrt|alpha)|[a-z_]+|[-+*/^!(),]")
FUNCTIONS = {"log", "lg", "ln", "sqrt", "min", "max", "alpha"}
CONSTANT_BOUND = 100.0  # a variable that never exceeds this is a constant beside one that reaches a thousand times it
RENAMED = str.maketrans({"²": "^2", "³": "^3", "√": "sqrt", "×": "*", "·": "*", "⋅": "*", "−": "-", "α": "alpha", "|": " ",
                         "{": "(", "}": ")", "[": "(", "]": ")", "\\": " ", "$": " "})


@dataclass
class Growth:
    """A term: factorial and exponential parts (0 or 1), and per variable its power and the power of its logarithm."""

    factorial: int = 0
    exponential: int = 0
    powers: dict[str, float] = field(default_factory=dict)
    logs: dict[str, float] = field(default_factory=dict)

    def times(self, other: Growth, sign: int = 1) -> Growth:
        return Growth(
            max(self.factorial, other.factorial),
            max(self.exponential, other.exponential),
            {v: self.powers.get(v, 0) + sign * other.powers.get(v, 0) for v in {**self.powers, **other.powers}},
            {v: self.logs.get(v, 0) + sign * other.logs.get(v, 0) for v in {**self.logs, **other.logs}},
        )

    def to_the(self, power: float) -> Growth:
        powers, logs = ({v: p * power for v, p in part.items()} for part in (self.powers, self.logs))
        return Growth(self.factorial, self.exponential, powers, logs)

    def variables(self) -> set[str]:
        return {v for v, p in [*self.powers.items(), *self.logs.items()] if p}

    def rung(self, share: Mapping[str, float] | None = None) -> str:
        """The class of the term when every variable v grows like n ** share[v] (all like n by default)."""
        weight = (lambda v: 1.0) if share is None else share.__getitem__
        power = sum(p * weight(v) for v, p in self.powers.items())
        log = sum(p for v, p in self.logs.items() if weight(v))
        if self.factorial or self.exponential:
            return "n!" if self.factorial else "2^n"
        if power <= 0:
            return "log n" if power == 0 and log > 0 else "1"
        for limit, plain, with_log in [
            *((0.5, "sqrt n", "sqrt n"), (1, "n", "n log n"), (1.5, "n sqrt n", "n sqrt n")),
            *((2, "n^2", "n^2 log n"), (3, "n^3", "n^3")),
        ]:
            if power <= limit + 1e-9:
                return with_log if log > 0 and power > limit - 0.25 else plain
        return "n^k"


def rank(name: str) -> int:
    """The place of a class on the ladder, 0 the fastest. ValueError for a name that is not on it."""
    if name not in LADDER:
        raise ValueError(f"complexity {name!r} is not on the ladder: {', '.join(LADDER)}; read other spellings by parse_class")
    return LADDER.index(name)


def parse_class(text: str) -> str | None:
    """The ladder's class of a spelling such as "O(N*log(N))", "nlogn", "quadratic", "O(n+m)"; None when it is not one.

    Several variables are read only where no constraints are needed: a sum of terms of one variable each.
    """
    return dominant(text, {})


def dominant(text: str, constraints: Mapping[str, float]) -> str | None:
    """The class of an expression of several variables, by the largest values that the constraints allow each of them.

    The variable with the largest bound is n; one whose bound is near to it grows like n, one near its root like sqrt n,
    one that stays under a hundred is a constant. None when a product holds a variable of which nothing is known.
    """
    plain = re.sub(r"\s+", " ", str(text).strip().lower().translate(RENAMED)).strip(" .")
    plain = re.sub(r"\bn(\d)\b", r"n^\1", plain.replace("**", "^").replace("theta", "o"))
    plain = re.sub(r"\^ ?\( ?(\d+(?:\.\d+)?) ?(?:/ ?(\d+) ?)?\)", lambda m: f"^{float(m[1]) / float(m[2] or 1)}", plain)
    plain = re.sub(r"(log|lg) ?_ ?\(?(\d+|e)\)?", r"\1 ", plain)
    bare = plain
    while match := re.fullmatch(r"(?:time complexity:? ?)?(?:o|θ|ω) ?\((.*)\)", plain):
        plain = match[1].strip()
    if plain in WORDS:
        return WORDS[plain]
    if plain == bare and re.fullmatch(r"[a-z_ ]{3,}", plain) and not re.search(r"log|sqrt|lg|ln", plain):
        return None  # prose, not a formula
    plain = re.sub(r"len ?\(([a-z_]+)\)|([a-z_]+)\.length", r" \1\2 ", plain)
    try:
        terms = _Reader(plain).all()
    except (ValueError, OverflowError):
        return None
    variables = set().union(*(term.variables() for term in terms))
    known = {name.lower(): float(bound) for name, bound in constraints.items()}
    if variables <= known.keys() and variables:
        shares = {v: _share(known[v], max(known.values())) for v in variables}
        if None in shares.values():
            return None
        return max((term.rung(shares) for term in terms), key=rank)
    alone = {v: max((rank(t.rung()) for t in terms if t.variables() == {v}), default=-1) for v in variables}
    if any(rank(t.rung()) > alone[v] for t in terms if len(t.variables()) > 1 for v in t.variables()):
        return None
    return max((term.rung() for term in terms), key=rank)


def _share(bound: float, largest: float) -> float | None:
    """How a variable with this bound grows beside the one with the largest: 1, 1/2, 0 as a power of it; None between."""
    if bound <= CONSTANT_BOUND and largest >= 1000 * bound:
        return 0.0
    share = math.log(max(bound, 2)) / math.log(max(largest, 2))
    return 1.0 if share >= 0.75 else 0.5 if 0.4 <= share <= 0.6 else None


class _Reader:
    """Recursive descent over the tokens of an expression; each level gives the list of the terms of a sum."""

    def __init__(self, text: str):
        self.tokens: list[str] = []
        for token in TOKEN.findall(text):
            letters = token.isalpha() and token not in FUNCTIONS and len(token) == 2
            self.tokens += list(token) if letters else [token]  # "nm" is n times m, longer words are one variable
        if not self.tokens or re.sub(r"\s", "", "".join(self.tokens)) != re.sub(r"\s", "", text):
            raise ValueError(text)

    def all(self) -> list[Growth]:
        terms = self.sum()
        if self.tokens:
            raise ValueError(self.tokens)
        return terms

    def peek(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def take(self, *wanted: str) -> str:
        if not self.tokens or (wanted and self.tokens[0] not in wanted):
            raise ValueError(self.tokens)
        return self.tokens.pop(0)

    def sum(self) -> list[Growth]:
        terms = self.product()
        while self.peek() in ("+", "-", ","):
            more = self.take() != "-"
            following = self.product()
            terms = terms + following if more else terms
        return terms

    def product(self) -> list[Growth]:
        terms = self.power()
        while self.peek() not in ("", "+", "-", ",", ")"):
            sign = 1
            if self.peek() in ("*", "/"):
                sign = 1 if self.take() == "*" else -1
            factors = self.power()
            if sign < 0:
                factors = [f for f in factors if not f.exponential and not f.factorial] or [Growth()]
            terms = [a.times(b, sign) for a in terms for b in factors]
        return terms

    def power(self) -> list[Growth]:
        name = self.peek()
        if name in FUNCTIONS:
            return self.function()
        number = float(name) if name[:1].isdigit() else None
        terms = self.atom()
        if self.peek() == "!":
            self.take()
            return [Growth(factorial=1)] if any(t.variables() for t in terms) else terms
        if self.peek() != "^":
            return terms
        self.take()
        exponent_text = self.peek()
        exponent = self.power()
        grows = any(t.variables() or t.exponential or t.factorial for t in exponent)
        if not grows:
            value = float(exponent_text)  # ValueError: the power is not a number
            return [t.to_the(value) for t in terms]
        if number is None and any(t.variables() for t in terms):
            same = set().union(*(t.variables() for t in terms)) & set().union(*(t.variables() for t in exponent))
            return [Growth(factorial=1) if same else Growth(exponential=1)]
        return [Growth(exponential=1)]

    def atom(self) -> list[Growth]:
        token = self.take()
        if token == "(":
            terms = self.sum()
            self.take(")")
            return terms
        if token[0].isdigit():
            return [Growth()]
        if token[0].isalpha():
            return [Growth(powers={token: 1.0})]
        raise ValueError(token)

    def function(self) -> list[Growth]:
        name = self.take()
        power = 1.0
        is_log = name in ("log", "lg", "ln")
        if is_log and self.peek() == "^":  # log^2 n
            self.take()
            power = float(self.take())
        elif is_log and self.peek() in ("2", "10") and len(self.tokens) > 1 and self.tokens[1] not in ")+-*/,":
            self.take()  # the base
        argument = self.function() if self.peek() in FUNCTIONS else self.atom()
        if self.peek() == "^":  # log(n)^2
            self.take()
            power *= float(self.take())
        if name == "sqrt":
            return [t.to_the(0.5) for t in argument]
        if name == "alpha":
            return [Growth()]
        if name in ("min", "max"):
            return argument
        return [_log(t).to_the(power) for t in argument]


def _log(term: Growth) -> Growth:
    if term.factorial:
        return Growth(powers={"n": 1.0}, logs={"n": 1.0})
    if term.exponential:
        return Growth(powers={"n": 1.0})
    grows = [v for v, p in [*term.powers.items(), *term.logs.items()] if p > 0]
    return Growth(logs={grows[0]: 1.0}) if grows else Growth()

