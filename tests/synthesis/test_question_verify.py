"""The independent check of a chain: sound rows pass, and every planted break is found by its own rule."""

import copy
import json

import pytest

from megatron_nb.synthesis.question_verify import verify_chain
from tests.synthesis.small_wiki import rows, small_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("verify"))


@pytest.fixture(scope="module")
def sound(corpus):
    """A row written by hand from the wiki's own source, not by what writes questions."""
    pages = {row["title"]: row for row in rows()}
    titles = ["Brandor"]
    while len(titles) < 4:
        titles.append(next(other for other in pages[titles[-1]]["links"] if other not in titles))
    evidence = [next(one for one in said(pages[here]) if one.endswith(f" {there}."))
                for here, there in zip(titles, titles[1:])]  # fmt: skip
    last = next(one for one in said(pages[titles[-1]]) if "founded in" in one)
    path = [{"title": title, "evidence": quote, "link": link}
            for title, quote, link in zip(titles, [*evidence, last], [*titles[1:], None])]  # fmt: skip
    return {
        "id": "0", "question": "From a coastal place follow the barley and the bells: when was the guild founded?",
        "answer": last.split("founded in ")[1][:4], "aliases": [], "hops": 3, "path": path, "answer_evidence": last,
        "clues": ["one", "two"],
    }  # fmt: skip


def said(page):
    """The sentences of a page's second paragraph."""
    return [one.rstrip(".") + "." for one in page["text"].split("\n\n")[1].split(". ")]


def test_a_sound_chain_passes(corpus, sound):
    assert verify_chain(corpus, sound) is None
    assert verify_chain(corpus, json.loads(json.dumps(sound))) is None


def set_answer(row, answer, evidence):
    row["answer"], row["answer_evidence"], row["path"][-1]["evidence"] = answer, evidence, evidence


BREAKS = {
    "a page that does not exist": ("pages", lambda row: row["path"][0].update(title="Nowhere")),
    "another spelling of a title": ("pages", lambda row: row["path"][0].update(title="brandor")),
    "evidence of no page": ("links", lambda row: row["path"][1].update(evidence="The settlement is fine.")),
    "evidence changed by a letter": ("links", lambda row: row["path"][0].update(
        evidence=row["path"][0]["evidence"][:-1] + "!")),
    "evidence of another page": ("links", lambda row: row["path"][1].update(evidence=row["path"][0]["evidence"])),
    "empty evidence": ("links", lambda row: row["path"][0].update(evidence="")),
    "a sentence of the page that links elsewhere": ("links", lambda row: row["path"][0].update(evidence=next(
        one for one in said(rows()[0]) if "settlement" in one and one != row["path"][0]["evidence"]))),
    "a sentence of the page that does not link": ("links", lambda row: row["path"][0].update(evidence=said(rows()[0])[0])),
    "two pages exchanged": ("form", lambda row: row["path"].insert(1, row["path"].pop(2))),
    "a link that leads past the next page": ("form", lambda row: row["path"][0].update(link=row["path"][2]["title"])),
    "a last page that leads on": ("form", lambda row: row["path"][-1].update(link="Brandor")),
    "a page twice": ("form", lambda row: (row["path"][2].update(title=row["path"][0]["title"]),
                                          row["path"][1].update(link=row["path"][0]["title"]))),
    "wrong number of hops": ("form", lambda row: row.update(hops=4)),
    "a step that is none": ("form", lambda row: row["path"].__setitem__(1, None)),
    "an alias that is no text": ("form", lambda row: row.update(aliases=[1])),
    "a clue that is no text": ("form", lambda row: row.update(clues=[None])),
    "the whole page as evidence": ("answer_found", lambda row: set_answer(row, row["answer"], next(
        page["text"] for page in rows() if page["title"] == row["path"][-1]["title"]))),
    "the whole sentence as answer": ("answer_found", lambda row: row.update(answer=row["answer_evidence"])),
    "no path": ("form", lambda row: row.update(path=[], hops=-1)),
    "a missing field": ("form", lambda row: row.pop("answer_evidence")),
    "an empty answer": ("form", lambda row: row.update(answer=" ")),
    "last evidence and answer_evidence differ": ("form", lambda row: row.update(answer_evidence="Something else.")),
    "an answer of another page": ("answer_found", lambda row: set_answer(row, "1999", "It was founded in 1999.")),
    "an answer not in its sentence": ("answer_found", lambda row: row.update(answer="1999")),
    "a piece of a word as answer": ("answer_found", lambda row: row.update(answer=row["answer"][:3])),
    "an answer twice in its sentence": ("answer_found", lambda row: row.update(answer="the")),
    "the answer in the question": ("answer_hidden", lambda row: row.update(question=row["question"] + f" ({row['answer']})")),
    "an alias in the question": ("answer_hidden", lambda row: row.update(aliases=["barley"])),
    "an alias in the evidence of a hop": ("answer_hidden", lambda row: row.update(aliases=["settlement"])),
    "a page named": ("path_hidden", lambda row: row.update(question="Go to BRANDOR and " + row["question"])),
    "800 characters": ("limits", lambda row: row.update(question=row["question"].ljust(800, "x"))),
    "16 clues": ("limits", lambda row: row.update(clues=["one"] * 16)),
    "no clue": ("limits", lambda row: row.update(clues=[])),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_planted_break_is_found_by_its_rule(corpus, sound, name):
    rule, change = BREAKS[name]
    row = copy.deepcopy(sound)
    change(row)
    found = verify_chain(corpus, row)
    assert found is not None and found.partition(":")[0] == rule, found


@pytest.mark.parametrize("row", [None, [], "row", 5])
def test_what_is_no_row_is_told_as_such(corpus, row):
    assert verify_chain(corpus, row).startswith("form: ")


def test_at_the_limits_a_row_still_passes(corpus, sound):
    assert verify_chain(corpus, {**sound, "question": sound["question"].ljust(799, "x"), "clues": ["one"] * 15}) is None
