"""What counts as the same output, and what is said of the first difference."""

import datetime
import math
import time
from collections import Counter, OrderedDict, deque, namedtuple
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction

import pytest

from megatron_nb.sandbox.compare import CompareConfig, difference, short, value_difference
from megatron_nb.sandbox.harness_wire import Opaque, decode, encode

Point = namedtuple("Point", "x y")


class Colour(IntEnum):
    RED = 1


class Always(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    ("mode", "found", "expected", "right"),
    [
        ("tokens", b"1 2\n3\n", b"1\n2 3", True),
        ("tokens", b"1 2", b"1 2 3", False),
        ("tokens", b"1 2 3", b"1 2", False),
        ("tokens", b"1.0", b"1", False),
        ("tokens", b"", b"", True),
        ("tokens", b"", b"0", False),
        ("tokens", "\u00a01".encode(), b"1", False),  # a no-break space is no white space
        ("tokens", b"\xff", b"\xef\xbf\xbd", False),  # what cannot be decoded is not the replacement character
        ("lines", b"a b \r\nc\n\n", b"a b\nc", True),
        ("lines", b"a  b\n", b"a b\n", False),
        ("lines", b"a\n\nb", b"a\nb", False),
        ("exact", b"a\n", b"a\n", True),
        ("exact", b"a\n", b"a", False),
        ("numbers", b"1.0 +2e0 x", b"1 2 x", True),
        ("numbers", b"12345678901234567890", b"12345678901234567891", False),  # equal as floats
        ("numbers", b"0.1", b"0.10000001", False),
        ("numbers", b"nan", b"1", False),
        ("numbers", b"1_0", b"10", False),
    ],
)
def test_outputs_are_the_same_by_the_rule_of_the_mode(mode, found, expected, right):
    assert (difference(found, expected, CompareConfig(mode)) is None) == right


@pytest.mark.parametrize(
    ("found", "right"),
    [
        (b"100.0001", True), (b"100.02", False), (b"1e400", False), (b"1e999999", False), (b"99999e999999", False),
        (b"-9999e999999", False), (b"9" * 10**5 + b"e-999999", False), (b"abc", False),
    ],
)  # fmt: skip
def test_a_tolerance_is_of_the_expected_number(found, right):
    assert (difference(found, b"100", CompareConfig("numbers", relative=1e-5)) is None) == right
    assert (difference(found, b"100", CompareConfig(absolute=1e-3)) is None) == right  # tokens with a tolerance


@pytest.mark.parametrize(
    ("mode", "found", "expected", "words"),
    [
        ("tokens", b"1\n2 4\n", b"1\n2 3\n", "line 2: expected '2 3', found '2 4'"),
        ("tokens", b"1\n", b"1\n\n7", "line 2: expected '7', found the end of the output"),
        ("tokens", b"1\n5\n", b"1", "line 2: expected the end of the output, found '5'"),
        ("lines", b"a\nb", b"a\nc", "line 2: expected 'c', found 'b'"),
        ("exact", b"ab", b"ac", "byte 1: expected 'c', found 'b'"),
        ("tokens", b"x" * 10**6, b"y", f"line 1: expected 'y', found '{'x' * 80}'..."),
    ],
)
def test_the_first_difference_is_shown_shortened(mode, found, expected, words):
    said = difference(found, expected, CompareConfig(mode))
    assert said.startswith(words) and len(said) < 300


