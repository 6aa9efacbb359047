"""Reader of the wikispeedia release: articles as wrapped plain text, and tables of their links and categories."""

from __future__ import annotations

import csv
import gzip
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from megatron_nb.search.articles import DAMAGED, Articles, is_heading, prepared_page
from megatron_nb.search.dump import Mark
from megatron_nb.search.pages import Page, clean_title

NOISE = re.compile(
    r"^(#copyright|This is a (featured|good) article\. Click here for more information\.|SOS Children .*)$"
)
FOOTER = re.compile(r"^ *(Retrieved from|This reference article is mainly selected) ", re.MULTILINE)  # with all that follows
PICTURE = "Enlarge"  # stands between a picture's two captions
VERB = re.compile(r"\b(is|are|was|were|refers?|has|have|had|became|denotes?|means|consists?)\b")
FURTHEST = 15  # paragraphs among which the first sentence of the article is looked for


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
            row["text"], row["categories"] = tidied(row["text"], title), names
            yield after, row

    def parse(self) -> Callable[[dict[str, Any]], Page]:
        return prepared_page


def tidied(text: str, title: str) -> str:
    """Whole paragraphs of a text wrapped at 75 columns, without head and captions; what stood in a box follows the lead."""
    paragraphs: list[str] = []
    for block in re.split(r"\n\s*\n", FOOTER.split(text, maxsplit=1)[0]):
        if "Wikipedia Selection. Related subjects" in block:
            continue
        lines = [line.strip() for line in block.split("\n")]
        lines = _without_pictures([line for line in lines if line and not NOISE.match(line)])
        joined = re.sub(r"(?: |^)\* ", "\n- ", " ".join(" ".join(lines).split())).strip()
        if joined and joined != title:
            paragraphs.append(joined)
    first = next((at for at, paragraph in enumerate(paragraphs[:FURTHEST]) if _defines(paragraph, title)), 0)
    stop = next((at for at in range(first + 1, len(paragraphs)) if is_heading(paragraphs[at])), len(paragraphs))
    return "\n\n".join([*paragraphs[first:stop], *paragraphs[:first], *paragraphs[stop:]])


def _without_pictures(lines: list[str]) -> list[str]:
    """Lines without the captions, which stand before and after `Enlarge`."""
    while PICTURE in lines:
        at = lines.index(PICTURE)
        lengths = range(min(at, len(lines) - at - 1), 0, -1)
        longest = next((n for n in lengths if lines[at - n : at] == lines[at + 1 : at + 1 + n]), 0)
        lines = lines[: at - longest] + lines[at + 1 + longest :]
    return lines


def _defines(paragraph: str, title: str) -> bool:
    """Whether it looks like the beginning of the article: a sentence about the title."""
    name = re.sub(r"\W+", " ", title.partition(" (")[0]).lower().split()
    head = paragraph[:250]
    return len(paragraph) > 80 and name[-1:] != [] and name[-1][:5] in head.lower() and VERB.search(head) is not None


def _table(path: Path) -> dict[str, list[str]]:
    """Title -> values, of two columns with % escapes."""
    rows: dict[str, list[str]] = defaultdict(list)
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            for number, row in enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), 1):
                if not row or row[0].startswith("#"):
                    continue
                if len(row) != 2:
                    raise ValueError(f"found {len(row)} columns in line {number}: two are needed, parted by a tab")
                rows[clean_title(unquote(row[0]))].append(clean_title(unquote(row[1])))
    except (ValueError, csv.Error, *DAMAGED) as error:
        raise ValueError(f"{path}: {error}") from error
    return rows
