"""Is an answer the right one, and in which spelling does it vote: what runs in a worker that loads little."""

from __future__ import annotations

import resource
from typing import Any

import sympy

from megatron_nb.records import Conversation, Prompt, Rollout
from megatron_nb.rewards.answer import MathAnswer, answer_in


def grade_within(cpu_s: int, text: str, reference: str, boxed: bool) -> tuple[float, str, str]:
    """`grade`; the process is ended by SIGXCPU when it has computed for so many seconds, however long it has waited."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(spent.ru_utime + spent.ru_stime) + 1 + cpu_s, most))
    try:
        return grade(text, reference, boxed)
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))


def grade(text: str, reference: str, boxed: bool) -> tuple[float, str, str]:
    """(1 or 0, the answer in one spelling for all that are the same number or formula, why).

    ValueError for a reference that cannot be read.
    """
    rollout = Rollout([], [], [], [], [], [], [], "done", {}, 0, "", 0, text=text)
    score = MathAnswer(boxed=boxed).score_rollout(Prompt(Conversation([], "", ""), [], {"answer": reference}), rollout)
    found = [] if boxed and "\\boxed" not in text else answer_in(text)
    return score.reward, spelling(found), score.reason


def spelling(found: list[Any]) -> str:
    r"""0.5 and \frac12 are one answer; what is no mathematics is its text."""
    if not found:
        return ""
    if isinstance(found[0], sympy.Basic):
        try:
            return str(sympy.nsimplify(found[0], rational=True))
        except Exception:  # whatever sympy makes of a strange answer
            return str(found[0])
    return str(found[-1]).strip()
