"""Weights between Hugging Face folders and live modules, whatever the layout over ranks.

How core cuts a tensor over tensor and pipeline ranks is never repeated here: a module's `sharded_state_dict` says which box
of which whole tensor each of its parameters is, and model/hf_names.py says where those rows are in a Hugging Face folder.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from megatron_nb.model.global_tensors import GlobalTensors
from megatron_nb.model.gpt import DTYPES  # which installs the CPU layer before core is used
from megatron_nb.model.hf_config import config_from_hf
from megatron_nb.model.hf_files import HfFolder
from megatron_nb.model.hf_names import BY_KEY, Entry, hf_shapes, tensors_of
from megatron_nb.model.shape import ModelConfig, differences, hand_over
from megatron_nb.model.sharding import bare

# isort: split
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

BLOCK_BYTES = 64 * 2**20  # a read is copied in blocks of about this size


class Box(NamedTuple):
    """Part of one tensor of ours: `tensor` begins at `row` and, for matrices, `column`."""

    entry: Entry
    layer: int | None
    row: int
    column: int
    tensor: torch.Tensor


class Source(Protocol):
    """Where whole tensors can be read box by box: a Hugging Face folder or a checkpoint."""

    config: ModelConfig  # of what is stored

    def fill(self, box: Box) -> None:
        """Write the box's values into box.tensor, whatever its dtype and device; padding rows become 0."""


