"""The pair-wise reward: how probably an answer is better than another, by a model that reads both.

    p(a > b) = sigmoid((s(x,a,b) - s(x,b,a)) / 2)          both orders, so p(a > b) + p(b > a) = 1 whatever the model's bias

    mode       r_i
    reference  p(y_i > y_ref)                               two rows for each rollout
    group      mean over j != i of p(y_i > y_j)             G (G - 1) rows; the mean over the group is 1/2

Only final answers are judged. s is that of a reward model trained pair-wise, within the bound it was trained with; or
logit A - logit B of a language model that is asked which is better, within +-20.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_nb.data.preferences import pair_ids, pair_text
from megatron_nb.records import Conversation, Group, Prompt, Score
from megatron_nb.rewards.scorer import Batcher, load_scorer
from megatron_nb.rewards.text import final_answer, reference_of

QUESTION = "Two answers, A and B, stand above. Which one is better? Reply with one letter, A or B."


@dataclass
class Pairwise:
    """See the head of the file. A pair that cannot be judged counts for neither side; a rollout without any is invalid."""

    checkpoint: str  # a run, a step folder, or a Hugging Face folder
    mode: Literal["reference", "group"] = "reference"
    references: str | None = None  # JSONL of {"prompt": messages, "text": answer} (such as rollouts/step-N.jsonl)
    field: str = "reference"  # of the prompt's data, when there are no `references`
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_tokens: int | None = None  # of x and both answers; None: no limit
    device: Any = "cpu"  # given by the job

    def __post_init__(self):
        self._scorer = load_scorer(self.checkpoint, self.device, self.dtype)
        self._tokenizer = self._scorer.tokenizer
        if self._scorer.kind == "pointwise":
            raise ValueError(f"checkpoint={self.checkpoint!r} is of kind pointwise: it cannot judge pairs; use kind: pointwise")
        self._batcher = Batcher(self._scorer.forward)
        self._references = read_references(self.references) if self.references else None

    async def score(self, group: Group) -> list[Score]:
        answers = [final_answer(rollout.text) for rollout in group.rollouts]
        if self.mode == "group":
            if len(answers) < 2:
                return [Score(None, reason="there is no other answer in the group to compare with") for _ in answers]
            matches = list(itertools.combinations(range(len(answers)), 2))
        else:
            answers.append(final_answer(self._reference(group.prompt)))
            matches = [(i, len(answers) - 1) for i in range(len(group.rollouts))]
        wins = await self._wins(group.prompt.conversation, [(answers[i], answers[j]) for i, j in matches])
        found: list[list[float]] = [[] for _ in answers]
        causes: list[list[str]] = [[] for _ in answers]
        for (i, j), win in zip(matches, wins):
            for one, value in ((i, win), (j, win if isinstance(win, str) else 1 - win)):
                (causes if isinstance(value, str) else found)[one].append(value)
        return [
            Score(sum(values) / len(values)) if values else Score(None, reason=why[0])
            for values, why, _ in zip(found, causes, group.rollouts)
        ]

    async def _wins(self, conversation: Conversation, pairs: list[tuple[str, str]]) -> list[float | str]:
        """p(a > b) of each pair, or why there is none."""
        rows = [(self._ids(conversation, a, b), self._ids(conversation, b, a)) for a, b in pairs]
        longest = [max(map(len, orders)) for orders in rows]
        fits = [self.max_tokens is None or length <= self.max_tokens for length in longest]
        asked = [row for orders, fit in zip(rows, fits) if fit for row in orders]
        scores = iter(await self._batcher.scores(asked) if asked else [])
        wins: list[float | str] = []
        for length, fit in zip(longest, fits):
            if not fit:
                wins.append(f"the pair has {length} tokens, more than max_tokens={self.max_tokens}")
                continue
            ab, ba = next(scores), next(scores)
            finite = math.isfinite(ab) and math.isfinite(ba)
            wins.append(probability(ab, ba) if finite else f"the model gave {ab} and {ba}")
        return wins

    def _ids(self, conversation: Conversation, a: str, b: str) -> list[int]:
        if self._scorer.kind == "pairwise":
            return pair_ids(conversation, a, b, self._tokenizer)
        asked = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
        )
        text = pair_text(conversation, a, b, self._tokenizer) + asked
        return self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def _reference(self, prompt: Prompt) -> str:
        if self._references is None:
            return str(reference_of(prompt, self.field))
        key = key_of(prompt.conversation.messages)
        if key not in self._references:
            raise ValueError(f"{self.references} has no answer to {str(prompt.conversation.messages[-1]['content'])[:60]!r}")
        return self._references[key]


def probability(ab: float, ba: float) -> float:
    """p(a > b) from the scores of both orders; exactly 1 - probability(ba, ab) up to rounding."""
    return 1 / (1 + math.exp(min(700.0, (ba - ab) / 2)))


def read_references(path: str) -> dict[str, str]:
    """Prompt -> the first answer to it. ValueError names a row of another form."""
    if not Path(path).is_file():
        raise ValueError(f"references={path!r} is no file")
    found: dict[str, str] = {}
    for number, line in enumerate(Path(path).read_text().split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found.setdefault(key_of(row["prompt"]), str(row["text"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'{path}:{number}: a row is {{"prompt": messages, "text": answer}} ({error!r})') from error
    return found


def key_of(messages: list[dict[str, Any]]) -> str:
    """What makes two prompts the same: who said what."""
    return json.dumps([[message["role"], message["content"]] for message in messages])
