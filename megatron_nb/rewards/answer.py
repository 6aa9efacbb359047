"""Whether the final answer is the right one as mathematics, by math-verify. Under a deadline: 7^{7^{7^{7}}} never ends.

A missing reference or one that cannot be read makes the rollout invalid; an answer that cannot be read is wrong.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

from math_verify import parse, verify

from megatron_nb.records import Prompt, Rollout, Score
from megatron_nb.rewards.text import final_answer, reference_of

for module in ("parser", "grader", "utils"):  # it warns at every call that its own time-outs are off
    logging.getLogger(f"math_verify.{module}").setLevel(logging.CRITICAL)

GSM8K = re.compile(r"####\s*([^\n]+)")


@dataclass
class MathAnswer:
    r"""1 when the answer equals the reference as mathematics (math-verify), else 0.

    The answer is the last \boxed{}, else what follows the last ####, else the last number or formula. A reference may be a
    solution of gsm8k (#### 18), a text with \boxed{}, or the bare answer.
    """

    field: str = "answer"  # of the prompt's data
    boxed: bool = False  # an answer outside \boxed{} is wrong

    def score_rollout(self, prompt: Prompt, rollout: Rollout) -> Score:
        reference = str(reference_of(prompt, self.field))
        found = _boxed(reference)
        bare = found == reference and "$" not in found and "\\boxed" not in found
        gold = parsed(f"\\boxed{{{found}}}" if bare else found)
        if not gold:
            raise ValueError(f"the reference {reference[:80]!r} cannot be read as mathematics")
        said = final_answer(rollout.text)
        if self.boxed and "\\boxed" not in said:
            return Score(0.0, reason="nothing is in \\boxed{}")
        answer = answer_in(said)
        if not answer:
            return Score(0.0, reason="no answer was found")
        return Score(float(equal(gold, answer)), reason=f"answer {answer[-1]}, reference {gold[-1]}"[:200])


def answer_in(text: str) -> list[Any]:
    """What math-verify reads as a text's answer: [expression, its text], or [] for none."""
    return parsed(_boxed(text))


def _boxed(text: str) -> str:
    r"""What math-verify is to read: the last \boxed{} alone (it reads several as one list), or what follows the last ####."""
    if (start := text.rfind("\\boxed{")) >= 0:
        return text[start : _closing(text, start) + 1]
    if marked := GSM8K.findall(text):
        return f"\\boxed{{{marked[-1].strip().rstrip('.').replace('$', '')}}}"
    return text


def _closing(text: str, start: int) -> int:
    """Where the brace that opens after `start` closes; the end of the text when it does not."""
    depth = 0
    for i in range(text.index("{", start), len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return i
    return len(text)


def parsed(text: str) -> list[Any]:
    """What math-verify reads in a text: [expression, its text], or [] for nothing."""
    return parse(text, parsing_timeout=None)  # its own time-outs are signals; the worker's deadline holds instead


def equal(gold: list[Any], answer: list[Any]) -> bool:
    """Whether two readings are the same mathematics."""
    return bool(verify(gold, answer, timeout_seconds=None))
