"""Wikitext to text, links and categories; dates; sentences; titles."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_nb.search.dates import date_of
from megatron_nb.search.pages import clean_title
from megatron_nb.search.sentences import sentences
from megatron_nb.search.wikitext import Namespaces, plain, unclosed

BOX = """{{Infobox person
| name = Ada Byron
| image = x.jpg
| birth_date = {{birth date|1815|12|10|df=y}}
| birth_place = [[London]], {{nowrap|[[England]]}}
| known_for = {{hlist|[[Mathematics]]|computing}}
}}
'''Ada Byron''' was a [[mathematician|mathematician]]s' friend.<ref>{{cite|t=[[Hidden]]}}</ref> She lived
in [[London]].

== Life ==
She met [[Charles Babbage]] in 1833. They wrote.
* One [[letter]]
{| class="wikitable"
! Year !! Work
|-
| 1843 || [[Notes (work)|Notes]]
|}
== References ==
{{reflist}} [[Not text]]
[[Category:1815 births]]
[[Category:Women| ]]
"""


def links(text: str) -> list[tuple[str, str, str]]:
    page = plain(text, Namespaces())
    return [(target, kind, page.text[a:b]) for target, kind, a, b in page.links]


def test_links_have_the_kind_of_place_and_the_sentence_they_stand_in():
    lead = "Ada Byron was a mathematicians' friend."
    assert links(BOX) == [
        ("Mathematician", "lead", lead),
        ("London", "lead", "She lived in London."),
        ("London", "infobox:birth_place", "Birth place: London, England"),
        ("England", "infobox:birth_place", "Birth place: London, England"),
        ("Mathematics", "infobox:known_for", "Known for: Mathematics, computing"),
        ("Charles Babbage", "text", "She met Charles Babbage in 1833."),
        ("Letter", "list", "- One letter"),
        ("Notes (work)", "table", "1843 | Notes"),
    ]
    page = plain(BOX, Namespaces())
    assert page.categories == ["1815 births", "Women"] and "Birth date: 10 December 1815" in page.text
    assert not re.search(r"reflist|Hidden|Not text|x\.jpg|\{\{|\[\[|wikitable", page.text)


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("'''Bold''' and ''italic'' and ''''five'''''", "Bold and italic and five"),
        ("A [http://x.org label] b http://y.org c", "A label b c"),
        ("A&nbsp;&mdash;&lt;b&#x41;", "A —<bA"),
        ("x <!-- no --> y <ref name=a/> z", "x y z"),
        ("It is {{convert|5|km|mi}} long", "It is 5 km long"),
        ("In {{circa|1200}} ({{lang-fr|Aix}}; {{IPA|x}})", "In c. 1200 (Aix; x)"),
        ("Name ({{unknown}}) is", "Name is"),
        ("Name ({{unknown}}; born 1900) is", "Name (born 1900) is"),
        ("[[File:a.jpg|thumb|A [[caption]]]] text", "text"),
        ("[[A (b)|]] and [[:Category:C]] and [[fr:Chat]]", "A and Category:C and fr:Chat"),
        ("__NOTOC__ x", "x"),
        ("a\nb\n\n\n\nc", "a b\n\nc"),
        ("<math>x^2</math> is <sub>2</sub> and <nowiki>[[no]]</nowiki>", "is 2 and [[no]]"),
        ("", ""),
        ("{{ x", "{{ x"),
        ("[[unclosed", "[[unclosed"),
    ],
)
def test_markup_becomes_plain_text(wikitext, text):
    assert plain(wikitext, Namespaces()).text == text


@pytest.mark.parametrize(
    ("name", "told"), [("disambiguation", True), ("Hndis", True), ("airport disambiguation", True), ("stub", False)]
)
def test_disambiguation_pages_are_told_by_their_templates(name, told):
    assert plain(f"'''X''' may be:\n* [[Y]]\n{{{{{name}}}}}", Namespaces()).is_disambiguation is told


MARKUP = [
    *("[[", "]]", "{{", "}}", "{|", "|}", "|-", "|", "'''", "<ref>", "</ref>", "<br/>", "==", "\n", "\n\n", "* ", "# ", ":"),
    *("<!--", "-->", "<table>", "<td>", "&amp;", "&#x110000;", "&#99999999999;", "Infobox x", "Category:", "File:", "=", "א"),
    *("\ue000", "\ue003", "a. B", "http://x ", "{{{1|", "}}}", "<nowiki>", "<math>", "\x00", "__TOC__"),
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(MARKUP), st.text(max_size=5)), max_size=40).map("".join))
@example("[[a" * 200)
@example("{{Infobox x|" * 100 + "}}" * 100)
@example("<div>" * 300)
@example("\n*" * 500 + "[[x]]")
def test_any_wikitext_gives_text_without_marks_and_links_with_their_place(wikitext):
    page = plain(wikitext, Namespaces())
    assert not re.search("[\ue000-\ue004]", page.text)
    for target, _, start, stop in page.links:
        assert target == clean_title(target) != "" and 0 <= start <= stop <= len(page.text)


def test_letters_that_are_used_as_marks_inside_cost_nothing_but_themselves():
    page = plain("A \ue000 and &#xe000; of [[B]] &#57345; is &#xe004; here. &#xe002;", Namespaces())
    assert page.text == "A and of B is here." and [link[0] for link in page.links] == ["B"]


@pytest.mark.parametrize("opening", ["{{a|", "{{a|[[b|", "<div>", "<ref>", "[http://a ", "\n{|\n|"])
def test_a_page_of_openings_that_never_close_is_refused_before_it_takes_minutes(opening):
    count = 20_000
    assert unclosed(opening * count + "x") == count
    with pytest.raises(ValueError, match=r"are not closed in \d+ characters"):
        plain(opening * count + "x", Namespaces())
    assert plain(f"Some {opening * 3} are left open.", Namespaces()).text


def test_what_closes_or_need_not_close_is_not_counted():
    assert unclosed(BOX + "<br> <li> <hr/> <ref name=a /> <b>x</b> }} ] |} {{a {{{1}}} }} {|\n|-\n|} 1 < 2") == 0


@given(st.text(max_size=20))
@example("ßa")
@example(" _#x")
def test_a_clean_title_stays_as_it_is(title):
    assert clean_title(clean_title(title)) == clean_title(title)


@pytest.mark.parametrize(
    ("lead", "categories", "day"),
    [
        ("Born 10 December 1815, died November 27, 1852.", (), "1852-11-27"),
        ("A film of 2016.", ("2017 awards",), "2017-01-01"),
        ("Opened in March 2012 with 1500 seats.", (), "2012-03-01"),
        ("It will open in 2050.", (), "2021-05-30"),  # later than the revision
        ("The 1066 men went.", ("Subjects 1500 and before",), "2021-05-30"),
        ("In 1912, and 2012-13-45.", (), "1912-01-01"),
        ("", (), "2021-05-30"),
    ],
)
def test_the_date_is_the_latest_named_else_the_revisions(lead, categories, day):
    assert date_of(lead, categories, "2021-05-30") == day


@pytest.mark.parametrize(
    "whole",
    [
        ["Dr. Smith of the U.S. Navy met J. R. Tolkien.", "He left at 5 p.m. and slept."],
        ['He said "Go!"', "They went."],
        ["Is it?", "Yes (it is).", "Fine."],
        ["من؟", "أنا."],
        ["It cost $5.50 in No. 7 St. James.", "End."],
    ],
)
def test_sentences_end_where_a_reader_would_end_them(whole):
    assert sentences(" ".join(whole)) == whole
