"""Weights of a Hugging Face directory as bitsandbytes stores them, in 4 bits (NF4, FP4) or 8 (LLM.int8), as slices of
dequantised tensors. Every number that the values follow from is in the files; all of them are checked before use.

Beside ``X.weight`` in 4 bits, two to a byte, the first in the upper half (FSDP wants the bytes as elements of another
dtype, ``bnb_4bit_quant_storage``):

- ``X.weight.quant_state.bitsandbytes__nf4`` (or ``fp4``): JSON text, with shape, dtype, block size;
- ``X.weight.quant_map`` [16]: what 4 bits stand for, times the block's ``X.weight.absmax``;
- with double quantisation absmax is uint8: ``nested_quant_map`` [256] says what of, times ``nested_absmax`` of groups
  of blocks, and the state's ``nested_offset`` is added.

Beside ``X.weight`` [rows, columns] in int8: ``X.SCB`` [rows], which 127 stands for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from hetero_megatron.checkpoint.hf_directory import DequantisedSlice, Replaced, WeightFiles, misfit
from hetero_megatron.checkpoint.metadata import DTYPES
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import parse_json

_STATE = ".quant_state.bitsandbytes__"
_STORAGE = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4}  # dtype of the weight's file -> bytes of an element
_DTYPES = {name: DTYPES[name] for name in ("bfloat16", "float16", "float32")}
_FORMAT = ".weight_format"  # beside int8: 0, row after row
_LONGEST = 1 << 16  # bytes of a state
_CHUNK = 1 << 22  # elements that are dequantised at once
_MOST = 1 << 40  # elements of a tensor
_PART_OF_INT8 = 7.874015718698502e-3  # 1 / 127, as bitsandbytes has it


@dataclass(frozen=True)
class _State:
    """What the JSON text says. ``nested``: (blocks of one group, offset); None: absmax is in fp32."""

    shape: tuple[int, int]
    dtype: torch.dtype
    block: int
    nested: tuple[int, float] | None


class FourBitSlice(DequantisedSlice):
    """Values in 4 bits times the largest magnitude of their block, in fp32, rounded to the dtype that they came in.

    Args:
        scales: of each block, as stored; levels: fp32 [16].
        nested: fp32 [256] and [groups], of double quantisation.
    """

    def __init__(
        self, weight: Any, scales: Any, state: _State, levels: torch.Tensor, nested: tuple[torch.Tensor, ...]
    ) -> None:
        self.weight, self.scales, self.state, self.levels, self.nested = weight, scales, state, levels, nested
        self.shape, self.dtype = state.shape, state.dtype
        self._width = _STORAGE[weight.get_dtype()]

    def _part(self, *axes: range) -> torch.Tensor:
        rows, columns = axes
        across, out = self.shape[1], torch.empty(len(rows), len(columns), dtype=self.value_dtype)
        step = max(1, _CHUNK // across)
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            values = self._elements(first * across, last * across).view(last - first, across)
            out[first - rows.start : last - rows.start] = values[:, columns.start : columns.stop]
        return out

    def _elements(self, start: int, stop: int) -> torch.Tensor:
        """fp32 [stop - start] of the elements in their order, row after row."""
        block = self.state.block
        a, b = start // block, -(-stop // block)
        stored = self._bytes(a * block // 2, min(b * block, math.prod(self.shape) + 1) // 2).int()
        levels = self.levels[torch.stack([stored >> 4, stored & 15], -1).flatten()]
        magnitudes = self._magnitudes(a, b).repeat_interleave(block)
        return (levels * magnitudes[: len(levels)])[start - a * block : stop - a * block]

    def _bytes(self, start: int, stop: int) -> torch.Tensor:
        """uint8 [stop - start], whatever dtype they are stored as."""
        first = start // self._width
        stored = self.weight[first : -(-stop // self._width)].flatten().view(torch.uint8)
        return stored[start - first * self._width : stop - first * self._width]

    def _magnitudes(self, a: int, b: int) -> torch.Tensor:
        """fp32 [b - a] of blocks."""
        stored = self.scales[a:b].flatten()
        if self.state.nested is None:
            return stored.float()
        group, offset = self.state.nested
        codes, groups = self.nested
        return codes[stored.int()] * groups[torch.arange(a, b) // group] + offset


class Int8Slice(DequantisedSlice):
    """int8 [rows, columns] of 127ths of fp32 [rows], rounded once."""

    def __init__(self, weight: Any, scales: torch.Tensor, dtype: torch.dtype) -> None:
        self.weight, self.scales, self.dtype = weight, scales, dtype
        self.shape = tuple(weight.get_shape())

    def _part(self, *axes: range) -> torch.Tensor:
        rows, columns = (slice(axis.start, axis.stop) for axis in axes)
        return (self.weight[rows, columns].float() * self.scales[rows, None] * _PART_OF_INT8).to(self.value_dtype)


def four_bits(files: WeightFiles) -> Replaced:
    """By name: the slice, and the stored tensors that it stands for.

    Raises:
        UserError: a state that says something else than the tensors beside it.
    """
    slices: Replaced = {}
    for stored_state in [name for name in files.files_of if _STATE in name]:
        name = stored_state.split(_STATE)[0]
        state = _read_state(files, stored_state)
        nested = ("nested_quant_map", "nested_absmax") if state.nested else ()
        beside = [f"{name}.{part}" for part in ("absmax", "quant_map", *nested)]
        if missing := [part for part in (name, *beside) if part not in files.files_of]:
            raise misfit(files, stored_state, f"beside {', '.join(missing)}")
        blocks = -(-math.prod(state.shape) // state.block)
        groups = -(-blocks // state.nested[0]) if state.nested else 0
        storage = files.tensor(name).get_dtype()
        storage = storage if storage in _STORAGE else "U8"
        _require(files, name, storage, -(-math.prod(state.shape) // (2 * _STORAGE[storage])))
        _require(files, beside[0], "U8" if state.nested else "F32", blocks)
        levels, *more = (_numbers(files, *each) for each in zip(beside[1:], (16, 256, groups), strict=False))
        four_bit_slice = FourBitSlice(files.tensor(name), files.tensor(beside[0]), state, levels, tuple(more))
        slices[name] = four_bit_slice, (name, *beside, stored_state)
    return slices


def eight_bits(files: WeightFiles, dtype: str) -> Replaced:
    """By name: the slice, and the stored tensors that it stands for. ``dtype``: of the model, e.g. ``bfloat16``.

    Raises:
        UserError: scales that do not fit their weight.
    """
    slices: Replaced = {}
    for scales in [name for name in files.files_of if name.endswith(".SCB")]:
        module = scales.removesuffix(".SCB")
        name, layout = f"{module}.weight", module + _FORMAT
        if name not in files.files_of or files.tensor(name).get_dtype() != "I8":
            continue  # refused as what is left
        shape = files.tensor(name).get_shape()
        if len(shape) != 2 or f"{name}{_FORMAT}" in files.files_of:
            raise misfit(files, name, "a matrix in int8, row after row")
        parts = [name, scales]
        if layout in files.files_of:
            number = files.whole(layout).flatten().tolist()
            if number != [0]:
                raise misfit(files, layout, "0: int8 row after row")
            parts.append(layout)
        row_scales = _numbers(files, scales, shape[0])
        slices[name] = Int8Slice(files.tensor(name), row_scales, _DTYPES.get(dtype, torch.bfloat16)), tuple(parts)
    return slices


def _require(files: WeightFiles, name: str, dtype: str, elements: int) -> None:
    stored = files.tensor(name)
    if stored.get_dtype() != dtype or list(stored.get_shape()) not in ([elements], [elements, 1]):
        raise misfit(files, name, f"{dtype} [{elements}]")


def _numbers(files: WeightFiles, name: str, elements: int) -> torch.Tensor:
    """fp32 [elements], all finite."""
    _require(files, name, "F32", elements)
    values = files.whole(name).flatten()
    if not bool(values.isfinite().all()):
        raise misfit(files, name, "finite numbers")
    return values


def _read_state(files: WeightFiles, name: str) -> _State:
    stored = files.tensor(name)
    if stored.get_dtype() != "U8" or math.prod(stored.get_shape()) > _LONGEST:
        raise misfit(files, name, f"the bytes of a JSON text, at most {_LONGEST:,}")
    where = f"{files.directory}: {name}"
    state = parse_json(bytes(files.whole(name).flatten().tolist()), where)
    if not isinstance(state, dict):
        raise UserError("is no JSON object", field="quant_state", value=state, where=where)

    def number(key: str, least: float, most: float, kind: type[int] | type[float] = int) -> Any:
        value = state.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not least <= value <= most:
            accepted = f"{least:g} to {most:g}"
            raise UserError("is not read", field=f"quant_state.{key}", value=value, accepted=accepted, where=where)
        return value

    shape, block, dtype = state.get("shape"), number("blocksize", 2, 1 << 20), state.get("dtype")
    sized = isinstance(shape, list) and len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)
    if not isinstance(shape, list) or not sized or math.prod(shape) > _MOST or block % 2:
        raise UserError("is not read", field="quant_state.shape", value=shape, where=where,
                        accepted="rows and columns of a matrix, in blocks of an even size")  # fmt: skip
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise UserError("is not read", field="quant_state.dtype", value=dtype, accepted=", ".join(_DTYPES), where=where)
    nested = None
    if "nested_blocksize" in state:
        nested = number("nested_blocksize", 1, 1 << 20), float(number("nested_offset", -1e30, 1e30, float))
    return _State((shape[0], shape[1]), _DTYPES[dtype], block, nested)
