"""Every kind of test, and the verdict of every way to fail."""

import asyncio

import pytest

from megatron_nb.sandbox.execution import Execution, Limits
from megatron_nb.sandbox.judge import Judge
from megatron_nb.sandbox.pool import Pool
from megatron_nb.sandbox.tests import Checker, Program, Test

LIMITS = Limits(time_s=10.0, memory_mb=256)  # generous: other work is on the cores
TINY = Limits(time_s=0.3, memory_mb=256)


def judged(judge, source, *tests, limits=LIMITS, language="python", entry=None, **options):
    """[(verdict, detail)] of each test."""
    verdicts = asyncio.run(judge.judge(Program(source, language, entry), list(tests), limits, **options))
    return [(one.verdict, one.detail) for one in verdicts]


def call(name, args, expected, **more):
    return Test(call=name, args=args, expected=expected, **more)


def text(stdin, stdout, **more):
    return Test(stdin=stdin, stdout=stdout, **more)


def test_text_in_text_out(shared_judge):
    source = "for line in open(0): print(int(line) * 2)"
    found = judged(shared_judge, source, text("1\n2", "2\n4"), text("1\n2", "2\n5"), text("x", ""))
    assert [verdict for verdict, _ in found] == ["accepted", "wrong answer", "runtime error"]
    assert found[1][1] == "line 2: expected '5', found '4'" and "ValueError: invalid literal" in found[2][1]


def test_cpp_through_the_same_interface(shared_judge):
    source = "#include <iostream>\nint main() { long long x; std::cin >> x; std::cout << x * 2 << std::endl; }"
    assert judged(shared_judge, source, text("21", "42"), language="cpp") == [("accepted", "")]
    ((verdict, detail), again) = judged(shared_judge, "int main( {", *[text("", "")] * 2, language="cpp")
    assert verdict == again[0] == "compile error" and "error" in detail
    with pytest.raises(ValueError, match="stdin/stdout only"):
        judged(shared_judge, source, call("f", [], 1), language="cpp")


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("def f(a, b): return a + b", call("f", [1, 2], 3)),
        ("class Solution:\n    def f(self, a: List[int]) -> int:\n        return sum(a)", call("f", [[1, 2]], 3)),
        ("class Solution:\n    @staticmethod\n    def f(a):\n        return Counter(a)", call("f", ["aab"], {"a": 2, "b": 1})),
        ("class Solution:\n    def count(self, s):\n        return s.count('a')", call("count", ["aa"], 2)),  # not itertools'
        ("from __future__ import annotations\ndef f(x: Nowhere): return (x, {x})", call("f", [1], [1, {1}])),
        ("def f(): return 1 + 2j, b'\\xff', None, float('inf'), {(1,): 2}", 
         call("f", [], [1 + 2j, b"\xff", None, float("inf"), {(1,): 2}])),
        ("def f(x): return x", call("f", [{"!set": [1]}], {"!set": [1]})),
        ("def f(x): return type(x).__name__", call("f", [(1, 2)], "tuple")),
        ("def f(n): return 10 ** n", call("f", [5000], 10**5000)),
        ("def f(): return '\\ud800\\n'", call("f", [], "\ud800\n")),
        ("import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\ndef f(): return P(3).x", call("f", [], 3)),
        ("def f(): return 3\nif __name__ == '__main__': print(f(input()))", call("f", [], 3)),
        ("def f(n): return 0 if n == 0 else 1 + f(n - 1)", call("f", [500], 500)),
    ],
)  # fmt: skip
def test_functions_are_called_and_their_values_compared(shared_judge, source, test):
    assert judged(shared_judge, source, test) == [("accepted", "")]


