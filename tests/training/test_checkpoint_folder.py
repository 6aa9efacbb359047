"""The folder of a checkpoint: complete or not there, damage found before loading, what is kept."""
from pathlib import Path

import pytest

from megatron_nb.model.hf_files import copy_companions
from megatron_nb.training.checkpoint_folder import (
    DamagedCheckpoint,
    check_files,
    complete_steps,
    discard_unfinished,
    newest_complete,
    partial_folder,
    prune,
    resolve,
    seal,
    set_aside,
    step_folder,
)


def write(run: Path, step: int, **settings) -> Path:
    partial = partial_folder(run, step)
    (partial / "hf").mkdir(parents=True)
    (partial / "__0_0.distcp").write_bytes(bytes(range(256)) * 8)
    (partial / "config.yaml").write_text("model: {}\n")
    (partial / "hf" / "tokenizer.json").write_text("{}")
    seal(partial, step_folder(run, step), **settings)
    return step_folder(run, step)


def test_a_folder_is_listed_only_when_complete(tmp_path):
    assert newest_complete(tmp_path) is None
    write(tmp_path, 5)
    newer = write(tmp_path, 1000000000)
    assert list(complete_steps(tmp_path)) == [1000000000, 5]
    (newer / "COMPLETE").unlink()
    partial_folder(tmp_path, 7).mkdir()
    (partial_folder(tmp_path, 7) / "COMPLETE").touch()
    assert newest_complete(tmp_path) == step_folder(tmp_path, 5)


def test_complete_is_written_last(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr("megatron_nb.run.os.fsync", lambda descriptor: order.append(_name(descriptor)))
    write(tmp_path, 5)
    data, complete = order.index("__0_0.distcp"), order.index("COMPLETE")
    assert data < order.index("files.json") < complete < order.index("checkpoints")


def _name(descriptor: int) -> str:
    return Path(f"/proc/self/fd/{descriptor}").readlink().name


def _flip(file: Path):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "is missing": lambda folder: (folder / "__0_0.distcp").unlink(),
    "has 100 bytes, 2048 were written": lambda folder: (folder / "__0_0.distcp").write_bytes(b"x" * 100),
    "has another content": lambda folder: _flip(folder / "__0_0.distcp"),
    "files.json cannot be read": lambda folder: (folder / "files.json").write_text("{"),
    "hf/tokenizer.json is missing": lambda folder: (folder / "hf" / "tokenizer.json").unlink(),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_found_and_named(tmp_path, message):
    folder = write(tmp_path, 5)
    check_files(folder)
    DAMAGE[message](folder)
    with pytest.raises(DamagedCheckpoint, match=message):
        check_files(folder)


def test_ranks_share_the_reading_and_together_read_everything(tmp_path):
    folder = write(tmp_path, 5)
    _flip(folder / "__0_0.distcp")
    finders = 0
    for rank in range(3):
        try:
            check_files(folder, rank, 3)
        except DamagedCheckpoint:
            finders += 1
    assert finders == 1


def test_a_checksum_given_by_the_writer_is_kept(tmp_path):
    folder = write(tmp_path, 5, checksums={"__0_0.distcp": 1})
    with pytest.raises(DamagedCheckpoint, match="another content"):
        check_files(folder)


@pytest.mark.parametrize(
    "keep_last, keep_every, kept",
    [(2, None, [60, 50]), (1, None, [60]), (1, 20, [60, 40, 20]), (3, 30, [60, 50, 40, 30]), (9, 1, [60, 50, 40, 30, 20, 10])],
)
def test_prune_keeps_the_newest_and_the_multiples(tmp_path, keep_last, keep_every, kept):
    for step in range(10, 70, 10):
        write(tmp_path, step)
    partial_folder(tmp_path, 70).mkdir()  # being written: not to be touched
    prune(tmp_path, keep_last, keep_every)
    assert list(complete_steps(tmp_path)) == kept and partial_folder(tmp_path, 70).is_dir()
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(kept) + 1


def test_resolve_takes_a_step_or_a_run_and_leaves_the_rest(tmp_path):
    folder = write(tmp_path / "run", 5)
    assert resolve(folder) == resolve(tmp_path / "run") == folder
    hugging_face = tmp_path / "hf"
    hugging_face.mkdir()
    assert resolve(hugging_face) is None


def test_resolve_names_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        resolve(tmp_path / "absent")
    folder = write(tmp_path, 5)
    (folder / "COMPLETE").unlink()
    with pytest.raises(ValueError, match="no file COMPLETE"):
        resolve(folder)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        resolve(tmp_path)


def test_the_origin_s_files_are_carried_without_its_weights(tmp_path):
    origin = tmp_path / "origin"
    origin.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "model.safetensors.index.json"):
        (origin / name).write_text("x")
    copy_companions(origin, tmp_path / "step" / "hf")
    carried = sorted(file.name for file in (tmp_path / "step" / "hf").iterdir())
    assert carried == ["chat_template.jinja", "config.json", "tokenizer.json"]


def test_a_damaged_checkpoint_is_kept_aside_under_a_new_name(tmp_path):
    for number in range(2):
        aside = set_aside(write(tmp_path, 5))
        assert aside.name == "damaged-step-00000005" + ("-1" if number else "")
    assert newest_complete(tmp_path) is None


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    write(tmp_path, 5)
    partial_folder(tmp_path, 6).mkdir()
    (tmp_path / "checkpoints" / ".deleting-step-00000004").mkdir()
    discard_unfinished(tmp_path)
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]
