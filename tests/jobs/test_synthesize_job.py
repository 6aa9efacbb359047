"""The synthesis job on two ranks: killed in sampling and in judging it goes on, with the pairs of a run never killed."""

import json
import sys

import pytest
from safetensors.torch import load_file, save_file

from megatron_nb import synthesize_preferences
from megatron_nb.config import compose
from tests.data.data_tokenizers import tiny
from tests.jobs.killed import run_job, run_killed
from tests.model.hf_folders import save_random


class Letters:
    """A judge that likes answers of many different letters."""

    async def score_rollout(self, prompt, rollout) -> float:
        return len(set(rollout.text)) / (1 + len(rollout.text))


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    """A complete command line but for the run."""
    folder = tmp_path_factory.mktemp("models")
    for name, heads in (("strong", 4), ("weak", 2)):  # another shape, so other weights
        save_random(folder / name, heads=heads, vocabulary=400)
        weights = load_file(folder / name / "model.safetensors")
        weights["lm_head.weight"][tiny().eos_token_id] *= 4  # answers end now and then
        save_file(weights, folder / name / "model.safetensors", metadata={"format": "pt"})
        tiny().save_pretrained(folder / name)
    user = [{"role": "user", "content": f"question {number}"} for number in range(12)]
    given = [{"role": "assistant", "content": "an answer"}, {"role": "user", "content": "another question"}]
    with (folder / "rows.jsonl").open("w") as file:
        for number, asked in enumerate(user):
            more = {0: given, 1: [{"role": "user", "content": "and then"}], 2: [{"role": "user", "content": "long " * 80}]}
            file.write(json.dumps({"messages": [asked, *more.get(number, [])]}) + "\n")
    models = [f"{side}.{word}" for side in ("strong", "weak") for word in (f"checkpoint={folder}/{side}", "max_tokens=12")]
    engine = ["engine.kv_cache_gb=0.01", "engine.block_size=16", "engine.max_concurrency=8", "concurrency=1"]
    judge = ["judge.terms.words.kind=tests.jobs.test_synthesize_job.Letters", "pairs.parts={train: 0.7, heldout: 0.3}"]
    prompts = [f"prompts.sources.a.path={folder}/rows.jsonl", "prompts.adversarial_share=0.3", "max_prompt_tokens=100"]
    return [*prompts, *models, *engine, *judge, "pairs.balance_length=false"]


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory, words):
    """(run folder, rows written by each rank) of a run that was never killed."""
    folder = tmp_path_factory.mktemp("runs")
    return folder / "whole", ranks.run(2, run_job, "synthesize_preferences", [*words, f"runs_dir={folder}", "name=whole"])


@pytest.mark.parametrize("die_at", [4, 16])
def test_a_job_killed_in_sampling_or_judging_writes_the_same_pairs_and_samples_nothing_twice(
    ranks, tmp_path, words, whole, die_at
):
    words, (expected, rows) = [*words, f"runs_dir={tmp_path}"], whole
    run_killed(2, "synthesize_preferences", [*words, "name=killed"], die_at)
    assert not (tmp_path / "killed" / "summary.json").exists()
    resumed = ranks.run(2, run_job, "synthesize_preferences", [*words, "name=killed"])
    assert sum(resumed) <= sum(rows) - (die_at - 1)
    for part in ("train", "heldout"):
        pairs = [(run / "pairs" / f"{part}.jsonl").read_text() for run in (expected, tmp_path / "killed")]
        assert pairs[0] == pairs[1] and pairs[0]
    summary = json.loads((tmp_path / "killed" / "summary.json").read_text())
    assert summary["prompts"] == 12 and summary["dropped_too_long"] == 1
    dropped = sum(value for key, value in summary.items() if key.startswith("dropped_"))
    assert summary["pairs"] + dropped == 12
    assert ranks.run(2, run_job, "synthesize_preferences", [*words, "name=killed"]) == [0, 0]  # all is on disk


def test_a_dry_run_tells_prompts_models_and_judge_and_does_nothing(monkeypatch, capsys, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["synthesize", *words, "--dry-run"])
    synthesize_preferences.main()
    printed = capsys.readouterr().out
    for told in ("12, ", "parameters; 1 answers of at most 12 tokens", "judge        words", "train 70%, heldout 30%"):
        assert told in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("strong.samples=2", "must be equal"),
        ("concurrency=0", "at least 1"),
        ("strong.checkpint=x", "the nearest is 'strong.checkpoint'"),
    ],
)
def test_a_wrong_value_is_refused_before_any_work(words, word, rule):
    with pytest.raises(ValueError, match=rule):
        compose(synthesize_preferences.PreferencesConfig, "synthesize_preferences", [*words, word])


def test_a_missing_checkpoint_is_named(words, tmp_path):
    words = [*words, f"strong.checkpoint={tmp_path}/none"]
    config = compose(synthesize_preferences.PreferencesConfig, "synthesize_preferences", words)
    with pytest.raises(ValueError, match="none is not a folder"):
        synthesize_preferences.main(config)
