"""Weights to a Hugging Face directory, from any plan: the header first, then every rank writes the boxes it owns.

No rank gathers the model. All ranks must see one file system. The directory appears, whole, when everything is
written: until then the files are in ``DIRECTORY.incomplete``.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_megatron.checkpoint.names import name_table
from hetero_megatron.comm import Group
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.spec import ModelSpec, from_hf_config, logical_tensors, to_hf_config

FLAG = "--save-hf"
SHARD_BYTES = 4 << 30
# dtype -> (safetensors' name, what NumPy stores; bf16 has no NumPy type and travels as its 16 bits)
_DTYPES: dict[torch.dtype, tuple[str, np.dtype[Any]]] = {
    torch.float64: ("F64", np.dtype("<f8")),
    torch.float32: ("F32", np.dtype("<f4")),
    torch.float16: ("F16", np.dtype("<f2")),
    torch.bfloat16: ("BF16", np.dtype("<u2")),
}
HF_CONFIG = "hf_config.json"  # a Hugging Face directory's config.json inside a native checkpoint
TRAVEL_ALONG = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "generation_config.json")


@dataclass(frozen=True)
class StoredTensor:
    """One Hugging Face tensor: file, byte offset of its values, shape."""

    file: str
    offset: int
    shape: tuple[int, ...]


def save_hf(
    directory: str,
    spec: ModelSpec,
    owned: Iterable[tuple[str, Box, torch.Tensor]],
    dtype: torch.dtype,
    world: Group,
    source: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a directory that ``AutoModelForCausalLM.from_pretrained`` loads. Called on all ranks of ``world``.

    Args:
        owned: (logical name, box, values) of everything this rank owns; all ranks together own every element once.
        dtype: of the files.
        source: a Hugging Face directory whose tokenizer and generation config are copied along.

    Raises:
        UserError: the directory exists and is not empty, or cannot be written (raised on all ranks).
    """
    first, final = world.index == 0, Path(directory)
    work = final.with_name(final.name + ".incomplete")
    plan = _plan_files(spec, dtype, shard_bytes)
    _together(world, lambda: _create(final, work, spec, dtype, plan, source) if first else None)
    _together(world, lambda: _write(work, spec, owned, dtype, plan))
    _together(world, lambda: work.rename(final) if first else None)


def _together(world: Group, action: Callable[[], object]) -> None:
    """Do ``action`` here; if it fails on any rank, all ranks raise the first failure."""
    problem = None
    try:
        action()
    except UserError as error:
        problem = error
    except OSError as error:
        problem = UserError(f"cannot be written: {error.strerror}", field=FLAG, value=str(error.filename or ""))
    for found in world.gather_objects(problem):
        if isinstance(found, UserError):
            raise found


def check_target(directory: str, spec: ModelSpec) -> None:
    """Refuse, before training rather than after it, a directory that holds something or a model without a family."""
    to_hf_config(spec)
    path = Path(directory)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError("exists and is not an empty directory", field=FLAG, value=directory, accepted="a new directory")


def _stored(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the Hugging Face tensors, in model order."""
    table = name_table(spec)
    return {table[t.name].name: table[t.name].shape(t.shape) for t in logical_tensors(spec)}


def _plan_files(spec: ModelSpec, dtype: torch.dtype, shard_bytes: int) -> dict[str, StoredTensor]:
    """Tensors dealt to files of at most ``shard_bytes`` (one larger tensor makes a larger file), in model order."""
    itemsize = _DTYPES[dtype][1].itemsize
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
        offset = len(_header(entries, dtype))
        for name, shape in entries:
            out[name] = StoredTensor(file, offset, shape)
            offset += math.prod(shape) * itemsize
    return out


def _header(entries: list[tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> bytes:
    """The safetensors header: its length as u64, then JSON padded to 8 bytes."""
    label, stored = _DTYPES[dtype]
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in entries:
        stop = start + math.prod(shape) * stored.itemsize
        table[name] = {"dtype": label, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _create(
    final: Path, work: Path, spec: ModelSpec, dtype: torch.dtype, plan: dict[str, StoredTensor], source: str | None
) -> None:
    """Headers, full-size files, config, index and what travels along."""
    check_target(str(final), spec)
    config = _base_config(spec, source) | to_hf_config(spec) | {"dtype": str(dtype).removeprefix("torch.")}
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)
    for pattern in TRAVEL_ALONG if source is not None else ():
        for along in Path(str(source)).glob(pattern):
            shutil.copy(along, work / along.name)
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    itemsize, total = _DTYPES[dtype][1].itemsize, 0
    for file in dict.fromkeys(t.file for t in plan.values()):
        entries = [(name, t.shape) for name, t in plan.items() if t.file == file]
        header = _header(entries, dtype)
        size = sum(math.prod(shape) * itemsize for _, shape in entries)
        total += size
        with (work / file).open("wb") as out:
            out.write(header)
            if size:
                os.posix_fallocate(out.fileno(), len(header), size)  # a full disk is noticed here, not half-way
    if len({t.file for t in plan.values()}) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {name: t.file for name, t in plan.items()}}
        (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists():
        final.rmdir()


def _base_config(spec: ModelSpec, source: str | None) -> dict[str, Any]:
    """What the source's config says beyond our model (token ids, …), if it describes the same model."""
    for name in (HF_CONFIG, "config.json") if source is not None else ():
        with suppress(OSError, ValueError):  # UserError is a ValueError: a config that we cannot read says nothing
            found = json.loads((Path(str(source)) / name).read_text())
            if replace(from_hf_config(found), name=spec.name) == spec:
                return {k: v for k, v in found.items() if k not in ("dtype", "torch_dtype")}
    return {}


def travel_along(source: str | None) -> dict[str, bytes]:
    """Tokenizer and generation config of a Hugging Face directory."""
    if source is None:
        return {}
    files = {p.name: p.read_bytes() for pattern in TRAVEL_ALONG for p in sorted(Path(source).glob(pattern))}
    config = Path(source) / "config.json"
    return files | ({HF_CONFIG: config.read_bytes()} if config.is_file() else {})


def _write(
    work: Path,
    spec: ModelSpec,
    owned: Iterable[tuple[str, Box, torch.Tensor]],
    dtype: torch.dtype,
    plan: dict[str, StoredTensor],
) -> None:
    """This rank's boxes, each straight into its place."""
    table, stored = name_table(spec), _DTYPES[dtype][1]
    for name, box, values in owned:
        where = plan[table[name].name]
        array = np.memmap(work / where.file, stored, "r+", where.offset, where.shape)
        array[table[name].slices(box)] = _bits(values.T if table[name].transpose else values, dtype)
        array.flush()
        del array


def _bits(values: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    cast = values.detach().to(dtype).cpu().contiguous()
    return cast.view(torch.uint16).numpy() if dtype == torch.bfloat16 else cast.numpy()
