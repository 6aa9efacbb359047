"""An evaluation task of the tiny recipe: its chat questions, graded by the rule that judged the preference pairs."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_nb.asking.askers import Answer
from megatron_nb.evals.items import read_questions
from megatron_nb.evals.task import Item, Task, Verdict
from tools.demo_rl_data import quality


class Chat(Task):
    """Rows {"id", "messages", "answer"}. metrics: score in 0..1, and exact, the share of ideal answers."""

    def read(self) -> Sequence[Item]:
        return read_questions(self.config.path)

    async def score(self, item: Item, answer: Answer) -> Verdict:
        said = quality(item.gold["answer"], answer.text)
        return Verdict(said, {"exact": float(said == 1.0)})
