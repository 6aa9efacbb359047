"""The refinement job on gsm8k with wrong drafts planted, by a stub that redoes the sums: measured, killed, resumed."""

import gzip
import json
import random
import re
import sys
from collections import Counter

import pytest

from megatron_nb import refine_solutions
from megatron_nb.config import compose
from megatron_nb.data.formats import read
from tests.data.data_tokenizers import tiny
from tests.jobs.killed import run_job, run_killed
from tests.model.hf_folders import save_random
from tests.synthesis.refine_arithmetic import END, near, number, planted
from tests.synthesis.refine_phrases import LEAKS
from tests.synthesis.refine_stub import Stub

TASKS, AT_ONCE = 60, 4
KINDS = ("right", "slip", "slip", "misread", "end", "noise")
LEAKED = re.compile("|".join(re.escape(phrase).replace(r"\{answer\}", ".{1,12}?") for phrase in LEAKS))


@pytest.fixture(scope="module")
def rows(shared_data) -> list[dict]:
    """Problems with drafts: right, or wrong in one of several ways, or no solution at all."""
    with gzip.open(shared_data / "math" / "gsm8k_test.jsonl.gz") as file:
        problems = [json.loads(line) for line in file][:TASKS]
    rng, made = random.Random(7), []
    for place, row in enumerate(problems):
        kind = KINDS[place % len(KINDS)]
        draft = row["answer"] if kind == "right" else planted(row["answer"], kind, rng)
        made.append({"question": row["question"], "draft": draft, "answer": row["answer"], "kind": kind})
    return made


@pytest.fixture(scope="module")
def server():
    stub = Stub()
    yield stub
    stub.close()


