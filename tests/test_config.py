"""Configuration: what a user writes becomes the job's dataclass, or one clear line and a non-zero exit before any work."""
from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from megatron_nb import config
from megatron_nb.config import ConfigError, build, diff, from_yaml, job, to_yaml


@dataclass
class Optimizer:
    lr: float = 1e-5
    backend: Literal["torch", "te"] = "torch"
    decay_steps: int | None = None


@dataclass
class Source:
    path: str
    weight: float | None = None


@dataclass
class Parallel:
    tensor: int = 1
    sequence_parallel: bool | None = None

    def __post_init__(self):
        if self.sequence_parallel is None:
            self.sequence_parallel = self.tensor > 1


@dataclass
class Launch:
    dry_run: bool = False


@dataclass
class Toy:
    name: str | None = None
    seq_len: int = 64
    theta: float = 7e7
    cache: Path = Path("cache")
    anything: Any = None
    betas: tuple[float, float] = (0.9, 0.95)
    scaling: dict[str, Any] | None = None
    sources: dict[str, Source] = field(default_factory=dict)
    parts: list[Source] = field(default_factory=list)
    optimizer: Optimizer = field(default_factory=Optimizer)
    parallel: Parallel = field(default_factory=Parallel)
    launch: Launch = field(default_factory=Launch)

    def __post_init__(self):
        if self.seq_len % 2:
            raise ValueError(f"seq_len={self.seq_len} must be a multiple of 2: two chunks a rank")


