"""Builds the data of the code demo: small problems that a model of two million parameters can learn to solve, or to miss.

    python tools/demo_code_data.py --out runs/demo-code/data [--seed 1]

A problem has several descriptions, solutions of its optimal class, slower right ones and wrong ones (demo_code_problems.toml).
A prompt is one description in one frame with one name for the argument; no prompt stands in two files. An answer to learn
from is drawn from all of a problem's programs, so the model learns a mixture. Writes sft.jsonl (conversations), rl.jsonl and
heldout.jsonl (problems as the code stages read them: tests, function, optimal class, generator), and the folder tokenizer/.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.demo_files import train_tokenizer, write_rows

VOCABULARY = 768  # at most
PROBLEMS = Path(__file__).with_name("demo_code_problems.toml")
FRAMES = (
    "Write solve({arg}). Return {what}.",
    "Define solve({arg}) to return {what}.",
    "solve({arg}) gives {what}. Write it.",
    "Return {what}: write solve({arg}).",
    "A function solve({arg}) is needed. It returns {what}.",
    "In Python, solve({arg}) should return {what}.",
)
SHARES = {"optimal": 0.27, "slow": 0.29, "wrong": 0.4, "malformed": 0.04}  # of the answers to learn from
KINDS = ("optimal", "slow", "wrong")  # of programs
TESTS = 6  # of a problem


def numbers(rng: random.Random, low: int = -4, high: int = 6, most: int = 8) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(2, most))]


DRAWS: dict[str, Callable[[random.Random], Any]] = {  # an argument for a test
    "numbers": numbers,
    "few_values": lambda rng: numbers(rng, 0, 2, 9),
    "half_sorted": lambda rng: sorted(numbers(rng)) if rng.random() < 0.5 else numbers(rng),
    "near_ten": lambda rng: [rng.choice((1, 2, 5, 8, 9, 12, 20)) for _ in range(rng.randint(2, 4))],
    "some_negative": lambda rng: numbers(rng, -9, -1) if rng.random() < 0.4 else numbers(rng),
    "small": lambda rng: rng.randint(1, 40),
}


@dataclass(frozen=True)
class Problem:
    """One problem; every program defines solve."""

    name: str
    best: str  # optimal class, of the ladder
    args: tuple[str, ...]
    phrasings: tuple[str, ...]
    optimal: tuple[str, ...]
    slow: tuple[str, ...]
    wrong: tuple[str, ...]
    generator: str  # source of make(n)
    draw: Callable[[random.Random], Any]


@cache
def problems() -> tuple[Problem, ...]:
    """All problems of the file."""
    read, found = tomllib.loads(PROBLEMS.read_text()), []
    for name, told in read.items():
        programs = {kind: tuple(told[kind].strip().split("\n\n")) for kind in KINDS}
        found.append(Problem(
            name, told["best"], tuple(told["args"]), tuple(told["phrasings"]), **programs, generator=told["generator"],
            draw=DRAWS[told["draw"]],
        ))  # fmt: skip
    return tuple(found)


@dataclass(frozen=True)
class Asked:
    """One way to ask for one problem."""

    problem: Problem
    text: str
    arg: str


def asked() -> list[Asked]:
    """Every prompt there is."""
    return [
        Asked(problem, frame.format(arg=arg, what=what.format(arg=arg)), arg)
        for problem in problems() for what in problem.phrasings for frame in FRAMES for arg in problem.args
    ]  # fmt: skip


def program(source: str, arg: str) -> str:
    """The program with its argument (written x there) named `arg`."""
    return re.sub(r"\bx\b", arg, source)


def fenced(source: str) -> str:
    return f"```python\n{source}\n```"


def malformed(source: str, rng: random.Random) -> str:
    """An answer without form: no fence, no end of it, or a program that does not parse."""
    return rng.choice((source, f"```python\n{source}", fenced(source.replace("):", ")", 1))))


def answer(one: Asked, rng: random.Random) -> str:
    """An answer to learn from, drawn by SHARES."""
    (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
    if kind == "malformed":
        return malformed(program(rng.choice(one.problem.optimal + one.problem.slow), one.arg), rng)
    return fenced(program(rng.choice(getattr(one.problem, kind)), one.arg))


def solve_of(source: str) -> Any:
    """The function of one of our own programs."""
    names: dict[str, Any] = {}
    exec(source, names)  # ours, not a model's
    return names["solve"]


def tests_of(problem: Problem, seed: int) -> list[dict[str, Any]]:
    """Tests in the judge's form; every wrong program fails one of them (drawn again until it is so)."""
    right, wrong = solve_of(problem.optimal[0]), [solve_of(source) for source in problem.wrong]
    rng = random.Random(f"{seed} {problem.name}")
    for _ in range(1000):
        inputs = [problem.draw(rng) for _ in range(TESTS)]
        expected = [right(one) for one in inputs]
        if all([false(one) for one in inputs] != expected for false in wrong):
            return [{"call": "solve", "args": [one], "expected": value} for one, value in zip(inputs, expected)]
    raise AssertionError(f"no {TESTS} tests tell the wrong programs of {problem.name} from the right ones")


def row(one: Asked, name: str, tests: list[dict[str, Any]]) -> dict[str, Any]:
    """A problem as the code stages read it."""
    problem = one.problem
    return {
        "id": name, "prompt": one.text, "problem": problem.name, "language": "python", "tests": tests, "time_limit_s": 1.0,
        "memory_limit_mb": 256, "function": "solve", "optimal": problem.best, "generator": problem.generator,
    }  # fmt: skip


def build(out: Path, seed: int, sft: int, rl: int, heldout: int) -> None:
    """Writes every file; the numbers are rows."""
    rng, every = random.Random(seed), asked()
    if rl + heldout > len(every) // 2:
        raise ValueError(f"rl={rl} and heldout={heldout} leave less than half of {len(every)} prompts to learn from")
    rng.shuffle(every)
    out.mkdir(parents=True, exist_ok=True)
    tests = {problem.name: tests_of(problem, seed) for problem in problems()}
    for name, its in (("heldout", every[:heldout]), ("rl", every[heldout : heldout + rl])):
        rows = [row(one, f"{name}-{number}", tests[one.problem.name]) for number, one in enumerate(its)]
        write_rows(out / f"{name}.jsonl", rows)
    trained = [(one.text, answer(one, rng)) for one in rng.choices(every[heldout + rl :], k=sft)]
    write_rows(out / "sft.jsonl", [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": said, "loss": 1}]}
        for text, said in trained
    ])  # fmt: skip
    train_tokenizer(out / "tokenizer", [part for pair in trained for part in pair], VOCABULARY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    build(options.out, options.seed, sft=8000, rl=400, heldout=200)


if __name__ == "__main__":
    main()
