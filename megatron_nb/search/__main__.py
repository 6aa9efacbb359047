"""python -m megatron_nb.search build | query | info | embed | serve: see README.md beside this file."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any


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
    serve = commands.add_parser("serve", help="a corpus over HTTP")
    serve.add_argument("folder", type=Path)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; default %(default)s")
    serve.add_argument("--port", type=int, default=8710, help="default %(default)s; 0: a free one, told on stderr")
    serve.add_argument("--token-env", help="environment variable that holds the token")
    serve.add_argument("--token-file", help="file that holds the token")
    serve.add_argument("--without-token", action="store_true", help="listen beyond this machine without one")
    serve.add_argument("--queue", type=int, default=256, help="requests under way at once; default %(default)s")
    embed = commands.add_parser("embed", help="vectors of all pages, for dense retrieval")
    embed.add_argument("folder", type=Path)
    for command in (query, serve, embed):
        command.add_argument("--embeddings", metavar="URL", required=command is embed,
                             help="OpenAI-compatible server of the vectors, such as http://host:8000")  # fmt: skip
        command.add_argument("--model", default="", help="its model's name")
        command.add_argument("--api-key-env", help="environment variable that holds its key")
    asked = parser.parse_args(words)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("megatron_nb").setLevel(logging.INFO)
    try:
        return {"build": _build, "query": _query, "info": _info, "serve": _serve, "embed": _embed}[asked.command](asked)
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
    for number, hit in enumerate(asyncio.run(_search_of(asked).search(asked.query, asked.k)), 1):
        print(f"[{number}] {hit.title} ({hit.score:.2f})\n{hit.snippet}\n")
    return 0


def _info(asked: argparse.Namespace) -> int:
    from megatron_nb.search.corpus import Corpus

    print(json.dumps(Corpus.open(asked.folder).info(), indent=1))
    return 0


def _search_of(asked: argparse.Namespace) -> Any:
    """BM25, or both ways where an endpoint for vectors is named."""
    from megatron_nb.search.backend import LocalSearch
    from megatron_nb.search.dense import HybridSearch

    return HybridSearch(asked.folder, _endpoint(asked)) if asked.embeddings else LocalSearch(asked.folder)


def _endpoint(asked: argparse.Namespace) -> Any:
    from megatron_nb.client import ClientConfig

    return ClientConfig(asked.embeddings, asked.model, asked.api_key_env)


def _embed(asked: argparse.Namespace) -> int:
    from megatron_nb.search.dense import embed

    print(f"{asyncio.run(embed(asked.folder, _endpoint(asked)))} vectors")
    return 0


def _serve(asked: argparse.Namespace) -> int:
    from megatron_nb.search.service import ServiceConfig, serve

    names = ("host", "port", "token_env", "token_file", "without_token", "queue")
    config, search = ServiceConfig(**{name: getattr(asked, name) for name in names}), _search_of(asked)
    serve(config, search, len(search.corpus))
    return 0


if __name__ == "__main__":
    sys.exit(main())
