"""Bookkeeping of an episode of 600 turns with a scripted engine: what a turn costs beside the model and the search itself.

    python tools/bench_agent.py [--turns 600] [--rounds 3] [--out runs/bench-agent]

The engine says prepared ids at once; every turn thinks, and calls a tool that gives about 250 tokens, so that 600 turns fill a
row of 262144. Timed is what lies between two calls of the engine: decoding the turn, reading its call, the tool, its budget,
making data of it, the frame, the streams and the trace. Beside it stands a loop that renders its whole history by the chat
template and tokenises it before every turn; it is measured at every `--every`-th turn, and the sum is drawn from those.
The medians over rounds go to OUT/summary.json. Exit 1 when keep_all takes 2 s or more, or when turns 500-600 take more than 1.3
times what turns 1-100 take.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_nb.data.prompts import prompt_ids
from megatron_nb.data.tokenizer import load_tokenizer
from megatron_nb.data.turns import Template
from megatron_nb.records import Conversation, Prompt, Rollout
from megatron_nb.rollout.agent import Agent, AgentConfig, episode
from megatron_nb.rollout.calls import Call, write
from megatron_nb.rollout.engine import Completion, Request, Sampling, Stop
from megatron_nb.rollout.toolbox import Toolbox
from megatron_nb.rollout.tools import ToolsConfig
from megatron_nb.run import write_summary
from tools.demo_files import train_tokenizer

GOAL_S, GOAL_GROWTH, PART = 2.0, 1.3, 100
POLICIES = {"keep_all": {}, "keep_last": {"keep_last": 8, "clear_every": 8}}
SPOKEN, READ = 105, 185  # words of a turn, and of a page


def words_of(rng: random.Random) -> list[str]:
    """Made-up words."""
    return ["".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(rng.randint(1, 4))) for _ in range(3000)]


@dataclass(frozen=True)
class Hit:
    title: str
    snippet: str
    score: float


class Library:
    """A Search that costs nothing: pages by title."""

    def __init__(self, pages: dict[str, str]):
        self.pages = pages

    async def search(self, query: str, k: int) -> list[Hit]:
        return [Hit(query, self.pages[query], 0.0)]

    async def page(self, title: str) -> str | None:
        return self.pages.get(title)


class ScriptedEngine:
    """Says prepared turns; notes when it was asked and when it answered."""

    version = 0

    def __init__(self, turns: list[Completion]):
        self.turns, self.asked, self.answered = iter(turns), [], []

    async def generate(self, request: Request) -> Completion:
        self.asked.append(time.perf_counter())
        completion = next(self.turns)
        self.answered.append(time.perf_counter())
        return completion

    async def abort(self, request_id: str) -> None: ...

    async def end_session(self, session: str) -> None: ...


@dataclass
class Work:
    """What is played: the prompt, the turns as text and as completions, the pages they open."""

    tokenizer: Any
    prompt: Prompt
    texts: list[str]
    completions: list[Completion]
    toolbox: Toolbox


def prepare(turns: int, config: ToolsConfig, seed: int) -> Work:
    rng = random.Random(seed)
    words = words_of(rng)
    pages = {f"Page {n}": " ".join(rng.choices(words, k=READ)) for n in range(turns)}
    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer(Path(folder), [*list(pages.values())[:200], " ".join(words)], 6000)
        tokenizer = load_tokenizer(folder)
    toolbox = Toolbox(config, tokenizer, Library(pages))
    texts = []
    for n in range(turns):
        thought = " ".join(rng.choices(words, k=SPOKEN))
        called = Call("open_page", {"title": f"Page {n}"}, "")
        texts.append(f"<think>\n{thought}\n</think>\n\n{write(called, 'hermes')}")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    completions = []
    for text in texts:
        ids = [*tokenizer(text, add_special_tokens=False).input_ids, end]
        completions.append(Completion(ids, [-0.5] * len(ids), [0] * len(ids), Stop.EOS))
    conversation = Conversation([{"role": "user", "content": "Which page is the last?"}], "q", "bench", toolbox.schemas)
    prompt = Prompt(conversation, prompt_ids(conversation, Template(tokenizer)))
    return Work(tokenizer, prompt, texts, completions, toolbox)


def ours(work: Work, policy: str) -> tuple[list[float], list[Rollout]]:
    """(seconds of bookkeeping by turn, rows)"""
    turns = len(work.completions)
    config = AgentConfig(max_turns=turns, context=policy, tools=work.toolbox.config, **POLICIES[policy])
    toolbox = Toolbox(config.tools, work.tokenizer, work.toolbox._search)  # nothing remembered from an earlier round
    agent, engine, notes = Agent(config, work.tokenizer, toolbox), ScriptedEngine(work.completions), []
    sampling = Sampling(4096, stop_ids=(agent.frame.end,))
    names = {"group_id": "g", "index": 0, "seed": 1, "tokenizer": work.tokenizer}

    async def play() -> tuple[list[Rollout], float]:
        rows = await episode(engine, work.prompt, sampling, **names, agent=agent, trace=notes.append)
        return rows, time.perf_counter()

    rows, ended = asyncio.run(play())
    assert rows[-1].status == "turns" and len(engine.asked) == turns, (rows[-1].status, len(engine.asked))
    return [until - since for since, until in zip(engine.answered, [*engine.asked[1:], ended])], rows


def rendered(work: Work, every: int) -> dict[int, float]:
    """Seconds of the same turn where the history is rendered and tokenised as a whole, for every `every`-th turn."""
    messages, took = list(work.prompt.conversation.messages), {}
    for number, text in enumerate(work.texts):
        result = asyncio.run(work.toolbox.call(Call("open_page", {"title": f"Page {number}"}, "")))
        messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": result.text}]
        if number % every == 0 or number == len(work.texts) - 1:
            began = time.perf_counter()
            said = work.tokenizer.apply_chat_template(
                messages, tools=work.prompt.conversation.tools, add_generation_prompt=True, tokenize=False
            )
            work.tokenizer(said, add_special_tokens=False, verbose=False)
            took[number] = time.perf_counter() - began
    return took


def peak_mb() -> float:
    """The largest memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def integrated(took: dict[int, float]) -> float:
    """The sum over all turns, by straight lines between those measured."""
    places = sorted(took)
    return took[places[0]] + sum(
        (later - earlier) * (took[earlier] + took[later]) / 2 for earlier, later in zip(places, places[1:])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, default=60, help="of the loop that renders its history")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-agent"))
    options = parser.parse_args()
    if options.turns < 2:
        sys.exit(f"--turns={options.turns} must be at least 2")
    began, work = time.perf_counter(), prepare(options.turns, ToolsConfig(names=["search", "open_page"]), options.seed)
    part = min(PART, options.turns // 2)
    measured: dict[str, float] = {}
    before = peak_mb()  # with libraries, tokenizer, pages and the engine's prepared turns
    print(f"policy       rows   tokens   bookkeeping s   ms a turn   last turns / first   peak MB over {before:.0f}")
    for policy in POLICIES:
        totals, growths = [], []
        for _ in range(options.rounds):
            seconds, rows = ours(work, policy)
            totals.append(sum(seconds))
            growths.append(sum(seconds[-part:]) / sum(seconds[:part]))
        total, growth = statistics.median(totals), statistics.median(growths)
        peak = peak_mb() - before
        tokens = len(rows[-1].prompt_ids) + len(rows[-1].ids)
        each = 1000 * total / options.turns
        print(f"{policy:10} {len(rows):6} {tokens:8,} {total:15.3f} {each:11.3f} {growth:20.2f} {peak:9.0f}")
        measured |= {f"bookkeeping_s_{policy}": total, f"growth_{policy}": growth, f"peak_memory_mb_{policy}": peak}
    took = rendered(work, options.every)
    naive = integrated(took)
    print(f"a loop that renders its history: {naive:.1f} s, {1000 * took[max(took)]:.0f} ms at the last turn; "
          f"ours takes {measured['bookkeeping_s_keep_all'] / naive:.2%} of it")  # fmt: skip
    total, growth = measured.pop("bookkeeping_s_keep_all"), measured.pop("growth_keep_all")
    options.out.mkdir(parents=True, exist_ok=True)
    write_summary(
        options.out, seed=options.seed, wall_s=time.perf_counter() - began, turns=options.turns,
        bookkeeping_s_600_turns=total, growth=growth, rendering_s=naive, **measured,
    )  # fmt: skip
    if options.turns >= 2 * PART and (total >= GOAL_S or growth > GOAL_GROWTH):
        sys.exit(f"bookkeeping {total:.2f} s must be under {GOAL_S:g}, growth {growth:.2f} at most {GOAL_GROWTH:g}")


if __name__ == "__main__":
    main()
