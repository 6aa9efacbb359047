"""The RL demo: its data, how it takes length out, when it says that something rose; all of it in its fast size (slow)."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tools import demo_rl_data as data
from tools.demo_rl_report import Gain, at_equal_length, over_seeds, plain, shown

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    data.build(folder, seed=1, sft=2100, pairs=140, rl=140, heldout=70)
    return folder


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_files_are_the_same_every_time_and_share_no_prompt(folder, tmp_path):
    data.build(tmp_path, seed=1, sft=2100, pairs=140, rl=140, heldout=70)
    names = ["mixed", "clean", "pairs", "rl", "heldout", "repeats"]
    assert all((folder / f"{name}.jsonl").read_text() == (tmp_path / f"{name}.jsonl").read_text() for name in names)
    sampled = [row for name in ("pairs", "rl", "heldout") for row in rows(folder / f"{name}.jsonl")]
    prompts = Counter(json.dumps(row["messages"]) for row in sampled)
    prompts += Counter(json.dumps([{key: message[key] for key in ("role", "content")} for message in row["messages"][:-1]])
                       for row in rows(folder / "clean.jsonl"))  # fmt: skip
    assert prompts.total() == 2450 and max(prompts.values()) == 1


def test_an_ideal_answer_has_quality_1_and_sloppy_ones_less_whatever_their_length():
    rng = random.Random(0)
    tasks = [skill(rng) for skill in data.SKILLS.values() for _ in range(200)]
    answers = [data.sloppy(task, rng) for task in tasks]
    assert all(data.quality(task.ideal, task.ideal) == 1 for task in tasks)
    assert all(data.quality(task.ideal, answer) <= 0.8 for task, answer in zip(tasks, answers) if answer != task.ideal)
    longer = np.array([len(answer) - len(task.ideal) for task, answer in zip(tasks, answers)])
    assert (longer > 0).mean() > 0.2 and (longer < 0).mean() > 0.2 and abs(longer.mean()) < 3
    assert all(data.quality(task.ideal, wrong) < 1 for task in tasks for wrong in task.wrong)


def test_prompts_and_answers_keep_within_the_tokens_the_demo_allows(folder):
    from transformers import AutoTokenizer

    from tools.demo_rl import ANSWER, PROMPT

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    for row in rows(folder / "mixed.jsonl"):
        *asked, answer = row["messages"]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert len(tokenizer(text, add_special_tokens=False).input_ids) <= PROMPT
        assert len(tokenizer(answer["content"]).input_ids) < ANSWER
        assert [message["loss"] for message in row["messages"] if message["role"] == "assistant"][-1] == 1


def test_a_gain_that_is_length_alone_vanishes_at_equal_length_and_a_real_one_stays():
    rng = np.random.default_rng(0)
    longer = rng.normal(5, 3, 400)
    noise = rng.normal(0, 0.3, 400)
    length_alone, real = 0.2 * longer + noise, 0.2 * longer + 0.5 + noise
    assert plain(length_alone)[0] > 0.9
    value, error = at_equal_length(length_alone, longer)
    assert abs(value) < 2 * error < 0.2
    value, error = at_equal_length(real, longer)
    assert abs(value - 0.5) < 2 * error
    assert at_equal_length(real, np.full(400, 2.0)) == plain(real)


def test_a_rise_within_two_standard_errors_does_not_count():
    rise = [Gain(name, 0.0, 1.0, 0.4) for name in ("reward_length_controlled", "win_rate_length_controlled")]
    assert shown({"rl_pointwise": rise})
    assert not shown({"rl_pointwise": rise, "rl_pairwise": [rise[0], Gain("win_rate_length_controlled", 0.5, 1.5, 0.5)]})
    merged = over_seeds([{"a": [Gain("rule", 0.0, after, 9.0)]} for after in (1.0, 2.0, 3.0)])["a"][0]
    assert (merged.after, merged.error) == (2.0, pytest.approx(1 / 3**0.5))  # over seeds: errors within a seed do not enter


@pytest.mark.slow
def test_the_fast_size_runs_from_data_to_table_and_goes_on_after_a_kill(tmp_path):
    command = [sys.executable, ROOT / "tools" / "demo_rl.py", "--fast", "--folder", tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "3/6" in line:
            process.terminate()
    assert process.wait() == 143
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "weak: done before" in done.stdout and "rose beyond two standard errors (over prompts)" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {"reward_before", "reward_after", "win_rate_before", "win_rate_after", "seed", "wall_s"} <= summary.keys()
    assert (tmp_path / "seed-1" / "demo_rl.png").stat().st_size > 10_000
