"""Checks and tokenises data ahead of a job, into the cache the job will find, and reports what is in them.

    python tools/prepare_data.py --tokenizer MODEL_FOLDER --source code=data/code.jsonl --source chat=data/chat/ \\
        --cache-dir runs/token-cache --seq-len 32768 --weight code=3 --weight chat=1

Tokenizer, template, history and bad-rows settings are part of the cache's key: give the ones the job uses.
"""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import fields
from typing import Any

import numpy as np
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from megatron_nb.data.cache import TokenCache
from megatron_nb.data.dataset import Dataset, check_vocabulary
from megatron_nb.data.formats import FORMATS
from megatron_nb.data.mixture import check_weights
from megatron_nb.data.prepare import prepare
from megatron_nb.data.render import HISTORY
from megatron_nb.data.sources import DataConfig, SourceConfig
from megatron_nb.data.tokenizer import load_tokenizer


def main() -> None:
    arguments = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(show_time=False, show_path=False)])
    weights = {name: float(weight) for name, weight in map(pair, arguments.weight)}
    sources = {name: SourceConfig(path, weights.get(name), arguments.format) for name, path in map(pair, arguments.source)}
    names = {field.name for field in fields(DataConfig)}
    config = DataConfig(sources, **{name: value for name, value in vars(arguments).items() if name in names})
    try:
        shares = check_weights(weights, list(sources))
        config.validate()
        tokenizer = load_tokenizer(config.tokenizer, config.chat_template)
        caches = prepare(sources, config, tokenizer)
        for cache in caches.values():
            check_vocabulary(cache, tokenizer, arguments.vocab_size)
        Console(width=None if sys.stdout.isatty() else 140).print(report(caches, shares, arguments.seq_len))
        if arguments.seq_len:
            Dataset(caches, arguments.seq_len, config.overlong, weights, shuffle=config.shuffle)
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from error


def parse() -> argparse.Namespace:
    """The command line; options that a DataConfig has bear its names."""
    default = DataConfig()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--source", action="append", required=True, metavar="NAME=PATH", help="file, folder or glob; repeatable"
    )
    parser.add_argument("--weight", action="append", default=[], metavar="NAME=WEIGHT", help="to check the mixture; repeatable")
    parser.add_argument("--tokenizer", required=True, help="folder of a Hugging Face model or checkpoint, or a GGUF file")
    parser.add_argument("--chat-template", help="Jinja file, or chatml; default: the tokenizer's own")
    parser.add_argument("--cache-dir", default=default.cache_dir, help="default %(default)s")
    parser.add_argument("--workers", type=int, help="tokenising processes; default: one per core")
    parser.add_argument("--format", choices=FORMATS, default="auto", help="of all sources; default %(default)s")
    parser.add_argument("--history", choices=HISTORY, default=default.history, help="default %(default)s")
    parser.add_argument("--keep-all-think", action="store_true", help="thinking of earlier turns stays in the context")
    parser.add_argument("--bad-rows", choices=("error", "skip"), default=default.bad_rows, help="default %(default)s")
    parser.add_argument("--seq-len", type=int, help="apply the rule for samples that are longer, and count them")
    parser.add_argument("--overlong", choices=("error", "truncate", "drop"), default="drop", help="default %(default)s")
    parser.add_argument("--vocab-size", type=int, help="of the model: refuse tokens beyond it")
    return parser.parse_args()


def pair(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, found, value = text.partition("=")
    if not (name and found and value):
        raise SystemExit(f"error: {text!r} must have the form NAME=VALUE")
    return name, value


def report(caches: dict[str, TokenCache], shares: dict[str, float] | None, seq_len: int | None) -> Table:
    """One line of counts and lengths per source."""
    table = Table(title="token cache")
    columns = ["source", "weight", "rows", "bad", "samples", "tokens", "trained", "median", "99 %", "longest"]
    for name in columns + ([f"over {seq_len:,}"] if seq_len else []):
        table.add_column(name, justify="left" if name == "source" else "right")
    for name, cache in caches.items():
        index: dict[str, Any] = cache.index
        middle, most, longest = np.percentile(cache.lengths, [50, 99, 100])
        counts = [index["rows"], index["skipped"], index["samples"], index["tokens"], index["trained"], middle, most, longest]
        counts += [int((cache.lengths > seq_len).sum())] if seq_len else []
        table.add_row(name, f"{shares[name]:.3f}" if shares else "-", *(f"{int(count):,}" for count in counts))
    table.caption = "\n".join(str(cache.folder) for cache in caches.values())
    return table


if __name__ == "__main__":
    main()
