"""IFEval's rules: an answer that follows each kind, and one that does not; every kind of the published data is known."""

import asyncio
import json

import pytest

from megatron_nb.data.rows import BadRow, raw_rows
from megatron_nb.evals.harness import attempt
from megatron_nb.evals.instruction_rules import KINDS, count_sentences, follows, follows_loosely
from megatron_nb.evals.kinds import make_task
from megatron_nb.rollout.engine import Sampling
from tests.evals.scripted_asker import ScriptedAsker

FRENCH = "Bonjour tout le monde, je vous remercie beaucoup de votre visite dans notre belle ville."
CASES = [  # kind, settings, an answer that follows, one that does not
    ("keywords:existence", {"keywords": ["ink", "memoir"]}, "My memoirs, in INK.", "My memoirs."),
    ("keywords:frequency", {"keyword": "so", "relation": "at least", "frequency": 2}, "so, also", "so"),
    ("keywords:frequency", {"keyword": "so", "relation": "less than", "frequency": 2}, "so", "so so"),
    ("keywords:forbidden_words", {"forbidden_words": ["sad"]}, "saddle up", "a Sad song"),
    ("keywords:letter_frequency", {"letter": "t", "let_relation": "at least", "let_frequency": 3}, "Ttt", "tt"),
    ("language:response_language", {"language": "fr"}, FRENCH, "Hello everybody, thank you very much for your visit."),
    ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 2}, "One. Two.", "One and Mr. Two"),
    ("length_constraints:number_sentences", {"relation": "less than", "num_sentences": 2}, "One e.g. this.", "One! Two?"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb\n***\n", "a *** *** b"),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, "two words", "now three words"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "it"},
     "a b\n\n'It, is", "a b\n\nItis"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "a"},
     "a\n\nb", "a\n\nb\n\nc"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP. S. More", "Bye PS"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye\nP.P.S more", "Bye\nP.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one\n**two**\n- two\n- three"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "My answer: maybe"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and **"),
    ("detectable_format:multiple_sections", {"section_spliter": "Day", "num_sections": 2}, "Day 1 a Day 2 b", "Day 1 a Day b"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', '{"a": 1'),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<< >>\ntext"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:two_responses", {}, "one ****** two ******", "one ****** two ****** three"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. It.", "It. Say it."),
    ("startend:end_checker", {"end_phrase": "Peace!"}, 'I say "peace!"', "Peace! to all"),
    ("startend:quotation", {}, '"all of it"', '"all" of it'),
    ("change_case:capital_word_frequency", {"capital_relation": "at least", "capital_frequency": 2}, "VERY BIG-TOP",
     "BIG Thing"),
    ("change_case:english_capital", {}, "THIS IS ALL IN CAPITAL LETTERS, MY FRIENDS", "THIS IS ALL in CAPITAL LETTERS"),
    ("change_case:english_lowercase", {}, "this is all in small letters, my friends", "This is all in small letters"),
    ("punctuation:no_comma", {}, "none here", "one, here"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "good", "bad"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)])
def test_every_kind_tells_what_follows_from_what_does_not(kind, settings, good, bad):
    assert follows(kind, good, settings) and not follows(kind, bad, settings)
    assert not follows(kind, " \n", settings)


def test_every_kind_has_a_case_and_a_capital_answer_in_another_language_is_none_in_english():
    assert {case[0] for case in CASES} == set(KINDS)
    assert not follows("change_case:english_capital", FRENCH.upper(), {})


@pytest.mark.parametrize(
    ("kind", "settings", "text", "loose"),
    [
        ("startend:quotation", {}, 'Here it is:\n"all of it"', True),
        ("startend:quotation", {}, 'Here:\n*"all of it"*\nBye', True),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "Sure!\nSay it. It.", True),
        ("punctuation:no_comma", {}, "a, b\nc, d\ne, f", False),
    ],
)
def test_loosely_a_first_line_a_last_line_and_asterisks_may_go(kind, settings, text, loose):
    assert not follows(kind, text, settings) and follows_loosely(kind, text, settings) is loose


