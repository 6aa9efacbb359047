"""Refinement: how it ends, what it keeps and rejects, what it never asks twice; and the signs of a known solution."""

import asyncio
import gzip
import json
from pathlib import Path

import pytest
import yaml

from megatron_nb.asking.askers import Answer
from megatron_nb.asking.ledger import Ledger
from megatron_nb.config import STAGES
from megatron_nb.data.formats import parse
from megatron_nb.data.prompts import PromptSource
from megatron_nb.data.rows import BadRow
from megatron_nb.records import Conversation, Prompt, Rollout
from megatron_nb.synthesis.refine import (
    LengthConfig,
    Rules,
    Task,
    TaskConfig,
    answer_faults,
    read_tasks,
    reconstruct,
    record_of,
    refine,
    sft_row,
)  # fmt: skip
from megatron_nb.synthesis.refine_calls import Calls, NotAnswered, SameConfig, open_same
from megatron_nb.synthesis.refine_leaks import LeakConfig, leaks_in, phrases_in
from megatron_nb.synthesis.refine_same import SameMaths
from megatron_nb.synthesis.refine_wording import (
    Wording,
    conclusion,
    read_checklist,
    read_critique,
    read_reasoning,
    read_revision,
)
from tests.synthesis.refine_phrases import HONEST, LEAKS

STAGE = yaml.safe_load((STAGES / "refine_solutions.yaml").read_text())
PHRASES = LeakConfig(**STAGE["leaks"])
CHECKLIST = "1. It adds.\n2. It says the sum."
GOOD = "<reasoning>\nTwo and three are to be added: 2 + 3 = 5, and that is all.\nAnswer: 5\n</reasoning>"


class Script:
    """Says for each step (the end of the name) what it is told to; a list is said one after the other. Notes the names."""

    def __init__(self, **said):
        self.said, self.asked = {"checklist": CHECKLIST, "reasoning": GOOD, **said}, []

    async def ask(self, conversation: Conversation, name: str, seed: int) -> Answer:
        self.asked.append(name.partition("/")[2])
        step = next(part for part in reversed(name.split("/")) if not part.startswith("try")).partition("-")[0]
        said = self.said[step]
        text = said.pop(0) if isinstance(said, list) else said
        return Answer(text, "CUT" not in text, 3, 5)


def verdicts(*passed: bool) -> str:
    return "\n".join(f"{place}. {'PASS' if one else 'FAIL: no'}" for place, one in enumerate(passed, 1))


def rules(**changed) -> Rules:
    given = {"rounds": 3, "most_items": 4, "open_items": 0, "require_reference": False, "reasonings": 1, **changed}
    return Rules(Wording(), PHRASES, LengthConfig(20, 1000), **given)


def task(draft: str | None = "2 + 3 = 6", reference: str | None = None) -> Task:
    return Task("a1", Conversation([{"role": "user", "content": "What is 2 + 3?"}], "q", "a"), draft, reference)


def run(folder: Path, asker: Script | None, given: Rules, one: Task | None = None) -> dict:
    """The record of a task. asker None: from disk only."""
    same, one = SameConfig("normalised"), one or task()

    async def go():
        reward = None if asker is None else open_same(same)
        ledger = Ledger(folder, "all", 0)
        try:
            calls = Calls([ledger], asker, same, reward, 7, 2)
            refined = await refine(one, calls, given)
            faults = answer_faults(refined, given)
            return record_of(one, refined, faults, [] if faults else await reconstruct(one, calls, refined, given))
        finally:
            ledger.close()

    return asyncio.run(go())


ANSWERS = [f"<answer>\n2 + 3 = 5{'!' * place}\n#### 5\n</answer>" for place in range(4)]


