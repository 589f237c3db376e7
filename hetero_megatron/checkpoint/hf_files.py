"""Layout of the safetensors files of a Hugging Face directory: file, offset and dtype of every tensor."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_megatron.checkpoint.names import name_table, repeated_tensors, stored_tensors
from hetero_megatron.layout import Box
from hetero_megatron.spec import LogicalTensor, ModelSpec
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


def plan_files(spec: ModelSpec, dtypes: Mapping[str, torch.dtype], shard_bytes: int) -> dict[str, StoredTensor]:
    """:func:`lay_out` of all tensors of a model, under transformers' file names."""
    stored = list(stored_tensors(spec))
    by_name = {tensor.name: dtypes[logical.name] for tensor, logical in stored}
    tensor_of, table, tensors = {tensor.name: tensor for tensor, _ in stored}, name_table(spec), [t for t, _ in stored]
    for copy, original in repeated_tensors(spec).items():
        tensors.append(replace(tensor_of[original], name=copy))
        table[copy], by_name[copy] = replace(table[original], name=copy), by_name[original]
    return lay_out(tensors, table, by_name, shard_bytes)


def lay_out(
    tensors: Iterable[LogicalTensor], table: Mapping[str, HFSource], dtypes: Mapping[str, torch.dtype],
    shard_bytes: int, stem: str = "model",
) -> dict[str, StoredTensor]:  # fmt: skip
    """Stored tensors distributed to files of at most ``shard_bytes`` (a larger tensor gets its own file), in order.

    Args:
        table: where each logical tensor is stored; parts of a fused one have a common dtype.
        dtypes: of every logical tensor.
        stem: ``stem.safetensors``, or ``stem-00001-of-00002.safetensors`` and so on.
    """
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for logical in tensors:
        source, dtype = table[logical.name], dtypes[logical.name]
        dtype_before = stored.get(source.name, (None, dtype))[1]
        stored[source.name] = source.shape(logical.shape), torch.promote_types(dtype_before, dtype)
    files: list[dict[str, StoredTensor]] = [{}]
    file_bytes = 0
    for name, (shape, dtype) in stored.items():
        tensor = StoredTensor("", 0, shape, dtype)
        if files[-1] and file_bytes + tensor.nbytes > shard_bytes:
            files.append({})
            file_bytes = 0
        files[-1][name] = tensor
        file_bytes += tensor.nbytes
    several_files = len(files) > 1
    out = {}
    for i, in_file in enumerate(files):
        file = f"{stem}-{i + 1:05d}-of-{len(files):05d}.safetensors" if several_files else f"{stem}.safetensors"
        # Wide numbers first, as safetensors itself writes them: every tensor begins at a multiple of its item size.
        ordered = dict(sorted(in_file.items(), key=lambda entry: -entry[1].dtype.itemsize))
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


def make_files(work: Path, plan: Mapping[str, StoredTensor]) -> None:
    """Write the headers of all files, each of its full size, for :func:`put_box`. OSError: a full disk."""
    for file in dict.fromkeys(t.file for t in plan.values()):
        entries = {name: t for name, t in plan.items() if t.file == file}
        header, size = file_header(entries), sum(t.nbytes for t in entries.values())
        with (work / file).open("wb") as out:
            out.write(header)
            if size:
                os.posix_fallocate(out.fileno(), len(header), size)  # a full disk is noticed here, not half-way


def put_box(work: Path, where: StoredTensor, source: HFSource, box: Box, stored: np.ndarray) -> None:
    """Write one box of a logical tensor, its values as :func:`bits` gives them, into the file of the stored one.

    Raises:
        OSError: the file is missing or cannot be written.
    """
    array = np.memmap(work / where.file, stored.dtype, "r+", where.offset, source.view(where.shape))
    for part, slices in source.runs(box):
        array[slices] = stored[part]
    array.flush()


def as_stored(values: torch.Tensor, source: HFSource, dtype: torch.dtype) -> torch.Tensor:
    """Values in the orientation and dtype of the file, contiguous in host memory."""
    return values.permute(source.order(values.dim())).detach().to(dtype).cpu().contiguous()


def bits(stored: torch.Tensor) -> np.ndarray:
    """The output of :func:`as_stored` as NumPy data in the file's byte order; bf16 as 16-bit integers."""
    array = stored.view(torch.uint16).numpy() if stored.dtype == torch.bfloat16 else stored.numpy()
    return array.astype(DTYPES[stored.dtype][1], copy=False)
