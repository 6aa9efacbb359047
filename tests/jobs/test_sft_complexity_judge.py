"""The complexity judge from programs to figures: its stages on a tiny model, and the figures of known verdicts."""

import json
import os
import sys

import pytest

from megatron_nb import sft, synthesize_complexity
from megatron_nb.config import compose
from megatron_nb.sandbox.ladder import LADDER
from tests.data.data_tokenizers import tiny
from tests.rewards.endpoint_stub import Stub
from tools import eval_complexity_judge

TINY = [
    "model=tiny", "model.vocab_size=400", "model.num_layers=1", "parallel=cpu1", "seq_len=2048", "global_batch_size=1",
    "num_steps=2", "validate_every=2", "checkpoint.every=2", "optimizer.warmup_steps=1", "log.wandb=off", "data.workers=0",
    "data.loader_workers=0",
]  # fmt: skip


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def synthesized(folder, *words: str):
    """The programs' folder and the summary of a run with these settings."""
    stage = ["train=36", "heldout=24", "seen=12", "name=programs", f"runs_dir={folder}", *words]
    synthesize_complexity.main(compose(synthesize_complexity.ComplexityConfig, "synthesize_complexity", stage))
    return folder / "programs" / "programs", json.loads((folder / "programs" / "summary.json").read_text())


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return synthesized(tmp_path_factory.mktemp("runs"))[0]


def test_programs_are_evenly_spread_over_the_classes_and_in_one_file_only(programs):
    texts = {}
    for name, each in (("train", 3), ("heldout", 2), ("seen", 1)):
        rows = rows_of(programs / f"{name}.jsonl")
        assert sorted(row["complexity"] for row in rows) == sorted(each * LADDER)
        texts[name] = [row["messages"][0]["content"] for row in rows]
    assert len(set(sum(texts.values(), []))) == 36 + 24 + 12
    held, rest = ({row["template"] for name in names for row in rows_of(programs / f"{name}.jsonl")}
                  for names in (["heldout"], ["train", "seen"]))  # fmt: skip
    assert not held & rest


def test_programs_whose_costs_contradict_the_label_are_dropped_and_counted(tmp_path, monkeypatch):
    async def measure(self, source, function, generator):
        compile(source, "program", "exec"), compile(generator, "generator", "exec")
        assert f"def {function}(" in source
        return type("Estimate", (), {"complexity": "n" if "return" in source and "itertools" not in source else "unknown"})

    monkeypatch.setattr(synthesize_complexity.CodeJudge, "complexity", measure)
    folder, told = synthesized(tmp_path, "verify=[heldout]")
    rows = rows_of(folder / "heldout.jsonl")
    assert told["verify_agreed"] == 2 and told["verify_differed"] + told["verify_unknown"] == 22
    assert len(rows) == told["programs_heldout"] == 24 - told["verify_differed"] < 24
    assert all(row["empirical"] in (row["complexity"], "unknown") for row in rows)


def test_programs_of_others_go_to_files_of_their_own_and_what_is_dropped_is_told(tmp_path):
    labels = ["linear"] * 8 + ["whatever", None]
    rows = [{"src": f"x = {number}", "complexity": label} for number, label in enumerate(labels)]
    rows.append(rows[0])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"sources.cc.path={tmp_path}/rows.jsonl", "sources.cc.format=codecomplex", "sources_heldout=0.5"]
    folder, told = synthesized(tmp_path, *words)
    parts = [rows_of(folder / f"{part}-cc.jsonl") for part in ("train", "heldout")]
    assert sum(map(len, parts)) == 8 and all(parts)
    dropped = {key.removeprefix("dropped_cc_"): value for key, value in told.items() if key.startswith("dropped_cc")}
    assert dropped == {"label_not_on_ladder": 1, "no_label": 1, "duplicate": 1}


