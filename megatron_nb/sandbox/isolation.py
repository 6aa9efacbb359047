"""The walls around a worker: a user namespace, and through bubblewrap everything else of its own."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron_nb.sandbox.execution import Limits
from megatron_nb.sandbox.seccomp import program

REMEDY = "install bubblewrap (apt-get install bubblewrap), allow user namespaces or run as root, or ask for isolation='none'"
SERVER = Path(__file__).with_name("forkserver.py")
PAYLOAD_USER = 65534  # as in forkserver.py
START_S = 60.0  # a machine with every core taken starts an interpreter this slowly at worst


class IsolationMissing(RuntimeError):
    """No isolation can be had on this machine; names the cause and the remedy."""


def interpreter() -> str:
    """The real interpreter behind a virtual environment or a shim."""
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    return os.path.realpath(base if base.exists() else getattr(sys, "_base_executable", sys.executable))


def walls() -> list[str]:
    """bubblewrap's arguments: what of the system is visible, all of it read-only; no network, own process table."""
    command = ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--as-pid-1", "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64", "lib32"):  # links into /usr on most systems, folders on some
        if os.path.islink(f"/{name}"):
            command += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        else:
            command += ["--ro-bind-try", f"/{name}", f"/{name}"]
    command += ["--perms", "0755", "--dir", "/etc"]
    for file in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"):
        command += ["--ro-bind-try", file, file]
    prefixes = {os.path.realpath(sys.base_prefix), os.path.dirname(os.path.dirname(interpreter()))}
    for prefix in sorted(prefix for prefix in prefixes if not prefix.startswith("/usr")):
        for parent in list(Path(prefix).parents)[-2::-1]:  # bubblewrap would make them for its own user only
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", prefix, prefix]
    command += ["--perms", "0755", "--dir", "/dev"]
    for device in ("null", "zero", "full", "random", "urandom"):
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for link, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        command += ["--symlink", f"/proc/self/fd{target}", f"/dev/{link}"]
    command += ["--symlink", "/tmp", "/dev/shm"]  # semaphores of multiprocessing, within the bounds of /tmp
    return [*command, "--proc", "/proc", "--dir", "/tmp", "--ro-bind", str(SERVER), "/forkserver.py", "--remount-ro", "/"]


class Server:
    """A running fork-server: its process, and the two sockets to it."""

    def __init__(self, isolation: str, join: Callable[[int], None] | None = None):
        """Start it; `join` puts a process into the control group while it waits to begin.

        Raises IsolationMissing with what bubblewrap or the server said when it does not come up.
        """
        self.jobs, jobs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # names the sender in our process table
        self.complaints = os.memfd_create("stderr")
        self.isolated = isolation == "bubblewrap"
        self.two_users = self.isolated and os.geteuid() == 0 and _mapped(PAYLOAD_USER)
        self.folder = "" if self.isolated else tempfile.mkdtemp(prefix=f"sandbox-{os.getpid()}-")
        started: list[int] = []
        self.process, self.inner, self.over = None, -1, False
        try:
            self._start(jobs, control, started, join)
            for end in (jobs, control):
                end.close()  # else a server that dies would not be noticed
            defaults = {"disk_mb": Limits.disk_mb, "files": Limits.files, "folder": self.folder}
            walls = {"isolated": self.isolated, "two_users": self.two_users, "filter": program().hex() if self.isolated else ""}
            self.control.send(json.dumps(walls | defaults).encode())
            self.control.settimeout(START_S)
            if self.control.recv(64) != b"s":
                raise OSError("the server ended before it was ready")
            self.control.settimeout(None)
        except (OSError, ValueError) as error:
            said = self.said() or "no message"
            self.close()
            raise IsolationMissing(f"{error}: {said}; {REMEDY}") from error
        finally:
            for end in (jobs, control):
                end.close()
            for descriptor in started:
                os.close(descriptor)

    def _start(self, jobs: socket.socket, control: socket.socket, opened: list[int], join) -> None:
        fds = [str(jobs.fileno()), str(control.fileno())]
        python = [interpreter(), "-I", "-B", "-X", "utf8"]
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": self.complaints, "env": {}}
        if not self.isolated:
            kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH")}
            options |= {"env": kept, "pass_fds": [int(fd) for fd in fds], "start_new_session": True}
            self.process = subprocess.Popen([*python, str(SERVER), *fds], **options)
            return
        tool = shutil.which("bwrap")
        if tool is None:
            raise OSError("bwrap is not on PATH, programs cannot be isolated")
        info_read, info_write = os.pipe()
        block_read, block_write = os.pipe()
        opened += [info_read, info_write, block_read, block_write]
        command, passed = [tool, *walls(), "--info-fd", str(info_write)], [*map(int, fds), info_write, block_read]
        if self.two_users:  # the program's user differs from the server's; only root may map two
            command += ["--userns-block-fd", str(block_read)]
        else:
            command += ["--block-fd", str(block_read), "--uid", "0", "--gid", "0", "--cap-add", "ALL"]
        self.process = subprocess.Popen([*command, "--", *python, "/forkserver.py", *fds], pass_fds=passed, **options)
        opened.remove(info_write)
        os.close(info_write)
        text = b""
        while b"}" not in text:
            more = os.read(info_read, 4096)
            if not more:
                raise OSError("bwrap failed")
            text += more
        pid = json.loads(text)["child-pid"]
        self.inner = os.pidfd_open(pid)
        if join:
            join(self.process.pid)
            join(pid)
        if self.two_users:
            for kind in ("uid_map", "gid_map"):
                Path(f"/proc/{pid}/{kind}").write_text(f"0 0 1\n{PAYLOAD_USER} {PAYLOAD_USER} 1\n")
        os.write(block_write, b"x")

    def said(self) -> str:
        """The end of what it wrote to stderr."""
        size = os.fstat(self.complaints).st_size
        return os.pread(self.complaints, 2000, max(0, size - 2000)).decode(errors="replace").strip()

    def kill(self, wait_s: float = 10.0) -> None:
        """End it with everything in it, and wait until all of it is gone."""
        self.over = True
        if self.inner >= 0:
            with suppress(OSError):
                signal.pidfd_send_signal(self.inner, signal.SIGKILL)
            gone = select.poll()
            gone.register(self.inner, select.POLLIN)
            gone.poll(wait_s * 1000)  # process 1 of a table is over when all others are
            os.close(self.inner)
            self.inner = -1
        for end in (self.jobs, self.control):
            end.close()  # which a server without a table of its own takes as the order to clean up
        if self.process is not None:
            if not self.isolated:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(min(wait_s, 2.0))
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        self.kill()
        os.close(self.complaints)
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def _mapped(user: int) -> bool:
    """Whether this process's user namespace knows a user."""
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= user < first + count for first, _, count in ranges)
