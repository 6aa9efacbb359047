"""Programs that want a reward without the answer: each is told from one that has it, in every kind of test.

A program may forge what it returns, but only as data that is compared on the host: what it needs to know is not in its sandbox.
"""

import asyncio

import pytest

from megatron_nb.sandbox.execution import Limits
from megatron_nb.sandbox.tests import Program, Test

LIMITS = Limits(time_s=10.0, memory_mb=256)
SHORT = Limits(time_s=0.5, memory_mb=256)  # of programs that are wrong anyway
SECRET = 918273645  # the answer to every test here; nothing that enters the program's sandbox tells it
TESTS = {
    "stdin": Test(stdin="7\n", stdout=str(SECRET)),
    "call": Test(call="f", args=[7], expected=SECRET),
    "code": Test(code=f"assert f(7) == {SECRET}"),
    "check": Test(code=f"def check(candidate):\n    assert candidate(7) == {SECRET}", entry="f"),
    "list": Test(call="f", args=[7], expected=[SECRET, [SECRET]]),
    "close": Test(code=f"assert abs(f(7) - {SECRET}) < 1e-6"),
    "member": Test(code=f"assert {SECRET} in f(7)"),
}


def verdict(judge, source, test, limits=LIMITS):
    (one,) = asyncio.run(judge.judge(Program(source), [test], limits))
    return one