@pytest.mark.parametrize(
    ("word", "rule"),
    [("verify=[rows]", "must be some of"), ("train=-1", "not be negative"), ("sources_heldout=1", "must be in"),
     ("concurrency=0", "at least 1"), ("sources.a.path=x", "format")],
)  # fmt: skip
def test_a_wrong_setting_is_refused(word, rule):
    with pytest.raises(ValueError, match=rule):
        compose(synthesize_complexity.ComplexityConfig, "synthesize_complexity", [word])


def _train(words: list[str]) -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    sys.argv = ["sft", "--config-name", "sft_complexity_judge", *words]
    sft.main()


def _evaluate(words: list[str]) -> int:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    return eval_complexity_judge.main(words)


def test_the_stage_trains_on_the_programs_and_its_checkpoint_is_evaluated(ranks, tmp_path, programs):
    tiny().save_pretrained(tmp_path / "tokenizer")
    files = [f"data.sources.programs.path={programs}/train.jsonl", f"data.validation.heldout.path={programs}/heldout.jsonl"]
    own = [f"data.tokenizer={tmp_path}/tokenizer", f"data.cache_dir={tmp_path}/cache", f"runs_dir={tmp_path}", "name=judge"]
    evaluation = [f"{tmp_path}/judge", "--programs", str(programs), "--limit", "6", "--empirical", "0", "--answers", "3"]
    ranks.run(1, _train, [*TINY, *files, *own])
    assert ranks.run(1, _evaluate, [*evaluation, "--max-tokens", "8"]) == [0]
    assert json.loads((tmp_path / "judge" / "summary.json").read_text())["heldout_loss_after"] > 0
    told = json.loads((tmp_path / "judge" / "complexity_judge" / "summary.json").read_text())
    assert told["programs"] == told["programs_seen"] == 6 and told["seed"] == 1 and told["wall_s"] > 0
    assert 0 <= told["accuracy"] <= told["coverage"] <= 1 and told["majority_class"] == pytest.approx(1 / 6)


def test_the_figures_are_those_of_the_verdicts_and_of_the_costs(tmp_path, programs, monkeypatch, capsys):
    async def costs(rows, judge):
        return ["n", "unknown", *[row["complexity"] for row in rows[2:]]]

    monkeypatch.setattr(eval_complexity_judge, "measured", costs)
    stub = Stub()
    stub.said = ["O(n)"]
    try:
        given = ["--url", stub.url, "--programs", str(programs), "--out", str(tmp_path), "--answers", "3", "--empirical", "12"]
        assert eval_complexity_judge.main(given) == 0
    finally:
        stub.close()
    told = json.loads((tmp_path / "summary.json").read_text())
    assert (told["accuracy"], told["coverage"], told["accuracy_seen"]) == (pytest.approx(2 / 24), 1.0, pytest.approx(1 / 12))
    assert told["within_one_rank"] == pytest.approx(6 / 24)  # sqrt n, n and n log n
    counted = [row["complexity"] for row in (rows_of(programs / "heldout.jsonl"))]
    assert told["majority_class"] == pytest.approx(2 / 24) and len(counted) == told["programs"]
    assert told["empirical_unknown"] == pytest.approx(1 / 12) and told["witnesses_agree"] in (1 / 12, 2 / 12)
    assert told["agreement"] == pytest.approx(told["witnesses_agree"] * 12 / 11)
    assert "held-out programs, label by line" in capsys.readouterr().out


def test_confusion_names_label_and_verdict():
    rows = [{"complexity": "n"}, {"complexity": "n"}, {"complexity": "n!"}]
    lines = eval_complexity_judge.confusion(rows, ["n", "unknown", "2^n"]).splitlines()
    columns = lines[0].replace(" ", "").removeprefix("label")
    assert columns.startswith("1logn") and len(lines) == 13
    by_label = {line[:12].strip(): line[12:].split() for line in lines[1:]}
    assert by_label["n"][3] == "1" and by_label["n"][12] == "1" and by_label["n!"][10] == "1"


def test_programs_are_chosen_evenly_over_the_classes():
    rows = [{"complexity": cost} for cost in ("n", "n", "n", "1", "1", "n!")]
    assert eval_complexity_judge.evenly(rows, 3) == [0, 3, 5]
