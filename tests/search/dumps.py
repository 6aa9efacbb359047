"""Writes small MediaWiki dumps, whole and broken."""

from __future__ import annotations

import bz2
import gzip
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">
  <siteinfo><namespaces>
    <namespace key="0" case="first-letter" /><namespace key="6" case="first-letter">File</namespace>
    <namespace key="14" case="first-letter">Category</namespace><namespace key="10" case="first-letter">Template</namespace>
  </namespaces></siteinfo>
"""
TAIL = "</mediawiki>\n"


def page_xml(title: str, text: str, redirect: str | None = None, ns: int = 0, day: str = "2021-05-30") -> str:
    to = f"<redirect title={quoteattr(redirect)} />" if redirect else ""
    return (
        f"  <page>\n    <title>{escape(title)}</title><ns>{ns}</ns><id>1</id>{to}\n    <revision><id>2</id>"
        f'<timestamp>{day}T10:00:00Z</timestamp><text xml:space="preserve">{escape(text)}</text></revision>\n  </page>\n'
    )


def write_dump(path: Path, pages: list[str], per_stream: int | None = None, block: int | None = None) -> Path:
    """pages: of page_xml, or broken. per_stream: a multistream with so many pages in each part; block: parts cut anywhere."""
    data = (HEAD + "".join(pages) + TAIL).encode()
    if per_stream:
        parts = [HEAD, *("".join(pages[at : at + per_stream]) for at in range(0, len(pages), per_stream)), TAIL]
        path.write_bytes(b"".join(bz2.compress(part.encode()) for part in parts))
    elif block:
        path.write_bytes(b"".join(bz2.compress(data[at : at + block]) for at in range(0, len(data), block)))
    else:
        path.write_bytes({".bz2": bz2.compress, ".gz": gzip.compress}.get(path.suffix, bytes)(data))
    return path
