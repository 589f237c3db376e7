"""Weights of a Hugging Face directory in fewer bits, as slices of plain tensors: only what is asked for is read and
dequantised. Block FP8 and MXFP4 are here, bitsandbytes' formats in :mod:`hf_bitsandbytes`."""

from __future__ import annotations

from typing import Any

import torch

from hetero_megatron.checkpoint.hf_bitsandbytes import eight_bits, four_bits
from hetero_megatron.checkpoint.hf_directory import DequantisedSlice, Replaced, WeightFiles, misfit, shown
from hetero_megatron.spec.quantised import FP8, MXFP4, format_name, fp8_block, method_of
from hetero_megatron.utils.files import read_json_object
from hetero_megatron.utils.text import dtype_name

_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same negative
_GROUP = 32  # values of MXFP4 with one scale, two to a byte
_BIAS = 127  # of its scales' exponents


class Fp8Slice(DequantisedSlice):
    """E4M3 values [rows, columns] times the scale of their block, in fp32, rounded to bf16. The last blocks may be
    smaller."""

    def __init__(self, weight: Any, scales: Any, block: tuple[int, int]) -> None:
        self.weight, self.scales, self.block = weight, scales, block
        self.shape = tuple(weight.get_shape())

    def fits(self) -> bool:
        grid = [-(-size // block_size) for size, block_size in zip(self.shape, self.block)]
        return len(self.shape) == 2 and list(self.scales.get_shape()) == grid

    def _part(self, *axes: range) -> torch.Tensor:
        values = self.weight[tuple(slice(axis.start, axis.stop) for axis in axes)].float()
        first = [axis.start // block_size for axis, block_size in zip(axes, self.block, strict=True)]
        last = [-(-axis.stop // block_size) for axis, block_size in zip(axes, self.block, strict=True)]
        scales = self.scales[tuple(map(slice, first, last))].float()
        for dim, (axis, block_size) in enumerate(zip(axes, self.block, strict=True)):
            scales = scales.index_select(dim, torch.arange(axis.start, axis.stop) // block_size - first[dim])
        return (values * scales).bfloat16()


class Mxfp4Slice(DequantisedSlice):
    """Of all experts [experts, inputs, outputs], stored by outputs in groups of inputs: the lower half of a byte is the
    first of two values."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        self.blocks, self.scales = blocks, scales
        experts, outputs, groups, _ = blocks.get_shape()
        self.shape = (experts, groups * _GROUP, outputs)

    def _part(self, *axes: range) -> torch.Tensor:
        experts, inputs, outputs = axes
        first = inputs.start // _GROUP
        index = (
            slice(experts.start, experts.stop), slice(outputs.start, outputs.stop),
            slice(first, -(-inputs.stop // _GROUP)),
        )  # fmt: skip
        stored, exponents = self.blocks[index], self.scales[index].int() - _BIAS
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.bfloat16)
        values = torch.stack([table[(stored & 15).int()], table[(stored >> 4).int()]], -1).flatten(-2)
        values = torch.ldexp(values, exponents[..., None]).flatten(-2).transpose(1, 2)
        return values[:, inputs.start - first * _GROUP : inputs.stop - first * _GROUP]


def dequantise(files: WeightFiles) -> None:
    """Put slices that dequantise in the place of the tensors of a format that config.json says.

    Raises:
        UserError: scales that do not fit their weight.
    """
    path = files.directory / "config.json"
    config = read_json_object(path) if path.is_file() else {}
    method = method_of(config)
    if method is None:
        return
    if method == FP8:
        slices = _fp8(files, fp8_block(config, str(path)))
    elif method == MXFP4:
        slices = _mxfp4(files)
    else:
        slices = four_bits(files) | eight_bits(files, str(config.get("dtype") or config.get("torch_dtype")))
    for name, (stored_slice, parts) in slices.items():
        files.put(name, stored_slice, parts)
    if slices:
        to = " and ".join(sorted({dtype_name(str(weight.dtype)) for weight, _ in slices.values()}))
        tensors = f"{len(slices)} tensors in {format_name(method)}"
        files.notices.append(f"{files.directory}: {tensors} are dequantised to {to}")


def _fp8(files: WeightFiles, block: tuple[int, int]) -> Replaced:
    slices: Replaced = {}
    for scale in [name for name in files.files_of if name.endswith(f".weight{_SCALE}")]:
        name = scale.removesuffix(_SCALE)
        if name not in files.files_of or files.tensor(name).get_dtype() != "F8_E4M3":
            continue  # refused as what is left
        fp8_slice = Fp8Slice(files.tensor(name), files.tensor(scale), block)
        if not fp8_slice.fits() or files.tensor(scale).get_dtype() not in ("F32", "BF16"):
            raise misfit(
                files, scale, f"float scales of blocks {list(block)} of {shown(name)} {fp8_slice.get_shape()}"
            )
        slices[name] = fp8_slice, (name, scale)
    return slices


def _mxfp4(files: WeightFiles) -> Replaced:
    slices: Replaced = {}
    for blocks in [name for name in files.files_of if name.endswith(_BLOCKS)]:
        name = blocks.removesuffix(_BLOCKS)
        scales = name + _SCALES
        if scales not in files.files_of:
            continue
        stored, exponents = files.tensor(blocks), files.tensor(scales)
        shape = list(stored.get_shape())
        bytes_each = [tensor.get_dtype() for tensor in (stored, exponents)] == ["U8", "U8"]
        if len(shape) != 4 or shape[3] != _GROUP // 2 or list(exponents.get_shape()) != shape[:3] or not bytes_each:
            raise misfit(files, scales, f"bytes, one for each group of {_GROUP // 2} bytes of {shown(blocks)} {shape}")
        slices[name] = Mxfp4Slice(stored, exponents), (blocks, scales)
    return slices