@pytest.mark.parametrize(
    ("source", "verdict", "words"),
    [
        ("def f(x): return [x, [x + 1]]", "wrong answer", "at [1][0]: expected 3, found 2"),
        ("def f(x): return object()", "wrong answer", "object of type object"),
        ("def f(x): yield x", "wrong answer", "object of type generator"),
        ("def f(x): print([1, [3]])", "wrong answer", "found None"),
        ("def g(x): return 1", "runtime error", "defines no function 'f'"),
        ("def f(x): raise KeyError('k')", "runtime error", "KeyError: 'k'"),
        ("def f(): return 1", "runtime error", "takes 0 positional arguments"),
        ("1 / 0", "runtime error", "ZeroDivisionError"),
        ("def f(x): return", "wrong answer", "found None"),
        ("def f(x) return", "compile error", "line 1"),
        ("def f(x):\n\treturn (\n", "compile error", "never closed"),
        ("a\0b", "compile error", "null"),
        ("f = " + "(" * 5000, "compile error", ""),
        ("def f(x): return f(x)", "runtime error", "RecursionError"),
        ("def f(x): import os; os.abort()", "runtime error", "signal 6"),
    ],
)
def test_what_a_function_did_wrong_is_told(shared_judge, source, verdict, words):
    ((found, detail),) = judged(shared_judge, source, call("f", [1], [1, [3]]))
    assert found == verdict and words in detail


@pytest.mark.parametrize(
    "test", [text("", "1"), call("f", [], 1), Test(code="assert f() == 1")], ids=["stdin", "call", "code"]
)
@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("while True: pass", "time limit"),
        ("x = [0] * 10**9", "memory limit"),
    ],
)
def test_limits_hold_for_every_kind(shared_judge, test, body, verdict):
    source = f"def f():\n    {body}\n    return 1\nif __name__ == '__main__':\n    f()\n    print(1)"
    ((found, _),) = judged(shared_judge, source, test, limits=TINY if verdict == "time limit" else LIMITS)
    assert found == verdict


def test_too_much_output_is_its_own_verdict(shared_judge):
    small = Limits(time_s=10.0, memory_mb=256, output_bytes=10_000)
    source = "def f(): return 'x' * 20000\nif __name__ == '__main__': print(f())"
    found = judged(shared_judge, source, text("", "x"), call("f", [], "x"), limits=small)
    assert [verdict for verdict, _ in found] == ["output limit"] * 2


def test_an_expected_output_beyond_the_limit_may_be_written(shared_judge):
    small, long = Limits(time_s=10.0, memory_mb=256, output_bytes=10_000), list(range(20_000))
    source = "def f(): return list(range(20000))\nif __name__ == '__main__': print(*f(), sep='\\n')"
    tests = [text("", "\n".join(map(str, long))), call("f", [], long)]
    assert judged(shared_judge, source, *tests, limits=small) == [("accepted", "")] * 2


STACK = """
class Empty(LookupError): pass
number, whole = 7, int
class Stack:
    limit = 5
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise Empty("nothing left")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
def add(a, b=2): return a + b
def apply(function, values): return [function(value) for value in values]
def count():
    n = 0
    while True:
        yield n
        n += 1
def sort_in_place(values): values.sort(reverse=True)
def empty(values): values.clear(); return []
def total(values): return sum(values)
"""


