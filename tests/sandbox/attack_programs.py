"""Programs that try to get out of the sandbox, hang it, or cheat it. They print BREACH with what they reached.

An attack names the statuses its run may end with. `harmless` ones may also run without isolation, where they must succeed:
that shows that the isolation stops them and not the attack's own mistake. Nothing destructive is harmless.
"""

from __future__ import annotations

from tests.sandbox.attack_processes import LANGUAGE, PROCESSES, Attack

PRELUDE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def breach(*what): print("BREACH", *what, flush=True)
def attempt(what, action):
    try: value = action()
    except (OSError, ValueError, AttributeError): return
    breach(what, value)
def call(what, number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if ctypes.get_errno() not in (1, 38): breach(what, result, ctypes.get_errno())
"""


def attacks() -> list[Attack]:
    return [*CASES, *SYSTEM, *FILES, *PROCESSES, *LANGUAGE, *map(_calls, CALLS)]


CASES = [
    Attack("spin", "while True: pass", ("time limit",)),
    Attack("fork bomb", "while True:\n try: os.fork()\n except OSError: pass", ("time limit",)),
    Attack("ten gigabytes", "x = b'x' * 10**10", ("memory limit",)),
    Attack("endless allocation", "x = []\nwhile True: x.append(b'x' * (1 << 22))", ("memory limit",), limits=(("time_s", 5),)),
    Attack("a gigabyte of output", "for _ in range(1 << 14): sys.stdout.write('x' * 65536)", ("output limit",)),
    Attack("ignored signals", """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass""", ("time limit",)),
    Attack("sleep", "time.sleep(60)", ("time limit",)),
    Attack("grandchild outlives its parent", "if os.fork() == 0: time.sleep(60)"),
    Attack("working folder deleted", "import shutil; shutil.rmtree(os.getcwd(), True); print(os.listdir('/tmp'))"),
    Attack("judge's environment", """
for pid in [p for p in os.listdir('/proc') if p.isdigit()]:
    try: data = open(f'/proc/{pid}/environ', 'rb').read()
    except OSError: continue
    if b'PATH=' in data: breach(data)""", harmless=True),
    Attack("judge's files", "attempt('secret', lambda: open(input()).read())", harmless=True),
    Attack("judge's memory", """
for pid in [p for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()]:
    attempt('memory of ' + pid, lambda: open(f'/proc/{pid}/mem', 'rb', 0).fileno())""", harmless=True),
    Attack("sockets", """
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 16, 17):
    attempt(f'socket {family}', lambda: socket.socket(family, socket.SOCK_DGRAM))""", harmless=True),
    Attack("descriptors", """
for fd in range(3, 1024):
    try: os.write(fd, b'evil')
    except OSError as error:
        if error.errno == 9: continue
    breach('descriptor', fd)
""", harmless=False),
    Attack("disk", """
total = 0
try:
    while True:
        with open(f'/tmp/{total}', 'wb') as file: file.write(b'x' * (1 << 20))
        total += 1
