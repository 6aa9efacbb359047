"""Whether two final answers are the same, as terms of a reward. Worker processes import this file: it loads no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from megatron_nb.records import Prompt, Rollout
from megatron_nb.rewards.answer import equal, parsed
from megatron_nb.synthesis.refine_leaks import value_of
from megatron_nb.synthesis.refine_wording import unboxed


class SameMaths:
    """1 when two final answers are the same mathematics (math-verify). A reference that it cannot read is a ValueError."""

    def score_rollout(self, prompt: Prompt, rollout: Rollout) -> float:
        gold, said = _maths(prompt.data["reference"]), _maths(rollout.text)
        if not gold:
            raise ValueError(f"the final answer {prompt.data['reference'][:80]!r} cannot be read as mathematics")
        return float(bool(said) and equal(gold, said))


def _maths(text: str) -> list[Any]:
    """A final answer as math-verify reads it: one in a sentence by its last number or formula, a unit left out."""
    value = value_of(text)
    if value is not None:
        return parsed(f"\\boxed{{{value:.15g}}}")
    if "\\boxed" in text or len(text.split()) > 4:
        return parsed(text)
    return parsed(f"\\boxed{{{text.replace('$', '').rstrip('.')}}}") or parsed(text)


@dataclass
class SameText:
    """1 when two final answers are the same text. ignore: case, white space, punctuation at the ends, commas in numbers."""

    ignore: bool = False

    async def score_rollout(self, prompt: Prompt, rollout: Rollout) -> float:
        return float(self._plain(prompt.data["reference"]) == self._plain(rollout.text))

    def _plain(self, text: str) -> str:
        text = unboxed(text.strip())
        text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text) if self.ignore else text
        return " ".join(text.casefold().split()).strip(" .,;:!?\"'`*$") if self.ignore else text
