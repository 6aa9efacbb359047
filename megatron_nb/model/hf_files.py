"""The files of a Hugging Face model folder, read and written tensor by tensor.

Reading maps the files, writing streams them: neither ever holds more than one tensor in anonymous memory.
A safetensors file is: 8 bytes with the header's length (little endian), the header as JSON ({name: dtype, shape,
data_offsets}), then the tensors' bytes, back to back (safetensors format description, version 0.x).
"""
from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megatron_nb.model.hf_config import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".distcp"}
DTYPE_CODES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16", torch.float64: "F64"}
SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


class HfFolder:
    """The weights of a folder, by name, without loading them."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, Path] = {}
        self._open: dict[Path, safe_open] = {}
        index = self.path / INDEX
        if index.is_file():
            self._files = {name: self.path / file for name, file in read_json(index).get("weight_map", {}).items()}
        elif (self.path / SINGLE).is_file():
            self._files = dict.fromkeys(self._handle(self.path / SINGLE).keys(), self.path / SINGLE)
        if not self._files:
            raise ValueError(
                f"{self.path} holds neither {SINGLE} nor a filled {INDEX}: save the model as safetensors first "
                "(tools/unpack_gguf.py does so for GGUF files)"
            )

    def _handle(self, file: Path) -> safe_open:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} cannot be read as safetensors ({error}): copy it again from its source") from error
        return self._open[file]

    def __iter__(self):
        return iter(self._files)

    def _slice(self, name: str):
        try:
            return self._handle(self._files[name]).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{self._files[name]} does not hold {name}, as {INDEX} says: copy both again") from error

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        code = self._slice(name).get_dtype()
        return next((dtype for dtype, known in DTYPE_CODES.items() if known == code), None) or _unknown_dtype(name, code)

    def read(self, name: str, rows: slice, columns: slice | None) -> torch.Tensor:
        """A box of one tensor; columns is None for a vector."""
        part = self._slice(name)
        return part[rows] if columns is None else part[rows, columns]


def _unknown_dtype(name: str, code: str) -> torch.dtype:
    raise ValueError(f"{name} has dtype {code}; only {', '.join(DTYPE_CODES.values())} are read: dequantise the weights first")


def parse_size(text: str) -> int:
    """Bytes of '5GB', '300MB'; ValueError otherwise."""
    number, unit = text[:-2].strip(), text[-2:].upper()
    if unit not in SIZE_UNITS or not number.replace(".", "", 1).isdigit() or float(number) <= 0:
        raise ValueError(f"size {text!r} must be a number followed by one of {', '.join(SIZE_UNITS)}, such as 5GB")
    return int(float(number) * SIZE_UNITS[unit])


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def write_safetensors(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensors: Iterable[tuple[str, torch.Tensor]],
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Stream `tensors` into one file, or into numbered shards with an index when they exceed `max_shard_bytes`.

    shapes: every name with its shape, in the order in which `tensors` brings them.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = bytes_of(shape, dtype)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    if len(shards) == 1:
        files = [SINGLE]
    source = iter(tensors)
    for file, names in zip(files, shards):
        with open(folder / file, "wb") as stream:
            stream.write(_header({name: shapes[name] for name in names}, dtype))
            for expected in names:
                name, tensor = next(source)
                found = (name, tuple(tensor.shape), tensor.dtype)
                assert found == (expected, shapes[expected], dtype), f"{found} came where {expected} was announced"
                stream.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    assert next(source, None) is None, "more tensors than shapes"
    if len(shards) > 1:
        total = sum(bytes_of(shape, dtype) for shape in shapes.values())
        weight_map = {name: file for file, names in zip(files, shards) for name in names}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


def _header(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    header: dict = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = bytes_of(shape, dtype)
        header[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data must begin at a multiple of 8
    return struct.pack("<Q", len(text)) + text


@contextlib.contextmanager
def new_folder(target: Path, size: int) -> Iterator[Path]:
    """A folder that appears under its name only when the block ends well; until then it is a hidden sibling.

    size: bytes that will be written. Raises ValueError when the name is taken or the disk too full.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists: delete it or give another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if size > free:
        raise ValueError(f"{target} needs {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: make room or give another disk")
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        if target.exists():
            target.rmdir()
        yield partial
        if partial.exists():  # else the block gave it its name itself
            partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy what travels with the weights (configuration, tokenizer, chat template, generation settings); returns the names."""
    target.mkdir(parents=True, exist_ok=True)
    copied = []
    for file in sorted(source.rglob("*")):
        name = file.relative_to(source)
        weights = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_dir() or weights or any(part.startswith(".") for part in name.parts):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / name)
        copied.append(str(name))
    return copied
