"""The search index: BM25 by tantivy, over titles and texts. Files are mapped, so memory does not grow with the corpus."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import tantivy

from megatron_nb.search import sentences

HEAP = 256 << 20  # bytes of the writer
COMMIT = 100_000  # pages between commits: what a kill loses
TITLE_WEIGHT = 0.3  # measured: more finds a page by its name and loses the one that answers a question (README)
WORDS = 64  # of a query; the rest is left out
SNIPPET = 300  # characters
SEEN = 50_000  # characters of a page in which its snippet is looked for
WORD = re.compile(r"\w+")
COMMON = (  # left out of queries that hold other words: twice the speed, and no loss
    "a an and are as at be by did do does for from has have how in is it its many much of on or that the their they this to "
    "was were what when where which who whom whose why will with"
)


class Index:
    """Open for reading; usable from any thread. ids are those of the pages."""

    def __init__(self, folder: Path):
        self._index = tantivy.Index.open(str(folder))
        self._searcher = self._index.searcher()
        builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple()).filter(tantivy.Filter.remove_long(40))
        self._analyzer = builder.filter(tantivy.Filter.lowercase()).filter(tantivy.Filter.stemmer("english")).build()
        self._common = set(self._analyzer.analyze(COMMON))

    def __len__(self) -> int:
        return self._searcher.num_docs

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        """(page id, score), best first; [] for a query without a word. No sign in a query has a meaning."""
        stems = list(dict.fromkeys(self._analyzer.analyze(query.encode("utf-8", "replace").decode())))
        stems = ([stem for stem in stems if stem not in self._common] or stems)[:WORDS]
        if not stems or k < 1:
            return []
        found = self._searcher.search(self._any_of(stems), 2 * k, count=False)  # equal scores come in the order of segments
        ranked = [(self._searcher.doc(address)["id"][0], score) for score, address in found.hits]
        return sorted(ranked, key=lambda hit: (-hit[1], hit[0]))[:k]

    def _any_of(self, stems: list[str]) -> tantivy.Query:
        parts = []
        for stem in stems:
            title, body = (tantivy.Query.term_query(self._index.schema, name, stem, "freq") for name in ("title", "body"))
            parts += [(tantivy.Occur.Should, tantivy.Query.boost_query(title, TITLE_WEIGHT)), (tantivy.Occur.Should, body)]
        return tantivy.Query.boolean_query(parts)


def build_index(texts: Callable[[int], Iterable[tuple[int, str, str]]], folder: Path, tick: Callable[[int, int], None]) -> None:
    """Index (id, title, text) of texts(first id); goes on behind what a former attempt has committed."""
    folder.mkdir(parents=True, exist_ok=True)
    schema = tantivy.SchemaBuilder()
    schema.add_unsigned_field("id", stored=True)
    for name in ("title", "body"):
        schema.add_text_field(name, tokenizer_name="en_stem", index_option="freq")  # as in Index
    index = tantivy.Index(schema.build(), str(folder))
    index.reload()
    first = index.searcher().num_docs  # ids are 0, 1, 2, ... and a commit is all or nothing
    writer = index.writer(HEAP, 1)
    for page, title, text in texts(first):
        document = tantivy.Document()
        document.add_unsigned("id", page)
        document.add_text("title", title)
        document.add_text("body", text)
        writer.add_document(document)
        tick(page + 1, 1)
        if (page + 1 - first) % COMMIT == 0:
            writer.commit()
    writer.commit()
    writer.wait_merging_threads()


def snippet_of(text: str, query: str) -> str:
    """The sentences, verbatim and up to SNIPPET characters, in the paragraph that holds most of the query's words."""
    words = (re.sub(r"(?:ing|ed|es|s)$", "", word) if len(word) > 5 else word for word in WORD.findall(query.lower()))
    stems = list(dict.fromkeys(stem for stem in words if len(stem) > 2 or not stem.isascii()))[:WORDS]

    def worth(piece: str) -> int:
        piece = piece.lower()
        return sum(len(stem) for stem in stems if stem in piece)

    paragraph = max(text[:SEEN].split("\n\n"), key=worth)
    pieces = [paragraph[a:b] for a, b in sentences.spans(paragraph)]
    best = max(range(len(pieces)), key=lambda at: worth(pieces[at]), default=0)
    shown = ""
    for piece in pieces[best:]:
        if shown and len(shown) + len(piece) >= SNIPPET:
            break
        shown = f"{shown} {piece}" if shown else piece
    shown = " ".join(shown.split())
    return shown if len(shown) <= SNIPPET else shown[:SNIPPET].rsplit(" ", 1)[0] + " ..."
