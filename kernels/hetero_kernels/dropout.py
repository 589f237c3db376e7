# mypy: allow-untyped-defs, allow-incomplete-defs
"""Dropout by Philox 4x32-10 (Salmon et al., 2011): which elements stay is a function of a key and of their place.

Number ``column % 8`` of block ``(column // 8, row, head, sample)``: 16 bits of its four words, low halves first. An
element stays if that is at least ``dropped``, of 2**16. No mask is stored: backward makes it anew.
"""

import torch
import triton
import triton.language as tl

from hetero_kernels.device_math import load_tile, store_tile
from hetero_kernels.limits import INTERPRETED, Limits, accumulator, as_rows, cdiv, limits_of, power_of_two, wide

_WORD = 0xFFFFFFFF
# What attention's kernels take besides: a launch with other values is not another kernel.
DROP_ARGUMENTS = ("drop_key", "drop_sample", "drop_head", "drop_q", "drop_k")


def dropout_keep_reference(
    key: int | torch.Tensor, dropped: int, columns: torch.Tensor, rows: torch.Tensor, head: int | torch.Tensor,
    sample: int | torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Which elements stay; int64 tensors that broadcast, one element at a time as the definition says."""
    counter = [columns // 8, rows, head, sample]
    a, b, c, d = (torch.as_tensor(x, device=columns.device) & _WORD for x in counter)
    x, y = key & _WORD, key >> 32 & _WORD
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57  # int64: they wrap around, and are cut to 64 bits alike
        a, b, c, d = (q >> 32 & _WORD) ^ b ^ x, q & _WORD, (p >> 32 & _WORD) ^ d ^ y, p & _WORD
        x, y = x + 0x9E3779B9 & _WORD, y + 0xBB67AE85 & _WORD
    lane = columns % 8
    word = torch.where(lane < 2, a, torch.where(lane < 4, b, torch.where(lane < 6, c, d)))
    return torch.where(lane % 2 == 1, word >> 16, word & 0xFFFF) >= dropped


def dropout_reference(
    x: torch.Tensor, tokens: torch.Tensor, *, dropped: int, key: int, sample: int = 0, feature: int = 0
) -> torch.Tensor:
    """See :func:`dropout`."""
    b, _, features = x.shape
    columns = torch.arange(features, device=x.device) + feature
    samples = torch.arange(b, device=x.device)[:, None, None] + sample
    keep = dropout_keep_reference(key, dropped, columns, tokens[None, :, None], 0, samples)
    return (x.to(wide(x.dtype)) * keep * (65536 / (65536 - dropped))).to(x.dtype)


@triton.jit
def number(value):
    """A number that is given, or that lies where ``value`` points."""
    if value.dtype.is_ptr():
        value = tl.load(value)
    return value


@triton.jit
def keep_blocks(key, group, row, head, sample, DROPPED: tl.constexpr):
    """bool [rows, 8 x groups] of whole blocks: group [groups], row [rows]; head and sample are scalars, or
    [rows, 1]."""
    a, b, c, d = tl.philox(key, group[None, :], row[:, None], head, sample)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return tl.interleave((words & 0xFFFF) >= DROPPED, (words >> 16) >= DROPPED)


@triton.jit
def keep_each(key, column, row, head, sample, DROPPED: tl.constexpr):
    """bool, of columns from anywhere: a block for every element. ``column`` and ``row`` broadcast."""
    a, b, c, d = tl.philox(key, column >> 3, row, head, sample)
    lane = column & 7
    word = tl.where(lane < 2, a, tl.where(lane < 4, b, tl.where(lane < 6, c, d)))
    return tl.where((lane & 1) == 1, word >> 16, word & 0xFFFF) >= DROPPED


@triton.jit
def keep_tile(
    key, first_column, row, head, sample, DROPPED: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr
):
    """bool [rows, COLUMNS]: columns from ``first_column`` on, which where ALIGNED is a multiple of 8."""
    if ALIGNED:
        keep = keep_blocks(key, (first_column >> 3) + tl.arange(0, COLUMNS // 8), row, head, sample, DROPPED)
    else:
        keep = keep_each(key, (first_column + tl.arange(0, COLUMNS))[None, :], row[:, None], head, sample, DROPPED)
    return keep


@triton.jit(do_not_specialize=["key", "sample", "feature", "across", "tasks"])
def _dropout(
    x_ptr, y_ptr, tokens_ptr, key, sample, feature, tasks, across, lines, length, width, x_stride,
    DROPPED: tl.constexpr, ACC: tl.constexpr, LINES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    key, sample = number(key), number(sample).to(tl.int32)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        line = (task // across) * LINES + tl.arange(0, LINES)
        live = line < lines
        group = (feature >> 3) + (task % across) * GROUPS + tl.arange(0, GROUPS)
        column = ((feature >> 3) + (task % across) * GROUPS) * 8 - feature + tl.arange(0, 8 * GROUPS)
        token = tl.load(tokens_ptr + line % length, mask=live, other=0).to(tl.int32)
        keep = keep_blocks(key, group, token, 0, (line // length + sample)[:, None], DROPPED)
        inside = (column >= 0) & (column < width)
        at = line.to(tl.int64)
        x = load_tile(x_ptr, at, live, column, inside, x_stride, ACC)
        store_tile(y_ptr, at, live, column, inside, width, tl.where(keep, x * (65536.0 / (65536.0 - DROPPED)), 0.0))


def dropout(
    x: torch.Tensor, tokens: torch.Tensor, *, dropped: int, key: int | torch.Tensor, sample: int | torch.Tensor = 0,
    feature: int = 0, limits: Limits | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [b, s, features] with elements at 0 of probability ``dropped`` / 2**16 and the others scaled; its own adjoint.

    Args:
        tokens: [s] int64, the number of each token.
        key: 64 bits; sample: number of the first row. Integers, or int64 [] on x's device, read when the kernel runs.
        feature: number of the first one.
    """
    b, length, width = x.shape
    assert tokens.shape == (length,) and 0 <= dropped < 65536
    y = torch.empty((b, length, width), dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    limits, rows, last = limits or limits_of(x.device), as_rows(x), feature + width - 1
    groups = min(power_of_two(last // 8 - feature // 8 + 1), 128)
    across = cdiv(last // 8 - feature // 8 + 1, groups)
    lines = min((16384 if INTERPRETED else 128) // groups, power_of_two(b * length))
    tasks = cdiv(b * length, lines) * across
    _dropout[(min(tasks, limits.max_grid),)](
        rows, y, tokens.contiguous(), signed(key, 64), signed(sample, 32), feature, tasks, across, b * length,
        length, width, rows.stride(0), dropped, accumulator(x.dtype), lines, groups, num_warps=4,
    )  # fmt: skip
    return y


def signed(value: int | torch.Tensor, bits: int) -> int | torch.Tensor:
    """``value`` modulo 2**bits as a signed integer, which a kernel takes whatever the value; int64 [] on the device
    stay there, and the kernel cuts them (:func:`number`)."""
    if isinstance(value, torch.Tensor):
        return value
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
