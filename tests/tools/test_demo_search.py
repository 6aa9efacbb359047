"""The search demo: its tokenizer, its start and its exercises, what it counts; all in its fast size (slow)."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_nb.rewards.critic_rules import judge_by_rules
from megatron_nb.rewards.critic_steps import Task, steps_of
from megatron_nb.rollout.tools import SCHEMAS
from tests.synthesis.small_wiki import small_corpus
from tools import demo_search_data as data
from tools import demo_search_report as report
from tools.demo_search import TOOLS
from tools.demo_search_start import BEGINS, BLANK, NUMBERS, write_start

ROOT = Path(__file__).parents[2]
TOLD = [SCHEMAS[name] for name in TOOLS]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("wiki"), pages=72)


@pytest.fixture(scope="module")
def tokenizer(corpus, tmp_path_factory):
    from transformers import AutoTokenizer

    folder, whole = tmp_path_factory.mktemp("tokenizer"), data.VOCABULARY
    data.VOCABULARY = 900
    try:
        data.write_tokenizer(folder, corpus.folder, TOLD, seed=1)
    finally:
        data.VOCABULARY = whole
    return AutoTokenizer.from_pretrained(folder)


def exercises(corpus, without=frozenset()):
    return data.Exercises(data.quotable(corpus, set(without)), random.Random(3))


# ------------------------------------------------------------------ tokenizer and start
def test_a_word_is_cut_the_same_way_with_and_without_a_space_before_it(corpus, tokenizer):
    assert len(tokenizer) in (899, 900)
    for word in sorted({word for title in corpus.titles() for word in corpus.page(title).text.split() if word.isalpha()}):
        alone, behind = tokenizer.tokenize(word), tokenizer.tokenize(f"x {word}")[1:]
        assert behind == [BLANK + alone[0], *alone[1:]], word


@pytest.mark.parametrize("text", ["[1] Brandor\nIt is", '{"name": "search"}', "a  b\t\n\n c", "don't 漢字 é", "<tool_call>\n"])
def test_text_comes_back_as_it_was(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_where_an_argument_begins_the_start_finds_what_stands_behind_a_mark(tokenizer, tmp_path):
    from transformers import LlamaForCausalLM

    tokenizer.save_pretrained(tmp_path / "tokenizer")
    write_start(tmp_path / "start", tmp_path / "tokenizer", seed=1)
    model, vocabulary = LlamaForCausalLM.from_pretrained(tmp_path / "start"), tokenizer.get_vocab()
    words = [number for word, number in vocabulary.items() if word.isalpha() and word.isascii()]
    begun = {name: [vocabulary[one] for one in (name, '":', BEGINS)] for name in ("title", "text")}
    found = dict.fromkeys(begun, 0)
    for seed in range(20):
        ids, rng = random.Random(seed).sample(words, 60), random.Random(seed)
        early, late = sorted(rng.sample(range(5, 50), 2))
        for name, marks in (
            ("title", {early: ["]"]}), ("title", {early: ["]"], late: ["**"]}), ("title", {early: ["**"], late: ["**"]}),
            ("text", {early: [NUMBERS[2], BEGINS], late: [NUMBERS[1], BEGINS]}),
        ):  # fmt: skip
            row = []
            for place, word in enumerate(ids):
                row += [*(vocabulary[mark] for mark in marks.get(place, [])), word]
            with torch.no_grad():
                said = model(torch.tensor([[*row, *begun[name]]])).logits[0, -1, words].argmax()
            found[name] += words[said] == ids[max(marks)]
    assert found["title"] > 36 and found["text"] > 12, found  # of 60 and 20


def test_the_start_copies_and_random_weights_do_not(tokenizer, tmp_path):
    from transformers import LlamaForCausalLM

    tokenizer.save_pretrained(tmp_path / "tokenizer")
    write_start(tmp_path / "start", tmp_path / "tokenizer", seed=1)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "start")
    words = [number for word, number in tokenizer.get_vocab().items() if not word.startswith((BLANK, "<|"))]
    ids = torch.tensor([random.Random(seed).sample(words, 60) for seed in range(4)])

    def copied() -> float:
        with torch.no_grad():
            said = model(torch.cat([ids, ids], 1)).logits[:, 61:-1].argmax(-1)
        return (said == ids[:, 2:]).float().mean().item()

    assert copied() > 0.7
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.normal_(std=0.02)
    assert copied() < 0.2


# ------------------------------------------------------------------ exercises
def test_the_critic_finds_nothing_wrong_in_an_exercise(corpus):
    drawn = exercises(corpus)
    for _ in range(60):
        messages = drawn.draw()["messages"]
        steps = steps_of(messages)
        verdicts = judge_by_rules(Task(messages[0]["content"], TOLD), steps)
        assert all(verdict.good for verdict in verdicts), [verdict.reasons for verdict in verdicts]


def test_exercises_are_made_of_no_sentence_of_a_held_out_page(corpus):
    away = list(corpus.titles())[:40]
    said = data.quotable(corpus, set(away))
    others = " ".join(corpus.page(title).text for title in corpus.titles() if title not in away)
    assert said and all(one in others for one in said) and len(said) < len(data.quotable(corpus, set()))


def test_a_missing_sample_names_the_package(monkeypatch):
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="gensim==4.4.0"):
        data.sample()


# ------------------------------------------------------------------ what it counts
def heldout(folder: Path, right: dict[int, list[bool]], step: int) -> None:
    """An evaluation in which question n was answered right or wrong in each of its episodes."""
    rows = []
    for number, its in right.items():
        for index, good in enumerate(its):
            rows.append({
                "group_id": f"{step}.{number}", "index": index, "segment": 0, "status": "done", "seed": 0, "sampling": {},
                "prompt": [{"role": "user", "content": f"question {number}"}], "prompt_ids": [1], "ids": [2],
                "sampled_mask": [True], "logprob": [0.0], "weight_version": [0], "turn_id": [0],
                "turns": [{"start": 0, "stop": 1, "kind": "assistant", "calls": 0, "status": "", "reward": 1.0}],
                "text": f"Answer: {number if good else 'no'}", "score": None, "advantage": None,
            })  # fmt: skip
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    (folder / "rollouts" / f"heldout-{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def questions(tmp_path) -> Path:
    """Eight questions over four paths."""
    rows = [{"question": f"question {n}", "answer": str(n), "aliases": [], "path": [{"title": str(n // 2)}]} for n in range(8)]
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "heldout.jsonl"


def test_accuracy_is_the_mean_over_questions_and_errors_are_over_paths(tmp_path, questions, monkeypatch):
    monkeypatch.setattr(report, "step_file", lambda run, step, kind: run / "rollouts" / f"{kind}-{step}.jsonl")
    heldout(tmp_path, {n: [False, False] for n in range(8)}, 0)
    heldout(tmp_path, {n: [n < 4, n < 4] for n in range(8)}, 1)
    before, after = (report.read(tmp_path, step, questions) for step in (0, 1))
    gain = report.gains(before, after)["accuracy"]
    assert (gain.before, gain.after) == (0.0, 0.5)
    assert gain.error == pytest.approx(0.5 / np.sqrt(4), rel=0.1), "four paths, not eight questions"
    assert gain.rose == (gain.difference > 2 * gain.error)


@pytest.mark.slow
def test_the_demo_runs_in_its_fast_size(tmp_path):
    command = [sys.executable, "tools/demo_search.py", "--fast", "--folder", str(tmp_path / "demo")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    told = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert {"accuracy_before", "accuracy_after_sft", "accuracy_after_rl", "shown", "wall_s"} <= set(told)
    for name in ("questions", "trajectories"):
        assert (tmp_path / "demo" / "seed-1" / "datasets" / name / "README.md").exists()
    assert (tmp_path / "demo" / "seed-1" / "demo_search.png").exists()
