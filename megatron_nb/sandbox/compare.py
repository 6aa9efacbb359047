"""Is an output right, and if not, what is the first thing wrong with it? Runs on the host, on plain data only."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from megatron_nb.sandbox.harness_wire import LONG_INT

MODES = ("tokens", "lines", "numbers", "exact")
NUMBER = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,6})?")
SHOWN = 80  # characters of a value in a difference


@dataclass(frozen=True)
class CompareConfig:
    """How outputs are compared. Function results are compared as values, whatever the mode says of text."""

    mode: str = "tokens"  # tokens: between white space, as text | lines: less white space at their ends | numbers: tokens, two
    #                       that are numbers by value | exact: byte by byte
    absolute: float = 0.0  # tolerances of numbers: |found - expected| <= absolute + relative * |expected|
    relative: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"compare.mode={self.mode!r} must be one of {', '.join(MODES)}")
        for name in ("absolute", "relative"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise ValueError(f"compare.{name}={value!r} must be a finite number of at least 0")


def difference(found: bytes, expected: bytes, config: CompareConfig) -> str | None:
    """None if the output is right, else a line that says where it first is not."""
    if config.mode == "exact":
        if found == expected:
            return None
        at = next((i for i, (a, b) in enumerate(zip(found, expected)) if a != b), min(len(found), len(expected)))
        return f"byte {at}: expected {_text(expected[at:])}, found {_text(found[at:])}"
    if config.mode == "lines":
        mine, right = _lines(found), _lines(expected)
        if mine == right:
            return None
        at = next((i for i, (a, b) in enumerate(zip(mine, right)) if a != b), min(len(mine), len(right)))
        return _told(at, mine[at] if at < len(mine) else None, right[at] if at < len(right) else None)
    mine, right = found.split(), expected.split()
    if mine == right:
        return None
    by_value = config.mode == "numbers" or config.absolute > 0 or config.relative > 0
    both = enumerate(zip(mine, right))
    at = next((i for i, (a, b) in both if a != b and not (by_value and _same_number(a, b, config))), None)
    if at is None:
        if len(mine) == len(right):
            return None
        at = min(len(mine), len(right))
    return _told(*_line_of(found, at), _line_of(expected, at)[1])


def _lines(text: bytes) -> list[bytes]:
    lines = [line.rstrip() for line in text.split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _line_of(text: bytes, token: int) -> tuple[int, bytes | None]:
    """(its number from 0, the line) that holds the token of this number; None beyond the end."""
    number = -1
    for number, line in enumerate(text.split(b"\n")):
        token -= len(line.split())
        if token < 0:
            return number, line.rstrip()
    return number, None


def _told(line: int, found: bytes | None, expected: bytes | None) -> str:
    if expected is None:
        return f"line {line + 1}: expected the end of the output, found {_text(found)}"
    if found is None:
        return f"line {line + 1}: expected {_text(expected)}, found the end of the output"
    return f"line {line + 1}: expected {_text(expected)}, found {_text(found)}"


def _text(raw: bytes) -> str:
    text = raw[: 4 * SHOWN].decode("utf-8", "replace")
    return repr(text[:SHOWN]) + ("..." if len(text) > SHOWN else "")


def _same_number(found: bytes, expected: bytes, config: CompareConfig) -> bool:
    """Two tokens by value, in decimal: no digit of a long number is lost."""
    if not (NUMBER.fullmatch(found) and NUMBER.fullmatch(expected)):
        return False
    try:
        a, b = Decimal(found.decode()), Decimal(expected.decode())
        if a == b:
            return True
        return abs(a - b) <= Decimal(config.absolute) + Decimal(config.relative) * abs(b)
    except ArithmeticError:  # exponents beyond what decimals of this precision hold
        return False


class _Short(reprlib.Repr):
    def repr_int(self, value: int, level: int) -> str:
        if -LONG_INT < value < LONG_INT:
            return super().repr_int(value, level)
        return f"<integer of {value.bit_length()} bits>"


def short(value: object) -> str:
    """The value as Python writes it, shortened."""
    writer = _Short()
    writer.maxstring = writer.maxother = writer.maxlong = SHOWN
    text = writer.repr(value)
    return text if len(text) <= 2 * SHOWN else text[: 2 * SHOWN] + "..."


def value_difference(found: object, expected: object, config: CompareConfig) -> str | None:
    """None if a function's result is right, else where it first differs.

    As in Python, but tuples are lists (JSON has no other), keys that are all text also match numbers of the same text (JSON
    again), and where a float takes part numbers may differ by 1e-9 of the expected one, or by the tolerances if given. A whole
    number is exact: a float in its place may be off by 1e-6 at most, whatever its size.
    """
    try:
        if type(found) is type(expected) and found == expected:
            return None
        path, a, b = next(_differences(found, expected, config, ""), (None, None, None))
    except (RecursionError, ArithmeticError) as error:  # deeply nested; a decimal's signalling NaN
        return f"the value cannot be compared: {type(error).__name__}"
    if path is None:
        return None
    return f"{f'at {path}: ' if path else ''}expected {b if isinstance(b, _Length) else short(b)}, found {short(a)}"


class _Length(str):
    """Words about the expected value that stand for the value."""


NUMBERS = (int, float, complex, Decimal, Fraction)


def _differences(found: object, expected: object, config: CompareConfig, path: str) -> Iterator[tuple[str, object, object]]:
    """(where, found, expected) of what differs, the first one first."""
    if isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)):
        for i, (a, b) in enumerate(zip(found, expected)):
            yield from _differences(a, b, config, f"{path}[{i}]")
        if len(found) != len(expected):
            yield path, found, _Length(f"{len(expected)} elements, {short(expected)}")
    elif isinstance(found, dict) and isinstance(expected, dict):
        if found.keys() != expected.keys() and all(isinstance(key, str) for key in expected):
            found = {_key_text(key): value for key, value in found.items()}
        for key, b in expected.items():
            if key in found:
                yield from _differences(found[key], b, config, f"{path}[{short(key)}]")
        if found.keys() != expected.keys():
            yield path, found, expected
    elif isinstance(found, (float, complex)) or isinstance(expected, (float, complex)):
        if not (isinstance(found, NUMBERS) and isinstance(expected, NUMBERS) and _close(found, expected, config)):
            yield path, found, expected
    elif (config.absolute or config.relative) and isinstance(found, NUMBERS) and isinstance(expected, NUMBERS):
        if not _close(found, expected, config):
            yield path, found, expected
    elif found != expected:
        yield path, found, expected


def _key_text(key: object) -> object:
    return short(key) if isinstance(key, (int, float)) and not isinstance(key, bool) else key


def _close(found, expected, config: CompareConfig) -> bool:
    if found == expected or (found != found and expected != expected):  # a NaN equals a NaN
        return True
    relative = config.relative or (0.0 if config.absolute else 1e-9)
    try:
        a, b = complex(found), complex(expected)
        allowed = (config.absolute or 1e-12) + relative * abs(b)
        if isinstance(expected, int) and not (config.absolute or config.relative):
            allowed = min(allowed, 1e-6) if abs(expected) < 1 << 53 else -1.0  # beyond, floats are whole and were compared
        return abs(a - b) < float("inf") and abs(a - b) <= allowed
    except (OverflowError, ValueError):
        return False
