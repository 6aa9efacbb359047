"""The reward-model job: golden losses at several layouts, kill -9 and resume bit for bit, export, hand-over, bad rows."""

import json
import random
from pathlib import Path

import pytest
import torch

from tests.data.data_tokenizers import tiny
from tests.jobs.killed import STEP, run_job, run_killed
from tests.jobs.test_resume_job import MODEL, _content, _equal

STEPS, EVERY = 10, 5
# of the same job at every layout; a change here changes what everybody trains, and must say why
GOLDEN = {
    "pointwise": [0.691939, 0.680086, 0.659405, 0.587345, 0.61966, 0.412729, 0.597993, 0.473388, 0.508717, 0.45973],
    "pairwise": [0.69395, 0.69804, 0.693619, 0.693739, 0.70505, 0.693227, 0.697615, 0.695356, 0.692478, 0.692476],
}
CASES = {"pairwise-cp2": ["parallel.context=2"], "pointwise-dp2": []}


def _pairs(path: Path, count: int, seed: int = 5) -> Path:
    """Pairs whose better answer says "good" where the other says "bad", after histories of several turns; some ties."""
    draw = random.Random(seed)
    words = ["some", "words", "of", "a", "question", "and", "an", "answer"]

    def text(*more: str) -> str:
        return " ".join(draw.sample([*draw.choices(words, k=draw.randint(2, 9)), *more], k=1 + len(more)) + list(more))

    with path.open("w") as file:
        for number in range(count):
            prompt = [{"role": "user", "content": text()}]
            if number % 3 == 0:
                prompt += [{"role": "assistant", "content": text()}, {"role": "user", "content": text()}]
            row = {"prompt": prompt, "chosen": text("good"), "rejected": text("bad"), "id": f"r{number}"}
            if number % 10 == 9:
                row["tie"] = True
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    """A complete command line but for stage, run and layout."""
    folder = tmp_path_factory.mktemp("pairs")
    tiny().save_pretrained(folder / "tokenizer")
    data = [f"data.sources.a.path={_pairs(folder / 'rows.jsonl', 60)}", f"data.tokenizer={folder}/tokenizer"]
    sizes = ["context=2k", "seq_len=192", "global_batch_size=6", f"num_steps={STEPS}", f"checkpoint.every={EVERY}"]
    rate = ["optimizer.lr=3e-3", "optimizer.warmup_steps=3", "data.heldout_share=0.2", "validate_every=5"]
    return [*MODEL, "parallel=cpu2", *sizes, *data, *rate, "checkpoint.keep_every=5", "log.wandb=off"]


def _rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _losses(run: Path) -> dict[int, tuple]:
    return {row["step"]: (row["loss"], row["lr"], row["grad_norm"], row["tokens"]) for row in _rows(run) if "grad_norm" in row}


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_equal_five_kill_9_and_five(ranks, tmp_path, words, case):
    kind = case.partition("-")[0]
    words = [f"--config-name=reward_{kind}", *words, *CASES[case], f"runs_dir={tmp_path}"]
    ranks.run(2, run_job, "reward_model", [*words, "name=whole"])
    whole = _losses(tmp_path / "whole")
    assert sorted(whole) == list(range(1, STEPS + 1))
    assert [whole[step][0] for step in sorted(whole)] == pytest.approx(GOLDEN[kind], rel=1e-4)
    run_killed(2, "reward_model", [*words, "name=killed"], 8, STEP)
    assert [path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()] == ["step-00000005"]
    ranks.run(2, run_job, "reward_model", [*words, "name=killed"])
    assert _losses(tmp_path / "killed") == whole
    name = f"checkpoints/step-{STEPS:08d}"
    expected, found = _content(tmp_path / "whole" / name), _content(tmp_path / "killed" / name)
    assert expected.keys() == found.keys()
    assert [key for key, value in expected.items() if "/python/" not in key and not _equal(value, found[key])] == []


def _heldout(run: Path) -> dict[str, float]:
    return next(row for row in reversed(_rows(run)) if "heldout_loss" in row)


