# mypy: allow-untyped-defs, allow-incomplete-defs
"""Many tensors in one launch: a table of addresses on the device, cut into chunks that programs take."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from hetero_kernels.limits import INTERPRETED

CHUNK = 65536  # elements that one program handles


@dataclass(frozen=True)
class TensorTable:
    """Addresses of tensors in columns (parameters, gradients, ...); the tensors of a row have one size.

    It holds no references: its tensors must live, and stay where they are, as long as it is used.
    """

    addresses: torch.Tensor  # int64 [columns, rows]
    sizes: torch.Tensor  # int64 [rows]
    owner: torch.Tensor  # int32 [chunks], row of each chunk
    first: torch.Tensor  # int64 [chunks], its first element in that row's tensors
    aligned: int  # so many chunks come first whose addresses are all multiples of 16 bytes

    @property
    def rows(self) -> int:
        return self.sizes.shape[0]

    @property
    def chunks(self) -> int:
        return self.owner.shape[0]

    def launches(self, max_grid: int) -> Iterator[tuple[int, int, bool]]:
        """(first chunk, chunks, aligned) of each launch: one misaligned tensor must not slow the others down."""
        for begin, end, aligned in ((0, self.aligned, True), (self.aligned, self.chunks, False)):
            for first in range(begin, end, max_grid):
                yield first, min(max_grid, end - first), aligned


def tensor_table(columns: Sequence[Sequence[torch.Tensor]], device: torch.device) -> TensorTable:
    """``columns``: lists of contiguous tensors of equal length; tensors of no element are left out. Of tensors that
    stay where they are, as those of one step after the other do, the table is made once."""
    keep = [i for i, x in enumerate(columns[0]) if x.numel()]
    for column in columns:
        assert len(column) == len(columns[0]), "columns of unlike length"
        for i in keep:
            assert column[i].is_contiguous() and column[i].numel() == columns[0][i].numel(), f"tensor {i} does not fit"
    addresses = tuple(tuple(column[i].data_ptr() for i in keep) for column in columns)
    sizes = tuple(columns[0][i].numel() for i in keep)
    # What is uploaded on one stream is there for later work of that stream.
    stream = None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device)
    return _table(addresses, sizes, device, stream)


@lru_cache(maxsize=16)  # a step has a few: norms of gradients, and updates by dtype and decay
def _table(
    addresses: tuple[tuple[int, ...], ...], sizes: tuple[int, ...], device: torch.device, stream: object
) -> TensorTable:
    odd = {i for i in range(len(sizes)) if INTERPRETED or any(column[i] % 16 for column in addresses)}
    order = sorted(range(len(sizes)), key=odd.__contains__)  # aligned ones first, otherwise in the order given
    chunks = [-(-sizes[i] // CHUNK) for i in order]
    counts = torch.tensor(chunks, dtype=torch.int64)
    owner = torch.arange(len(order), dtype=torch.int32).repeat_interleave(counts)
    begin = counts.cumsum(0) - counts
    first = (torch.arange(int(counts.sum())) - begin.repeat_interleave(counts)) * CHUNK
    rows = [[column[i] for i in order] for column in addresses]
    return TensorTable(
        _upload(torch.tensor(rows, dtype=torch.int64).view(len(addresses), len(order)), device),
        _upload(torch.tensor([sizes[i] for i in order], dtype=torch.int64), device),
        _upload(owner, device),
        _upload(first, device),
        sum(chunks[: len(order) - len(odd)]),
    )


def _upload(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Without waiting for what the device still has to do, as a copy from pageable memory would."""
    if device.type in ("cpu", "meta"):
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


@triton.jit
def pointer(addresses_ptr, column: tl.constexpr, rows, row, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Address of the tensor in (column, row) as a pointer to DTYPE."""
    x_ptr = tl.load(addresses_ptr + column * rows + row).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
    return x_ptr


@triton.jit
def chunk_begin(first_ptr, chunk, ALIGNED: tl.constexpr):
    """First element of a chunk, a multiple of CHUNK. The compiler is told, or it would load elements one by one."""
    begin = tl.load(first_ptr + chunk)
    if ALIGNED:
        begin = tl.multiple_of(begin, 16)
    return begin
