"""Attacks by processes, threads and signals, and by the language itself; see attack_programs.py."""

from __future__ import annotations

from dataclasses import dataclass

ANY = ("ok", "runtime error", "time limit", "memory limit", "output limit")


@dataclass(frozen=True)
class Attack:
    name: str
    source: str
    statuses: tuple[str, ...] = ("ok",)
    harmless: bool = False
    limits: tuple[tuple[str, float], ...] = ()


PROCESSES = [
    Attack("kill everything", "import signal; os.kill(-1, signal.SIGKILL); time.sleep(60)", ("runtime error", "time limit")),
    Attack("kill process 1", """
for number in range(1, 32):
    try: os.kill(1, number)
    except OSError: pass
time.sleep(0.01); print('alive')"""),
    Attack("kill the group", "os.kill(0, 9)", ("runtime error",)),
    Attack("kill the parent",
           "for target in (os.getppid(), -os.getpgrp()):\n try: os.kill(target, 15)\n except OSError: pass",
           ("ok", "runtime error")),
    Attack("other processes seen", """
others = [p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (os.getpid(), 1)]
if others: breach(others)
attempt('process 1', lambda: open('/proc/1/environ', 'rb').read() or None.x)
attempt('process 1', lambda: os.listdir('/proc/1/fd'))""", harmless=True),
    Attack("stop oneself", "import signal; os.kill(os.getpid(), signal.SIGSTOP)", ("time limit",)),
    Attack("daemon", """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 64)
        while True: pass
    os._exit(0)
os.wait()"""),
    Attack("memory of many processes", """
for _ in range(8):
    if os.fork() == 0:
        held = bytearray(b'x') * (40 << 20); time.sleep(30)
time.sleep(30)""", ("memory limit",), limits=(("memory_mb", 128), ("time_s", 3))),
    Attack("time of many processes", "[os.fork() for _ in range(3)]\nwhile True: pass", ("time limit",)),
    Attack("time of children nobody waits for", """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        end = time.process_time() + 0.02
        while time.process_time() < end: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass""", ("time limit",)),
    Attack("threads outlive main", "import threading\nthreading.Thread(target=time.sleep, args=(60,)).start()",
           ("time limit",)),
    Attack("daemon thread", "import threading\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"),
    Attack("thread bomb", """
import threading
try:
    while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError: print(threading.active_count())
if threading.active_count() > 16: breach(threading.active_count())"""),
    Attack("zombies", "for _ in range(40):\n try:\n  if os.fork() == 0: os._exit(0)\n except OSError: break"),
    Attack("death signal cleared", "libc.prctl(1, 0, 0, 0, 0); libc.prctl(36, 1, 0, 0, 0)\nif os.fork() == 0: time.sleep(60)"),
    Attack("stdout and stderr closed", "os.close(1); os.close(2)\nwhile True: pass", ("time limit",)),
    Attack("all closed and asleep", "os.closerange(0, 64); time.sleep(60)", ("time limit",)),
    Attack("stderr flood", "while True: os.write(2, b'x' * 65536)", ("time limit",)),
    Attack("pipe handed to a daemon", "if os.fork() == 0:\n os.setsid()\n while True: os.write(1, b'.'); time.sleep(0.01)",
           ("ok",)),
    Attack("sleeping and spinning", "while True:\n time.sleep(0.001)\n sum(range(3000))", ("time limit",)),
    Attack("timers", """
import signal
signal.signal(signal.SIGALRM, lambda *a: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
time.sleep(60)""", ("time limit",)),
    Attack("huge argument list", "os.execv('/usr/bin/env', ['env'] * 5_000_000)",
           ("runtime error", "memory limit", "time limit")),
    Attack("another interpreter", "os.execv(sys.executable, [sys.executable, '-c', 'while True: pass'])", ("time limit",)),
]  # fmt: skip

LANGUAGE = [
    Attack("huge integer", "x = 9 ** 9 ** 9", ("time limit",)),
    Attack("digits of a huge integer", "print(10 ** 5000)", ("runtime error",)),
    Attack("regular expression", "import re; re.match('(a+)+$', 'a' * 50 + 'b')", ("time limit",)),
    Attack("deep source", "(" * 5000 + ")" * 5000, ("runtime error", "memory limit")),
    Attack("zero byte in the source", "x = 1\0", ("runtime error",)),
    Attack("lone surrogate in the source", "x = '\udc80'", ("runtime error",)),
    Attack("coding cookie", "# -*- coding: no-such-code -*-", ("ok", "runtime error")),
    Attack("bytes that are no text", "os.write(1, bytes(range(256)) * 4)"),
    Attack("pickle in the output", """
import pickle
class Evil:
    def __reduce__(self): return (os.system, ('touch /tmp/pwned-by-test',))
sys.stdout.buffer.write(pickle.dumps(Evil()))"""),
    Attack("terminal codes in the output", "print('\\x1b]0;x\\x07\\x1b[2J')"),
    Attack("import hooks", """
import builtins
class Hook:
    def find_spec(self, *a): raise SystemError
sys.meta_path.insert(0, Hook()); builtins.__import__ = None; sys.modules.clear()""", ("ok", "runtime error")),
    Attack("atexit without end", "import atexit\n@atexit.register\ndef f():\n while True: pass", ("time limit",)),
    Attack("exit in atexit", "import atexit; atexit.register(os._exit, 0); raise ValueError"),
    Attack("exception that cannot be printed", """
class E(Exception):
    def __str__(self): os._exit(0)
sys.excepthook = lambda *a: os._exit(0)
raise E""", ANY),
    Attack("objects of the server", """
import gc, socket
gc.collect()
for thing in gc.get_objects():
    if isinstance(thing, socket.socket) and thing.fileno() >= 0: breach(thing)
    if isinstance(thing, bytes | str) and 'hidden' + '-of-the-judge' in str(thing): breach(thing)"""),
    Attack("frames of the server", """
frame = sys._getframe()
while frame:
    for name, value in {**frame.f_globals, **frame.f_locals}.items():
        if 'hidden' + '-of-the-judge' in repr(value)[:10000]: breach(name)
    frame = frame.f_back"""),
    Attack("memory of the run before", """
needle = b'of-the-run-' + b'before'
with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as memory:
    for line in maps:
        start, stop = (int(x, 16) for x in line.split()[0].split('-'))
        if ' rw' not in line[:40] or stop - start > 1 << 26: continue
        try: data = os.pread(memory.fileno(), stop - start, start)
        except (OSError, OverflowError): continue
        place = data.find(b'hidden-' + needle)
        if place >= 0: breach('found')""", limits=(("time_s", 5),)),
    Attack("generator bomb", "list(x for x in iter(int, 1))", ("time limit", "memory limit")),
    Attack("hash games", "print(len({hash(str(i)) for i in range(1000)}))"),
    Attack("signals to oneself", "import signal; os.kill(os.getpid(), signal.SIGSEGV)", ("runtime error",)),
    Attack("sys.exit with a page of text", "sys.exit('x' * 10**6)", ("runtime error",)),
    Attack("interrupt", "raise KeyboardInterrupt", ("runtime error",)),
]  # fmt: skip
