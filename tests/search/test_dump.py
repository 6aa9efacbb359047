"""The dump reader on whole, compressed, broken and hostile files."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import logging
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nb.search import dump as module
from megatron_nb.search.dump import Dump, Mark
from megatron_nb.search.pages import Page, Redirect
from tests.search.dumps import HEAD, TAIL, page_xml, write_dump

NAMES = [f"Page {number}" for number in range(23)]
PAGES = [page_xml(name, f"'''{name}''' is followed by [[Page {number + 1}]].") for number, name in enumerate(NAMES)]
FORMS = {
    "plain": ("d.xml", {}), "gz": ("d.xml.gz", {}), "bz2": ("d.xml.bz2", {}),
    "multistream": ("d.xml.bz2", {"per_stream": 4}), "parts cut anywhere": ("d.xml.bz2", {"block": 333}),
}  # fmt: skip


def titles(dump: Dump, mark: Mark = Mark()) -> list[str]:  # noqa: B008
    return [raw.title for _, raw in dump.rows(mark)]


def parsed(path, **settings) -> list:
    dump = Dump(path, **settings)
    parse = dump.parse()
    return [parse(raw) for _, raw in dump.rows()]


@pytest.mark.parametrize("form", FORMS)
def test_every_mark_leads_to_exactly_the_pages_after_it(tmp_path, monkeypatch, form):
    monkeypatch.setattr(module, "CHUNK", 700)  # pages lie across reads
    name, how = FORMS[form]
    path = write_dump(tmp_path / name, PAGES, **how)
    rows = list(Dump(path).rows())
    assert [raw.title for _, raw in rows] == NAMES
    for number, (mark, _) in enumerate(rows):
        assert titles(Dump(path), mark) == NAMES[number + 1 :]


def test_a_multistream_is_not_read_from_its_beginning_again(tmp_path):
    path = write_dump(tmp_path / "d.xml.bz2", PAGES, per_stream=4)
    last = list(Dump(path).rows())[-1][0]
    assert last.offset > path.stat().st_size / 2 and last.skip <= 4


def test_other_namespaces_are_left_out_and_redirects_told(tmp_path):
    pages = [page_xml("Category:X", "x", ns=14), page_xml("a b", "#REDIRECT [[C_d#E]]", redirect="C_d#E")]
    found = parsed(write_dump(tmp_path / "d.xml", [*pages, page_xml("C d", "Text.")]))
    assert found[0] == Redirect("A b", "C d") and found[1].title == "C d" and len(found) == 2


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (PAGES[3].replace("<ns>", "<ns"), "XML"),
        (PAGES[3].replace("is followed", "is & followed"), "XML"),
        (PAGES[3].replace("is followed", "\x01"), "XML"),
        (PAGES[3].replace("</page>", ""), "page not closed"),
        (PAGES[3].replace("<title>Page 3</title>", ""), "no title"),
        (PAGES[3].replace("Page 3</title>", " _ </title>"), "no title"),
        ("<page><title>Page 3</title><ns>0</ns></page>", "no text"),
        ("<page><title>Page 3</title><ns>0</ns><revision></revision></page>", "no text"),
    ],
)
def test_a_broken_page_costs_itself_and_is_named(tmp_path, caplog, broken, reason):
    dump = Dump(write_dump(tmp_path / "d.xml", [*PAGES[:3], broken, *PAGES[4:]]))
    with caplog.at_level(logging.WARNING):
        assert titles(dump) == NAMES[:3] + NAMES[4:]
    assert dump.broken == {reason: 1}
    assert str(dump.path) in caplog.text and (reason == "no title" or "Page 3" in caplog.text)


@pytest.mark.parametrize("form", ["plain", "gz", "bz2", "multistream"])
def test_a_cut_dump_gives_what_came_before_and_says_so(tmp_path, form):
    name, how = FORMS[form]
    path = write_dump(tmp_path / name, [*PAGES, page_xml("Last", random.Random(0).randbytes(900_000).hex())], **how)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3 + 7])
    dump = Dump(path)
    found = titles(dump)
    assert found == NAMES[: len(found)] and sum(dump.broken.values()) >= 1
    assert found


def test_damaged_data_are_an_error_that_says_where(tmp_path):
    path = write_dump(tmp_path / "d.xml.bz2", PAGES, per_stream=4)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"d.xml.bz2 near byte \d+: .*damaged; fetch it again"):
        titles(Dump(path))


@pytest.mark.parametrize("content", [b"", b"<html><body>Not found</body></html>", b"\x00" * 99, b"{}\n" * 9])
def test_what_is_no_dump_is_refused_at_once(tmp_path, content):
    (tmp_path / "d.xml").write_bytes(content)
    with pytest.raises(ValueError, match="d.xml begins with .*<mediawiki; check the file"):
        Dump(tmp_path / "d.xml")


def test_a_page_of_ten_megabytes_is_read_whole(tmp_path):
    sentence = "The river is long and its water is cold in the winter of every year. "
    part = "== Part ==\n" + sentence * 400 + sentence.replace("river", "[[river]]") + "\n\n"
    text = part * (10_000_000 // len(part))
    (page,) = parsed(write_dump(tmp_path / "d.xml.gz", [page_xml("Long", "Lead.\n\n" + text)]))
    assert len(text) > 9_900_000 and len(page.links) == text.count("[[river]]")
    assert page.links[-1].sentence == "The river is long and its water is cold in the winter of every year."
    assert len(page.text) > 9_000_000


def test_a_page_beyond_the_limit_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_PAGE", 5000)
    monkeypatch.setattr(module, "CHUNK", 1000)
    dump = Dump(write_dump(tmp_path / "d.xml", [PAGES[0], page_xml("Endless", "word " * 3000), PAGES[1]]))
    assert titles(dump) == NAMES[:2] and dump.broken == {"page too long": 1}


@pytest.mark.parametrize(
    ("title", "text", "sentence"),
    [
        ("القاهرة", "'''القاهرة''' هي عاصمة [[مصر]]. تقع على نهر النيل.", "القاهرة هي عاصمة مصر."),
        ("ירושלים", "'''ירושלים''' היא בירת [[מצרים|ישראל]]. העיר עתיקה.", "ירושלים היא בירת ישראל."),
        ("پل", "پل در [[مصر]] است؟ آری.", "پل در مصر است؟"),
    ],
)
def test_right_to_left_text_keeps_its_letters_and_sentences(tmp_path, title, text, sentence):
    (page,) = parsed(write_dump(tmp_path / "d.xml", [page_xml(title, text)]))
    assert page.title == title and page.links[0].sentence == sentence and page.text.startswith(sentence)


def test_namespaces_of_the_dumps_language_are_known(tmp_path):
    path = write_dump(tmp_path / "d.xml", [page_xml("عنوان", "نص [[تصنيف:مدن]] [[ملف:x.png|thumb|صورة]] نهاية")])
    text = path.read_text().replace(">Category<", ">تصنيف<").replace(">File<", ">ملف<")
    path.write_text(text)
    (page,) = parsed(path)
    assert page.categories == ("مدن",) and page.links == () and "صورة" not in page.text


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_damage_to_the_bytes_raises_anything_but_a_plain_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / data.draw(st.sampled_from(["d.xml", "d.xml.gz", "d.xml.bz2"]))
    xml = bytearray((HEAD + "".join(PAGES[:6]) + TAIL).encode())
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(xml) - 1))
        cut = data.draw(st.integers(0, 60))
        tags = st.sampled_from([b"<page>", b"</page>", b"&#0;", b"<![CDATA["])
        xml[at : at + cut] = data.draw(st.one_of(st.binary(max_size=30), tags))
    packed = {".gz": gzip.compress, ".bz2": bz2.compress}.get(path.suffix, bytes)(bytes(xml))
    path.write_bytes(packed[: data.draw(st.one_of(st.just(len(packed)), st.integers(0, len(packed))))])
    try:
        found = parsed(path)
    except ValueError as error:
        assert str(path) in str(error)
        return
    for entry in found:
        assert isinstance(entry, Page | Redirect) and entry.title
        if isinstance(entry, Page):
            assert all(link.sentence in entry.text for link in entry.links)
            assert dataclasses.astuple(entry)
