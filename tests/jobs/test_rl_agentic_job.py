"""The stage rl_agentic on a wiki of four pages: what it logs and trains on, and that a kill changes no bit of it.

The model is tiny and untrained, so what its turns say is written for it: calls, bad calls and answers, drawn by the episode's
seed. Some turns it samples itself.
"""

import json
import math
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_nb.rollout.store import read_step
from tests.data.data_tokenizers import tiny
from tests.jobs.test_resume_job import _content, _equal
from tests.jobs.test_rl_job import MODEL, _metrics
from tools.rank_pool import RankPool

STEPS = 3
PAGES = {
    "Amber Bridge": "Amber Bridge crosses the river Lune. It was built by Ida Holm in 1911.",
    "Ida Holm": "Ida Holm was an engineer. She was born in Tarn.",
    "Tarn": "Tarn is a town on the coast. Its tower is 40 metres high.",
    "Lune": "The Lune is a river that ends near Tarn.",
}
QUESTION = "In which town was the builder of Amber Bridge born?"


def call(name, **arguments):
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


GOING_ON = [
    call("search", query="builder of Amber Bridge"), call("open_page", title="Amber Bridge"),
    call("open_page", title="Ida Holm"), call("open_page", title="Nowhere"), call("search", question="?"),
    "<tool_call>\n{broken\n</tool_call>",
    call("search", query="Tarn") + "\n" + call("open_page", title="Lune"),
]  # fmt: skip
ENDING = ["Answer: Tarn", "Answer: Lune", None]  # None: the model samples


def said(request_id: str, seed: int) -> str | None:
    """What the turn of this request says."""
    turn = int(request_id.rsplit("/", 1)[1].split(".")[0])
    draw = random.Random(f"{request_id.split('/')[0]}{seed}{turn}")
    return draw.choice(GOING_ON) if draw.random() < (0.9, 0.8, 0.5, 0.5)[min(turn, 3)] else draw.choice(ENDING)


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    """A complete command line but for the run."""
    from megatron_nb.search.build import build

    folder = tmp_path_factory.mktemp("agentic")
    tiny().save_pretrained(folder / "tokenizer")
    (folder / "pages.jsonl").write_text("".join(json.dumps({"title": t, "text": x}) + "\n" for t, x in PAGES.items()))
    build(folder / "pages.jsonl", folder / "index", workers=1)
    rows = [{"id": f"q{n}", "question": QUESTION + " " * n, "answer": "Tarn", "aliases": ["Tarn town"]} for n in range(4)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "--config-name", "rl_agentic", *MODEL, "answers=episodes_short", "log.wandb=off",
        f"prompts.sources.a.path={folder}/questions.jsonl", f"prompts.tokenizer={folder}/tokenizer", "prompts.max_tokens=2048",
        f"agent.tools.search={folder}/index", "agent.tools.names=[search,open_page]", "agent.max_turns=5", "agent.keep_last=1",
        "agent.clear_every=2", "collect.num_prompts=2", "collect.group_size=3", "collect.concurrency=1",
        "sampling.max_tokens=8", "engine.native.kv_cache_gb=0.05", "engine.native.block_size=16", "update.pack_tokens=8192",
        "parallel=cpu1", f"num_steps={STEPS}", "checkpoint.every=2", "optimizer.lr=1e-2", "optimizer.warmup_steps=0",
        "credit.turn_weight=0.5",
    ]  # fmt: skip


def _rl(words: list[str], die_at: int = 0, broken_at: int = 0) -> int:
    """`python -m megatron_nb.rl WORDS`; killed at a turn, or with a search that breaks at a call. How many turns it took."""
    import torch.distributed as dist

    from megatron_nb import rl
    from megatron_nb.rollout.engine import Completion, Stop
    from megatron_nb.rollout.native import NativeEngine
    from megatron_nb.search.backend import LocalSearch

    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": str(dist.get_rank())}
    sys.argv = ["rl", *words]
    tokenizer, calls, own, search = tiny(), [0, 0], NativeEngine.generate, LocalSearch.search
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    async def generate(engine, request):
        calls[0] += 1
        if calls[0] == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if (text := said(request.request_id, request.seed)) is None:
            return await own(engine, request)
        ids = [*tokenizer(text, add_special_tokens=False).input_ids, end]
        return Completion(ids, [-math.log(400)] * len(ids), [engine.version] * len(ids), Stop.EOS)

    async def searched(place, query, k):
        calls[1] += 1
        if calls[1] == broken_at + 1 and broken_at:
            raise OSError("the disk is gone")
        return await search(place, query, k)

    NativeEngine.generate, LocalSearch.search = generate, searched
    try:
        rl.main()
    finally:
        NativeEngine.generate, LocalSearch.search = own, search
    return calls[0]


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory, words) -> Path:
    """The run of a job that was never killed."""
    folder = tmp_path_factory.mktemp("whole")
    ranks.run(1, _rl, [*words, f"runs_dir={folder}", "name=whole"])
    return folder / "whole"


