"""What both sides of tools/bench_rl.py do: the same prompts, the same reward. The peer imports it too."""

from __future__ import annotations

import json
from pathlib import Path

QUESTIONS = (
    "Explain to a child why the sky is blue in the day and red in the evening.",
    "Write three short tips for keeping a kitchen garden alive in a dry summer.",
    "What is the difference between a list and a tuple in Python, and when is each one used?",
    "Describe how a bicycle stays upright while it is moving.",
    "Summarise the rules of chess for somebody who has never seen a board.",
    "Give me a plan for a week of simple dinners for two people.",
    "How does a vaccine teach the body to fight a virus?",
    "Name some reasons why a computer program may become slow over time.",
    "Write a polite letter asking a neighbour to turn the music down at night.",
    "What should I look at before I buy a used car?",
    "Tell a short story about a lighthouse keeper who finds a message in a bottle.",
    "How can I explain compound interest with an example?",
    "Which steps would you take to learn a new language in one year?",
    "Why do some animals sleep through the winter?",
    "Compare trains and planes for a journey of six hundred kilometres.",
    "What makes bread rise, and what can go wrong with it?",
)


def write_prompts(path: Path, number: int) -> None:
    """One row {"prompt": messages} for each of the first `number` questions: those of a step, so every step has the same."""
    if not 1 <= number <= len(QUESTIONS):
        raise ValueError(f"{number} prompts a step: 1 to {len(QUESTIONS)} are known")
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS[:number]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def distinct_words(text: str) -> float:
    """Share of distinct words: cheap, and never equal over a group by chance."""
    words = text.split()
    return len(set(words)) / max(len(words), 1)


async def score(prompt, rollout) -> float:
    """The same as a term of our reward."""
    return distinct_words(rollout.text)
