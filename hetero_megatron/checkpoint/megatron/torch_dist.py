"""Megatron's format ``torch_dist``: torch's distributed checkpoint (DCP), its metadata read without its classes.

``.metadata`` is a pickle of ``torch.distributed.checkpoint.metadata.Metadata``: shapes and chunks of all tensors, and
for each chunk a file, an offset and a length; there a file of torch.save with that one tensor begins. Tensors of
decoder layers are stacked, ``decoder.layers.mlp.linear_fc2.weight`` with the layer as first axis, or are one per layer
(``decoder.layers.7. …``, of layers that are not all alike). ``common.pt`` beside it has the run's arguments.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero_megatron.checkpoint.megatron.expert_tensors import stacked
from hetero_megatron.checkpoint.megatron.tensors import (
    STAND_INS,
    MegatronTensors,
    Part,
    arguments,
    damaged,
    is_weight,
)
from hetero_megatron.checkpoint.pickles import load_tensors, read_pickle
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box, tiles
from hetero_megatron.utils.files import is_regular, member, open_file, read_bytes, read_json_object

MAX_METADATA_BYTES = 1 << 30  # of a job of thousands of ranks, optimizer states included
_DTYPES = {
    f"torch {name}": dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)
}
_KNOWN: dict[str, Callable[..., Any]] = {
    "torch Size": lambda *sizes: tuple(*sizes), "collections OrderedDict": dict, "builtins set": set,
}  # fmt: skip
_RECORDS = re.compile(rf"torch\.distributed\.[\w.]+ \w+|torch\.serialization _get_layout|{STAND_INS.pattern}")
_STACKED = re.compile(r"(decoder\.layers)\.(?!\d+\.)(.+)")
_PREFIX = re.compile(r"(model\.)?(module\.)*")
_OTHER_STATES = re.compile(r"(optimizer|chained_\d+|rng_state|rerun_state_machine_state|opt_param_scheduler)\b.*")


@dataclass(frozen=True)
class _Chunk:
    box: Box
    file: str
    offset: int
    length: int


def read_torch_dist(step: Path) -> MegatronTensors:
    """The weights of the checkpoint in a directory with ``.metadata``.

    Raises:
        UserError: another format of sharding, a damaged file, or chunks that do not make up their tensor.
    """
    _check_backend(step)
    globals_allowed = _KNOWN | {name: _constant(dtype) for name, dtype in _DTYPES.items()}
    try:
        metadata = read_pickle(read_bytes(step / ".metadata", "SOURCE", MAX_METADATA_BYTES), globals_allowed, _RECORDS)
    except UserError as error:
        raise damaged(f".metadata: {error.problem}", step) from error
    try:
        tensors = dict(_tensors(metadata, step))
    except UserError:
        raise
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, AssertionError) as error:
        raise damaged(".metadata is damaged: it does not describe tensors and their chunks", step) from error
    return MegatronTensors(stacked(tensors, 0, step), _arguments(step), str(step), "torch_dist")


def _constant(dtype: torch.dtype) -> Any:
    return dtype


def _check_backend(step: Path) -> None:
    path = step / "metadata.json"
    backend = read_json_object(path, "SOURCE").get("sharded_backend") if is_regular(path) else "torch_dist"
    if backend != "torch_dist":
        raise damaged(f"is sharded as {str(backend)[:40]!r}, and only torch_dist is read", step)


def _arguments(step: Path) -> dict[str, Any]:
    path = step / "common.pt"
    if not is_regular(path):
        return {}
    try:
        with open_file(path) as file:
            common = load_tensors(file, STAND_INS)
    except UserError as error:
        raise damaged(f"common.pt: {error.problem}", step) from error
    return arguments(common.get("args")) if isinstance(common, dict) else {}


def _tensors(metadata: Any, step: Path) -> Iterator[tuple[str, list[Part]]]:
    # An object has no offset, and then not even a field for it.
    places = {(index.fqn, getattr(index, "offset", None)): place for index, place in metadata.storage_data.items()}
    for stored, entry in metadata.state_dict_metadata.items():
        name = stored[_end(stored) :]
        if not hasattr(entry, "chunks") or _OTHER_STATES.fullmatch(name) or not is_weight(name):
            continue  # objects, the optimizer's states
        shape, dtype = _sizes(entry.size), entry.properties.state[0]
        assert isinstance(dtype, torch.dtype)
        chunks = []
        for chunk in entry.chunks:
            low, place = _sizes(chunk.offsets), places[stored, chunk.offsets]
            box = Box(low, tuple(a + n for a, n in zip(low, _sizes(chunk.sizes), strict=True)))
            file, offset, length = place.relative_path, place.offset, place.length
            assert isinstance(file, str) and isinstance(offset, int) and isinstance(length, int) and offset >= 0
            chunks.append(_Chunk(box, file, offset, length))
        if not tiles(Box.whole(shape), [chunk.box for chunk in chunks]):
            raise damaged(f".metadata: the chunks of {name} do not make it up", step)
        stacked = _STACKED.fullmatch(name)
        if stacked is None:
            yield name, [_part(step, name, Box.whole(shape), dtype, chunks)]
            continue
        for layer in range(shape[0]):
            box = Box.whole(shape).rows(layer, layer + 1)
            layer_name = f"{stacked[1]}.{layer}.{stacked[2]}"
            overlapping = [chunk for chunk in chunks if chunk.box.intersect(box)]
            yield layer_name, [_part(step, layer_name, box, dtype, overlapping, stacked=True)]


def _end(stored: str) -> int:
    prefix = _PREFIX.match(stored)
    return prefix.end() if prefix else 0


def _sizes(sizes: Any) -> tuple[int, ...]:
    assert isinstance(sizes, tuple) and all(type(n) is int and n >= 0 for n in sizes)
    return sizes


def _part(
    step: Path, name: str, box: Box, dtype: torch.dtype, chunks: list[_Chunk], stacked: bool = False
) -> Part:
    """``box`` of a stored tensor; ``stacked``: without its first axis, of size 1."""

    def read() -> torch.Tensor:
        values = torch.empty(box.shape, dtype=dtype)
        for chunk in chunks:
            chunk_values, common = _read_chunk(step, name, chunk), chunk.box.intersect(box)
            assert common is not None
            values[common.slices(box)] = chunk_values[common.slices(chunk.box)]
        return values[0] if stacked else values

    return Part(box.shape[1:] if stacked else box.shape, dtype, read)


def _read_chunk(step: Path, name: str, chunk: _Chunk) -> torch.Tensor:
    path = member(step, chunk.file, ".metadata", "SOURCE")
    with open_file(path, "SOURCE") as file:
        file.seek(chunk.offset)
        content = file.read(chunk.length)
    try:
        values = load_tensors(io.BytesIO(content))
    except UserError as error:
        raise damaged(f"{chunk.file}: {name}: {error.problem}", step) from error
    if not isinstance(values, torch.Tensor) or tuple(values.shape) != chunk.box.shape:
        raise damaged(f"{chunk.file}: {name} is not the chunk that .metadata describes", step)
    return values