except OSError: pass
if total > 16: breach(total, 'MB')""", limits=(("disk_mb", 16),)),
    Attack("os._exit(0)", "os._exit(0)"),
    Attack("comparison replaced", "import builtins; builtins.print = builtins.len = lambda *a: 42; type.__eq__ = 1",
           ("runtime error",)),
    Attack("recursion", "def f(n): return f(n + 1)\nf(0)", ("runtime error",)),
    Attack("recursion without a limit", "sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)",
           ("memory limit", "runtime error", "time limit"), limits=(("memory_mb", 128),)),
]  # fmt: skip

# system calls by what they would open: name, x86_64 number, arguments that do no harm if they get through
CALLS = {
    "call other processes": "ptrace 101 0 0 0 0|process_vm_readv 310 1 0 0 0 0 0|process_vm_writev 311 1 0 0 0 0 0|"
    "kcmp 312 0 0 0|pidfd_getfd 438 -1 0 0|move_pages 279 0 0 0 0 0 0|userfaultfd 323 0",
    "call kernel keys": "add_key 248|request_key 249|keyctl 250 0",
    "call programs in the kernel": "bpf 321 0 0 0|perf_event_open 298 0 0 -1 -1 0|io_uring_setup 425 1 0|io_uring_enter 426 -1|"
    "io_uring_register 427 -1|init_module 175 0 0 0|finit_module 313 -1 0 0|delete_module 176 0 0|kexec_load 246 0 0 0 0|"
    "kexec_file_load 320 -1",
    "call mounts": "mount 165 0 0 0 0 0|umount2 166 0 0|pivot_root 155 0 0|chroot 161 0|open_tree 428 -1 0 0|move_mount 429 -1|"
    "fsopen 430 0 0|fsconfig 431 -1|fsmount 432 -1|fspick 433 -1|mount_setattr 442 -1|statmount 457 0|listmount 458 0",
    "call namespaces": "setns 308 -1 0|unshare 272 0x10000000|clone3 435 0 0|open_by_handle_at 304 -1 0 0|"
    "name_to_handle_at 303 -1 0 0 0",
    "call clocks and names": "clock_settime 227 0 0|settimeofday 164 0 0|adjtimex 159 0|clock_adjtime 305 0 0|"
    "sethostname 170 0 0|setdomainname 171 0 0",
    "call the machine": "swapon 167 0 0|swapoff 168 0|reboot 169 0 0 0|acct 163 -1|syslog 103 3 0 0|quotactl 179 0 0 0 0|"
    "vhangup 153|iopl 172 3|ioperm 173 0 1 1|modify_ldt 154 0 0 0|fanotify_init 300 0 0",
    "call memory without an owner": "memfd_create 319 0 0|memfd_secret 447 0|shmget 29 0 4096 0o1600|semget 64 0 1 0o1600|"
    "msgget 68 0 0o1600|mq_open 240 0 0",
    "call personality and sockets": "personality 135 0xffffffff|socket 41 1 1 0|connect 42 -1 0 0|bind 49 -1 0 0|"
    "listen 50 -1 0",
}
HARMLESS_CALLS = ("call kernel keys", "call memory without an owner", "call personality and sockets")


def _calls(name: str) -> Attack:
    lines = []
    for line in CALLS[name].split("|"):
        call, number, *arguments = line.split()
        lines.append(f"call({call!r}, {number}, {', '.join(arguments or ['0'])})")
    return Attack(name, "\n".join(lines), harmless=name in HARMLESS_CALLS)


SYSTEM = [
    Attack("clone into namespaces", """
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    ctypes.set_errno(0)
    pid = libc.syscall(56, ctypes.c_long(flag | 17), 0, 0, 0, 0)
    if pid == 0: os._exit(0)
    if pid > 0 or ctypes.get_errno() != 1: breach(hex(flag), pid)"""),
    Attack("x32 calls", "ctypes.set_errno(0); libc.syscall(ctypes.c_long(0x40000000 + 39)); e = ctypes.get_errno()\n"
           "if e not in (1, 38): breach(e)"),
    Attack("user changes", """
attempt('setuid', lambda: os.setuid(0)); attempt('setgid', lambda: os.setgid(0)); attempt('groups', lambda: os.setgroups([0]))
if os.getuid() == 0 and open('/proc/self/uid_map').read().split()[1:] != ['0', '1']: pass
""" , harmless=False),
    Attack("capabilities", """
status = dict(line.split(':', 1) for line in open('/proc/self/status'))
for name in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb'):
    if int(status[name], 16): breach(name, status[name])
if status['NoNewPrivs'].strip() != '1': breach('may gain privileges')
if status['Seccomp'].strip() != '2': breach('no filter')
if libc.prctl(47, 2, 21, 0, 0) == 0: breach('ambient capability')""", harmless=True),
    Attack("filter undone", "if libc.prctl(22, 0, 0, 0, 0) == 0 or libc.prctl(38, 0, 0, 0, 0) == 0: breach('undone')"),
    Attack("nice and real time", """
attempt('nice', lambda: os.nice(-5))
attempt('fifo', lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))""", harmless=True),
    Attack("one core taken", "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print('ok')"),
    Attack("limits raised", """
import resource
for name in ('NOFILE', 'CPU', 'FSIZE', 'CORE', 'NPROC'):
    kind = getattr(resource, 'RLIMIT_' + name); hard = resource.getrlimit(kind)[1]
    if hard < 0: breach(name, 'has no limit')
    attempt(name, lambda: resource.setrlimit(kind, (hard + 1, hard + 1)))"""),
    Attack("the kernel's choice of victim", "attempt('oom', lambda: open('/proc/self/oom_score_adj', 'w').write('900'))",
           harmless=True),
    Attack("devices", """
import stat
attempt('mknod', lambda: os.mknod('/tmp/disk', stat.S_IFBLK | 0o666, os.makedev(254, 0)))
for name in os.listdir('/dev'):
    if name not in 'null zero full random urandom fd stdin stdout stderr shm'.split(): breach(name)"""),
    Attack("a mark on a device", """
