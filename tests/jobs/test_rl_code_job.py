"""The code stages as jobs: programs are judged in the sandbox; a judge killed amid a batch costs rollouts, not the step."""

import json
import os
import re
import subprocess
import sys

import pytest

from megatron_nb.rollout.store import read_step
from megatron_nb.sandbox.isolation import IsolationMissing
from megatron_nb.sandbox.pool import Pool
from tests.data.data_tokenizers import tiny

MODEL = ["model=tiny", "model.vocab_size=400", "model.hidden_size=32", "model.head_dim=8", "model.ffn_hidden_size=64"]
TESTS = [{"call": "f", "args": [[1, 2, 3]], "expected": 6}, {"call": "f", "args": [[3, 0]], "expected": 3}]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A command line but for stage, reward and run: a batch of 2 problems with 3 answers each."""
    folder = tmp_path_factory.mktemp("problems")
    tiny().save_pretrained(folder / "tokenizer")
    fields = {"language": "python", "tests": TESTS, "time_limit_s": 5.0, "memory_limit_mb": 256, "function": "f"}
    fields |= {"optimal": "n", "generator": "def make(n):\n    return [list(range(n))]"}
    rows = [{"id": f"p{number}", "prompt": f"add up {'some ' * number}numbers", **fields} for number in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [f"prompts.sources.a.path={folder}/rows.jsonl", f"prompts.tokenizer={folder}/tokenizer"]
    sizes = ["collect.num_prompts=2", "collect.group_size=3", "collect.concurrency=1", "sampling.max_tokens=8", "num_steps=1"]
    engine = ["engine.native.kv_cache_gb=0.01", "engine.native.block_size=16", "engine.native.max_concurrency=8"]
    rest = ["update.pack_tokens=512", "log.wandb=off", "reward.terms.code.settings.thinking=forbidden"]
    return [*MODEL, "parallel=cpu1", "answers=short", *prompts, *sizes, *engine, *rest]


@pytest.fixture(scope="module")
def isolation():
    try:
        Pool(workers=1).close()
    except IsolationMissing as error:
        pytest.skip(str(error))


def _rl(words):
    """What `python -m megatron_nb.rl WORDS` runs on this rank."""
    from megatron_nb import rl

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    sys.argv = ["rl", *words]
    rl.main()


def test_programs_are_rewarded_by_tests_and_class_in_the_sandbox(ranks, tmp_path, words, isolation):
    stage = ["--config-name", "rl_code_complexity", "reward.terms.code.kind=tests.jobs.rl_code_reward.Measured"]
    ranks.run(1, _rl, [*stage, *words, f"runs_dir={tmp_path}", "name=run"])
    for rollout in read_step(tmp_path / "run", 1):
        score, passes = rollout.score, rollout.index < 2
        assert score.parts["code/pass_rate"] == (1.0 if passes else 0.0)
        assert score.reward == pytest.approx(0.1 + score.parts["code/pass_rate"] + score.parts["code/time"])
        if passes and not score.parts["code/unknown"]:  # on a very busy machine it may not be told
            assert score.parts["code/time"] == 0.5
        if not passes:
            assert "test 0: wrong answer" in score.reason
    (row,) = [row for row in map(json.loads, (tmp_path / "run" / "metrics.jsonl").open()) if row["step"] == 1]
    assert row["reward_part/code/pass_rate"] == pytest.approx(2 / 3)


def test_a_judge_killed_amid_a_batch_makes_rollouts_invalid_and_the_step_completes(ranks, tmp_path, words, isolation):
    command = [sys.executable, "-m", "megatron_nb.sandbox", "serve", "--port", "0", "--workers", "1"]
    service = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = next(found[0] for line in service.stderr if (found := re.findall(r"http://[\w.:]+", line)))
        settings = [f"victim={service.pid}", "after=3", f"judge.urls=[{url}]", "judge.retries=0"]
        stage = ["--config-name", "rl_code_pass_rate", "reward.terms.code.kind=tests.jobs.rl_code_reward.Killing"]
        stage += [f"+reward.terms.code.settings.{setting}" for setting in settings] + ["reward.retries=0"]
        ranks.run(1, _rl, [*stage, *words, f"runs_dir={tmp_path}", "name=run"])
    finally:
        service.kill()
        service.wait()
        service.stderr.close()
    rollouts = read_step(tmp_path / "run", 1)
    valid = [rollout for rollout in rollouts if rollout.score.reward is not None]
    assert len(rollouts) == 6 and len(valid) == 3
    assert all(rollout.score.reward == pytest.approx(1.1 if rollout.index < 2 else 0.1) for rollout in valid)
    assert all("JudgeFailed" in rollout.score.reason and rollout.advantage is None or rollout in valid for rollout in rollouts)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1
