"""Looking at rollouts: what is shown is what the file holds, filtered and compared; a page cannot be broken by an answer."""

from __future__ import annotations

import dataclasses
import json
import math
from html.parser import HTMLParser

import pytest

from megatron_nb.records import Conversation, Group, Prompt, Rollout, Score, Turn
from megatron_nb.rollout.store import write_step
from tests.data.data_tokenizers import tiny
from tools import rollouts, rollouts_html, rollouts_read

NASTY = "</i></details><script>alert(1)</script> <img src=x onerror='x'> \"quoted\" [bold red]not markup[/] & \x1b[31mred"


@pytest.fixture(scope="module")
def tokenizer():
    return tiny()


def rollout(tokenizer, group: str, index: int, text: str, reward: float | None, **more) -> Rollout:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    n = len(ids)
    score = Score(None, reason="judge: timed out") if reward is None else Score(reward, parts={"judge": 2.0})
    made = Rollout(
        prompt_ids=[1], ids=ids, sampled_mask=[True] * n, logprob=[-0.5] * n, weight_version=[3] * n, turn_id=[0] * n,
        turns=[Turn(0, n, "assistant")], status="done", sampling={}, seed=0, group_id=group, index=index, text=text,
        score=score, advantage=None if reward is None else reward - 0.5,
    )  # fmt: skip
    return dataclasses.replace(made, **more)


def group(name: str, question: str, answers: list[Rollout]) -> Group:
    conversation = Conversation([{"role": "user", "content": question}], name, "test")
    return Group(name, Prompt(conversation, [1]), answers)


@pytest.fixture
def run(tmp_path, tokenizer):
    """Step 1: two groups, one answer invalid; step 2: one of the prompts again, better and longer answers."""
    make = lambda *args, **more: rollout(tokenizer, *args, **more)  # noqa: E731
    first = [make("1/0", 0, "the cat", 0.0), make("1/0", 1, "the cat sat", 1.0), make("1/0", 2, "lost", None)]
    other = [make("1/1", 0, NASTY, 0.25), make("1/1", 1, "so", 0.25, status="length")]
    write_step(tmp_path, 1, [group("1/0", "What [sat]?", first), group("1/1", "<b>Other</b>", other)],
               ratios={"1/0/0/0": [1.0, *[1.5] * (len(first[0].ids) - 1)]})  # fmt: skip
    again = [make("2/0", 0, "the cat sat down", 1.0), make("2/0", 1, "the cat", 0.5)]
    write_step(tmp_path, 2, [group("2/0", "What [sat]?", again), group("2/1", "New", [make("2/1", 0, "x", 9.0)])])
    return tmp_path


def seen(capsys, *arguments: str) -> str:
    """What the tool prints for these arguments."""
    assert rollouts.main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def read(run, step):
    return rollouts_read.read_step(rollouts_read.step_files(run)[step], step)


def test_numbers_leave_invalid_answers_out_of_the_mean_and_count_them(run):
    found = rollouts_read.numbers(read(run, 1))
    assert (found.groups, found.rollouts, found.invalid, found.truncated, found.equal) == (2, 5, 1, 1, 1)
    assert found.reward == pytest.approx((0 + 1 + 0.25 + 0.25) / 4)
    assert found.spread == pytest.approx((0.5 + 0.0) / 2)


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, ["1/0/0", "1/0/1", "1/0/2", "1/1/0", "1/1/1"]),
        ({"reward": (0.0, 0.25)}, ["1/0/0", "1/1/0", "1/1/1"]),
        ({"reward": rollouts_read.parse_range("0.5:")}, ["1/0/1"]),
        ({"status": ["invalid"]}, ["1/0/2"]),
        ({"status": ["done", "length"], "group": "1/1"}, ["1/1/0", "1/1/1"]),
        ({"group": "1/0", "sort": "reward"}, ["1/0/1", "1/0/0", "1/0/2"]),
        ({"group": "1/0", "sort": "advantage", "reverse": True}, ["1/0/0", "1/0/1", "1/0/2"]),
    ],
)
def test_select_keeps_what_meets_every_condition(run, conditions, expected):
    found = rollouts_read.select(read(run, 1), **conditions)
    assert [f"{e.group_id}/{e.index}" for e in found] == expected


