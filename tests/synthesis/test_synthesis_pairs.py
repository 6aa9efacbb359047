"""Preference pairs: what is dropped, that length stops telling, that histories stay, that parts share no prompt."""

import json
import random
from collections import Counter

import pytest

from megatron_nb.data import preferences as rows
from megatron_nb.data.prompts import PromptSource
from megatron_nb.records import Conversation, Score
from megatron_nb.synthesis.adversarial import KINDS, TRANSFORMS, adversarial
from megatron_nb.synthesis.answers import Question
from megatron_nb.synthesis.preferences import (
    Judged,
    Pair,
    PairsConfig,
    QuestionConfig,
    balanced,
    length_bias,
    pairs_of,
    part_of,
    read_questions,
    write_pairs,
)  # fmt: skip

HISTORY = [
    {"role": "user", "content": "Who wrote it?"},
    {"role": "assistant", "content": "Ada did.", "loss": 1},
    {"role": "user", "content": "When?"},
]


def judged(number=0, strong="a long answer", weak="another", scores=(1.0, 0.0), whole=(True, True), messages=HISTORY) -> Judged:
    question = Question(f"{number:016x}", Conversation([dict(message) for message in messages], f"r{number}", "a"))
    answers = {side: [{"text": text, "whole": end, "tokens": 3}]
               for side, text, end in zip(("strong", "weak"), (strong, weak), whole)}  # fmt: skip
    return Judged(question, answers, {"strong": [Score(scores[0])], "weak": [Score(scores[1])]})


def pair(longer: int, number: int = 0) -> Pair:
    """A pair whose chosen answer is `longer` characters longer."""
    texts = "x" * (40 + max(longer, 0)), "y" * (40 + max(-longer, 0))
    sides = ({"text": text, "by": by, "score": 0.0} for text, by in zip(texts, ("strong", "weak")))
    return Pair(judged(number).question, *sides)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scores": (0.5, 0.5)}, "tie"),
        ({"scores": (0.55, 0.5)}, "tie"),  # within the margin
        ({"strong": "another"}, "same"),
        ({"strong": "<think>\nlong\n</think>\n\nanother"}, "same"),  # only what is said counts
        ({"weak": "<think>never ends"}, "empty"),
        ({"scores": (None, 1.0)}, "not_judged"),
        ({"whole": (False, True)}, "chosen_cut_off"),
    ],
)
def test_what_teaches_nothing_is_dropped_and_counted(change, reason):
    dropped = Counter()
    assert list(pairs_of(judged(**change), 0.1, dropped)) == []
    assert dropped == {reason: 1}


