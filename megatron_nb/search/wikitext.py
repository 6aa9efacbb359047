"""Wikitext to plain text, links with the sentence they stand in, and categories. The parser is mwparserfromhell.

The tree is written out as text in which private marks stand for the links and headings; the marked text is then tidied,
parted into paragraphs and sentences, and the marks are taken out again: a link's sentence is a slice of the final text.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import mwparserfromhell
from mwparserfromhell import nodes
from mwparserfromhell.definitions import SINGLE

from megatron_nb.search import sentences
from megatron_nb.search.pages import clean_title
from megatron_nb.search.templates import DISAMBIGUATIONS, FIELDS_LEFT_OUT, is_infobox, name_of, text_parts

OPEN, CLOSE, HEADING, FIELD, ROW = "\ue000", "\ue001", "\ue002", "\ue003", "\ue004"
MARKS = re.compile("[\ue000-\ue004]")
# Of an element: nothing of it is text of the article.
SILENT = {"ref", "references", "gallery", "math", "chem", "timeline", "score", "hiero", "imagemap", "graph", "mapframe",
          "maplink", "templatestyles", "syntaxhighlight", "source", "inputbox", "categorytree", "style", "script"}  # fmt: skip
# Sections that are left out with all below them, but for their categories.
ENDINGS = {"references", "external links", "notes", "further reading", "footnotes", "citations", "sources",
           "notes and references", "bibliography"}  # fmt: skip
STYLE = re.compile(r"'{2,5}")
SWITCH = re.compile(r"__[A-Z]+__")
EMPTY = re.compile(r"\s*[(\[][\s,;:]*[)\]]")  # what remains of brackets round a template
OPENING = re.compile(r"([(\[])[\s,;]+")
DEEP = 60  # elements within elements; deeper ones are left out
# Beginnings and ends: odd groups begin, even ones end.
PAIR = re.compile(r"(\{\{)|(\}\})|^(\{\|)|^(\|\})|(\[)(?=https?:|//)|(\])|<([a-z]+)\b[^<>]*(?<!/)>|</([a-z]+)", re.I | re.M)
MOST_READ_AGAIN = 300_000_000  # characters that the parser may read again, about half a minute


@dataclass(frozen=True)
class Namespaces:
    """The prefixes of titles that are not articles, in lower case, as the dump's head names them."""

    others: frozenset[str] = frozenset({"file", "image", "media", "template", "user", "wikipedia", "help", "portal", "special"})
    files: frozenset[str] = frozenset({"file", "image", "media"})
    categories: frozenset[str] = frozenset({"category"})


@dataclass
class Plain:
    """An article without its markup."""

    text: str
    lead: str
    links: list[tuple[str, str, int, int]]  # (target, kind, start and stop of its sentence in the text)
    categories: list[str]
    templates: set[str] = field(default_factory=set)  # names, lower case

    @property
    def is_disambiguation(self) -> bool:
        return any(name in DISAMBIGUATIONS or name.endswith(" disambiguation") for name in self.templates)


def plain(wikitext: str, namespaces: Namespaces) -> Plain:
    """What is no markup stays text. ValueError for a text that would take minutes: the parser reads on to the end of it for
    every beginning that is not closed."""
    if (left := unclosed(wikitext)) * len(wikitext) > MOST_READ_AGAIN:
        raise ValueError(f"{left} templates, tables, links and tags are not closed in {len(wikitext)} characters")
    writer = _Writer(namespaces)
    code = mwparserfromhell.parse(MARKS.sub("", wikitext), skip_style_tags=True)
    writer.walk(code, writer.body, 0)
    return _tidied(writer)


def unclosed(wikitext: str) -> int:
    """How many templates, tables, external links and tags begin and do not end."""
    depth: Counter[int | str] = Counter()
    for match in PAIR.finditer(wikitext):
        kind = match.lastindex
        name = (kind + 1) // 2 if kind < 7 else match[kind].lower()
        depth[name] = depth[name] + 1 if kind % 2 else max(0, depth[name] - 1)
    return sum(count for name, count in depth.items() if name not in SINGLE)


