"""A real vLLM server on this machine's CPU, over a tiny random model, for the tests of this folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("SERVE_PYTHON", ROOT / ".venv-serve/bin/python"))
START_S = 400
BLOCK = 32  # tokens of a block of the cache, the unit in which prefixes are shared; the smallest on CPU


def llama_config():
    """Head size 32 is the smallest that vLLM's CPU attention knows."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip


def save_tokenizer(folder: Path) -> None:
    """A word for each id: vLLM gives no log-probs without a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(llama_config().vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2").save_pretrained(folder)


def _up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> str:
    """The address of a running server: SERVE_URL, when one of such a model is up already, or a new one."""
    if "SERVE_URL" in os.environ:
        yield os.environ["SERVE_URL"]
        return
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing: make test-serve installs vLLM there (tools/serve_venv.sh)")
    import torch
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("serve")
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config()).save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    command = [ROOT / "tools/serve.sh", folder / "model", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
               "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "32",
               "--block-size", str(BLOCK)]  # fmt: skip
    log, url = folder / "server.log", f"http://127.0.0.1:{port}"
    with open(log, "w") as stream:
        process = subprocess.Popen(
            list(map(str, command)), stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **settings},
        )  # fmt: skip
    try:
        end = time.monotonic() + START_S
        while not _up(url):
            if process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"vLLM did not start (exit code {process.poll()}); the end of its log:\n{log.read_text()[-4000:]}")
            time.sleep(1)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
