"""The RL job: killed anywhere it goes on without losing a rollout and ends with the same bits; the same at every layout."""

import asyncio
import inspect
import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from megatron_nb.rollout.store import read_step
from tests.data.data_tokenizers import tiny
from tests.jobs.test_resume_job import _content, _equal
from tests.rollout.stub_server import StubServer
from tools.rank_pool import RankPool

STEPS = 4
MODEL = ["model=tiny", "model.vocab_size=400", "model.hidden_size=32", "model.head_dim=8", "model.ffn_hidden_size=64"]
LAYOUTS = {
    "dp2": [], "tp2": ["parallel.tensor=2"], "pp2": ["parallel.pipeline=2"], "cp2": ["parallel.context=2"],
    "tp2, replica of 2": ["parallel.tensor=2", "engine.native.tensor=2"],
}  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    """A complete command line but for run and layout."""
    folder = tmp_path_factory.mktemp("prompts")
    tiny().save_pretrained(folder / "tokenizer")
    draw, some = random.Random(5), ["some", "words", "of", "a", "question", "and", "an", "answer", "long", "short"]
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(12):
            file.write(json.dumps({"id": f"p{number}", "prompt": " ".join(draw.choices(some, k=draw.randint(1, 6)))}) + "\n")
    prompts = [f"prompts.sources.a.path={folder}/rows.jsonl", "prompts.heldout_share=0.2", "prompts.heldout_limit=2"]
    sizes = ["collect.num_prompts=2", "collect.group_size=3", "collect.concurrency=1", "sampling.max_tokens=8"]
    engine = ["engine.native.kv_cache_gb=0.01", "engine.native.block_size=16", "engine.native.max_concurrency=8"]
    reward = ["collect.overlong=null", "~reward.terms.model", "reward.terms.words.kind=tests.jobs.rl_reward.Distinct"]
    steps = [f"num_steps={STEPS}", "checkpoint.every=2", "checkpoint.keep_every=2", "evaluation.every=3"]
    rate = ["optimizer.lr=2e-2", "optimizer.warmup_steps=0", "update.pack_tokens=512", "log.wandb=off"]
    prompts.append(f"prompts.tokenizer={folder}/tokenizer")
    return ["--config-name", "rl_pointwise", *MODEL, "answers=short", *prompts, *sizes, *engine, *reward, *steps, *rate]


def _rl(words: list[str], die_in: str = "", at: int = 0) -> list[str]:
    """What `torchrun -m megatron_nb.rl WORDS` runs on this rank; killed at the `at`th call of a function. Names of requests."""
    import torch.distributed as dist

    from megatron_nb import rl
    from megatron_nb.rollout.native import NativeEngine
    from megatron_nb.training import checkpoint
    from tests.jobs.rl_reward import Distinct

    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": str(dist.get_rank())}
    sys.argv = ["rl", *words]
    places = {
        "generation": (NativeEngine, "generate"), "scoring": (Distinct, "score_rollout"), "training": (rl.Trainer, "step"),
        "sync": (NativeEngine, "load_weights"), "saving": (checkpoint, "seal"), "signal": (NativeEngine, "generate"),
    }  # fmt: skip
    requests, calls = [], dict.fromkeys(places, 0)
    kept = {place: getattr(*place) for place in places.values()}

    def watched(name, function):
        def note(*args):
            calls[name] += 1
            if name == die_in and calls[name] == at:
                os.kill(os.getpid(), signal.SIGTERM if name == "signal" else signal.SIGKILL)
            if function is kept[NativeEngine, "generate"]:
                requests.append(args[1].request_id)
            return name == die_in == "signal" and calls[name] == at

        def call(*args, **kwargs):
            note(*args)
            return function(*args, **kwargs)

        async def call_async(*args, **kwargs):
            if note(*args):
                await asyncio.sleep(2)  # longer than a leader goes without looking: it must not get through the step before
            return await function(*args, **kwargs)

        return call_async if inspect.iscoroutinefunction(function) else call

    for name in dict.fromkeys(["signal" if die_in == "signal" else "generation", die_in or "generation"]):
        owner, attribute = places[name]
        setattr(owner, attribute, watched(name, kept[owner, attribute]))
    try:
        rl.main()
    finally:
        for (owner, attribute), function in kept.items():
            setattr(owner, attribute, function)
    return list(dict.fromkeys(requests))


def _finished(run: Path) -> set[str]:
    """Names of the rollouts that lie in the pending files."""
    found = set()
    for path in (run / "rollouts" / "pending").glob("*.jsonl"):
        for line in path.read_text().split("\n"):
            if line.startswith('{"rows"'):
                row = json.loads(line)["rows"][0]
                found.add(f"{row['group_id']}/{row['index']}/0.0")
    return found


