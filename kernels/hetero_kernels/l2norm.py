# mypy: allow-untyped-defs, allow-incomplete-defs
"""The 2-norm of many tensors together. The order of the sum is fixed: the same tensors give the same bits."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hetero_kernels.device_math import widen
from hetero_kernels.limits import TRITON_DTYPES, Limits, accumulator, config, limits_of, wide
from hetero_kernels.multi_tensor import CHUNK, chunk_begin, pointer, tensor_table


def l2norm_reference(tensors: Sequence[torch.Tensor], *, squared: bool = False) -> torch.Tensor:
    """sqrt of the sum of all squares, in at least fp32."""
    total = torch.stack([x.to(wide(x.dtype)).square().sum() for x in tensors]).sum()
    return total if squared else total.sqrt()


@triton.jit
def _chunk_squares(x_ptr, begin, size, MASKED: tl.constexpr, ACC: tl.constexpr, CHUNK_SIZE: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    total = tl.zeros([BLOCK], ACC)
    for start in range(0, CHUNK_SIZE, BLOCK):
        at = begin + start + tl.arange(0, BLOCK)
        if MASKED:
            x = tl.load(x_ptr + at, mask=at < size, other=0.0)
        else:
            x = tl.load(x_ptr + at)
        x = widen(x, ACC)
        total += x * x
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["first_chunk"])
def _squares(
    addresses_ptr, sizes_ptr, owner_ptr, first_ptr, partial_ptr, first_chunk, rows,
    DTYPE: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr, CHUNK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) + first_chunk
    row = tl.load(owner_ptr + chunk)
    size = tl.load(sizes_ptr + row)
    begin = chunk_begin(first_ptr, chunk, ALIGNED)
    x_ptr = pointer(addresses_ptr, 0, rows, row, DTYPE, ALIGNED)
    if begin + CHUNK_SIZE <= size:
        tl.store(partial_ptr + chunk, _chunk_squares(x_ptr, begin, size, False, ACC, CHUNK_SIZE, BLOCK))
    else:
        tl.store(partial_ptr + chunk, _chunk_squares(x_ptr, begin, size, True, ACC, CHUNK_SIZE, BLOCK))


@triton.jit
def _finish(partial_ptr, out_ptr, count, ROOT: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], ACC)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + at, mask=at < count, other=0.0)
    norm = tl.sum(total, 0)
    if ROOT:
        norm = tl.sqrt(norm)
    tl.store(out_ptr, norm)


def l2norm(tensors: Sequence[torch.Tensor], *, squared: bool = False, limits: Limits | None = None) -> torch.Tensor:
    """Norm of all tensors (contiguous, any dtypes) -> a scalar in the widest of fp32 and theirs; 0 for none.

    ``squared``: the sum of squares, for sums over ranks.
    """
    if not tensors:
        return torch.zeros(())
    device = tensors[0].device
    limits = limits or limits_of(device)
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    groups = [
        [x for x in tensors if x.dtype == kind] for kind in TRITON_DTYPES if any(x.dtype == kind for x in tensors)
    ]
    assert sum(map(len, groups)) == len(tensors), "l2norm: tensors of a floating-point dtype"
    tables = [tensor_table([group], device) for group in groups]
    count = sum(table.chunks for table in tables)
    partial = torch.empty(count, dtype=dtype, device=device)
    out = torch.empty((), dtype=dtype, device=device)
    chosen = config("l2norm", CHUNK, dtype, limits)
    done = 0
    for group, table in zip(groups, tables):
        for first, chunks, aligned in table.launches(limits.max_grid):
            _squares[(chunks,)](
                table.addresses, table.sizes, table.owner, table.first, partial[done:], first, table.rows,
                TRITON_DTYPES[group[0].dtype], accumulator(dtype), aligned, CHUNK, chosen["tile"],
                num_warps=chosen["num_warps"],
            )  # fmt: skip
        done += table.chunks
    _finish[(1,)](partial, out, count, not squared, accumulator(dtype), min(4096, limits.max_block), num_warps=4)
    return out
