"""What goes wrong with checkpoints: full disk, kill, damage, another model, a longer job."""
import dataclasses
import errno
import math
import os
import signal
from pathlib import Path

import pytest
import yaml

from tools.rank_pool import RankPool

DATA = {"position": 12}


def _checkpoints(run: str, model: dict | None = None, **settings):
    from megatron_nb.training.checkpoint import CheckpointConfig, Checkpoints
    from tests.training.tiny import model_config

    config_yaml = yaml.safe_dump({"model": dataclasses.asdict(model_config(**(model or {})))})
    return Checkpoints(Path(run), CheckpointConfig(**settings), config_yaml)


def _run_to(run: str, *steps: int, **settings):
    """A trainer that has saved after each of `steps`; (trainer, checkpoints)."""
    from tests.training import tiny

    trainer, checkpoints, done = tiny.trainer({}, {}), _checkpoints(run, **settings), 0
    for step in steps:
        tiny.train(trainer, range(done, step))
        done = step
        checkpoints.save(step, trainer, DATA)
    return trainer, checkpoints


def _listing(run: str) -> list[str]:
    return sorted(folder.name for folder in (Path(run) / "checkpoints").iterdir())


def _error(function, *args) -> str:
    from megatron_nb.training.checkpoint import CheckpointError
    from megatron_nb.training.checkpoint_state import ChangedRun

    with pytest.raises((CheckpointError, ChangedRun)) as caught:
        function(*args)
    return str(caught.value)


# ---------------------------------------------------------------------- damage
def _save_at(run: str, *steps: int):
    from tests.training import tiny

    return tiny.weights(_run_to(run, *steps)[0])


def _damage(folder: Path, how: str) -> None:
    file = sorted(folder.glob("*.distcp"))[-1]
    if how == "flipped bit":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif how == "lost tail":
        os.truncate(file, file.stat().st_size // 2)
    else:
        (folder / ".metadata").unlink()


def _resume(run: str):
    """(step, weights, what was logged) of a process that starts with other weights."""
    from megatron_nb.training import checkpoint
    from tests.training import tiny

    trainer, messages = tiny.trainer({}, {}, seed=8), []
    checkpoint.log.error = lambda message, *args: messages.append(message % args)
    resumed = _checkpoints(run).resume(trainer)
    del checkpoint.log.error
    return resumed and resumed.step, tiny.weights(trainer), messages


@pytest.mark.parametrize("how", ["flipped bit", "lost tail", "missing file"])
def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_taken(ranks, tmp_path, how):
    weights = ranks.run(2, _save_at, str(tmp_path), 1)[0]
    ranks.run(2, _save_at, str(tmp_path), 1, 2)
    _damage(tmp_path / "checkpoints" / "step-00000002", how)
    results = ranks.run(2, _resume, str(tmp_path))
    for step, loaded, _ in results:
        assert step == 1
        assert all(loaded[name].equal(weights[name]) for name in weights)
    assert _listing(tmp_path) == ["damaged-step-00000002", "step-00000001"]
    messages = [messages for *_, messages in results]
    assert "DAMAGED CHECKPOINT" in messages[0][0] and messages[1] == []  # said once


def _resume_error(run: str, model: dict | None = None, parallel: dict | None = None) -> str:
    from tests.training import tiny

    trainer = tiny.trainer(model or {}, parallel or {})
    return _error(_checkpoints(run, model).resume, trainer)


def test_no_intact_checkpoint_is_an_error_not_a_fresh_start(ranks, tmp_path):
    ranks.run(2, _save_at, str(tmp_path), 1)
    _damage(tmp_path / "checkpoints" / "step-00000001", "lost tail")
    for message in ranks.run(2, _resume_error, str(tmp_path)):
        assert "none of the 1 checkpoints" in message and "damaged-step" in message


def test_a_run_without_checkpoints_starts_afresh(ranks, tmp_path):
    assert [step for step, *_ in ranks.run(2, _resume, str(tmp_path))] == [None, None]


# ---------------------------------------------------------------------- full disk
def _fill_disk(run: str, where: str, background: bool):
    """Save step 1; fail step 2 with ENOSPC at one place; then save step 3."""
    import torch.distributed as dist

    from megatron_nb.training import checkpoint, checkpoint_folder
    from tests.training import tiny

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer, checkpoints = _run_to(run, 1, async_save=background)
    checkpoints.wait()
    tiny.train(trainer, range(1, 2))
    owner, name, fault = {
        "before": (checkpoint.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})),
        "write": (os, "fsync", full),  # core's writer calls it last
        "seal": (checkpoint_folder, "sync", full),
    }[where]
    kept = getattr(owner, name)
    if where != "write" or dist.get_rank() == 1:
        setattr(owner, name, fault)
    try:
        message = _error(lambda: (checkpoints.save(2, trainer, DATA), checkpoints.wait()))
    finally:
        setattr(owner, name, kept)
    dist.barrier()
    listing = _listing(run)
    tiny.train(trainer, range(2, 3))
    checkpoints.save(3, trainer, DATA)
    checkpoints.wait()
    return message, listing