@pytest.mark.parametrize(
    ("found", "expected", "right"),
    [
        ((1, 2), [1, 2], True),  # JSON has no tuples
        ([(1, [2])], [[1, (2,)]], True),
        (1.0, 1, True),
        (True, 1, True),  # as in Python
        (0.1 + 0.2, 0.3, True),
        (0.3001, 0.3, False),
        (10**20 + 1, 10**20, False),
        (1e15, 10**15 + 7, False),  # a whole number is not rounded, whatever computes it
        (float(10**18), 10**18 + 7, False),
        (1.0 + 1e-12, 1, True),
        (10**15 + 7, 1e15, True),
        (1e15, 1e15 + 7, True),
        (float("inf"), float("inf"), True),
        (float("inf"), 1e308, False),
        (1e308, float("inf"), False),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        (1 + 2j, 1 + 2j, True),
        ({1: "a"}, {"1": "a"}, True),  # JSON has no numbers as keys
        ({1: "a", "1": "b"}, {"1": "a"}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({1, 2}, {2, 1}, True),
        ({1, 2}, frozenset({1, 2}), True),
        ({1, 2}, [1, 2], False),
        ([1, 2, 3], [1, 2], False),
        ("1", 1, False),
        (b"a", "a", False),
        (None, None, True),
        (None, 0, False),
        ([], None, False),
        (Fraction(1, 2), 0.5, True),
        (Decimal("0.5"), 0.5, True),
        (Decimal("sNaN"), 1, False),
        (Opaque("Thing"), 1, False),
        (Opaque("Thing"), None, False),
        (10**100000, 10**100000, True),
    ],
    ids=short,
)
def test_results_are_the_same_as_values(found, expected, right):
    assert (value_difference(found, expected, CompareConfig()) is None) == right


def test_the_place_of_a_wrong_element_is_named():
    assert value_difference([[1], {"a": [3]}], [[1], {"a": [4]}], CompareConfig()) == "at [1]['a'][0]: expected 4, found 3"
    assert "expected 2 elements" in value_difference([1], [1, 2], CompareConfig())


def test_values_too_deep_to_compare_are_wrong_and_long_ones_are_shown_short():
    deep, other = [], []
    for _ in range(100_000):
        deep, other = [deep], [other]
    assert "deep" in value_difference(deep, [1, deep], CompareConfig()) or value_difference(deep, other, CompareConfig())
    assert "bits" in short(10**100000) and len(short(["x" * 10**6] * 100)) < 200


@pytest.mark.parametrize("bad", [{"mode": "fuzzy"}, {"absolute": -1.0}, {"relative": math.nan}, {"absolute": True}])
def test_a_wrong_setting_is_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        CompareConfig(**bad)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 10**5000, -(10**5000), 1.5, -0.0, float("inf"), 1e-320, "", "\ud800", "a\nb\u2028", b"\x00\xff",
        bytearray(b"ab"), 2 - 3j, (), (1, (2, [3])), [[]], pytest.param({1, "a", (2, 3)}, id="set"),
        frozenset({1}), {}, {"a": {1: (2,)}},
        {"!set": [1]}, {(1, 2): 3}, Decimal("1.50"), Fraction(-1, 3), range(3, 9, 2), deque([1, 2]), datetime.date(2020, 2, 29),
        datetime.datetime(2020, 2, 29, 1, 2, 3, 4), datetime.time(1, 2), datetime.timedelta(days=-1, microseconds=1),
    ],
    ids=short,
)  # fmt: skip
def test_a_value_survives_the_way(value):
    back = decode(encode(value))
    assert type(back) is type(value) and back == value and "\n" not in encode(value)


@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        (Always(3), 3), (Colour.RED, 1), (Point(1, 2), (1, 2)), (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (type("Text", (str,), {"__str__": lambda self: "other"})("mine"), "mine"),
        (type("List", (list,), {"__iter__": lambda self: iter([9])})([1]), [1]),
        (type("Float", (float,), {"__float__": lambda self: 9.0})(1.5), 1.5),
    ],
)  # fmt: skip
def test_a_subclass_arrives_as_the_builtin_value_beneath(value, arrives):
    back = decode(encode(value))
    assert type(back) is type(arrives) and back == arrives


@pytest.mark.parametrize(
    "text",
    [
        "", "{", '{"!pickle": "x"}', '{"!set": [[1]]}', '{"!int": "zz"}', '{"!fraction": ["1e999999999"]}',
        '{"!fraction": ["1e999999999", 1]}', '{"!range": [0, "5"]}', '{"!dict": [[1]]}', '{"!complex": ["x"]}', "[" * 10**6,
        '{"!fraction": [{"!int": "' + "7" * 400_000 + '"}, {"!int": "' + "9" * 400_000 + '"}]}',
        '{"!date": "yesterday"}', '{"!tuple": 3}', '{"!bytes": "\u20ac"}', "1" * 5000, '{"!fraction": [1, 0]}',
        '{"!set": [' + ",".join(str(i * (2**61 - 1)) for i in range(500)) + "]}",
    ],
    ids=short,
)  # fmt: skip
def test_what_no_harness_writes_is_refused_at_once(text):
    begun = time.process_time()
    with pytest.raises(ValueError):
        decode(text)
    assert time.process_time() - begun < 0.5  # it happens in the host's event loop