@pytest.mark.parametrize(
    ("code", "verdict", "words"),
    [
        ("assert add(1) == 3\nassert add(1, b=3) == 4", "accepted", ""),
        ("x = add(1)\nassert x == 4", "wrong answer", "line 2: expected 4, found 3"),
        ("assert add(1) == 4, 'mine'", "wrong answer", "mine"),
        ("def check(candidate):\n    assert candidate(1) == 3", "accepted", ""),
        ("import math\nassert math.isclose(add(0.1, 0.2), 0.3)", "accepted", ""),
        ("assert math.isclose(add(0.1, 0.2), 0.3)", "accepted", ""),  # a module, also if nobody imported it
        ("assert isinstance(add(1), int) and type(add((1,), (2,))) is tuple", "accepted", ""),
        ("assert add({1: (2,)}.keys() and [1j], [None, {3}, b'x', float('inf')]) == [1j, None, {3}, b'x', float('inf')]",
         "accepted", ""),
        ("s = Stack()\ns.push(1).push('a')\nassert len(s) == 2 and s.pop() == 'a' and s.items == [1]", "accepted", ""),
        ("assert Stack().push(1) == Stack().push(1) and not Stack() == Stack().push(1)", "accepted", ""),
        ("assert Stack() == []", "wrong answer", "expected []"),
        ("try:\n    Stack().pop()\nexcept Empty as error:\n    assert str(error) == 'nothing left'\nelse:\n    assert False",
         "accepted", ""),
        ("try:\n    Stack().pop()\nexcept LookupError as error:\n    assert error.args == ('nothing left',)", "accepted", ""),
        ("Stack().pop()", "runtime error", "Empty: nothing left"),
        ("add(1, 'a')", "runtime error", "TypeError"),
        ("assert apply(lambda x: add(x), [1, 2]) == [3, 4]", "accepted", ""),  # the program calls the test, which calls it
        ("assert apply(int, ['1']) == [1] and apply(len, [[1]]) == [1]", "accepted", ""),
        ("def bad(x): raise ValueError(x)\ntry: apply(bad, [7])\nexcept ValueError as error: assert error.args == (7,)",
         "accepted", ""),
        ("from itertools import islice\nassert list(islice(count(), 3)) == [0, 1, 2]", "accepted", ""),
        ("assert total(iter([1, 2])) == 3", "accepted", ""),
        ("values = [1, 3, 2]\nsort_in_place(values)\nassert values == [3, 2, 1]", "accepted", ""),
        ("values = [1, 2]\nassert empty(values) == values", "wrong answer", "expected [1, 2], found []"),
        ("assert nowhere(1) == 2", "runtime error", "defines no function 'nowhere'"),
        ("len(add(1))", "wrong answer", "TypeError"),  # what the program returned made the test raise
        ("add(1)\nraise SystemExit(0)", "wrong answer", "SystemExit"),
        ("assert True", "infrastructure", "never used"),
        ("assert add(1) = 3", "infrastructure", "SyntaxError"),
        ("class T:\n    def run(self):\n        print(add(1))\n        assert add(1) == 3\nT().run()", "accepted", ""),
        ("class T:\n    def run(self): assert add(1) == 4\nT().run()", "wrong answer", "expected 4, found 3"),
        ("import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(add(1), 3)\n"
         "result = unittest.TestResult()\nT('test').run(result)\nassert result.wasSuccessful(), result.errors", "accepted", ""),
        ("class T:\n    def run(self):\n        values = [1, 3]\n        sort_in_place(values)\n"
         "        assert values == [3, 1]\nT().run()", "accepted", ""),
        ("s = Stack()\nassert isinstance(s, Stack) and not isinstance(3, Stack) and not isinstance(count(), Stack)",
         "accepted", ""),
        ("s = Stack()\ns._id = 3\ns._peer = 4\nassert (s._id, s._peer) == (3, 4)", "accepted", ""),
        ("undefined.attribute", "runtime error", "undefined"),
        ("assert number == 7 and whole('3') == 3", "accepted", ""),  # a value and a builtin, neither of which is called there
        ("number(3)", "wrong answer", "not callable"),
        ("assert Stack.limit == 5", "accepted", ""),
        ("import nowhere_at_all\nassert add(1) == 3", "infrastructure", "ModuleNotFoundError"),
        ("class Odd: pass\nassert add(Odd()) == 3", "infrastructure", "type Odd cannot be sent"),
        ("def sum(x): return 3\nassert sum(add(1)) == 3", "accepted", ""),
    ],
)  # fmt: skip
def test_assertions_run_apart_from_the_program(shared_judge, code, verdict, words):
    ((found, detail),) = judged(shared_judge, STACK, Test(code=code), entry="add")
    assert found == verdict and words in detail


def test_the_entry_wins_over_a_builtin_of_its_name(shared_judge):
    test = Test(code="assert sum(4) == 5", entry="sum")
    assert judged(shared_judge, "def sum(n): return n + 1", test) == [("accepted", "")]


