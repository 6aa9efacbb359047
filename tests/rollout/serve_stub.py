"""The stub server as a process: python -m tests.rollout.serve_stub FOLDER PORT [--host H]; FOLDER: config.json of a model."""

import argparse
import os
import threading

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.rollout.stub_server import StubServer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("port", type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--token-s", type=float, default=0.0, help="that a token takes")
    asked = parser.parse_args()
    torch.manual_seed(os.getpid())  # another draw at every start: its first weights must never be sampled from
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(asked.folder), dtype=torch.float32)
    with StubServer(model=model, host=asked.host, port=asked.port) as stub:
        stub.token_delay = asked.token_s
        threading.Event().wait()


if __name__ == "__main__":
    main()
