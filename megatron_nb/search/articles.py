"""Readers of prepared articles: rows of title and text, and the wikispeedia release (articles, links, categories)."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import unquote

from megatron_nb.search import sentences
from megatron_nb.search.dates import date_of
from megatron_nb.search.dump import Dump, Mark
from megatron_nb.search.pages import KINDS, Link, Page, clean_title, kind_of_title

OPENERS = {".xz": lzma.open, ".gz": gzip.open}
FORM = 'a row is {"title": str, "text": str, "links"?: [title or {"target", "kind"?, "sentence"?}], "categories"?, "date"?, "kind"?}'
NOISE = re.compile(r"^\s*(#copyright|Enlarge|Retrieved from .*|This reference article is .*)$")
RELATED = re.compile(r"2007 Schools Wikipedia Selection\. Related subjects: ?")


def open_text(path: Path) -> TextIO:
    return OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8")


class Articles:
    """Rows of JSON, one a line (.jsonl, .gz, .xz)."""

    def __init__(self, path: Path):
        self.path, self.size, self.at, self.broken = path, path.stat().st_size, 0, {}

    def rows(self, mark: Mark = Mark()) -> Iterator[tuple[Mark, Any]]:  # noqa: B008  frozen
        """ValueError at the first line that is no such row."""
        with open(self.path, "rb") as raw, OPENERS.get(self.path.suffix, lambda file, mode: file)(raw, "rb") as file:
            for number, line in enumerate(file, 1):
                self.at = raw.tell()
                if number > mark.skip and line.strip():
                    yield Mark(0, number), self._row(number, line)

    def _row(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{self.path}:{number}: {error}: {FORM}") from None
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("title", "text")):
            raise ValueError(f"{self.path}:{number}: found {str(row)[:80]!r}: {FORM}")
        if not clean_title(row["title"]):
            raise ValueError(f"{self.path}:{number}: title={row['title']!r} is empty: {FORM}")
        if row.get("kind", "article") not in KINDS:
            raise ValueError(f"{self.path}:{number}: kind={row['kind']!r} must be one of {', '.join(KINDS)}")
        if row.get("date") and not re.fullmatch(r"\d{4}-\d\d-\d\d", str(row["date"])):
            raise ValueError(f"{self.path}:{number}: date={row['date']!r} must be a day such as 2021-05-30")
        try:
            links = [{"target": one} if isinstance(one, str) else one for one in row.get("links") or ()]
            row["links"] = [(clean_title(one["target"]), one.get("kind"), one.get("sentence")) for one in links]
        except (TypeError, KeyError, AttributeError):
            raise ValueError(f"{self.path}:{number}: links={str(row['links'])[:80]} : {FORM}") from None
        return row

    def parse(self) -> Callable[[dict[str, Any]], Page]:
        return prepared_page


class Wikispeedia:
    """A folder of the release with the articles' text: wikispeedia_articles*.jsonl*, *links.tsv*, *categories.tsv*."""

    def __init__(self, path: Path):
        files = {name: next(iter(sorted(path.glob(pattern))), None) for name, pattern in (
            ("articles", "*articles*.jsonl*"), ("links", "*links.tsv*"), ("categories", "*categories.tsv*"))}  # fmt: skip
        missing = [name for name in ("articles", "links") if files[name] is None]
        if missing:
            raise ValueError(f"{path} has no file of {' and no file of '.join(missing)}: a folder of wikispeedia holds "
                             "*articles*.jsonl.xz and *links.tsv.gz; name a file for anything else")  # fmt: skip
        self.path, self.articles = path, Articles(files["articles"])
        self.size, self.broken = self.articles.size, self.articles.broken
        self.links = _table(files["links"])
        self.categories = _table(files["categories"]) if files["categories"] else {}

    @property
    def at(self) -> int:
        return self.articles.at

    def rows(self, mark: Mark = Mark()) -> Iterator[tuple[Mark, Any]]:  # noqa: B008  frozen
        for after, row in self.articles.rows(mark):
            title = clean_title(row["title"])
            row["links"] = [(target, None, None) for target in self.links.get(title, ())]
            names = [name.removeprefix("Subject.") for name in self.categories.get(title, ())]
            row["text"], row["categories"] = unwrapped(row["text"], title), names
            yield after, row

    def parse(self) -> Callable[[dict[str, Any]], Page]:
        return prepared_page


def prepared_page(row: dict[str, Any]) -> Page:
    """A row as a page. A link without a sentence gets the first one that names its target."""
    title, text = clean_title(row["title"]), row["text"].replace("\r\n", "\n").strip()
    lead, categories = text.partition("\n\n")[0], tuple(row.get("categories") or ())
    found = _Mentions(text)
    links = []
    for target, kind, sentence in row["links"]:
        if not sentence or sentence not in text:
            sentence, place = found.first(target)
            kind = kind or place
        links.append(Link(target, kind or "text", sentence))
    date = row.get("date") or date_of(lead, categories, None)
    return Page(title, text, tuple(links), categories, date, row.get("revised"), row.get("kind") or kind_of_title(title))


class _Mentions:
    """Finds titles in a text."""

    def __init__(self, text: str):
        self.pieces = [(line[a:b], "lead" if at == 0 else "text") for at, paragraph in enumerate(text.split("\n\n"))
                       for line in paragraph.split("\n") for a, b in sentences.spans(line)]  # fmt: skip

    def first(self, title: str) -> tuple[str, str]:
        """(sentence, lead or text); ("", "text") when no sentence names it. The name may lack its (kind), and be inflected."""
        name = re.sub(r" \([^)]*\)$", "", title)
        for word in dict.fromkeys((name, name[:1].lower() + name[1:])):
            pattern = re.compile(rf"(?<!\w){re.escape(word)}(?:s|es|'s)?(?!\w)")
            for sentence, place in self.pieces:
                if word in sentence and pattern.search(sentence):
                    return sentence, place
        return "", "text"


def unwrapped(text: str, title: str) -> str:
    """Paragraphs of an article that was wrapped at 75 columns, without its head and captions that stand twice."""
    paragraphs: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        block = "\n".join(line for line in block.split("\n") if not NOISE.match(line))
        lines = [line.strip() for line in block.split("\n") if line.strip()]
        half = len(lines) // 2
        if lines and lines[:half] == lines[half:]:
            continue  # a picture's caption
        joined = re.sub(r"(?: |^)\* ", "\n- ", " ".join(lines)).strip()
        if joined and joined != title and not RELATED.match(joined):
            paragraphs.append(joined)
    return "\n\n".join(paragraphs)


def _table(path: Path) -> dict[str, list[str]]:
    """Title -> values, of two columns with % escapes."""
    rows: dict[str, list[str]] = defaultdict(list)
    with open_text(path) as file:
        for number, row in enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), 1):
            if not row or row[0].startswith("#"):
                continue
            if len(row) != 2:
                raise ValueError(f"{path}:{number}: found {len(row)} columns: two are needed, parted by a tab")
            rows[clean_title(unquote(row[0]))].append(clean_title(unquote(row[1])))
    return rows


def source_of(path: Path) -> Dump | Articles | Wikispeedia:
    """The reader of a file or folder by its name. ValueError for what none reads."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: name a dump (.xml, .xml.bz2, .xml.gz), rows (.jsonl) or a folder of wikispeedia")
    if path.is_dir():
        return Wikispeedia(path)
    name = path.name.lower().removesuffix(".gz").removesuffix(".xz").removesuffix(".bz2")
    return Articles(path) if name.endswith(".jsonl") else Dump(path)
