"""The code demo: its problems, its files, what it counts and when it says that something rose; all in its fast size (slow)."""

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron_nb.records import Score
from megatron_nb.rewards.code import code_block
from tools import demo_code_data as data
from tools import demo_code_report as report
from tools.demo_rl_report import Gain

ROOT = Path(__file__).parents[2]
PROBLEMS = pytest.mark.parametrize("problem", data.problems(), ids=lambda problem: problem.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    data.build(folder, seed=1, sft=800, rl=60, heldout=40)
    return folder


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@PROBLEMS
def test_right_programs_pass_every_test_and_each_wrong_one_fails_some(problem):
    tests = data.tests_of(problem, seed=3)
    for source in problem.optimal + problem.slow + problem.wrong:
        solve = data.solve_of(data.program(source, "nums"))
        passed = sum(solve(*test["args"]) == test["expected"] for test in tests)
        assert (passed == len(tests)) == (source not in problem.wrong), source


@PROBLEMS
def test_on_the_generators_inputs_optimal_programs_are_of_their_class(problem):
    """In executed lines: twice the size is at most twice the cost, or the same."""
    names = {}
    exec(problem.generator, names)

    def lines(source, size):
        counted, arguments = 0, names["make"](size)

        def trace(frame, event, arg):
            nonlocal counted
            counted += event == "line"
            return trace

        solve, before = data.solve_of(source), sys.gettrace()
        sys.settrace(trace)
        try:
            solve(*arguments)
        finally:
            sys.settrace(before)
        return counted

    assert all(lines(source, 40) <= 2.1 * lines(source, 20) for source in problem.optimal)
    if problem.best == "1":
        assert all(lines(source, 40) == lines(source, 20) for source in problem.optimal)


def test_the_files_are_the_same_every_time_and_share_no_prompt(folder, tmp_path):
    data.build(tmp_path, seed=1, sft=800, rl=60, heldout=40)
    for name in ("sft.jsonl", "rl.jsonl", "heldout.jsonl"):
        assert (folder / name).read_text() == (tmp_path / name).read_text()
    problems = Counter(row["prompt"] for name in ("rl", "heldout") for row in rows(folder / f"{name}.jsonl"))
    learned = {row["messages"][0]["content"] for row in rows(folder / "sft.jsonl")}
    assert problems.total() == 100 and max(problems.values()) == 1 and not learned & problems.keys()


def test_the_model_learns_from_a_mixture_of_optimal_slow_wrong_and_malformed_answers():
    rng, kinds = random.Random(0), Counter()
    asked = rng.choices(data.asked(), k=2000)
    for one in asked:
        source, broken = code_block(data.answer(one, rng), "python")
        known = {data.program(source, one.arg): kind for kind in data.KINDS for source in getattr(one.problem, kind)}
        kinds["malformed" if broken else known.get(source, "malformed")] += 1
    assert {kind: count / 2000 for kind, count in kinds.items()} == pytest.approx(data.SHARES, abs=0.04)


def test_prompts_and_answers_keep_within_the_tokens_the_demo_allows(folder):
    from transformers import AutoTokenizer

    from tools.demo_code import ANSWER, PROMPT

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    for row in rows(folder / "sft.jsonl")[:400]:
        asked, answer = row["messages"]
        text = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True)
        assert len(tokenizer(text, add_special_tokens=False).input_ids) <= PROMPT
        assert len(tokenizer(answer["content"]).input_ids) < ANSWER


