"""Safetensors files of checkpoints: written in one pass with their checksum, read by slices of tensors."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hetero_megatron.checkpoint.manifest import METADATA, Damaged, unusable
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import open_file, parse_json

LABELS: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
_BLOCK = 16 << 20
MAX_HEADER = 100_000_000  # of safetensors itself


def header(entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """Length as u64, then JSON padded to 8 bytes; tensors follow in the order of ``entries``."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for key, (dtype, shape) in entries.items():
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        table[key] = {"dtype": LABELS[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_file(
    path: Path, entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], get: Callable[[str], torch.Tensor]
) -> tuple[str, int]:
    """Write and fsync, one tensor at a time; returns (sha256, bytes). OSError if it cannot be written."""
    head = header(entries)
    size = len(head) + sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in entries.values())
    digest = hashlib.sha256()
    with path.open("xb", buffering=0) as file:  # which follows no link
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk is noticed before anything is written
        for block in itertools.chain([head], _blocks(map(get, entries))):
            digest.update(block)
            view = memoryview(block)
            while len(view):
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return digest.hexdigest(), size


def _blocks(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        if flat.numel():
            data = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
            for start in range(0, len(data), _BLOCK):
                yield data[start : start + _BLOCK]


def check_file(path: Path, entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Check that a file has exactly these tensors, contiguous, and nothing after them.

    Raises:
        Damaged: it does not, or is no safetensors file.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(MAX_HEADER, size - 8):
                raise UserError("not a safetensors file")
            table = parse_json(file.read(length), os.fspath(path))
    except UserError as error:
        raise unusable(path, error) from None
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}") from error
    header_entries = {k: v for k, v in table.items() if k != "__metadata__"} if isinstance(table, dict) else {}
    if missing := sorted(entries.keys() ^ header_entries.keys()):
        raise Damaged(path, f"does not hold the tensors that {METADATA} says: {missing[0][:200]}")
    start = 0
    for key in sorted(header_entries, key=lambda k: _offsets(header_entries[k])):
        dtype, shape = entries[key]
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        if header_entries[key] != {"dtype": LABELS[dtype], "shape": list(shape), "data_offsets": [start, stop]}:
            raise Damaged(path, f"holds {key[:200]} with another dtype or shape than {METADATA} says")
        start = stop
    if start != size - 8 - length:
        raise Damaged(path, "is of another length than its tensors")


def _offsets(entry: Any) -> tuple[int, ...]:
    """Sort key of a header entry; anything for malformed entries."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return tuple(offsets) if isinstance(offsets, list) and all(isinstance(n, int) for n in offsets) else ()


class Files:
    """Open safetensors files of one directory."""

    def __init__(self, directory: Path) -> None:
        from safetensors import safe_open

        self._safe_open: Any = safe_open
        self._directory = directory
        self._handles: dict[str, Any] = {}

    def read(self, file: str, key: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """A slice of a tensor; only its bytes are read. Damaged if the file does not contain it."""
        from safetensors import SafetensorError

        path = self._directory / file
        try:
            if file not in self._handles:
                self._handles[file] = self._safe_open(path, framework="pt", device="cpu")
            whole_tensor = self._handles[file].get_slice(key)
            if [s.stop - s.start for s in slices] == list(whole_tensor.get_shape()):
                mapped: torch.Tensor = self._handles[file].get_tensor(key)  # mapped, not copied
                return mapped
            part: torch.Tensor = whole_tensor[slices]
            return part
        except (OSError, SafetensorError) as error:
            raise Damaged(path, "cannot be read, though it was when it was verified") from error
