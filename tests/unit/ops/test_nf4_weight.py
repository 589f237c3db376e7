"""Weights in 4 bits: bitsandbytes' numbers where it is installed, NumPy's everywhere, whole and in parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hetero_megatron.layout import Box
from hetero_megatron.ops.int8_weight import narrow_product, widened
from hetero_megatron.ops.nf4_weight import VALUES, dynamic_values, quantize_nf4
from hetero_megatron.spec.adapted_model import logical_box, stored_box, stored_bytes
from hetero_megatron.spec.tensors import Axis, LogicalTensor
from tests.support.nf4_reference import NF4, dynamic, rounded


def weight(rows: int, columns: int) -> torch.Tensor:
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 0.02
    drawn[2, :64] = 0.0  # a block of zeros
    drawn[3] *= 1e-3
    return drawn


def test_tables_are_the_published_ones() -> None:
    assert np.array_equal(np.array(VALUES, np.float32), NF4)
    assert np.array_equal(dynamic_values().numpy(), dynamic())
    assert len(dynamic()) == 256


@pytest.mark.parametrize("shape", [(8, 64), (37, 192), (300, 128)])
def test_values_are_those_of_the_rule(shape: tuple[int, int]) -> None:
    """Several groups of 256 blocks, the last one not full; of 16-bit weights, too."""
    for dtype in (torch.float32, torch.bfloat16):
        given = weight(*shape).to(dtype)
        packed, scales = quantize_nf4(given, (0, shape[0]), (0, shape[1]))
        assert packed.dtype == torch.uint8 and packed.numel() == given.numel() // 64 * 33
        wanted = rounded(given.float().numpy())
        np.testing.assert_array_equal(widened(packed, scales, torch.float32).numpy(), wanted)
        exact = widened(packed, scales, torch.float32)
        assert torch.equal(widened(packed, scales, torch.bfloat16), exact.to(torch.bfloat16))
        assert torch.equal(widened(packed, scales, torch.float64), exact.double())


def test_values_beside_the_middles() -> None:
    """Of two neighbours the nearer one, to the last bit of fp32."""
    middle = (NF4[:-1] + NF4[1:]) / np.float32(2)
    around = np.concatenate([np.nextafter(middle, np.float32(-2)), middle, np.nextafter(middle, np.float32(2))])
    given = np.zeros((1, 64), np.float32)
    given[0, : len(around)], given[0, -1] = around, 1.0
    packed, scales = quantize_nf4(torch.from_numpy(given), (0, 1), (0, 64))
    np.testing.assert_array_equal(widened(packed, scales, torch.float32).numpy(), rounded(given))


def test_bitsandbytes_has_the_same_values() -> None:
    """But for scales beside the middle of two of their 8-bit numbers: on CPUs bitsandbytes finds those from a table."""
    functional = pytest.importorskip("bitsandbytes.functional")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = weight(300, 256).to(dtype)
        packed, state = functional.quantize_4bit(given, blocksize=64, compress_statistics=True, quant_type="nf4")
        mine, scales = quantize_nf4(given, (0, 300), (0, 256))
        blocks, known, nested = mine.view(-1, 33), state.absmax.int(), state.state2
        assert torch.equal(blocks[:, :32].flatten(), packed.flatten())
        assert torch.equal(scales.groups, nested.absmax) and torch.equal(scales.mean[0], state.offset)
        assert torch.equal(scales.levels, state.code) and torch.equal(scales.codes, nested.code)
        other = (blocks[:, 32].int() != known).nonzero()[:, 0]
        largest = given.float().view(-1, 64).abs().amax(1)
        share = ((largest - scales.mean) / scales.groups.repeat_interleave(256)[: len(largest)])[other]
        middle = (scales.codes[known[other]] + scales.codes[blocks[other, 32].int()]) / 2
        assert len(other) < 0.02 * len(known) and bool(((share - middle).abs() < 2**-15).all())
        same = torch.ones(len(known), dtype=torch.bool).index_fill(0, other, False)
        got, want = (
            w.view(-1, 64)[same] for w in (widened(mine, scales, dtype), functional.dequantize_4bit(packed, state))
        )
        assert torch.equal(got, want)


def test_parts_are_those_of_the_whole() -> None:
    """Rows and columns that begin and end inside blocks, none, and all; in the bytes that memory counts."""
    given = weight(300, 320)
    whole = widened(*quantize_nf4(given, (0, 300), (0, 320)), torch.float32)
    tensor = LogicalTensor("w", (300, 320), (Axis("ffn"), Axis("hidden")), 0, trained=False, nf4=True)
    for rows, columns in [
        ((0, 300), (0, 100)), ((0, 300), (100, 321 - 1)), ((7, 150), (0, 320)), ((150, 300), (63, 65)),
        ((0, 300), (64, 128)), ((5, 5), (0, 320)), ((0, 300), (70, 70)),
    ]:  # fmt: skip
        packed, scales = quantize_nf4(given, rows, columns)
        assert torch.equal(widened(packed, scales, torch.float32), whole[slice(*rows), slice(*columns)])
        held = sum(t.numel() * t.element_size() for t in (packed, *scales.tensors))
        box = Box((rows[0], columns[0]), (rows[1], columns[1]))
        assert held == stored_bytes(tensor, box) and tuple(packed.shape) == stored_box(tensor, box).shape


def test_boxes_of_bytes_are_whole_blocks() -> None:
    """Some rows and blocks of a part, as an owner has them, without what lies beside."""
    given = weight(300, 320)
    whole = widened(*quantize_nf4(given, (0, 300), (0, 320)), torch.float32)
    tensor = LogicalTensor("w", (300, 320), (Axis("ffn"), Axis("hidden")), 0, trained=False, nf4=True)
    packed, scales = quantize_nf4(given, (7, 150), (64, 256))
    held = stored_box(tensor, Box((7, 64), (150, 256)))
    for rows, columns in (((7, 150), (64, 256)), ((20, 90), (128, 256)), ((149, 150), (64, 128))):
        box = Box((rows[0], columns[0]), (rows[1], columns[1]))
        stored = stored_box(tensor, box)
        assert logical_box(tensor, stored) == box and stored.size == box.size // 64 * 33
        index = stored.slices(held)
        assert torch.equal(scales.of(*index).widened(packed[index].clone(), torch.float32), whole[box.slices()])


def test_products() -> None:
    given, x = weight(48, 128), torch.randn(5, 128, dtype=torch.float64, requires_grad=True)
    packed, scales = quantize_nf4(given, (0, 48), (0, 128))
    wide = torch.from_numpy(rounded(given.numpy())).double()
    y = narrow_product(F.linear, x, packed, scales, None)
    torch.testing.assert_close(y, F.linear(x, wide), rtol=1e-12, atol=1e-12)
    seed = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, x, seed)[0], seed @ wide, rtol=1e-12, atol=1e-12)