class _Writer:
    """Writes a tree as marked text; `links` holds the targets in the order of their OPEN marks, body and box apart."""

    def __init__(self, namespaces: Namespaces):
        self.namespaces, self.body, self.box = namespaces, [], []
        self.targets: dict[int, list[str]] = {id(self.body): [], id(self.box): []}
        self.categories: list[str] = []
        self.templates: set[str] = set()
        self.heading_seen = self.ended = False

    def walk(self, code: Any, out: list[str], depth: int) -> None:
        if code is None or depth > DEEP:
            return
        for node in code.nodes:
            if self.ended and not isinstance(node, (nodes.Heading, nodes.Wikilink)):
                continue  # categories follow the references
            self.write(node, out, depth)

    def write(self, node: Any, out: list[str], depth: int) -> None:
        if isinstance(node, nodes.Text):
            out.append(STYLE.sub("", node.value))
        elif isinstance(node, nodes.Wikilink):
            self.link(node, out, depth)
        elif isinstance(node, nodes.Template):
            self.template(node, out, depth)
        elif isinstance(node, nodes.Tag):
            self.tag(node, out, depth)
        elif isinstance(node, nodes.Heading):
            name = STYLE.sub("", str(node.title.strip_code())).strip()
            self.ended = name.lower() in ENDINGS
            self.heading_seen = True
            if not self.ended:
                out.append(f"\n\n{HEADING}{name}\n\n")
        elif isinstance(node, nodes.HTMLEntity):
            out.append(_character(node))
        elif isinstance(node, nodes.ExternalLink) and node.brackets:
            self.walk(node.title, out, depth + 1)

    def link(self, node: Any, out: list[str], depth: int) -> None:
        title = str(node.title)
        prefix, colon, rest = title.partition(":")
        space = " ".join(prefix.replace("_", " ").split()).lower() if colon else ""
        if space in self.namespaces.categories:
            name = clean_title(rest)
            if name and name not in self.categories:
                self.categories.append(name)
            return
        if space in self.namespaces.files or self.ended:
            return
        target = "" if space in self.namespaces.others else clean_title(str(_unescaped(title)))
        if target:
            self.targets[id(out)].append(target)
            out.append(OPEN)
        if node.text is None:
            out.append(title.lstrip(": ").replace("_", " "))
        elif str(node.text).strip():
            self.walk(node.text, out, depth + 1)
        else:
            out.append(re.sub(r"\s*\(.*\)$", "", title.lstrip(": ")))  # [[A (b)|]]
        if target:
            out.append(CLOSE)

    def template(self, node: Any, out: list[str], depth: int) -> None:
        name = name_of(node)
        self.templates.add(name)
        if is_infobox(name) and depth == 0:
            for param in node.params:
                self.infobox_field(str(param.name).strip(), param.value)
            return
        for part in text_parts(name, node):
            if isinstance(part, str):
                out.append(part)
            else:
                self.walk(part, out, depth + 1)

    def infobox_field(self, name: str, value: Any) -> None:
        if FIELDS_LEFT_OUT.search(name):
            return
        label = name.replace("_", " ").strip().capitalize()
        self.box.append(f"\n{FIELD}{name}{FIELD}{label}: ")
        self.walk(value, self.box, 1)

    def tag(self, node: Any, out: list[str], depth: int) -> None:
        name = str(node.tag).strip().lower()
        if name in SILENT:
            return
        if node.wiki_markup in ("*", "#", ":", ";"):
            out.append("- " if node.wiki_markup in "*#" and (not out or out[-1][-2:] != "- ") else "")
        elif name in ("br", "hr", "p", "div", "li", "dd", "dt", "ul", "ol", "center", "blockquote", "poem"):
            out.append("\n- " if name == "li" else "\n")
            self.walk(node.contents, out, depth + 1)
            out.append("\n" if name not in ("br", "li") else "")
        elif name in ("table", "tr"):
            out.append("\n")
            self.walk(node.contents, out, depth + 1)
            out.append("\n")
        elif name in ("td", "th", "caption"):
            cell: list[str] = []
            self.targets[id(cell)] = self.targets[id(out)]
            self.walk(node.contents, cell, depth + 1)
            del self.targets[id(cell)]
            out.append(f"{ROW}{' '.join(''.join(cell).split())}")
        else:
            self.walk(node.contents, out, depth + 1)


