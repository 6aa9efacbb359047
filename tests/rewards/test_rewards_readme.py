"""The README's example of a reward of one's own, run as it stands there."""

import re
import sys
from pathlib import Path

import yaml

import megatron_nb.rewards
from megatron_nb.rewards.term import BUILT_IN
from tests.rewards.made_groups import group_of, scores

README = (Path(megatron_nb.rewards.__file__).parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
YAML = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)


def test_the_example_of_ones_own_reward_runs(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(PYTHON[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    terms = yaml.safe_load(YAML[1])["reward"]["terms"]
    assert [score.reward for score in scores(terms, group_of("a fish", "a bird"))] == [0.5, 0.0]


def test_the_example_of_terms_runs():
    config = yaml.safe_load(YAML[0])["reward"]
    config["terms"]["answer"]["timeout_s"] = 60
    found = scores(config.pop("terms"), group_of("\\boxed{18}", "", data={"answer": "18"}), **config)
    assert [score.reward for score in found] == [1.1, 0.0]
    assert found[0].parts == {"form": 1.0, "answer": 1.0, "overlong": 0.0}


def test_every_built_in_kind_is_in_the_table():
    table = re.findall(r"^\| (`.*?) \|", README, re.MULTILINE)
    assert set(BUILT_IN) == set(re.findall(r"`(\w+)`", " ".join(table)))
