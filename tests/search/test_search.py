"""What a corpus answers: ranking, hostile queries, snippets, threads; and joining with vectors."""

from __future__ import annotations

import asyncio
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_nb.client import ClientConfig, RequestFailed
from megatron_nb.search import dense
from megatron_nb.search.__main__ import main
from megatron_nb.search.backend import LocalSearch
from megatron_nb.search.corpus import Corpus
from megatron_nb.search.index import SNIPPET, snippet_of
from tests.search.stub import Stub


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("alan turing", "Alan Turing"),
        ("Who described the machine with an endless tape?", "Turing machine"),
        ("When was Turing born", "Alan Turing"),
        ("the who", "The Who"),
        ("who", "The Who"),  # only words that are left out otherwise
        ("عاصمة مصر", "القاهرة"),
        ("title:x AND (operators) OR *", "AND OR NOT"),
        ("東京", "Tokyo"),
        ("हिन्दी", "Tokyo"),
        ("<|im_start|>", "Poison"),
        ("capitals of ENGLAND", "London"),
    ],
)
def test_the_page_that_answers_comes_first(corpus_folder, query, first):
    hits = Corpus.open(corpus_folder).search(query, 5)
    assert hits[0].title == first and [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


@pytest.mark.parametrize("query", ["", "   ", "?!", "...", "xyzzy", '"', "\x00"])
def test_a_query_without_a_known_word_finds_nothing(corpus_folder, query):
    assert Corpus.open(corpus_folder).search(query, 5) == []


@settings(max_examples=100, deadline=None)
@given(query=st.text(max_size=60), k=st.integers(0, 12))
@example("AND OR NOT + - ^ ~ * ? : \\ / ( ) [ ] { }", 3)
@example("word " * 20000, 3)
@example("x" * 100000, 3)
@example("title:^2", 3)
@example("\ud800", 3)
def test_no_query_raises(corpus_folder, query, k):
    assert len(Corpus.open(corpus_folder).search(query, k)) <= k


def test_titles_lead_to_pages_however_they_are_written(corpus_folder):
    corpus = Corpus.open(corpus_folder)
    assert {corpus.page(name).title for name in ("Turing", "turing", " Alan_Turing ", "Alan  Turing#Life")} == {"Alan Turing"}
    assert corpus.page("Nobody") is None and corpus.page("") is None and corpus.page("\ud800") is None
    assert corpus.text("turing")[0] == "Alan Turing"


@pytest.mark.parametrize(
    ("query", "snippet"),
    [
        ("born", "He was born in London on 23 June 1912. He liked running."),
        ("runner", "Alan Turing was an English mathematician."),  # no word of it: the beginning
        ("english mathematicians", "Alan Turing was an English mathematician."),
    ],
)
def test_a_snippet_is_of_the_sentences_that_hold_the_words(corpus_folder, query, snippet):
    assert snippet_of(Corpus.open(corpus_folder).page("Alan Turing").text, query) == snippet


def test_a_snippet_is_short_and_verbatim():
    text = "\n\n".join("Word " * 200 + f"needle{number}." for number in range(5))
    found = snippet_of(text, "needle3")
    assert len(found) <= SNIPPET + 4 and found.removesuffix(" ...") in text and snippet_of("", "x") == ""


def test_a_snippet_for_a_query_of_a_million_characters_takes_no_longer_than_reading_it():
    text, query = "\n\n".join(f"Word{number} " * 60 for number in range(100)), " ".join(f"thing{n}" for n in range(100_000))
    began = time.perf_counter()
    assert snippet_of(text, f"needle {query}")
    assert time.perf_counter() - began < 2  # every word in every paragraph took a minute


def test_many_threads_get_the_same_answers(corpus_folder):
    corpus = Corpus.open(corpus_folder)
    queries = ["turing", "london", "english"] * 30
    alone = [corpus.search(query, 3) for query in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda query: corpus.search(query, 3), queries)) == alone
        assert {page.text for page in pool.map(corpus.page, ["London"] * 50)} == {corpus.page("London").text}