def _metrics(run: Path) -> list[dict]:
    """What a step computed, timings left out."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    leave = ("time", "seconds", "peak_memory_gb", "reused", "generated_tokens", "per_s", "_s")
    return [{key: value for key, value in row.items() if not key.endswith(leave) and "tokens_per_s" not in key} for row in rows]


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory, words) -> Path:
    """The run of a job that was never killed."""
    folder = tmp_path_factory.mktemp("whole")
    ranks.run(1, _rl, [*words, "parallel=cpu1", f"runs_dir={folder}", "name=whole"])
    return folder / "whole"


def same_run(whole: Path, run: Path) -> None:
    """The same rollouts, numbers and final bits."""
    for kind, steps in (("step", range(1, STEPS + 1)), ("heldout", (0, 3, 4))):
        for step in steps:
            assert read_step(run, step, kind) == read_step(whole, step, kind), (kind, step)
    assert _metrics(run) == _metrics(whole)
    expected, found = (_content(path / f"checkpoints/step-{STEPS:08d}") for path in (whole, run))
    assert expected.keys() == found.keys()
    different = [key for key, value in expected.items() if not _equal(value, found[key])]
    assert [key for key in different if "/python/" not in key] == []
    assert not list((run / "rollouts" / "pending").iterdir())
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS


# a batch is 6 rollouts, an evaluation 2; all of it within step 4, after the checkpoint of step 2
KILLS = {"generation": 2 + 18 + 2 + 4, "scoring": 2 + 18 + 2 + 4, "training": 4, "sync": 5, "saving": 2}


@pytest.mark.parametrize("place", KILLS)
def test_a_job_killed_in(ranks, tmp_path, words, whole, place):
    words = [*words, "parallel=cpu1", f"runs_dir={tmp_path}", "name=killed"]
    victims = RankPool(1)
    try:
        with pytest.raises(AssertionError, match="died"):
            victims.run(1, _rl, words, place, KILLS[place])
    finally:
        victims.close()
    run = tmp_path / "killed"
    assert [path.name for path in sorted((run / "checkpoints").glob("step-*"))] == ["step-00000002"]
    finished = _finished(run)
    assert {name.split(".")[0] for name in finished} >= {"step3", "step4"}
    (requests,) = ranks.run(1, _rl, words)
    assert not finished & set(requests)
    assert {name for name in finished | set(requests) if name.startswith(("step3", "step4"))} == {
        f"{rollout.rollout_id}/0.0" for step in (3, 4) for rollout in read_step(whole, step)
    }
    same_run(whole, run)


def test_a_job_asked_to_stop_while_it_samples_saves_leaves_with_85_and_goes_on(ranks, tmp_path, words, whole):
    words = [*words, "parallel=cpu1", f"runs_dir={tmp_path}", "name=stopped"]
    pool = RankPool(1)
    try:
        with pytest.raises(AssertionError, match="SystemExit: 85"):
            pool.run(1, _rl, words, "signal", 2 + 12 + 2)  # in step 3
    finally:
        pool.close()
    run = tmp_path / "stopped"
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000002"]
    assert {name.split(".")[0] for name in _finished(run)} >= {"step3"}
    (requests,) = ranks.run(1, _rl, words)
    assert requests and not any(name.startswith(("step1", "step2")) for name in requests)
    same_run(whole, run)


def test_beside_a_server_batches_are_at_most_k_updates_old_and_a_kill_loses_none_that_is_finished(ranks, tmp_path, words):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, rope_theta=1e4, rms_norm_eps=1e-5, tie_word_embeddings=True, max_position_embeddings=1024,
    )  # fmt: skip
    with StubServer(model=LlamaForCausalLM(shape)) as stub:
        stub.token_delay = 0.01
        server = ["engine=server", f"engine.server.urls=[{stub.url}]", "engine.server.transfer=files", "num_steps=5"]
        words = [*words, *server, f"engine.server.folder={tmp_path}/weights", "collect.staleness=1", "collect.concurrency=6"]
        words = [*words, "parallel=cpu1", f"runs_dir={tmp_path}", "name=run"]
        victims = RankPool(1)
        try:
            with pytest.raises(AssertionError, match="died"):
                victims.run(1, _rl, words, "training", 4)
        finally:
            victims.close()
        run = tmp_path / "run"
        finished = {name for name in _finished(run) if name.startswith(("step3", "step4", "step5"))}
        asked = stub.count("/v1/completions")
        ranks.run(1, _rl, words)
        again = stub.count("/v1/completions") - asked
    assert len(finished) >= 12  # steps 3 and 4
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = {row["step"]: row for row in rows if "reused" in row}
    assert list(rows) == [1, 2, 3, 4, 5] and rows[1]["staleness_max"] == 0
    assert max(row["staleness_max"] for row in rows.values()) == 1
    for step in rows:
        versions = {version for rollout in read_step(run, step) for version in rollout.weight_version}
        assert versions <= {step - 1, max(step - 2, 0)}, step
    assert rows[3]["reused"] == rows[4]["reused"] == 6
    assert again < 30  # 6 of step 5, 4 of two evaluations, both in parts, and 4 probes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_batch_is_the_same_at_every_layout_and_training_goes_on(ranks, tmp_path, words, whole, layout):
    words = [*words, "parallel=cpu2", *LAYOUTS[layout], f"runs_dir={tmp_path}", "name=run", "num_steps=2"]
    told = ranks.run(2, _rl, words)
    replicas = 1 if "replica" in layout else 2
    assert sum(bool(requests) for requests in told) == replicas
    for one, other in zip(read_step(tmp_path / "run", 1), read_step(whole, 1)):
        assert (one.ids, one.seed, one.group_id, one.score, one.advantage) == (
            other.ids, other.seed, other.group_id, other.score, other.advantage,
        )  # fmt: skip
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
    ours, theirs = _metrics(tmp_path / "run"), _metrics(whole)
    assert ours[1]["step"] == theirs[1]["step"] == 1
    for name in ("loss", "grad_norm", "entropy", "reward_mean"):
        assert ours[1][name] == pytest.approx(theirs[1][name], rel=1e-4, abs=1e-6), name
    assert {version for rollout in read_step(tmp_path / "run", 2) for version in rollout.weight_version} == {1}
