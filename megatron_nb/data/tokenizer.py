"""The tokenizer and its chat template: loading, and the digest that says when two of them write the same tokens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_nb.data.chatml import TEMPLATE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str | None, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, of a checkpoint of ours (its `hf/`), or of a GGUF file.

    chat_template: replaces the tokenizer's own: a file, or "chatml" for the built-in one. Raises ValueError.
    """
    if not path:
        raise ValueError(
            "no tokenizer: rows are turned into tokens by one; name the folder of a Hugging Face model in data.tokenizer "
            "(prompts.tokenizer in RL), or give an init_from that has one"
        )
    folder = Path(path).expanduser()
    if (folder / "hf").is_dir():
        folder = folder / "hf"
    gguf = folder if folder.suffix == ".gguf" else next(iter(sorted(folder.glob("*.gguf"))), None)
    if (
        not (folder / "tokenizer.json").is_file()
        and not (folder / "tokenizer.model").is_file()
        and not (gguf and gguf.is_file())
    ):
        raise ValueError(
            f"tokenizer={path!r} holds no tokenizer: a folder with tokenizer.json or a GGUF file is needed; check the path"
        )
    from transformers import AutoTokenizer

    if (folder / "tokenizer.json").is_file() or gguf is None:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    else:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer={path!r} is a slow tokenizer: loss masks need character offsets; convert it to tokenizer.json"
        )
    if chat_template == "chatml":
        tokenizer.chat_template = TEMPLATE
    elif chat_template:
        file = Path(chat_template).expanduser()
        if not file.is_file():
            raise ValueError(
                f"data.chat_template={chat_template!r} is no file: give a Jinja file, or chatml for the built-in one"
            )
        tokenizer.chat_template = file.read_text()
    return tokenizer


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hex digest of everything that decides the ids: vocabulary, rules, special tokens, chat template."""
    parts = [
        tokenizer.backend_tokenizer.to_str(),
        json.dumps(tokenizer.chat_template),
        json.dumps(_plain(tokenizer.special_tokens_map)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _plain(special: dict) -> dict:
    return {name: [str(item) for item in value] if isinstance(value, list) else str(value) for name, value in special.items()}