@pytest.mark.parametrize("where, background", [("before", False), ("write", False), ("write", True), ("seal", False)])
def test_a_full_disk_is_a_clear_error_and_the_previous_checkpoint_stays(ranks, tmp_path, where, background):
    for message, listing in ranks.run(2, _fill_disk, str(tmp_path), where, background):
        assert "saving step 2" in message and "the checkpoint of step 1 is usable" in message and "make room" in message
        assert {"before": "GB are needed", "write": "rank 1, __1_0.distcp: [Errno 28]", "seal": "[Errno 28]"}[where] in message
        assert listing == ["step-00000001"]
    assert _listing(tmp_path) == ["step-00000001", "step-00000003"]


# ---------------------------------------------------------------------- kill
def _killed_while_writing(run: str):
    from megatron_nb.training import checkpoint
    from tests.training import tiny

    trainer, checkpoints = _run_to(run, 1)
    tiny.train(trainer, range(1, 2))
    checkpoint.checksum = lambda file: os.kill(os.getpid(), signal.SIGKILL)  # its files are written, nothing else is
    checkpoints.save(2, trainer, DATA)


def test_kill_during_a_save_leaves_the_previous_checkpoint_the_newest(ranks, tmp_path):
    victim = RankPool(1)
    try:
        with pytest.raises(AssertionError, match="died"):
            victim.run(1, _killed_while_writing, str(tmp_path))
    finally:
        victim.close()
    assert _listing(tmp_path) == [".partial-step-00000002", "step-00000001"]
    assert list((tmp_path / "checkpoints" / ".partial-step-00000002").glob("*.distcp"))
    assert ranks.run(1, _resume, str(tmp_path))[0][0] == 1
    assert _listing(tmp_path) == ["step-00000001"]


# ---------------------------------------------------------------------- another run
def test_another_model_is_refused_with_the_differences(ranks, tmp_path):
    ranks.run(1, _save_at, str(tmp_path), 1)
    model = {"ffn_hidden_size": 128, "rope_theta": 5e4}
    message = ranks.run(1, _resume_error, str(tmp_path), model)[0]
    assert "ffn_hidden_size is 64 there, 128 here" in message and "rope_theta is 10000.0 there, 50000.0 here" in message
    assert "hidden_size is 32" not in message
    assert _listing(tmp_path) == ["step-00000001"]  # not taken for damage


def test_another_kind_of_optimizer_sharding_is_refused(ranks, tmp_path):
    ranks.run(1, _save_at, str(tmp_path), 1)
    message = ranks.run(1, _resume_error, str(tmp_path), None, {"distributed_optimizer": False})[0]
    assert "parallel.distributed_optimizer=True" in message


def _resume_longer(run: str):
    from tests.training import tiny

    trainer = tiny.trainer({}, {}, num_steps=40)
    _checkpoints(run).resume(trainer)
    return trainer.scheduler.num_steps, trainer.scheduler.lr_decay_steps, trainer.optimizer.param_groups[0]["lr"]


def test_a_longer_job_continues_on_the_longer_schedule(ranks, tmp_path):
    ranks.run(1, _save_at, str(tmp_path), 5)
    consumed, length, rate = ranks.run(1, _resume_longer, str(tmp_path))[0]
    assert (consumed, length) == (5, 40)
    assert rate == pytest.approx(1e-2 * 0.5 * (1 + math.cos(math.pi * (5 - 2) / (40 - 2))))  # the tiny trainer warms up for 2