@pytest.mark.parametrize("kind", ["pointwise", "pairwise"])
def test_a_run_learns_is_exported_and_scores_the_same_everywhere(ranks, tmp_path, words, kind):
    from transformers import AutoModelForSequenceClassification

    from megatron_nb.data.preferences import answer_ids, pair_ids, read
    from megatron_nb.training.hf_reward import load_reward_model
    from tools.convert_hf import export_hf, import_hf

    longer = ["num_steps=80", "validate_every=80", "checkpoint.every=80", "optimizer.lr=3e-3"]
    words = [f"--config-name=reward_{kind}", *words, "parallel=cpu1", f"runs_dir={tmp_path}", "name=run", *longer]
    ranks.run(1, run_job, "reward_model", words)
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["heldout_accuracy_after"] >= 0.9 and summary["heldout_loss_after"] < summary["heldout_loss_before"]
    assert 0 <= summary["heldout_ece_after"] <= 0.5 and (run / "plots" / "reliability.png").stat().st_size > 1000
    if kind == "pairwise":
        assert summary["heldout_flip_rate_after"] == pytest.approx(1 - summary["heldout_swap_agreement_after"])

    export_hf(run, tmp_path / "hf")
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert raw["reward_kind"] == kind and raw["architectures"] == ["LlamaForSequenceClassification"]
    assert raw.get("reward_bound") == (20.0 if kind == "pairwise" else None)
    random = torch.get_rng_state()
    of_run, tokenizer, found_kind = load_reward_model(run)
    assert torch.equal(random, torch.get_rng_state()), "a resumed run must go on with its own random numbers"
    of_folder, _, _ = load_reward_model(tmp_path / "hf")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    path = next(word for word in words if "sources.a.path" in word).partition("=")[2]
    rows = [row for _, row in read(path, "a")][:7]
    if kind == "pointwise":
        ids = [answer_ids(row.conversation, answer, tokenizer) for row in rows for answer in (row.chosen, row.rejected)]
    else:
        orders = [(row, *pair) for row in rows for pair in ((row.chosen, row.rejected), (row.rejected, row.chosen))]
        ids = [pair_ids(row.conversation, a, b, tokenizer) for row, a, b in orders]
    scores = of_run(ids)
    assert found_kind == kind and torch.equal(scores, of_folder(ids)) and scores.std() > 0.1
    padded = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
    plain = theirs(**padded).logits[:, 0].detach()
    assert torch.allclose(scores, 20 * torch.tanh(plain / 20) if kind == "pairwise" else plain, atol=1e-5)
    ours = ranks.run(1, _scored, str(run), ids)[0]
    assert torch.allclose(ours, plain, atol=1e-5)

    import_hf(tmp_path / "hf", tmp_path / "back")
    export_hf(tmp_path / "back", tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def _scored(run: str, ids: list[list[int]]) -> torch.Tensor:
    """Scores of our own head, each row a document of one pack."""
    import numpy as np

    from megatron_nb.config import from_yaml
    from megatron_nb.data.packing import pack
    from megatron_nb.model.attention import bounds
    from megatron_nb.model.gpt import build
    from megatron_nb.model.heads import ScoreRequest, score_head
    from megatron_nb.model.shape import ModelConfig
    from megatron_nb.parallel.topology import ParallelConfig, initialize
    from megatron_nb.records import Sample
    from megatron_nb.training.start import find_origin, load_start

    model = from_yaml(Path(run) / "config.yaml", ModelConfig, "model")
    initialize(ParallelConfig(), 1)
    chunks = build(model, ParallelConfig())
    load_start(find_origin(run, model), chunks, model, seed=0)
    batch = pack([Sample(np.array(row), np.zeros(len(row), np.float32), "x") for row in ids])
    request = ScoreRequest(batch.index, batch.cu_seqlens)
    with torch.no_grad():
        return chunks[0](
            batch.ids[None], None, None, labels=batch.targets[None], packed_seq_params=bounds(batch),
            output_processor=score_head, output_processor_context=request,
        )  # fmt: skip


@pytest.mark.parametrize(
    "kind, row, message",
    [
        ("pointwise", {"chosen": "a"}, "keys are chosen: a row has chosen and rejected, or an answer and its score; rename"),
        ("pairwise", {"prompt": "p", "response": "r", "score": 1.0}, "a graded answer: a pair-wise model compares two: rows"),
        ("pointwise", {"prompt": "p", "response": "r", "score": "high"}, "score is 'high': a score is a finite number; mend"),
    ],
)
def test_a_bad_row_stops_the_job_before_any_step_naming_file_line_and_remedy(ranks, tmp_path, words, kind, row, message):
    good = {"prompt": "p", "chosen": "good", "rejected": "bad"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (good, row)))
    words = [*words, "parallel=cpu1", f"runs_dir={tmp_path}", "name=bad", f"data.sources.a.path={tmp_path}/rows.jsonl"]
    found = ranks.run(1, _error, kind, words)[0]
    assert f"rows.jsonl:2: {message}" in found and "1 of 2 rows cannot be used" in found
    assert not (tmp_path / "bad" / "metrics.jsonl").exists()


def _error(kind: str, words: list[str]) -> str:
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            run_job("reward_model", [f"--config-name=reward_{kind}", *words])
        except SystemExit as stopped:
            assert stopped.code == 1
            return said.getvalue()
    raise AssertionError("the job did not stop")
