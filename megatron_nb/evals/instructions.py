"""Instruction following by rules alone, as IFEval does it: rows {"prompt", "instruction_id_list", "kwargs", "key"?}."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_nb.asking.askers import Answer
from megatron_nb.data.preferences import final_answer
from megatron_nb.data.rows import BadRow
from megatron_nb.evals.instruction_rules import check, follows, follows_loosely
from megatron_nb.evals.items import REMEDY, id_of, messages_of, read_rows
from megatron_nb.evals.statistics import ratio_with_bounds
from megatron_nb.evals.task import Item, Outcome, Task, Verdict, by_item


class Instructions(Task):
    """metrics: prompt_strict (the share of prompts all of whose instructions are followed), the same loosely; by instruction.

    Loosely: asterisks, a first or a last line may be left out of the answer.
    """

    headline = "prompt_strict"

    def read(self) -> Sequence[Item]:
        found = []
        for where, row in read_rows(self.config.path):
            kinds, settings = row.get("instruction_id_list"), row.get("kwargs")
            if not isinstance(kinds, list) or not isinstance(settings, list) or len(kinds) != len(settings) or not kinds:
                raise BadRow.at(where, f"instruction_id_list is {str(kinds)[:60]}",
                                "it and kwargs are lists of the same length, not empty", REMEDY)  # fmt: skip
            given = [{name: value for name, value in (one or {}).items() if value is not None} for one in settings]
            for kind, its in zip(kinds, given):
                try:
                    check(kind, its)
                except ValueError as error:
                    raise BadRow.at(where, str(error), "the row says what is checked", REMEDY) from error
            found.append(Item(id_of(row, where), messages_of(row, where), {"kinds": kinds, "settings": given}))
        return found

    async def score(self, item: Item, answer: Answer) -> Verdict:
        said, asked = final_answer(answer.text), list(zip(item.gold["kinds"], item.gold["settings"]))
        strict = [follows(kind, said, its) for kind, its in asked]
        loose = [ok or follows_loosely(kind, said, its) for ok, (kind, its) in zip(strict, asked)]
        broken = [kind for ok, (kind, _) in zip(strict, asked) if not ok]
        parts = {"prompt_loose": float(all(loose)), "followed": float(sum(strict)), "followed_loosely": float(sum(loose)),
                 "instructions": float(len(asked))}  # fmt: skip
        return Verdict(float(all(strict)), parts, f"not followed: {', '.join(broken)}" if broken else "", said)

    def summarise(self, outcomes: list[Outcome]) -> dict[str, float]:
        told: dict[str, Any] = super().summarise(outcomes)
        counts = {}  # of each prompt, over its attempts
        for part in ("instructions", "followed", "followed_loosely"):
            told.pop(part, None)
            counts[part] = [sum(its) for its in by_item(outcomes, lambda one, part=part: one.parts.get(part))]
        for name, part in (("instruction_strict", "followed"), ("instruction_loose", "followed_loosely")):
            told |= ratio_with_bounds(name, list(zip(counts[part], counts["instructions"])))
        return told