# ---------------------------------------------------------------------- weights only
def _give_extra_state(chunk) -> None:
    """Transformer Engine's modules have an entry more than the local ones a checkpoint may come from."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    names = chunk.sharded_state_dict

    def with_extra_state(*args, **kwargs):
        entry = ShardedObject("decoder.final_layernorm._extra_state", None, (1,), (0,))
        return {**names(*args, **kwargs), "decoder.final_layernorm._extra_state": entry}

    chunk.sharded_state_dict = with_extra_state


def _load_weights(path: str, model: dict, parallel: dict, fresh: tuple = ()):
    from megatron_nb.model.gpt import build, initialize_weights
    from megatron_nb.model.sharding import cut_dimension, named_parameters
    from megatron_nb.parallel.topology import ParallelConfig, initialize
    from megatron_nb.training.checkpoint_state import load_weights
    from tests.training import tiny

    shape, layout = tiny.model_config(**model), ParallelConfig(**parallel)
    initialize(layout, seed=1)
    chunks = build(shape, layout)
    _give_extra_state(chunks[0])
    initialize_weights(chunks, shape, seed=9)
    try:
        load_weights(path, chunks, shape, fresh)
    except ValueError as error:
        return str(error)
    parts = {name: (value.detach(), cut_dimension(value)) for name, value in named_parameters(chunks)}
    return tiny.over_stages(tiny.whole(parts))


def test_weights_enter_a_new_run_at_another_layout_and_rotary_base(ranks, tmp_path):
    weights = ranks.run(2, _save_at, str(tmp_path), 1, 2)[0]
    longer = {"rope_theta": 7e7, "max_position_embeddings": 1024}
    loaded = ranks.run(2, _load_weights, str(tmp_path), longer, {"tensor": 2})[0]
    assert all(loaded[name].equal(weights[name]) for name in weights)


def test_a_fresh_head_keeps_its_values(ranks, tmp_path):
    weights = ranks.run(1, _save_at, str(tmp_path), 1)[0]
    path = str(tmp_path / "checkpoints" / "step-00000001")
    loaded = ranks.run(1, _load_weights, path, {}, {}, ("output_layer",))[0]
    same = {name for name in weights if loaded[name].equal(weights[name])}
    assert set(weights) - same == {"output_layer.weight"}


def test_weights_of_another_model_are_refused(ranks, tmp_path):
    ranks.run(1, _save_at, str(tmp_path), 1)
    message = ranks.run(1, _load_weights, str(tmp_path), {"vocab_size": 301}, {})[0]
    assert "vocab_size is 300 there, 301 here" in message


# ---------------------------------------------------------------------- small promises
def _saving_starts_no_process(run: str):
    import psutil

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    _run_to(run, 1, 2)
    return {child.pid for child in psutil.Process().children(recursive=True)} - before


def test_trap_saving_starts_no_process_and_so_needs_no_main_guard(ranks, tmp_path):
    """Core's results queue is a spawned process that imports __main__ again: a script without a guard hangs."""
    assert ranks.run(1, _saving_starts_no_process, str(tmp_path)) == [set()]


def _save_before_the_first_update(run: str):
    from tests.training import tiny

    trainer = tiny.trainer({}, {"distributed_optimizer": False})
    _checkpoints(run).save(0, trainer, DATA)
    return tiny.train(trainer, range(2))


def _resume_before_the_first_update(run: str):
    from tests.training import tiny

    trainer = tiny.trainer({}, {"distributed_optimizer": False}, seed=8)
    assert _checkpoints(run).resume(trainer).step == 0
    return tiny.train(trainer, range(2))


def test_a_job_stopped_before_its_first_update_resumes(ranks, tmp_path):
    saved = ranks.run(1, _save_before_the_first_update, str(tmp_path))
    assert ranks.run(1, _resume_before_the_first_update, str(tmp_path)) == saved


def _save_again(run: str):
    trainer, checkpoints = _run_to(run, 1)
    marker = Path(run) / "checkpoints" / "step-00000001" / "marker"
    marker.touch()
    checkpoints.save(1, trainer, DATA)
    return marker.exists()


def test_a_step_that_is_saved_already_is_left_alone(ranks, tmp_path):
    assert ranks.run(1, _save_again, str(tmp_path)) == [True]


def test_settings_out_of_range_are_refused():
    from megatron_nb.training.checkpoint import CheckpointConfig

    for name in ("every", "keep_last", "keep_every"):
        with pytest.raises(ValueError, match=f"checkpoint.{name}=0 must be at least 1"):
            CheckpointConfig(**{name: 0})
