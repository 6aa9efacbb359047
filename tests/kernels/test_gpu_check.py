"""gpu_check, without a GPU: every check runs on the torch paths, and a wrong, dead or late one is told as such."""

import fcntl
import importlib.util
import json
import subprocess
import threading
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "kernels" / "gpu_check.py"
SPEC = importlib.util.spec_from_file_location("gpu_check", PATH)
gpu_check = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gpu_check)


@pytest.mark.parametrize("name", gpu_check.CHECKS)
def test_every_check_passes_in_rehearsal(name, capsys):
    gpu_check.one(name, "float32", rehearse=True)
    verdicts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert verdicts and all(ok for *_, ok in verdicts)


def test_a_wrong_result_is_seen(monkeypatch, capsys):
    monkeypatch.setattr("nb_kernels.swiglu.swiglu", lambda x: torch.nn.functional.silu(x[..., ::2]) * x[..., 1::2])
    gpu_check.one("swiglu", "float32", rehearse=True)
    out = capsys.readouterr().out
    ok, text = gpu_check.line("swiglu", "float32", subprocess.CompletedProcess([], 0, out, ""), 1.0)
    assert not ok and text.startswith("FAIL swiglu float32") and "0 wrong" not in text


def test_a_dead_and_a_late_check_fail():
    dead = subprocess.CompletedProcess([], -9, "", "CUDA error: an illegal memory access")
    assert gpu_check.line("x", "bfloat16", dead, 1.0) == (False, f"FAIL {'x bfloat16':34} died with -9: {dead.stderr}")
    assert gpu_check.line("x", "bfloat16", None, 1.0)[0] is False


def test_whole_references_wait_for_their_turn(monkeypatch, tmp_path):
    """Sixteen checks share one GPU's memory: while one holds a reference, the others wait."""
    monkeypatch.setenv("GPU_CHECK_TURN", str(tmp_path / "turn"))
    entered = threading.Event()
    x = torch.ones(2)

    def reference(x):
        entered.set()
        return x.exp()

    with open(tmp_path / "turn", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        check = threading.Thread(target=lambda: gpu_check.against_float64("exp", torch.exp, reference, (x,)))
        check.start()
        assert not entered.wait(0.3)
    assert entered.wait(30)
    check.join()
