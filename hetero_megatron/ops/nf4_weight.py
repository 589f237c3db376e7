"""Frozen weights in 4 bits: NormalFloat4 with double quantisation (Dettmers et al., 2023), as bitsandbytes stores them.

A matrix [outputs, inputs] is blocks of 64 elements, row after row. Of each element 4 bits say which of 16 values it
has, times the largest magnitude of its block; that is kept in 8 bits, less the mean of all blocks and times the largest
such difference among 256 of them. In memory the 8 bits follow the 32 bytes of their block, so that some blocks of some
rows, which ranks may divide, are one box of bytes [outputs, 33 per block]. Values do not depend on how a plan cuts a
matrix: blocks are those of the whole, and a rank whose columns begin or end inside a block keeps all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from hetero_megatron.ops.spec import Case, uniform
from hetero_megatron.spec.lora import NF4_BLOCK, NF4_BYTES, NF4_CHUNK, NF4_GROUP, nf4_blocks

# Quantiles of a normal distribution, over the largest one; 0 among them (bitsandbytes, and the paper's appendix E).
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
SMALLEST = 1e-38  # of what is divided by: a block of zeros stays one
READ_CHUNK = 1 << 24  # elements that are in fp32 at once in host memory, where weights are read


def dynamic_values() -> torch.Tensor:
    """[256] fp32, ascending: 8-bit numbers of a sign, up to 6 zeros that stand for powers of ten, and a fraction in the
    bits that are left."""
    parts = [torch.tensor([0.0, 1.0], dtype=torch.float32)]
    for bits in range(7):
        edges = torch.linspace(0.1, 1.0, 2**bits + 1, dtype=torch.float32)
        middles = 10.0 ** (bits - 6) * ((edges[:-1] + edges[1:]) / 2)
        parts += [middles, -middles]
    return torch.cat(parts).sort().values


@dataclass(frozen=True)
class Nf4Scales:
    """What of a rank's part of a matrix lies beside its blocks.

    Attributes:
        groups: fp32 [groups of 256 blocks of the whole matrix]; mean:
            fp32 [1], of the largest magnitudes of all blocks.
        levels, codes: fp32 [16] and [256]: what 4 bits and 8 bits stand for; beside the weight, so that no product
            waits for them.
        first: number of its first block in the whole matrix; across: blocks of a whole row.
        skip, columns: the part begins so many columns after its first block does, and has so many.
        dequantize: the operator ``nf4_dequantize`` of the weight's stage; None: torch's.
    """

    groups: torch.Tensor
    mean: torch.Tensor
    levels: torch.Tensor
    codes: torch.Tensor
    first: int
    across: int
    skip: int
    columns: int
    dequantize: Callable[..., object] | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.groups, self.mean, self.levels, self.codes

    def copy_(self, other: Nf4Scales) -> None:
        """Take the values of the same part's."""
        for own_tensor, other_tensor in zip(self.tensors, other.tensors, strict=True):
            own_tensor.copy_(other_tensor)

    def of(self, rows: slice, columns: slice) -> Nf4Scales:
        """Those of a part of this part: of so many rows, and bytes of whole blocks."""
        a, b = columns.start // NF4_BYTES, columns.stop // NF4_BYTES
        return replace(self, first=self.first + rows.start * self.across + a, skip=0, columns=(b - a) * NF4_BLOCK)

    def widened(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The part [outputs, columns] of the matrix, computed in fp32 and rounded once to ``dtype``."""
        matrix = torch.empty(len(weight), self.columns, dtype=dtype, device=weight.device)
        (self.dequantize or nf4_dequantize)(weight, *self.tensors, matrix, self.first, self.across, self.skip)
        return matrix


def nf4_dequantize(
    weight: torch.Tensor, groups: torch.Tensor, mean: torch.Tensor, levels: torch.Tensor, codes: torch.Tensor,
    matrix: torch.Tensor, first: int, across: int, skip: int,
) -> tuple[()]:  # fmt: skip
    """The operator, in torch: write a part of a matrix, computed in fp32 and rounded once, whatever the dtypes.

    Args:
        weight: uint8 [outputs, 33 per block]; groups, mean, levels, codes, first, across, skip: see ``Nf4Scales``.
        matrix: [outputs, columns], written.
    """
    blocks = _blocks(weight)
    groups, mean, levels, codes = (x.float() for x in (groups, mean, levels, codes))
    places = torch.arange(blocks.shape[1], device=weight.device)
    for start, stop in _chunks(len(weight), blocks.shape[1] * NF4_BLOCK, NF4_CHUNK):
        part = blocks[start:stop]
        pairs = part[..., :-1]
        group = (torch.arange(start, stop, device=weight.device)[:, None] * across + first + places) // NF4_GROUP
        magnitudes = codes[part[..., -1].int()] * groups[group] + mean
        code_indices = torch.stack([pairs >> 4, pairs & 15], -1).flatten(2)
        values = (levels[code_indices.int()] * magnitudes[..., None]).flatten(1)
        matrix[start:stop] = values[:, skip : skip + matrix.shape[1]]
    return ()


def nf4_flops(*args: torch.Tensor) -> int:
    return args[5].numel()


def nf4_case(
    name: str, rows: int, columns: int, across: int, first: int = 0, skip: int = 0, seed: int = 0
) -> Case:
    """Random bytes, for ``rows`` of ``columns`` of a matrix with ``across`` blocks in a row."""
    blocks = -(-(skip + columns) // NF4_BLOCK)
    groups = max(first + (rows - 1) * across + blocks - 1, 0) // NF4_GROUP + 1
    weight = uniform(rows, blocks * NF4_BYTES, seed=seed, low=0.0, high=256.0).to(torch.uint8)
    tables = (
        uniform(groups, seed=seed + 1, low=0.001, high=0.02), uniform(1, seed=seed + 2, low=0.03, high=0.1),
        torch.tensor(VALUES), dynamic_values(),
    )  # fmt: skip
    matrix = torch.zeros(rows, columns, dtype=torch.float64)
    return Case(name, (weight, *(x.float().double() for x in tables), matrix, first, across, skip))


def nf4_cases() -> Iterable[Case]:
    """Columns that end and begin inside blocks, groups that begin inside rows, and no rows."""
    yield nf4_case("whole", 5, 128, 2)
    yield nf4_case("a cut inside blocks", 3, 75, 3, 7, 60, seed=4)
    yield nf4_case("several groups", 150, 129, 7, 250, 63, seed=2)
    yield nf4_case("one column", 2, 1, 1, 3, 63, seed=5)
    yield nf4_case("one block of nine", 40, 64, 9, seed=6)
    yield nf4_case("no rows", 0, 64, 1)
    yield nf4_case("many rows", 65_537, 64, 2, 1, seed=3)


def empty_nf4(
    rows: tuple[int, int], columns: tuple[int, int], shape: tuple[int, int], device: torch.device | str,
    dequantize: Callable[..., object] | None = None,
) -> tuple[torch.Tensor, Nf4Scales]:  # fmt: skip
    """(weight uint8 [rows, bytes], scales) of the rows and columns of a matrix [outputs, inputs], uninitialised."""
    a, b = nf4_blocks(*columns)
    count, blocks_per_row = rows[1] - rows[0], shape[1] // NF4_BLOCK
    groups = -(-shape[0] * blocks_per_row // NF4_GROUP)
    scales = Nf4Scales(
        torch.empty(groups, dtype=torch.float32, device=device), torch.empty(1, dtype=torch.float32, device=device),
        torch.tensor(VALUES, dtype=torch.float32, device=device), dynamic_values().to(device),
        rows[0] * blocks_per_row + a, blocks_per_row, columns[0] - a * NF4_BLOCK, columns[1] - columns[0],
        dequantize,
    )  # fmt: skip
    return torch.empty(count, (b - a) * NF4_BYTES, dtype=torch.uint8, device=device), scales


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """[outputs, blocks of a row, 33] of [outputs, bytes]: 32 bytes of two elements each, and the block's magnitude."""
    return weight.view(len(weight), weight.shape[1] // NF4_BYTES, NF4_BYTES)


def quantize_nf4(
    whole: torch.Tensor, rows: tuple[int, int], columns: tuple[int, int]
) -> tuple[torch.Tensor, Nf4Scales]:
    """Some rows and columns of a finite matrix [outputs, inputs], of which inputs are a multiple of 64; see
    :func:`empty_nf4`."""
    weight, scales = empty_nf4(rows, columns, (whole.shape[0], whole.shape[1]), whole.device)
    blocks = whole.detach().view(-1, NF4_BLOCK)
    largest = torch.cat([part.float().abs().amax(1) for part in blocks.split(READ_CHUNK // NF4_BLOCK)])
    scales.mean.copy_(largest.mean())
    around = largest - scales.mean
    count = len(scales.groups)
    padded = torch.zeros(count * NF4_GROUP, dtype=torch.float32, device=whole.device)
    padded[: len(around)] = around
    scales.groups.copy_(padded.view(count, NF4_GROUP).abs().amax(1))
    shares = padded.view(count, NF4_GROUP) * (1 / scales.groups.clamp(min=SMALLEST))[:, None]
    codes = torch.bucketize(shares.clamp_(-1, 1), _middles(scales.codes), out_int32=True).to(torch.uint8)
    a, b = nf4_blocks(*columns)
    block_index = slice(*rows), slice(a, b)
    packed = _blocks(weight)
    packed[..., -1] = codes.flatten()[: len(largest)].view(whole.shape[0], -1)[block_index]
    middles = _middles(scales.levels)
    inverse = (1 / largest.clamp(min=SMALLEST)).view(whole.shape[0], -1)
    for start, stop in _chunks(rows[1] - rows[0], (b - a) * NF4_BLOCK, READ_CHUNK):
        part = slice(rows[0] + start, rows[0] + stop)
        values = whole[part, a * NF4_BLOCK : b * NF4_BLOCK].float().unflatten(1, (-1, NF4_BLOCK))
        values = (values * inverse[part, a:b, None]).clamp_(-1, 1)
        code_indices = torch.bucketize(values, middles, out_int32=True).to(torch.uint8)
        packed[start:stop, :, :-1] = (code_indices[..., ::2] << 4) | code_indices[..., 1::2]
    return weight, scales


def _middles(ascending: torch.Tensor) -> torch.Tensor:
    """Between neighbours, in fp32 rounded down: an fp32 number is above a middle if and only if it is above this."""
    exact = (ascending[:-1].double() + ascending[1:].double()) / 2
    rounded = exact.float()
    return torch.where(rounded.double() > exact, rounded.nextafter(rounded.new_tensor(-1e9)), rounded)


def _chunks(rows: int, columns: int, elements: int) -> list[tuple[int, int]]:
    step = max(1, elements // max(columns, 1))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
