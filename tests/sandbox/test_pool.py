"""Programs run as the interpreter would run them, and every bound ends a run with its status."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from megatron_nb.sandbox.execution import Job, Limits
from megatron_nb.sandbox.pool import IsolationMissing, Pool

needs_gxx = pytest.mark.skipif(not os.path.exists("/usr/bin/g++"), reason="no /usr/bin/g++")


@pytest.fixture(scope="module", params=["bubblewrap", "none"])
def pool(request):
    try:
        pool = Pool(2, isolation=request.param)
    except IsolationMissing as error:
        pytest.skip(str(error))
    with pool:
        yield pool


def run(pool, source, stdin=b"", language="python", files=(), **bounds):
    return pool.submit(Job(source, language, stdin, Limits(**bounds), files)).result(timeout=120)


PROGRAMS = {  # name: (source, stdin, stdout)
    "input": ("print(int(input()) * 2)", b"21\n", b"42\n"),
    "input without a newline at the end": ("print(input(), input())", b"a\nb", b"a b\n"),
    "bytes": ("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])", bytes(range(256)), bytes(range(256))[::-1]),
    "descriptors": ("import os; os.write(1, os.read(0, 100))", b"exact\r\n", b"exact\r\n"),
    "file of stdin": ("print(open(0).read().split())", b"1 2\n", b"['1', '2']\n"),
    "device of stdin": ("print(open('/dev/stdin').read())", b"x", b"x\n"),
    "device of stdout": ("open('/dev/stdout', 'w').write('x')", b"", b"x"),
    "utf-8": ("print(input()[::-1])", "aé日\n".encode(), "日éa\n".encode()),
    "bytes that are no utf-8": ("print(input())", b"\xff\xfe\n", b"\xff\xfe\n"),
    "main": ("if __name__ == '__main__': print(__name__, __file__.rpartition('/')[2])", b"", b"__main__ main.py\n"),
    "exit": ("print(1); exit()", b"", b"1\n"),
    "quit of code 0": ("import sys; print(1); sys.exit(0)", b"", b"1\n"),
    "own source": ("print(len(open(__file__).read()))", b"", b"33\n"),
    "threads": ("import threading\nt = threading.Thread(target=print, args=('in',)); t.start()", b"", b"in\n"),
    "atexit": ("import atexit; atexit.register(print, 'bye'); print('hi')", b"", b"hi\nbye\n"),
    "no flush needed": ("import sys; sys.stdout.write('x')", b"", b"x"),
    "other modules": ("import subprocess, csv, enum, hashlib; print(hashlib.md5(b'').hexdigest()[:4])", b"", b"d41d\n"),
    "garbage collected": ("import gc; print(gc.isenabled())", b"", b"True\n"),
    "pool of processes": (
        "from concurrent.futures import ProcessPoolExecutor\ndef f(x): return x + 1\n"
        "with ProcessPoolExecutor(2) as pool: print(*pool.map(f, [1, 2]))", b"", b"2 3\n",
    ),
    "queue of processes": (
        "import multiprocessing as mp\nq = mp.Queue()\np = mp.Process(target=q.put, args=(5,))\np.start()\n"
        "print(q.get())\np.join()", b"", b"5\n",
    ),
    "pickle of main's class": ("import pickle\nclass A: 0\nprint(type(pickle.loads(pickle.dumps(A()))) is A)", b"", b"True\n"),
    "dataclass": ("from dataclasses import dataclass\n@dataclass\nclass A: x: int = 1\nprint(A())", b"", b"A(x=1)\n"),
    "annotations are the program's": ("def f(x: int): pass\nprint(f.__annotations__)", b"", b"{'x': <class 'int'>}\n"),
    "recursion limit": ("import sys; print(sys.getrecursionlimit())", b"", b"1000\n"),
    "fork": ("import os\nif os.fork() == 0: os._exit(3)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))", b"", b"3\n"),
    "event loop": ("import asyncio\nasync def f(): return 7\nprint(asyncio.run(f()))", b"", b"7\n"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_behaves_as_under_the_interpreter(pool, name):
    source, stdin, stdout = PROGRAMS[name]
    execution = run(pool, source, stdin)
    assert (execution.status, execution.stdout, execution.exit_code) == ("ok", stdout, 0), execution


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("import sys; sys.exit(3)", 3, b""),
        ("import sys; sys.exit('no')", 1, b"no\n"),
        ("import sys; sys.exit(-1)", 255, b""),
        ("x = 1\ndef f():\n    return 1 / 0\nf()", 1, b'main.py", line 3, in f\n    return 1 / 0\n'),
        ("def f(:", 1, b"SyntaxError: invalid syntax\n"),
        ("def f(): f()\nf()", 1, b"RecursionError: maximum recursion depth exceeded\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, b""),
        ("import os; os.abort()", -6, b""),
        ("import ctypes; ctypes.string_at(0)", -11, b""),
        ("raise SystemExit(7)", 7, b""),
        ("print('x'); raise ValueError('héé')", 1, "ValueError: héé\n".encode()),
    ],
)
def test_exit_codes_signals_and_tracebacks_are_the_programs_own(pool, source, code, said):
    execution = run(pool, source)
    assert (execution.status, execution.exit_code) == ("runtime error", code), execution
    assert said in execution.stderr, execution.stderr
    assert b"forkserver" not in execution.stderr
    assert str(abs(code)) in execution.detail


def test_each_bound_ends_a_run_with_its_status(pool):
    spin = run(pool, "while True: pass", time_s=0.3)
    assert (spin.status, spin.exit_code) == ("time limit", -9)
    assert spin.wall_s < spin_deadline(0.3)
    slept = run(pool, "import time; time.sleep(30)", time_s=0.3)
    assert slept.status == "time limit" and "clock" in slept.detail
    assert 0.3 <= slept.wall_s < spin_deadline(0.3) and slept.cpu_s < 0.2
    flood = run(pool, "while True: print('x' * 100)", output_bytes=1000)
    assert (flood.status, len(flood.stdout)) == ("output limit", 1000)
    assert run(pool, "print('x' * 999)", output_bytes=1000).status == "ok"
    assert run(pool, "print('x' * 1000)", output_bytes=1000).status == "output limit"
    assert run(pool, "x = [0] * 10**9", memory_mb=64).status == "memory limit"
    assert run(pool, "x = b'x' * (40 << 20); print(len(x))", memory_mb=128).status == "ok"


def spin_deadline(time_s: float) -> float:
    return Limits(time_s=time_s).deadline_s + 1.0


def test_time_and_memory_are_those_of_the_program(pool):
    burnt = run(pool, "import time\nwhile time.process_time() < 0.3: pass", time_s=5)
    assert burnt.status == "ok" and 0.25 < burnt.cpu_s < 0.6
    grown = run(pool, "x = b'x' * (60 << 20)", memory_mb=256)
    assert grown.status == "ok" and 55 < grown.peak_memory_mb < 100
    assert run(pool, "pass").peak_memory_mb < 40


WAITING = {
    "main": "work()",
    "thread": "import threading\nthreading.stack_size(1 << 26)\nt = threading.Thread(target=work)\nt.start()\nt.join()",
    "child": "import os\nif os.fork() == 0:\n    work()\n    os._exit(0)\nos.wait()",
}


@pytest.mark.parametrize("kind", WAITING)
def test_waiting_for_a_core_is_not_the_programs_time(kind):
    """Eight programs of 0.15 s of CPU on two cores with a limit of 0.3 s: the clock alone would fail some of them.

    Nor is it where the first thread sleeps until another, or a child, is done.
    """
    source = "import time\ndef work():\n    while time.process_time() < 0.15: pass\n    print('done')\n" + WAITING[kind]
    with Pool(8, isolation="none") as pool:
        futures = [pool.submit(Job(source, limits=Limits(time_s=0.3))) for _ in range(8)]
        results = [future.result() for future in futures]
    late = [result for result in results if result.status != "ok"]
    assert all("deadline" in result.detail for result in late), late  # on a machine with a queue of many, the deadline alone
    assert len(late) < 4


def test_files_are_placed_read_only_in_the_working_folder(pool):
    source = "import os, stat; print(open('data.txt').read(), oct(os.stat('data.txt').st_mode & 0o777))"
    assert run(pool, source, files=(("data.txt", b"content"),)).stdout == b"content 0o444\n"


def test_a_full_disk_of_the_run_before_does_not_count(pool):
    for _ in range(4):
        filled = run(pool, "open('x', 'wb').write(bytes(60 << 20)); print(1)", disk_mb=64, memory_mb=256)
        assert filled.status == "ok", filled
        tight = run(pool, "x = b'x' * (60 << 20); print(len(x))", memory_mb=96)
        assert tight.status == "ok" and tight.peak_memory_mb > 40, tight


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (Job("", language="java"), "language='java'"),
        (Job("", files=(("../x", b""),)), "file name '../x'"),
        (Job("", files=(("a", b""), ("a", b""))), "file name 'a'"),
        (Job("", limits=Limits(processes=0)), "above zero"),
        (Job("", files=(("a", b"x" * (2 << 20)),), limits=Limits(disk_mb=1)), "do not fit the disk"),
    ],
)
def test_a_job_no_sandbox_could_run_is_refused_by_name(pool, job, said):
    with pytest.raises(ValueError, match=said):
        pool.submit(job)


CPP = "#include <iostream>\nint main() { long long x; std::cin >> x; std::cout << x * 2 << std::endl; }"


@needs_gxx
def test_a_cpp_program_is_compiled_once_and_run_many_times(pool):
    for number in range(4):
        execution = run(pool, CPP, b"%d" % number, "cpp")
        assert (execution.status, execution.stdout) == ("ok", b"%d\n" % (2 * number)), execution
    assert len(pool._binaries) == 1


@needs_gxx
@pytest.mark.parametrize(
    ("source", "status", "code"),
    [
        ("int main() { return x; }", "compile error", 1),
        ("int main() { return 3; }", "runtime error", 3),
        ("int main() { int *p = nullptr; return *(volatile int *)p; }", "runtime error", -11),
        ("#include <cstdlib>\nint main() { abort(); }", "runtime error", -6),
        ("int main() { volatile int x = 0; while (true) x++; }", "time limit", -9),
        ("#include <vector>\nint main() { std::vector<int> v(400000000, 1); return v[7]; }", "memory limit", None),
        ("#include <cstdio>\nint main() { for (;;) puts(\"x\"); }", "output limit", -9),
        ("int f(int n) { volatile char b[1000]; b[n % 1000] = 1; return f(n + 1) + b[0]; } int main() { return f(0); }",
         ("runtime error", "memory limit"), None),  # the stack may be as large as the memory
    ],
)  # fmt: skip
def test_a_cpp_program_meets_the_same_bounds(pool, source, status, code):
    execution = run(pool, source, language="cpp", time_s=1.0, memory_mb=256)
    assert execution.status in status, execution
    assert code is None or execution.exit_code == code
    if status == "compile error":
        assert b"not declared" in execution.stderr


def test_a_session_talks_line_by_line_and_ends_with_an_execution(pool):
    async def talk():
        session = await pool.session(Job("print('ready', flush=True)\nwhile True: print(int(input()) + 1, flush=True)"))
        lines = [await session.receive(30)]
        for number in range(50):
            await session.send(b"%d\n" % number)
            lines.append(await session.receive(30))
        execution = await session.end()
        return lines, await session.receive(1), execution

    lines, after, execution = asyncio.run(talk())
    assert lines == [b"ready\n"] + [b"%d\n" % (number + 1) for number in range(50)]
    assert after is None
    assert (execution.status, execution.exit_code) == ("runtime error", 1)  # the end of its input
    assert b"".join(lines) == execution.stdout


def test_a_session_is_bounded_and_carries_much_in_both_directions(pool):
    async def talk():
        quiet = await pool.session(Job("import time; time.sleep(30)", limits=Limits(time_s=0.3)))
        with pytest.raises(TimeoutError):
            await quiet.receive(0.01)
        ended = await quiet.receive(30), (await quiet.end()).status
        echo = await pool.session(Job("import sys\nfor line in sys.stdin: print(len(line), end=';')"))
        await echo.send((b"x" * 200_000 + b"\n") * 5)
        return ended, (await echo.end()).stdout

    assert asyncio.run(talk()) == ((None, "time limit"), b"200001;" * 5)


def test_many_loops_and_threads_share_a_pool(pool):
    async def several(start):
        return [e.stdout for e in await asyncio.gather(*(pool.run(Job(f"print({start + i})")) for i in range(5)))]

    results = {}
    threads = [threading.Thread(target=lambda k=k: results.update({k: asyncio.run(several(10 * k))})) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: [b"%d\n" % (10 * k + i) for i in range(5)] for k in range(4)}
