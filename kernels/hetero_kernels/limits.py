"""What a chip allows, and how large the tiles of a kernel are on it: data, never constants in a kernel.

:class:`Limits` holds a chip's limits; every function of this package takes one as ``limits``, so a vendor
passes its own. Tile sizes come from JSON tables (``tables/<arch>.json``, else ``tables/generic.json``; see
:mod:`hetero_kernels.tune`, which writes them offline). Nothing is tuned while a model trains.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import triton
import triton.language as tl

TABLES = Path(__file__).resolve().parent / "tables"
# Read when the kernels are decorated, as Triton does.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")
if INTERPRETED:
    from hetero_kernels.interpreter import quicken

    quicken()

TRITON_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
# Whose launches count the first axis in 31 bits; drivers do not report it, and others' may have 16 for all axes.
WIDE_GRIDS = ("cuda", "hip")  # lint: allow vendor (Triton's names of its backends)
DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Limits:
    """Limits of one chip.

    Attributes:
        arch: which tuning table is used, for example ``cuda-90``; ``generic`` fits everything.
        processors: cores that run programs at the same time (SMs, CUs, AI cores).
        max_grid: programs in one launch; larger work is looped over or launched in pieces.
        max_block: elements of one row (or one tile's axis) that a program holds at once.
        max_warps: warps of one program.
        shared_bytes: on-chip memory of one program; loads in flight of the attention kernels are kept below it.
        table: path of a JSON file that replaces the built-in table.
    """

    arch: str = "generic"
    processors: int = 64
    max_grid: int = 65535
    max_block: int = 65536
    max_warps: int = 16
    shared_bytes: int = 64 * 1024
    table: str | None = None


INTERPRETER = Limits(arch="interpreter", processors=2)


def limits_of(device: torch.device) -> Limits:
    """Limits of ``device`` as its Triton driver reports them; RuntimeError where no Triton kernel can run."""
    if INTERPRETED:
        return INTERPRETER
    if device.type == "cpu":
        raise RuntimeError(
            "Triton kernels run on the CPU only under its interpreter: set TRITON_INTERPRET=1 before hetero_kernels "
            "is imported"
        )
    return _detect(device.type, device.index)


@lru_cache
def _detect(kind: str, index: int | None) -> Limits:
    driver = triton.runtime.driver.active
    properties = driver.utils.get_device_properties(driver.get_current_device() if index is None else index)
    target = driver.get_current_target()
    return Limits(
        arch=f"{target.backend}-{target.arch}",
        processors=int(properties["multiprocessor_count"]),
        max_grid=2**31 - 1 if target.backend in WIDE_GRIDS else Limits.max_grid,
        max_warps=1024 // int(target.warp_size),
        shared_bytes=int(properties["max_shared_mem"]),
    )


Table = dict[str, list[dict[str, object]]]


@lru_cache
def load_table(arch: str, path: str | None) -> Table:
    """The rules of one chip; those of ``generic.json`` where it has none of its own (warned about once)."""
    generic: Table = json.loads((TABLES / "generic.json").read_text(encoding="utf-8"))["ops"]
    source = Path(path) if path else TABLES / f"{arch}.json"
    if not source.exists():
        if path:
            raise FileNotFoundError(f"tuning table {path} does not exist")
        warnings.warn(f"hetero_kernels has no tuning table for {arch}: the generic one is used", stacklevel=2)
        return generic
    return {**generic, **json.loads(source.read_text(encoding="utf-8"))["ops"]}


@lru_cache(maxsize=4096)
def config(op: str, size: int, dtype: torch.dtype, limits: Limits) -> dict[str, int]:
    """Tile sizes of ``op`` for a row (or head) of ``size`` elements: the first rule of the table that fits.

    A rule is ``{"max_size": n or null, "dtypes": [...] (optional), "config": {...}}``.
    """
    for rule in load_table(limits.arch, limits.table)[op]:
        bound, dtypes = rule.get("max_size"), rule.get("dtypes")
        if bound is not None and size > bound:  # type: ignore[operator]
            continue
        if dtypes is not None and DTYPE_NAMES[dtype] not in dtypes:  # type: ignore[operator]
            continue
        found: dict[str, int] = dict(rule["config"])  # type: ignore[call-overload]
        found["num_warps"] = min(found["num_warps"], limits.max_warps)
        return found
    raise LookupError(f"the tuning table of {limits.arch} has no rule of {op} for size {size}, {dtype}")


@dataclass(frozen=True)
class RowTile:
    """How a kernel walks over a matrix: ``grid`` programs, each over tiles of block_rows x block_cols."""

    grid: tuple[int]
    block_rows: int
    block_cols: int
    whole: bool  # a tile holds whole rows
    num_warps: int


@lru_cache(maxsize=4096)
def row_tile(op: str, rows: int, width: int, dtype: torch.dtype, limits: Limits) -> RowTile:
    """Tiles of ``config['tile']`` elements; programs loop over rows where the grid may not hold them all.

    ``config['programs']`` (per processor; 0 or absent: one program per tile) bounds the grid of persistent kernels.
    """
    chosen = config(op, width, dtype, limits)
    block_cols = min(power_of_two(width), chosen.get("max_cols", limits.max_block), limits.max_block)
    block_rows = max(1, min(chosen["tile"] // block_cols, power_of_two(rows)))
    grid = min(cdiv(rows, block_rows), limits.max_grid)
    if chosen.get("programs"):
        grid = min(grid, chosen["programs"] * limits.processors)
    return RowTile((max(grid, 1),), block_rows, block_cols, block_cols >= width, chosen["num_warps"])


@lru_cache(maxsize=4096)
def flat_tile(op: str, rows: int, width: int, dtype: torch.dtype, limits: Limits) -> RowTile:
    """Tiles of an elementwise kernel, which walks over both axes: the grid counts tiles of the whole matrix."""
    chosen = config(op, width, dtype, limits)
    block_cols = min(power_of_two(width), chosen["tile"], limits.max_block)
    block_rows = max(1, min(chosen["tile"] // block_cols, power_of_two(rows)))
    tiles = cdiv(rows, block_rows) * cdiv(width, block_cols)
    grid = max(min(tiles, limits.max_grid), 1)
    return RowTile((grid,), block_rows, block_cols, block_cols >= width, chosen["num_warps"])


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n`` (and at least 1)."""
    return 1 << max(n - 1, 0).bit_length()


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """All arithmetic is done in fp32, and in fp64 on fp64 tensors."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics: fp32, or fp64 for fp64 tensors."""
    return torch.promote_types(dtype, torch.float32)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., n] as [rows, n] with adjacent elements in a row; copied only where no view exists."""
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] <= 1 else flat.contiguous()


def as_flat_rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of one shape for an elementwise kernel: one long row each if all are contiguous, else :func:`as_rows`.

    Not where a row would come near 2**31 elements: rounded up to blocks, its width has to fit 32 bits in a kernel.
    """
    if tensors[0].numel() <= 1 << 30 and all(t.is_contiguous() for t in tensors):
        return [t.view(1, -1) for t in tensors]
    return [as_rows(t) for t in tensors]
