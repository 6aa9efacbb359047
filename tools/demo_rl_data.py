"""Builds the data of the RL demo: questions that a model of two million parameters can learn, answered well or sloppily.

    python tools/demo_rl_data.py --out runs/demo-rl/data [--seed 1]

Seven skills (who has what, where it is, lists, copies, sorted numbers, the last word, a second question about the same
facts) over invented facts that stand in the prompt. Every prompt has one ideal answer. A sloppy answer is wrong, stutters,
is written carelessly, rambles, or is cut off: some of these are longer than the ideal answer and some shorter, so length
says nothing about quality. No prompt stands in two files. Writes, for SFT, mixed.jsonl and clean.jsonl; prompts with
their ideal answer in pairs.jsonl, rl.jsonl and heldout.jsonl; and the folder tokenizer/.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_nb.records import Prompt, Rollout
from megatron_nb.synthesis.adversarial import KINDS, adversarial
from tools.demo_files import train_tokenizer, write_rows

VOCABULARY = 1024  # at most
NAMES = "Mira Toby Lena Omar Ruth Ivan Nora Pavel Sana Hugo Zara Felix Dina Karl Tess Bruno".split()  # noqa: SIM905
THINGS = "kite drum lamp boat coin book ring vase hat bell clock fork rope shell stamp flute".split()  # noqa: SIM905
PLACES = "attic garden cellar kitchen garage tower shed hall".split()  # noqa: SIM905
FILLER = ("um, ", "well, i guess ", "whatever, ", "hm, like, ")
TRAILER = (" or so", ", who cares", " i think, maybe not", ", no idea")
SLOPPY = 0.6  # share of sloppy answers in mixed.jsonl
ATTACKED = 0.15  # share of SFT prompts with an adversarial transform


@dataclass
class Task:
    """One prompt with its ideal answer and answers that look alike and are wrong."""

    messages: list[dict[str, str]]
    ideal: str
    wrong: list[str]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def pair_of(rng: random.Random, values: list[str], verb: str) -> tuple[list[str], list[str], list[str]]:
    """(two things, their values, the two sentences that say so)."""
    things, chosen = rng.sample(THINGS, 2), rng.sample(values, 2)
    return things, chosen, [f"The {thing} {verb} {value}." for thing, value in zip(things, chosen)]


def owner(rng: random.Random) -> Task:
    things, names, said = pair_of(rng, NAMES, "belongs to")
    a = rng.randrange(2)
    wrong = [said[1 - a], f"The {things[a]} belongs to {names[1 - a]}."]
    return Task([user(f"Note: {' '.join(said)} Who owns the {things[a]}?")], said[a], wrong)


def again(rng: random.Random) -> Task:
    """A second question about the same facts: the history is needed."""
    things, names, said = pair_of(rng, NAMES, "belongs to")
    a = rng.randrange(2)
    asked = [user(f"Note: {' '.join(said)} Who owns the {things[a]}?"), assistant(said[a]), user(f"And the {things[1 - a]}?")]
    return Task(asked, said[1 - a], [said[a], f"The {things[1 - a]} belongs to {names[a]}."])


def place(rng: random.Random) -> Task:
    things, places, said = pair_of(rng, PLACES, "is in the")
    a = rng.randrange(2)
    wrong = [said[1 - a], f"The {things[a]} is in the {places[1 - a]}."]
    return Task([user(f"Note: {' '.join(said)} Where is the {things[a]}?")], said[a], wrong)


def numbered(rng: random.Random) -> Task:
    things = rng.sample(THINGS, 3)
    ideal = "\n".join(f"{number}. {thing}" for number, thing in enumerate(things, 1))
    wrong = [", ".join(things), "\n".join(things)]
    return Task([user(f"Make a list: {', '.join(things)}.")], ideal, wrong)


def copied(rng: random.Random) -> Task:
    things = rng.sample(THINGS, 3)
    wrong = [f"Sure: {', '.join(things[::-1])}.", f"Sure: {things[0]}, {things[0]}, {things[0]}."]
    return Task([user(f"Repeat: {', '.join(things)}.")], f"Sure: {', '.join(things)}.", wrong)


def ordered(rng: random.Random) -> Task:
    numbers = rng.sample(range(24), 3)
    written = [", ".join(map(str, order)) for order in (sorted(numbers), numbers, sorted(numbers)[::-1])]
    wrong = [f"Sorted: {order}." for order in written[1:] if order != written[0]]
    return Task([user(f"Sort: {written[1]}.")], f"Sorted: {written[0]}.", wrong)


def last(rng: random.Random) -> Task:
    things = rng.sample(THINGS, 3)
    ideal, wrong = f"The last word is {things[2]}.", [f"The last word is {thing}." for thing in things[:2]]
    return Task([user(f"Which word is last: {', '.join(things)}?")], ideal, wrong)


SKILLS: dict[str, Callable[[random.Random], Task]] = {
    "owner": owner, "again": again, "place": place, "numbered": numbered, "copied": copied, "ordered": ordered, "last": last,
}  # fmt: skip


def repeats(rng: random.Random) -> str:
    """Words said over and over: from such text a small model learns fast to copy."""
    words = rng.sample(NAMES + THINGS + PLACES + [str(number) for number in range(24)], rng.randint(3, 6))
    return rng.choice((", ", " ", " the ")).join(["Note:", *words * (24 // len(words))])


def sloppy(task: Task, rng: random.Random) -> str:
    """A worse answer of one of five kinds."""
    ideal, kind = task.ideal, rng.choice(("wrong", "stutter", "careless", "rambling", "cut"))
    words = ideal.split(" ")
    if kind == "wrong":
        return rng.choice(task.wrong)
    if kind == "stutter":
        at = rng.randrange(len(words))
        return " ".join(words[: at + 1] + words[at : at + 1] * rng.randint(1, 4) + words[at + 1 :])
    if kind == "careless":
        return ideal.lower().rstrip(".").replace("\n", " ")
    if kind == "rambling":
        return rng.choice(FILLER) + ideal.lower().rstrip(".") if rng.random() < 0.5 else ideal.rstrip(".") + rng.choice(TRAILER)
    return " ".join(words[: max(len(words) // 2, 1)]).strip()


def quality(ideal: str, answer: str) -> float:
    """In [0, 1]: 1 for the ideal answer, else at most 0.8, by what is shared with it piece by piece (blanks are pieces)."""
    if answer.strip() == ideal:
        return 1.0
    pieces = [text.replace("\n", " \n ").split(" ") for text in (ideal, answer.strip())]
    return 0.8 * SequenceMatcher(None, *pieces, autojunk=False).ratio()


class Quality:
    """`quality` as a term of a reward: the judge of the preference pairs."""

    async def score_rollout(self, prompt: Prompt, rollout: Rollout) -> float:
        return quality(prompt.data["answer"], rollout.text)


def tasks(rng: random.Random, count: int, attacked: float, seen: set[str]) -> list[tuple[str, Task]]:
    """`count` tasks, skill by skill in turn, whose prompts are not in `seen` (they are added)."""
    found: list[tuple[str, Task]] = []
    while len(found) < count:
        skill = list(SKILLS)[len(found) % len(SKILLS)]
        task = SKILLS[skill](rng)
        key = json.dumps(task.messages)
        if key in seen:
            continue
        seen.add(key)
        if rng.random() < attacked:
            task.messages = adversarial(task.messages, rng.choice(KINDS), rng)
        found.append((skill, task))
    return found


def build(out: Path, seed: int, sft: int, pairs: int, rl: int, heldout: int) -> None:
    """Writes every file; the numbers are rows."""
    rng, seen = random.Random(seed), set()
    out.mkdir(parents=True, exist_ok=True)
    for name, count in (("heldout", heldout), ("pairs", pairs), ("rl", rl)):
        write_rows(out / f"{name}.jsonl", [
            {"id": f"{name}-{number}", "skill": skill, "messages": task.messages, "answer": task.ideal}
            for number, (skill, task) in enumerate(tasks(rng, count, 0.0, seen))
        ])  # fmt: skip
    trained = tasks(rng, sft, ATTACKED, seen)
    answers = {"clean": [task.ideal for _, task in trained]}
    answers["mixed"] = [sloppy(task, rng) if rng.random() < SLOPPY else task.ideal for _, task in trained]
    for name, texts in answers.items():
        # only the answer is trained: the earlier turns of a conversation are history
        rows = [[*({**m, "loss": 0} if m["role"] == "assistant" else m for m in task.messages), {**assistant(text), "loss": 1}]
                for (_, task), text in zip(trained, texts)]  # fmt: skip
        write_rows(out / f"{name}.jsonl", [{"messages": row} for row in rows])
    write_rows(out / "repeats.jsonl", [{"text": repeats(rng)} for _ in range(sft // 2)])
    asked = [message["content"] for _, task in trained for message in task.messages]
    train_tokenizer(out / "tokenizer", asked + answers["clean"] + answers["mixed"], VOCABULARY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    build(options.out, options.seed, sft=12000, pairs=1200, rl=600, heldout=200)


if __name__ == "__main__":
    main()
