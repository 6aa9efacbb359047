"""How well a model names the time complexity of programs it has not seen: accuracy, coverage, agreement with measured costs.

    python tools/eval_complexity_judge.py CHECKPOINT --programs runs/programs/programs [--out DIR] [--limit N]
    python tools/eval_complexity_judge.py --url http://host:8000 --model NAME --programs runs/programs/programs

CHECKPOINT: a run, a step folder or a Hugging Face folder; with --url the witness itself asks the served model. FOLDER holds
what synthesize_complexity wrote: heldout.jsonl (templates that training never saw) and seen.jsonl. The answers to a program
are counted as the witness counts them: a class needs a majority, all else is unknown.

    accuracy    share of the held-out programs whose class is named (unknown counts as wrong)
    coverage    share for which some class is named
    agreement   share of the measured programs, of those for which both witnesses name a class, where it is the same one
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_nb.asking.askers import AnswererConfig, EngineAsker
from megatron_nb.asking.loading import shape_of
from megatron_nb.client import ClientConfig
from megatron_nb.data.tokenizer import load_tokenizer
from megatron_nb.model.gpt import build
from megatron_nb.model.hf import LiveWeights
from megatron_nb.parallel import topology
from megatron_nb.parallel.topology import ParallelConfig
from megatron_nb.records import Conversation
from megatron_nb.rewards.judging import CodeJudge, JudgeConfig
from megatron_nb.rewards.witness import Agreement, Witness, WitnessConfig, WitnessFailed, majority_of, read_answer
from megatron_nb.rollout.agent import seed_of
from megatron_nb.rollout.native import NativeConfig, NativeEngine
from megatron_nb.run import write_atomic, write_summary
from megatron_nb.sandbox.ladder import LADDER, UNKNOWN, rank
from megatron_nb.training.start import find_origin, load_start

CACHE_GB = 0.5  # keys and values of the answers under way


def by_checkpoint(checkpoint: str, rows: list[dict[str, Any]], config: WitnessConfig, seed: int) -> list[str]:
    """The class that the checkpoint names for each row."""
    place = topology.initialize(ParallelConfig(), seed)
    model = shape_of(checkpoint)
    origin = find_origin(checkpoint, model)
    tokenizer = load_tokenizer(str(origin.hf_folder), None)
    chunks = build(model, ParallelConfig())
    load_start(origin, chunks, model, seed)
    longest = min(model.max_position_embeddings, 8192)
    engine = NativeEngine(
        NativeConfig(kv_cache_gb=CACHE_GB, block_size=16, max_concurrency=128, max_sequence_length=longest), model, place
    )
    engine.load_weights(LiveWeights(chunks, model), version=0)
    answerer = AnswererConfig(checkpoint=checkpoint, temperature=config.temperature, max_tokens=config.max_tokens)
    asker = EngineAsker(engine, tokenizer, answerer, longest - config.max_tokens)
    told: list[str] = [UNKNOWN] * len(rows)

    async def one(number: int) -> None:
        row = rows[number]
        asked = Conversation(row["messages"][:1], row["id"], "programs")
        names = [f"{row['id']}/{answer}" for answer in range(config.answers)]
        answers = await asyncio.gather(*(asker.ask(asked, name, seed_of(seed, name)) for name in names))
        told[number] = majority_of([as_vote(answer.text) for answer in answers], config.answers, config.majority) or UNKNOWN

    async def all_rows() -> None:
        await asyncio.gather(*map(one, range(len(rows))))

    try:
        engine.run(all_rows)
    finally:
        engine.close()
    return told


def as_vote(text: str) -> str:
    """The class of an answer; an answer without one is a vote for unknown here, as nothing is wrong with a server."""
    try:
        return read_answer(text)
    except ValueError:
        return UNKNOWN


async def by_endpoint(rows: list[dict[str, Any]], config: WitnessConfig) -> list[str]:
    """The class that the served model names for each row; unknown where no verdict could be had."""
    witness = Witness(config)

    async def one(row: dict[str, Any]) -> str:
        try:
            return (await witness.complexity(row["program"])).complexity
        except WitnessFailed as error:
            print(f"{row['id']}: {error}", file=sys.stderr)
            return UNKNOWN

    return await asyncio.gather(*map(one, rows))


async def measured(rows: list[dict[str, Any]], judge: JudgeConfig, concurrency: int = 2) -> list[str]:
    """The class that the costs of each row's program show."""
    code_judge, room = CodeJudge(judge), asyncio.Semaphore(concurrency)

    async def one(row: dict[str, Any]) -> str:
        async with room:
            return (await code_judge.complexity(row["plain"], row["function"], row["generator"])).complexity

    try:
        return await asyncio.gather(*map(one, rows))
    finally:
        code_judge.close()


