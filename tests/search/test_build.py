"""Building a corpus: kills, wrong sources, prepared rows, wikispeedia, and the graph beside a plain reference."""

from __future__ import annotations

import bz2
import gc
import gzip
import json
import lzma
import random
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_nb.search import dump as dump_module
from megatron_nb.search import graph as graph_module
from megatron_nb.search.__main__ import main
from megatron_nb.search.build import build
from megatron_nb.search.corpus import Corpus, Link
from megatron_nb.search.pages import KINDS, LINK_KINDS
from megatron_nb.search.wikispeedia import tidied
from tests.search.dumps import page_xml, write_dump

KILLED = """
import os, signal, sys
from pathlib import Path
from megatron_nb.search import build, graph, index, store
build.BATCH, index.COMMIT, graph.SHARD = 7, 20, 10
place, after = sys.argv[3], int(sys.argv[4])
def dying(function):
    def counted(*args, **names):
        global after
        after -= 1
        if after < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **names)
    return counted
if place == "pages":
    store.PageWriter._page = dying(store.PageWriter._page)
if place == "index":
    index.tantivy.Document = dying(index.tantivy.Document)
if place == "graph":
    graph._write_shard = dying(graph._write_shard)
build.build(Path(sys.argv[1]), Path(sys.argv[2]), 1)
"""


def wiki(count: int = 60, seed: int = 0) -> list[str]:
    """Pages with links to each other, to nowhere and through redirects."""
    rng = random.Random(seed)
    pages = []
    for number in range(count):
        to = [f"Page {rng.randrange(count + 8)}" for _ in range(rng.randrange(9))] + [f"Name {rng.randrange(count)}"]
        text = f"Page {number} of {2000 + number % 20}. " + " ".join(f"See [[{one}]]." for one in to)
        pages.append(page_xml(f"Page {number}", text))
        redirect = f"Page {number}" if number % 3 else f"Name {(number + 1) % count}"
        pages.append(page_xml(f"Name {number}", "", redirect=redirect))
    return pages


def everything(folder: Path) -> dict:
    """What a corpus answers, but for times."""
    corpus = Corpus.open(folder)
    arrays = {path.name: np.load(path).tolist() for path in sorted((folder / "graph").glob("*.npy"))}
    pages = [corpus.page(title) for title in corpus.titles()]
    found = [[(hit.title, hit.snippet) for hit in corpus.search(f"page {number}", 5)] for number in range(9)]
    facts = {name: value for name, value in corpus.facts.items() if name not in ("seconds", "cpu_s", "peak_mb")}
    return {"pages": pages, "found": found, "facts": facts, "documents": len(corpus._index), **arrays}


@pytest.mark.parametrize(("place", "after"), [("pages", 3), ("pages", 45), ("index", 5), ("index", 50), ("graph", 4)])
def test_a_killed_build_goes_on_to_the_same_corpus(tmp_path, place, after):
    source = write_dump(tmp_path / "d.xml.bz2", wiki(), per_stream=10)
    build(source, tmp_path / "whole", 1)
    words = [sys.executable, "-c", KILLED, source, tmp_path / "killed", place, str(after)]
    assert subprocess.run(words, capture_output=True, cwd=Path(__file__).parents[2]).returncode == -signal.SIGKILL
    with pytest.raises(ValueError, match="holds no finished corpus: build it with"):
        Corpus.open(tmp_path / "killed")
    build(source, tmp_path / "killed", 1)
    assert everything(tmp_path / "killed") == everything(tmp_path / "whole")


def test_several_parsers_give_the_same_corpus_as_one(tmp_path):
    source = write_dump(tmp_path / "d.xml.gz", wiki())
    for name, workers in (("one", 1), ("two", 2)):
        build(source, tmp_path / name, workers)
    assert everything(tmp_path / "one") == everything(tmp_path / "two")


