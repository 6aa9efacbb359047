"""A whole recipe in miniature: a chain with a stage of each kind, over rows, a wiki and problems made here."""

import json
import random
from pathlib import Path
from typing import Any

from tests.data.data_tokenizers import chat, tiny
from tests.jobs.test_reward_job import _pairs
from tests.synthesis.small_wiki import small_corpus

MODEL = ["model=tiny", "model.vocab_size=400", "model.hidden_size=32", "model.head_dim=8", "model.ffn_hidden_size=64"]
TESTS = [{"call": "f", "args": [[1, 2, 3]], "expected": 6}, {"call": "f", "args": [[3, 0]], "expected": 3}]


class Length:
    """A judge that likes answers of many different letters; short ones are not all alike to it."""

    async def score_rollout(self, prompt, rollout) -> float:
        return len(set(rollout.text)) + len(rollout.text) / 100


def write_inputs(folder: Path) -> None:
    """What the recipe reads: tokenizer, conversations, prompts, pairs, problems, a wiki with its index."""
    tiny().save_pretrained(folder / "tokenizer")
    draw, some = random.Random(5), ["some", "words", "of", "a", "question", "and", "an", "answer", "long", "short"]

    def text() -> str:
        return " ".join(draw.choices(some, k=draw.randint(1, 8)))

    fields = {"language": "python", "tests": TESTS, "time_limit_s": 5.0, "memory_limit_mb": 256, "function": "f"}
    fields |= {"optimal": "n", "generator": "def make(n):\n    return [list(range(n))]"}
    files = {
        "chat": [chat(text(), text()) for _ in range(40)],
        "prompts": [{"id": f"p{number}", "prompt": text()} for number in range(12)],
        "problems": [{"id": f"c{number}", "prompt": f"add up {'some ' * number}numbers", **fields} for number in range(4)],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _pairs(folder / "pairs.jsonl", 40)
    small_corpus(folder / "wiki", pages=60)


def recipe(folder: Path) -> dict[str, Any]:
    """{"words", "stages", "ledger"} of the cascade's configuration."""
    shared = [*MODEL, "parallel=cpu1", "log.wandb=off", "launch.hang_factor=0", "checkpoint.every=1", "checkpoint.keep_last=1"]
    shared += ["data.workers=0", "data.loader_workers=0", f"data.cache_dir={folder}/cache", "optimizer.warmup_steps=0"]
    tokens = f"data.tokenizer={folder}/tokenizer"
    sft = ["context=2k", "data=files", tokens, "data.overlong=truncate", "global_batch_size=4", "num_steps=8"]
    sft += ["optimizer.lr=3e-2"]
    reward = ["context=2k", "seq_len=512", "global_batch_size=4", "num_steps=3", "optimizer.lr=3e-3", "data.heldout_share=0.2"]
    cache = ["engine.native.kv_cache_gb=0.05", "engine.native.block_size=16", "engine.native.max_concurrency=8"]
    rl = ["collect.num_prompts=2", "collect.group_size=3", "collect.concurrency=1", "sampling.max_tokens=8", *cache]
    rl += ["optimizer.lr=1e-2", "evaluation.every=2", "num_steps=2"]
    alone = [*rl, "answers=short", "collect.overlong=null", "update.pack_tokens=1024"]
    prompts = [f"prompts.sources.a.path={folder}/prompts.jsonl", "prompts.heldout_share=0.2", "prompts.heldout_limit=2"]
    code = [*alone, f"prompts.sources.a.path={folder}/problems.jsonl", "reward.terms.code.settings.thinking=forbidden"]
    walk = ["walk.min_steps=2", "walk.max_steps=4", "walk.min_degree=0", "walk.cutoff=2019-12-31", "walk.window_days=4000"]
    index = f"{folder}/wiki/corpus"
    pairs = [f"prompts.sources.a.path={folder}/prompts.jsonl", "strong.checkpoint={sft_long}", "weak.checkpoint={sft_short}"]
    pairs += ["strong.max_tokens=48", "weak.max_tokens=48", "engine.kv_cache_gb=0.01", "engine.block_size=16"]
    pairs += ["engine.max_concurrency=8", "concurrency=1", "prompts.adversarial_share=0", "pairs.balance_length=false"]
    pairs += ["judge.terms.words.kind=tests.jobs.cascade_words.Length"]
    made = ["data.sources.made.path={pairs}/pairs/pairs.jsonl", f"data.sources.given.path={folder}/pairs.jsonl"]
    episodes = ["answers=episodes_short", "prompts.sources.a.path={questions}/questions/rl.jsonl", "prompts.max_tokens=3000"]
    episodes += [f"agent.tools.search={index}", "agent.tools.names=[search,open_page]", "agent.max_turns=2"]
    episodes += ["agent.max_tokens=4096"]
    score = "reward.terms.model.settings.checkpoint"
    stages = {
        "questions": {"stage": "synthesize_questions", "words": [f"corpus={index}", "train=6", "rl=4", "heldout=2", *walk]},
        "trajectories": {"stage": "synthesize_trajectories", "words": [
            "questions={questions}/questions/train.jsonl", f"tools.search={index}", "teacher.kind=oracle", "attempts=1"]},
        "sft_short": {"stage": "sft", "words": [*sft, f"data.sources.chat.path={folder}/chat.jsonl", "seq_len=128"]},
        "sft_long": {"stage": "sft", "start_from": "sft_short", "words": [
            *sft, f"data.sources.chat.path={folder}/chat.jsonl", "seq_len=2048",
            "data.sources.search.path={trajectories}/trajectories/trajectories.jsonl"]},
        "pairs": {"stage": "synthesize_preferences", "words": pairs},
        "reward_pointwise": {"stage": "reward_pointwise", "start_from": "sft_long", "words": [*reward, *made]},
        "rl_pointwise": {"stage": "rl_pointwise", "start_from": "sft_long", "words": [
            *alone, *prompts, f"{score}={{reward_pointwise}}"]},
        "reward_pairwise": {"stage": "reward_pairwise", "start_from": "sft_long", "words": [*reward, *made]},
        "rl_pairwise": {"stage": "rl_pairwise", "start_from": "rl_pointwise", "words": [
            *alone, *prompts, f"{score}={{reward_pairwise}}", "reward.terms.model.settings.mode=group"]},
        "rl_code_pass_rate": {"stage": "rl_code_pass_rate", "start_from": "rl_pairwise", "words": code},
        "rl_code_complexity": {"stage": "rl_code_complexity", "start_from": "rl_code_pass_rate", "words": code},
        "rl_agentic": {"stage": "rl_agentic", "start_from": "rl_code_complexity", "words": [*rl, *episodes]},
        "export": {"stage": "export_model", "start_from": "rl_agentic"},
    }  # fmt: skip
    tasks = ["tasks.programs.kind=code", f"tasks.programs.path={folder}/problems.jsonl"]
    tasks += [*cache, "concurrency=1", "sampling.max_tokens=8"]
    ledger = {"words": tasks, "of": ["sft_long", "rl_pointwise", "rl_agentic"]}
    return {"words": shared, "stages": stages, "ledger": ledger}