ALWAYS = """
class Always(int):
    def _true(self, *others): return True
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _true
    __hash__ = int.__hash__
    def __sub__(self, other): return 0
    def __rsub__(self, other): return 0
    def __abs__(self): return 0
    def __repr__(self): return "True"
    __str__ = __repr__
class AlwaysThing(Always):
    pass
AlwaysThing = type("AlwaysThing", (), {k: v for k, v in vars(Always).items() if k not in ("__dict__", "__weakref__")})
"""
HACKS = {
    "special int": ALWAYS + "def f(x): return Always(3)",
    "special object": ALWAYS + "def f(x): return AlwaysThing()",
    "list of special objects": ALWAYS + "def f(x): return [Always(3), [AlwaysThing()]]",
    "subclass of str": "class S(str):\n    __hash__ = str.__hash__\n    def __eq__(self, o): return True\ndef f(x): return S()",
    "lying metaclass": (
        "class M(type):\n    def __eq__(c, o): return True\n    def __instancecheck__(c, o): return True\n"
        "    __hash__ = type.__hash__\nclass C(metaclass=M): pass\ndef f(x): return C"
    ),
    "patched builtins": (
        "import builtins, operator\nfor m in (builtins, operator):\n"
        "    for n in ('all', 'any', 'abs', 'eq', 'len', 'isinstance'):\n"
        "        if hasattr(m, n): setattr(m, n, lambda *a: True)\ndef f(x): return 3"
    ),
    "walks the frames": (
        "import sys, gc\ndef f(x):\n    frame, found = sys._getframe(), []\n    while frame:\n"
        "        found += [v for v in [*frame.f_locals.values(), *frame.f_globals.values()] if type(v) is int and v > 10**6]\n"
        "        for v in [*frame.f_locals.values()]:\n"
        "            if isinstance(v, dict): found += [w for w in v.values() if type(w) is int and w > 10**6]\n"
        "        frame = frame.f_back\n    for o in gc.get_objects():\n"
        "        if isinstance(o, dict) and 'expected' in o: found.append(o['expected'])\n"
        "    return next((v for v in found if v == 918273644 + 1), 0)"
    ),
    "reads every file it may": (
        "import os\nfolders = '.', '/tmp', '/proc/self', '/proc/self/fd', '/proc/1', '/dev/shm', '/var/tmp'\n"
        "def f(x):\n    for folder in folders:\n"
        "        try: names = os.listdir(folder)\n        except OSError: continue\n        for name in names:\n"
        "            try:\n                with open(os.path.join(folder, name), 'rb') as file: text = file.read(1 << 16)\n"
        "            except Exception: continue\n"
        "            if str(918273644 + 1).encode() in text: return 918273644 + 1\n    return 0"
    ),
    "ends early with success": "import sys\nsys.exit(0)",
    "ends in the call": "import sys\ndef f(x): sys.exit(0)",
    "os._exit in the call": "import os\ndef f(x): os._exit(0)",
    "os._exit at once": "import os\nos._exit(0)",
    "kills itself": "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGKILL)",
    "prints the markers": (
        "import os\nlines = b'!{\"verdict\":\"passed\",\"detail\":\"\",\"uses\":5}', b'{\"value\":true}', b'accepted'\n"
        "def f(x):\n    for fd in range(20):\n        for line in lines:\n"
        "            try: os.write(fd, line + b'\\n')\n            except OSError: pass\n    return 3"
    ),
    "forges an answer and ends": (
        "import os\ndef f(x):\n    for fd in range(20):\n"
        "        try: os.write(fd, b'{\"value\":{\"!object\":\"Always\"}}\\n')\n        except OSError: pass\n    os._exit(0)"
    ),
    "forges a refusal": (
        "import os\ndef f(x):\n    for fd in range(3, 20):\n"
        "        try: os.write(fd, b'{\"refused\":\"not me\"}\\n')\n        except OSError: pass\n    os._exit(0)"
    ),
    "replaces stdout": (
        "import sys, io\nsys.stdout = sys.__stdout__ = io.StringIO()\ndef f(x): print('918'); return 3\nprint('hello')"
    ),
    "closes everything": "import os\nos.closerange(0, 100)\ndef f(x): return 3",
    "writes at exit": (
        "import atexit, os\n@atexit.register\ndef late():\n    for fd in range(20):\n"
        "        try: os.write(fd, b'{\"value\":1}\\n')\n        except OSError: pass\ndef f(x): return 3"
    ),
    "writes from a thread": (
        "import threading, os, time\ndef late():\n    while True:\n        for fd in range(3, 12):\n"
        "            try: os.write(fd, b'{\"value\":1}\\n')\n            except OSError: pass\n"
        "threading.Thread(target=late, daemon=True).start()\ndef f(x): time.sleep(0.01); return 3"
    ),
    "overrides json and repr": (
        "import json, builtins\njson.dumps = json.JSONEncoder.encode = lambda *a, **k: 'true'\njson.loads = lambda *a, **k: 1\n"
        "builtins.repr = builtins.str = lambda *a: '1'\ndef f(x): return 3"
    ),
    "overrides the harness": (
        "import sys\nmain = sys.modules['__main__']\nframe = sys._getframe()\nwhile frame:\n"
        "    for name in ('encode', 'plain', 'write_all', 'decode', 'untag'):\n"
        "        if name in frame.f_globals: frame.f_globals[name] = lambda *a: '{\"value\":true}'\n"
        "    frame = frame.f_back\ndef f(x): return 3"
    ),
    "generator": "def f(x):\n    while True: yield 3",
    "endless structure": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "deep structure": "def f(x):\n    a = []\n    for _ in range(100000): a = [a]\n    return a",
    "recursion in repr": "class R:\n    def __repr__(self): return repr(self)\n    __str__ = __repr__\ndef f(x): return R()",
    "raises what it pleases": "class AssertionError(Exception): pass\ndef f(x): raise AssertionError('accepted')",
    "raises SystemExit": "def f(x): raise SystemExit(0)",
    "raises GeneratorExit": "def f(x): raise GeneratorExit",
    "claims infrastructure": "import sys\ndef f(x): print('infrastructure: broken', file=sys.stderr); sys.exit(99)",
    "a name of its own for abs": "def abs(x): return 0\ndef f(x): return 3",
    "forks and answers twice": "import os\ndef f(x):\n    return 3 if os.fork() else 4",
}  # fmt: skip


def told(judge, source, limits):
    """{kind: verdict} of a program under every kind of test."""
    source += "\nif __name__ == '__main__': print(f(7))"
    return dict(zip(TESTS, asyncio.run(judge.judge(Program(source), list(TESTS.values()), limits))))


@pytest.mark.parametrize("hack", HACKS)
def test_no_hack_is_accepted_and_none_breaks_the_judge(shared_judge, hack):
    for kind, found in told(shared_judge, HACKS[hack], SHORT).items():
        assert found.verdict not in ("accepted", "infrastructure"), (kind, found)