@pytest.mark.parametrize("text", ["1", "2:1", "a:b", "nan:1"])
def test_a_bad_range_is_refused(text):
    with pytest.raises(ValueError, match="LO:HI"):
        rollouts_read.parse_range(text)


@pytest.mark.parametrize(
    ("score", "status"), [(None, "done"), (Score(None), "done"), (Score(math.nan), "done"), (Score(1.0), "invalid")]
)
def test_without_a_usable_reward_a_rollout_is_invalid_and_has_a_reason(tmp_path, tokenizer, score, status):
    answer = rollout(tokenizer, "g", 0, "x", 1.0, score=score, status=status)
    write_step(tmp_path, 1, [group("g", "q", [answer])])
    (episode,) = read(tmp_path, 1)
    assert episode.reward is None and episode.status == "invalid" and episode.reason


def test_rows_of_one_episode_count_once_and_their_tokens_add_up(tmp_path, tokenizer):
    rows = [rollout(tokenizer, "g", 0, text, 1.0, segment=place) for place, text in enumerate(("one two", "three"))]
    write_step(tmp_path, 1, [group("g", "q", rows[::-1])])
    (episode,) = read(tmp_path, 1)
    assert episode.text == "three" and episode.length == len(rows[0].ids) + len(rows[1].ids)


def test_unusual_line_ends_in_an_answer_do_not_break_a_row_and_a_torn_last_line_is_left_out(tmp_path, tokenizer):
    write_step(tmp_path, 1, [group("g", "q", [rollout(tokenizer, "g", 0, "a\u2028b\x85c", 1.0)])])
    path = rollouts_read.step_files(tmp_path)[1]
    whole = json.dumps(json.loads(path.read_text()), ensure_ascii=False) + "\n"  # another writer may not escape them
    path.write_text(whole + whole[:50], encoding="utf-8")
    assert [episode.text for episode in read(tmp_path, 1)] == ["a\u2028b\x85c"]
    path.write_text(whole[:50] + "\n" + whole, encoding="utf-8")
    with pytest.raises(ValueError, match=":1 is no rollout"):
        read(tmp_path, 1)


def test_the_terminal_shows_numbers_reasons_and_answers_as_they_are(run, capsys):
    out = seen(capsys, str(run), "--step", "1", "--limit", "9")
    assert "INVALID: judge: timed out" in out and "0.375" in out
    assert "[bold red]not markup[/]" in out and "What [sat]?" in out and "judge 2" in out
    assert "\x1b" not in out and "\u241b[31mred" in out  # an answer steers no terminal


@pytest.mark.parametrize("sign", ["\x00", "\x07", "\r", "\x1b", "\x7f", "\x9b", "\u202e", "\u2066"])
def test_signs_that_steer_a_terminal_become_visible_and_others_stay(sign):
    shown = rollouts_read.visible(f"a\n\tb{sign}ü🎈")
    assert sign not in shown and len(shown) == 7 and shown[:4] == "a\n\tb" and shown[5:] == "ü🎈"


def test_without_a_step_all_steps_are_summed_up_and_the_newest_is_shown(run, capsys):
    out = seen(capsys, str(run), "--limit", "1")
    table = out[: out.index("by group")]
    assert "0.375" in table and "3.500" in table  # means of step 1 and step 2
    assert "step 2  2/0/0" in out and "step 1 " not in out and "2 more" in out


def test_the_difference_of_two_steps_pairs_prompts_by_their_words(run, capsys):
    out = seen(capsys, str(run), "--diff", "1", "2")
    assert "change of the mean reward, step 1 to 2: +0.2500" in out
    assert "best answers: 1/0/1 (1) and 2/0/0 (1)" in out
    assert "Other" not in out and "New" not in out  # prompts of one step only


def test_paired_gives_the_mean_and_its_standard_error():
    assert rollouts_read.paired([1.0, 2.0, 3.0]) == (2.0, pytest.approx(1 / math.sqrt(3)))
    assert rollouts_read.paired([1.0]) == (1.0, None)


