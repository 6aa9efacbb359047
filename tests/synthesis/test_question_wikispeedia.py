"""On real wikis: 200 questions of wikispeedia verified against its own files, and heads of a dated dump.

Wikispeedia's test takes a minute or two (slow); it reads articles and links itself, without the corpus that the questions were
made from.
"""

import asyncio
import copy
import gzip
import json
import lzma
import random
import re
from urllib.parse import unquote

import numpy as np
import pytest

from megatron_nb.asking.ledger import Ledger
from megatron_nb.search.build import build
from megatron_nb.search.corpus import Corpus
from megatron_nb.synthesis.question_verify import verify_chain
from megatron_nb.synthesis.question_writer import Templates
from megatron_nb.synthesis.questions import Maker, make_all
from megatron_nb.synthesis.walk import WalkConfig, Walker, day_of

YEARS = WalkConfig(cutoff="2007-06-01", window_days=3650, tau_days=1800)


def squeezed(text: str) -> str:
    """Without what unwrapping an article changes: white space, the marks of list items and of pictures."""
    return " ".join(word for word in text.split() if word not in ("*", "-", "Enlarge"))


def spelled(title: str) -> str:
    """A title of the release as the corpus has it."""
    title = " ".join(unquote(title).replace("_", " ").split())
    return title[:1].upper() + title[1:]


@pytest.fixture(scope="module")
def corpus(shared_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wikispeedia")
    build(shared_data / "wiki", folder)
    return Corpus.open(folder)


@pytest.fixture(scope="module")
def kept(corpus, tmp_path_factory):
    maker = Maker(corpus, Templates(), None, 5, 1, "wikispeedia")
    counts = {"train": 180, "heldout": 20}
    ledger = Ledger(tmp_path_factory.mktemp("ledger"), "attempts", 0)
    return asyncio.run(make_all(counts, "path", None, 0.5, YEARS, maker, ledger, 16, 100))


@pytest.fixture(scope="module")
def source(shared_data):
    """(text of each article, its links) as the release has them."""
    wiki = shared_data / "wiki"
    with lzma.open(next(wiki.glob("wikispeedia_articles*.jsonl.xz")), "rt") as file:
        rows = [json.loads(line) for line in file]
    texts = {spelled(row["title"]): squeezed(row["text"]) for row in rows}
    links = set()
    with gzip.open(wiki / "wikispeedia_links.tsv.gz", "rt") as file:
        for line in file:
            if line.strip() and not line.startswith("#"):
                links.add(tuple(spelled(part) for part in line.rstrip("\n").split("\t")))
    return texts, links


@pytest.mark.slow
def test_200_questions_of_5_and_more_hops_stand_in_the_releases_own_files(corpus, kept, source):
    texts, links = source
    assert len(kept.rows) == 200 and sum(row["hops"] >= 5 for row in kept.rows) >= 100
    for row in kept.rows:
        assert verify_chain(corpus, row) is None
        for step in row["path"]:
            assert squeezed(step["evidence"]) in texts[step["title"]], (step["title"], step["evidence"])
            assert step["link"] is None or (step["title"], step["link"]) in links
        answer = re.compile(rf"(?<![\w.,]){re.escape(row['answer'])}(?!\w|[.,]\d)")
        assert answer.search(row["answer_evidence"]) and not answer.search(row["question"])
    assert not kept.pages("train") & kept.pages("heldout")


@pytest.mark.slow
def test_broken_chains_planted_among_them_are_all_found(corpus, kept):
    rng, found = random.Random(0), 0
    for row in kept.rows:
        other, spoilt = rng.choice([one for one in kept.rows if one["id"] != row["id"]]), copy.deepcopy(row)
        hop, way = rng.randrange(row["hops"]), rng.randrange(4)
        if way == 0:  # the evidence of another chain
            spoilt["path"][hop]["evidence"] = other["path"][0]["evidence"]
        elif way == 1:  # a page left out; without the first one it would be a shorter chain
            del spoilt["path"][max(hop, 1)]
            spoilt["hops"] -= 1
        elif way == 2:  # a page of another chain in its place
            if other["path"][1]["title"] in {step["title"] for step in row["path"]}:
                continue
            spoilt["path"][hop]["link"] = spoilt["path"][hop + 1]["title"] = other["path"][1]["title"]
        else:  # the answer of another chain
            if other["answer"] in row["answer_evidence"]:
                continue
            spoilt["answer"] = other["answer"]
        assert verify_chain(corpus, spoilt) is not None, (way, spoilt)
        found += 1
    assert found > 150


@pytest.fixture(scope="module")
def dump(shared_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dump")
    build(shared_data / "wiki" / "enwiki_short.bz2", folder, workers=1)
    return Corpus.open(folder)


def test_heads_of_a_dated_dump_lie_in_the_window_and_the_newer_ones_come_more_often(dump):
    config = WalkConfig(min_steps=1, max_steps=2, cutoff="2016-06-01", window_days=3000, tau_days=500, min_degree=1)
    walker = Walker(dump.graph, config)
    titles = [dump.graph.titles[page] for page in walker.heads]
    assert len(titles) >= 5
    for title in titles:
        page = dump.page(title)
        assert "2008-03-15" <= page.date <= "2016-06-01" and page.kind == "article"
    pages, _ = walker.draw(20000, [0])
    drawn = np.bincount(pages[:, 0], minlength=len(dump))[walker.heads] / 20000
    age = np.array([walker.cutoff - float(dump.graph.date[page]) for page in walker.heads])
    assert day_of(walker.cutoff) == "2016-06-01" and age.max() - age.min() > 100
    weight = np.exp(-age / 500)
    assert np.abs(drawn - weight / weight.sum()).max() < 0.02