def test_the_graph_equals_one_of_dictionaries(tmp_path, monkeypatch):
    monkeypatch.setattr(graph_module, "SHARD", 7)
    build(write_dump(tmp_path / "d.xml", wiki(80, 3)), tmp_path / "c", 1)
    corpus = Corpus.open(tmp_path / "c")
    graph, pages = corpus.graph, [corpus.page(title) for title in corpus.titles()]
    out = {page.title: {link.target for link in page.links if corpus.page(link.target)} - {page.title} for page in pages}
    assert {title: {graph.titles[i] for i in graph.neighbours(at)} for at, title in enumerate(graph.titles)} == out
    into = {title: sum(title in targets for targets in out.values()) for title in out}
    assert graph.degree.tolist() == [len(out[title]) + into[title] for title in graph.titles]
    assert graph.out.targets.dtype == graph.out.offsets.dtype == graph.degree.dtype == np.int32
    assert {LINK_KINDS[kind] for kind in graph.out.types} == {"lead"}
    for number in range(80):
        found = corpus.page(f"Name {number}")
        assert (graph.id_of(f"name_{number}") is None) is (found is None)
        assert found is None or graph.titles[graph.id_of(f"Name {number}")] == found.title
    assert graph.id_of("Nobody") is None and graph.titles[-1] == pages[-1].title and len(graph) == 80
    missing = sum(corpus.page(link.target) is None for page in pages for link in page.links)
    assert corpus.facts["links_to_missing_pages"] == missing > 0


def test_redirects_in_loops_lead_nowhere_and_are_counted(tmp_path):
    names = {"A": "B", "B": "C", "C": "A", "Self": "Self", "Into": "A", "Lost": "Nowhere", "One": "Two", "Two": "Three"}
    names |= {"Three": "Home", **{f"Step {number}": f"Step {number + 1}" for number in range(12)}, "Step 12": "Home"}
    pages = [page_xml(name, "", redirect=to) for name, to in names.items()]
    pages.append(page_xml("Home", "Home has [[One]], [[Into]], [[Self]], [[Lost]] and [[one#part|a part]]. [[Home]]"))
    build(write_dump(tmp_path / "d.xml", pages), tmp_path / "c", 1)
    corpus = Corpus.open(tmp_path / "c")
    leading = ["One", "Two", "Three", *(f"Step {number}" for number in range(13))]
    assert [name for name in names if corpus.page(name) is not None] == leading
    assert [name for name in names if corpus.graph.id_of(name) is not None] == leading
    facts = {"redirects": 22, "redirects_in_loops": 5, "redirects_to_missing_pages": 1, "links": 0, "links_to_missing_pages": 3}
    assert {name: corpus.facts[name] for name in facts} == facts
    assert [link.target for link in corpus.page("one").links] == ["Home", "Into", "Self", "Lost", "Home", "Home"]


def test_a_page_that_the_parser_fails_on_costs_itself_and_is_counted(tmp_path, monkeypatch, caplog):
    real = dump_module.plain

    def failing(text, namespaces):
        if "Page 7 of" in text:
            raise RecursionError("too deep")
        return real(text, namespaces)

    monkeypatch.setattr(dump_module, "plain", failing)
    build(write_dump(tmp_path / "d.xml", wiki(20)), tmp_path / "c", 1)
    corpus = Corpus.open(tmp_path / "c")
    assert len(corpus) == 19 and corpus.page("Page 7") is None and corpus.facts["broken"] == {"wikitext": 1}
    assert "RecursionError: too deep: title 'Page 7'" in caplog.text


def test_dates_and_kinds_are_in_the_graph(tmp_path):
    pages = [page_xml("A", "A of 12 March 1999."), page_xml("List of Bs", "x"), page_xml("C", "May be:\n{{disambig}}")]
    build(write_dump(tmp_path / "d.xml", pages), tmp_path / "c", 1)
    graph = Corpus.open(tmp_path / "c").graph
    assert [KINDS[kind] for kind in graph.kind] == ["article", "list", "disambiguation"]
    assert graph.date[0] == np.datetime64("1999-03-12").astype(int)


def test_of_two_pages_with_one_title_the_first_stays(tmp_path):
    pages = [page_xml("A", "first"), page_xml("a", "second"), page_xml("B", "third")]
    build(write_dump(tmp_path / "d.xml", pages), tmp_path / "c", 1)
    corpus = Corpus.open(tmp_path / "c")
    assert corpus.page("A").text == "first" and len(corpus) == 2 and corpus.facts["double"] == 1


