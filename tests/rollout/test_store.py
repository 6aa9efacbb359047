"""Rollouts on disk: exact there and back, and nothing half written counts."""

import json
import math

import pytest

from megatron_nb.records import Conversation, Group, Prompt, Rollout, Score, Turn
from megatron_nb.rollout.store import Journal, forget, label, read_step, rollout_of, rollout_row, step_file, write_step

LABEL = label("step", 3)


def rollout(index: int, **more) -> Rollout:
    logprob = [-1 / 3, -2e-308, math.nextafter(-0.1, 0), -math.inf][: 3 + index % 2]
    count = len(logprob)
    fields = {
        "prompt_ids": [5, 7], "ids": list(range(10, 10 + count)), "sampled_mask": [True] * (count - 1) + [False],
        "logprob": logprob, "weight_version": [3] * (count - 1) + [-1], "turn_id": [0] * count,
        "turns": [Turn(0, count, "assistant", 1, "eos", 0.1 + 0.2)], "status": "done",
        "sampling": {"max_tokens": 8, "temperature": 1.0, "stop_ids": [2]}, "seed": 2**48 - 1, "group_id": "g\u2028/1 ü",
        "index": index, "text": "one\ntwo \U0001f600 \" \\", "score": Score(1 / 3, [0.5], {"a": 1e-17}, "why"),
        "advantage": -0.7,
    }  # fmt: skip
    return Rollout(**{**fields, **more})


def test_a_rollout_is_read_back_exactly():
    for one in (rollout(0), rollout(1, score=None, advantage=None), rollout(2, segment=4, score=Score(None, reason="late"))):
        assert rollout_of(json.loads(json.dumps(rollout_row(one)))) == one


def test_a_step_is_read_back_exactly_and_shows_prompt_and_ratio(tmp_path):
    prompt = Prompt(Conversation([{"role": "user", "content": "ask"}], "1", "s"), [5, 7])
    groups = [Group("a", prompt, [rollout(0), rollout(1)]), Group("b", prompt, [rollout(2)])]
    write_step(tmp_path, 12, groups, ratios={f"{rollout(1).rollout_id}/0": [1.0, 0.5, 1.5, 1.0]})
    assert read_step(tmp_path, 12) == [rollout(0), rollout(1), rollout(2)]
    rows = [json.loads(line) for line in step_file(tmp_path, 12).read_text().splitlines()]
    assert [row.get("ratio") for row in rows] == [None, [1.0, 0.5, 1.5, 1.0], None]
    assert rows[2]["prompt"] == [{"role": "user", "content": "ask"}] and rows[2]["step"] == 12


@pytest.mark.parametrize("torn", [1, 5, -1])
def test_a_torn_last_line_does_not_count_and_is_cut_off_before_the_next(tmp_path, torn):
    journal, several = Journal(tmp_path, LABEL, 0), [rollout(0), rollout(0, segment=1)]
    journal.add_rollout(several)
    journal.add_rollout([rollout(1), rollout(1, segment=1)])  # the rows of an episode count together or not at all
    journal.close()
    (path,) = (tmp_path / "rollouts" / "pending").iterdir()
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:torn])

    again = Journal(tmp_path, LABEL, 0)
    assert list(again.rollouts.values()) == [several]
    again.add_rollout([rollout(2)])
    again.close()
    assert list(Journal(tmp_path, LABEL, 1).rollouts.values()) == [several, [rollout(2)]]  # another replica sees them too


def test_scores_belong_to_the_rollouts_that_were_scored(tmp_path):
    journal, scores = Journal(tmp_path, LABEL, 0), [Score(1.0, None, {"x": 2.0}), Score(None, reason="judge is down")]
    journal.add_scores([rollout(0), rollout(1)], scores)
    journal.close()
    again = Journal(tmp_path, LABEL, 0)
    assert again.scores_of([rollout(0), rollout(1)]) == scores
    assert again.scores_of([rollout(0), rollout(1, ids=[9, 9, 9, 9])]) is None
    assert again.scores_of([rollout(1), rollout(0)]) is None


def test_a_row_is_on_disk_when_it_was_added(tmp_path):
    journal = Journal(tmp_path, LABEL, 0)
    journal.add_rollout([rollout(0)])
    (path,) = (tmp_path / "rollouts" / "pending").iterdir()
    assert path.read_bytes().endswith(b"\n")


def test_pending_files_are_forgotten_up_to_a_step(tmp_path):
    for kind, number in (("step", 2), ("step", 3), ("heldout", 2)):
        Journal(tmp_path, label(kind, number), 0).close()
    forget(tmp_path, 2, ("step",))
    names = sorted(path.name for path in (tmp_path / "rollouts" / "pending").iterdir())
    assert names == ["heldout-00000002.replica-0.jsonl", "step-00000003.replica-0.jsonl"]