@pytest.mark.parametrize(
    ("critique", "revision", "ended", "best", "critiques"),
    [
        ([verdicts(1, 1)], [], "passed", 0, 1),
        ([verdicts(0, 0), verdicts(1, 0), verdicts(1, 1)], ANSWERS[:2], "passed", 2, 3),
        ([verdicts(1, 0), verdicts(0, 0)], ANSWERS[:1], "not_better", 0, 2),  # the worse one is not kept
        ([verdicts(1, 0), verdicts(1, 0)], ANSWERS[:1], "not_better", 0, 2),
        ([verdicts(0, 0), verdicts(1, 0)], [ANSWERS[0], ANSWERS[0]], "unchanged", 1, 2),
        ([verdicts(0, 0), verdicts(1, 0), verdicts(1, 0)], ANSWERS[:2], "not_better", 1, 3),
        (["hm", verdicts(1), verdicts(1, 0)], [], "unreadable_critique", None, 0),  # two tries, then no more
        (["1. PASS CUT", verdicts(1, 1)], [], "passed", 0, 1),
        ([verdicts(0, 0)], ["no tags", "<answer></answer>"], "unreadable_revision", 0, 1),
    ],
)
def test_a_refinement_ends_when_all_pass_or_nothing_improves(tmp_path, critique, revision, ended, best, critiques):
    record = run(tmp_path, Script(critique=list(critique), revision=list(revision)), rules())
    assert (record["ended"], len(record["rounds"])) == (ended, critiques)
    kept = None if best is None else record["rounds"][best]["answer"]
    assert record["final"] == kept
    assert record["accepted"] == (ended == "passed" and "5" in record["final"])


def test_rounds_are_bounded_and_an_answer_with_open_items_gets_no_reasoning_unless_allowed(tmp_path):
    critique = [verdicts(0, 0, 0), verdicts(1, 0, 0), verdicts(1, 1, 0)]
    said = {"checklist": CHECKLIST + "\n3. It is short.", "revision": ANSWERS[:2]}
    asker = Script(critique=list(critique), **said)
    record = run(tmp_path / "a", asker, rules(rounds=2))
    assert record["ended"] == "rounds" and len(record["rounds"]) == 3
    assert record["rejected_by"] == ["open_items"] and not any("reasoning" in name for name in asker.asked)
    said["revision"] = ANSWERS[:2]
    record = run(tmp_path / "b", Script(critique=list(critique), **said), rules(rounds=2, open_items=1))
    assert record["accepted"] and record["reasoning_content"].startswith("Two and three")