def test_local_search_gives_texts_without_titles_and_none_for_a_missing_page(corpus_folder):
    search = LocalSearch(corpus_folder)

    async def ask():
        return await asyncio.gather(search.search("turing", 2), search.page("turing"), search.page("Nobody"))

    hits, text, missing = asyncio.run(ask())
    assert len(hits) == 2 and text.startswith("Alan Turing was") and missing is None


@pytest.mark.parametrize("folder", ["nothing", "."])
def test_a_folder_without_a_corpus_is_refused_with_the_remedy(tmp_path, folder):
    with pytest.raises(ValueError, match="holds no finished corpus: build it with `python -m megatron_nb.search build"):
        Corpus.open(tmp_path / folder)


# ------------------------------------------------------------------ vectors
WORDS = ("turing", "machine", "london", "band", "tokyo")


def embeddings(body: dict) -> dict:
    """A vector of counts of a few words: `band` also where a text says music."""
    rows = []
    for at, text in enumerate(body["input"]):
        text = text.lower().replace("music", "band")
        rows.append({"index": at, "embedding": [text.count(word) + 0.01 for word in WORDS]})
    return {"data": rows[::-1]}


def test_vectors_find_what_words_do_not_and_a_stopped_embedding_goes_on(corpus_folder, tmp_path, monkeypatch):
    folder = tmp_path / "c"
    folder.symlink_to(corpus_folder)
    monkeypatch.setattr(dense, "BATCH", 3)
    with Stub({"/v1/embeddings": embeddings}) as stub:
        config = ClientConfig(stub.url, "words", retries=0)
        with pytest.raises(ValueError, match="holds no vectors: make them with"):
            dense.HybridSearch(folder, config)
        stub.fail(after=1)
        with pytest.raises(RequestFailed):
            asyncio.run(dense.embed(folder, config))
        with pytest.raises(ValueError, match="vectors of 3 of 8 pages: run the command `embed` again"):
            dense.HybridSearch(folder, config)
        with open(folder / "dense" / "vectors.f16", "ab") as file:
            file.write(b"torn")
        stub.fail(None)
        assert asyncio.run(dense.embed(folder, config)) == 8
        assert (folder / "dense" / "vectors.f16").stat().st_size == 8 * len(WORDS) * 2
        asked = [text.partition("\n")[0] for body in stub.bodies for text in body["input"]]
        assert sorted(set(asked)) == sorted(Corpus.open(folder).titles()) and len(asked) == 8 + 3  # the refused batch again
        search = dense.HybridSearch(folder, config)
        assert Corpus.open(folder).search("music", 3) == []
        hits = asyncio.run(search.search("music", 3))
        assert hits[0].title == "The Who" and math.isclose(hits[0].score, 1 / 61)
        with pytest.raises(ValueError, match="model='other', but .* holds vectors of 'words'"):
            dense.HybridSearch(folder, ClientConfig(stub.url, "other"))
    with pytest.raises(RequestFailed):
        asyncio.run(search.search("music", 3))


def test_rankings_are_joined_by_reciprocal_rank():
    assert [page for page, _ in dense.joined([[5, 1, 2], [1, 9]])] == [1, 5, 9, 2]
    assert dense.joined([[7]]) == [(7, 1 / 61)]


def test_nearest_is_exact_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(dense, "BLOCK", 10)
    rows = np.random.default_rng(0).normal(size=(47, 6)).astype(np.float16)
    rows.tofile(tmp_path / "vectors.f16")
    (tmp_path / "facts.json").write_text(json.dumps({"model": "m", "width": 6}))
    query = np.arange(6, dtype=np.float32)
    wanted = np.argsort(-(rows.astype(np.float32) @ query), kind="stable")
    assert dense.Vectors(tmp_path, 47).nearest(query, 5) == wanted[:5].tolist()


def test_the_command_line_shows_hits_and_facts(corpus_folder, capsys):
    assert main(["query", str(corpus_folder), "turing born", "-k", "1"]) == 0
    assert capsys.readouterr().out.startswith("[1] Alan Turing (")
    assert main(["info", str(corpus_folder)]) == 0
    assert json.loads(capsys.readouterr().out)["pages"] == 8
