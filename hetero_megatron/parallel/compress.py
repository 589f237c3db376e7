"""Differences of weights in 16, 8 or 4 bits: ``bf16``, or integers with an fp32 scale for each block of a row.

A scale is the block's largest magnitude over the largest integer (127 or 7), integers are rounded to nearest, ties to
even. So an element is off by half a scale at most, and zero stays zero. No scale is below the smallest normal number of
fp32, as some devices have none below, nor so large that an element could overflow. What a block decodes to depends on
nothing but its elements. A block with NaN or Inf has none that is finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hetero_megatron.layout import Box
from hetero_megatron.plans.outer import BLOCK, COMPRESS, SCALE_BYTES, message_bytes

_FP32 = torch.finfo(torch.float32)


class Codes(NamedTuple):
    """Of a box of a tensor, which says where in its rows the blocks begin: values in bf16, or in int8 (those of 4 bits
    too) with fp32 scales [rows..., blocks of a row that the box has something of]."""

    box: Box
    values: torch.Tensor
    scales: torch.Tensor | None

    def part(self, box: Box) -> Codes:
        """Those of a box inside this one."""
        index, scales = box.slices(self.box), self.scales
        if scales is not None:
            first, (low, high) = _blocks(self.box)[0], _blocks(box)
            scales = scales[*index[:-1], low - first : high - first]
        return Codes(box, self.values[index], scales)


def _blocks(box: Box) -> tuple[int, int]:
    """First block of a row that the box has something of, and the one after the last."""
    return box.lo[-1] // BLOCK, -(-box.hi[-1] // BLOCK)


def _scales_shape(box: Box) -> tuple[int, ...]:
    low, high = _blocks(box)
    return *box.shape[:-1], high - low


def size_of(boxes: Sequence[Box], compress: str) -> int:
    """Bytes of one message of codes of these boxes."""
    blocks = sum(math.prod(_scales_shape(box)) for box in boxes)
    return message_bytes(compress, 0, sum(box.size for box in boxes), blocks)


def _block_of_column(box: Box, device: torch.device) -> torch.Tensor:
    return torch.arange(box.lo[-1], box.hi[-1], device=device) // BLOCK - _blocks(box)[0]


def encode(values: torch.Tensor, box: Box, compress: str) -> Codes:
    """``values``: fp32 or fp64, of the box's shape."""
    if compress == "bf16":  # larger than any of bf16: its largest one
        top = torch.finfo(torch.bfloat16).max
        return Codes(box, torch.where(values.isinf(), values, values.clamp(-top, top)).bfloat16(), None)
    levels = 2.0 ** (COMPRESS[compress] - 1) - 1
    largest = _largest(values, box)
    # What fp32 has at most, over 127, is rounded up: times 127 it would overflow.
    scales = (largest / levels).clamp(_FP32.tiny, _FP32.max / levels * (1 - _FP32.eps)).float()
    scales = torch.where(largest.isfinite(), scales, largest.float())
    element_scales = scales[..., _block_of_column(box, values.device)]
    return Codes(box, (values / element_scales).round_().clamp_(-levels, levels).to(torch.int8), scales)


def _largest(values: torch.Tensor, box: Box) -> torch.Tensor:
    """Largest magnitude of each block, or of what the box has of it; NaN where it has one."""
    size = values.abs()
    columns = size.shape[-1]
    head = min(-box.lo[-1] % BLOCK, columns)
    tail = head + (columns - head) // BLOCK * BLOCK
    parts = []
    if head:
        parts.append(size[..., :head].amax(-1, keepdim=True))
    if tail > head:
        parts.append(size[..., head:tail].unflatten(-1, (-1, BLOCK)).amax(-1))
    if tail < columns:
        parts.append(size[..., tail:].amax(-1, keepdim=True))
    return torch.cat(parts, -1)


def decode(codes: Codes, dtype: torch.dtype) -> torch.Tensor:
    """What the codes stand for, of the box's shape: the same bits wherever that is."""
    if codes.scales is None:
        return codes.values.to(dtype)
    return codes.values.to(dtype) * codes.scales[..., _block_of_column(codes.box, codes.values.device)]


def to_bytes(parts: Sequence[Codes], compress: str) -> torch.Tensor:
    """One message, uint8: all scales, then all elements, of 4 bits the first of two in the lower half of a byte."""
    values = torch.cat([codes.values.reshape(-1) for codes in parts])
    if compress == "bf16":
        return values.view(torch.uint8)
    scales = torch.cat([codes.scales.reshape(-1) for codes in parts if codes.scales is not None])
    narrow = values.view(torch.uint8)
    if COMPRESS[compress] == 4:
        pairs = torch.nn.functional.pad(narrow, (0, narrow.numel() % 2)).view(-1, 2)
        narrow = pairs[:, 0] & 15 | pairs[:, 1] << 4
    return torch.cat([scales.view(torch.uint8), narrow])


def from_bytes(message: torch.Tensor, boxes: Sequence[Box], compress: str) -> list[Codes]:
    """What :func:`to_bytes` made of codes of these boxes; the message may begin anywhere in memory."""
    sizes = [box.size for box in boxes]
    if compress == "bf16":
        values = message.clone().view(torch.bfloat16).split(sizes)
        return [Codes(box, part.view(box.shape), None) for box, part in zip(boxes, values, strict=True)]
    shapes = [_scales_shape(box) for box in boxes]
    blocks = [math.prod(shape) for shape in shapes]
    head = SCALE_BYTES * sum(blocks)
    scales = message[:head].clone().view(torch.float32).split(blocks)
    narrow = message[head:].view(torch.int8)
    if COMPRESS[compress] == 4:
        narrow = torch.stack([narrow << 4 >> 4, narrow >> 4], -1).view(-1)[: sum(sizes)]
    return [
        Codes(box, part.view(box.shape), scale.view(shape))
        for box, part, scale, shape in zip(boxes, narrow.split(sizes), scales, shapes, strict=True)
    ]
