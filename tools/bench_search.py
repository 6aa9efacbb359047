"""Measures search: documents and queries per second and recall beside other engines, and the rate at which a dump is read.

    python tools/bench_search.py [--data FOLDER] [--rounds 3] [--queries 200] [--copies 10] [--out runs/bench-search]

Articles: those of wikispeedia; every engine indexes the same texts and answers the same questions with its 10 best, in turns,
medians of wall time, one process. Recall: the paragraphs of XQuAD among those of 2WikiMultihopQA; the share of XQuAD's
questions whose own paragraph is among the first 10. Dump: `build` of a short Wikipedia dump and of one that is --copies times
as long, each in a process of its own, for the rate and the peak of memory; and what the rate makes of a whole English dump
(--dump-gb of bz2) with as many processes. Without --data all three take the sample that package gensim brings, and questions
are words of its paragraphs: that shows that the bench runs, not how good search is. Peers that are not installed are left
out. Writes summary.json.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import importlib.util
import json
import os
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_nb.run import write_summary
from megatron_nb.search.build import build, source_of
from megatron_nb.search.corpus import Corpus
from megatron_nb.search.index import Index, build_index
from megatron_nb.search.pages import Page

K = 10
Texts = list[tuple[str, str]]  # (title, text)
Ask = Callable[[str], list[int]]  # a question -> numbers of the best texts, best first
WORD = re.compile(r"\w+")
CHILD = """
import json, sys
from pathlib import Path
from megatron_nb.search.build import build
print(json.dumps(build(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of wikispeedia, XQuAD, 2WikiMultihopQA and a dump")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--articles", type=int, help="so many of the articles only")
    parser.add_argument("--copies", type=int, default=10, help="of the short dump in the long one, at least 2 (default 10)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="parser processes for the dump")
    parser.add_argument("--dump-gb", type=float, default=24.0, help="size of a whole English dump as .bz2, 10^9 bytes")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-search"), help="folder of summary.json")
    asked = parser.parse_args()
    if asked.data and not asked.data.is_dir():
        raise SystemExit(f"--data {asked.data} is not there: name a folder with wikispeedia, XQuAD, 2WikiMultihopQA and a dump")
    begin, console = time.monotonic(), Console()
    source = asked.data or sample()
    questions, paragraphs = xquad(source) if asked.data else made_questions(source)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        summary = articles(asked, source, folder, [question for question, _ in questions], console)
        summary |= recall(folder / "recall", questions, paragraphs, console)
        summary |= dump(asked, source, folder, console)
    write_summary(asked.out, seed=0, wall_s=round(time.monotonic() - begin, 1), **summary)


# ------------------------------------------------------------------ engines: texts -> a way to ask
def tantivy_engine(texts: Texts, folder: Path) -> Ask:
    rows = [(number, *text) for number, text in enumerate(texts)]
    build_index(lambda first: rows[first:], folder / "tantivy", lambda *_: None)
    index = Index(folder / "tantivy")
    return lambda question: [page for page, _ in index.search(question, K)]


def fts5_engine(texts: Texts, folder: Path) -> Ask:
    db = sqlite3.connect(folder / "fts5.sqlite")
    db.execute("CREATE VIRTUAL TABLE pages USING fts5(title, body, tokenize='porter unicode61')")
    db.executemany("INSERT INTO pages VALUES (?, ?)", texts)
    db.commit()
    query = "SELECT rowid - 1 FROM pages WHERE pages MATCH ? ORDER BY bm25(pages, 2.0, 1.0) LIMIT ?"

    def ask(question: str) -> list[int]:
        words = " OR ".join(f'"{word}"' for word in WORD.findall(question))
        return [row for (row,) in db.execute(query, (words, K))]

    return ask


def bm25s_engine(texts: Texts, folder: Path) -> Ask:
    import bm25s

    def tokens(words: Any) -> Any:
        return bm25s.tokenize(words, stopwords="en", show_progress=False)

    retriever = bm25s.BM25()
    retriever.index(tokens([f"{title}\n{text}" for title, text in texts]), show_progress=False)

    def ask(question: str) -> list[int]:
        found, _ = retriever.retrieve(tokens(question), k=min(K, len(texts)), show_progress=False)
        return found[0].tolist()

    return ask


def rank_bm25_engine(texts: Texts, folder: Path) -> Ask:
    import numpy as np
    from rank_bm25 import BM25Okapi

    index = BM25Okapi([WORD.findall(f"{title}\n{text}".lower()) for title, text in texts])
    return lambda question: np.argsort(-index.get_scores(WORD.findall(question.lower())), kind="stable")[:K].tolist()


ENGINES = {"tantivy": tantivy_engine, "fts5": fts5_engine, "bm25s": bm25s_engine, "rank_bm25": rank_bm25_engine}


def installed() -> dict[str, Callable[[Texts, Path], Ask]]:
    found = {}
    for name, engine in ENGINES.items():
        try:
            __import__(name if name != "fts5" else "sqlite3")
            found[name] = engine
        except ImportError:
            print(f"{name} is left out: pip install {name}")
    return found


# ------------------------------------------------------------------ what is measured
def articles(asked: argparse.Namespace, source: Path, folder: Path, questions: list[str], console: Console) -> dict[str, float]:
    texts, asking = texts_of(source)[: asked.articles], questions[: asked.queries]
    seconds: dict[str, dict[str, list[float]]] = {}
    for number in range(asked.rounds):
        for name, engine in installed().items():
            place = folder / f"{name}-{number}"
            place.mkdir()
            start = time.perf_counter()
            ask = engine(texts, place)
            middle = time.perf_counter()
            for question in asking:
                ask(question)
            taken = seconds.setdefault(name, {"index": [], "query": []})
            taken["index"].append(middle - start)
            taken["query"].append(time.perf_counter() - middle)
    table, summary = Table("engine", "documents/s", "queries/s", title=f"{len(texts)} articles, {len(asking)} questions"), {}
    for name, taken in seconds.items():
        rates = len(texts) / statistics.median(taken["index"]), len(asking) / statistics.median(taken["query"])
        table.add_row(name, f"{rates[0]:,.0f}", f"{rates[1]:,.1f}")
        summary |= {f"{name}_documents_per_s": round(rates[0], 1), f"{name}_queries_per_s": round(rates[1], 1)}
    facts = build(source, folder / "corpus", 1)
    corpus = Corpus.open(folder / "corpus")
    start = time.perf_counter()
    for question in asking:
        corpus.search(question, K)
    rate = len(asking) / (time.perf_counter() - start)
    whole = facts["pages"] / sum(facts["seconds"].values())
    table.add_row("the corpus: links, index and graph; with snippets", f"{whole:,.0f}", f"{rate:,.1f}")
    console.print(table)
    return summary | {"corpus_documents_per_s": round(whole, 1), "corpus_queries_per_s": round(rate, 1)}


def texts_of(source: Path) -> Texts:
    reader = source_of(source)
    parse = reader.parse()
    return [(page.title, page.text) for page in (parse(row) for _, row in reader.rows()) if isinstance(page, Page)]


def sample() -> Path:
    """The shortened dump that package gensim brings."""
    found = importlib.util.find_spec("gensim")  # not imported: its dependencies need not be there
    file = next(iter(Path(found.origin).parent.glob("test/test_data/enwiki*shortened.bz2")), None) if found else None
    if file is None:
        raise SystemExit("no --data, and package gensim with its sample is missing: pip install --no-deps gensim==4.4.0")
    return file


def made_questions(source: Path) -> tuple[list[tuple[str, int]], Texts]:
    """(every third word of a paragraph, up to 8, with its number; the paragraphs): nobody wrote questions to the sample."""
    paragraphs = [(title, part) for title, text in texts_of(source) for part in text.split("\n\n") if len(part) > 200]
    return [(" ".join(text.split()[2:26:3]), number) for number, (_, text) in enumerate(paragraphs)][::5], paragraphs


def xquad(data: Path) -> tuple[list[tuple[str, int]], Texts]:
    """(questions with the number of their paragraph, paragraphs of XQuAD and 2WikiMultihopQA)"""
    questions, paragraphs = [], []
    for article in json.loads((data / "xquad.en.json").read_text())["data"]:
        for paragraph in article["paragraphs"]:
            questions += [(asked["question"], len(paragraphs)) for asked in paragraph["qas"]]
            paragraphs.append((article["title"].replace("_", " "), paragraph["context"]))
    with gzip.open(data / "2wikimultihopqa_corpus.json.gz", "rt") as file:
        return questions, paragraphs + [(row["title"], row["text"]) for row in json.load(file)]


def recall(folder: Path, questions: list[tuple[str, int]], paragraphs: Texts, console: Console) -> dict[str, float]:
    folder.mkdir()
    title = f"{len(questions)} questions, {len(paragraphs)} paragraphs"
    table, summary = Table("engine", "recall at 10", "at 1", title=title), {}
    for name, engine in installed().items():
        ask = engine(paragraphs, folder)
        found = [(ask(question), gold) for question, gold in questions]
        ten, one = (sum(gold in best[:k] for best, gold in found) / len(found) for k in (K, 1))
        table.add_row(name, f"{ten:.4f}", f"{one:.4f}")
        summary[f"{name}_recall_at_10"] = round(ten, 4)
    console.print(table)
    return {"recall_at_10": summary["tantivy_recall_at_10"], **summary}


def dump(asked: argparse.Namespace, source: Path, folder: Path, console: Console) -> dict[str, float]:
    """Rate and memory of a short and a long dump, and what they make of a whole one."""
    short = source if source.is_file() else next(iter(sorted(source.glob("*wiki*.bz2"))), None)
    if short is None:
        print(f"no dump (*wiki*.bz2) in {source}: its rate is left out")
        return {}
    xml = bz2.decompress(short.read_bytes()).decode()
    head, first, rest = xml.partition("<page>")
    body = first + rest.removesuffix("</mediawiki>")
    long = folder / "long.xml.bz2"
    with bz2.open(long, "wt", encoding="utf-8", compresslevel=9) as file:
        file.write(head)
        for number in range(asked.copies):
            file.write(body.replace("<title>", f"<title>Copy {number} of "))
        file.write("</mediawiki>")
    table, summary = Table("dump", "bz2 MB", "pages", "seconds", "CPU s", "pages/s", "XML MB/s", "peak MB"), {}
    for name, path, size in (("short", short, len(xml)), ("long", long, len(xml) * asked.copies)):
        words = [sys.executable, "-c", CHILD, path, folder / name, str(asked.workers)]
        told = subprocess.run(words, capture_output=True, text=True)
        if told.returncode:
            raise SystemExit(told.stderr)
        facts = json.loads(told.stdout)
        seconds, mb = sum(facts["seconds"].values()), path.stat().st_size / 1e6
        rates = facts["pages"] / seconds, size / 1e6 / seconds
        shown = (mb, facts["pages"], seconds, facts["cpu_s"], *rates, facts["peak_mb"])
        table.add_row(name, *(f"{value:,.1f}" for value in shown))
        summary |= {f"dump_{name}_pages_per_s": round(rates[0], 1), f"dump_{name}_peak_mb": facts["peak_mb"],
                    f"dump_{name}_bz2_mb_per_s": round(mb / seconds, 4), f"dump_{name}_cpu_s": facts["cpu_s"]}  # fmt: skip
    console.print(table)
    hours = asked.dump_gb * 1e3 / summary["dump_long_bz2_mb_per_s"] / 3600
    cpu = (summary["dump_long_cpu_s"] - summary["dump_short_cpu_s"]) / (asked.copies - 1)  # of one copy, without the start
    cpu_hours = asked.dump_gb * 1e3 / (short.stat().st_size / 1e6) * cpu / 3600
    console.print(f"an English dump of {asked.dump_gb:g} GB as bz2 at this rate: {hours:.1f} h with {asked.workers} parser "
                  f"processes; {cpu_hours:.1f} h of CPU")  # fmt: skip
    whole = {"full_dump_hours": round(hours, 2), "full_dump_cpu_hours": round(cpu_hours, 2)}
    return summary | {"dump_workers": asked.workers, **whole}


if __name__ == "__main__":
    main()
