"""Rewards of programs: form, share of tests, the gated time part, its invariant; and a judge that fails gives no number."""

import asyncio
import socket
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nb.rewards import code
from megatron_nb.rewards.code import GatedComplexity
from megatron_nb.rewards.estimates import Estimates
from megatron_nb.rewards.judging import JudgeFailed
from megatron_nb.rewards.reward import RewardConfig, TermConfig, check_reward, find_judges
from megatron_nb.rewards.witness import Told
from megatron_nb.sandbox.complexity import Estimate
from megatron_nb.sandbox.judge import Verdict
from megatron_nb.sandbox.ladder import LADDER, rank
from megatron_nb.schema import ConfigError
from tests.rewards.made_groups import group_of, scores

PROGRAM = "def f(x):\n    return x"
THOUGHT = "<think>hm</think>\n\n"
ACCEPTED, WRONG = Verdict("accepted", 0.01, 0.02, 8.0, "", "fake"), Verdict("wrong answer", 0.01, 0.02, 8.0, "1, not 2", "fake")


def fenced(source=PROGRAM, tag="python"):
    return f"Here it is.\n```{tag}\n{source}\n```\nDone."


def data(tests=4, **fields):
    rows = [{"call": "f", "args": [number], "expected": number} for number in range(tests)]
    return {"tests": rows, "language": "python", "function": "f", "generator": "def make(n):\n    return [n]", **fields}


@dataclass
class FakeJudge:
    """Verdicts and classes as a test wants them."""

    judged: list = field(default_factory=list)  # an exception, or verdicts
    found: object = "n"  # a class, or an exception
    programs: list = field(default_factory=list)
    measured: list = field(default_factory=list)
    references: list = field(default_factory=list)

    def __call__(self, config):
        return self

    async def verdicts(self, program, tests, limits):
        self.programs.append((program, limits))
        if isinstance(self.judged, Exception):
            raise self.judged
        return self.judged or [ACCEPTED] * len(tests)

    async def complexity(self, source, function, generator, reference=""):
        self.measured.append(source)
        self.references.append(reference)
        await asyncio.sleep(0)
        if isinstance(self.found, Exception):
            raise self.found
        return Estimate(self.found, 0.9, "fake")


@pytest.fixture
def judge(monkeypatch):
    fake = FakeJudge()
    monkeypatch.setattr(code, "CodeJudge", fake)
    return fake


def score_of(text, kind="pass_rate", asked=None, **settings):
    terms = {"code": {"kind": kind, "gate": True, "settings": {"thinking": "optional"} | settings}}
    return scores(terms, group_of(text, data=asked or data()), retries=0)[0]


# ------------------------------------------------------------------ form
@pytest.mark.parametrize(
    ("text", "thinking", "reason"),
    [
        (THOUGHT + fenced(), "required", None),
        ("hm</think>" + fenced(tag=""), "required", None),  # the template opened it
        (fenced(tag="Python3"), "forbidden", None),
        (fenced(), "required", "it does not think"),
        (f"<think>{fenced()}", "required", "its thinking is never closed"),
        (THOUGHT + fenced(), "forbidden", "it thinks"),
        (f"<think>{fenced()}</think>It is above.", "required", "it has 0 code blocks, not one"),
        (fenced() + "\n" + fenced(), "optional", "it has 2 code blocks, not one"),
        (f"```python\n{PROGRAM}", "optional", "its code block is never closed"),
        (PROGRAM, "optional", "it has 0 code blocks, not one"),
        (fenced(tag="rust"), "optional", "its code block is marked 'rust', python is asked"),
        (f"```\n{PROGRAM}\n```python", "optional", "its code block is never closed"),
        (fenced(" \n"), "optional", "its code block is empty"),
    ],
)
def test_an_answer_without_its_form_earns_nothing_and_is_told_the_rule(judge, text, thinking, reason):
    score = score_of(text, thinking=thinking)
    assert score.reward == pytest.approx(0.0 if reason else 1.1)
    assert score.parts["code/format"] == (0.0 if reason else 0.1)
    assert score.reason == f"code: {reason or '4 of 4 tests pass'}"
    assert len(judge.programs) == (0 if reason else 1)