@pytest.mark.parametrize(
    ("text", "count"),
    [("One. Two! Three?", 3), ("Dr. A. Smith went to St. Ives.", 1), ("1. First point.\n2. Second point.", 2), ("no end", 1),
     ('He said "Go." Then he left.', 2), ("Wait... what?", 1), ("", 0), ("3.5 is a number.", 1)],
)  # fmt: skip
def test_sentences_are_counted(text, count):
    assert count_sentences(text) == count


def test_the_published_prompts_are_read_and_figures_are_by_prompt_and_by_instruction(shared_data):
    path = shared_data / "chat" / "ifeval_input_data.jsonl"
    rows = [json.loads(raw) for _, raw in raw_rows(path)]
    task = make_task("ifeval", {"kind": "instructions", "path": str(path)}, Sampling(max_tokens=64))
    items = task.items()
    assert len(items) == len(rows) == 541 and {kind for row in rows for kind in row["instruction_id_list"]} == set(KINDS)
    asker = ScriptedAsker(lambda messages, tools: f"<think>,</think>{messages[-1]['content'].replace(',', '')}")

    async def every():
        return await asyncio.gather(*(attempt(task, item, asker, 0) for item in items[:200]))

    outcomes = asyncio.run(every())
    told = task.summarise(outcomes)
    asked = sum(len(row["instruction_id_list"]) for row in rows[:200])
    broken = sum(len(one.reason.split(", ")) for one in outcomes if one.reason)
    assert told["instruction_strict"] == pytest.approx(1 - broken / asked)
    assert "punctuation:no_comma" not in " ".join(one.reason for one in outcomes)
    assert 0 < told["prompt_strict"] <= told["prompt_loose"] and told["prompt_strict"] < told["instruction_strict"]


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"prompt": "p", "instruction_id_list": ["keywords:nonsense"], "kwargs": [{}]}, "is not known; there are keyw"),
        ({"prompt": "p", "instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": None}]}, "lacks keywords"),
        ({"prompt": "p", "instruction_id_list": ["startend:quotation"], "kwargs": []}, "lists of the same length"),
    ],
    ids=["unknown", "lacks", "lengths"],
)
def test_a_row_that_cannot_be_checked_is_refused_with_its_place(tmp_path, row, rule):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(BadRow, match=f"rows.jsonl:1: .*{rule}"):
        make_task("i", {"kind": "instructions", "path": str(tmp_path / "rows.jsonl")}, Sampling(max_tokens=64)).items()


def test_several_attempts_at_a_prompt_do_not_narrow_the_bounds_by_instruction(tmp_path):
    kinds = ["punctuation:no_comma", "detectable_format:title"]
    with (tmp_path / "rows.jsonl").open("w") as file:
        for n in range(20):
            row = {"key": n, "prompt": "a, b" if n % 2 else "<<A title>>", "instruction_id_list": kinds, "kwargs": [{}, {}]}
            file.write(json.dumps(row) + "\n")
    asker = ScriptedAsker(lambda messages, tools: messages[-1]["content"])
    told = []
    for samples in (1, 8):
        settings = {"kind": "instructions", "path": str(tmp_path / "rows.jsonl"), "samples": samples}
        task = make_task("rules", settings, Sampling(max_tokens=64))

        async def every(task=task, samples=samples):
            return [await attempt(task, item, asker, index) for item in task.items() for index in range(samples)]

        told.append(task.summarise(asyncio.run(every())))
    once, often = ({name: one[f"instruction_strict{name}"] for name in ("", "_low", "_high")} for one in told)
    assert often == pytest.approx(once, abs=1e-9) and once[""] == 0.5
    error = 1.96 * 0.5 / 20**0.5  # of 20 prompts, each with all of its instructions followed or none
    assert once["_high"] - 0.5 == pytest.approx(error, rel=0.05)
