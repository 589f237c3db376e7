"""``metadata.json``: where each part of each tensor is. Its content is verified before use.

Every tensor must be covered by its chunks, each in a file that ``SHA256SUMS`` lists and that contains it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hetero_megatron.checkpoint.manifest import FORMAT, MAX_BYTES, METADATA, ChunkLocation, Damaged, sha256, unusable
from hetero_megatron.checkpoint.safefile import MAX_HEADER, check_file
from hetero_megatron.checkpoint.typed import MAX_INTEGER, typed
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box, tiles
from hetero_megatron.utils.files import read_json_object

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_AXES = 8


@dataclass(frozen=True)
class _ChunkRecord:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str

    def box(self) -> Box:
        return Box(self.offsets, tuple(a + n for a, n in zip(self.offsets, self.sizes, strict=True)))


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[_ChunkRecord, ...]


def read_metadata(directory: Path, sums: Mapping[str, str], step: int) -> tuple[Metadata, dict[str, Any]]:
    """(DCP's metadata with a ``ChunkLocation`` per chunk as storage data, our state), after checking the checksum.

    Args:
        step: from the name of the directory.

    Raises:
        Damaged: altered, or not a whole checkpoint of this step in listed files.
    """
    path = directory / METADATA
    if sha256(path) != sums[METADATA]:
        raise Damaged(path, "its checksum is wrong")
    try:
        document = read_json_object(path, limit=MAX_BYTES)
        written = typed(document.get("format"), int, "format")
        if written != FORMAT:
            raise Damaged(path, f"has format {written}; this version reads format {FORMAT}")
        state = typed(document.get("state"), dict[str, Any], "state")
        if typed(state.get("step"), int, "state.step") != step:
            raise UserError(f"is not step {step}, after which the directory is named", field="state.step")
        tensors = typed(document.get("tensors"), dict[str, _Tensor], "tensors")
        return _metadata(tensors, sums), state
    except UserError as error:
        raise unusable(path, error) from None


def _metadata(tensors: Mapping[str, _Tensor], sums: Mapping[str, str]) -> Metadata:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, ChunkLocation] = {}
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, sums)
        chunks = []
        for chunk in tensor.chunks:
            chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
            places[MetadataIndex(name, chunks[-1].offsets)] = ChunkLocation(chunk.file, chunk.key)
        properties = TensorProperties(dtype=DTYPES[tensor.dtype])
        entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    if len(set(places.values())) < len(places):
        raise UserError("one stored tensor is said to be two", field="tensors")
    return Metadata(entries, storage_data=places)


def _check_tensor(name: str, tensor: _Tensor, sums: Mapping[str, str]) -> None:
    field, shape = f"tensors.{name}", tensor.shape
    if tensor.dtype not in DTYPES:
        accepted = ", ".join(DTYPES)
        raise UserError("is no dtype of weights", field=f"{field}.dtype", value=tensor.dtype, accepted=accepted)
    whole_box = Box.whole(shape)
    if (
        len(shape) > MAX_AXES
        or min(shape, default=1) < 1
        or whole_box.size * DTYPES[tensor.dtype].itemsize >= MAX_INTEGER
    ):
        accepted = f"at most {MAX_AXES} sizes of 1 or more"
        raise UserError("is no shape of weights", field=f"{field}.shape", value=list(shape), accepted=accepted)
    for chunk in tensor.chunks:
        if chunk.file not in sums or chunk.file == METADATA:
            accepted = "a file that SHA256SUMS lists"
            raise UserError("is not one of the checkpoint's files", field=field, value=chunk.file, accepted=accepted)
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape) or min(chunk.sizes, default=1) < 1:
            raise UserError(f"a chunk is no part of {list(shape)}", field=field)
    if not tiles(whole_box, (chunk.box() for chunk in tensor.chunks)):
        raise UserError(f"its chunks do not cover {list(shape)} exactly once", field=field)


def file_limits(metadata: Metadata) -> dict[str, int]:
    """Largest size of each tensor file in bytes: its tensors and the longest header."""
    limits: dict[str, int] = {}
    for name, chunk, dtype in _chunks(metadata):
        file = metadata.storage_data[MetadataIndex(name, chunk.offsets)].file
        limits[file] = limits.get(file, 8 + MAX_HEADER) + chunk.sizes.numel() * dtype.itemsize
    return limits


def check_files(directory: Path, metadata: Metadata, part: int = 0, parts: int = 1) -> None:
    """Check that every ``parts``-th tensor file holds exactly the tensors of the metadata.

    Raises:
        Damaged: other tensors, dtypes or shapes.
    """
    entries_by_file: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
    for name, chunk, dtype in _chunks(metadata):
        place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        entries_by_file.setdefault(place.file, {})[place.key] = dtype, tuple(chunk.sizes)
    for file in sorted(entries_by_file)[part::parts]:
        check_file(directory / file, entries_by_file[file])


def _chunks(metadata: Metadata) -> Iterable[tuple[str, ChunkStorageMetadata, torch.dtype]]:
    entries = metadata.state_dict_metadata.items()
    tensors = ((name, entry) for name, entry in entries if isinstance(entry, TensorStorageMetadata))
    return chain.from_iterable(((name, c, entry.properties.dtype) for c in entry.chunks) for name, entry in tensors)
