"""Texts that share 13 words in a row with an evaluation set are found, and the set and the words are named."""

from random import Random

import pytest

from megatron_nb.data.decontamination import Evaluations, texts_of, words_of

WORDS = [f"w{number}" for number in range(100)]


def text(start, stop, joined=" "):
    return joined.join(WORDS[start:stop])


def made(n=13, common=3, **sets):
    evaluations = Evaluations(n, common)
    for name, texts in sets.items():
        for number, one in enumerate(texts):
            evaluations.add(name, f"{name}/{number}", one)
    return evaluations


@pytest.mark.parametrize(("length", "found"), [(12, False), (13, True), (40, True)])
def test_thirteen_words_in_a_row_are_an_overlap_and_twelve_are_none(length, found):
    evaluations = made(test=[text(0, 40)])
    assert bool(evaluations.overlaps(f"before {text(0, length)} after and more of other words")) == found


def test_case_punctuation_markup_and_width_do_not_hide_an_overlap():
    evaluations = made(test=[text(0, 20)])
    assert evaluations.overlaps(text(0, 20, ",\n  **").upper())
    assert evaluations.overlaps("".join(chr(ord(c) + 0xFEE0) if c.isalnum() else c for c in text(0, 20)))  # full width


def test_the_set_the_item_the_count_and_the_words_are_named():
    evaluations = made(one=[text(0, 30)], two=[text(50, 70), text(15, 35)])
    found = evaluations.overlaps(f"x {text(10, 32)} y", "mine")
    assert [(overlap.set, overlap.item, overlap.shared, overlap.of) for overlap in found] == [
        ("one", "one/0", 8, 18), ("two", "two/1", 5, 8),
    ]  # fmt: skip
    assert found[0].excerpt == text(10, 23)
    report = evaluations.report()
    assert report["sets"] == {"one": {"texts": 1, "met": 1}, "two": {"texts": 2, "met": 1}}
    assert [(pair["id"], pair["item"]) for pair in report["pairs"]] == [("mine", "one/0"), ("mine", "two/1")]


def test_a_short_evaluation_text_meets_its_equal_only():
    evaluations = made(test=["Add two numbers.", ""])
    assert evaluations.overlaps("add  two NUMBERS")
    assert not evaluations.overlaps("add two numbers and more") and not evaluations.overlaps("")


def test_what_many_evaluation_texts_say_is_a_phrase_and_does_not_count():
    phrase = text(0, 15)
    few = made(test=[f"{phrase} {text(20 + k, 40 + k)}" for k in range(3)])
    assert len(few.overlaps(f"new words {phrase} other words")) == 3
    many = made(test=[f"{phrase} {text(20 + 20 * k, 40 + 20 * k)}" for k in range(4)])
    assert not many.overlaps(f"new words {phrase} other words")
    assert many.overlaps(f"new words {phrase} {text(20, 40)}")[0].item == "test/0"  # the rest of it still counts


def test_one_text_in_many_versions_of_a_set_is_no_phrase():
    versions = {f"v{number}": [text(0, 20)] for number in range(6)}
    assert len(made(**versions).overlaps(text(0, 20))) == 6


def test_characters_of_a_script_without_spaces_are_words():
    sentence = "给定一个整数数组请返回其中两个数之和等于目标值的下标"
    assert len(words_of(sentence)) == len(sentence)
    assert made(test=[sentence]).overlaps(f"题目{sentence[3:20]}完")


def test_no_evaluation_set_meets_nothing():
    assert not made().overlaps(text(0, 50)) and made().report()["sets"] == {}


@pytest.mark.parametrize("settings", [{"n": 0}, {"common": 0}])
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ValueError, match="must be at least 1"):
        Evaluations(**settings)


def test_reading_in_pieces_leaves_out_no_run():
    random = Random(0)
    for n in (1, 2, 3, 5, 8, 13):
        for _ in range(60):
            item, asked = ([f"a{random.randrange(4)}" for _ in range(random.randrange(n, 40))] for _ in range(2))
            place, length = random.randrange(len(item)), random.randrange(1, 20)
            asked[random.randrange(len(asked)) : 0] = item[place : place + length]
            runs = [{" ".join(words[k : k + n]) for k in range(len(words) - n + 1)} for words in (item, asked)]
            found = made(n=n, test=[" ".join(item)]).find(" ".join(asked))
            assert [one.shared for one in found] == [len(runs[0] & runs[1])] * bool(runs[0] & runs[1])


def test_an_item_in_two_wordings_is_one_item():
    evaluations = Evaluations(13, common=1)
    evaluations.add("test", "one", f"form {text(0, 20)}", text(0, 20))
    assert [(overlap.item, overlap.shared) for overlap in evaluations.find(text(0, 20))] == [("one", 8)]
    evaluations.add("test", "short", "Form: add two", "add two")
    assert evaluations.find("Add two!")[0].item == "short"


def test_texts_of_a_row_are_its_words_without_names_tools_and_tests():
    row = {"id": "7", "messages": [{"role": "user", "content": "a"}, {"content": [{"text": "b"}]}], "tests": ["c"], "n": 1}
    assert list(texts_of(row)) == ["a", "b"]