def test_a_program_cannot_stand_in_for_what_the_test_uses(shared_judge):
    source = "def f(x): return 0\ndef abs(x): return 0\nclass math:\n    isclose = lambda *a: True\ndef sorted(x): return 1"
    for code in ("assert abs(f(1) - 5) == 0", "import math\nassert math.isclose(f(1), 5)", "assert math.isclose(f(1), 5)"):
        ((verdict, _),) = judged(shared_judge, source, Test(code=code))
        assert verdict == "wrong answer"


CHECK = "def check(input, output, expected): return sum(map(int, output.split())) == int(input), 'sum is off'"
WHOLE = """
import sys
values = [int(one) for one in open("output").read().split()]
if sum(values) != int(open("input").read()):
    print("sum is off")
    sys.exit(1)
"""


@pytest.mark.parametrize("source", [CHECK, WHOLE], ids=["function", "program"])
def test_a_checker_decides_where_several_outputs_are_right(shared_judge, source):
    tests = [text("10", "1 9", checker=Checker(source))]
    assert judged(shared_judge, "print(3, 7)", *tests) == [("accepted", "")]
    assert judged(shared_judge, "print(3, 8)", *tests) == [("wrong answer", "sum is off")]
    ((verdict, detail),) = judged(shared_judge, "print('garbage')", *tests)
    assert verdict == "wrong answer" and "ValueError" in detail


def test_a_checker_in_cpp(shared_judge):
    source = '#include <fstream>\nint main() { std::ifstream o("output"); int x; return !(o >> x && x % 2 == 0); }'
    tests = [text("", None, checker=Checker(source, "cpp"))]
    assert judged(shared_judge, "print(4)", *tests) == [("accepted", "")]
    assert judged(shared_judge, "print(5)", *tests)[0][0] == "wrong answer"


def test_a_broken_checker_is_no_wrong_answer(shared_judge):
    for source in ("def check(input, output, expected): return undefined", "def check(input, output, expected) return"):
        ((verdict, detail),) = judged(shared_judge, "print(4)", text("", "4", checker=Checker(source)))
        assert verdict == "infrastructure" and "checker" in detail


def test_an_output_that_a_checker_cannot_read_is_wrong_also_where_none_is_expected(shared_judge):
    shouts = "def check(input, output, expected): raise ValueError('x\\nSyntaxError: ' + output)"
    for source in (CHECK, WHOLE, shouts, "def check(input, output, expected): 1 << int(eval(output))"):
        ((found, detail),) = judged(shared_judge, "print('garbage')", text("10", None, checker=Checker(source)))
        assert found == "wrong answer", detail
    for source in ("def check(input, output, expected) return 1", "import nowhere\n" + CHECK, "print(", "int main() {"):
        checker = Checker(source, "cpp" if "main" in source else "python")
        ((found, detail),) = judged(shared_judge, "print(1, 9)", text("10", None, checker=checker))
        assert found == "infrastructure", detail


@pytest.mark.parametrize("test", [text("", "3"), call("f", [], 3), Test(code="assert f() == 3")], ids=["stdin", "call", "code"])
def test_a_byte_order_mark_and_the_ends_of_lines_of_another_system_change_nothing(shared_judge, test):
    source = "\ufeffdef f():\r\n    return 3\r\nif __name__ == '__main__':\r\n    print(f())\r\n"
    assert judged(shared_judge, source, test) == [("accepted", "")]


@pytest.mark.parametrize("test", [text("", "3"), call("f", [], 3), Test(code="assert f() == 3")], ids=["stdin", "call", "code"])
def test_a_program_larger_than_half_the_disk_is_refused_and_nothing_raises(shared_judge, test):
    limits = Limits(time_s=10.0, memory_mb=256, disk_mb=1)
    for source in ("#" * (1 << 20), "# " + "\u20ac" * (1 << 18)):  # by its bytes
        found = judged(shared_judge, source, test, test, limits=limits)
        assert [verdict for verdict, _ in found] == ["compile error"] * 2 and "bytes" in found[0][1]
        assert len(judged(shared_judge, source, test, test, limits=limits, stop_at_first=True)) == 1