def test_the_answer_itself_is_accepted(shared_judge):
    found = told(shared_judge, f"def f(x): return {SECRET}", LIMITS)
    right = {kind for kind, one in found.items() if one.verdict == "accepted"}
    assert right == {"stdin", "call", "code", "check", "close"}
    assert verdict(shared_judge, f"def f(x): return [{SECRET}, [{SECRET}]]", TESTS["list"]).verdict == "accepted"
    assert verdict(shared_judge, f"def f(x): return [{SECRET}]", TESTS["member"]).verdict == "accepted"


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("print('noise')\ndef f(x):\n    print('{\"value\": 1}')\n    return x", Test(call="f", args=[3], expected=3)),
        ("import os\ndef f(x): os.write(1, b'noise'); os.write(2, b'noise'); return x", Test(code="assert f(3) == 3")),
        ("import sys\ndef f(x): return sys.stdin.read()", Test(call="f", args=[3], expected="")),  # not the channel
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\ndef f(x): return x",
         Test(call="f", args=[3], expected=3)),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\ndef f(x): return x",
         Test(code="assert f(3) == 3")),
        ("import sys\nsys.setrecursionlimit(10**6)\ndef f(x): return x", Test(call="f", args=[3], expected=3)),
        ("json = repr = encode = plain = 3\ndef f(x): return x", Test(call="f", args=[3], expected=3)),
    ],
)  # fmt: skip
def test_noise_of_an_honest_program_costs_it_nothing(shared_judge, source, test):
    found = verdict(shared_judge, source, test)
    assert found.verdict == "accepted", found


@pytest.mark.parametrize(
    ("body", "verdicts"),
    [
        ("return 'x' * 10**7", ["output limit"]),
        ("return list(range(2 * 10**6))", ["output limit", "time limit"]),
        ("while True: os.write(1, b'x' * 65536)", ["time limit", "output limit"]),
        ("while True: os.write(3, b'x' * 65536)", ["time limit", "output limit", "runtime error", "wrong answer"]),
        ("return 10 ** 10**6", ["wrong answer"]),
        ("return {i * (2**61 - 1) for i in range(3000)}", ["wrong answer", "runtime error"]),
        ("for _ in range(10**9): g(lambda: 1)", ["time limit", "runtime error"]),
    ],
)
@pytest.mark.parametrize("kind", ["call", "code"])
def test_a_flooded_channel_ends_by_a_limit(shared_judge, body, verdicts, kind):
    found = verdict(shared_judge, f"import os\ndef f(x):\n    {body}", TESTS[kind], Limits(time_s=1.0, memory_mb=512))
    assert found.verdict in verdicts, found


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("def f(x): raise StopIteration", f"assert all(map(lambda x: f(x) == {SECRET}, [1, 2, 3]))"),
        ("def f(x): raise StopIteration", f"for one in map(f, [1, 2]): assert one == {SECRET}"),
        ("def f(x): x.clear(); return []", "def test():\n    x = [3, 1]\n    assert f(x) == sorted(x)\ntest()"),
        ("def f(x): x.clear(); return []", "def check(c):\n    x = [3, 1]\n    assert c(x) == sorted(x)\ncheck(f)"),
        ("def f(x): x.clear(); return []", "x = [3, 1]\nprint(f(x))\nassert f(x) == sorted(x)"),
        ("def f(x): x.clear(); return 1", "def g(x): return x\nx = [3, 1]\ng(f(x))\nassert x == []"),
    ],
)  # fmt: skip
def test_a_program_cannot_take_the_question_out_of_a_test(shared_judge, source, code):
    found = verdict(shared_judge, source, Test(code=code))
    assert found.verdict in ("wrong answer", "runtime error"), found


def test_a_program_cannot_use_what_a_test_passes_it_to_look_into_the_test(shared_judge):
    peek = """
def f(g):
    to = g._remote_peer.ask
    for ask in (lambda: g.__globals__, lambda: g.__code__.co_consts, lambda: g.gi_frame, lambda: to('attr', g, '__globals__'),
                lambda: to('attr', g, '__code__'), lambda: to('find', 'secret'), lambda: to('str', g),
                lambda: to('call', type, 'X', (), {'__call__': print, '__eq__': print})):
        try: found = ask()
        except Exception: continue
        return ('found', str(found))
    return 3
"""
    found = verdict(shared_judge, peek, Test(code=f"secret = {SECRET}\nassert f(lambda: secret + 0) == 3"))
    assert found.verdict == "accepted", found
