"""Weights in 8 bits: torchao's numbers where it is installed, NumPy's everywhere, in products forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hetero_megatron.ops.grouped_gemm import definition as grouped
from hetero_megatron.ops.int8_weight import dequantize, narrow_product, quantize
from tests.support.int8_reference import rounded


def weight(*shape: int) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    drawn[..., 2, :] = 0.0  # a channel of zeros
    drawn[..., 3, :] *= 1e-3
    return drawn


@pytest.mark.parametrize("shape", [(7, 33), (3, 5, 16)])
def test_values_are_those_of_the_rule(shape: tuple[int, ...]) -> None:
    given = weight(*shape)
    q, scales = quantize(given)
    assert q.dtype == torch.int8 and scales.shape == (*shape[:-1], 1) and scales.dtype == torch.float32
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.nan_to_num(rounded(given.numpy()))
    np.testing.assert_array_equal(dequantize(q, scales, torch.float64).numpy(), wanted)
    assert ((dequantize(q, scales, torch.float32) - given).abs() <= 0.5001 * scales).all()
    exact = torch.from_numpy(wanted).to(torch.bfloat16)
    torch.testing.assert_close(dequantize(q, scales, torch.bfloat16), exact, rtol=2**-7, atol=0)


def test_torchao_has_the_same_values() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    linear = torch.nn.Linear(64, 48)
    linear.weight.data = weight(48, 64)
    x = torch.randn(5, 64, requires_grad=True)
    q, scales = quantize(linear.weight.data)
    y = narrow_product(F.linear, x, q, scales, linear.bias.detach())
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig())
    assert torch.equal(linear.weight.qdata, q) and torch.equal(linear.weight.scale, scales)
    theirs = linear(x)
    torch.testing.assert_close(y, theirs)
    wanted = torch.autograd.grad(theirs.square().sum(), x)[0]
    torch.testing.assert_close(dx, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())


def test_products_of_groups() -> None:
    q, scales = quantize(weight(3, 5, 8))
    x, ends = torch.randn(9, 8, dtype=torch.float64, requires_grad=True), torch.tensor([4, 4, 9])
    wide, bias = dequantize(q, scales, torch.float64), torch.randn(3, 5, dtype=torch.float64)
    y = narrow_product(lambda *args: grouped(*args)[0], x, q, scales, bias, ends)
    wanted = torch.cat([x[:4] @ wide[0].T + bias[0], x[4:] @ wide[2].T + bias[2]])
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    seed = torch.randn_like(y)
    found, expected = (torch.autograd.grad(out, x, seed)[0] for out in (y, wanted))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
