"""The Triton kernel that makes matrices of their 4-bit form: the bits of the CPU's, in parts and products, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hetero_kernels as hk
from hetero_megatron.ops import SPECS, Signature
from hetero_megatron.ops.conformance.run import wrong_kernels
from hetero_megatron.ops.int8_weight import narrow_product, widened
from hetero_megatron.ops.kernel_plan import resolve
from hetero_megatron.ops.nf4_weight import NF4_BLOCK, Nf4Scales, nf4_case, nf4_dequantize, quantize_nf4
from hetero_megatron.ops.stage import stage_operators
from hetero_megatron.platform.plugins import load_plugins
from hetero_megatron.spec import Lora, adapted, load_model, whole_share
from hetero_plugins import triton_package
from tests.support.kernel_cases import BF16, DEVICE, DTYPES, FENCE, FP16, FP32

ROWS, COLUMNS = 37, 448  # 259 blocks: two groups
PARTS = [((0, ROWS), (0, COLUMNS)), ((5, 37), (0, 100)), ((11, 12), (63, 65)), ((0, 37), (70, 320)), ((3, 3), (0, 64))]


def by_triton(scales: Nf4Scales) -> Nf4Scales:
    return replace(scales, dequantize=load_plugins().registry.kernel("nf4_dequantize", "triton").forward)


def drawn(dtype: torch.dtype = FP32) -> torch.Tensor:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3)) * 0.02
    weight[2, :64] = 0.0
    return weight.to(DEVICE, dtype)


@pytest.fixture(params=["whole", "pieces"])
def limits(request: pytest.FixtureRequest) -> Iterator[hk.Limits | None]:
    """Of a launch that holds all programs, and of one that has three of few blocks."""
    yield None if request.param == "whole" else hk.Limits("generic", processors=2, max_grid=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_have_the_bits_of_torch(dtype: torch.dtype, limits: hk.Limits | None) -> None:
    """Of rows and columns that end inside blocks, in rows that lie apart; nothing beside them is written."""
    for rows, columns in PARTS:
        packed, scales = quantize_nf4(drawn(), rows, columns)
        memory = torch.full((rows[1] - rows[0] + 2, columns[1] - columns[0] + FENCE), 7.0, dtype=dtype, device=DEVICE)
        matrix = memory[1:-1, FENCE // 2 : -FENCE // 2]
        options: dict[str, Any] = {"first": scales.first, "across": scales.across, "skip": scales.skip}
        hk.nf4_dequantize(packed, *scales.tensors, matrix, **options, limits=limits)
        wanted = memory.clone()
        wanted[1:-1, FENCE // 2 : -FENCE // 2] = widened(packed, scales, dtype)
        assert torch.equal(memory, wanted), (rows, columns)
        again = hk.nf4_dequantize_reference(packed, *scales.tensors, torch.empty_like(matrix), **options)
        assert torch.equal(again, matrix)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_products_and_gradients_of_the_input_have_the_bits_of_the_torch_path(dtype: torch.dtype) -> None:
    """What trains over a frozen base: forward, and the gradient that adapters before it get."""
    packed, scales = quantize_nf4(drawn(dtype), (0, ROWS), (64, 200))
    x = torch.randn(5, 136, generator=torch.Generator().manual_seed(4)).to(DEVICE, dtype).requires_grad_()
    results = []
    for of_weight in (scales, by_triton(scales)):
        y = narrow_product(F.linear, x, packed, of_weight, None)
        results.append((y, *torch.autograd.grad(y, x, torch.cos(y.detach()))))
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


def test_a_part_of_a_part_keeps_its_kernel() -> None:
    packed, scales = quantize_nf4(drawn(), (0, ROWS), (64, 320))
    scales, index = by_triton(scales), (slice(3, 9), slice(33, 99))
    of_part = scales.of(*index)
    assert of_part.dequantize is scales.dequantize
    part = of_part.widened(packed[index], FP32)
    assert torch.equal(part, widened(packed, scales, FP32)[3:9, NF4_BLOCK : 3 * NF4_BLOCK])


def test_what_does_not_fit_is_refused() -> None:
    packed, scales = quantize_nf4(drawn(), (0, ROWS), (0, COLUMNS))
    matrix = torch.empty(ROWS, COLUMNS, device=DEVICE)
    options: dict[str, Any] = {"across": scales.across}
    for weight, into, skip, words in (
        (packed[:, :-1], matrix, 0, "33 bytes"), (packed[1:], matrix, 0, "36 rows"), (packed, matrix, 1, "more"),
        (packed, matrix.new_empty(COLUMNS, ROWS).mT, 0, "side by side"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=words):
            hk.nf4_dequantize(weight, *scales.tensors, into, skip=skip, **options)


def test_a_last_bit_that_differs_is_found() -> None:
    """As where the multiplication and the addition of the mean become one, whose product is not rounded."""
    registry, spec = load_plugins().registry, SPECS["nf4_dequantize"]
    kernel = registry.kernel("nf4_dequantize", "triton")

    def fused(*args: Any) -> tuple[()]:
        weight, groups, mean, levels, codes, matrix, *options = args
        wide = torch.empty_like(matrix, dtype=torch.float64)
        blocks = weight.view(len(weight), -1, 33)
        first, across, skip = options
        group = (torch.arange(len(weight))[:, None] * across + first + torch.arange(blocks.shape[1])) // 256
        magnitudes = (codes.double()[blocks[..., -1].int()] * groups.double()[group] + mean.double()).float()
        pairs = blocks[..., :-1].int()
        values = levels.float()[torch.stack([pairs >> 4, pairs & 15], -1).flatten(2)] * magnitudes[..., None]
        matrix.copy_(wide.copy_(values.flatten(1)[:, skip : skip + matrix.shape[1]]))
        return ()

    signature = Signature("nf4_dequantize", "cpu", FP32, "cpu")
    for forward, words in ((kernel.forward, ""), (fused, "error")):
        found = wrong_kernels([(spec, replace(kernel, forward=forward), signature)], torch.device("cpu"), lambda: None)
        assert words in str(found) and bool(found) == bool(words)


def test_who_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU does unasked, the CPU does not; only stages whose base is in 4 bits call it."""
    registry = load_plugins().registry
    monkeypatch.setattr(triton_package, "INTERPRETED", False)
    for device, provider in (("cuda", "triton"), ("cpu", "aten"), ("npu", "aten")):
        signature = Signature("nf4_dequantize", device, BF16, device)
        assert resolve(registry, [signature]).provider("nf4_dequantize") == provider
    for base_dtype in (None, "int8", "nf4"):
        spec = adapted(replace(load_model("tiny"), ffn_hidden_size=384), Lora(2, 2.0, base_dtype=base_dtype))
        operators = dict(stage_operators(spec, whole_share(spec), True, 1))
        assert ("nf4_dequantize" in operators) == (base_dtype == "nf4")


def test_the_case_of_the_kit_is_of_whole_bytes() -> None:
    """The operator's definition writes what it is given, whatever the numbers."""
    args = list(nf4_case("a cut", 3, 75, 3, 7, 60).args)
    assert nf4_dequantize(*args) == () and float(args[5].abs().max()) > 0.01
