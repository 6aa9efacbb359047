"""The tiny recipe: its data share no prompt, its chain hands one model from stage to stage, its table says what improved."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_nb.chain import links_of
from tools import recipe_tiny, recipe_tiny_data, recipe_tiny_report
from tools.demo_files import train_twin_tokenizer
from tools.demo_search_start import write_start
from tools.recipe_tiny_report import Change
from tools.recipe_tiny_wiki import pages

ROOT = Path(__file__).parents[2]
FEW = {name: max(count // 20, 12) for name, count in recipe_tiny_data.ROWS.items()} | {"valid": 12}


# ------------------------------------------------------------------ data
@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder, whole = tmp_path_factory.mktemp("recipe"), recipe_tiny_data.VOCABULARY
    recipe_tiny_data.VOCABULARY = 1700  # what so few rows give
    try:
        recipe_tiny_data.build(folder, 1, FEW)
    finally:
        recipe_tiny_data.VOCABULARY = whole
    return folder


def rows(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def asked(row):
    said = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    answered = said[-1]["role"] == "assistant"
    return json.dumps([[one["role"], one["content"]] for one in (said[:-1] if answered else said)])


KINDS = [("chat_heldout", "chat_rl", "pairs", "chat"), ("code_heldout", "code_rl", "code")]
PROGRAM = "def solve(x):\n    if x:\n        for a in x:\n            return a\n"


@pytest.mark.parametrize("kinds", KINDS, ids=lambda one: one[-1])
def test_no_prompt_stands_in_two_files(built, kinds):
    prompts = {name: {asked(row) for row in rows(built, name)} for name in [*kinds, "valid"]}
    for name in prompts:
        assert prompts[name], name
        for other in set(prompts) - {name}:
            assert not prompts[name] & prompts[other], (name, other)


def test_the_model_of_the_chain_has_as_many_tokens_as_the_tokenizer():
    config = recipe_tiny.chain_of(Path("runs/nowhere"), 1, fast=False)
    assert f"model.vocab_size={recipe_tiny_data.VOCABULARY}" in config.words


def test_names_of_the_wiki_are_one_token_with_and_without_a_space(built):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(built / "tokenizer")
    for name in recipe_tiny_data.NAMES:
        assert len(tokenizer.tokenize(name)) == 1 and len(tokenizer.tokenize(f"x {name}")) == 2, name


@pytest.mark.parametrize("text", [PROGRAM, "a  b\n\n c", "é 漢字"], ids=["program", "blanks", "letters"])
def test_text_comes_back_as_it_was_and_an_indent_is_one_token(tmp_path, text):
    from transformers import AutoTokenizer

    train_twin_tokenizer(tmp_path, ["def solve(x): return a for if in"] * 3, 900)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert [len(tokenizer.tokenize("\n" + " " * blanks + "x")) for blanks in (4, 8)] == [3, 3]


def test_every_link_of_the_wiki_is_named_in_its_page_and_leads_to_a_page():
    found = pages(60, random.Random(3))
    titles = {row["title"] for row in found}
    assert len(titles) == 60 and found == pages(60, random.Random(3))
    assert all(link in titles and link in row["text"] and link != row["title"] for row in found for link in row["links"])


def test_no_held_out_fact_stands_in_a_training_prompt(built):
    facts = [row["messages"][0]["content"] for row in rows(built, "chat_heldout") if "Note: " in row["messages"][0]["content"]]
    said = [one["content"] for name in ("chat", "chat_rl", "pairs") for row in rows(built, name) for one in row["messages"]]
    assert facts and not [fact for fact in facts if any(fact in text for text in said)]


def test_a_seed_gives_one_start_whose_written_heads_have_even_factors(built, tmp_path):
    from safetensors.torch import load_file

    write_start(tmp_path, built / "tokenizer", 1)
    weights, again = (load_file(folder / "model.safetensors") for folder in (built / "start", tmp_path))
    assert all((weight == again[name]).all() for name, weight in weights.items())
    q, k = (weights[f"model.layers.1.self_attn.{name}_proj.weight"].abs() for name in "qk")
    assert q.max() == pytest.approx(k.max().item(), rel=1e-5)


# ------------------------------------------------------------------ chain
@pytest.mark.parametrize("fast", [False, True], ids=["whole", "fast"])
def test_one_model_goes_through_all_stages(tmp_path, fast):
    config = recipe_tiny.chain_of(tmp_path / "seed-1", 1, fast)
    starts = {name: stage.start_from for name, stage in config.stages.items()}
    way, name = [], "export"
    while name:
        way.insert(0, name)
        name = starts[name]
    policies = ["rl_pointwise", "rl_pairwise", "rl_code_pass_rate", "rl_code_complexity", "rl_agentic"]
    assert way == ["sft_short", "sft_long", *policies, "export"]
    links = links_of(config)
    models = [link.config.model for link in links if hasattr(link.config, "model")]
    assert len({(model.num_layers, model.vocab_size) for model in models}) == 1
    assert {link.config.seed for link in links if hasattr(link.config, "seed")} == {1}
    lengths = [link.config.seq_len for link in links if link.name in ("sft_short", "sft_long")]
    assert lengths == [512, 1024]


def test_with_smollm2_the_chain_has_its_shape_and_room_for_its_tokens(tmp_path):
    links = {link.name: link.config for link in links_of(recipe_tiny.chain_of(tmp_path / "seed-1", 1, False, "smollm2"))}
    assert links["sft_long"].model.num_layers == 30 and links["sft_long"].seq_len == 2048
    assert links["rl_agentic"].agent.max_tokens == 2048 and links["rl_agentic"].optimizer.lr == 1e-5


def test_a_fast_run_does_less_of_everything(tmp_path):
    whole, fast = (links_of(recipe_tiny.chain_of(tmp_path / "seed-1", 1, one)) for one in (False, True))
    steps = [(a.config.num_steps, b.config.num_steps) for a, b in zip(whole, fast) if hasattr(a.config, "num_steps")]
    assert len(steps) == 10 and all(b < a for a, b in steps)


# ------------------------------------------------------------------ what it tells
def ledger(folder, stages):
    told = [{"name": name, "stage": stage, "metrics": metrics} for name, stage, metrics in stages]
    (folder / "ledger.json").write_text(json.dumps({"stages": told, "base_evaluation": None}))
    return folder


def answers(run, step, *rewards, judge=None):
    """Held-out answers of an evaluation, one a prompt; None: no verdict."""
    (run / "rollouts").mkdir(parents=True, exist_ok=True)
    lines = []
    for prompt, reward in enumerate(rewards):
        score = None if reward is None else {"reward": reward, "parts": {"heldout_judge": judge[prompt]} if judge else {}}
        lines.append(json.dumps({"group_id": f"heldout{step}.0.a.{prompt}", "score": score}) + "\n")
    (run / "rollouts" / f"heldout-{step:08d}.jsonl").write_text("".join(lines))


def test_a_stage_is_better_when_its_figure_moved_the_right_way_beyond_two_errors(tmp_path):
    for name, after in {"rl": (0.7, 0.9, 0.0, 0.8), "rl2": (0.6, 0.8, 0.1, 0.9)}.items():
        answers(tmp_path / name, 0, 0.5, 0.7, 0.0, 0.8)
        answers(tmp_path / name, 5, *after)
    found = recipe_tiny_report.changes_of(ledger(tmp_path, [
        ("questions", "synthesize_questions", {"questions": 3}),
        ("sft", "sft", {"heldout_loss_before": 2.0, "heldout_loss_after": 1.0}),
        ("rising", "sft", {"heldout_loss_before": 1.0, "heldout_loss_after": 2.0}),
        ("reward", "reward_pointwise", {"heldout_loss_before": 1.0, "heldout_loss_after": 2.0, "heldout_accuracy_before": 0.5,
                                        "heldout_accuracy_after": 0.7}),
        ("rl", "rl_pointwise", {"reward_before": 0.5, "reward_after": 0.6}),
        ("rl2", "rl_pairwise", {"reward_before": 0.5, "reward_after": 0.6}),
    ]))  # fmt: skip
    better = {name: one.better for name, one in found.items()}
    assert better == {"sft": True, "rising": False, "reward": True, "rl": False, "rl2": True}
    assert found["rl"].error == pytest.approx(0.1 / 3**0.5) and found["rl2"].error == pytest.approx(0)


def test_changes_are_taken_prompt_by_prompt_by_the_heldout_judge_and_without_answers_that_have_no_verdict(tmp_path):
    answers(tmp_path, 0, 1.0, 2.0, 3.0, None, judge=[0.1, 0.2, 0.3, 0.4])
    answers(tmp_path, 2, 9.0, 9.0, 9.0, 9.0, judge=[9.0, 9.0, 9.0, 9.0])
    answers(tmp_path, 4, 1.0, None, 2.0, 3.0, judge=[0.2, 0.2, 0.6, 0.4])
    assert recipe_tiny_report.paired_error(tmp_path) == pytest.approx(0.1)  # changes 0.1 and 0.3


def test_over_seeds_the_error_is_that_of_the_mean_change():
    runs = [{"rl": Change("reward", 0.0, after, 0.0)} for after in (0.1, 0.2, 0.6)]
    merged = recipe_tiny_report.over_seeds(runs)["rl"]
    assert merged.difference == pytest.approx(0.3) and merged.error == pytest.approx(0.15275, abs=1e-5)
    assert not merged.better


def test_the_table_names_what_did_not_improve():
    text = recipe_tiny_report.table({"sft": Change("loss", 2.0, 2.5, 0.0, less=True)}, "over seeds")
    assert text.splitlines()[1].endswith("NO")


# ------------------------------------------------------------------ all of it
@pytest.mark.slow
def test_the_whole_recipe_runs_and_goes_on(tmp_path):
    command = [sys.executable, "tools/recipe_tiny.py", "--fast", "--folder", str(tmp_path / "recipe")]
    for _ in range(2):
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
        assert ended.returncode == 0, ended.stderr[-3000:]
    assert "the exported models, as transformers answers" in ended.stdout and ended.stdout.count(" is done in ") == 0
    assert (tmp_path / "recipe" / "seed-1" / "report.html").stat().st_size > 10_000
