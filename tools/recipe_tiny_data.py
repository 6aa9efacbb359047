"""Data of the tiny recipe: one tokenizer, one start, and the rows of all its stages.

    python tools/recipe_tiny_data.py --out runs/recipe-tiny/data [--seed 1]

Writes, below OUT: tokenizer/ and start/ (weights that already copy: tools/demo_search_start.py); for SFT chat.jsonl (good and
sloppy answers of tools/demo_rl_data.py), clean.jsonl (good ones), code.jsonl (tools/demo_code_data.py), repeats.jsonl and
exercises.jsonl (searches in invented results); wiki.jsonl, the pages of an invented wiki; prompts of the stages: pairs, chat_rl,
chat_heldout, code_rl, code_heldout. No prompt stands in two of these files.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_nb.rollout.tools import SCHEMAS
from megatron_nb.search.sentences import sentences
from tools import demo_code_data, demo_rl_data, demo_search_data
from tools.demo_files import train_twin_tokenizer, write_rows
from tools.demo_search_start import write_start
from tools.recipe_tiny_wiki import FIRSTS, PEOPLE, SECONDS, pages

VOCABULARY = 2560  # at most
TOOLS = ("search", "find_in_page")
NAMES = [*FIRSTS, *SECONDS, *PEOPLE]
SLOPPY = 0.5  # share of sloppy answers in chat.jsonl


class Exercises(demo_search_data.Exercises):
    """The search demo's, with titles such as the wiki has."""

    def name(self) -> str:
        return self.rng.choice(PEOPLE) if self.rng.random() < 0.2 else f"{self.rng.choice(FIRSTS)} {self.rng.choice(SECONDS)}"


def build(out: Path, seed: int, rows: dict[str, int]) -> None:
    """Writes everything; rows: how many of chat, code, repeats, exercises, wiki, pairs, chat_rl, chat_heldout, code_rl,
    code_heldout."""
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    said = chat(out, rng, rows) + code(out, rng, seed, rows)
    wiki = pages(rows["wiki"], rng)
    write_rows(out / "wiki.jsonl", wiki)
    known = [sentence for row in pages(200, rng) for sentence in sentences(row["text"])]
    drawn = Exercises([one for one in known if 9 <= len(one.split()) <= 40], rng)
    exercises = [drawn.draw() for _ in range(rows["exercises"])]
    write_rows(out / "exercises.jsonl", exercises)
    repeats = [demo_rl_data.repeats(rng) for _ in range(rows["repeats"])]
    write_rows(out / "repeats.jsonl", [{"text": text} for text in repeats])
    texts = [*said, *known, *repeats[:200], *searches(exercises[:300]), *[*NAMES, "user", "assistant"] * 400]
    write_start(out / "start", tokenizer(out / "tokenizer", texts), seed)


def chat(out: Path, rng: random.Random, rows: dict[str, int]) -> list[str]:
    """Rows of chat; everything that was said."""
    seen: set[str] = set()
    for name in ("chat_heldout", "pairs", "chat_rl"):
        tasks = demo_rl_data.tasks(rng, rows[name], 0.0, seen)
        write_rows(out / f"{name}.jsonl", [
            {"id": f"{name}-{number}", "skill": skill, "messages": task.messages, "answer": task.ideal}
            for number, (skill, task) in enumerate(tasks)
        ])  # fmt: skip
    trained = [task for _, task in demo_rl_data.tasks(rng, rows["chat"], demo_rl_data.ATTACKED, seen)]
    mixed = [demo_rl_data.sloppy(task, rng) if rng.random() < SLOPPY else task.ideal for task in trained]
    for name, answers in (("clean", [task.ideal for task in trained]), ("chat", mixed)):
        write_rows(out / f"{name}.jsonl", [answered(task.messages, text) for task, text in zip(trained, answers)])
    return [*(one["content"] for task in trained for one in task.messages), *(task.ideal for task in trained), *mixed]


def answered(messages: list[dict[str, Any]], text: str) -> dict[str, Any]:
    """A row of which the last answer is trained."""
    history = [{**one, "loss": 0} if one["role"] == "assistant" else one for one in messages]
    return {"messages": [*history, {"role": "assistant", "content": text, "loss": 1}]}


def code(out: Path, rng: random.Random, seed: int, rows: dict[str, int]) -> list[str]:
    """Problems and programs; everything that was said."""
    every = demo_code_data.asked()
    rng.shuffle(every)
    tests = {problem.name: demo_code_data.tests_of(problem, seed) for problem in demo_code_data.problems()}
    for name in ("code_heldout", "code_rl"):
        taken, every = every[: rows[name]], every[rows[name] :]
        problems = [demo_code_data.row(one, f"{name}-{at}", tests[one.problem.name]) for at, one in enumerate(taken)]
        write_rows(out / f"{name}.jsonl", problems)
    trained = [(one.text, demo_code_data.answer(one, rng)) for one in rng.choices(every, k=rows["code"])]
    write_rows(out / "code.jsonl", [answered([demo_rl_data.user(text)], said) for text, said in trained])
    return [text for pair in trained for text in pair]


def searches(exercises: list[dict[str, Any]]) -> list[str]:
    """What the tokenizer should know of tools: their descriptions, calls and results."""
    head = "# Tools\n\nFunctions that can be called:\n<tools>\n</tools>\n\nA call is written as:\n<function>, <object>"
    form, said = "<tool_call>\n{}\n</tool_call>\n<tool_response>\n</tool_response>\n", []
    for message in (one for row in exercises for one in row["messages"]):
        calls = message.get("tool_calls", [])
        said += [message["content"], *(form.format(json.dumps(one["function"])) for one in calls)]
    return said + [head, *(json.dumps(SCHEMAS[name]) for name in TOOLS)] * 50


def tokenizer(out: Path, texts: list[str]) -> Path:
    train_twin_tokenizer(out, texts, VOCABULARY)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts = {"chat": 8000, "code": 6000, "repeats": 2000, "exercises": 6000, "wiki": 200, "pairs": 1200, "chat_rl": 600}
    build(options.out, options.seed, counts | {"chat_heldout": 100, "code_rl": 300, "code_heldout": 100})


if __name__ == "__main__":
    main()
