"""A program rewritten so that it counts its own operations: exact, free of noise, blind to the machine.

Runs inside the sandbox (it is sent there as source, so it imports the standard library only). The tree of the program is
rewritten: every call of its functions and every round of its loops adds 1 to a counter, and every operation whose work is
hidden in the interpreter adds what it is documented to cost at worst (a slice its length, `in` on a list its length,
`sorted` n log n, `heappush` log n, `insert` the elements it moves ...). A callable without a rule costs the size of what it
reads and of what it gives back. Python code that is not the program's own (library modules, exec) is counted by
sys.monitoring. Arithmetic on long integers is kept apart ("digits"): a human counts it as 1; bit operations on them, which
stand for sets, are charged a unit per 64 bits.
"""

from __future__ import annotations

import ast
import bisect
import collections
import copy
import functools
import heapq
import itertools
import math
import operator
import sys
from types import BuiltinFunctionType, FunctionType, MethodType

FILENAME = "<candidate>"
DRIVER = "harness"  # the file name that the modules sent into the sandbox are compiled under
SIZED = (list, tuple, str, bytes, bytearray, dict, set, frozenset, collections.deque, range, type({}.keys()), type({}.values()),
         type({}.items()))  # fmt: skip
UNTOUCHED = {"super", "locals", "globals", "vars", "dir", "eval", "exec", "print", "input", "isinstance", "len", "range", "ord",
             "chr", "iter", "next", "type", "id", "abs", "enumerate", "zip", "reversed"}  # fmt: skip
LONG = 1 << 192  # integers beyond it are long
BINARY = {ast.Add: "add", ast.Mult: "mult", ast.Sub: "sub", ast.Pow: "pow_", ast.LShift: "lshift", ast.RShift: "rshift",
          ast.BitOr: "or_", ast.BitAnd: "and_", ast.BitXor: "xor"}  # fmt: skip


def size(x) -> int:
    return len(x) if isinstance(x, SIZED) else 0


def log2(n) -> int:
    return max(int(n), 1).bit_length()


def deep_size(x) -> int:
    if isinstance(x, dict):
        return 1 + sum(deep_size(v) for v in x.values())
    return 1 + sum(map(deep_size, x)) if isinstance(x, (list, tuple, set)) else 1


def n_log_n(n) -> int:
    return n * log2(n)


def first_or_all(args) -> int:
    return size(args[0]) if len(args) == 1 else len(args)


