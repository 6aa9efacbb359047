"""The checkpoints of a run: when to save, atomically and optionally in the background, and resuming from the newest.

What a checkpoint holds is in checkpoint_state.py, how its folder becomes complete in checkpoint_folder.py.
"""
from __future__ import annotations

import logging
import queue
import shutil
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml
from torch.distributed.checkpoint.api import CheckpointException

from megatron_nb.parallel.topology import everywhere  # installs the CPU layer before core is used

# isort: split
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megatron_nb.give_up import GivesUp
from megatron_nb.model.hf_files import copy_companions
from megatron_nb.training.checkpoint_folder import (
    DamagedCheckpoint,
    checksum,
    complete_steps,
    discard_unfinished,
    partial_folder,
    prune,
    seal,
    set_aside,
    step_folder,
)
from megatron_nb.training.checkpoint_state import (
    Resumed,
    check_together,
    from_first_rank,
    load_training_state,
    refuse_other_model,
    replicas,
    training_state,
)
from megatron_nb.training.trainer import Trainer

log = logging.getLogger(__name__)
# core announces on every save that its own way of writing in the background will go away; ours is below
logging.getLogger("megatron.core.dist_checkpointing.strategies.torch").setLevel(logging.ERROR)

FAILURES = (Exception, CheckpointException)  # torch derives the latter from BaseException


@dataclass
class CheckpointConfig:
    """When to save and what to keep."""

    every: int = 100  # updates between saves; the last update is always saved
    keep_last: int = 2
    keep_every: int | None = None  # multiples of this step are never deleted
    async_save: bool = False  # write in the background while training goes on, for one more copy in host memory

    def __post_init__(self):
        for name in ("every", "keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"checkpoint.{name}={value} must be at least 1")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says what still is usable."""


class FullDisk(GivesUp, CheckpointError):
    """There is no room for a checkpoint: every further try would end here."""


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


@dataclass
class _Save:
    """One save under way: core's plan of what this rank writes, and the thread that writes it, if any."""

    step: int
    folder: Path  # hidden until complete
    request: AsyncRequest
    thread: threading.Thread | None = None
    checksums: dict[str, int] = field(default_factory=dict)  # of this rank's files
    error: str | None = None

    @property
    def files(self) -> list[tuple[str, str, tuple[list, list]]]:
        """[(file, key, (objects, tensors))] of this rank; tensors as (item, tensor)."""
        return self.request.async_fn_args[1] if self.request.async_fn else []

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for _, _, (_, tensors) in self.files for _, tensor in tensors)

    def start(self, background: bool) -> None:
        """Write this rank's files: now, or in a thread from a copy, so that training may change the originals."""
        files = [
            (file, key, (objects, [(item, tensor.to("cpu", copy=background)) for item, tensor in tensors]))
            for file, key, (objects, tensors) in self.files
        ]
        if background:
            self.thread = threading.Thread(target=self._write, args=(files,), daemon=True)
            self.thread.start()
        else:
            self._write(files)

    def _write(self, files: list) -> None:
        """What core's own writer does, except that an error keeps its words."""
        results = {}
        for number, file in enumerate(files):
            transforms, _ = self.request.async_fn.args
            _, outcome = FileSystemWriterAsync.write_preloaded_data(transforms, number, file, None, None, use_fsync=True)
            if isinstance(outcome, Exception):
                self.error = f"rank {dist.get_rank()}, {Path(file[0]).name}: {outcome}"
                return
            results[number] = outcome
            self.checksums[file[1]] = checksum(Path(file[0]))
        if files:
            *_, queue_of_core = self.request.async_fn_args
            queue_of_core.put(results)


