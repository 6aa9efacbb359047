"""Runs inside the candidate's sandbox: loads the program as a module and finds the function that is tested.

The text of this file follows that of harness_wire.py there. The program sees neither the channel as its stdin and stdout nor
any expected value. What it does to this interpreter it does to its own answers only.
"""

from __future__ import annotations

import os
import signal
import sys
import types

from megatron_nb.sandbox.harness_wire import Opaque, decode, encode

NAMES_OF = {  # what solutions written for an online judge use without importing it
    "typing": "Any Callable DefaultDict Deque Dict Generator Iterable Iterator List Literal Optional Sequence Set Tuple Union",
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "functools": "cache cmp_to_key lru_cache reduce",
    "itertools": "accumulate chain combinations combinations_with_replacement groupby islice pairwise permutations product",
    "math": "ceil comb factorial floor gcd inf isqrt lcm log log2 pi sqrt",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits",
}
HOME_OF = {name: module for module, names in NAMES_OF.items() for name in names.split()}
OUT_OF_TIME = 124  # exit code
GIVEN: dict[str, object] = {}  # to the program at hand
MODULES = {*NAMES_OF, "copy", "datetime", "json", "operator", "random", "re", "statistics", "sys", "time"}


def channel() -> tuple[int, int]:
    """Moves stdin and stdout to descriptors of their own; the program's are then /dev/null."""
    sys.set_int_max_str_digits(0)
    get, put = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    return get, put


def end_after(cpu_s: float) -> None:
    """Ends this process with OUT_OF_TIME once it has used so much CPU; a program that evades that meets the sandbox's limit."""
    signal.signal(signal.SIGPROF, lambda *_: os._exit(OUT_OF_TIME))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def write_all(put: int, text: str) -> None:
    data = memoryview(text.encode("ascii") + b"\n")
    while data:
        data = data[os.write(put, data) :]


def names_in(code: types.CodeType) -> set[str]:
    """Global names that a compiled program may look up."""
    inner = (names_in(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*inner)


def load(source: str) -> types.ModuleType | str:
    """The program as a module, or what the compiler says of it; raises what its top level raises."""
    try:
        code = compile(source.removeprefix("\ufeff"), "program.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        return f"{type(error).__name__}: {getattr(error, 'msg', error)}" + (f" (line {line})" if line else "")
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    for name in names_in(code):
        if name in HOME_OF:
            GIVEN[name] = getattr(__import__(HOME_OF[name]), name)
        elif name in MODULES:
            GIVEN[name] = __import__(name)
    module.__dict__.update(GIVEN)
    exec(code, module.__dict__)
    return module


def find(module: types.ModuleType, name: str) -> object:
    """The program's own `name`, else that method of its class Solution; AttributeError if there is neither."""
    if name in module.__dict__ and module.__dict__[name] is not GIVEN.get(name, module):
        return module.__dict__[name]
    solution = module.__dict__.get("Solution")
    if solution is not None and hasattr(solution, name):
        return getattr(solution(), name)
    raise AttributeError(f"the program defines no function {name!r}, nor a class Solution with that method")


def call_once() -> None:
    """Reads {"program", "call", "args"}; writes {"value": ...} or {"refused": what the compiler says}, and ends at once."""
    get, put = channel()
    with os.fdopen(get, "rb") as stdin:
        task = decode(stdin.read())
    module = load(task["program"])
    if isinstance(module, str):
        write_all(put, encode({"refused": module}))
        os._exit(0)
    value = find(module, task["call"])(*task["args"])
    try:
        answer = encode({"value": value})
    except RecursionError:
        answer = encode({"value": Opaque("a value nested too deeply or containing itself")})
    write_all(put, answer)
    os._exit(0)