# rules: (arguments, result) -> units; the arguments of a method begin with its object
FREE = lambda a, r: 0  # noqa: E731
READS = lambda a, r: size(a[0]) if a else 0  # noqa: E731
READS_ALL = lambda a, r: sum(map(size, a))  # noqa: E731
MAKES = lambda a, r: size(r)  # noqa: E731
FROM = lambda a, r: (size(a[0]) if a else 0) + size(r)  # noqa: E731  (a set of few letters is made of a long text)
FUNCTIONS = {
    **dict.fromkeys([map, filter], FREE),
    **dict.fromkeys([divmod, round, bool, float, callable, hash, getattr, setattr, hasattr, issubclass, object, slice, complex,
                     math.sqrt, math.isqrt, math.floor, math.ceil, math.log2, math.log, math.fabs, property, staticmethod,
                     classmethod, functools.lru_cache, functools.cache, functools.partial, functools.cmp_to_key, open,
                     sys.setrecursionlimit, itertools.chain, itertools.count, itertools.product, itertools.permutations,
                     itertools.combinations, itertools.combinations_with_replacement, itertools.accumulate,
                     itertools.repeat, itertools.islice, itertools.groupby, itertools.zip_longest, itertools.starmap,
                     itertools.takewhile, itertools.dropwhile, itertools.pairwise, itertools.compress,
                     itertools.chain.from_iterable, operator.getitem, operator.itemgetter, operator.attrgetter, operator.add,
                     operator.mul], FREE),
    **dict.fromkeys([list, tuple, set, frozenset, dict, bytes, bytearray, collections.deque, collections.Counter], FROM),
    **dict.fromkeys([max, min], lambda a, r: first_or_all(a)),
    **dict.fromkeys([any, all, math.prod, functools.reduce], lambda a, r: max(map(size, a), default=0)),
    sum: lambda a, r: size(a[0]) * (1 + size(r) // 2),  # lists are summed in quadratic time
    sorted: lambda a, r: n_log_n(size(r)),
    str: lambda a, r: size(r) if a and isinstance(a[0], SIZED) else 1,
    int: lambda a, r: size(a[0]) // 16 if a else 0,
    collections.defaultdict: FREE,
    pow: lambda a, r: log2(a[1]) if len(a) == 3 else 1,
    math.gcd: lambda a, r: log2(min(map(abs, a), default=1)),
    math.factorial: lambda a, r: a[0],
    math.comb: lambda a, r: min(a[1], max(a[0] - a[1], 0)),
    heapq.heappush: lambda a, r: log2(size(a[0])),
    heapq.heappop: lambda a, r: log2(size(a[0])),
    heapq.heapreplace: lambda a, r: log2(size(a[0])),
    heapq.heappushpop: lambda a, r: log2(size(a[0])),
    heapq.heapify: READS,
    heapq.nlargest: lambda a, r: size(a[1]) * log2(a[0]),
    heapq.nsmallest: lambda a, r: size(a[1]) * log2(a[0]),
    **dict.fromkeys([bisect.bisect_left, bisect.bisect_right], lambda a, r: log2(size(a[0]))),
    **dict.fromkeys([bisect.insort_left, bisect.insort_right], lambda a, r: log2(size(a[0])) + size(a[0])),
    copy.deepcopy: lambda a, r: deep_size(r),
    copy.copy: MAKES,
}  # fmt: skip
METHODS = {
    list: {"append": FREE, "extend": lambda a, r: size(a[1]), "insert": lambda a, r: moved(a[0], a[1]), "sort": None,
           "pop": lambda a, r: moved(a[0], a[1]) if len(a) > 1 else 0, "clear": FREE},
    dict: {**dict.fromkeys(["get", "setdefault", "pop", "popitem", "keys", "values", "items", "clear"], FREE),
           "update": lambda a, r: sum(map(size, a[1:])), "copy": MAKES},
    set: {**dict.fromkeys(["add", "discard", "remove", "pop", "clear"], FREE),
          **dict.fromkeys(["update", "issuperset"], lambda a, r: sum(map(size, a[1:]))), "union": MAKES,
          "intersection": lambda a, r: min(map(size, a)), "copy": MAKES},
    collections.deque: {**dict.fromkeys(["append", "appendleft", "pop", "popleft", "clear"], FREE),
                        "extend": lambda a, r: size(a[1]), "extendleft": lambda a, r: size(a[1]),
                        "rotate": lambda a, r: abs(a[1]) if len(a) > 1 else 1},
    str: {"join": lambda a, r: size(r), "startswith": lambda a, r: size(a[1]), "endswith": lambda a, r: size(a[1]),
          "replace": lambda a, r: size(a[0]) + size(r), "format": MAKES},
    int: {"bit_length": FREE, "bit_count": lambda a, r: a[0].bit_length() >> 6},
}  # fmt: skip
METHODS[list]["sort"] = lambda a, r: n_log_n(size(a[0]))
for kind, like in ((collections.Counter, dict), (collections.defaultdict, dict), (collections.OrderedDict, dict)):
    METHODS[kind] = {**METHODS[like]}
METHODS[collections.Counter]["most_common"] = lambda a, r: n_log_n(size(a[0])) if len(a) < 2 else size(a[0]) * log2(a[1])


def moved(items, index) -> int:
    """How many elements of a list an insertion or removal at `index` moves."""
    return max(0, min(len(items), len(items) - index if index >= 0 else -index))


class Counter:
    """The operations a rewritten program calls; `units` and `digits` are one-element lists that its code adds to."""

    def __init__(self):
        self.units, self.digits = [0], [0]

    def foreign(self) -> None:
        """Count calls and jumps of Python code that is not the program's: modules of the library, and what exec made."""
        units, monitoring = self.units, getattr(sys, "monitoring", None)
        if monitoring is None:
            return

        def seen(code, *_):
            if code.co_filename in (FILENAME, DRIVER):
                return monitoring.DISABLE
            units[0] += 1
            return None

        monitoring.use_tool_id(monitoring.PROFILER_ID, "costs")
        for event in (monitoring.events.PY_START, monitoring.events.JUMP):
            monitoring.register_callback(monitoring.PROFILER_ID, event, seen)
        monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.PY_START | monitoring.events.JUMP)

    def operations(self) -> dict:
        units, digits = self.units, self.digits

        def each(items):
            for item in items:
                units[0] += 1
                yield item

        def items_of(items):  # of a comprehension that cannot end early
            if isinstance(items, SIZED):
                units[0] += len(items)
                return items
            return each(items)

        def made(x):
            if isinstance(x, SIZED) and type(x) is not range:
                units[0] += len(x)
            return x

        def count():
            units[0] += 1

        def call(f, *args, **named):
            kind = type(f)
            if type(named.get("key")) is BuiltinFunctionType:  # called by the interpreter, out of our sight
                named["key"] = functools.partial(call, named["key"])
            if (f is map or f is filter) and type(args[0]) is BuiltinFunctionType:
                return f(functools.partial(call, args[0]), *args[1:])
            if kind is FunctionType or kind is MethodType:
                rule = FUNCTIONS.get(f) if kind is FunctionType else None
                if rule is None:
                    return f(*args, **named)
                shown = args
            elif kind is BuiltinFunctionType and f.__self__ is not None and type(f.__self__) is not type(sys):
                rule = FREE if f.__name__[:2] == "__" else METHODS.get(type(f.__self__), {}).get(f.__name__)
                shown = (f.__self__, *args)
                if rule is FREE:
                    units[0] += 1
                    return f(*args, **named)
            else:
                try:
                    rule = FUNCTIONS.get(f)
                except TypeError:
                    rule = None
                shown = args
                if rule is FREE or (rule is None and kind is type and f.__module__ == "candidate"):
                    return f(*args, **named)
            for a in args:
                if hasattr(a, "__next__"):
                    args = tuple(each(x) if hasattr(x, "__next__") else x for x in args)
                    break
            result = f(*args, **named)
            units[0] += 1 + (sum(map(size, shown)) + size(result) if rule is None else rule(shown, result))
            return result

        def add(a, b):
            r = a + b
            if type(r) is int:
                if r > LONG or r < -LONG:
                    digits[0] += r.bit_length() >> 6
            elif isinstance(r, SIZED):
                units[0] += len(r)
            return r

        def grow(a, b):  # the right side of an augmented assignment: a list or string is extended in place
            if isinstance(b, SIZED):
                units[0] += len(a) if type(a) is tuple else len(b)
            elif type(a) is int and (a > LONG or a < -LONG):
                digits[0] += a.bit_length() >> 6
            return b

        def joined(a, b):  # the right side of a = a + b: strings grow in place, others are copied
            if isinstance(b, SIZED):
                units[0] += len(b) if type(b) is str else size(a) + len(b)
            elif type(a) is int and (a > LONG or a < -LONG):
                digits[0] += a.bit_length() >> 6
            return b

        def sub(a, b):
            if isinstance(a, SIZED):
                units[0] += len(a)
            return a - b

        def mult(a, b):
            r = a * b
            if type(r) is int:
                if r > LONG or r < -LONG:
                    digits[0] += (1 + (a.bit_length() >> 6)) * (1 + (b.bit_length() >> 6))
            elif isinstance(r, SIZED):
                units[0] += len(r)
            return r

        def pow_(a, b):
            r = a**b
            if type(r) is int and (r > LONG or r < -LONG):
                digits[0] += r.bit_length() >> 6
            return r

        def bits(operation):
            def operate(a, b):
                r = operation(a, b)
                if type(r) is int:
                    if r > LONG or r < -LONG or a > LONG:
                        units[0] += max(r.bit_length(), a.bit_length()) >> 6
                elif isinstance(r, SIZED):
                    units[0] += max(len(r), size(a) and min(size(a), size(b)))
                return r

            return operate

        def within(x, items):
            if isinstance(items, (list, tuple, str, bytes, bytearray, collections.deque)):
                units[0] += len(items)
            return x in items

        def same(a, b):
            if isinstance(a, SIZED) and isinstance(b, SIZED) and len(a) == len(b) > 1:
                units[0] += len(a)
            return a == b

        def differ(a, b):
            if isinstance(a, SIZED) and isinstance(b, SIZED) and len(a) == len(b) > 1:
                units[0] += len(a)
            return a != b

        def removed(items, index):
            if isinstance(items, list) and isinstance(index, int):
                units[0] += moved(items, index)

        named = (each, items_of, made, count, call, add, grow, joined, sub, mult, pow_, within, same, differ, removed)
        return {
            **{f.__name__: f for f in named},
            "lshift": bits(lambda a, b: a << b), "rshift": bits(lambda a, b: a >> b), "or_": bits(lambda a, b: a | b),
            "and_": bits(lambda a, b: a & b), "xor": bits(lambda a, b: a ^ b), "units": units,
        }  # fmt: skip
