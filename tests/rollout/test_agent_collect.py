"""Episodes of several rows on their way to the trainer: durable as one, scored once, their turns rewarded in order."""

import hashlib
import json

import pytest

from megatron_nb.data.prompts import PromptSet
from megatron_nb.records import Score
from megatron_nb.rewards.advantage import CreditConfig, credit
from megatron_nb.rollout.collect import CollectConfig, Collector, all_equal
from megatron_nb.rollout.engine import Completion, Sampling, Stop
from megatron_nb.rollout.heldout import Heldout
from megatron_nb.rollout.store import read_step, write_step
from tests.data.data_tokenizers import tiny
from tests.rollout.agent_setup import Pages, agent_of, call, prompt_of
from tests.rollout.fake_engine import FakeEngine

TOKENIZER = tiny()


class CallingEngine(FakeEngine):
    """Calls a tool three times of four, by a hash of what it is given; its log-probs tell prefix and seed."""

    async def generate(self, request) -> Completion:
        self.on_generate(request)
        self.requests.append(request)
        told = repr((request.ids, request.seed, self.version)).encode()
        draw = int.from_bytes(hashlib.blake2b(told, digest_size=4).digest())
        text = call(query=f"river {draw % 97}") if draw % 4 else f"It is {draw % 7}."
        ids = [*TOKENIZER(text).input_ids, TOKENIZER.eos_token_id]
        return Completion(ids, [-(draw % 1000) / 333 - n for n in range(len(ids))], [self.version] * len(ids), Stop.EOS)

    async def end_session(self, session: str) -> None: ...


async def score(group):
    """The reward by the last row; a reward for every turn of the model, numbered through the rows."""
    assert len({row.index for row in group.rollouts}) == len(group.episodes)
    found = []
    for rows in group.episodes:
        turns = sum(turn.kind == "assistant" for row in rows for turn in row.turns)
        found.append(Score(float(len(rows[-1].text) % 3), [float(n) for n in range(turns)]))
    return found


def collector(folder, engine, score=score, search=None, **settings) -> Collector:
    agent = agent_of(TOKENIZER, search, context="keep_last", keep_last=1, clear_every=1, max_turns=6)
    asked = [prompt_of(TOKENIZER, text=f"Question {n}?") for n in range(5)]
    for number, prompt in enumerate(asked):
        prompt.conversation.sample_id = f"q{number}"
    config = CollectConfig(**{"num_prompts": 3, "group_size": 4, "concurrency": 3, **settings})
    sampling = Sampling(200, stop_ids=(TOKENIZER.eos_token_id,))
    return Collector(engine, PromptSet(asked, asked[:2], 5), score, config, sampling, TOKENIZER, folder, seed=5, num_steps=9,
                     agent=agent)  # fmt: skip


def pending(folder):
    (path,) = (folder / "rollouts" / "pending").glob("*.jsonl")
    return path


def test_an_episode_of_several_rows_is_scored_once_and_its_turns_are_rewarded_in_order(tmp_path):
    groups, stats = collector(tmp_path, CallingEngine()).collect(1)
    episodes = [rows for group in groups for rows in group.episodes]
    assert len(episodes) == 12 and max(map(len, episodes)) > 2 and stats["invalid_share"] == 0
    for rows in episodes:
        assert len({id(row.score) for row in rows}) == 1 and [row.segment for row in rows] == list(range(len(rows)))
        rewards = [turn.reward for row in rows for turn in row.turns if turn.kind == "assistant"]
        assert rewards == [float(n) for n in range(len(rewards))]
        assert all(turn.reward is None for row in rows for turn in row.turns if turn.kind == "tool")
    samples, told = credit(groups, CreditConfig())
    assert told["rollouts"] == 12 and len(samples) == sum(map(len, episodes))
    assert all_equal(groups[0]) == (len({rows[-1].score.reward for rows in groups[0].episodes}) == 1)
    write_step(tmp_path, 1, groups)
    assert read_step(tmp_path, 1) == [row for group in groups for row in group.rollouts]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_killed_batch_goes_on_with_whole_episodes_and_gives_the_same(tmp_path, share):
    expected, _ = collector(tmp_path / "one", CallingEngine()).collect(1)
    whole = pending(tmp_path / "one").read_bytes()
    again = tmp_path / "two" / "rollouts" / "pending"
    again.mkdir(parents=True)
    (again / pending(tmp_path / "one").name).write_bytes(whole[: int(len(whole) * share)])  # killed while it wrote
    done = [json.loads(line) for line in (whole[: int(len(whole) * share)]).split(b"\n")[:-1]]
    groups, stats = collector(tmp_path / "two", engine := CallingEngine()).collect(1)
    assert groups == expected and stats["reused"] == sum("rows" in row for row in done) > 0
    reused = {f"{row['rows'][0]['group_id']}/{row['rows'][0]['index']}" for row in done if "rows" in row}
    assert not {request.session for request in engine.requests} & reused


