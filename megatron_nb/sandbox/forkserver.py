"""The server inside the isolation: a clean fork of a warm interpreter for every program.

Run as a script; imports nothing of ours.
Two sockets come from outside. `jobs`: the forked child itself receives its job there, so the server never holds a program,
its input, or anything else that a later program could find in its own memory. `control`: children say that they start,
the server says how they ended, and is told which run to kill; its end of file ends everything.
A child waits in its own process table and mounts before its job arrives.
"""

import _signal
import atexit
import builtins
import contextlib
import ctypes
import gc
import io
import json
import linecache
import marshal
import mmap
import os
import random
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import types

# what programs usually import, loaded once for all
USUAL = [
    "abc", "array", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions",
    "functools", "heapq", "itertools", "math", "operator", "queue", "re", "statistics", "string", "typing", "weakref",
]  # fmt: skip
for usual in USUAL:
    __import__(usual)

CLONE_VM, NEWNS, NEWIPC, NEWPID = 0x100, 0x20000, 0x8000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_RELATIME = 1, 2, 4, 8, 32, 4096, 1 << 21
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 24, 36, 38
PAYLOAD_USER = 65534
STARTED, ENDED, FAILED = b"s", b"e", b"f"
libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]


libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
# without the interpreter's own work after a fork, which is for threads, and costs more than the rest of it
fork = getattr(ctypes.PyDLL(None), "_Fork", os.fork)
STACK = mmap.mmap(-1, 1 << 16)
STACK_TOP = ctypes.addressof(ctypes.c_char.from_buffer(STACK)) + (1 << 16) - 64


def check(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def prctl(option: int, value: int) -> None:
    check(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def serve(jobs: socket.socket, control: socket.socket, config: dict) -> tuple[dict, bytes, list[int]]:
    """Fork a child per run and report how it ended; returns only in a child, with its job."""
    isolated, number = config["isolated"], 0
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    while True:
        number += 1
        folder = "/tmp" if isolated else tempfile.mkdtemp(dir=config["folder"])
        first = 0
        if isolated:
            check(libc.unshare(NEWPID), "unshare")  # the next fork is process 1 of a new table, the one after it process 2
            first = stand()
        child = fork()
        if not child:
            try:
                os.close(own)
                return prepare(jobs, control, config, folder, number)
            except BaseException:
                control.send(FAILED + traceback.format_exc()[-2000:].encode())
                os._exit(1)
        if isolated:
            check(libc.setns(own, NEWPID), "setns")
        watch(control, number, child, first, config["folder"])
        if not isolated:
            shutil.rmtree(folder, ignore_errors=True)


def stand() -> int:
    """Start process 1 of a run's table; it takes every process of the run along at its end. Returns its number.

    It is libc's pause() on a stack of its own in this process's memory: nothing to copy, nothing that could be confused.
    It hears no signal but the server's SIGKILL, because this process blocks all of them.
    """
    pid = libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), STACK_TOP, CLONE_VM | signal.SIGCHLD, None)
    check(min(pid, 0), "clone")
    return pid


def watch(control: socket.socket, number: int, child: int, first: int, folders: str) -> None:
    """Wait for the end of a run, kill what is left of it, and report; exit when the outside is gone."""
    exited = os.pidfd_open(child)
    poll = select.poll()
    poll.register(exited, select.POLLIN)
    poll.register(control, select.POLLIN)
    ready = []
    while not any(fd == exited for fd, _ in ready):
        ready = poll.poll()
        if any(fd == control.fileno() for fd, _ in ready):
            order = control.recv(64)
            if not order:
                os.kill(first or child, signal.SIGKILL)
                if not first:
                    kill_orphans(child)
                    shutil.rmtree(folders, ignore_errors=True)
                os._exit(0)
            if struct.unpack("<Q", order)[0] == number:  # else it came too late, for a run that has ended
                os.kill(first or child, signal.SIGKILL)
    ended = time.monotonic()
    os.close(exited)
    _, status, usage = os.wait4(child, 0)
    seconds = usage.ru_utime + usage.ru_stime
    if first:
        os.kill(first, signal.SIGKILL)
        _, _, rest = os.wait4(first, 0)  # returns when every process of the table is dead
        seconds += rest.ru_utime + rest.ru_stime
    else:
        kill_orphans(child)
    control.send(ENDED + struct.pack("<Qiddq", number, status, ended, seconds, usage.ru_maxrss))


def kill_orphans(group: int) -> None:
    """Without a process table of its own: kill the run's group and whatever came to this subreaper."""
    while True:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            orphans = [int(pid) for pid in file.read().split()]
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.wait4(pid, 0)
        if not orphans:
            return