class HfSource:
    """A Hugging Face folder read under our names. Checks names, shapes and dtypes at once, before any weight is read."""

    def __init__(self, folder: str | Path, config: ModelConfig, cast: bool = False) -> None:
        """cast: permit a dtype that cannot hold the folder's values exactly."""
        self.folder, self.config = HfFolder(folder), config
        _check(self.folder, config, cast)

    def fill(self, box: Box) -> None:
        entry, layer, row, column, target = box
        end = row + target.shape[0]
        columns = slice(column, column + target.shape[1]) if entry.columns else None
        step = max(1, BLOCK_BYTES // (target[0].numel() * 4))
        done = row
        for span in entry.spans(self.config):
            first, last = max(row, span.row), min(end, span.row + span.count)
            name = entry.theirs[span.part].replace("*", str(layer))
            for begin in range(first, last, step):
                stop = min(last, begin + step)
                their = slice(begin - span.row + span.their_row, stop - span.row + span.their_row)
                target[begin - row : stop - row].copy_(self.folder.read(name, their, columns))
            done = max(done, last)
        assert done == end or entry.padded, f"rows {done} to {end} of {entry.ours} have no source"
        target[done - row :].zero_()  # rows beyond the vocabulary


def _check(folder: HfFolder, config: ModelConfig, cast: bool) -> None:
    expected = hf_shapes(config)
    found = {name for name in folder if not name.endswith(".rotary_emb.inv_freq")}  # old exports store the rotary table too
    if config.tied_embeddings and "lm_head.weight" in found:
        _check_tied(folder, config)
        found.remove("lm_head.weight")
    faults = [f"{name} is missing" for name in expected if name not in found]
    faults += [f"{name} is not part of this shape" for name in sorted(found - set(expected))]
    width = DTYPES[config.dtype]
    for name in sorted(found & set(expected)):
        shape, dtype = folder.shape(name), folder.dtype(name)
        if shape != expected[name]:
            faults.append(f"{name} has shape {shape}, config.json asks for {expected[name]}")
        elif not cast and torch.promote_types(dtype, width) != width:
            faults.append(f"{name} is {dtype}, which {config.dtype} cannot hold exactly (give a dtype to convert to)")
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        listed = "; ".join(faults[:5]) + more
        raise ValueError(f"{folder.path}: weights do not match config.json: {listed}; check which of the two is right")


def _check_tied(folder: HfFolder, config: ModelConfig) -> None:
    """Some exports store a tied head twice; it must then be the same."""
    names = ("model.embed_tokens.weight", "lm_head.weight")
    same = all(name in list(folder) for name in names) and folder.shape(names[0]) == folder.shape(names[1])
    step = max(1, BLOCK_BYTES // (4 * config.hidden_size))
    for begin in range(0, config.vocab_size if same else 0, step):
        rows = slice(begin, min(begin + step, config.vocab_size))
        same = same and torch.equal(*(folder.read(name, rows, slice(None)) for name in names))
    if not same:
        raise ValueError(
            f"{folder.path}: config.json says tie_word_embeddings=true, but lm_head.weight differs from "
            "model.embed_tokens.weight: set tie_word_embeddings to false"
        )


def local_boxes(modules: Iterable[torch.nn.Module], config: ModelConfig) -> list[Box]:
    """Every parameter of live (possibly cut) modules as boxes of whole tensors; the tensors share the parameters' memory."""
    boxes = []
    for module in map(bare, modules):
        state = module.sharded_state_dict()
        apply_factories(state)
        for sharded in nested_values(state):
            if isinstance(sharded, ShardedTensor):
                boxes.append(_box(sharded, config))
    return boxes


def _box(sharded: ShardedTensor, config: ModelConfig) -> Box:
    entry = BY_KEY.get(sharded.key)
    assert entry is not None and entry.when(config), f"{sharded.key} is not in the table of model/hf_names.py for this shape"
    offset, shape = list(sharded.global_offset), list(sharded.global_shape)
    layer = offset.pop(0) if entry.per_layer else None
    shape = shape[1:] if entry.per_layer else shape
    expected = list(entry.shape(config))
    if shape != expected and not (entry.padded and shape[1:] == expected[1:] and shape[0] >= expected[0]):
        raise ValueError(f"{sharded.key} is {shape} in the live model, the configuration asks for {expected}: use one for both")
    return Box(entry, layer, offset[0], offset[1] if entry.columns else 0, sharded.data.detach())


@torch.no_grad()
def load_weights(source: Source, modules: Iterable[torch.nn.Module], config: ModelConfig) -> None:
    """Fill live modules from a source; every rank reads only what it holds. What the source has not keeps its values."""
    for box in local_boxes(modules, config):
        if box.entry.when(source.config):
            source.fill(box)


def load_hf(folder: str | Path, modules: Iterable[torch.nn.Module], config: ModelConfig) -> None:
    """Load a Hugging Face folder into live modules cut over tensor and pipeline ranks; values are cast to the modules' dtype.

    A score head that the folder lacks keeps its values. Raises ValueError when the folder holds another model than
    `config`, and naming tensors that are missing, unexpected or of the wrong shape.
    """
    theirs = config_from_hf(folder, config.dtype)
    wrong = differences(theirs, config, hand_over(config))
    if wrong:
        raise ValueError(f"{folder} holds another model ({'; '.join(wrong)}): use its model settings, or another folder")
    load_weights(HfSource(folder, replace(config, head=theirs.head), cast=True), modules, config)


class WeightSource(Protocol):
    """What an engine or an export takes weights from."""

    modules: list[torch.nn.Module]  # for an engine that lives in this process

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...  # for servers and files


class LiveWeights:
    """The weights of live modules. One whole tensor at a time exists beside the model, whatever the layout."""

    def __init__(self, modules: list[torch.nn.Module], config: ModelConfig) -> None:
        self.modules, self.config = modules, config

    @torch.no_grad()
    def hf_tensors(self, every_rank: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, tensor) in the model's dtype.

        Every rank of a model copy (tensor x pipeline) must run the iteration to its end, in step: it communicates.
        With every_rank=False only the copy's first rank receives and yields; on the others the loop has no rounds.
        """
        group = parallel_state.get_model_parallel_group()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        mine = {_place(box): box for box in local_boxes(self.modules, self.config)}
        held: list[dict[Any, tuple]] = [{}] * size
        dist.all_gather_object(held, {place: tuple(box.tensor.shape) for place, box in mine.items()}, group=group)
        owners: dict[tuple[str, int | None], dict] = {}  # (key, layer) -> {place: (first rank that holds it, shape)}
        for owner, places in enumerate(held):
            for place, shape in places.items():
                owners.setdefault(place[:2], {}).setdefault(place, (owner, shape))
        for entry, layer in tensors_of(self.config):
            whole = None
            for place, (owner, shape) in owners[entry.key, layer].items():
                piece = self._move(mine.get(place), owner, shape, group, every_rank)
                if piece is None:
                    continue
                row, column = place[2:]
                if whole is None:
                    whole = piece.new_empty(entry.shape(self.config))
                rows = whole[row : row + shape[0]]  # padding rows end here
                (rows[:, column : column + shape[1]] if entry.columns else rows).copy_(piece[: len(rows)])
            if rank == 0 or every_rank:
                yield from entry.split(whole, self.config, layer)

    def _move(self, box: Box | None, owner: int, shape: tuple, group: dist.ProcessGroup, every_rank: bool):
        """The owner's piece on every rank of the group, or on its first rank alone (None elsewhere)."""
        rank = dist.get_rank(group)
        receivers = set(range(dist.get_world_size(group))) if every_rank else {0}
        if rank not in receivers | {owner}:
            return None
        if rank == owner:
            piece = box.tensor.contiguous()
        else:
            example = next(self.modules[0].parameters())
            piece = torch.empty(shape, dtype=example.dtype, device=example.device)
        raw = piece.view(torch.uint8)  # every back end moves bytes, not every one bf16
        if every_rank:
            dist.broadcast(raw, group=group, group_src=owner)
        elif rank == owner != 0:
            dist.send(raw, group=group, group_dst=0)
        elif rank != owner:
            dist.recv(raw, group=group, group_src=owner)
        return piece if rank in receivers else None


def _place(box: Box) -> tuple[str, int | None, int, int]:
    return box.entry.key, box.layer, box.row, box.column


class CheckpointWeights:
    """The weights of a checkpoint folder, without live modules; also a Source for live modules at any layout."""

    def __init__(self, folder: str | Path, config: ModelConfig | None = None) -> None:
        self.tensors = GlobalTensors(folder)
        self.config = config or self.tensors.model_config()
        for entry, _ in tensors_of(self.config):
            self._check(entry)

    def _check(self, entry: Entry) -> None:
        if entry.key not in self.tensors:
            raise ValueError(f"{self.tensors.folder}: tensor {entry.key} is missing; its config.yaml states another shape?")
        layers = (self.config.num_layers,) if entry.per_layer else ()
        expected, found = layers + entry.shape(self.config), self.tensors.shape(entry.key)
        if found != expected and not (entry.padded and found[0] >= expected[0] and found[1:] == expected[1:]):
            raise ValueError(f"{self.tensors.folder}: {entry.key} has shape {found}, its config.yaml asks for {expected}")

    def fill(self, box: Box) -> None:
        """As Source.fill."""
        rows = min(len(box.tensor), max(0, box.entry.shape(self.config)[0] - box.row))
        box.tensor[rows:].zero_()
        if rows:
            layer, column = ((box.layer,) if box.entry.per_layer else ()), ((box.column,) if box.entry.columns else ())
            target = box.tensor[:rows]
            self.tensors.read(box.entry.key, layer + (box.row,) + column, target[None] if layer else target)

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, tensor) in the configuration's dtype, one whole tensor of ours in memory at a time."""
        for entry, layer in tensors_of(self.config):
            whole = torch.empty(entry.shape(self.config), dtype=DTYPES[self.config.dtype])
            self.fill(Box(entry, layer, 0, 0, whole))
            yield from entry.split(whole, self.config, layer)