ROW = {"title": "A", "text": "Lead of A names B.\n\nMore\n\nMore on the  C (thing)."}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"rows.jsonl:2: .*: a row is \{\"title\""),
        ("[]", r"rows.jsonl:2: found '\[\]': a row is"),
        (json.dumps({"title": "A"}), "rows.jsonl:2: found"),
        (json.dumps({**ROW, "title": " _"}), "rows.jsonl:2: title=' _' is empty"),
        (json.dumps({**ROW, "date": "yesterday"}), "rows.jsonl:2: date='yesterday' must be a day such as"),
        (json.dumps({**ROW, "kind": "novel"}), "rows.jsonl:2: kind='novel' must be one of article"),
        (json.dumps({**ROW, "links": [3]}), "rows.jsonl:2: links="),
        *((json.dumps({**ROW, "links": links}), "rows.jsonl:2: links=") for links in (
            "B", 3, {"B": 1}, [["B"]], [{"target": "B", "kind": 5}], [{"target": "B", "sentence": 5}], [{"kind": "text"}])),
        *((json.dumps({**ROW, "categories": found}), "rows.jsonl:2: categories=") for found in ("X", 5, {"X": 1}, [1])),
        *((json.dumps({**ROW, "revised": day}), "rows.jsonl:2: revised=.* must be a day") for day in (5, "2021", "2021-13-01")),
        (json.dumps({**ROW, "date": "0000-01-01"}), "rows.jsonl:2: date='0000-01-01' must be a day"),
        ('{"title": "A", "text": "", "more": ' + "[" * 100_000, "rows.jsonl:2: .*recursion"),
        (json.dumps({**ROW, "text": "\ud800"}), "rows.jsonl:2: "),
    ],
)
def test_a_bad_row_is_named(tmp_path, line, said):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=said):
        build(path, tmp_path / "c", 1)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
def test_packed_rows_are_read_and_a_cut_or_wrong_file_is_an_error_that_names_it(tmp_path, pack):
    whole = "".join(json.dumps({"title": f"T{n}", "text": f"{n * 7919 % 99991} is it."}) + "\n" for n in range(2000)).encode()
    path = tmp_path / f"rows.jsonl.{pack.__module__.strip('_').replace('gzip', 'gz').replace('lzma', 'xz')}"
    for content in (pack(whole)[:-20], whole):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"rows.jsonl.\w+ near byte \d+: .*: the file is damaged; fetch it again"):
            build(path, tmp_path / "bad", 1)
        (tmp_path / "bad" / "pages.sqlite").unlink()
    path.write_bytes(pack(whole))
    assert build(path, tmp_path / "c", 1)["pages"] == 2000