def test_a_block_within_a_list_loses_the_indentation_of_its_fence(judge):
    score_of("1. So:\n\n   ```python\n   def f(x):\n       return x\n\n  # less\n   ```\nDone.")
    assert judge.programs[0][0].source == "def f(x):\n    return x\n\n# less"


def test_a_program_that_does_not_parse_has_no_form(judge):
    judge.judged = [Verdict("compile error", 0, 0, 0, "line 1: invalid syntax", "fake")] * 4
    score = score_of(fenced("def f(x:"))
    assert (score.reward, score.parts) == (0.0, {"code": 0.0, "code/format": 0.0, "code/pass_rate": 0.0})
    assert "does not parse: line 1" in score.reason


def test_the_whole_reward_is_zero_without_form_whatever_other_terms_say(judge):
    terms = {"code": {"kind": "pass_rate", "gate": True, "settings": {"thinking": "optional"}}}
    terms["polite"] = {"kind": "regex", "settings": {"pattern": "Done"}}
    bad, good = scores(terms, group_of("Done", fenced(), data=data()))
    assert (bad.reward, good.reward) == (0.0, pytest.approx(2.1))


# ------------------------------------------------------------------ the share of tests
@pytest.mark.parametrize("passed", range(5))
def test_the_share_of_tests_is_the_reward_and_the_first_failure_is_told(judge, passed):
    judge.judged = [ACCEPTED] * passed + [WRONG] * (4 - passed)
    score = score_of(fenced())
    assert score.reward == pytest.approx(0.1 + passed / 4)
    assert score.parts == {
        "code": score.reward, "code/format": 0.1, "code/pass_rate": passed / 4, "code/passed": passed, "code/total": 4,
        "code/cpu_s": pytest.approx(0.04),
    }  # fmt: skip
    failure = "" if passed == 4 else f"; test {passed}: wrong answer (1, not 2)"
    assert score.reason == f"code: {passed} of 4 tests pass{failure}"


def test_limits_language_and_function_come_from_the_row_and_else_from_the_settings(judge):
    score_of(fenced(), time_limit_s=3.0, memory_limit_mb=100)
    score_of(fenced(tag="cpp"), asked=data(language="cpp", time_limit_s=1.5, memory_limit_mb=64.0))
    (first, defaults), (second, own) = judge.programs
    assert (first.source, first.language, first.entry) == (PROGRAM, "python", "f")
    assert (defaults.time_s, defaults.memory_mb) == (3.0, 100)
    assert (second.language, own.time_s, own.memory_mb) == ("cpp", 1.5, 64)


def test_a_run_without_isolation_says_so(judge):
    judge.judged = [Verdict("accepted", 0, 0, 0, "", "none")] * 4
    assert "without isolation" in score_of(fenced()).reason


# ------------------------------------------------------------------ a judge that fails is no number
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"judged": JudgeFailed("the worker died")}, "the worker died"),
        ({"judged": [ACCEPTED, ACCEPTED, ACCEPTED, Verdict("infrastructure", 0, 0, 0, "no bubblewrap", "")]}, "no bubblewrap"),
        ({"found": JudgeFailed("no service answers")}, "no service answers"),
    ],
)
def test_a_judge_that_fails_makes_the_rollout_invalid(judge, fault, reason):
    vars(judge).update(fault)
    score = score_of(fenced(), "gated_complexity", data(optimal="n"))
    assert score.reward is None and reason in score.reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [({"tests": []}, "needs tests"), ({"tests": None}, "needs tests"), ({"language": "perl"}, "language='perl'")],
)
def test_a_prompt_that_cannot_be_judged_is_invalid_and_named(judge, row, reason):
    score = score_of(fenced(), asked=data() | row)
    assert score.reward is None and reason in score.reason