def test_the_log_tells_turns_tools_restarts_and_the_baseline_of_earlier_steps(whole):
    rows = [row for row in _metrics(whole) if "turns_mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert "turn_baseline" not in rows[0] and rows[1]["turn_baseline"] == pytest.approx(rows[0]["turn_reward_mean"])
    expected = (0.9 * rows[0]["turn_reward_mean"] + rows[1]["turn_reward_mean"]) / 1.9
    assert rows[2]["turn_baseline"] == pytest.approx(expected)
    for row in rows:
        episodes = {}
        for one in read_step(whole, row["step"]):
            episodes.setdefault(one.rollout_id, []).append(one)
        turns = [turn for its in episodes.values() for one in its for turn in one.turns]
        asked = [turn for turn in turns if turn.kind == "assistant"]
        tools = [turn for turn in turns if turn.kind == "tool"]
        assert row["rollouts"] == len(episodes) == 6 and row["turns_mean"] == pytest.approx(len(asked) / 6)
        assert row["context_restarts"] == pytest.approx(sum(len(its) - 1 for its in episodes.values()) / 6)
        assert row["tool_errors"] == pytest.approx(sum(turn.status == "error" for turn in tools) / len(tools))
        assert row["malformed"] == pytest.approx(sum(turn.status == "malformed" for turn in asked) / len(asked))
        assert sum(row.get(f"ended/{status}", 0) for status in ("done", "turns", "length")) == pytest.approx(1)
        assert row["turn_reward_mean"] == pytest.approx(np.mean([turn.reward for turn in asked]))
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
    for name in ("context_restarts", "tool_errors", "malformed", "turns_mean", "reward_mean"):
        assert any(row[name] > 0 for row in rows), name


def test_what_the_model_was_told_is_never_trained_and_right_answers_are_rewarded(whole):
    rollouts = [one for step in range(1, STEPS + 1) for one in read_step(whole, step)]
    last = {one.rollout_id: one for one in rollouts}
    assert {one.score.reward for one in last.values()} == {0.0, 1.0}
    assert all(one.score.reward == float(one.text == "Answer: Tarn" and one.status == "done") for one in last.values())
    for one in rollouts:
        for turn in one.turns:
            assert one.sampled_mask[turn.start : turn.stop] == [turn.kind == "assistant"] * (turn.stop - turn.start)
        lengths = {len(getattr(one, name)) for name in ("ids", "sampled_mask", "logprob", "weight_version", "turn_id")}
        assert len(lengths) == 1
    told = tiny().decode(next(one for one in rollouts if len(one.turns) > 1).prompt_ids)
    assert "open_page" in told and "run_code" not in told and "builder of Amber Bridge" in told


def test_a_job_killed_within_an_episode_ends_with_the_same_bits(ranks, tmp_path, words, whole):
    words = [*words, f"runs_dir={tmp_path}", "name=killed"]
    asked = {step: sum(turn.kind == "assistant" for one in read_step(whole, step) for turn in one.turns) for step in (1, 2, 3)}
    victims = RankPool(1)
    try:
        with pytest.raises(AssertionError, match="died"):
            victims.run(1, _rl, words, asked[1] + asked[2] + asked[3] - 1)  # the last turn but one of the third step
    finally:
        victims.close()
    run = tmp_path / "killed"
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000002"]
    (again,) = ranks.run(1, _rl, words)
    assert 0 < again < asked[3], "finished episodes are taken from disk"
    for step in range(1, STEPS + 1):
        assert read_step(run, step) == read_step(whole, step), step
    assert _metrics(run) == _metrics(whole)
    expected, found = (_content(path / f"checkpoints/step-{STEPS:08d}") for path in (whole, run))
    assert [key for key, value in expected.items() if "/python/" not in key and not _equal(value, found[key])] == []


def test_an_episode_whose_search_breaks_is_invalid_not_wrong_and_the_log_says_why(ranks, tmp_path, words):
    few = ["num_steps=1", "agent.tools.limits.search.retries=0", "name=run", f"runs_dir={tmp_path}"]
    ranks.run(1, _rl, [*words, *few], 0, 1)
    (row,) = [row for row in _metrics(tmp_path / "run") if "turns_mean" in row]
    assert row["invalid"] == row["invalid/tools"] == 1
    bad = [one for one in read_step(tmp_path / "run", 1) if one.status == "invalid"]
    assert bad and all(one.score.reward is None and "the disk is gone" in one.score.reason for one in bad)


@pytest.mark.parametrize("layout", [["parallel.context=2"], []], ids=["context 2", "data 2"])
def test_rows_of_episodes_are_trained_alike_over_two_ranks(ranks, tmp_path, words, whole, layout):
    ranks.run(2, _rl, [*words, "parallel=cpu2", *layout, "num_steps=1", f"runs_dir={tmp_path}", "name=run"])
    for one, other in zip(read_step(tmp_path / "run", 1), read_step(whole, 1), strict=True):
        assert (one.ids, one.turns, one.score, one.advantage) == (other.ids, other.turns, other.score, other.advantage)
    ours, theirs = _metrics(tmp_path / "run")[0], _metrics(whole)[0]
    for name in ("loss", "grad_norm", "entropy", "turns_mean", "turn_reward_mean"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-8), name
