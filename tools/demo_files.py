"""What the demos share: their command line and their end, rows as JSONL, and a small tokenizer."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_nb.data.chatml import TEMPLATE
from megatron_nb.run import write_atomic

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BLANK = "Ġ"  # a space, as byte-level tokenizers write it
INDENTS = (("", ""), ("Ġ", "Ġ"), ("Ġ", ""), ("ĠĠĠ", "ĠĠ"))  # what is merged to runs of 2, 4, 3 and 7 blanks


def arguments(description: str | None, name: str) -> argparse.Namespace:
    """The options of a demo; `folder` is where it writes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help=f"default runs/{name}, with -MODEL and -fast where they apply")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="this many, one after the other; errors are then over seeds")
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny", help="smollm2 takes hours on two cores")
    parser.add_argument("--fast", action="store_true", help="a smoke test of two minutes; shows nothing and does not have to")
    options = parser.parse_args()
    suffix = ("" if options.model == "tiny" else f"-{options.model}") + ("-fast" if options.fast else "")
    options.folder = options.folder or Path(f"runs/{name}{suffix}")
    return options


def exit_code(missed: list[str], fast: bool) -> int:
    """1, with a line, when something that a demo is there to show was not seen; a smoke test shows nothing."""
    if not missed or fast:
        return 0
    print(f"error: not shown beyond two standard errors: {'; '.join(missed)}", file=sys.stderr)
    return 1


def end_with(main: Callable[[], int]) -> None:
    """Run a demo and leave with its exit code; a stage that fails is one line, and so is what a user can mend."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running stages are ended too
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: stage {error.cmd} ended with code {error.returncode}; the end of its log stands above")
    except ValueError as error:  # of the configuration or of data, or a gate that is shut
        sys.exit(f"error: {error}")


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


def train_twin_tokenizer(folder: Path, texts: list[str], size: int, indents: tuple[tuple[str, str], ...] = INDENTS) -> int:
    """The same, but every word is cut in the same pieces with and without a space before it; its entries, at most `size`.

    Names in running text and in quotation marks then differ in one token, which has a twin. Indents are one token.
    """
    letters = 256
    words = [re.sub(" +", "\n", text) for text in texts]
    train_tokenizer(folder, words, len(SPECIAL) + letters + (size - len(SPECIAL) - 2 * letters - len(indents) + 1) // 2)
    file = folder / "tokenizer.json"
    told = json.loads(file.read_text())
    vocabulary, merges = told["model"]["vocab"], told["model"]["merges"]
    twins = [piece for piece in vocabulary if piece not in SPECIAL and piece != BLANK]
    pairs = [(BLANK, piece) for piece in twins] + [(BLANK + left, BLANK + right) for left, right in indents]
    for left, right in pairs:  # these merges come last, so the pieces are those of the word alone
        vocabulary.setdefault(left + right, len(vocabulary))
        merges.append([left, right])
    file.write_text(json.dumps(told, ensure_ascii=False))
    return len(vocabulary)
