"""Data of the tiny recipe: one tokenizer, one start, and the rows of all its stages.

    python tools/recipe_tiny_data.py --out runs/recipe-tiny/data [--seed 1]

Writes, below OUT: tokenizer/ and start/ (weights that already copy: tools/demo_search_start.py); for SFT chat.jsonl (good and
sloppy answers of tools/demo_rl_data.py), clean.jsonl (good ones), code.jsonl (tools/demo_code_data.py), repeats.jsonl and
exercises.jsonl (searches in invented results), and rows held out from them in valid.jsonl; wiki.jsonl, an invented wiki, and
corpus/, its index; prompts of the stages: pairs, chat_rl, chat_heldout, code_rl, code_heldout. No prompt stands in two files.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_nb.rollout.tools import SCHEMAS
from megatron_nb.search.build import build as build_index
from megatron_nb.search.sentences import sentences
from tools import demo_code_data, demo_rl_data, demo_search_data
from tools.demo_files import train_twin_tokenizer, write_rows
from tools.demo_search_start import write_start
from tools.recipe_tiny_wiki import FIRSTS, PEOPLE, SECONDS, pages

VOCABULARY = 2560  # as in hydra_conf/cascade_tiny.yaml
TOOLS = ("search", "find_in_page")
NAMES = [*FIRSTS, *SECONDS, *PEOPLE]
ROWS = {
    "chat": 8000, "code": 6000, "repeats": 2000, "exercises": 6000, "valid": 40, "wiki": 200, "pairs": 2000, "chat_rl": 600,
    "chat_heldout": 100, "code_rl": 300, "code_heldout": 100,
}  # fmt: skip
Drawn = tuple[str, demo_rl_data.Task]  # skill and task
SLOPPY = 0.5  # share of sloppy answers in chat.jsonl


class Exercises(demo_search_data.Exercises):
    """The search demo's, with titles such as the wiki has."""

    def name(self) -> str:
        return self.rng.choice(PEOPLE) if self.rng.random() < 0.2 else f"{self.rng.choice(FIRSTS)} {self.rng.choice(SECONDS)}"


def build(out: Path, seed: int, rows: dict[str, int]) -> None:
    """Writes everything. rows: how many there are to be, the keys of ROWS."""
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    talked, programs = chat(out, rng, rows), code(out, rng, seed, rows)
    valid = [*talked[: rows["valid"]], *programs[: rows["valid"]]]
    write_rows(out / "chat.jsonl", talked[rows["valid"] :])
    write_rows(out / "code.jsonl", programs[rows["valid"] :])
    said = [message["content"] for row in talked + programs for message in row["messages"]]
    wiki = pages(rows["wiki"], rng)
    write_rows(out / "wiki.jsonl", wiki)
    build_index(out / "wiki.jsonl", out / "corpus", workers=1)
    known = [sentence for row in pages(200, rng) for sentence in sentences(row["text"])]
    drawn = Exercises([one for one in known if 9 <= len(one.split()) <= 40], rng)
    exercises = [drawn.draw() for _ in range(rows["exercises"] + rows["valid"])]
    write_rows(out / "exercises.jsonl", exercises[rows["valid"] :])
    write_rows(out / "valid.jsonl", [*valid, *exercises[: rows["valid"]]])
    repeats = [demo_rl_data.repeats(rng) for _ in range(rows["repeats"])]
    write_rows(out / "repeats.jsonl", [{"text": text} for text in repeats])
    texts = [*said, *known, *repeats[:200], *searches(exercises[:300]), *[*NAMES, "user", "assistant"] * 400]
    count = train_twin_tokenizer(out / "tokenizer", texts, VOCABULARY)
    assert count == VOCABULARY, f"{count} tokens: the chain's model has {VOCABULARY}"
    write_start(out / "start", out / "tokenizer", seed)


def chat(out: Path, rng: random.Random, rows: dict[str, int]) -> list[dict[str, Any]]:
    """Rows of chat for SFT; the other files are written."""
    seen: set[str] = set()
    away: list[str] = []  # what held-out users say at length: it may stand in another conversation too, as its first half
    for name in ("chat_heldout", "pairs", "chat_rl"):
        tasks = unlike(away, rows[name], lambda count: demo_rl_data.tasks(rng, count, 0.0, seen))
        write_rows(out / f"{name}.jsonl", [
            {"id": f"{name}-{number}", "skill": skill, "messages": task.messages, "answer": task.ideal}
            for number, (skill, task) in enumerate(tasks)
        ])  # fmt: skip
        away = away or [task.messages[0]["content"] for skill, task in tasks if len(task.messages[0]["content"].split()) > 9]
    count, attacked = rows["chat"] + rows["valid"], demo_rl_data.ATTACKED
    trained = [task for _, task in unlike(away, count, lambda count: demo_rl_data.tasks(rng, count, attacked, seen))]
    write_rows(out / "clean.jsonl", [answered(task.messages, task.ideal) for task in trained[rows["valid"] :]])
    said = [demo_rl_data.sloppy(task, rng) if rng.random() < SLOPPY else task.ideal for task in trained]
    return [answered(task.messages, text) for task, text in zip(trained, said)]


def unlike(away: list[str], count: int, draw: Callable[[int], list[Drawn]]) -> list[Drawn]:
    """`count` drawn tasks in which none of these texts stands."""
    found: list[Drawn] = []
    while len(found) < count:
        drawn = draw(count - len(found))
        found += [one for one in drawn if not any(text in said["content"] for said in one[1].messages for text in away)]
    return found


def answered(messages: list[dict[str, Any]], text: str) -> dict[str, Any]:
    """A row of which the last answer is trained."""
    history = [{**one, "loss": 0} if one["role"] == "assistant" else one for one in messages]
    return {"messages": [*history, {"role": "assistant", "content": text, "loss": 1}]}


def code(out: Path, rng: random.Random, seed: int, rows: dict[str, int]) -> list[dict[str, Any]]:
    """Rows of programs for SFT; the problems are written."""
    every = demo_code_data.asked()
    rng.shuffle(every)
    tests = {problem.name: demo_code_data.tests_of(problem, seed) for problem in demo_code_data.problems()}
    for name in ("code_heldout", "code_rl"):
        taken, every = every[: rows[name]], every[rows[name] :]
        problems = [demo_code_data.row(one, f"{name}-{at}", tests[one.problem.name]) for at, one in enumerate(taken)]
        write_rows(out / f"{name}.jsonl", problems)
    few = len(every) // 20  # prompts of the rows held out
    asked = [*rng.choices(every[:few], k=rows["valid"]), *rng.choices(every[few:], k=rows["code"])]
    return [answered([demo_rl_data.user(one.text)], demo_code_data.answer(one, rng)) for one in asked]


def searches(exercises: list[dict[str, Any]]) -> list[str]:
    """What the tokenizer should know of tools: their descriptions, calls and results."""
    head = "# Tools\n\nFunctions that can be called:\n<tools>\n</tools>\n\nA call is written as:\n<function>, <object>"
    form, said = "<tool_call>\n{}\n</tool_call>\n<tool_response>\n</tool_response>\n", []
    for message in (one for row in exercises for one in row["messages"]):
        calls = message.get("tool_calls", [])
        said += [message["content"], *(form.format(json.dumps(one["function"])) for one in calls)]
    return said + [head, *(json.dumps(SCHEMAS[name]) for name in TOOLS)] * 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    build(options.out, options.seed, ROWS)


if __name__ == "__main__":
    main()
