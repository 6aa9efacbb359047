"""The real command lines: a mistake ends `python -m megatron_nb.sft` before any work, under torchrun once for all ranks."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_nb import sft

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SMALL = ["model=tiny", "parallel=cpu1", "context=2k", "data=files"]


def command(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["sft", *words])
    sft.main()


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("lr_typo=1", "optimizer.lr"),
        ("+lr_typo=1", "optimizer.lr"),
        ("++lr_typo=1", "optimizer.lr"),
        ("++optimizer.lr_typo=1", "optimizer.lr"),
        ("seqlen=8", "seq_len"),
        ("modl=tiny", "model"),
        ("model.layers=2", "model.num_layers"),
        ("checkpoint.keeplast=2", "checkpoint.keep_last"),
    ],
)
def test_a_typo_stops_sft_before_any_work_and_names_the_nearest_key(monkeypatch, capsys, tmp_path, word, nearest):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        command(monkeypatch, *SMALL, word)
    assert stopped.value.code == 2
    assert f"the nearest is '{nearest}'" in capsys.readouterr().err
    assert not dist.is_initialized()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("optimizer.lr=fast", "optimizer.lr must be float, found the str 'fast'"),
        ("num_steps=many", "num_steps must be int, found the str 'many'"),
        ("parallel.tensor=3", "tensor"),
        ("seq_len=16384", "max_position_embeddings"),
    ],
)
def test_a_wrong_value_stops_sft_before_any_work(monkeypatch, capsys, tmp_path, word, rule):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        command(monkeypatch, *SMALL, word)
    assert stopped.value.code == 2
    assert rule in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_configuration_and_memory_and_does_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    command(monkeypatch, "context=256k", "parallel=h100_256k", "data=mixture_256k", "--dry-run")
    printed = capsys.readouterr().out
    for word in ("seq_len: 262144", "rope_theta: 70000000.0", "activations", "total", "3,933,637,120 parameters"):
        assert word in printed
    assert not dist.is_initialized()
    assert list(tmp_path.iterdir()) == []


def test_help_tells_the_commands_and_every_group(monkeypatch, capsys):
    command(monkeypatch, "--help")
    printed = capsys.readouterr().out
    for word in ("Supervised fine-tuning", "torchrun --nproc-per-node", "dense_3b", "h100_256k", "mixture_256k", "--dry-run"):
        assert word in printed


def test_python_m_refuses_a_typo_from_any_folder_in_one_line(tmp_path):
    words = [sys.executable, "-m", "megatron_nb.sft", *SMALL, "++optimizer.lr_typo=1"]
    done = subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("error:")] == [
        "error: unknown key 'optimizer.lr_typo': OptimizerConfig has no 'lr_typo'; the nearest is 'optimizer.lr' "
        "(in OptimizerConfig of megatron_nb.training.optimizer). --cfg job prints every key"
    ]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_torchrun_refuses_a_typo_once_for_all_ranks(tmp_path):
    torchrun = Path(sys.executable).with_name("torchrun")
    words = [torchrun, "--nproc-per-node", "2", "-m", "megatron_nb.sft", *SMALL, "lr_typo=1"]
    done = subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.count("error: unknown key 'lr_typo'") == 1
    assert list(tmp_path.iterdir()) == []
