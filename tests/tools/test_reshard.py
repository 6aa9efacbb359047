"""A checkpoint re-saved for another topology goes on like the original, optimizer moments included."""
import dataclasses
from pathlib import Path

import pytest
import torch
import yaml

from megatron_nb.model.global_tensors import GlobalTensors
from tools import convert_hf, reshard

DATA = {"fingerprint": "data", "position": 12}


def _checkpoints(run):
    from megatron_nb.training.checkpoint import CheckpointConfig, Checkpoints
    from tests.training.tiny import model_config

    return Checkpoints(Path(run), CheckpointConfig(), yaml.safe_dump({"model": dataclasses.asdict(model_config())}))


def _save(run, parallel):
    from tests.training import tiny

    trainer = tiny.trainer({}, parallel)
    tiny.train(trainer, range(2))
    _checkpoints(run).save(2, trainer, DATA)


def _continue(run, parallel):
    """(loss, gradient norm, rate) of three more steps."""
    from tests.training import tiny

    trainer = tiny.trainer({}, parallel, seed=8)
    assert _checkpoints(run).resume(trainer).step == 2
    return tiny.train(trainer, range(2, 5)), tiny.weights(trainer)


def _read(source, key):
    values = torch.empty(source.shape(key), dtype=source.dtype(key))
    source.read(key, (0,) * values.dim(), values)
    return values


@pytest.mark.parametrize("saved, tensor", [({"tensor": 2}, 1), ({"pipeline": 2}, 2)], ids=str)
def test_a_resharded_checkpoint_goes_on_like_the_original(ranks, tmp_path, saved, tensor):
    ranks.run(2, _save, tmp_path / "old", saved)
    out = tmp_path / "new" / "checkpoints" / "step-00000002"
    assert reshard.main(["--checkpoint", str(tmp_path / "old"), "--out", str(out), "--tp", str(tensor)]) == 0
    old, new = GlobalTensors(tmp_path / "old" / "checkpoints" / "step-00000002"), GlobalTensors(out)
    assert sorted(old) == sorted(new) and old.objects == new.objects
    assert any(key.startswith("optimizer.") for key in new)
    rows = {1: 384, 2: 512}[tensor]  # of a vocabulary of 300
    for key in new:
        whole, was = _read(new, key), _read(old, key)
        if key.endswith(reshard.PADDED):
            assert len(whole) == rows and not whole[300:].any()
            whole, was = whole[:300], was[:300]
        assert torch.equal(whole, was), key
    assert all(old.object(key) == new.object(key) for key in old.objects)
    layout = {"tensor": tensor} if tensor > 1 else {}
    (expected, weights), *_ = ranks.run(2, _continue, tmp_path / "old", layout)
    (found, after), *_ = ranks.run(2, _continue, tmp_path / "new", layout)
    assert found == expected
    assert all(after[name].equal(weights[name]) for name in weights)


def test_an_impossible_topology_and_a_damaged_file_are_refused(ranks, tmp_path, capsys):
    ranks.run(2, _save, tmp_path / "run", {"tensor": 2})
    arguments = ["--checkpoint", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    assert reshard.main([*arguments, "--tp", "4"]) == 1
    assert "num_query_groups=2" in capsys.readouterr().err
    file = sorted((tmp_path / "run" / "checkpoints" / "step-00000002").glob("*.distcp"))[0]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert reshard.main(arguments) == 1
    assert "another content" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_padding_rows_that_are_not_zero_are_refused(tmp_path, capsys):
    from tests.model.hf_folders import save_random

    convert_hf.import_hf(save_random(tmp_path / "hf"), tmp_path / "checkpoint")
    config = tmp_path / "checkpoint" / "config.yaml"
    config.write_text(config.read_text().replace("vocab_size: 301", "vocab_size: 300"))
    (tmp_path / "checkpoint" / "files.json").write_text("{}")  # the edit is not what this test is about
    arguments = ["--checkpoint", str(tmp_path / "checkpoint"), "--out", str(tmp_path / "out")]
    assert reshard.main(arguments) == 1
    assert "beyond the vocabulary of 300 are not zero" in capsys.readouterr().err