attempt('times', lambda: os.utime('/dev/null', (1, 1))); attempt('times', lambda: os.utime('/dev/null'))
attempt('mode', lambda: os.chmod('/dev/null', 0o600))
open('/dev/null', 'w').write('x')"""),
    Attack("huge pages", """
import mmap
attempt('huge', lambda: mmap.mmap(-1, 1 << 21, flags=0x40022))"""),
    Attack("terminal", "import fcntl\nfor fd in (0, 1, 2):\n attempt('TIOCSTI', lambda: fcntl.ioctl(fd, 0x5412, b'x'))"),
    Attack("core dump", "ctypes.string_at(0)", ("runtime error",)),
    Attack("setuid program", """
import subprocess
for tool in ('/usr/bin/su', '/usr/bin/mount', '/usr/bin/passwd', '/usr/bin/bwrap'):
    if not os.path.exists(tool): continue
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open('/dev/null', os.O_RDWR), 2)
        os.execv(tool, [tool, '--ro-bind', '/', '/', 'true'] if 'bwrap' in tool else [tool, '-c', 'true'])
    if os.waitpid(pid, 0)[1] == 0: breach(tool)"""),
    Attack("another user namespace by hand", "attempt('map', lambda: open('/proc/self/uid_map', 'w').write('0 0 1'))"),
]  # fmt: skip

FILES = [
    Attack("inodes", """
made = 0
try:
    while True: os.close(os.open(f'/tmp/{made}', os.O_CREAT)); made += 1
except OSError: pass
if made > 200: breach(made)""", limits=(("files", 200),)),
    Attack("writes outside /tmp", """
for folder in ('/', '/usr', '/usr/bin', '/etc', '/dev', '/proc', '/proc/self', sys.prefix, '/root', '/var/tmp'):
    attempt(folder, lambda: open(os.path.join(folder, 'pwned-by-test'), 'w'))
for path in ('/forkserver.py', sys.executable, os.__file__, '/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger'):
    attempt(path, lambda: open(path, 'r+b'))
for path in (os.__file__, '/forkserver.py'):
    attempt('chmod', lambda: os.chmod(path, 0o777)); attempt('rename', lambda: os.rename(path, path + 'x'))"""),
    Attack("system settings", """
for path in ('/proc/sys/kernel/hostname', '/sys/kernel/mm', '/sys/fs/cgroup', '/proc/kallsyms', '/proc/keys', '/proc/cmdline',
             '/proc/modules', '/proc/sys', '/proc/net', '/etc/passwd', '/etc/shadow', '/var', '/run', '/home', '/root/.ssh',
             '/root/.bashrc', '/root/.bash_history'):
    if os.path.exists(path): breach(path)""", harmless=True),
    Attack("left for the next run", "open('/tmp/left', 'w').write('x'); os.mkfifo('/tmp/fifo'); os.symlink('/', '/tmp/root')"),
    Attack("links as results",
           "os.remove('/tmp/main.py'); os.symlink('/etc/passwd', '/tmp/main.py'); os.symlink('/tmp', '/tmp/tmp')"),
    Attack("link race", """
if os.fork() == 0:
    while True:
        try: os.symlink('/etc', '/tmp/race'); os.unlink('/tmp/race')
        except OSError: pass
time.sleep(0.05)"""),
    Attack("deep folders", """
try:
    while True: os.mkdir('d'); os.chdir('d')
except OSError: pass""", limits=(("files", 500),)),
    Attack("sparse file", "attempt('sparse', lambda: os.truncate(os.open('/tmp/s', os.O_CREAT | os.O_RDWR), 1 << 50))",
           ("ok", "runtime error")),
    Attack("stdin rewritten", "attempt('write to stdin', lambda: os.pwrite(0, b'evil', 0)); print(len(sys.stdin.read()))"),
    Attack("stdin reopened", "attempt('stdin', lambda: open('/proc/self/fd/0', 'r+b', 0).write(b'evil'))"),
    Attack("stdin without end", "while True: sys.stdin.read()", ("time limit",)),
    Attack("zip bomb", """
import zlib
bomb = zlib.compress(bytes(1 << 20) * 64); x = [zlib.decompress(bomb) + b'x' for _ in range(100)]""", ("memory limit",),
           limits=(("time_s", 5), ("memory_mb", 128))),
]  # fmt: skip
