"""The whole tensors of a checkpoint, read and written box by box in one process, without live modules.

A checkpoint in core's `torch_dist` format holds global tensors that do not know the ranks that wrote them, each as a set of
boxes. Core itself writes what live ranks hold; here a box is produced when its turn comes and dropped once written, so a
model far larger than memory can be imported, exported and resharded.

Source of the format: torch.distributed.checkpoint (*.distcp files and .metadata), megatron.core.dist_checkpointing
(metadata.json and the object `common_state`, which holds everything that is not a tensor).
"""
from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_nb.model.gpt import DTYPES  # noqa: F401  installs the CPU layer before core is used
from megatron_nb.model.shape import ModelConfig

# isort: split
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject

COMPLETE = "COMPLETE"  # written last: a folder without it is an interrupted save
CONFIG = "config.yaml"
HF = "hf"  # tokenizer, template and configuration of the origin
COMMON_STATE = ShardedObject("common_state", None, (1,), (0,)).unique_key


class GlobalTensors:
    """The tensors and objects of a checkpoint folder, by key. Opening reads only the list of what there is."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / COMPLETE).is_file():
            raise ValueError(
                f"{self.folder} has no file {COMPLETE}: it is not a checkpoint, or its save was interrupted; "
                "give a step folder, such as runs/NAME/checkpoints/step-00000100"
            )
        self._reader = dcp.FileSystemReader(self.folder)
        try:
            metadata = self._reader.read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{self.folder}/.metadata cannot be read ({error}): use another checkpoint") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        entries = metadata.state_dict_metadata
        self._tensors = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        self.objects = sorted(set(entries) - set(self._tensors))

    def __iter__(self):
        return iter(self._tensors)

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        return self._tensors[key].properties.dtype

    def boxes(self, key: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(offset, shape) of the boxes that the tensor is stored as."""
        return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self._tensors[key].chunks]

    def read(self, key: str, offset: tuple[int, ...], target: torch.Tensor) -> None:
        """Fill `target` with the box of its shape that begins at `offset`, cast to its dtype."""
        assert all(first + size <= whole for first, size, whole in zip(offset, target.shape, self.shape(key))), (key, offset)
        wanted = ChunkStorageMetadata(torch.Size(offset), target.shape)
        items = create_read_items_for_chunk_list(key, self._tensors[key], [wanted])
        self._reader.read_data(dcp.LoadPlan(items), _Target(target)).wait()

    def object(self, key: str) -> bytes:
        """A pickled object as it lies in the checkpoint."""
        plan = _Target(None)
        item = dcp.ReadItem(
            LoadItemType.BYTE_IO, MetadataIndex(key), torch.Size((0,)), MetadataIndex(key), torch.Size((0,)), torch.Size((0,))
        )
        self._reader.read_data(dcp.LoadPlan([item]), plan).wait()
        return plan.bytes

    def model_config(self) -> ModelConfig:
        """The shape that the checkpoint's configuration states."""
        path = self.folder / CONFIG
        section = (yaml.safe_load(path.read_text()) or {}).get("model") if path.is_file() else None
        if not isinstance(section, dict):
            raise ValueError(f"{path} has no section `model:`; copy config.yaml from the run that wrote this checkpoint")
        return ModelConfig.from_dict(section)


class _Target:
    """What torch's reader asks where to put things."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.tensor, self.bytes = tensor, b""

    def resolve_tensor(self, item: dcp.ReadItem) -> torch.Tensor:
        part = self.tensor
        for dimension, (first, size) in enumerate(zip(item.dest_offsets, item.lengths)):
            part = part.narrow(dimension, first, size)
        return part

    def commit_tensor(self, item: dcp.ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, item: dcp.ReadItem, value: io.BytesIO) -> None:
        self.bytes = value.getvalue()


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor that will be written; `produce` makes its values when its turn comes."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    produce: Callable[[], torch.Tensor]  # a fresh tensor: its memory is taken back after writing

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.key, torch.Size(self.offset))


class _Producing(dcp.DefaultSavePlanner):
    """Asks a piece for its values only when they are about to be written."""

    def __init__(self, pieces: Iterable[Piece], objects: dict[str, bytes]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces, self.objects = {piece.index: piece for piece in pieces}, objects
        self.written: torch.Tensor | None = None

    def create_local_plan(self) -> dcp.SavePlan:
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.objects]
        for piece in self.pieces.values():
            chunk = ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape))
            data = TensorWriteData(chunk, TensorProperties(dtype=piece.dtype), torch.Size(piece.whole))
            items.append(WriteItem(piece.index, WriteItemType.SHARD, tensor_data=data))
        self.plan = dcp.SavePlan(items)
        return self.plan

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        if item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self.objects[item.index.fqn])
        if self.written is not None:
            self.written.untyped_storage().resize_(0)  # torch's writer keeps every tensor until the file is closed
        piece = self.pieces[item.index]
        tensor = self.written = piece.produce()
        found = tuple(tensor.shape), tensor.dtype
        assert found == (piece.shape, piece.dtype), f"{piece} produced {found}"
        return tensor


def write_global_tensors(folder: Path, pieces: Iterable[Piece], objects: dict[str, bytes]) -> None:
    """Write a checkpoint's tensors and objects into an empty folder, one piece in memory at a time.

    Pieces must cover their global tensors without overlap (torch checks it). `objects` must hold COMMON_STATE. Raises what
    a piece raised, OSError when the disk is full.
    """
    assert COMMON_STATE in objects
    writer = dcp.FileSystemWriter(folder, thread_count=1)  # one after the other: `_Producing` relies on it
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save({}, storage_writer=writer, planner=_Producing(pieces, objects), no_dist=True)
        except dcp.CheckpointException as error:  # torch's wrapping, for many ranks; here is one
            raise next(cause for cause, _ in error.failures.values()) from None
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def model_objects(config: ModelConfig) -> dict[str, bytes]:
    """What core expects beside a model's tensors: a common state, and an (empty) extra state of every linear module."""
    objects = {COMMON_STATE: pack({})}
    for module in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"):
        for layer in range(config.num_layers):
            key = f"decoder.layers.{module}._extra_state"
            objects[ShardedObject(key, None, (config.num_layers,), (layer,)).unique_key] = pack(None)
    return objects


def pack(value: Any) -> bytes:
    """An object in the form that core reads back."""
    stream = io.BytesIO()
    torch.save([value], stream)
    return stream.getvalue()


def row_blocks(shape: tuple[int, ...], dtype: torch.dtype, limit: int = 128 * 2**20) -> list[tuple[int, int]]:
    """(first row, rows) that cut a vector or matrix into blocks of at most `limit` bytes (one row at least)."""
    row_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize
    step = max(1, limit // row_bytes)
    return [(first, min(step, shape[0] - first)) for first in range(0, shape[0], step)]
