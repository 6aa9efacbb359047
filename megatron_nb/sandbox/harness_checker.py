"""Runs inside a checker's sandbox: calls its check(input, output, expected)."""

from __future__ import annotations

import os
import traceback

from megatron_nb.sandbox.harness_program import channel, load, write_all
from megatron_nb.sandbox.harness_wire import decode

UNUSABLE = 125  # exit code


def run_checker() -> None:
    """Exit code 0 for right, 1 for wrong with the reason on stdout, UNUSABLE for a checker that cannot even be loaded.

    One that raises ends with a traceback.
    """
    get, put = channel()
    with os.fdopen(get, "rb") as stdin:
        task = decode(stdin.read())
    try:
        module = load(task["program"])
        if isinstance(module, str):
            raise SyntaxError(module)
    except BaseException:
        traceback.print_exc()
        os._exit(UNUSABLE)
    answer = module.check(task["input"], task["output"], task["expected"])
    right, reason = answer if isinstance(answer, tuple) else (answer, "")
    if not right:
        write_all(put, ascii(str(reason))[1:-1] if reason else "")
    os._exit(0 if right else 1)
