"""The harness: durable, resumed, bounded, never a wrong 0; what is reported of outcomes."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from megatron_nb.asking.askers import Answer, TooLong, _read
from megatron_nb.asking.cache import CachedAsker
from megatron_nb.evals.code import Code
from megatron_nb.evals.harness import GIVE_UP, Attempts, measure, read_excluded, table
from megatron_nb.evals.kinds import make_task
from megatron_nb.evals.preference import Preference
from megatron_nb.evals.task import Item, Outcome, Task, Verdict, by_item, repetition
from megatron_nb.records import Conversation
from megatron_nb.rollout.engine import Sampling
from megatron_nb.schema import ConfigError

SAMPLING = Sampling(max_tokens=8, temperature=0.7)


class Even(Task):
    """Numbers; an answer is right when it is even."""

    def read(self):
        return [Item(str(number), [{"role": "user", "content": f"say {number}"}]) for number in range(20)]

    async def score(self, item, answer):
        return Verdict(float(int(answer.text) % 2 == 0), {"size": float(answer.text)})


class Speaker:
    """Says the number it was asked. delay: seconds per answer; fails(name): the error of a question."""

    told = "speaker"

    def __init__(self, delay=0.0, fails=lambda name: None):
        self.delay, self.fails, self.names, self.seeds, self.running, self.most = delay, fails, [], [], 0, 0

    async def ask(self, conversation, name, seed, sampling=None):
        self.names.append(name)
        self.seeds.append(seed)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.delay)
        self.running -= 1
        if error := self.fails(name):
            raise error
        return Answer(conversation.messages[-1]["content"].split()[1], True, 3, 5)


def even(**settings) -> Even:
    return make_task("even", {"kind": f"{__name__}.Even", **settings}, SAMPLING)


def run(folder: Path, asker, task=None, model="m", concurrency=4, share=(0, 1)) -> tuple[Attempts, list[Outcome]]:
    task = task or even()
    attempts = Attempts(folder, [task], {task.name: task.items()}, model, 0)
    asyncio.run(attempts.run(asker, *share, concurrency))
    outcomes = attempts.read([attempts.invalid])
    attempts.write(outcomes)
    attempts.close()
    return attempts, outcomes[task.name]


def test_outcomes_survive_kill_9_and_only_missing_attempts_are_made(tmp_path):
    child = os.fork()  # not a new interpreter: that would spend seconds on imports
    if child == 0:
        try:
            run(tmp_path / "killed", Speaker(0.02), even(samples=2), concurrency=2)
        finally:
            os._exit(1)
    deadline, done = time.monotonic() + 60, 0
    while done < 6 and time.monotonic() < deadline:
        time.sleep(0.005)
        done = sum(file.read_bytes().count(b"\n") for file in (tmp_path / "killed").glob("parts/*.jsonl"))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    (file,) = (tmp_path / "killed").glob("parts/*.jsonl")
    done = file.read_bytes().count(b"\n")
    with file.open("ab") as torn:
        torn.write(b'["7/1/abc", {"item": "7", "ind')
    asker = Speaker()
    run(tmp_path / "killed", asker, even(samples=2))
    assert 6 <= done < 40 and len(asker.names) == 40 - done
    whole = Speaker()
    run(tmp_path / "whole", whole, even(samples=2))
    rows = [[json.loads(line) | {"seconds": 0} for line in (tmp_path / name / "even.jsonl").read_text().splitlines()]
            for name in ("killed", "whole")]  # fmt: skip
    assert rows[0] == rows[1] and len(rows[0]) == 40
    assert len(set(whole.seeds)) == 40  # every attempt draws anew


def test_more_samples_ask_only_for_the_new_ones_and_another_model_for_all(tmp_path):
    for settings, model, asked in (({}, "m", 20), ({"samples": 3}, "m", 40), ({"limit": 5}, "m", 0), ({}, "other", 20),
                                   ({"temperature": 0.1}, "m", 20)):  # fmt: skip
        asker = Speaker()
        run(tmp_path, asker, even(**settings), model)
        assert len(asker.names) == asked, settings


def test_a_setting_that_changes_what_is_told_asks_for_nothing(tmp_path, monkeypatch):
    run(tmp_path, Speaker(), even(system="a"))
    monkeypatch.setattr(Even, "told_by", ("system",))
    for system in ("b", "c"):
        asker = Speaker()
        run(tmp_path, asker, even(system=system))
        assert len(asker.names) == (20 if system == "b" else 0)
    assert "k" in Code.told_by and {"style", "rounds"} == set(Preference.told_by)


def test_a_prompt_that_does_not_fit_counts_in_the_parts_as_in_the_score():
    outcomes = [Outcome("1", 0, 1.0, "done", {"size": 4.0}), Outcome("2", 0, 0.0, "too_long"), Outcome("3", 0, None, "invalid")]
    assert even().summarise(outcomes)["size"] == 2.0


def test_half_a_surrogate_pair_in_an_answer_is_written(tmp_path):
    row = Outcome("1", 0, 1.0, "done", answer="\ud83d", messages=[{"content": "\ud83d"}])
    attempts = Attempts(tmp_path, [even()], {"even": even().items()}, "m", 0)
    attempts.write({"even": [row]})
    assert json.loads((tmp_path / "even.jsonl").read_text())["answer"] == "?"
    reply = {"choices": [{"message": {"content": "a\ud83d", "reasoning_content": "\udc00"}}], "usage": {"prompt_tokens": None}}
    answer = _read(reply)
    assert answer.text == "<think>\n?\n</think>\n\na?" and answer.prompt_tokens == 0


def test_an_excluding_folder_whose_rows_are_gone_excludes_nothing_and_says_so(tmp_path, caplog):
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "config.yaml").write_text("data: {sources: {a: {path: /nowhere/a.jsonl}}}")
    assert read_excluded(str(tmp_path), {"even": even().items()}) == {}
    assert "nothing is excluded" in caplog.text
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl" / "rows.jsonl").write_text('{"prompt": "3"}\n')
    (tmp_path / "rl" / "config.yaml").write_text(f"prompts: {{sources: {{b: {{path: {tmp_path}/rl/rows.jsonl}}}}}}")
    assert read_excluded(str(tmp_path), {"even": even().items()}) == {"even": {"3"}}
    assert "/nowhere/a.jsonl" in caplog.text


def test_an_item_that_has_changed_under_its_id_is_asked_again(tmp_path, monkeypatch):
    run(tmp_path, Speaker())
    items = even().items()
    monkeypatch.setattr(Even, "read", lambda self: [Item("0", [{"role": "user", "content": "say 3"}]), *items[1:]])
    asker = Speaker()
    assert run(tmp_path, asker)[1][0].score == 0 and len(asker.names) == 1


def test_shares_of_replicas_are_all_attempts_once(tmp_path):
    askers = [Speaker(), Speaker()]
    tasks = [even() for _ in askers]
    for rank, (asker, task) in enumerate(zip(askers, tasks)):
        attempts = Attempts(tmp_path / str(rank), [task], {"even": task.items()}, "m", rank)
        asyncio.run(attempts.run(asker, rank, 2, 4))
    assert sorted(askers[0].names + askers[1].names) == sorted(f"even/{number}/0/0" for number in range(20))


def test_trouble_outside_is_invalid_and_asked_again_and_a_prompt_too_long_scores_zero(tmp_path):
    fails = {"even/4/0/0": OSError("gone"), "even/6/0/0": TooLong("99 tokens")}
    _, outcomes = run(tmp_path, Speaker(fails=fails.get))
    by_id = {outcome.item: outcome for outcome in outcomes}
    assert (by_id["4"].score, by_id["4"].status, "gone" in by_id["4"].reason) == (None, "invalid", True)
    assert (by_id["6"].score, by_id["6"].status) == (0.0, "too_long")
    told = measure(even(), outcomes, set(), (1.0, 2.0))
    assert told["score"] == pytest.approx(8 / 19) and told["invalid"] == 1 and told["too_long"] == pytest.approx(1 / 19)
    asker = Speaker()
    assert run(tmp_path, asker)[1][4].score == 1 and asker.names == ["even/4/0/0"]


def test_an_error_of_ours_is_no_score(tmp_path):
    with pytest.raises(KeyError):
        run(tmp_path, Speaker(fails=lambda name: KeyError("bug") if "/3/" in name else None))


def test_a_model_that_does_not_answer_ends_the_run_soon(tmp_path):
    asker = Speaker(fails=lambda name: OSError("no route"))
    with pytest.raises(ValueError, match="in a row have no verdict; the last: OSError: no route"):
        run(tmp_path, asker, even(samples=20))
    assert len(asker.names) <= GIVE_UP + 4


def test_no_more_than_so_many_attempts_are_under_way(tmp_path):
    asker = Speaker(0.005)
    run(tmp_path, asker, concurrency=3)
    assert asker.most == 3


def test_what_is_reported_counts_lengths_rates_cost_and_the_figures_without_what_was_seen():
    task = even(samples=2)
    outcomes = [
        Outcome("a", 0, 1.0, "done", {"repetition": 0.0}, tokens_in=10, tokens_out=100, seconds=1.0),
        Outcome("a", 1, 0.0, "length", {"repetition": 1.0}, tokens_in=10, tokens_out=300, seconds=3.0),
        Outcome("b", 0, 1.0, "done", {"repetition": 0.0}, tokens_in=10, tokens_out=100, seconds=2.0),
        Outcome("b", 1, None, "invalid", tokens_in=10),
    ]
    told = measure(task, outcomes, {"a", "elsewhere"}, (1e6, 2e6))
    assert next(iter(told)) == "score" and told["score"] == 0.75 and told["clean_score"] == 1.0 and told["excluded"] == 1
    assert told["truncated"] == pytest.approx(1 / 3) == told["repetition"] and told["cost"] == 40 + 2 * 500
    assert told["length_mean"] == pytest.approx(500 / 3) and told["seconds_mean"] == 2 and told["attempts"] == 4
    line = table({"even": told}, [task]).splitlines()[2]
    assert "0.750" in line and "1.000 (1 left out)" in line and "2 x 2" in line
    assert by_item(outcomes) == [[1.0, 0.0], [1.0]]


def test_limit_draws_items_by_the_seed_and_keeps_their_order():
    drawn = [item.id for item in even(limit=6).items()]
    assert drawn == [item.id for item in even(limit=6).items()] != [item.id for item in even(limit=6, seed=2).items()]
    assert drawn == sorted(drawn, key=int) and drawn != [str(number) for number in range(6)]


@pytest.mark.parametrize(
    ("settings", "error", "rule"),
    [
        ({"kind": "maths"}, ConfigError, "must be one of code, math"),
        ({"kind": "no.such.Task"}, ConfigError, "cannot be imported"),
        ({"kind": "math", "pth": "x"}, ConfigError, "the nearest is 'tasks.t.path'"),
        ({"kind": "math", "samples": 0}, ValueError, "samples=0 must be at least 1"),
        ({"kind": "code", "k": [4]}, ValueError, r"k=\[4\] must be in 1..samples=1"),
    ],
)
def test_wrong_settings_are_refused(settings, error, rule):
    with pytest.raises(error, match=rule):
        make_task("t", settings, SAMPLING)


@pytest.mark.parametrize(
    ("content", "rule"),
    [("[1]", "must hold an object"), ("{", "cannot be read"), ('{"x": ["a"]}', "none of them is evaluated")],
)
def test_a_file_of_exclusions_that_says_nothing_is_refused(tmp_path, content, rule):
    (tmp_path / "seen.json").write_text(content)
    with pytest.raises(ValueError, match=rule):
        read_excluded(str(tmp_path / "seen.json"), {"even": []})


def test_a_cache_answers_what_was_asked_before_by_model_prompt_sampling_and_seed(tmp_path):
    inner = Speaker()
    asked = Conversation([{"role": "user", "content": "say 7"}], "a", "b")

    async def ask(identity, seed=1, sampling=SAMPLING, name="x"):
        return await CachedAsker(inner, tmp_path, identity).ask(asked, name, seed, sampling)

    first = asyncio.run(ask("m"))
    assert asyncio.run(ask("m", name="y")) == first and len(inner.names) == 1
    for changed in ({"identity": "n"}, {"identity": "m", "seed": 2}, {"identity": "m", "sampling": Sampling(9)}):
        before = len(inner.names)
        asyncio.run(ask(**changed))
        assert len(inner.names) == before + 1


def test_repetition_tells_loops_from_prose():
    assert repetition(["so it goes on and on and on " * 30]) == 1.0
    assert repetition([" ".join(f"word{number}" for number in range(100))]) == 0.0
