"""The SFT job, killed and started again by the same command, ends with the bits of a job that was never killed."""

import io
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.data.data_tokenizers import chat, tiny
from tests.jobs.killed import STEP, run_job, run_killed

STEPS, EVERY = 10, 5
LAYOUTS = {"dp2": [], "tp2": ["parallel.tensor=2"], "pp2": ["parallel.pipeline=2"], "cp2": ["parallel.context=2"]}
# of the same job at every layout; a change here changes what everybody trains, and must say why
GOLDEN = [5.986551, 5.874686, 5.659125, 5.35139, 4.94328, 4.565966, 4.235211, 4.004146, 3.880878, 3.837007]
MODEL = ["model=tiny", "model.vocab_size=400", "model.hidden_size=32", "model.head_dim=8", "model.ffn_hidden_size=64"]


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    """A complete command line but for run and layout; rows of many lengths and a tokenizer lie in a folder."""
    folder = tmp_path_factory.mktemp("data")
    tiny().save_pretrained(folder / "tokenizer")
    draw, some = random.Random(5), ["some", "words", "of", "a", "question", "and", "an", "answer", "long", "short"]
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(80):
            question, answer = (" ".join(draw.choices(some, k=draw.randint(1, 12))) for _ in range(2))
            file.write(json.dumps(chat(question, answer)) + "\n")
    data = [f"data.sources.a.path={folder}/rows.jsonl", f"data.tokenizer={folder}/tokenizer", f"data.cache_dir={folder}/cache"]
    sizes = ["context=2k", "seq_len=128", "global_batch_size=4", f"num_steps={STEPS}", f"checkpoint.every={EVERY}"]
    rate = ["optimizer.lr=1e-2", "optimizer.warmup_steps=3"]
    processes = ["data.workers=0", "data.loader_workers=0"]  # a rank of the pool may not have children
    return [*MODEL, "parallel=cpu2", *sizes, "data=files", *data, *rate, *processes, "checkpoint.keep_every=5", "log.wandb=off"]


def _metrics(run: Path) -> dict[int, tuple]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss"], row["lr"], row["grad_norm"], row["tokens"]) for row in rows if "loss" in row}


def _content(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, those inside objects too; other values as text."""
    from megatron_nb.model.global_tensors import GlobalTensors

    source, found = GlobalTensors(folder), {}
    for key in source:
        found[key] = torch.zeros(source.shape(key), dtype=source.dtype(key))
        source.read(key, (0,) * found[key].dim(), found[key])
    for key in source.objects:
        _flatten(key, torch.load(io.BytesIO(source.object(key)), weights_only=True), found)
    return found


def _flatten(key: str, value, found: dict) -> None:
    if isinstance(value, dict | list | tuple):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            _flatten(f"{key}/{name}", part, found)
    else:
        found[key] = value


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_steps_equal_five_kill_9_and_five(ranks, tmp_path, words, layout):
    words = [*words, *LAYOUTS[layout], f"runs_dir={tmp_path}"]
    ranks.run(2, run_job, "sft", [*words, "name=whole"])
    run_killed(2, "sft", [*words, "name=killed"], 8, STEP)
    assert [path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()] == ["step-00000005"]
    ranks.run(2, run_job, "sft", [*words, "name=killed"])

    whole, killed = _metrics(tmp_path / "whole"), _metrics(tmp_path / "killed")
    assert sorted(whole) == list(range(1, STEPS + 1)) and len({loss for loss, *_ in whole.values()}) == STEPS
    assert [whole[step][0] for step in sorted(whole)] == pytest.approx(GOLDEN, rel=1e-4)
    assert killed == whole  # batches by their tokens and losses, rates, gradient norms
    name = f"checkpoints/step-{STEPS:08d}"
    expected, found = _content(tmp_path / "whole" / name), _content(tmp_path / "killed" / name)
    assert expected.keys() == found.keys()
    different = [key for key, value in expected.items() if not _equal(value, found[key])]
    # python's own generator: a first run draws from it while it tokenises, the next ones find the cache
    assert [key for key in different if "/python/" not in key] == []  # weights, moments, generators, data position, schedule


def _equal(a, b) -> bool:
    return a.equal(b) if torch.is_tensor(a) else a == b


def test_sigterm_saves_leaves_with_85_and_the_same_command_goes_on(tmp_path, words):
    from megatron_nb.training.signals import REQUEUE_EXIT

    words = [*words, "parallel=cpu1", f"runs_dir={tmp_path}", "name=stopped", "num_steps=400", "checkpoint.every=400"]
    command = [sys.executable, "-m", "megatron_nb.sft", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seen = []
    for line in process.stdout:  # wakes with every line the job says
        seen.append(line)
        if metrics.is_file() and metrics.stat().st_size:
            process.send_signal(signal.SIGTERM)
            break
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == REQUEUE_EXIT, "".join(seen) + rest
    (saved,) = (tmp_path / "stopped" / "checkpoints").iterdir()
    step = int(saved.name[5:])
    assert 0 < step < 400 and (saved / "COMPLETE").is_file()

    again = subprocess.run([*command, f"num_steps={step + 10}"], env=environment, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stdout + again.stderr
    assert sorted(_metrics(tmp_path / "stopped")) == list(range(1, step + 11))