class Checkpoints:
    """The checkpoints of one run. All methods are collective: every rank calls them, in the same order."""

    def __init__(self, run: Path, config: CheckpointConfig, config_yaml: str, hf_files: Path | None = None):
        """config_yaml: the resolved configuration, with a `model:` section; hf_files: folder with the origin's tokenizer."""
        self.run, self.config, self.config_yaml, self.hf_files = Path(run), config, config_yaml, hf_files
        self._save: _Save | None = None
        from_first_rank(partial(discard_unfinished, self.run))

    def due(self, step: int, num_steps: int) -> bool:
        """Whether to save after `step` of `num_steps` updates."""
        return step % self.config.every == 0 or step == num_steps

    def save(self, step: int, trainer: Trainer, data_state: dict[str, Any]) -> None:
        """Save the job after `step` updates; data_state is plain JSON, equal on all ranks.

        CheckpointError when it cannot be written; earlier checkpoints stay as they are. With async_save the checkpoint
        becomes complete in a later `poll` or `wait`.
        """
        self.wait()
        if step in self._complete_steps():
            return  # resumed, and stopped again before the next update
        folder = partial_folder(self.run, step)
        try:
            from_first_rank(partial(_make_empty, folder))
            self._save = _Save(step, folder, self._plan(folder, *training_state(trainer, step, data_state)))
            needed, free = sum(everywhere(self._save.bytes)), shutil.disk_usage(folder).free
            if any(everywhere(needed > free)):
                raise FullDisk(f"{needed / 1e9:.3f} GB are needed")
            self._save.start(background=self.config.async_save)
            if not self.config.async_save:
                self._finish()
        except FAILURES as error:
            self._fail(step, folder, error)

    def _complete_steps(self) -> dict[int, Path]:
        """As rank 0 sees them: on a network file system ranks may see different listings."""
        return from_first_rank(partial(complete_steps, self.run))

    def _plan(self, folder: Path, state: dict[str, Any], metadata: dict[str, Any]) -> AsyncRequest:
        """Core's plan of who writes what where; nothing is written yet."""
        strategy = TorchDistSaveShardedStrategy()
        if replicas().size() > 1:  # they share the writing
            strategy = FullyParallelSaveStrategyWrapper(strategy, replicas())
        # Core passes results through a spawned process, which imports __main__ again: seconds and memory, and a hang in a
        # script without a guard. Our writer is this process, so a plain queue does; a new one, lest a failed save left some.
        assert hasattr(filesystem_async, "_results_queue"), "core's results queue moved: checkpoint.py replaces it"
        filesystem_async._results_queue = queue.Queue()
        return dist_checkpointing.save(
            state, str(folder), strategy, async_sharded_save=True, async_strategy="mcore", content_metadata=metadata
        )

    def poll(self) -> None:
        """Complete a background save that has been written everywhere; call once per step."""
        if self._save and all(everywhere(self._save.thread is None or not self._save.thread.is_alive())):
            self.wait()

    def wait(self) -> None:
        """Complete the background save, if there is one; call before leaving."""
        if self._save is None:
            return
        step, folder = self._save.step, self._save.folder
        try:
            if self._save.thread:
                self._save.thread.join()
            self._finish()
        except FAILURES as error:
            self._fail(step, folder, error)

    def _finish(self) -> None:
        save, final = self._save, step_folder(self.run, self._save.step)
        errors = [error for error in everywhere(save.error) if error]
        if errors:
            raise CheckpointError(errors[0])
        for finalize in save.request.finalize_fns:  # core gathers what was written and writes its index
            finalize()
        checksums = {name: value for part in everywhere(save.checksums) for name, value in part.items()}
        from_first_rank(partial(self._complete, save.folder, final, checksums))
        from_first_rank(partial(prune, self.run, self.config.keep_last, self.config.keep_every))
        self._save = None
        if dist.get_rank() == 0:
            log.info("saved %s", final)

    def _complete(self, folder: Path, final: Path, checksums: dict[str, int]) -> None:
        (folder / "config.yaml").write_text(self.config_yaml)
        if self.hf_files:
            copy_companions(self.hf_files, folder / "hf")
        seal(folder, final, checksums)

    def _fail(self, step: int, folder: Path, error: BaseException) -> None:
        """Raise what happened and what is left. No collective: other ranks may be elsewhere."""
        self._save = None
        free = shutil.disk_usage(self.run).free / 1e9
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        kept = next(iter(complete_steps(self.run)), None)
        usable = "this run has no earlier checkpoint" if kept is None else f"the checkpoint of step {kept} is usable"
        full = isinstance(error, FullDisk) or "No space left" in str(error)
        raise (FullDisk if full else CheckpointError)(
            f"saving step {step} into {self.run} failed: {error} ({free:.3f} GB are free there). Nothing of it is "
            f"kept, {usable}: make room, then start the same command again"
        ) from error

    def resume(self, trainer: Trainer) -> Resumed | None:
        """Load the newest usable checkpoint of this run into `trainer`; None when the run has none.

        A damaged one is set aside, loudly, and the one before is taken. ChangedRun when the model changed.
        """
        steps = self._complete_steps()
        for folder in steps.values():
            try:
                check_together(folder)
            except DamagedCheckpoint as damage:
                if dist.get_rank() == 0:
                    log.error("DAMAGED CHECKPOINT %s, set aside, the one before is tried: %s", folder, damage)
                from_first_rank(partial(set_aside, folder))
                continue
            # intact files that do not load are a bug or a changed run: an older checkpoint would not help
            refuse_other_model(folder, yaml.safe_load(self.config_yaml)["model"])
            resumed = load_training_state(folder, trainer)
            if dist.get_rank() == 0:
                log.info("resumed from %s", folder)
            return resumed
        if steps:
            raise CheckpointError(
                f"none of the {len(steps)} checkpoints of {self.run} is intact; they are kept as checkpoints/damaged-step-*: "
                "restore one of them, or start a new run"
            )
        return None