def test_prepared_rows_become_pages_and_links_find_their_sentence(tmp_path):
    links = ["B", "C (thing)", "D", " #part", {"target": "e", "kind": "list", "sentence": "Lead of A names B."}]
    links.append({"target": "F", "sentence": "No."})
    row = {**ROW, "links": links, "categories": ["X"], "date": "2001-02-03"}
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write(json.dumps(row) + "\n\n" + json.dumps({"title": "b", "text": "B."}) + "\n")
    build(tmp_path / "rows.jsonl.gz", tmp_path / "c", 1)
    page = Corpus.open(tmp_path / "c").page("A")
    lead = "Lead of A names B."
    assert page.links == (
        Link("B", "lead", lead), Link("C (thing)", "text", "More on the  C (thing)."), Link("D", "unplaced", ""),
        Link("E", "list", lead), Link("F", "unplaced", ""),
    )  # fmt: skip
    assert (page.date, page.categories) == ("2001-02-03", ("X",))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("nothing", None, "nothing does not exist: name a dump"),
        ("empty.jsonl", "", "empty.jsonl holds no page that can be read"),
        ("page.html", "<html>", "page.html begins with .*<mediawiki"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused(tmp_path, capsys, name, content, said):
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main(["build", str(tmp_path / name), "--out", str(tmp_path / "c")]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_full_disk_is_told_in_a_line_and_the_build_goes_on_when_there_is_room(tmp_path, monkeypatch, capsys):
    source = write_dump(tmp_path / "d.xml", wiki(120))
    real = sqlite3.connect

    def small(*args, **names):
        connection = real(*args, **names)
        connection.execute("PRAGMA max_page_count = 7")
        return connection

    monkeypatch.setattr(sqlite3, "connect", small)
    words = ["build", str(source), "--out", str(tmp_path / "c"), "--workers", "1"]
    assert main(words) == 2
    assert re.search(r"error: .*pages.sqlite: database or disk is full: see to the disk", capsys.readouterr().err)
    monkeypatch.undo()
    gc.collect()  # the connection, which a process that ends would close
    assert main(words) == 0 and len(Corpus.open(tmp_path / "c")) == 120


def test_a_folder_keeps_to_its_source_and_a_finished_build_is_not_done_again(tmp_path):
    first, second = (write_dump(tmp_path / f"{n}.xml", wiki(n, n)) for n in (5, 6))
    told = build(first, tmp_path / "c", 1)
    assert build(first, tmp_path / "c", 1) == told
    with pytest.raises(ValueError, match=r"c holds a corpus of .*5\.xml: name another folder for .*6\.xml, or remove it"):
        build(second, tmp_path / "c", 1)


def test_wikispeedia_gives_pages_links_with_sentences_and_categories(tmp_path):
    text = ("   #copyright\n\nÉire\n\n2007 Schools Wikipedia Selection. Related subjects: Countries\n\n   A harp\n   Enlarge\n"
            "   A harp\n\n   In a box\n\n   Éire is the name of Ireland in\n   the Irish language. Its many counties have a "
            "River.\n\nHistory\n\n   It was invaded in 1169.")  # fmt: skip
    folder = tmp_path / "ws"
    folder.mkdir()
    rows = [{"title": "Éire", "text": text}, {"title": "River", "text": "R."}]
    (folder / "w_articles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "w_links.tsv").write_text("# head\n\n%C3%89ire\tRiver\n%C3%89ire\tHarp_(instrument)\n")
    (folder / "w_categories.tsv").write_text("%C3%89ire\tsubject.Countries\n")
    build(folder, tmp_path / "c", 1)
    corpus = Corpus.open(tmp_path / "c")
    page = corpus.page("Éire")
    sentence = "Its many counties have a River."
    lead = f"Éire is the name of Ireland in the Irish language. {sentence}"
    assert page.text == f"{lead}\n\nIn a box\n\nHistory\n\nIt was invaded in 1169."
    assert page.links == (Link("River", "lead", sentence), Link("Harp (instrument)", "unplaced", ""))
    assert page.categories == ("Countries",) and len(corpus) == 2


def test_the_real_dump_gives_pages_with_evidence(tmp_path, shared_data):
    build(shared_data / "wiki" / "enwiki_short.bz2", tmp_path / "c", 2)
    corpus = Corpus.open(tmp_path / "c")
    pages = [corpus.page(title) for title in corpus.titles()]
    assert len(pages) == 106 and corpus.facts["redirects"] == 99 and corpus.facts["broken"] == {}
    assert all(link.sentence and link.sentence in page.text for page in pages for link in page.links)
    assert corpus.page("ASCII").date and corpus.page("Austin (disambiguation)").kind == "disambiguation"
    assert not any(mark in page.text for page in pages for mark in ("[[", "]]", "<ref"))
    assert corpus.search("eight-time Grand Slam champion tennis", 3)[0].title == "Andre Agassi"


def test_a_wikispeedia_footer_goes_whole_however_it_is_wrapped():
    body = "Ice sheet\n\n   An ice sheet is a mass of glacier ice.\n   See: sea level rise.\n"
    notice = "   This reference article is mainly selected from the English Wikipedia\n   with only minor checks and changes.\n"
    for footer in (f'   Retrieved from " http://x/Ice_sheet"\n{notice}', notice, f"\n{notice}   See also our Disclaimer.\n"):
        assert tidied(body + footer, "Ice sheet") == "An ice sheet is a mass of glacier ice. See: sea level rise."