def _character(node: Any) -> str:
    try:
        return MARKS.sub("", node.normalize())
    except (ValueError, OverflowError):  # &#1114112; and the like
        return ""


def _unescaped(title: str) -> str:
    return title if "&" not in title else mwparserfromhell.parse(title).strip_code()


# ------------------------------------------------------------------ from marked text to text
def _tidied(writer: _Writer) -> Plain:
    paragraphs = [p for p in map(_paragraph, _split("".join(writer.body))) if p]
    first = next((at for at, p in enumerate(paragraphs) if p.startswith(HEADING)), len(paragraphs))
    box = "\n".join(line for line in map(_line, "".join(writer.box).split("\n")) if re.sub(f"{FIELD}.*{FIELD}.*?: ", "", line))
    lead = MARKS.sub("", "\n\n".join(paragraphs[:first]))
    if not paragraphs[first + 1 :] and first < len(paragraphs):
        paragraphs = paragraphs[:first]  # one heading and nothing below it
    in_body, in_box = iter(writer.targets[id(writer.body)]), iter(writer.targets[id(writer.box)])
    parts: list[str] = []
    links: list[tuple[str, str, int, int]] = []
    length = 0
    for at, paragraph in enumerate([*paragraphs[:first], *([box] if box else []), *paragraphs[first:]]):
        is_box = bool(box) and at == first
        text, found = _unmarked(paragraph, in_box if is_box else in_body, "lead" if at < first else "text")
        links += [(target, kind, a + length, b + length) for target, kind, a, b in found]
        parts.append(text)
        length += len(text) + 2
    return Plain("\n\n".join(parts), lead, links, writer.categories, writer.templates)


def _split(marked: str) -> list[str]:
    marked = SWITCH.sub("", marked).replace("\r", "")
    return re.split(r"\n\s*\n", marked)


def _paragraph(marked: str) -> str:
    """Lines of running text joined; lists and rows of tables keep their lines."""
    lines: list[str] = []
    for line in filter(None, map(_line, marked.split("\n"))):
        if lines and not line.startswith(("- ", ROW, HEADING)) and not lines[-1].startswith((ROW, HEADING, "- ")):
            lines[-1] += " " + line
        else:
            lines.append(line)
    return "\n".join(lines)


def _line(marked: str) -> str:
    """A line with single spaces and without empty brackets; "" where nothing but marks is left."""
    text = OPENING.sub(r"\1", EMPTY.sub("", " ".join(marked.split())))
    text = re.sub(r" ([,.;:!?)\]])", r"\1", text) if " " in text else text
    return text if MARKS.sub("", text).strip(" -,;:()[]|{}") else ("" if OPEN not in text else text)


def _unmarked(paragraph: str, targets: Any, kind: str) -> tuple[str, list[tuple[str, str, int, int]]]:
    """The paragraph without marks, and its links with the place of their sentences in it."""
    out, links, length = [], [], 0
    for line in paragraph.split("\n"):
        of = kind
        if line.startswith(FIELD):
            _, name, line = line.split(FIELD, 2)
            of = f"infobox:{name}"
        elif line.startswith("- "):
            of = "list"
        elif line.startswith(ROW):
            line, of = line[1:].replace(ROW, " | "), "table"
        bounds = list(sentences.spans(line)) if of in ("lead", "text") else [(0, len(line))]
        clean = []
        for begin, end in bounds:
            piece = line[begin:end]
            text = MARKS.sub("", piece)
            links += [(next(targets), of, length, length + len(text)) for _ in range(piece.count(OPEN))]
            clean.append(text)
            length += len(text) + 1
        out.append(" ".join(clean))
    return "\n".join(out), links
