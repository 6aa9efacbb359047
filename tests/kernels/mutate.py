"""Break every kernel on purpose, one change at a time, and see that its tests notice: python -m tests.kernels.mutate [kernel].

Each tests/kernels/mutations_KERNEL.py lists TESTS (pytest arguments) and MUTATIONS: (what, file in nb_kernels, before, after)
and, if need be, the pytest arguments for this mutation alone. `before` must stand exactly once in the file. It runs on a
copy of nb_kernels that PYTHONPATH puts before the installed one. Exit code 1 names the survivors.
"""

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kernels" / "nb_kernels"
TIMEOUT = 600


def run(tests, change=None):
    """pytest's exit code on a copy of the package with `change` = (file, before, after) applied."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "nb_kernels"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if change is not None:
            file, before, after = change
            (copy / file).write_text((copy / file).read_text().replace(before, after))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        env = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=TIMEOUT).returncode
        except subprocess.TimeoutExpired:
            return 1  # a loop that never ends is noticed too


def main(wanted):
    found = sorted(path.stem for path in Path(__file__).parent.glob("mutations_*.py"))
    names = [name for name in found if not wanted or name.removeprefix("mutations_") in wanted]
    if not names:
        raise SystemExit(f"no list of mutations for {wanted}; there are {found}")
    modules = {name: importlib.import_module(f"tests.kernels.{name}") for name in names}
    stale = [m[0] for module in modules.values() for m in module.MUTATIONS if (PACKAGE / m[1]).read_text().count(m[2]) != 1]
    if stale:
        raise SystemExit(f"no longer exactly once in the source, update the lists of mutations: {stale}")
    survivors = []
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for name in names:
            module, start = modules[name], time.time()
            if run(module.TESTS) != 0:
                raise SystemExit(f"{name}: its tests fail without any mutation")
            jobs = [pool.submit(run, m[4] if len(m) > 4 else module.TESTS, m[1:4]) for m in module.MUTATIONS]
            for mutation, job in zip(module.MUTATIONS, jobs):
                killed = job.result() == 1 or job.result() < 0  # tests failed, or crashed; other codes: they did not run
                survivors += [] if killed else [f"{name}: {mutation[0]}"]
                print(f"{'killed  ' if killed else 'SURVIVED'} {name.removeprefix('mutations_')}: {mutation[0]}", flush=True)
            print(f"{name}: {len(jobs)} mutations in {time.time() - start:.0f} s", flush=True)
    if survivors:
        raise SystemExit("survivors:\n  " + "\n  ".join(survivors))


if __name__ == "__main__":
    main(sys.argv[1:])
