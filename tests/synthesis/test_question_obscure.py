"""Obscuring: no name, year or exact number is left, a description stays a description, and pages say what they are."""

import pytest

from megatron_nb.synthesis.question_obscure import noun_of, obscure, said_of, shortened, telling_words

KINDS = {"Berlin": "city", "Rhine": "river", "Saxony": "state", "United Kingdom": "country"}


@pytest.mark.parametrize(
    ("text", "own", "hidden"),
    [
        ("a German composer", "", "a composer"),
        ("an Austrian painter of the Vienna Secession", "", "a painter of a certain name"),
        ("a city on the Rhine in Saxony", "", "a city on a certain river in a certain state"),
        ("a lake near Zzyzx Springs", "", "a lake near a certain place"),
        ("Berlin was founded in 1237", "", "a certain city was founded in the 1230s"),
        ("it was signed on 12 March 1843.", "", "it was signed on a day of the 1840s."),
        ("it was signed on March 12, 1843.", "", "it was signed on a day of the 1840s."),
        ("in May 1990 it closed", "", "in a month of the 1990s it closed"),
        ("about 12,345 men and 3 ships", "", "about 10,000 men and some ships"),
        ("In 1900 Manet's father left Manet", "Édouard Manet", "in the 1900s its father left it"),
        ("the parliament of the United Kingdom", "Parliament of the United Kingdom", "the parliament of a certain country"),
        ("fell to the Ottoman Empire", "Roman Empire", "fell to a certain place"),  # a shared word is not the same name
        ("it rose (by 3%) in the 15th century", "", "it rose in the 15th century"),
        ("Although the term is old", "", "although the term is old"),
        ("the ___ of Berlin", "", "the ___ of a certain city"),  # the gap stays
    ],
)
def test_names_dates_and_numbers_are_hidden(text, own, hidden):
    assert obscure(text, KINDS.get, own) == hidden


@pytest.mark.parametrize(
    ("title", "text", "said"),
    [
        ("Berlin", "Berlin is the capital city and one of sixteen states of Germany. It is large.", "the capital city"),
        ("Science", "Science is a careful, disciplined search for knowledge, carried out by people.",
         "a careful, disciplined search for knowledge"),
        ("Elizabeth I", "Elizabeth I was the sixth and final monarch of her house, who reigned long.",
         "the sixth and final monarch of her house"),
        ("Mercury (planet)", "Mercury (from Latin) is the smallest planet which orbits the Sun.", "the smallest planet"),
        ("Rook", "A picture of birds. The rook is a member of the crow family.", "a member of the crow family"),
        ("Oslo", "It is a city.", None),  # does not say of what
        ("Oslo", "Oslo lies in the north.", None),
    ],
)  # fmt: skip
def test_a_page_says_what_it_is(title, text, said):
    assert said_of(title, text) == said


@pytest.mark.parametrize(
    ("phrase", "noun"),
    [("a large port city in the north", "city"), ("the capital", "capital"), ("a composer and organist", "composer"),
     ("a lake fed by rivers", "fed"), ("of the old", None), ("an NGO", None)],
)  # fmt: skip
def test_the_noun_of_a_description(phrase, noun):
    assert noun_of(phrase) == noun


def test_a_shortened_text_ends_with_a_word_that_can_end_it():
    assert shortened("a country in the western part of a certain continent", 36) == "a country in the western part"
    assert shortened("a city in a certain place,", 90) == "a city in a certain place"
    assert len(shortened("a very long description of something", 20)) <= 20


def test_words_that_every_description_has_tell_nothing():
    assert telling_words("a certain name of the 1840s in a certain place, with a fortress") == {"1840s", "fortress"}