def test_what_has_been_answered_is_never_asked_again_and_a_changed_rule_costs_no_reply(tmp_path):
    def asker():
        return Script(critique=[verdicts(0, 0), verdicts(1, 1)], revision=ANSWERS[:1])

    with pytest.raises(NotAnswered):
        run(tmp_path, None, rules())
    first = asker()
    record = run(tmp_path, first, rules(), task(reference="#### 5"))
    assert first.asked == ["checklist", "round-0/critique", "round-1/revision", "round-1/critique", "reasoning-0"]
    assert record["correct"] == {"draft": False, "final": True}
    assert run(tmp_path, None, rules(), task(reference="#### 5")) == record  # with nobody to ask
    lines = (tmp_path / "all.rank-0.jsonl").read_bytes().splitlines(keepends=True)
    for done in range(len(lines)):  # killed after any row, the next one half written
        folder = tmp_path / str(done)
        folder.mkdir()
        (folder / "all.rank-0.jsonl").write_bytes(b"".join(lines[:done]) + lines[done][: len(lines[done]) // 2])
        calls = [line for line in lines[:done] if b'"text"' in line]
        again = asker()
        for line in calls:  # what was said before the kill is not said again
            step = json.loads(line)[0].split("/")[-2].partition("-")[0]
            again.said[step] = again.said[step][1:] if isinstance(again.said[step], list) else again.said[step]
        assert run(folder, again, rules(), task(reference="#### 5")) == record
        assert again.asked == first.asked[len(calls) :]
    strict = rules()
    strict.length = LengthConfig(900, 1000)
    assert run(tmp_path, None, strict, task(reference="#### 5"))["rejected_by"] == ["too_short"]


@pytest.mark.parametrize(
    ("reasoning", "rule"),
    [
        ("<reasoning>\nTwo and three: 2 + 3 = 6, it seems to me.\nAnswer: 6\n</reasoning>", "another_answer"),
        ("<reasoning>\nTwo and three. The given solution adds them: 2 + 3 = 5.\nAnswer: 5\n</reasoning>", "leak:solution"),
        ("<reasoning>\nIt comes to 5. Why? Because of the sum 2 + 3 = 5, clearly.\nAnswer: 5\n</reasoning>", "announced"),
        ("<reasoning>\nTwo and three have to be added, which is easy.\nAnswer: 5\n</reasoning>", "underived"),
        ("<reasoning>\n2 + 3 = 5.\nAnswer: 5\n</reasoning>", "too_short"),
        (f"<reasoning>\n{'2 + 3 = 5 and so on. ' * 90}\nAnswer: 5\n</reasoning>", "too_long"),
        ("<reasoning>\nTwo and three: 2 + 3 = 5.\n</reasoning>", "unreadable"),
        ("Two and three: 2 + 3 = 5.\nAnswer: 5", "unreadable"),
        (GOOD + "CUT", "cut_off"),
    ],
)
def test_a_reasoning_is_rejected_by_the_rule_it_breaks_and_written_again(tmp_path, reasoning, rule):
    said = {"critique": verdicts(1, 1)}
    record = run(tmp_path / "one", Script(reasoning=reasoning, **said), rules(), task("2 + 3 = 5\n#### 5"))
    assert not record["accepted"] and record["reasoning_content"] is None and record["rejected_by"] == [rule]
    record = run(tmp_path / "two", Script(reasoning=[reasoning, GOOD], **said), rules(reasonings=3), task("2 + 3 = 5\n#### 5"))
    assert record["accepted"] and [one["rejected_by"] for one in record["reasonings"]] == [[rule], []]


def test_an_answer_that_speaks_of_the_refinement_or_is_not_the_required_reference_is_rejected(tmp_path):
    said = {"critique": verdicts(1, 1)}
    record = run(tmp_path, Script(**said), rules(), task("In the revised answer the sum is right.\n#### 5"))
    assert record["rejected_by"] == ["answer_leak:task"]
    record = run(tmp_path, Script(**said), rules(require_reference=True), task("2 + 3 = 6\n#### 6", "#### 5"))
    assert record["rejected_by"] == ["not_reference"]


def test_an_accepted_record_is_a_row_to_train_on_with_its_last_turn_alone(tmp_path):
    said = (("user", "Hi"), ("assistant", "Hello"), ("user", "2 + 3?"))
    history = [{"role": role, "content": text} for role, text in said]
    one = Task("b2", Conversation(history, "q", "a"), "2 + 3 = 5\n#### 5", None)
    record = run(tmp_path, Script(critique=verdicts(1, 1)), rules(), one)
    read = parse(json.loads(json.dumps(sft_row(one, record))), "file:1", "a")
    assert [turn.get("loss") for turn in read.messages] == [None, 0, None, 1]
    assert read.messages[-1]["content"] == "2 + 3 = 5\n#### 5"
    assert read.messages[-1]["reasoning_content"] == "Two and three are to be added: 2 + 3 = 5, and that is all."


# ------------------------------------------------------------------ leaks
@pytest.mark.parametrize("phrase", LEAKS)
def test_a_phrase_that_gives_the_solution_away_is_found_whatever_its_dress(phrase):
    said = phrase.format(answer="$18")
    for dressed in (said, said.upper(), said.replace(" ", "\n"), said.replace("the", "**the**")):
        assert list(phrases_in(f"I add the two numbers. {dressed} Then I go on.", PHRASES)), dressed


@pytest.mark.parametrize("phrase", HONEST)
def test_a_phrase_of_honest_reasoning_is_not_a_leak(phrase):
    assert list(phrases_in(f"I add the two numbers. {phrase.format(answer=18)} Then I go on.", PHRASES)) == []


def test_solutions_written_by_people_and_models_break_no_rule_but_rarely(shared_data):
    rows = gzipped(shared_data / "math" / "gsm8k_test.jsonl.gz")
    found = [leak.rule for row in rows for leak in leaks_in(
        row["answer"].rpartition("\n####")[0], row["question"], row["answer"], conclusion(row["answer"]), PHRASES)]  # fmt: skip
    assert len(rows) == 1319 and len(found) <= 15
    assert not [rule for rule in found if rule.startswith("leak")]
    rows = gzipped(shared_data / "math" / "qwen_math_cot_100_rm.jsonl.gz")
    texts = [text for row in rows for text in row["code"]]
    assert len(texts) == 800 and not [leak for text in texts for leak in phrases_in(text, PHRASES)]


def gzipped(path: Path) -> list[dict]:
    with gzip.open(path) as file:
        return [json.loads(line) for line in file]


STORY = ("First the twelve baskets are filled with apples by the farmer. Then the neighbour takes away every third basket of "
         "them. What remains is sold at the market for a good price in the end.")  # fmt: skip


@pytest.mark.parametrize(
    ("reasoning", "answer", "rules_"),
    [
        (STORY + " Let me see. " + "I count once more, slowly and with care. " * 8, "market day", ["quoted"]),
        ("I count once more, slowly and with care. " * 8 + STORY, "market day", []),
        ("It was Paris. " + "I think about rivers and towers. " * 8, "Paris", ["announced"]),
        ("I think about rivers and towers. " * 8 + "It was Paris.", "Paris", []),
        ("Step 18: 4 + 4 = 8. " + "So it goes on. " * 9 + "9 + 9 = 18.", "18", []),  # a number of a step
        ("They have 1,800 in all, so let me see why. " + "900 + 900 = 1800. " * 5, "\\boxed{1800}", ["announced"]),
        ("At 7 each, the 12 of them cost 84. " + "So it goes on. " * 9, "84", []),  # the sentence holds what it comes from
        ("It is 12 in all. " + "So it goes on. " * 9, "12", []),  # the task itself says 12
    ],
)
def test_an_answer_or_a_solution_that_stands_there_before_it_is_derived_is_found(reasoning, answer, rules_):
    assert [leak.rule for leak in leaks_in(reasoning, "There are 12 baskets.", STORY, answer, PHRASES)] == rules_


# ------------------------------------------------------------------ what is read
def test_replies_are_read_without_thinking_and_other_forms_are_refused():
    assert read_checklist("<think>\n1. no\n</think>\n**1.** One\n2) Two\n 2) Two", 3) == ["One", "Two"]
    for wrong in ("none", "1. a\n2. b\n3. c"):
        with pytest.raises(ValueError, match="numbered items"):
            read_checklist(wrong, 2)
    found = read_critique("1. **PASS**\n2: failed - too short\nItem 3. PASS.", ["a", "b", "c"])
    assert [(one.passed, one.reason) for one in found] == [(True, ""), (False, "too short"), (True, "")]
    for wrong in ("1. PASS", "1. PASS\n1. FAIL\n2. PASS", "1. PASS\n2. PASS\n3. PASS"):
        with pytest.raises(ValueError, match="item"):
            read_critique(wrong, ["a", "b"])
    assert read_revision("Sure: <answer>\nx </answer> y\n</answer>") == "x </answer> y"
    assert read_reasoning("<reasoning>\nSo.\n**Answer:** 5 eggs\n</reasoning>") == ("So.", "5 eggs")


@pytest.mark.parametrize(
    ("text", "final", "same", "other"),
    [
        ("so \\boxed{\\frac{1}{2}} it is", "\\boxed{\\frac{1}{2}}", "0.5", "0.25"),
        ("2 + 3 = 5\n#### 1,005", "1,005", "1005", "5"),
        ("Well.\nAnswer: 5 eggs", "5 eggs", "5", "6"),
        ("\\boxed{5\\pi}", "\\boxed{5\\pi}", "5\\pi", "5"),
        ("#### 25%", "25%", "\\boxed{25\\%}", "24"),
        ("He pays.\nSo he has $18 left in all.", "So he has $18 left in all.", "18", "81"),
    ],
)
def test_final_answers_are_found_and_compared_as_mathematics(text, final, same, other):
    def score(said):
        rollout = Rollout([], [], [], [], [], [], [], "done", {}, 0, "g", 0, text=said)
        return SameMaths().score_rollout(Prompt(Conversation([], "", ""), [], {"reference": conclusion(text)}), rollout)

    assert conclusion(text) == final
    assert (score(same), score(other)) == (1.0, 0.0)


def test_rows_that_cannot_be_tasks_are_named_and_drafts_come_from_two_places(tmp_path):
    file = tmp_path / "rows.jsonl"
    told = TaskConfig({"a": PromptSource(str(file))})
    ends = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "<think>\nx\n</think>\n\nD"}]}
    rows = [{"question": "Q", "draft": "D", "answer": 5}, ends, {"question": "Q"}, {"question": "Q"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks, dropped = read_tasks(told)
    assert [(one.draft, one.reference) for one in tasks] == [("D", "5"), (None, None)] and dropped == {"duplicate": 2}
    file.write_text(json.dumps({"question": "Q", "draft": ["D"]}))
    with pytest.raises(BadRow, match=r"rows.jsonl:1: draft is .*leave the field out"):
        read_tasks(told)
    with pytest.raises(ValueError, match="prompts.sources is empty"):
        read_tasks(TaskConfig())


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: Wording(critique="{question} {answer}"), "lacks {checklist}"),
        (lambda: LeakConfig({"a": ["("]}), "no regular expression"),
        (lambda: LeakConfig({}, ["task"]), "must be kinds"),
        (lambda: LeakConfig(early=0), r"in \(0, 1\]"),
        (lambda: SameConfig("judge"), "url and model"),
        (lambda: LengthConfig(5, 4), "in order"),
    ],
)
def test_settings_that_no_run_could_use_are_refused(make, rule):
    with pytest.raises(ValueError, match=rule):
        make()