def test_word_difference_marks_what_came_and_what_went():
    text = rollouts.word_difference("the cat sat on the mat", "the dog sat on the mat")
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styles == {"cat": "red strike", "dog": "green"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "7"], "there are 1, 2"),
        (["--reward", "5:"], "none of the 3 rollouts of step 2"),
        (["--heldout"], "no heldout-N.jsonl"),
        (["--html", "x.html"], "pass --tokenizer FOLDER"),
        (["--html", "x.html", "--tokenizer", "/nowhere"], "--tokenizer /nowhere holds no tokenizer"),
    ],
)
def test_what_cannot_be_shown_is_said_with_a_remedy(run, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(run)
    arguments = ["--reward", "100:"] if arguments == ["--reward", "5:"] else arguments
    assert rollouts.main([str(run), *arguments]) == 2
    assert message in capsys.readouterr().err


class Page(HTMLParser):
    """Tags met, the text, and the coloured tokens of a page."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: dict[str, int] = {}
        self.words, self.tokens, self.token = "", [], None
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        assert not any(name.startswith("on") or name in ("src",) for name, _ in attributes)
        self.tags[tag] = self.tags.get(tag, 0) + 1
        given = dict(attributes)
        self.token = [given.get("class", ""), given["title"], ""] if tag == "i" and "title" in given else None

    def handle_endtag(self, tag):
        if tag == "i" and self.token:
            self.tokens.append(tuple(self.token))
        self.token = None

    def handle_data(self, data):
        self.words += data
        if self.token:
            self.token[2] += data


def test_the_page_holds_every_token_with_its_colours_and_nothing_an_answer_brings_is_markup(run, tokenizer, capsys):
    tokenizer.save_pretrained(run / "hf")
    out = run / "page.html"
    assert "5 of 5 rollouts of step 1" in seen(capsys, str(run), "--step", "1", "--html", str(out))
    html = out.read_text(encoding="utf-8")
    page, episodes = Page(html), read(run, 1)
    assert "script" not in page.tags and "img" not in page.tags and "link" not in page.tags
    assert "http://" not in html and "https://" not in html and "default-src 'none'" in html
    assert page.tags["details"] == len(episodes) + 2  # and a prompt per group
    assert len(page.tokens) == sum(e.length for e in episodes)
    assert rollouts_read.visible(NASTY) in page.words and "invalid: judge: timed out" in page.words
    assert "<b>Other</b>" in page.words
    of_first = page.tokens[: episodes[0].length]
    assert "".join(word for *_, word in of_first) == "the cat"
    assert [colours for colours, *_ in of_first] == ["n4"] + ["n4 u3"] * (len(of_first) - 1)  # ratio 1, then 1.5
    assert "ratio 1.5000, weights 3" in of_first[-1][1]


@pytest.mark.parametrize("text", ["plain words", "ünïcödé 🎈🎉 漢字", "<|im_start|>assistant\n", "tail of a character 🎈"])
def test_token_texts_join_to_the_text_they_came_from(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = rollouts_html.token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts) == text
    cut = rollouts_html.token_texts(tokenizer, ids[:-1])
    assert len(cut) == len(ids) - 1 and "".join(cut) == tokenizer.decode(ids[:-1])


@pytest.mark.parametrize(
    ("ratio", "expected"), [(1.0, ""), (1.005, ""), (1.03, "u1"), (1.3, "u3"), (9.0, "u4"), (0.9, "d2"), (0.1, "d4")]
)
def test_the_colour_of_a_ratio_goes_by_its_logarithm(ratio, expected):
    assert rollouts_html.ratio_class(ratio) == expected


def test_turns_are_told_apart_and_tool_answers_stay_uncoloured(tmp_path, tokenizer):
    ids = tokenizer("call tool result answer", add_special_tokens=False)["input_ids"]
    n, mask = len(ids), [True] * len(ids)
    mask[2:4] = [False, False]
    turns = [Turn(0, 2, "assistant", calls=1), Turn(2, 4, "tool", status="timeout"), Turn(4, n, "assistant", reward=0.5)]
    answer = rollout(tokenizer, "g", 0, "answer", 1.0, ids=ids, sampled_mask=mask, logprob=[0.0] * n, weight_version=[0] * n,
                     turn_id=[0] * n, turns=turns)  # fmt: skip
    write_step(tmp_path, 1, [group("g", "q", [answer])])
    episodes = read(tmp_path, 1)
    page = Page(rollouts_html.page("run", {1: rollouts_read.numbers(episodes)}, episodes, 1, tokenizer))
    assert len(page.tokens) == n - 2
    for told in ("assistant, 1 calls", "tool, timeout", "assistant, reward 0.5"):
        assert told in page.words