# ------------------------------------------------------------------ the time part
@pytest.mark.parametrize(
    ("found", "optimal", "time"),
    [
        ("n", "n", 0.5), ("n log n", "n", 0.25), ("n^2", "n", 0.5**4), ("2^n", "1", 0.5**11), ("n", "O(N)", 0.5),
        ("unknown", "n", 0.0), ("n", "unknown", 0.0), ("n", None, 0.0), ("log n", "n", 0.0),
    ],
)  # fmt: skip
def test_the_time_part_halves_with_every_rank_above_the_optimal_class(judge, found, optimal, time):
    judge.found = found
    score = score_of(fenced(), "gated_complexity", data(optimal=optimal))
    assert score.parts["code/time"] == time and score.reward == pytest.approx(1.1 + time)
    assert score.parts["code/unknown"] == (time == 0)
    if found in LADDER and optimal == "n":
        assert (score.parts["code/c_hat"], score.parts["code/c_star"]) == (rank(found), rank("n"))


def test_a_class_better_than_the_optimal_one_is_unknown_and_flagged(judge):
    judge.found = "1"
    score = score_of(fenced(), "gated_complexity", data(optimal="n"))
    assert (score.parts["code/time"], score.parts["code/better_than_optimal"], score.parts["code/unknown"]) == (0, 1, 1)
    assert "not believed" in score.reason


def test_a_program_that_fails_a_test_is_not_measured(judge):
    judge.judged = [ACCEPTED, ACCEPTED, ACCEPTED, WRONG]
    score = score_of(fenced(), "gated_complexity", data(optimal="n"))
    assert judge.measured == [] and score.parts["code/time"] == 0 and score.reward == pytest.approx(0.85)


@pytest.mark.parametrize("row", [{"generator": None}, {"function": None}, {"language": "cpp"}])
def test_what_cannot_be_measured_is_unknown_not_invalid(judge, row):
    tag = row.get("language", "python")
    score = score_of(fenced(tag=tag), "gated_complexity", data(optimal="n", **row))
    assert score.reward == pytest.approx(1.1) and "class unknown" in score.reason and judge.measured == []


def test_the_reference_of_the_row_is_what_a_measured_program_must_answer(judge, tmp_path):
    asked = data(optimal="n", reference="def f(x): return x")
    terms = {"code": {"kind": "gated_complexity", "settings": {"thinking": "optional", "estimates": str(tmp_path / "e.jsonl")}}}
    scores(terms, group_of(fenced(), data=asked))
    scores(terms, group_of(fenced(), data=data(optimal="n")))
    assert judge.references == ["def f(x): return x", ""]  # and neither estimate stands for the other


@pytest.mark.parametrize(
    ("told", "time", "differ"), [("n", 0.5, 0.0), ("n^2", 0.0, 1.0), ("unknown", 0.0, 0.0)], ids=["agree", "differ", "silent"]
)
def test_where_the_witnesses_do_not_agree_the_class_is_unknown(judge, monkeypatch, told, time, differ, caplog):
    class FakeWitness:
        def __init__(self, config):
            assert config.answers == 3

        async def complexity(self, program):
            return Told(told)

    monkeypatch.setattr(code, "Witness", FakeWitness)
    witness = {"endpoint": {"base_url": "http://nowhere", "model": "m"}, "answers": 3}
    score = score_of(fenced(), "gated_complexity", data(optimal="n"), witness=witness)
    assert (score.parts["code/time"], score.parts["code/witnesses_differ"]) == (time, differ)
    assert ("the model says" in caplog.text) == bool(differ)


def test_a_program_is_measured_once_whatever_its_comments_and_remembered_in_the_file(judge, tmp_path):
    terms = {"code": {"kind": "gated_complexity", "settings": {"thinking": "optional", "estimates": str(tmp_path / "e.jsonl")}}}
    other = PROGRAM.replace("return", "  # fast\n    return ")
    asked = data(optimal="n")
    scores(terms, group_of(fenced(), data=asked))
    assert len(judge.measured) == 1
    (tmp_path / "e.jsonl").open("a").write('{"key": "torn')
    again = scores(terms, group_of(fenced(), fenced(other), fenced("def f(x):\n    return +x"), data=asked))
    assert len(judge.measured) == 2 and {score.parts["code/time"] for score in again} == {0.5}


