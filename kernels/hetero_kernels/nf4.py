# mypy: allow-untyped-defs, allow-incomplete-defs
"""Matrices of their NormalFloat4 form with double quantisation (Dettmers et al., 2023), bit for bit as in torch.

A kernel of its own, whose result the library's product takes, and not a part of the product: what is multiplied then
does not depend on who multiplies, a block is decoded once per product instead of once per tile of tokens, and the
same matrix, transposed by its strides, makes the gradient of the input.

The product of a block's 8 bits with its group's magnitude is rounded before the mean is added (``enable_fp_fusion``):
one multiply-add would give another last bit than torch does.
"""

import torch
import triton
import triton.language as tl

from hetero_kernels.device_math import narrow
from hetero_kernels.limits import Limits, config, limits_of, power_of_two

BLOCK, BYTES, GROUP = 64, 33, 256  # elements of a block, its bytes, and blocks of a group


def nf4_dequantize_reference(
    weight: torch.Tensor, groups: torch.Tensor, mean: torch.Tensor, levels: torch.Tensor, codes: torch.Tensor,
    matrix: torch.Tensor, *, first: int = 0, across: int, skip: int = 0,
) -> torch.Tensor:  # fmt: skip
    """See :func:`nf4_dequantize`."""
    blocks = weight.reshape(len(weight), weight.shape[1] // BYTES, BYTES).long()
    rows = torch.arange(len(weight), device=weight.device)[:, None] * across + first
    group = (rows + torch.arange(blocks.shape[1], device=weight.device)) // GROUP
    magnitudes = codes.float()[blocks[..., -1]] * groups.float()[group] + mean.float()
    pairs = blocks[..., :-1]
    values = levels.float()[torch.stack([pairs >> 4, pairs & 15], -1).flatten(2)] * magnitudes[..., None]
    return matrix.copy_(values.flatten(1)[:, skip : skip + matrix.shape[1]])


@triton.jit(do_not_specialize=["first_program", "first", "across"])
def nf4_values(
    weight_ptr, groups_ptr, mean_ptr, levels_ptr, codes_ptr, matrix_ptr, first_program, blocks, row_blocks, first,
    across, skip, columns, weight_s, matrix_s, BLOCK: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """TILE blocks of rows of ``row_blocks`` blocks each, ``weight_s`` bytes and ``matrix_s`` elements apart."""
    block = (tl.program_id(0) + first_program).to(tl.int64) * TILE + tl.arange(0, TILE)
    live, row, place = block < blocks, block // row_blocks, block % row_blocks
    byte = tl.arange(0, BLOCK // 2)
    bytes_ptr = weight_ptr + row * weight_s + place * BYTES
    code = tl.load(bytes_ptr + BYTES - 1, mask=live, other=0).to(tl.int32)
    group = (first + row * across + place) // GROUP
    magnitude = tl.load(codes_ptr + code).to(tl.float32) * tl.load(groups_ptr + group, mask=live, other=0.0).to(
        tl.float32
    )
    magnitude += tl.load(mean_ptr).to(tl.float32)
    pair = tl.load(bytes_ptr[:, None] + byte[None, :], mask=live[:, None], other=0).to(tl.int32)
    level = tl.reshape(tl.join(pair >> 4, pair & 15), [TILE, BLOCK])
    value = tl.load(levels_ptr + level).to(tl.float32) * magnitude[:, None]
    column = place[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :] - skip
    inside = live[:, None] & (column >= 0) & (column < columns)
    at = matrix_ptr + row[:, None] * matrix_s + column
    tl.store(at, narrow(value, matrix_ptr.dtype.element_ty), mask=inside)


def nf4_dequantize(
    weight: torch.Tensor, groups: torch.Tensor, mean: torch.Tensor, levels: torch.Tensor, codes: torch.Tensor,
    matrix: torch.Tensor, *, first: int = 0, across: int, skip: int = 0, limits: Limits | None = None,
) -> torch.Tensor:  # fmt: skip
    """Write a matrix, or a part of it, of its 4-bit form, computed in fp32 and rounded once.

    Args:
        weight: uint8 [outputs, 33 per block of 64 columns], rows may lie apart: of each block 32 bytes of two
            elements, the first one in the upper half, and one that says how large its largest magnitude is.
        groups: [groups of 256 blocks of the whole matrix]; mean: [1]; levels: [16]; codes: [256]; all in fp32.
        matrix: [outputs, columns], written and returned; rows may lie apart.
        first: number of the part's first block in the whole matrix; across: blocks of a whole row.
        skip: columns of the first blocks that the part does not have.
    """
    assert weight.shape[1] % BYTES == 0 and weight.stride(1) == 1, "weight: expected [outputs, 33 bytes per block]"
    assert len(weight) == len(matrix), f"{len(weight)} rows of weight for {len(matrix)} of the matrix"
    assert matrix.shape[1] <= 1 or matrix.stride(1) == 1, "matrix: elements of a row lie side by side"
    assert skip + matrix.shape[1] <= weight.shape[1] // BYTES * BLOCK, "matrix: more columns than weight has"
    limits = limits or limits_of(weight.device)
    if not matrix.numel():
        return matrix
    chosen = config("nf4_dequantize", weight.shape[1], matrix.dtype, limits)
    row_blocks = weight.shape[1] // BYTES
    blocks = len(weight) * row_blocks
    tile = min(chosen["blocks"], power_of_two(blocks))
    programs = triton.cdiv(blocks, tile)
    for begin in range(0, programs, limits.max_grid):
        nf4_values[(min(limits.max_grid, programs - begin),)](
            weight, groups, mean, levels, codes, matrix, begin, blocks, row_blocks, first, across, skip,
            matrix.shape[1], weight.stride(0), matrix.stride(0), BLOCK, BYTES, GROUP, tile,
            num_warps=chosen["num_warps"], enable_fp_fusion=False,
        )  # fmt: skip
    return matrix
