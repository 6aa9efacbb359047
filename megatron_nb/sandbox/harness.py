"""What runs beside a program inside its sandbox, as source text, and what a program leaves behind, as words."""

from __future__ import annotations

import marshal
import re
from pathlib import Path

from megatron_nb.sandbox.execution import Execution

FUTURE = "from __future__ import annotations\n"


def _source(*names: str, start: str) -> str:
    """One program of these files of ours, compiled: the sandbox runs this very Python, and compiling costs milliseconds a run.

    Their imports of each other go, for they all are in it.
    """
    lines = [FUTURE]
    for name in names:
        text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        lines += [line for line in text.splitlines(True) if line != FUTURE and not line.startswith("from megatron_nb.")]
    code = compile("".join([*lines, start, "\n"]), "harness", "exec", dont_inherit=True, optimize=2)
    text = marshal.dumps(code).hex()
    return f"compiled = bytes.fromhex('{text}')\nexec(__import__('marshal').loads(compiled))\n"  # tracebacks show the last line


CALL = _source("harness_wire", "harness_program", start="call_once()")  # one call of a function
SERVE = _source("harness_wire", "harness_program", "harness_peer", start="serve_program()")  # any calls, over a session
ASSERT = _source("harness_wire", "harness_program", "harness_peer", "harness_assertions", start="run_assertions()")
MEASURE = _source(  # costs of a program at growing sizes
    "harness_wire", "harness_program", "measure_child", "measure_costs", "measure_rewrite", "measure", start="main()"
)
CHECK = _source("harness_wire", "harness_program", "harness_checker", start="run_checker()")


REFUSED = re.compile(rb'  File ".*", line (\d+)\n(?:.*\n)*?((?:Syntax|Indentation|Tab)Error: .*)\n?')


def refused(execution: Execution) -> str | None:
    """What the Python compiler says of a program that it refused: such a report has no traceback, for nothing ran."""
    found = REFUSED.fullmatch(execution.stderr) if execution.status == "runtime error" and not execution.stdout else None
    if not found or b"Traceback" in execution.stderr:
        return None
    return f"{found[2].decode('utf-8', 'replace')[:300]} (line {int(found[1])})"


def last_words(execution: Execution) -> str:
    """Why a run did not end well: the limit, the signal, the last line of stderr."""
    lines = [line for line in execution.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    if execution.status == "compile error":
        words = next((line for line in lines if "rror" in line), lines[-1] if lines else "")
    elif execution.status == "runtime error":
        words = lines[-1] if lines else ""
    else:
        words = ""
    return ": ".join(word for word in (execution.detail, words.strip()[:300]) if word)