def test_what_follows_a_torn_line_of_the_file_is_kept(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text('{"key": "torn')
    Estimates(path).add("a", Estimate("n", 1.0, ""))
    assert "a" in Estimates(path)


@pytest.mark.parametrize(
    ("name", "words"), [("", "cannot be written"), ("rows", "rows:2 is no measured class"), ("rows/x", "cannot be written")]
)
def test_a_file_that_cannot_keep_classes_is_refused(tmp_path, name, words):
    (tmp_path / "rows").write_text('{"torn\n{"id": 3}\n')
    with pytest.raises(ValueError, match=words):
        GatedComplexity(estimates=tmp_path / name)


def test_an_unknown_class_is_measured_again(judge, tmp_path):
    terms = {"code": {"kind": "gated_complexity", "settings": {"thinking": "optional", "estimates": str(tmp_path / "e.jsonl")}}}
    found = []
    for judge.found in ("unknown", "n", "n^2"):
        found += [score.parts["code/time"] for score in scores(terms, group_of(fenced(), data=data(optimal="n")))]
    assert found == [0.0, 0.5, 0.5] and len(judge.measured) == 2


# ------------------------------------------------------------------ the invariant
class Scripted(FakeJudge):
    """Verdicts by the program, which names how many tests it passes, and its class."""

    async def verdicts(self, program, tests, limits):
        passed = int(program.source.split()[0])
        return [ACCEPTED] * passed + [WRONG] * (len(tests) - passed)

    async def complexity(self, source, function, generator, reference):
        return Estimate(" ".join(source.split()[1:]), 0.5, "")


@settings(deadline=None, max_examples=150)
@given(
    format=st.floats(0, 1), w=st.floats(0, 1e6), gamma=st.floats(0, 1, exclude_min=True), total=st.integers(1, 60),
    optimal=st.sampled_from([*LADDER, "unknown"]), kind=st.sampled_from(["pass_rate", "gated_complexity"]), draw=st.data(),
)  # fmt: skip
def test_no_program_that_fails_a_test_scores_as_high_as_one_that_passes_all(format, w, gamma, total, optimal, kind, draw):
    classes = st.sampled_from([*LADDER, "unknown"])
    failing = draw.draw(st.lists(st.tuples(st.integers(0, total - 1), classes), min_size=1, max_size=4))
    passing = [(total, draw.draw(classes)) for _ in range(3)]
    constants = {"format": format} | ({"w": w, "gamma": gamma} if kind == "gated_complexity" else {})
    terms = {"code": {"kind": kind, "settings": {"thinking": "optional"} | constants}}
    texts = [fenced(f"{passed} {name}") for passed, name in failing + passing]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code, "CodeJudge", Scripted())
        rewards = [score.reward for score in scores(terms, group_of(*texts, data=data(total, optimal=optimal)))]
    assert max(rewards[: len(failing)]) < min(rewards[len(failing) :])


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ({"w": -0.1}, "w=-0.1 must be at least 0"), ({"w": float("inf")}, "w=inf"), ({"w": float("nan")}, "w=nan"),
        ({"gamma": 0.0}, "gamma=0.0 must be in"), ({"gamma": 1.5}, "gamma=1.5"), ({"format": 1e17}, "format=1e"),
        ({"format": -0.1}, "format=-0.1"),
    ],
)  # fmt: skip
def test_constants_that_could_break_the_invariant_are_refused(term, message):
    with pytest.raises(ConfigError, match=f"reward.terms.code.settings: {message}"):
        check_reward(RewardConfig({"code": TermConfig("gated_complexity", settings=term)}))


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_a_weight_that_turns_the_order_round_is_refused(weight):
    with pytest.raises(ConfigError, match="must be more than 0"):
        check_reward(RewardConfig({"code": TermConfig("pass_rate", weight=weight)}))


@pytest.mark.parametrize("kind", ["pass_rate", "gated_complexity"])
def test_a_judge_that_does_not_answer_is_told_before_any_sampling(kind):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        nobody = {"urls": [f"http://127.0.0.1:{taken.getsockname()[1]}"], "retries": 0}
        config = RewardConfig({"programs": TermConfig(kind, settings={"judge": nobody}), "form": TermConfig("format")})
        with pytest.raises(ConfigError, match=r"reward.terms.programs: its judge cannot be used: .*127\.0\.0\.1"):
            find_judges(config)