@pytest.fixture(scope="module")
def words(tmp_path_factory, rows, server) -> list[str]:
    """A complete command line but for the run."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    endpoint = [f"refiner.endpoint.base_url={server.url}", "refiner.endpoint.model=stub", "refiner.endpoint.pause_s=0.01"]
    reasoner = [word.replace("refiner", "reasoner") for word in endpoint]
    same = "same.kind=normalised"  # math-verify has worker processes, which a rank of the pool cannot have
    prices = ["prices.refiner.prompt=1", "prices.refiner.reply=2"]
    return [f"prompts.sources.gsm8k.path={file}", *endpoint, *reasoner, *prices, same, f"concurrency={AT_ONCE}"]


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory, words, server):
    """(run folder, rows written, replies given) of a run that was never killed, on one rank."""
    folder, before = tmp_path_factory.mktemp("runs"), server.answered.total()
    (rows,) = ranks.run(1, run_job, "refine_solutions", [*words, f"runs_dir={folder}", "name=whole"])
    return folder / "whole", rows, server.answered.total() - before


def records_of(run) -> list[dict]:
    return [json.loads(line) for line in (run / "solutions" / "records.jsonl").read_text().splitlines()]


def right(answer: str | None, gold: str) -> bool:
    ends = END.findall(answer or "")
    return bool(ends) and near(number(ends[-1][1]), number(gold.rpartition("####")[2]))


def test_wrong_drafts_become_right_and_no_accepted_reasoning_gives_the_solution_away(whole, rows):
    records, summary = records_of(whole[0]), json.loads((whole[0] / "summary.json").read_text())
    accepted = [one for one in records if one["accepted"]]
    assert len(records) == TASKS == summary["tasks"] and len(accepted) == summary["accepted"] > 20
    before, after = (sum(right(one[name], one["reference"]) for one in records) / TASKS for name in ("draft", "final"))
    sure = sum(right(one["final"], one["reference"]) for one in accepted) / len(accepted)
    print(f"right: drafts {before:.0%}, refined {after:.0%}, of {len(accepted)} accepted {sure:.0%}")
    assert before < 0.25 and after > before + 0.25 and sure > after  # by this file's own count ...
    told = [summary[f"correct_{name}"] for name in ("draft", "final", "accepted")]
    assert told == pytest.approx([before, after, sure], abs=0.04)  # ... and by the job's, which reads any number of a noise
    kinds = {row["draft"].strip(): row["kind"] for row in rows}
    assert not [one for one in accepted if kinds[one["draft"]] == "noise"]  # nobody could make a solution of these
    leaks = [one for one in records for reasoning in one["reasonings"] if LEAKED.search(reasoning["text"])]
    assert len(leaks) >= 3 and not any(LEAKED.search(one["reasoning_content"]) for one in accepted)
    for one in accepted:
        assert not re.search(r"It comes to|That is clear", one["reasoning_content"])  # told first, copied first
        worked_out = number(one["reasonings"][-1]["text"].rpartition("makes")[2])
        assert near(worked_out, number(END.findall(one["final"])[-1][1]))
    rejected = Counter(rule for one in records for rule in one["rejected_by"])
    assert {"open_items", "announced", "another_answer"} <= set(rejected) and any("leak:" in rule for rule in rejected)
    assert {name: summary[f"rejected_{name.replace(':', '_')}"] for name in rejected} == rejected
    assert len(accepted) + sum(bool(one["rejected_by"]) for one in records) == TASKS


def test_the_files_are_a_data_set_with_a_report_of_rules_and_tokens(whole, server):
    folder, _, replies = whole[0] / "solutions", *whole[1:]
    accepted = {one["id"]: one for one in records_of(whole[0]) if one["accepted"]}
    conversations = list(read(str(folder / "solutions.jsonl"), "refined"))
    assert len(conversations) == len(accepted)
    for one in conversations:
        turn = one.messages[-1]
        record = accepted[one.sample_id]
        assert (turn["content"], turn["reasoning_content"], turn["loss"]) == (record["final"], record["reasoning_content"], 1)
    report = json.loads((folder / "report.json").read_text())
    assert sum(step["calls"] for step in report["tokens"].values()) == replies
    assert set(report["tokens"]) == {"checklist", "critique", "revision", "reasoning"}
    critique = report["tokens"]["critique"]
    assert critique["cost"] == pytest.approx((critique["prompt_tokens"] + 2 * critique["reply_tokens"]) / 1e6)
    text = (folder / "report.md").read_text()
    assert "| open_items |" in text and "wrong -> right" in text
    assert "stub" in (folder / "README.md").read_text()


@pytest.mark.parametrize("die_at", [50, 260])
def test_a_job_killed_in_refinement_or_reasoning_leaves_the_same_files_and_asks_nothing_twice(
    ranks, tmp_path, words, whole, server, die_at
):
    words, (expected, rows, replies) = [*words, f"runs_dir={tmp_path}", "name=killed"], whole
    server.answered.clear()
    run_killed(1, "refine_solutions", words, die_at)
    assert not (tmp_path / "killed" / "summary.json").exists()
    (resumed,) = ranks.run(1, run_job, "refine_solutions", words)
    assert resumed == rows - (die_at - 1)
    twice = sum(count - 1 for count in server.answered.values())
    assert set(server.answered.values()) <= {1, 2} and twice <= AT_ONCE  # those that were under way
    assert len(server.answered) == replies
    for name in ("records.jsonl", "solutions.jsonl", "report.md"):
        told = [(run / "solutions" / name).read_text() for run in (expected, tmp_path / "killed")]
        assert told[0] == told[1]
    server.answered.clear()
    assert ranks.run(1, run_job, "refine_solutions", words) == [0] and not server.answered  # all is on disk


def test_two_ranks_share_the_tasks_and_a_checkpoint_answers_as_an_endpoint_does(ranks, tmp_path, words, server):
    save_random(tmp_path / "model", vocabulary=400)
    tiny().save_pretrained(tmp_path / "model")
    engine = ["engine.kv_cache_gb=0.01", "engine.block_size=16", "engine.max_concurrency=8", "refiner.max_tokens=12"]
    rows = [{"question": f"{number} + 3?", "draft": "5"} for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [word for word in words if "endpoint" not in word and "sources" not in word] + engine
    words += [f"refiner.checkpoint={tmp_path}/model", f"runs_dir={tmp_path}", "name=babble"]
    words += [f"prompts.sources.a.path={tmp_path}/rows.jsonl", "wording.checklist='{question}'"]  # the model is small
    with pytest.raises(AssertionError, match="none of 6 tasks is accepted, 0 were not"):  # it babbles, and the job says so
        ranks.run(2, run_job, "refine_solutions", words)
    records = records_of(tmp_path / "babble")
    assert {rule for one in records for rule in one["rejected_by"]} == {"unreadable_checklist"}
    files = sorted((tmp_path / "babble" / "synthesis").glob("refiner-*.rank-*.jsonl"))
    assert [len([line for line in file.read_text().splitlines() if '"text"' in line]) for file in files] == [6, 6]  # two tries


def test_a_dry_run_tells_tasks_models_and_rules_and_does_nothing(monkeypatch, capsys, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["refine_solutions", *words, "--dry-run"])
    refine_solutions.main()
    printed = capsys.readouterr().out
    for told in ("60: 60 with a draft, 60 with a reference", "at most 480 calls", "leak phrases of 5 kinds", "0 open items"):
        assert told in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("rounds=0", "at least 1"),
        ("refiner.samples=2", "must be 1"),
        ("prices.critic.reply=1", "must be one of"),
        ("leaks.phrases.own=['(']", "no regular expression"),
        ("leaks.phrase=1", "the nearest is 'leaks.phrases'"),
    ],
)
def test_a_wrong_value_is_refused_before_any_work(words, word, rule):
    with pytest.raises(ValueError, match=rule):
        compose(refine_solutions.RefineConfig, "refine_solutions", [*words, word])