# ------------------------------------------------------------------ what is counted
def test_the_referee_counts_by_prompt_and_judges_equal_answers_once(tmp_path):
    asked = [{"id": f"p{number}", "prompt": f"question {number}", "problem": "one"} for number in range(2)]
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    passed = {"total": 2.0, "passed": 2.0, "pass_rate": 1.0, "unknown": 0.0, "c_star": 3.0}
    known = {
        "fast": Score(1.6, parts=passed | {"c_hat": 3.0}), "slow": Score(1.2, parts=passed | {"c_hat": 6.0}),
        "odd": Score(1.1, parts=passed | {"unknown": 1.0, "c_hat": 2.0}),
        "half": Score(0.6, parts=passed | {"passed": 1.0, "pass_rate": 0.5}),
        "none": Score(0.0, parts={"format": 0.0}), "lost": Score(None, reason="the judge died"),
    }  # fmt: skip
    judged = []

    class Reward:
        async def score_rollout(self, prompt, rollout):
            judged.append(rollout.text)
            await asyncio.sleep(0)
            return known[rollout.text]

    def answers(step, *texts):
        file = tmp_path / "run" / "rollouts" / f"heldout-{step:08d}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        empty = {name: [] for name in ("prompt_ids", "ids", "sampled_mask", "logprob", "weight_version", "turn_id", "turns")}
        file.write_text("".join(json.dumps({
            **empty, "status": "done", "sampling": {}, "seed": 0, "group_id": "g", "index": 0, "text": text,
            "prompt": [{"role": "user", "content": f"question {number // 4}"}],
        }) + "\n" for number, text in enumerate(texts)))  # fmt: skip

    referee = report.Referee(tmp_path / "heldout.jsonl", Reward())
    answers(0, "fast", "fast", "slow", "odd", "half", "none", "none", "none")
    found = referee.judge(tmp_path / "run", 0)
    assert sorted(judged) == sorted({"fast", "slow", "odd", "half", "none"})
    counted = {name: list(values) for name, values in vars(found).items()}
    assert counted == {
        "answers": [4, 4], "pass_rate": [4, 0.5], "solved": [4, 0], "optimal": [2, 0], "unknown": [1, 0], "form": [4, 1],
    }  # fmt: skip
    shares = {"pass_rate": 4.5 / 8, "solved": 0.5, "optimal_share": 0.5, "unknown_share": 0.25, "form": 5 / 8}
    assert found.measures() == shares
    answers(1, *["lost"] * 8)
    with pytest.raises(RuntimeError, match="the judge died"):
        referee.judge(tmp_path / "run", 1)


def judged(rng, prompts, pass_rate, optimal):
    solved = rng.binomial(4, pass_rate, prompts).astype(float)
    fast = rng.binomial(solved.astype(int), optimal).astype(float)
    return report.Judged(np.full(prompts, 4.0), solved, solved, fast, 0 * fast, np.full(prompts, 4.0))


def test_the_error_of_a_share_is_that_over_prompts():
    rng = np.random.default_rng(0)
    changes = [report.gains(judged(rng, 100, 0.7, 0.4), judged(rng, 100, 0.7, 0.6))["optimal_share"] for _ in range(20)]
    spread = np.std([gain.difference for gain in changes])
    assert np.mean([gain.error for gain in changes]) == pytest.approx(spread, rel=0.35)
    assert np.mean([gain.difference for gain in changes]) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(
    ("rise", "share", "held", "seen"),
    [(0.3, 0.4, 0.01, True), (0.15, 0.4, 0.01, False), (0.3, 0.15, 0.01, False), (0.3, 0.4, -0.021, False)],
)
def test_all_three_have_to_be_seen(rise, share, held, seen):
    first = report.Course(report.STAGES[0], [], [], {"pass_rate": Gain("pass_rate", 0.5, 0.5 + rise, 0.1)})
    gains = {"pass_rate": Gain("pass_rate", 0.8, 0.8 + held, 0.1)}
    gains["optimal_share"] = Gain("optimal_share", 0.4, 0.4 + share, 0.1)
    assert all(report.shown([first, report.Course(report.STAGES[1], [], [], gains)]).values()) == seen


@pytest.mark.slow
def test_the_fast_size_runs_from_data_to_table_and_goes_on_after_a_kill(tmp_path):
    command = [sys.executable, ROOT / "tools" / "demo_code.py", "--fast", "--folder", tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "3/5" in line:
            process.terminate()
    assert process.wait() == 143
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "sft: done before" in done.stdout and "standard errors over prompts" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    rates = {f"pass_rate_{when}" for when in ("before", "after_stage1", "after_stage2")}
    assert rates | {"optimal_share_before", "optimal_share_after", "seed", "wall_s"} <= summary.keys()
    assert (tmp_path / "seed-1" / "demo_code.png").stat().st_size > 10_000
