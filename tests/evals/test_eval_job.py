"""The evaluation job: a checkpoint on two ranks, killed and resumed; an endpoint; a dry run; the recipe's tasks; the bridge."""

import json
import sys

import pytest
import yaml
from safetensors.torch import load_file, save_file

from megatron_nb import evaluate
from megatron_nb.asking.askers import AnswererConfig
from megatron_nb.asking.loading import check_room
from megatron_nb.config import STAGES, compose
from megatron_nb.evals import lm_eval
from megatron_nb.evals.kinds import make_task
from megatron_nb.rollout.engine import Sampling
from megatron_nb.rollout.engines import EngineConfig
from megatron_nb.rollout.native_config import NativeConfig
from tests.data.data_tokenizers import tiny
from tests.evals.scripted_asker import endpoint
from tests.jobs.killed import run_job, run_killed
from tests.model.hf_folders import save_random
from tests.rollout.stub_server import StubServer

QUESTIONS = 9


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """Words that name two tasks, and what the training has seen of one."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"id": f"q{n}", "question": f"is {n} even?", "choices": ["yes", "no"], "answer": n % 2} for n in range(QUESTIONS)]
    (folder / "choice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rules = {"prompt": "speak", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], "key": 1}
    (folder / "rules.jsonl").write_text(json.dumps(rules) + "\n")
    (folder / "seen.json").write_text(json.dumps({"parity": ["q0", "q1"]}))
    return [
        "tasks.parity.kind=choice", f"tasks.parity.path={folder}/choice.jsonl", "tasks.parity.samples=2",
        "tasks.rules.kind=instructions", f"tasks.rules.path={folder}/rules.jsonl", f"exclude={folder}/seen.json",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory, data) -> list[str]:
    """A complete command line but for the run: a random model as its own checkpoint."""
    folder = tmp_path_factory.mktemp("model")
    save_random(folder, vocabulary=400, context=1024)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][tiny().eos_token_id] *= 4  # answers end now and then
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tiny().save_pretrained(folder)
    engine = ["engine.native.kv_cache_gb=0.02", "engine.native.block_size=16", "engine.native.max_concurrency=8"]
    return [*data, *engine, f"checkpoint={folder}", "sampling.max_tokens=12", "concurrency=1"]


def outcomes(run, task) -> list[dict]:
    return [json.loads(line) | {"seconds": 0} for line in (run / "outcomes" / f"{task}.jsonl").read_text().splitlines()]


def test_a_killed_evaluation_of_a_checkpoint_on_two_ranks_goes_on_to_the_same_outcomes(ranks, tmp_path, words):
    words, whole, killed = [*words, f"runs_dir={tmp_path}"], tmp_path / "whole", tmp_path / "killed"
    rows = ranks.run(2, run_job, "evaluate", [*words, "name=whole"])
    assert sum(rows) == 2 * QUESTIONS + 1 and min(rows) > 0
    run_killed(2, "evaluate", [*words, "name=killed"], 5)
    assert not (killed / "results.json").exists()
    assert sum(ranks.run(2, run_job, "evaluate", [*words, "name=killed"])) <= sum(rows) - 4
    for task in ("parity", "rules"):
        assert outcomes(whole, task) == outcomes(killed, task)
    results = json.loads((whole / "results.json").read_text())
    parity, summary = results["parity"], json.loads((whole / "summary.json").read_text())
    assert next(iter(parity)) == "accuracy" and parity["items"] == QUESTIONS and parity["attempts"] == 2 * QUESTIONS
    assert parity["excluded"] == 2 and "clean_accuracy" in parity and parity["tokens_out"] > 0 and parity["invalid"] == 0
    assert summary["rules_prompt_strict"] == results["rules"]["prompt_strict"]
    assert "| parity | accuracy |" in (whole / "results.md").read_text()
    assert ranks.run(2, run_job, "evaluate", [*words, "name=killed"]) == [0, 0]  # all is on disk


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["tasks.parity.max_tokens=900", "engine.native.kv_cache_gb=2e-4"], r"max_tokens=900 does not fit .*gb=0\.0002 holds"),
        (["tasks.parity.max_tokens=1024"], "max_tokens=1024 leaves no room for a prompt in the 1024 tokens"),
    ],
)
def test_answers_that_the_cache_does_not_hold_are_refused_by_the_dry_run(tmp_path, words, more, complaint):
    config = compose(evaluate.EvaluateConfig, "evaluate", [*words, *more, f"runs_dir={tmp_path}", "launch.dry_run=true"])
    with pytest.raises(ValueError, match=complaint):
        evaluate.main(config)


def test_the_size_of_cache_that_is_told_is_enough(words):
    checkpoint = next(word.partition("=")[2] for word in words if word.startswith("checkpoint="))
    answerer = AnswererConfig(checkpoint, max_tokens=12)

    def engine(gb: float) -> EngineConfig:
        return EngineConfig(native=NativeConfig(kv_cache_gb=gb, block_size=16))

    with pytest.raises(ValueError, match="episodes of 900 does not fit") as refused:
        check_room(answerer, engine(2e-4), {"episodes of 900": 900})
    enough = float(str(refused.value).partition("at least ")[2].split(",")[0])
    check_room(answerer, engine(enough), {"episodes of 900": 900})
    with pytest.raises(ValueError, match="does not fit"):
        check_room(answerer, engine(enough * 0.97), {"episodes of 900": 900})


def test_servers_that_get_the_checkpoints_weights_answer_as_the_engine_in_the_ranks(ranks, tmp_path, words):
    checkpoint = next(word.partition("=")[2] for word in words if word.startswith("checkpoint="))
    words = [*words, "sampling.temperature=0", "tasks.parity.samples=1", "exclude=null", f"runs_dir={tmp_path}"]
    with StubServer(checkpoint) as stub:
        served = ["engine.kind=server", f"engine.server.urls=[{stub.url}]", "engine.server.transfer=files",
                  f"engine.server.folder={tmp_path}/weights"]  # fmt: skip
        ranks.run(1, run_job, "evaluate", [*words, *served, "name=served"])
        assert any(path == "/v1/completions" for path, _ in stub.requests)
    ranks.run(1, run_job, "evaluate", [*words, "name=native"])
    for task in ("parity", "rules"):
        assert outcomes(tmp_path / "served", task) == outcomes(tmp_path / "native", task)


def test_an_endpoint_is_evaluated_with_its_cost_and_its_answers_are_kept_in_a_cache(ranks, tmp_path, data):
    asked = []

    def say(messages):
        asked.append(messages)
        return "Answer: A" if "even" in messages[-1]["content"] else "No commas here."

    with endpoint(say) as stub:
        words = [*data, f"endpoint.base_url={stub.url}", "endpoint.model=m", f"runs_dir={tmp_path}", f"cache={tmp_path}/cache",
                 "price_out=1e6"]  # fmt: skip
        ranks.run(1, run_job, "evaluate", [*words, "name=one"])
        first = len(asked)
        ranks.run(1, run_job, "evaluate", [*words, "name=two"])
    assert first == 2 * QUESTIONS + 1 == len(asked)
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two")]
    assert results[0]["rules"]["prompt_strict"] == 1 and results[0]["parity"]["favourite"] == 1
    for told in results:
        told["parity"].pop("seconds_mean"), told["rules"].pop("seconds_mean")
    assert results[0] == results[1] and results[0]["rules"]["cost"] == results[0]["rules"]["tokens_out"]


def test_a_dry_run_tells_model_and_tasks_and_does_nothing(monkeypatch, capsys, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["evaluate", *words, "--dry-run"])
    evaluate.main()
    printed = capsys.readouterr().out
    for told in ("parameters, native engine", "9 items x 2, at most 12 tokens, temperature 0.6, top_p 0.95", "rules"):
        assert told in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        (["only=[math]"], "there is no task math; there are parity, rules"),
        (["sampling.temperature=0", "tasks.rules.samples=2"], "tasks.rules: samples=2 with temperature=0"),
        (["concurrency=0"], "at least 1"),
        (["tasks.rules.pth=x"], "the nearest is 'tasks.rules.path'"),
        (["tasks.rules.path=nowhere.jsonl"], "names no data file"),
        (["endpoint.base_url=http://x"], "both given"),
    ],
)
def test_wrong_words_are_refused_before_any_work(words, more, rule):
    with pytest.raises(ValueError, match=rule):
        config = compose(evaluate.EvaluateConfig, "evaluate", [*words, *more])
        tasks = evaluate.build_tasks(config)
        evaluate.describe_job(config, tasks, {task.name: task.items() for task in tasks})


def test_every_task_of_the_recipe_is_known_with_its_settings():
    config = compose(evaluate.EvaluateConfig, "evaluate", ["tasks=recipe", "data_dir=/data", "checkpoint=x"])
    said = yaml.safe_load((STAGES / "tasks" / "recipe.yaml").read_text())
    assert list(config.tasks) == list(said) and config.tasks["humaneval"]["path"] == "/data/HumanEval.jsonl.gz"
    for name, settings in config.tasks.items():
        assert make_task(name, settings, Sampling(max_tokens=8)).samples == said[name].get("samples", 1)


def test_the_bridge_writes_the_command_and_reads_the_figures(tmp_path, capsys):
    common = ["--run", str(tmp_path), "--url", "http://h:1/", "--model", "m", "--tasks", "mmlu,arc"]
    lm_eval.main(common)
    told = capsys.readouterr().out
    assert "local-chat-completions" in told and "base_url=http://h:1/v1/chat/completions" in told and "--tasks mmlu,arc" in told
    lm_eval.main([*common, "--tokenizer", "/tok", "--limit", "5"])
    told = capsys.readouterr().out
    assert "local-completions" in told and "tokenizer=/tok" in told and "--limit 5" in told and "chat_template" not in told
    row = {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.1, "exact_match,strict": 0.25}
    row["exact_match_stderr,strict"] = "N/A"
    (tmp_path / "results.json").write_text('{"ours": {"score": 1.0}}')
    (tmp_path / "results_1.json").write_text(json.dumps({"results": {"arc": row}}))
    lm_eval.main(["--run", str(tmp_path), "--read", str(tmp_path / "results_1.json")])
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["lm_eval_arc"] == pytest.approx({"acc": 0.5, "acc_low": 0.304, "acc_high": 0.696, "exact_match_strict": 0.25})
    assert found["ours"] == {"score": 1.0}
    with pytest.raises(ValueError, match="no results file of lm-evaluation-harness"):
        lm_eval.read_results(tmp_path / "results.json")
