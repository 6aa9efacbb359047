"""Rules by hand-computed values."""

import pytest

from megatron_nb.rewards.text import final_answer, repeated_share, scripts_of
from tests.rewards.made_groups import group_of, scores, values


def rule(kind, **settings):
    return {"rule": {"kind": kind, "settings": settings}}


@pytest.mark.parametrize(
    ("text", "settings", "value", "reason"),
    [
        ("answer", {}, 1.0, ""),
        ("<think>a</think>\n\nanswer", {}, 1.0, ""),
        ("a</think>answer", {}, 1.0, ""),  # the template opened it
        ("<think>a", {}, 0.0, "its thinking is never closed"),
        ("<think>a</think>", {}, 0.0, "it says nothing after its thinking"),
        ("<think>a</think>b</think>c", {}, 0.0, "<think> occurs 1 times and </think> 2 times"),
        (" \n", {}, 0.0, "it is empty"),
        ("answer", {"thinking": "required"}, 0.0, "it does not think"),
        ("<think>a</think>b", {"thinking": "forbidden"}, 0.0, "it thinks"),
    ],
)
def test_format_is_one_when_every_rule_holds_and_else_names_the_broken_one(text, settings, value, reason):
    (score,) = scores(rule("format", **settings), group_of(text))
    assert (score.reward, score.reason) == (value, f"rule: {reason}" if reason else "")


def test_format_can_ask_for_an_answer_that_ended():
    assert values(rule("format", ended=True), group_of("a", "a", statuses=["length", "done"])) == [0.0, 1.0]


def test_length_is_zero_then_linear_then_minus_one():
    ids = [[7] * n for n in (0, 6, 7, 8, 10, 11)]
    assert values(rule("length", max_tokens=10, cache=4), group_of(*["x"] * 6, ids=ids)) == [0, 0, -0.25, -0.5, -1, -1]
    assert values(rule("length", max_tokens=10, cache=0), group_of("x", "x", ids=ids[-2:])) == [0, -1]


def test_length_and_repetition_count_sampled_tokens_alone():
    group = group_of("x", ids=[[1, 1, 1, 1]])
    group.rollouts[0].sampled_mask = [True, False, False, False]
    assert values({**rule("length", max_tokens=2, cache=1), "r": {"kind": "repetition", "settings": {"n": 1}}}, group) == [0.0]


@pytest.mark.parametrize(
    ("items", "n", "share"),
    [("abab", 2, 1 / 3), ("aaaa", 2, 2 / 3), ("abcd", 2, 0), ("a", 2, 0), ("", 1, 0), ("aab", 1, 1 / 3)],
)
def test_repetition_is_the_share_of_n_grams_seen_before(items, n, share):
    assert repeated_share(items, n) == pytest.approx(share)
    assert values(rule("repetition", n=n), group_of("x", ids=[list(items.encode())])) == [pytest.approx(-share)]


@pytest.mark.parametrize(
    ("question", "answer", "share"),
    [
        ("How many fish?", "Three fish.", 1.0),
        ("How many fish?", "三条鱼", 0.0),
        ("How many fish?", "Three 鱼 鱼 fish", 0.5),
        ("有几条鱼?请用Python计算", "用Python: 三条鱼", 1.0),  # Latin is less than a fifth: the word Python is one of five
        ("Сколько рыб?", "Три рыбы", 1.0),
        ("Сколько рыб?", "Three", 0.0),
        ("魚は何匹ですか", "三匹です", 1.0),
        ("Сколько?", "```python\nprint(3)\n```", 1.0),  # code is not prose
        ("Сколько?", "$x = y$ и 42", 1.0),
        ("1 + 1", "two", 1.0),
        ("Сколько?", "", 1.0),
        ("Сколько?", "<think>three, I think</think>три", 1.0),
    ],
)
def test_language_is_the_share_of_the_answer_in_the_prompts_script(question, answer, share):
    (value,) = values(rule("language"), group_of(answer, question=question))
    assert value == pytest.approx(share, abs=0.21 if "Python" in answer else 1e-9)


def test_words_count_in_alphabets_and_letters_in_east_asian_scripts():
    assert scripts_of("two words, 三条鱼 и 7 https://x.y/abc") == {"LATIN": 2, "CJK": 3, "CYRILLIC": 1}


@pytest.mark.parametrize(
    ("reference", "settings", "expected"),
    [("Paris", {}, [1, 1, 0, 0]), (["paris", "Paris"], {}, [1, 1, 1, 0]), ("PARIS", {"ignore_case": True}, [1, 1, 1, 0])],
)
def test_exact_compares_the_final_answer(reference, settings, expected):
    group = group_of("Paris", "<think>Rome</think> Paris\n", "paris", "Rome", data={"answer": reference})
    assert values(rule("exact", **settings), group) == expected


def test_exact_without_a_reference_is_invalid_and_names_what_there_is():
    (score,) = scores(rule("exact"), group_of("x", data={"solution": 1}))
    assert score.reward is None and "the prompt's data has no 'answer'; it has solution" in score.reason


def test_regex_looks_at_the_final_answer_unless_told():
    group = group_of("<think>7</think>none", "7")
    assert values(rule("regex", pattern=r"\d"), group) == [0, 1]
    assert values(rule("regex", pattern=r"\d", where="text"), group) == [1, 1]


@pytest.mark.parametrize(
    ("text", "said"), [("a", "a"), ("<think>a</think> b ", "b"), ("a</think>b", "b"), ("<think>a", ""), ("", "")]
)
def test_the_final_answer_is_what_follows_the_thinking(text, said):
    assert final_answer(text) == said
