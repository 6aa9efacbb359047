"""Questions of quotes: each can be looked up, none says what it hides, and a chain that cannot be quoted is refused."""

import asyncio
import random
import re

import pytest

from megatron_nb.search.corpus import Hit, Link, Page
from megatron_nb.synthesis.question_chain import Pages, Unusable
from megatron_nb.synthesis.question_obscure import GAP
from megatron_nb.synthesis.question_quotes import BEFORE, Quotes, quotes
from megatron_nb.synthesis.question_verify import verify_chain
from megatron_nb.synthesis.questions import row_of

TEXTS = {
    "Alba": "Alba is a small town in the green hills of the far north. Its old stone bridge was built by Brunel Marsh in 1871. "
            "The market on the square sells apples, honey and wool to travellers from the coast every second week.",
    "Brunel Marsh": "Brunel Marsh was an engineer. In a letter he says that he was born in Cortona Vale and left it as a boy.",
    "Cortona Vale": "Cortona Vale is a deep valley. Every spring the villagers carry lanterns to the river Dunmere at night. "
                    "The oldest mill of the valley was bought by the painter Ilse Korn for her studio.",
}  # fmt: skip
LINKS = {
    "Alba": [("Brunel Marsh", "Its old stone bridge was built by Brunel Marsh in 1871.")],
    "Brunel Marsh": [("Cortona Vale", "In a letter he says that he was born in Cortona Vale and left it as a boy.")],
}


class Wiki:
    """Three pages; a search brings those that hold the query as it stands."""

    def __init__(self, texts=None, links=None):
        self.texts, self.links = texts or TEXTS, LINKS if links is None else links

    def page(self, title):
        if title not in self.texts:
            return None
        links = tuple(Link(target, "text", sentence) for target, sentence in self.links.get(title, ()))
        return Page(title, self.texts[title], links, (), None, None, "article")

    def search(self, query, k):
        return [Hit(title, text[:40], 1.0) for title, text in self.texts.items() if query in text][:k]


def made(seed, wiki=None, titles=tuple(TEXTS)):
    pages, rng = Pages(wiki or Wiki()), random.Random(seed)
    chain = quotes(pages, list(titles), 1, rng)
    question, clues = asyncio.run(Quotes().write(chain, rng, []))
    return pages, row_of(chain, question, clues, None, "made")


@pytest.mark.parametrize("seed", range(12))
def test_a_question_is_sound_and_every_quote_leads_on(seed):
    pages, row = made(seed)
    assert verify_chain(pages, row) is None
    first, *gaps = row["clues"]
    assert [hit.title for hit in pages.corpus.search(first, 2)] == ["Alba"]
    hidden = [*list(TEXTS)[1:], row["answer"]]
    assert len(gaps) == 3 and all(clue in row["question"] for clue in row["clues"])
    for gap, title, name in zip(gaps, TEXTS, hidden):
        before, after = gap.split(GAP)
        assert TEXTS[title].count(before.strip()) == 1 and len(before.split()) == BEFORE[0]
        around = re.sub(r"\s+(?=[,.])", "", f"{before}{name}{after}")
        assert around in re.sub(r"\s+(?=[,.])", "", TEXTS[title])


def test_different_seeds_ask_for_different_things():
    rows = [made(seed)[1] for seed in range(12)]
    assert len({row["answer"] for row in rows}) > 1 and len({row["clues"][0] for row in rows}) > 3


@pytest.mark.parametrize(("rule", "texts", "links"), [
    ("no_evidence", {}, {"Alba": LINKS["Alba"]}),
    ("no_evidence", {}, {**LINKS, "Alba": [("Brunel Marsh", "The market on the square sells apples.")]}),
    ("no_answer", {"Cortona Vale": "Cortona Vale is a deep valley without mills or rivers."}, LINKS),
    ("head_not_found", {"Twin": TEXTS["Alba"], "Third": TEXTS["Alba"]}, LINKS),
])  # fmt: skip
def test_a_chain_that_cannot_be_quoted_is_refused_by_its_rule(rule, texts, links):
    both = {**{title: text for title, text in texts.items() if title not in TEXTS}, **TEXTS, **texts}
    with pytest.raises(Unusable, match=rule):
        made(1, Wiki(both, links))
