"""From walks to chains: evidence quoted, clues that fit one page only, answers that one sentence alone gives."""

import random
from dataclasses import dataclass, field

import pytest

from megatron_nb.search.pages import Link, Page
from megatron_nb.synthesis.question_answers import answers_in
from megatron_nb.synthesis.question_chain import Pages, Unusable, draft, evidence_of, hop_clue
from megatron_nb.synthesis.question_obscure import GAP, obscure, telling_words


@dataclass
class Hit:
    title: str


@dataclass
class Wiki:
    """Pages in memory; a search finds all of them in the order of `found`."""

    pages: dict[str, Page]
    found: list[str] = field(default_factory=list)

    def page(self, title):
        return self.pages.get(title)

    def search(self, query, k):
        return [Hit(title) for title in (self.found or self.pages)][:k]


def page(title: str, says: str, links: dict[str, str] | None = None, more: str = "", kind: str = "text") -> Page:
    """links: target -> the sentence that names it."""
    links = links or {}
    text = f"{title} is {says}.\n\n{' '.join([more, *links.values()])}".strip()
    return Page(title, text, tuple(Link(target, kind, said) for target, said in links.items()), (), None, None)


TOLD = "Travellers praise the crooked oak beside the smithing gate since olden times."
FOUNDED = "The weaving guild of the valley was founded in 1412 by stubborn sisters."


def chain_wiki(**changed) -> Wiki:
    pages = {
        "A": page("A", "a walled harbour with bells", {"B": "The settlement sends barley every autumn to B."}, TOLD),
        "B": page("B", "a coastal fortress of weavers", {"C": "The settlement buried its founders beside C."}),
        "C": page("C", "a volcanic orchard in the north", {}, FOUNDED),
    }
    return Wiki(pages | changed)


def drafted(wiki: Wiki, titles=("A", "B", "C"), min_hops=2):
    return draft(Pages(wiki), list(titles), min_hops, random.Random(0))


def test_a_chain_quotes_each_hop_and_asks_for_a_value_of_the_last_page():
    found = drafted(chain_wiki())
    assert found.titles == ["A", "B", "C"]
    assert found.evidence == ["The settlement sends barley every autumn to B.", "The settlement buried its founders beside C."]
    assert (found.answer.text, found.answer.kind, found.answer.evidence) == ("1412", "year", FOUNDED)
    assert found.hops == ["a coastal fortress of weavers", "a volcanic orchard in the north"]
    assert found.head == "a walled harbour with bells" and "crooked oak" in found.fact and found.head_rank == 1


@pytest.mark.parametrize(
    ("rule", "wiki"),
    [
        ("head_says_too_little", chain_wiki(A=Page("A", "Nothing.", (), (), None, None))),
        ("head_says_too_little", chain_wiki(A=page("A", "a walled harbour", {"B": "It sends barley every autumn to B."}))),
        ("no_evidence", chain_wiki(B=page("B", "a coastal fortress", {"C": ""}))),
        ("no_evidence", chain_wiki(B=page("B", "a coastal fortress", {"C": "See C."}))),  # too short to say anything
        ("no_evidence", chain_wiki(B=page("B", "a coastal fortress", {"C": "A picture of C from the sea"}))),  # caption
        ("no_evidence", chain_wiki(B=page("B", "a fortress", {"C": "- C, the orchard, and its sheds"}, kind="list"))),
        ("ambiguous_hop", chain_wiki(C=Page("C", f"C lies in the north. {FOUNDED}", (), (), None, None))),  # no clue
        ("no_answer", chain_wiki(C=page("C", "a volcanic orchard in the north"))),
        ("no_answer", chain_wiki(C=page("C", "a volcanic orchard", {}, f"{FOUNDED} {FOUNDED.replace('1412', '1399')}"))),
    ],
)
def test_a_walk_that_cannot_be_asked_about_is_dropped_by_its_rule(rule, wiki):
    with pytest.raises(Unusable, match=rule):
        drafted(wiki)


def test_a_head_that_a_search_for_its_clues_does_not_find_is_dropped():
    wiki = chain_wiki()
    wiki.found = ["B", "C"]
    with pytest.raises(Unusable, match="head_not_found"):
        drafted(wiki)


