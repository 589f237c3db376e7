"""Layout of the safetensors files of a Hugging Face directory: file, offset and dtype of every tensor."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_megatron.checkpoint.names import name_table, stored_tensors
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.hf_names import HFSource

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
    """One Hugging Face tensor: file, byte offset of its values, shape, dtype."""

    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _stored(spec: ModelSpec, dtypes: Mapping[str, torch.dtype]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the Hugging Face tensors, in model order; parts of a fused tensor have a common dtype."""
    table = name_table(spec)
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for tensor, logical in stored_tensors(spec):
        source, dtype = table[tensor.name], dtypes[logical.name]
        before = found.get(source.name, (None, dtype))[1]
        found[source.name] = source.shape(tensor.shape), torch.promote_types(before, dtype)
    return found


def plan_files(spec: ModelSpec, dtypes: Mapping[str, torch.dtype], shard_bytes: int) -> dict[str, StoredTensor]:
    """Tensors distributed to files of at most ``shard_bytes`` (a larger tensor gets its own file), in model order.

    Args:
        dtypes: of every logical tensor.
    """
    files: list[dict[str, StoredTensor]] = [{}]
    used = 0
    for name, (shape, dtype) in _stored(spec, dtypes).items():
        tensor = StoredTensor("", 0, shape, dtype)
        if files[-1] and used + tensor.nbytes > shard_bytes:
            files.append({})
            used = 0
        files[-1][name] = tensor
        used += tensor.nbytes
    many = len(files) > 1
    out = {}
    for i, tensors in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" if many else "model.safetensors"
        # Wide numbers first, as safetensors itself writes them: every tensor begins at a multiple of its item size.
        ordered = dict(sorted(tensors.items(), key=lambda entry: -entry[1].dtype.itemsize))
        offset = len(file_header(ordered))
        for name, tensor in ordered.items():
            out[name] = replace(tensor, file=file, offset=offset)
            offset += tensor.nbytes
    return out


def main_dtype(plan: Mapping[str, StoredTensor]) -> str:
    """Name of the dtype of most elements, for config.json."""
    elements: dict[torch.dtype, int] = {}
    for tensor in plan.values():
        elements[tensor.dtype] = elements.get(tensor.dtype, 0) + math.prod(tensor.shape)
    return str(max(elements, key=lambda dtype: elements[dtype])).removeprefix("torch.")


def file_header(entries: Mapping[str, StoredTensor]) -> bytes:
    """The safetensors header of one file's tensors: its length as u64, then JSON padded to 8 bytes."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in entries.items():
        stop = start + tensor.nbytes
        table[name] = {"dtype": DTYPES[tensor.dtype][0], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def put_box(work: Path, where: StoredTensor, slices: tuple[slice, ...], stored: np.ndarray) -> None:
    """Write one box of a tensor (from :func:`bits`) into its file.

    Raises:
        OSError: the file is missing or cannot be written.
    """
    array = np.memmap(work / where.file, stored.dtype, "r+", where.offset, where.shape)
    array[slices] = stored
    array.flush()


def as_stored(values: torch.Tensor, source: HFSource, dtype: torch.dtype) -> torch.Tensor:
    """Values in the orientation and dtype of the file, contiguous in host memory."""
    return (values.T if source.transpose else values).detach().to(dtype).cpu().contiguous()


def bits(stored: torch.Tensor) -> np.ndarray:
    """The output of :func:`as_stored` as NumPy data in the file's byte order; bf16 as 16-bit integers."""
    found = stored.view(torch.uint16).numpy() if stored.dtype == torch.bfloat16 else stored.numpy()
    return found.astype(DTYPES[stored.dtype][1], copy=False)
