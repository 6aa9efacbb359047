"""What the demos write beside their data: rows as JSONL, and a small tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_nb.data.chatml import TEMPLATE
from megatron_nb.run import write_atomic

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))


def train_tokenizer(folder: Path, texts: list[str], size: int) -> None:
    """A byte-level BPE of at most `size` entries with ChatML, saved for transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([*texts, *["user\nassistant\n"] * 8], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
