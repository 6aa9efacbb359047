"""From a configuration to its run folder: the same name on every rank, and a resume only of what the run computed before."""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from megatron_nb.launch import LaunchConfig, derived_name, open_run
from megatron_nb.run import RunFolderError


@dataclass
class Parallel:
    tensor: int = 1


@dataclass
class Data:
    path: str = "a.jsonl"
    changed: str = "error"


@dataclass
class Toy:
    name: str | None = None
    runs_dir: Path = Path("runs")
    seed: int = 1
    num_steps: int = 10
    lr: float = 1e-5
    parallel: Parallel = field(default_factory=Parallel)
    data: Data = field(default_factory=Data)
    launch: LaunchConfig = field(default_factory=LaunchConfig)


@pytest.fixture
def config(tmp_path):
    return Toy(runs_dir=tmp_path)


def complete_checkpoint(run) -> None:
    folder = run.checkpoints / "step-00000005"
    folder.mkdir()
    (folder / "COMPLETE").touch()


def test_derived_name_depends_on_what_is_computed_and_on_nothing_else(config):
    name = derived_name(config, "sft")
    assert name.startswith("sft-")
    assert name == derived_name(replace(config, num_steps=20, parallel=Parallel(2), launch=LaunchConfig(dry_run=True)), "sft")
    assert name == derived_name(replace(config, runs_dir=Path("elsewhere")), "sft")
    assert name != derived_name(replace(config, lr=2e-5), "sft")
    assert name != derived_name(config, "rl")


def test_the_folder_is_named_by_the_configuration_or_by_the_user(config, tmp_path):
    with open_run(config, "sft") as run:
        assert run.folder == tmp_path / derived_name(config, "sft")
    assert config.name == run.folder.name  # saved with the configuration
    with open_run(replace(config, name="mine"), "sft") as run:
        assert run.folder == tmp_path / "mine"


def test_a_changed_configuration_does_not_resume_and_the_difference_is_shown(config):
    config.name = "r"
    with open_run(config, "sft") as run:
        complete_checkpoint(run)
    with pytest.raises(RunFolderError) as refused:
        open_run(replace(config, lr=2e-5, seed=2), "sft")
    message = str(refused.value)
    assert "  seed: 1 there, 2 now\n  lr: 1e-05 there, 2e-05 now\n" in message
    assert "name=" in message and "init_from=" in message
    open_run(config, "sft").close()  # the refusal left it usable


def test_a_resume_may_change_how_it_runs(config):
    config.name = "r"
    with open_run(config, "sft") as run:
        complete_checkpoint(run)
    with open_run(replace(config, num_steps=20, parallel=Parallel(2)), "sft") as run:
        assert run.resumes and run.attempt == 2


def test_other_data_resumes_only_when_the_user_says_so(config):
    config.name = "r"
    with open_run(config, "sft") as run:
        complete_checkpoint(run)
    with pytest.raises(RunFolderError, match="data.path: 'a.jsonl' there, 'b.jsonl' now"):
        open_run(replace(config, data=Data("b.jsonl")), "sft")
    open_run(replace(config, data=Data("b.jsonl", changed="restart")), "sft").close()


def test_a_run_that_saved_nothing_yet_may_change_everything(config):
    config.name = "r"
    open_run(config, "sft").close()
    with open_run(replace(config, lr=2e-5), "sft") as run:
        assert not run.resumes


def _open_on_every_rank(runs_dir: Path, spoil: bool) -> tuple[str, int] | str:
    from megatron_nb.launch import open_run

    try:
        with open_run(Toy(name="../x" if spoil else None, runs_dir=runs_dir), "sft") as run:
            return run.folder.name, run.attempt
    except ValueError as error:
        return str(error)


def test_ranks_agree_on_folder_and_attempt(ranks, tmp_path):
    assert len(set(ranks.run(2, _open_on_every_rank, tmp_path, False))) == 1
    answers = ranks.run(2, _open_on_every_rank, tmp_path, False)
    assert [attempt for _, attempt in answers] == [2, 2]
    logs = tmp_path / answers[0][0] / "logs" / "attempt-2"
    assert sorted(path.name for path in logs.iterdir()) == ["config.yaml", "rank-0.log", "rank-1.log"]


def _open_a_held_run(runs_dir: Path) -> str:
    import torch.distributed as dist

    from megatron_nb.launch import open_run
    from megatron_nb.run import Run

    held = Run.open(runs_dir / "r", "a: 1") if dist.get_rank() == 0 else None
    dist.barrier()
    try:
        open_run(Toy(name="r", runs_dir=runs_dir), "sft")
        return "opened"
    except RunFolderError as error:
        return str(error)
    finally:
        dist.barrier()
        if held:
            held.close()


def test_a_refused_folder_stops_every_rank(ranks, tmp_path):
    answers = ranks.run(2, _open_a_held_run, tmp_path)
    assert answers[0] == answers[1]
    assert "two jobs in one run folder" in answers[0]