STAGE = "# Trains a toy.\n#   python -m toy\ndefaults: [Toy, optimizer: fast, _self_]\nseq_len: 128\n"


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the toy job with a command line; returns its configuration (None when it did not run)."""
    folder = tmp_path / "stages"
    (folder / "optimizer").mkdir(parents=True)
    (folder / "toy.yaml").write_text(STAGE)
    (folder / "optimizer" / "fast.yaml").write_text("lr: 1e-3\n")
    (folder / "optimizer" / "slow.yaml").write_text("lr: 1e-7\n")
    monkeypatch.chdir(tmp_path)
    seen = []

    @job(Toy, "toy")
    def main(config):
        seen.append(config)

    def run(*words: str) -> Toy | None:
        monkeypatch.setattr(sys, "argv", ["toy", "--config-dir", str(folder), *words])
        main()
        return seen.pop() if seen else None

    run.folder = folder
    return run


def test_stage_group_and_command_line_compose_in_this_order(command):
    assert command().optimizer.lr == 1e-3
    assert command().seq_len == 128
    assert command("optimizer=slow").optimizer.lr == 1e-7
    assert command("optimizer=slow", "optimizer.lr=2e-5", "seq_len=32") == Toy(seq_len=32, optimizer=Optimizer(lr=2e-5))


def test_works_from_any_folder_and_leaves_nothing_behind(command, tmp_path):
    command("seq_len=32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stages"]


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("lr_typo=1", "optimizer.lr"),
        ("+lr_typo=1", "optimizer.lr"),
        ("++lr_typo=1", "optimizer.lr"),
        ("~lr_typo", "optimizer.lr"),
        ("++optimizer.lr_typo=1", "optimizer.lr"),
        ("optimizer.lr_typo=1", "optimizer.lr"),
        ("optimiser.lr=1", "optimizer"),
        ("seqlen=8", "seq_len"),
        ("sources.web.wieght=1", "sources"),
        ("optimizer.lr.value=1", "optimizer.lr"),
        ("launch.dryrun=true", "launch.dry_run"),
    ],
)
def test_unknown_key_stops_before_any_work_and_names_the_nearest(command, capsys, word, nearest):
    with pytest.raises(SystemExit) as stopped:
        command(word)
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1
    assert f"the nearest is '{nearest}'" in message
    assert message.startswith("error: unknown key ")


def test_unknown_key_of_a_stage_file_is_refused(command, capsys):
    (command.folder / "toy.yaml").write_text(STAGE + "lr_typo: 1\n")
    with pytest.raises(SystemExit):
        command()
    assert "unknown key 'lr_typo'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("seq_len=long", "seq_len must be int, found the str 'long'"),
        ("seq_len=1.5", "seq_len must be int, found the float 1.5"),
        ("seq_len=true", "seq_len must be int, found the bool True"),
        ("seq_len=null", "seq_len must be int, found null"),
        ("optimizer.lr=fast", "optimizer.lr must be float, found the str 'fast'"),
        ("optimizer.lr=[1]", "optimizer.lr must be float, found the list [1]"),
        ("optimizer.backend=apx", "optimizer.backend must be one of torch, te, found the str 'apx'"),
        ("optimizer.decay_steps=soon", "optimizer.decay_steps must be int, found the str 'soon'"),
        ("launch.dry_run=3", "launch.dry_run must be bool, found the int 3"),
        ("betas=null", "betas must be tuple[float, float], found null"),
        ("sources.web.weight=1", "sources.web.path must be given"),
        ("parts=[{weight: 1}]", "parts[0].path must be given"),
        ("betas=[0.9]", "betas must be tuple[float, float], found the list [0.9]"),
        ("seq_len=7", "seq_len=7 must be a multiple of 2: two chunks a rank"),
        ("seq_len", "cannot read 'seq_len' as KEY=VALUE"),
    ],
)
def test_wrong_value_stops_with_one_line(command, capsys, word, message):
    with pytest.raises(SystemExit) as stopped:
        command(word)
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.splitlines()) == 1


def test_unknown_group_option_lists_the_options(command, capsys):
    with pytest.raises(SystemExit):
        command("optimizer=fats")
    assert "fast" in capsys.readouterr().err


def test_known_keys_need_no_plus_below_mappings(command):
    config = command("sources.web.path=a.jsonl", "sources.web.weight=3", "scaling.factor=8", "parts=[{path: b}]", "name=2024")
    assert config.sources == {"web": Source("a.jsonl", 3.0)}
    assert config.scaling == {"factor": 8}
    assert config.parts == [Source("b")]
    assert config.name == "2024"
    assert isinstance(config.sources["web"].weight, float)


def test_values_derived_by_the_dataclass_are_derived_from_the_command_line(command):
    assert command("parallel.tensor=2").parallel.sequence_parallel is True
    assert command().parallel.sequence_parallel is False


def test_dry_run_flag_sets_the_key(command):
    assert command("--dry-run").launch.dry_run is True
    assert command().launch.dry_run is False


def test_cfg_prints_the_resolved_configuration_without_running(command, capsys):
    assert command("--cfg", "job", "seq_len=32") is None
    printed = capsys.readouterr().out
    assert build(Toy, OmegaConf.to_container(OmegaConf.create(printed))) == Toy(seq_len=32, optimizer=Optimizer(lr=1e-3))
    with pytest.raises(SystemExit):
        command("--cfg", "job", "++lr_typo=1")


def test_help_prints_the_stage_files_own_words_and_its_groups(command, capsys):
    assert command("--help") is None
    printed = capsys.readouterr().out
    assert printed.startswith("Trains a toy.\n  python -m toy\n")
    assert "fast slow" in printed


def test_multirun_runs_every_combination(command, monkeypatch):
    seen = []

    @job(Toy, "toy")
    def main(config):
        seen.append(config.seq_len)

    monkeypatch.setattr(sys, "argv", ["toy", "--config-dir", str(command.folder), "--multirun", "seq_len=8,16"])
    main()
    assert seen == [8, 16]


def test_ranks_other_than_the_first_stay_silent(command, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(config.time, "sleep", lambda seconds: None)
    with pytest.raises(SystemExit):
        command("lr_typo=1")
    assert capsys.readouterr().err == ""


def test_user_mistake_during_the_job_is_one_line_but_a_bug_keeps_its_traceback(tmp_path):
    source = (
        "from dataclasses import dataclass\nfrom megatron_nb.config import job\n"
        "@dataclass\nclass Small:\n    kind: str = 'mistake'\n"
        "@job(Small, 'small')\ndef main(config):\n"
        "    if config.kind == 'mistake':\n        raise ValueError('rows.jsonl:3: not JSON')\n    int('x')\n"
        "main()\n"
    )
    (tmp_path / "small.py").write_text(source)
    (tmp_path / "small.yaml").write_text("defaults: [Small, _self_]\n")
    for kind, lines in (("mistake", 1), ("bug", None)):
        words = [sys.executable, "small.py", "--config-dir", ".", f"kind={kind}"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1
        assert ("Traceback" in done.stderr) == (kind == "bug")
        if lines:
            assert done.stderr == "error: rows.jsonl:3: not JSON\n"


def test_saved_configuration_reads_back_equal(tmp_path):
    config = Toy(
        name="1e-5",
        cache=Path("/tmp/x"),
        scaling={"type": "llama3", "on": True, "text": "null"},
        sources={"web": Source("a: b #c", 1e-5)},
        parts=[Source("yes"), Source("012")],
        parallel=Parallel(2),
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert from_yaml(path, Toy) == config
    assert from_yaml(path, Parallel, "parallel") == Parallel(2, True)


def test_saved_configuration_of_another_shape_is_refused_with_its_path(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("parallel:\n  tensr: 2\n")
    with pytest.raises(ConfigError, match=r"config.yaml: unknown key 'parallel.tensr'.*'parallel.tensor'"):
        from_yaml(path, Parallel, "parallel")
    with pytest.raises(ConfigError, match="has no section 'model'; it has parallel"):
        from_yaml(path, Parallel, "model")


def test_diff_names_each_changed_key_with_both_values():
    old = Toy(sources={"web": Source("a", 1.0)})
    new = Toy(seq_len=32, sources={"code": Source("b")})
    assert diff(old, old) == {}
    assert diff(old, new) == {
        "seq_len": (64, 32),
        "sources.web.path": ("a", None),
        "sources.web.weight": (1.0, None),
        "sources.code.path": (None, "b"),
    }


def test_one_command_runs_every_stage_of_synthesis_and_names_them_all(monkeypatch, capsys):
    from megatron_nb import synthesize

    monkeypatch.setattr(sys, "argv", ["synthesize", "--config-name", "synthesize_complexity", "--dry-run"])
    synthesize.main()
    assert "programs     train" in capsys.readouterr().out
    for words in ([], ["--config-name", "sft"]):
        monkeypatch.setattr(sys, "argv", ["synthesize", *words])
        with pytest.raises(SystemExit, match="2"):
            synthesize.main()
        assert "synthesize_preferences" in capsys.readouterr().err
