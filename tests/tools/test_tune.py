"""The search for settings: what it asks for lies in its space, a failed trial stops nothing, the same command goes on."""

import json
import subprocess
import sys

import pytest

from tools import tune

pytest.importorskip("optuna")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["seed=1"], "nothing to search"),
        (["optimizer.lr=log(1e-3,1e-5)"], "the lower one first"),
        (["optimizer.lr=log(0,1)"], "above 0"),
        (["optimizer.lr=interval(1)"], "two numbers"),
    ],
)
def test_a_space_that_is_none_is_named(words, complaint):
    with pytest.raises(ValueError, match=complaint):
        tune.spaces_of(words)


@pytest.fixture
def runs(monkeypatch):
    """The runs that were started, as their words; those with seed=2 fail, the others' loss is the distance of lr to 0.01."""
    started = []

    def start(command):
        words = dict(word.split("=", 1) for word in command[3:])
        started.append(words)
        folder = tune.run_folder(words["runs_dir"], words["name"])
        folder.mkdir(parents=True)
        if words["seed"] != "2":
            (folder / "summary.json").write_text(json.dumps({"loss": abs(float(words["optimizer.lr"]) - 0.01)}))
        return subprocess.Popen([sys.executable, "-c", f"raise SystemExit({int(words['seed'] == '2')})"], stdout=-3)

    real = subprocess.Popen
    monkeypatch.setattr(tune.subprocess, "Popen", lambda told, **more: start(told) if "-m" in told else real(told, **more))
    monkeypatch.setattr(tune, "LOOK_S", 0.05)
    return started


def search(monkeypatch, folder, count):
    told = ["tune", "--name", "t", "--trials", str(count), "--at-once", "2", "--metric", "loss", "--runs-dir", str(folder)]
    monkeypatch.setattr(sys, "argv", [*told, "a.job", "model=tiny", "optimizer.lr=log(1e-4,1)", "seed=choice(1,2)"])
    tune.main()


def test_trials_stay_in_their_space_failed_ones_stop_nothing_and_the_same_command_goes_on(tmp_path, monkeypatch, runs, capsys):
    search(monkeypatch, tmp_path, 6)
    assert len(runs) == 6 and {words["seed"] for words in runs} == {"1", "2"}
    assert all(1e-4 <= float(words["optimizer.lr"]) <= 1 and words["model"] == "tiny" for words in runs)
    told = capsys.readouterr().out
    assert "failed with" in told and "its command ended with 1" in told and "best: loss" in told
    search(monkeypatch, tmp_path, 8)
    assert [words["name"] for words in runs] == [f"trial-{number}" for number in range(8)]
    points = json.loads((tmp_path / "t" / "sweep.json").read_text())
    assert [point["name"] for point in points] == [f"trial-{number}" for number in range(8)]


def test_trials_that_a_killed_search_has_begun_are_begun_again_with_the_same_words(tmp_path, monkeypatch, runs):
    monkeypatch.setattr(tune.time, "sleep", lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(tune.Trials, "outcome", lambda self, number: None)  # still running
    with pytest.raises(KeyboardInterrupt):
        search(monkeypatch, tmp_path, 2)
    monkeypatch.undo()
    before = [dict(words) for words in runs]
    again = []
    monkeypatch.setattr(tune.Trials, "start", lambda self, number, words: again.append((f"trial-{number}", words)))
    monkeypatch.setattr(tune.Trials, "outcome", lambda self, number: 1.0)
    search(monkeypatch, tmp_path, 2)
    assert [name for name, _ in again] == [words["name"] for words in before]
    assert [words[0] for _, words in again] == [f"optimizer.lr={words['optimizer.lr']}" for words in before]
