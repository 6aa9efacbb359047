"""Values on the way between sandboxes and host: JSON with tags for what JSON lacks; never pickle, never eval.

A tag is an object with one key that begins with "!": {"!tuple": [1, 2]}, {"!set": [...]}, {"!dict": [[key, value], ...]} (keys
that are no strings), {"!complex": [re, im]}, {"!bytes": latin-1}, {"!int": hex} (long ones), {"!object": type name} (cannot be
sent). The text of this file also runs inside the sandbox, under whatever Python the system has: standard library, no imports
of the package. A value decoded here is made of builtin types only, whatever a program did to its own classes.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import json
from collections import deque

LONG_INT = 1 << 10000  # decimal text of longer ones is slow, and Python refuses to read it
ESCAPED = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), check_circular=False).encode


class Opaque:
    """Stands for an object that cannot be sent; equals nothing but itself."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<object of type {self.kind}>"


def _opaque(value: object) -> dict:
    return {"!object": value.kind if type(value) is Opaque else type.__dict__["__name__"].__get__(type(value))}


def plain(value: object, other=_opaque) -> object:
    """What json.dumps can write of `value`; subclasses become their builtin parent, unknown objects go to `other`.

    Reads through the builtin types' own methods, so a subclass cannot answer for itself. RecursionError on deep or cyclic ones.
    """
    kind = type(value)
    if kind is str or kind is bool or kind is float or value is None:
        return value
    if kind is int:
        return value if -LONG_INT < value < LONG_INT else {"!int": hex(value)}
    if kind is list:
        return [plain(one, other) for one in value]
    if kind is tuple:
        return {"!tuple": [plain(one, other) for one in value]}
    if kind is dict:
        if all(type(key) is str for key in value) and not (len(value) == 1 and next(iter(value)).startswith("!")):
            return {key: plain(one, other) for key, one in value.items()}
        return {"!dict": [[plain(key, other), plain(one, other)] for key, one in value.items()]}
    if kind is set or kind is frozenset:
        return {"!" + kind.__name__: [plain(one, other) for one in value]}
    if kind is complex:
        return {"!complex": [value.real, value.imag]}
    if kind is bytes or kind is bytearray:
        return {"!" + kind.__name__: value.decode("latin-1")}
    if kind is decimal.Decimal:
        return {"!decimal": str(value)}
    if kind is fractions.Fraction:
        return {"!fraction": [plain(value.numerator), plain(value.denominator)]}
    if kind is deque:
        return {"!deque": [plain(one, other) for one in value]}
    if kind is range:
        return {"!range": [value.start, value.stop, value.step]}
    if kind is datetime.datetime or kind is datetime.date or kind is datetime.time:
        return {"!" + kind.__name__: value.isoformat()}
    if kind is datetime.timedelta:
        return {"!timedelta": [value.days, value.seconds, value.microseconds]}
    for parent, read in PARENTS:
        if issubclass(kind, parent):
            return plain(read(value), other)
    if kind.__module__.split(".")[0] == "numpy" and hasattr(kind, "tolist"):
        return plain(value.tolist(), other)
    return other(value)


PARENTS = (  # of subclasses: the builtin value beneath
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
    (list, lambda value: list(list.__iter__(value))),
    (tuple, lambda value: tuple(tuple.__iter__(value))),
    (dict, lambda value: dict(dict.items(value))),
    (set, lambda value: set(set.__iter__(value))),
    (frozenset, lambda value: set(frozenset.__iter__(value))),
    (bytes, lambda value: bytes.__add__(value, b"")),
)


def _hashable(values: list) -> list:
    """The same; ValueError where so many collide that a set of them would take for ever."""
    if len(values) - len({hash(value) for value in values}) > 100:
        raise ValueError("more than 100 values have the hash of another")
    return values


def _integers(parts: list) -> list:
    """The same; a text among them could stand for a number of a billion digits, and reducing a fraction takes their square."""
    if not all(type(part) is int and -LONG_INT < part < LONG_INT for part in parts):
        raise ValueError(f"{len(parts)} parts must be integers of at most {LONG_INT.bit_length() - 1} bits")
    return parts


TAGS = {
    "!tuple": tuple,
    "!set": lambda values: set(_hashable(values)),
    "!frozenset": lambda values: frozenset(_hashable(values)),
    "!deque": deque,
    "!dict": lambda pairs: dict(zip(_hashable([key for key, _ in pairs]), [value for _, value in pairs])),
    "!complex": lambda parts: complex(*parts),
    "!bytes": lambda text: text.encode("latin-1"),
    "!bytearray": lambda text: bytearray(text.encode("latin-1")),
    "!int": lambda text: int(text, 16),
    "!decimal": decimal.Decimal,
    "!fraction": lambda parts: fractions.Fraction(*_integers(parts)),
    "!range": lambda parts: range(*_integers(parts)),
    "!datetime": datetime.datetime.fromisoformat,
    "!date": datetime.date.fromisoformat,
    "!time": datetime.time.fromisoformat,
    "!timedelta": lambda parts: datetime.timedelta(*parts),
    "!object": Opaque,
}


def untag(found: dict) -> object:
    """The value that a tagged JSON object stands for; other objects are themselves. ValueError for an unknown tag."""
    if len(found) == 1:
        ((tag, content),) = found.items()
        if tag.startswith("!"):
            if tag not in TAGS:
                raise ValueError(f"unknown tag {tag[:40]!r}")
            return TAGS[tag](content)
    return found


def encode(value: object, other=_opaque) -> str:
    """One line of ASCII. RecursionError where the value is nested too deeply or contains itself."""
    return ESCAPED(plain(value, other))


def decode(text: str | bytes, untag=untag) -> object:
    """The value; ValueError for anything that `encode` does not write, whatever is wrong with it."""
    try:
        return json.loads(text, object_hook=untag)
    except (ValueError, TypeError, ArithmeticError, RecursionError, AttributeError, LookupError, MemoryError) as error:
        raise ValueError(f"not a value: {type(error).__name__}: {str(error)[:100]}") from None