@pytest.mark.parametrize(
    ("scores", "whole", "by"), [((1.0, 0.0), (True, False), "strong"), ((0.0, 1.0), (False, True), "weak")]
)
def test_the_higher_score_is_chosen_whoever_wrote_it_and_a_cut_off_answer_may_lose(scores, whole, by):
    (found,) = pairs_of(judged(scores=scores, whole=whole), 0.0, Counter())
    assert (found.chosen["by"], found.chosen["score"], found.rejected["score"]) == (by, 1.0, 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_length_says_nothing_after_balancing(seed):
    """Longer answers win four times in five, and by more than they lose."""
    rng = random.Random(seed)
    pairs = [pair(rng.randint(1, 200) if rng.random() < 0.8 else -rng.randint(1, 60), number) for number in range(600)]
    kept = balanced(pairs, seed=1)
    before, after = length_bias(pairs), length_bias(kept)
    assert before["length_difference"] > 40 and before["length_correlation"] > 0.3
    assert abs(after["length_difference"]) < 1 and abs(after["length_correlation"]) < 0.02
    wins = sum(one.longer > 0 for one in kept) / len(kept)
    assert abs(wins - 0.5) < 0.05 and len(kept) > 150  # not by throwing everything away
    assert kept == balanced(pairs, seed=1) and [one for one in pairs if one in kept] == kept


def test_balancing_leaves_balanced_pairs_alone():
    pairs = [pair(longer, number) for number, longer in enumerate([5, -5, 0, 30, -30, 0])]
    assert balanced(pairs, seed=1) == pairs


def test_pairs_of_one_sided_length_cannot_be_kept():
    assert balanced([pair(7, number) for number in range(5)], seed=1) == []


def test_a_row_keeps_the_history_and_is_what_reward_models_read(tmp_path):
    models = {"strong": "S", "weak": "W"}
    measured = write_pairs(tmp_path, [judged()], PairsConfig(balance_length=False, parts={"train": 1.0}), models, seed=1)
    row = json.loads((tmp_path / "train.jsonl").read_text())
    preference = rows.parse(row, "x:1", "a")
    assert [message["content"] for message in preference.conversation.messages] == [m["content"] for m in HISTORY]
    assert (preference.chosen, preference.rejected, preference.tie) == ("a long answer", "another", False)
    assert row["provenance"]["chosen"] == {"by": "strong", "model": "S", "score": 1.0}
    assert measured["multi_turn"] == measured["pairs"] == measured["pairs_train"] == 1


def test_parts_share_no_prompt_and_have_their_share(tmp_path):
    config = PairsConfig(balance_length=False, parts={"reward": 0.45, "judge": 0.45, "heldout": 0.1})
    rng = random.Random(3)
    every = [judged(rng.getrandbits(64)) for _ in range(2000)]
    for one in every:  # two answers each: both pairs of a prompt go together
        for side in ("strong", "weak"):
            one.answers[side], one.scores[side] = one.answers[side] * 2, one.scores[side] * 2
    write_pairs(tmp_path, every, config, {"strong": "S", "weak": "W"}, seed=1)
    parts = {name: [json.loads(line)["id"] for line in (tmp_path / f"{name}.jsonl").open()] for name in config.parts}
    assert sum(len(ids) for ids in parts.values()) == 4000
    for name, share in config.parts.items():
        assert abs(len(parts[name]) / 4000 - share) < 0.04
        others = set().union(*(ids for other, ids in parts.items() if other != name))
        assert not set(parts[name]) & others
    assert part_of(every[0].question, config.parts) == part_of(every[0].question, dict(config.parts))


# ------------------------------------------------------------------ prompts
@pytest.mark.parametrize("kind", KINDS)
def test_an_adversarial_transform_is_seeded_keeps_the_task_and_changes_the_last_user_turn_alone(kind):
    changed = [adversarial(HISTORY, kind, random.Random(seed)) for seed in (1, 1, *range(2, 40))]
    assert changed[0] == changed[1]
    assert len({json.dumps(one) for one in changed}) == len(TRANSFORMS[kind])
    for one in changed:
        assert one[:2] == HISTORY[:2] and "When?" in one[2]["content"] and one[2]["content"] != "When?"
    assert HISTORY[2]["content"] == "When?"


def test_a_wording_with_braces_in_the_prompt_is_left_alone():
    asked = [{"role": "user", "content": "What is {x}?"}]
    assert "What is {x}?" in adversarial(asked, KINDS[0], random.Random(0))[0]["content"]


def write(path, questions):
    path.write_text("".join(json.dumps({"messages": messages, "answer": "42"}) + "\n" for messages in questions))
    return {"a": PromptSource(str(path))}


def test_prompts_are_read_once_lose_their_answer_and_become_adversarial_at_the_share_asked_for(tmp_path):
    asked = [[{"role": "user", "content": f"question {number}"}] for number in range(400)]
    asked += [asked[0], [*asked[1], {"role": "assistant", "content": "an answer"}]]
    sources = write(tmp_path / "p.jsonl", asked)
    questions, dropped = read_questions(QuestionConfig(sources, adversarial_share=0.25), seed=1)
    again, _ = read_questions(QuestionConfig(sources, adversarial_share=0.25), seed=1)
    other, _ = read_questions(QuestionConfig(sources, adversarial_share=0.25), seed=2)
    assert len(questions) == 400 and dropped == {"duplicate": 2}
    assert questions == again != other
    attacked = [question for question in questions if question.adversarial]
    assert 70 < len(attacked) < 130 and {question.adversarial for question in attacked} == set(KINDS)
    assert questions[0].data["answer"] == "42"
    plain, _ = read_questions(QuestionConfig(sources, adversarial_share=0), seed=1)
    assert [one.id for one in plain] == [one.id for one in questions]  # the part of a prompt does not depend on its transform


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (QuestionConfig(), "prompts.sources is empty"),
        (QuestionConfig({"a": PromptSource("x")}, adversarial_share=1.5), "must be in"),
        (QuestionConfig({"a": PromptSource("x")}, adversarial_kinds=["rude"]), "must be some of contradiction"),
        (PairsConfig(margin=-1), "must not be negative"),
        (PairsConfig(parts={"train": 0.5, "heldout": 0.4}), "sum to 1"),
    ],
)
def test_a_setting_that_no_run_could_use_is_refused(config, rule):
    with pytest.raises(ValueError, match=rule):
        config.validate()
