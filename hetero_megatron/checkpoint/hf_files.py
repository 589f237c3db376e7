"""Where every tensor is in the safetensors files of a Hugging Face directory, and how its values are stored."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_megatron.checkpoint.names import HFSource, name_table
from hetero_megatron.spec import ModelSpec, logical_tensors

SHARD_BYTES = 4 << 30
# dtype -> (safetensors' name, what NumPy stores; bf16 has no NumPy type and travels as its 16 bits)
DTYPES: dict[torch.dtype, tuple[str, np.dtype[Any]]] = {
    torch.float64: ("F64", np.dtype("<f8")),
    torch.float32: ("F32", np.dtype("<f4")),
    torch.float16: ("F16", np.dtype("<f2")),
    torch.bfloat16: ("BF16", np.dtype("<u2")),
}


@dataclass(frozen=True)
class StoredTensor:
    """One Hugging Face tensor: file, byte offset of its values, shape."""

    file: str
    offset: int
    shape: tuple[int, ...]


def _stored(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the Hugging Face tensors, in model order."""
    table = name_table(spec)
    return {table[t.name].name: table[t.name].shape(t.shape) for t in logical_tensors(spec)}


def plan_files(spec: ModelSpec, dtype: torch.dtype, shard_bytes: int) -> dict[str, StoredTensor]:
    """Tensors dealt to files of at most ``shard_bytes`` (one larger tensor makes a larger file), in model order."""
    itemsize = DTYPES[dtype][1].itemsize
    files: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    used = 0
    for name, shape in _stored(spec).items():
        size = math.prod(shape) * itemsize
        if files[-1] and used + size > shard_bytes:
            files.append([])
            used = 0
        files[-1].append((name, shape))
        used += size
    many = len(files) > 1
    out = {}
    for i, entries in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" if many else "model.safetensors"
        offset = len(file_header(entries, dtype))
        for name, shape in entries:
            out[name] = StoredTensor(file, offset, shape)
            offset += math.prod(shape) * itemsize
    return out


def file_header(entries: list[tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> bytes:
    """The safetensors header: its length as u64, then JSON padded to 8 bytes."""
    label, stored = DTYPES[dtype]
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in entries:
        stop = start + math.prod(shape) * stored.itemsize
        table[name] = {"dtype": label, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def put_box(work: Path, where: StoredTensor, slices: tuple[slice, ...], stored: np.ndarray) -> None:
    """Write one box of a tensor, as ``stored_bits`` gives it, into its file.

    Raises:
        OSError: the file is not there or cannot be written.
    """
    array = np.memmap(work / where.file, stored.dtype, "r+", where.offset, where.shape)
    array[slices] = stored
    array.flush()


def stored_bits(values: torch.Tensor, source: HFSource, dtype: torch.dtype) -> np.ndarray:
    """Values as they are stored: orientation, dtype and byte order of the file."""
    cast = (values.T if source.transpose else values).detach().to(dtype).cpu().contiguous()
    found = cast.view(torch.uint16).numpy() if dtype == torch.bfloat16 else cast.numpy()
    return found.astype(DTYPES[dtype][1], copy=False)