@pytest.mark.parametrize(
    "bad", [{"time_s": value} for value in (0, -1, float("nan"), float("inf"), 1e12, True, "3", None)]
    + [{"memory_mb": value} for value in (0, -1, 256.0, 10**18, True, "3", None)],
)  # fmt: skip
def test_limits_that_no_run_can_have_are_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        Limits(**bad)


def test_every_test_is_run_unless_told_otherwise(shared_judge):
    tests = [text("1", "1"), text("2", "0"), text("3", "3"), text("4", "0")]
    found = [verdict for verdict, _ in judged(shared_judge, "print(input())", *tests)]
    assert found == ["accepted", "wrong answer"] * 2
    found = [verdict for verdict, _ in judged(shared_judge, "print(input())", *tests, stop_at_first=True)]
    assert found == ["accepted", "wrong answer"]
    assert judged(shared_judge, "print(input())") == []


class Scripted:
    """A pool whose runs end as told."""

    workers, isolation = 1, "made up"

    def __init__(self, *executions):
        self.executions, self.jobs = list(executions), []

    async def run(self, job):
        self.jobs.append(job)
        return self.executions.pop(0) if len(self.executions) > 1 else self.executions[0]


@pytest.mark.parametrize("test", [text("", "1"), call("f", [], 1)], ids=["stdin", "call"])
@pytest.mark.parametrize("status", ["infrastructure", "time limit", "memory limit", "output limit", "runtime error"])
def test_the_status_of_a_run_is_its_verdict_whatever_it_printed(test, status):
    ended = Execution(status, b'{"value":1}', detail="why", cpu_s=1.0, wall_s=2.0, peak_memory_mb=3.0, isolation="made up")
    (one,) = asyncio.run(Judge(Scripted(ended)).judge(Program("x"), [test]))
    assert (one.verdict, one.detail, one.cpu_s, one.wall_s, one.peak_memory_mb, one.isolation) == (
        *(status, "why"), 1.0, 2.0, 3.0, "made up",
    )  # fmt: skip


def test_a_program_that_does_not_compile_is_not_started_for_every_test():
    report = b'  File "main.py", line 1\n    (\n    ^\nSyntaxError: never closed\n'
    pool = Scripted(Execution("runtime error", stderr=report, exit_code=1))
    verdicts = asyncio.run(Judge(pool).judge(Program("("), [text("", "1")] * 50))
    assert [one.verdict for one in verdicts] == ["compile error"] * 50 and len(pool.jobs) == 1


def test_expected_values_never_enter_the_program_s_sandbox():
    pool = Scripted(Execution("ok", stdout=b"1"))
    tests = [text("in", "EXPECTED"), call("f", ["in"], "EXPECTED")]
    asyncio.run(Judge(pool).judge(Program("x"), tests))
    assert len(pool.jobs) == 2
    for job in pool.jobs:
        assert "EXPECTED" not in job.source and b"EXPECTED" not in job.stdin and not job.files


def test_one_worker_is_enough_for_assertions_however_many_wait(shared_pool):
    with Pool(1, "none" if shared_pool.isolation == "none" else "bubblewrap") as pool:
        judge = Judge(pool)
        assert judged(judge, "def f(x): return x", *[Test(code="assert f(1) == 1")] * 6) == [("accepted", "")] * 6
        judge.close()


def test_a_program_that_waited_for_a_slow_test_is_not_late(shared_judge):
    slow = Test(code="import time\nassert f(1) == 1\ntime.sleep(3)\nassert f(2) == 2")
    ((verdict, detail),) = judged(shared_judge, "def f(x): return x", slow, limits=Limits(time_s=0.5, memory_mb=256))
    assert verdict == "infrastructure" and "waited" in detail