# ------------------------------------------------------------------ figures
def figures(rows: list[dict[str, Any]], told: list[str]) -> dict[str, float]:
    """accuracy, coverage and what surrounds them, for one file."""
    labels = [row["complexity"] for row in rows]
    named = [(label, name) for label, name in zip(labels, told) if name != UNKNOWN]
    right = sum(label == name for label, name in named)
    return {
        "accuracy": right / len(rows), "coverage": len(named) / len(rows), "accuracy_of_named": right / max(len(named), 1),
        "within_one_rank": sum(abs(rank(label) - rank(name)) <= 1 for label, name in named) / max(len(named), 1),
        "majority_class": max(Counter(labels).values()) / len(rows), "programs": len(rows),
    }  # fmt: skip


def confusion(rows: list[dict[str, Any]], told: list[str]) -> str:
    """A line for each class, a column for what was named."""
    counts = Counter((row["complexity"], name) for row, name in zip(rows, told))
    names = [*LADDER, UNKNOWN]
    head = f"{'label':<12}" + "".join(f"{name:>11}" for name in names)
    lines = [f"{label:<12}" + "".join(f"{counts[label, name] or '.':>11}" for name in names) for label in LADDER]
    return "\n".join([head, *lines])


def evenly(rows: list[dict[str, Any]], count: int) -> list[int]:
    """Places of `count` rows, class by class in turn."""
    order = sorted(range(len(rows)), key=lambda at: (sum(row["complexity"] == rows[at]["complexity"] for row in rows[:at]), at))
    return order[:count]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", help="a run, a step folder or a Hugging Face folder")
    parser.add_argument("--url", help="ask a served model instead")
    parser.add_argument("--model", default="", help="its name there")
    parser.add_argument("--programs", type=Path, required=True, help="folder with heldout.jsonl and seen.jsonl")
    parser.add_argument("--out", type=Path, help="folder for summary.json (default CHECKPOINT/complexity_judge)")
    parser.add_argument("--limit", type=int, default=240, help="programs of each file, evenly over the classes (default 240)")
    parser.add_argument("--empirical", type=int, default=48, help="held-out programs that are measured too (default 48)")
    parser.add_argument("--isolation", choices=("bubblewrap", "none"), default="bubblewrap", help="of the programs measured")
    parser.add_argument("--answers", type=int, default=5, help="to each program (default 5)")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(argv)
    if (given.checkpoint is None) == (given.url is None):
        parser.error("give a CHECKPOINT or --url: one of them says who answers")
    began = time.monotonic()
    endpoint = ClientConfig(given.url, given.model) if given.url else None
    config = WitnessConfig(endpoint, answers=given.answers, temperature=given.temperature, max_tokens=given.max_tokens)
    files: dict[str, list[dict[str, Any]]] = {}
    for name in ("heldout", "seen"):
        path = given.programs / f"{name}.jsonl"
        if path.exists():
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            files[name] = [rows[at] for at in evenly(rows, given.limit)]
    if not files.get("heldout"):
        parser.error(f"{given.programs}/heldout.jsonl has no programs: run synthesize_complexity first")
    every = [row for rows in files.values() for row in rows]
    told = asyncio.run(by_endpoint(every, config)) if given.url else by_checkpoint(given.checkpoint, every, config, given.seed)
    summary: dict[str, float] = {}
    for name, rows in files.items():
        part, told = told[: len(rows)], told[len(rows) :]
        summary |= {key + ("" if name == "heldout" else f"_{name}"): value for key, value in figures(rows, part).items()}
        if name == "heldout":
            heldout = part
    print(f"held-out programs, label by line, verdict by column:\n{confusion(files['heldout'], heldout)}\n")
    if given.empirical:
        chosen = evenly(files["heldout"], given.empirical)
        costs = asyncio.run(measured([files["heldout"][at] for at in chosen], JudgeConfig(isolation=given.isolation)))
        agreement = Agreement()
        for at, empirical in zip(chosen, costs):
            agreement.agree(empirical, heldout[at], files["heldout"][at]["id"])
        shares = agreement.metrics()
        both = shares["witnesses_agree"] + shares["witnesses_differ"]
        right = sum(empirical == files["heldout"][at]["complexity"] for at, empirical in zip(chosen, costs))
        agreed = shares["witnesses_agree"] / both if both else 0.0
        summary |= shares | {"agreement": agreed, "empirical_accuracy": right / len(costs)}
    out = given.out or Path(given.checkpoint or ".") / "complexity_judge"
    wall = round(time.monotonic() - began, 1)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "confusion.txt", confusion(files["heldout"], heldout) + "\n")
    write_summary(out, seed=given.seed, wall_s=wall, **summary)
    print("".join(f"{key:<24} {value:.4g}\n" for key, value in summary.items()) + f"{out}/summary.json, {wall:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
