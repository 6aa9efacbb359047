"""The walls one by one: the filter of system calls, control groups, plain users, and what happens where walls are missing."""

from __future__ import annotations

import errno
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_nb.sandbox import cgroup, seccomp
from megatron_nb.sandbox.execution import Job
from megatron_nb.sandbox.isolation import IsolationMissing
from megatron_nb.sandbox.pool import Pool

ROOT = Path(__file__).parents[2]
HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}
COLUMN = {"x86_64": 0, "aarch64": 1}


def evaluate(machine: str, number: int, arguments: tuple[int, ...] = (), architecture: int | None = None) -> int:
    """What the kernel's interpreter would return for one call."""
    own = seccomp.X86 if machine == "x86_64" else seccomp.ARM
    data = struct.pack("<IIQ6Q", number, architecture or own, 0, *arguments, *[0] * (6 - len(arguments)))
    lines = list(struct.iter_unpack("<HBBI", seccomp.program(machine)))
    here = value = 0
    while True:
        operation, true, false, operand = lines[here]
        here += 1
        if operation == seccomp.LOAD:
            value = struct.unpack_from("<I", data, operand)[0]
        elif operation == seccomp.RETURN:
            return operand
        else:
            taken = {
                seccomp.EQUAL: value == operand,
                seccomp.AT_LEAST: value >= operand,
                seccomp.ANY_BIT: bool(value & operand),
            }[operation]
            here += true if taken else false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_denies_every_call_of_its_table_and_allows_the_ordinary(machine):
    denied = seccomp.ERRNO | errno.EPERM
    for name, numbers in seccomp.DENIED.items():
        if numbers[COLUMN[machine]] is not None:
            assert evaluate(machine, numbers[COLUMN[machine]]) == denied, name
    number = {name: numbers[COLUMN[machine]] for name, numbers in seccomp.CHECKED.items()}
    assert evaluate(machine, number["clone3"]) == seccomp.ERRNO | errno.ENOSYS
    for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert evaluate(machine, number["clone"], (bit | 17,)) == denied
    assert evaluate(machine, number["clone"], (0x3D0F00,)) == seccomp.ALLOW  # a thread
    assert evaluate(machine, number["socketpair"], (1,)) == seccomp.ALLOW
    assert evaluate(machine, number["socketpair"], (2,)) == denied
    assert evaluate(machine, number["ioctl"], (0, seccomp.TIOCSTI)) == denied
    assert evaluate(machine, number["ioctl"], (0, 0x5401)) == seccomp.ALLOW
    assert evaluate(machine, number["mmap"], (0, 1 << 21, 3, 0x40022)) == denied  # huge pages
    assert evaluate(machine, number["mmap"], (0, 1 << 21, 3, 0x22)) == seccomp.ALLOW
    assert evaluate(machine, 0, architecture=0x40000003) == seccomp.KILL  # 32-bit calls
    for ordinary in {"x86_64": (0, 1, 3, 59, 60, 231, 257), "aarch64": (56, 57, 63, 64, 93, 94, 221)}[machine]:
        assert evaluate(machine, ordinary) == seccomp.ALLOW
    if machine == "x86_64":
        assert evaluate(machine, 0x40000000 | 1) == denied


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_numbers_of_the_calls_are_the_kernels(machine):
    if not Path(HEADERS[machine]).exists():
        pytest.skip(f"no {HEADERS[machine]}")
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(HEADERS[machine]).read_text()))
    compared = 0
    for name, numbers in {**seccomp.DENIED, **seccomp.CHECKED}.items():
        if name in known:
            assert numbers[COLUMN[machine]] == int(known[name]), name
            compared += 1
    assert compared > 60


def test_an_unknown_architecture_is_named():
    with pytest.raises(ValueError, match="machine='mips'"):
        seccomp.program("mips")


def test_version_2_groups_are_made_where_delegated_and_bounded(tmp_path, monkeypatch):
    """Against a folder with the kernel's file names: no machine of ours delegates version 2."""
    own = tmp_path / "user.slice" / "job.scope"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("cpu memory pids")
    (own / "cgroup.subtree_control").write_text("")
    (own / "cgroup.procs").write_text(f"{os.getpid()}\n")
    monkeypatch.setattr(cgroup, "own_groups", lambda: iter([("", "user.slice/job.scope")]))
    group = cgroup.create("x", tmp_path)
    assert isinstance(group, cgroup.Version2)
    folder = group.folders[0]
    assert folder.parent == own
    assert (own / cgroup.HOST / "cgroup.procs").read_text() == str(os.getpid())  # the parent itself must hold no process
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids"
    group.limit(1 << 20, 5)
    assert [(folder / name).read_text() for name in ("memory.max", "pids.max", "memory.swap.max")] == [str(1 << 20), "5", "0"]
    (folder / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    (folder / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (folder / "memory.peak").write_text("4096")
    group.reset_peak()
    (folder / "memory.peak").write_text("8192")
    assert (group.cpu_s(), group.kills(), group.peak_bytes()) == (1.5, 2, 8192)


@pytest.mark.parametrize("fault", ["not delegated", "others in the group", "no controllers"])
def test_version_2_without_delegation_gives_no_group(tmp_path, monkeypatch, fault):
    (tmp_path / "cgroup.controllers").write_text("" if fault == "no controllers" else "memory pids")
    (tmp_path / "cgroup.subtree_control").write_text("memory pids")
    (tmp_path / "cgroup.procs").write_text("1\n")
    monkeypatch.setattr(cgroup, "own_groups", lambda: iter([("", "")]))
    if fault == "not delegated":
        monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(PermissionError()))
    if fault == "others in the group":
        (tmp_path / "cgroup.subtree_control").write_text("")
        monkeypatch.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(OSError(errno.EBUSY, "busy")))
    assert cgroup.create("x", tmp_path) is None


