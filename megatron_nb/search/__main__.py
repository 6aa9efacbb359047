"""python -m megatron_nb.search build | query | info | serve: see README.md beside this file."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_nb.search", description="A wiki to search.")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="a corpus from a Wikipedia dump, rows of articles, or a folder of wikispeedia")
    build.add_argument("source", type=Path)
    build.add_argument("--out", type=Path, required=True, help="folder of the corpus; a build that was stopped goes on")
    build.add_argument("--workers", type=int, help="parser processes; the number of cores if not given")
    query = commands.add_parser("query", help="the best pages for a query")
    query.add_argument("folder", type=Path)
    query.add_argument("query")
    query.add_argument("-k", type=int, default=5, help="default %(default)s")
    info = commands.add_parser("info", help="what a corpus holds")
    info.add_argument("folder", type=Path)
    asked = parser.parse_args(words)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("megatron_nb").setLevel(logging.INFO)
    try:
        return {"build": _build, "query": _query, "info": _info}[asked.command](asked)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130


def _build(asked: argparse.Namespace) -> int:
    from megatron_nb.search.build import build

    print(json.dumps(build(asked.source, asked.out, asked.workers), indent=1))
    return 0


def _query(asked: argparse.Namespace) -> int:
    from megatron_nb.search.corpus import Corpus

    for number, hit in enumerate(Corpus.open(asked.folder).search(asked.query, asked.k), 1):
        print(f"[{number}] {hit.title} ({hit.score:.2f})\n{hit.snippet}\n")
    return 0


def _info(asked: argparse.Namespace) -> int:
    from megatron_nb.search.corpus import Corpus

    print(json.dumps(Corpus.open(asked.folder).info(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
