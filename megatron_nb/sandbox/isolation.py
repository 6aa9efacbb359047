"""The walls around a program: which parts of the system it sees, through bubblewrap."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

REMEDY = "install bubblewrap (apt-get install bubblewrap), allow user namespaces or run as root, or ask for isolation='none'"


class IsolationMissing(RuntimeError):
    """No isolation can be had on this machine; names the cause and the remedy."""


def interpreter() -> str:
    """The real interpreter behind a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable) or sys.executable)


def walls() -> list[str]:
    """Arguments of bubblewrap: no network, own process table, the system read-only, an empty /tmp."""
    prefix = os.path.realpath(sys.base_prefix)
    command = ["bwrap", "--unshare-user", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += ["--uid", "65534", "--gid", "65534", "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64"):
        command += ["--symlink", f"usr/{name}", f"/{name}"]
    if not prefix.startswith("/usr"):
        command += ["--ro-bind", prefix, prefix]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--size", str(64 << 20), "--tmpfs", "/tmp"]
    return command + ["--chdir", "/tmp", "--remount-ro", "/"]


def check() -> None:
    """Raise IsolationMissing unless bubblewrap can start a program here."""
    if shutil.which("bwrap") is None:
        raise IsolationMissing(f"bwrap is not on PATH: programs cannot be isolated; {REMEDY}")
    probe = subprocess.run([*walls(), "--", "/usr/bin/true"], capture_output=True, env={"PATH": os.environ["PATH"]})
    if probe.returncode:
        cause = probe.stderr.decode(errors="replace").strip()
        raise IsolationMissing(f"bwrap failed with code {probe.returncode}: {cause}; {REMEDY}")