def test_groups_of_dead_processes_are_swept_and_those_of_living_ones_stay(tmp_path, monkeypatch):
    parents = [tmp_path / name / "own" for name in cgroup.CONTROLLERS]
    for parent in parents:
        parent.mkdir(parents=True)
    monkeypatch.setattr(cgroup, "own_groups", lambda: iter([(name, "own") for name in cgroup.CONTROLLERS]))
    pid = os.getpid()
    living = f"{cgroup.PREFIX}{pid}-{cgroup.started(pid)}-0"
    for name in (living, f"{cgroup.PREFIX}{pid}-1-0", f"{cgroup.PREFIX}4194304-7-0"):
        (parents[0] / name).mkdir()
    beside = tmp_path / "memory" / "another" / f"{cgroup.PREFIX}4194304-7-1"
    beside.mkdir(parents=True)
    cgroup.sweep(tmp_path)
    assert [path.name for path in parents[0].iterdir()] == [living]
    assert not beside.exists()


def test_a_missing_bubblewrap_is_refused_with_cause_and_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(IsolationMissing, match=r"bwrap is not on PATH.*apt-get install bubblewrap.*isolation='none'"):
        Pool(1)


@pytest.mark.parametrize("script", ["echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "exit 0"])
def test_a_failing_bubblewrap_is_refused_with_its_own_words(monkeypatch, tmp_path, script):
    tool = tmp_path / "bwrap"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(IsolationMissing, match="No permissions|no message"):
        Pool(2)


def test_without_isolation_every_execution_says_so():
    with Pool(1, isolation="none") as pool:
        execution = pool.submit(Job("print(1)")).result()
    assert (execution.status, execution.isolation) == ("ok", "none")


def test_an_unknown_isolation_is_refused():
    with pytest.raises(ValueError, match="isolation='docker' must be"):
        Pool(1, isolation="docker")


ROOTLESS = """
import sys
from megatron_nb.sandbox.execution import Job, Limits
from megatron_nb.sandbox.pool import IsolationMissing, Pool
try:
    pool = Pool(1)
except IsolationMissing as error:
    print("missing", error); sys.exit()
def run(source, **bounds):
    execution = pool.submit(Job(source, limits=Limits(**bounds))).result()
    return execution.status, execution.stdout.decode().strip()
with pool:
    print(pool._workers[0].name)
    print(run("import os; print(os.path.exists('/proc/1'), os.path.exists('/etc/passwd'))"))
    print(run("import os\\nfor s in (9, 2, 15): os.kill(1, s)\\nprint('alive')"))
    print(run("open('/proc/self/uid_map', 'w').write('0 0 1')")[0])
    print(run("while True: pass", time_s=0.2)[0])
    print(run("import os\\nwhile True:\\n try: os.fork()\\n except OSError: pass", time_s=0.2)[0])
    print(run('''
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(b"x") * (40 << 20); time.sleep(30)
time.sleep(30)''', memory_mb=128, time_s=3)[0])
    print(run("print(1)"))
"""


def test_a_plain_user_is_isolated_by_user_namespaces_and_bounded_without_control_groups(tmp_path):
    system = shutil.which("python3", path="/usr/bin")
    if os.geteuid() != 0 or not system or not shutil.which("setpriv"):
        pytest.skip("needs root to become a plain user, /usr/bin/python3 and setpriv")
    version = subprocess.run([system, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True, text=True)
    if version.stdout.strip() != "True":
        pytest.skip("/usr/bin/python3 is older than 3.11")
    folder = Path("/tmp") / f"rootless-{os.getpid()}"  # pytest's own folders are closed to other users
    try:
        shutil.copytree(ROOT / "megatron_nb" / "sandbox", folder / "megatron_nb" / "sandbox")
        (folder / "megatron_nb" / "__init__.py").touch()
        (folder / "megatron_nb" / "py.typed").touch()
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [*become, system, "-c", ROOTLESS]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=120)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if result.stdout.startswith("missing"):
        pytest.skip(result.stdout)
    assert result.stdout.splitlines() == [
        "bubblewrap", "('ok', 'False False')", "('ok', 'alive')", "runtime error", "time limit", "time limit", "memory limit",
        "('ok', '1')",
    ], result.stderr  # fmt: skip


def test_a_program_sees_the_interpreter_and_the_system_and_nothing_else_of_the_machine():
    try:
        pool = Pool(1)
    except IsolationMissing as error:
        pytest.skip(str(error))
    source = """
import os, sys
print(sorted(os.listdir('/')), dict(os.environ), open('/proc/self/environ').read().replace('PWD=/', '').strip('\\0'))
home = os.path.dirname(os.path.dirname(sys.prefix))
print(os.listdir(home) if not sys.prefix.startswith('/usr') else 'usr')
"""
    with pool:
        execution = pool.submit(Job(source)).result()
    assert execution.status == "ok", execution
    top, below = execution.stdout.decode().splitlines()
    allowed = {"bin", "dev", "etc", "forkserver.py", "lib", "lib32", "lib64", "proc", "tmp", "usr"}
    allowed.add(Path(sys.base_prefix).parts[1])
    assert set(eval(top.split("]")[0] + "]")) <= allowed
    assert top.endswith("{} ")
    assert below == "usr" or len(eval(below)) <= 1