def test_another_agent_does_not_take_the_episodes_of_the_old_one(tmp_path):
    collector(tmp_path, CallingEngine()).collect(1)
    other = collector(tmp_path, engine := CallingEngine())
    other.producer.agent.config.keep_last = 2
    other.collect(1)
    assert engine.requests


def test_failed_tools_and_episodes_out_of_time_are_invalid_and_in_no_mean(tmp_path):
    broken = Pages(broken={f"river {n}": OSError("down") for n in range(0, 97, 9)})
    groups, stats = collector(tmp_path, CallingEngine(), search=broken).collect(1)
    invalid = [rows for group in groups for rows in group.episodes if rows[-1].status == "invalid"]
    assert 0 < len(invalid) < 12 and stats["invalid_share"] == len(invalid) / 12
    assert all(rows[-1].score.reason.startswith("tools: search failed") for rows in invalid)
    samples, told = credit(groups, CreditConfig())
    assert told["invalid"] == len(invalid) and not {s.rollout_id for s in samples} & {rows[0].rollout_id for rows in invalid}


def test_traces_tell_every_episode_however_it_ended(tmp_path):
    one = collector(tmp_path, CallingEngine(), search=Pages(broken={"river 9": OSError("down")}))
    groups, _ = one.collect(1)
    (path,) = (tmp_path / "rollouts").glob("trace-*.jsonl")
    traces = {row["rollout_id"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert len(traces) == 12
    for rows in (rows for group in groups for rows in group.episodes):
        trace = traces[rows[0].rollout_id]
        assert trace["status"] == rows[-1].status
        assert sum(t["kind"] == "assistant" for t in trace["turns"]) == sum(
            turn.kind == "assistant" for row in rows for turn in row.turns
        )


def test_heldout_numbers_count_episodes_not_rows(tmp_path):
    one = collector(tmp_path, CallingEngine())
    heldout = Heldout(one, one.prompts.heldout, 3, tmp_path, judge=score, versus=None, writes=True)
    told = heldout.evaluate(0)
    rows = read_step(tmp_path, 0, "heldout")
    last = {row.rollout_id: row for row in rows}
    lengths = {name: sum(sum(row.sampled_mask) for row in rows if row.rollout_id == name) for name in last}
    assert len(rows) > len(last) == 6 and told["heldout_length"] == pytest.approx(sum(lengths.values()) / 6)
    by_prompt = [[row.score.reward for row in last.values() if row.group_id == name] for name in {r.group_id for r in rows}]
    assert told["heldout_reward"] == pytest.approx(sum(sum(its) / len(its) for its in by_prompt) / 2)
    assert told["heldout_judge"] == told["heldout_reward"]
    fresh = Heldout(one, one.prompts.heldout, 3, tmp_path, judge=None, versus=None, writes=True)
    assert [[row.rollout_id for row in group.rollouts] for group in fresh._read_start()] == [
        [row.rollout_id for row in group.rollouts] for group in heldout._start
    ]