def prepare(jobs: socket.socket, control: socket.socket, config: dict, folder: str, number: int) -> tuple:
    """In the child: build its walls, wait for its job, drop every right. Returns the job's header, source, binary's fd."""
    isolated = config["isolated"]
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_DUMPABLE, 1)  # its own /proc/self is its own, unlike the server's
    if isolated:
        file = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(file, b"1000")  # the kernel ends the program, not the server
        os.close(file)
        check(libc.unshare(NEWNS | NEWIPC), "unshare mounts")
        size = disk_options(config["disk_mb"], config["files"], config)
        check(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV, size), "mount /tmp")
        flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
        if libc.mount(b"proc", b"/proc", b"proc", flags, b"subset=pid,hidepid=2"):  # older kernels know less
            check(libc.mount(b"proc", b"/proc", b"proc", flags, None), "mount /proc")
    os.setsid()  # the server must not be in its process group
    header, descriptors, *_ = socket.recv_fds(jobs, 1 << 16, 5)
    if not header:
        os._exit(0)
    job = marshal.loads(header)
    if isolated and (job["disk_mb"], job["files"]) != (config["disk_mb"], config["files"]):
        size = disk_options(job["disk_mb"], job["files"], config)
        check(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV | MS_REMOUNT, size), "remount /tmp")
    content = os.pread(descriptors[0], sum(length for _, length in job["parts"]), 0)
    os.chdir(folder)
    offset = 0
    for name, length in job["parts"]:
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
        os.write(file, content[offset : offset + length])
        os.close(file)
        offset += length
    job["folder"] = folder
    for standard, descriptor in enumerate(descriptors[1:4]):
        os.dup2(descriptor, standard)
    for kind, bound in job["limits"]:
        try:
            resource.setrlimit(kind, (bound, bound))
        except ValueError:  # the machine's own limit is lower
            ceiling = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (ceiling, ceiling))
    binary = descriptors[4:]
    if binary:
        binary = [binary[0] if binary[0] == 3 else os.dup2(binary[0], 3)]
        os.set_inheritable(3, False)
    control.send(STARTED + struct.pack("<Qdd", number, time.monotonic(), time.process_time()))
    jobs.detach()
    control.detach()
    os.closerange(4 if binary else 3, 1024)
    if isolated:
        drop_rights(config)
    return job, b"" if binary else content[: job["parts"][0][1]], binary


def disk_options(megabytes: int, files: int, config: dict) -> bytes:
    owner = f",uid={PAYLOAD_USER},gid={PAYLOAD_USER}" if config["two_users"] else ""
    return f"mode=0700,size={megabytes}m,nr_inodes={files}{owner}".encode()


def drop_rights(config: dict) -> None:
    """Become a user without capabilities who can never gain any, under the filter of system calls."""
    if config["two_users"]:
        os.setgroups([])
        os.setresgid(*[PAYLOAD_USER] * 3)
        os.setresuid(*[PAYLOAD_USER] * 3)
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    check(libc.capset(header, nothing), "capset")
    prctl(PR_SET_DUMPABLE, 1)  # a change of user takes its own /proc/self away
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    check(libc.prctl(PR_SET_SECCOMP, 2, FILTER, 0, 0), "seccomp")


def run_python(source: bytes, path: str) -> None:
    """Run a program as the interpreter would run a script, and exit with its code.

    sys.stdin, sys.stdout and sys.stderr are those of the server's start, unused so far: utf-8 as under -X utf8.
    """
    module = types.ModuleType("__main__")
    module.__file__, module.__builtins__ = path, builtins
    sys.modules["__main__"] = module
    sys.argv = [path]
    sys.path.insert(0, os.path.dirname(path))
    random.seed()  # else every program would draw the same numbers
    _signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the module beneath, which makes no enumeration of the old mask
    gc.enable()
    code = 0
    try:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        code = report(error)
    for finish in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush):
        try:
            finish()
        except BaseException as error:
            code = report(error) or 120
    try:
        sys.stderr.flush()
    finally:
        os._exit(code)


def report(error: BaseException) -> int:
    """The exit code of an exception that left the program, printed as the interpreter prints it."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    return 1


def warm_up() -> None:
    """Do once what the first program would otherwise pay for: the compiler's types, codecs, the printing of a traceback."""
    source = "import sys\nclass A:\n  def f(self, x): return [y * 2 for y in x]\nprint(f'{len(A().f(range(9)))}', 1.5)\n1 / 0"
    output, sys.stdout, sys.stderr = (sys.stdout, sys.stderr), io.StringIO(), io.StringIO()
    try:
        exec(compile(source, "main.py", "exec"), {})
    except ZeroDivisionError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout, sys.stderr = output
    with open(os.devnull, encoding="utf-8", errors="surrogateescape") as file:
        file.read()
    linecache.clearcache()


class FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


jobs_socket, control_socket = (socket.socket(fileno=int(argument)) for argument in sys.argv[1:3])
settings = json.loads(control_socket.recv(1 << 16))
FILTER = None
if settings["isolated"]:
    code_bytes = bytes.fromhex(settings["filter"])
    kept = FilterProgram(len(code_bytes) // 8, code_bytes)
    FILTER = ctypes.byref(kept)
    for device in os.listdir("/dev"):
        if not os.path.islink(f"/dev/{device}"):  # readable and writable, but not to be marked: times and modes outlive a run
            remount = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_RELATIME
            libc.mount(None, f"/dev/{device}".encode(), None, remount, None)  # refused where the host says noatime: a mark only
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
            break
prctl(PR_SET_CHILD_SUBREAPER, 1)
prctl(PR_SET_DUMPABLE, 0)  # hides it and process 1 of a run, which shares its memory, from programs of the same user
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.environ.clear()
os.umask(0o022)
warm_up()
gc.collect()
gc.disable()
gc.freeze()
control_socket.send(STARTED)
the_job, the_source, the_binary = serve(jobs_socket, control_socket, settings)
if the_binary:
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    _signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.execve(the_binary[0], ["main"], {})
run_python(the_source, os.path.join(the_job["folder"], the_job["parts"][0][0]))