def test_a_walk_is_cut_before_a_hop_without_evidence_or_an_end_without_answer():
    longer = chain_wiki(C=page("C", "a volcanic orchard in the north", {"D": "The settlement quarrels about fishing with D."},
                               FOUNDED), D=page("D", "a floating market"))  # fmt: skip
    assert drafted(longer, "ABCD").titles == ["A", "B", "C"]  # D holds no answer
    assert drafted(chain_wiki(D=page("D", "a floating market", {}, FOUNDED)), "ABCD").titles == ["A", "B", "C"]  # no link to D


TWIN = {"C": "The settlement buried its founders beside C.", "D": "The settlement borrowed its bells from D."}


@pytest.mark.parametrize(
    ("name", "says", "clue"),
    [
        ("D", "a floating market", "a volcanic orchard in the north"),
        ("D", "a volcanic orchard in the far north of it all", "a volcanic orchard in the north (“C…”)"),  # fits the clue too
        ("Cd", "a volcanic orchard in the far north of it all", None),  # and has the same first letter
        ("D", "an orchard", "a volcanic orchard in the north"),  # says less than the clue
    ],
)
def test_a_clue_fits_one_of_the_pages_that_a_page_links_to(name, says, clue):
    here = page("B", "a fortress", {"C": TWIN["C"], name: f"The settlement borrowed its bells from {name}."})
    wiki = chain_wiki(B=here, **{name: page(name, says)})
    assert hop_clue(Pages(wiki), here, "C", 80) == clue


def test_evidence_is_a_sentence_of_the_page_in_running_text():
    here = page("B", "a fortress", TWIN)
    assert evidence_of(here, "D") == TWIN["D"] and evidence_of(here, "E") is None
    moved = Page("B", "B is a fortress.", here.links, (), None, None)  # the sentence is not in the text
    assert evidence_of(moved, "D") is None


@pytest.mark.parametrize(
    ("text", "kind", "value", "aliases"),
    [
        ("The old weaving guild of the valley was founded in 1412 by sisters.", "year", "1412", []),
        ("The crooked bridge near the smithy collapsed on 3 May 1911 at noon.", "day", "3 May 1911", ["May 3, 1911"]),
        ("The crooked bridge near the smithy collapsed on May 3, 1911 at noon.", "day", "May 3, 1911", ["3 May 1911"]),
        ("Its barren plateau stretches windswept over 12,345 km of gravel.", "number", "12,345", ["12345"]),
        ("The stubborn weaver who led the guild was born in Upper Zedlitz, a hamlet.", "place", "Upper Zedlitz", []),
    ],
)
def test_values_are_found_with_their_sentence_and_a_gap(text, kind, value, aliases):
    (found,) = [one for one in answers_in("T", text, 120) if one.kind == kind]
    assert (found.text, found.evidence, found.aliases) == (value, text, aliases)
    assert GAP in found.clue and value not in found.clue


@pytest.mark.parametrize(
    "text",
    [
        "It closed in 1412.",  # says too little
        "The old weaving guild was founded in 1412 and the weaving guild of old was founded in 1412 again.",  # twice
        "The crooked old weaver died in May 1911 while mending stubborn nets.",  # no place
    ],
)
def test_a_value_that_is_not_certain_is_not_asked_for(text):
    assert [one for one in answers_in("T", text, 120) if one.kind in ("year", "place")] == []


def test_of_two_sentences_only_the_one_that_the_other_does_not_fit_is_asked_for():
    text = "Guilds of the old valley were founded in 1412 there. Guilds of the old valley were founded in 1399 there by monks."
    assert [one.text for one in answers_in("T", text, 120)] == ["1399"]


def test_a_long_sentence_is_cut_around_the_gap():
    text = f"Early {'weaving sheds beside crooked oaks and ' * 4}were built in 1412 {'by stubborn sisters of the guild ' * 4}."
    (found,) = [one for one in answers_in("T", text, 90) if one.kind == "year"]
    assert len(found.clue) <= 92 and GAP in found.clue
    assert telling_words(found.clue) <= telling_words(obscure(text))
