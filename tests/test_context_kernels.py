"""Context groups with the kernels of a plan: tiles through Triton's attention, and compiled layers around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetero_megatron.layout.mask import tiles
from hetero_megatron.ops import Signature, resolve
from hetero_megatron.ops.block_attention import BlockAttention, KeyHeads, accumulators
from hetero_megatron.ops.tile_kernels import OperatorKernel, ReferenceKernel, tile_kernel
from hetero_megatron.platform.plugins import load_plugins
from hetero_megatron.spec import from_hf_config
from tests.test_kernel_training import LENGTH, MODEL, compare, make_plan

CONTEXT: dict[str, Any] = {
    "ranks": [0, 1, 2],
    "layers": [0, 2],
    "context": [
        {"ranks": [0, 1], "tokens": [30, 14], "heads": [3, 1]},
        {"ranks": [2], "tokens": [LENGTH - 44], "heads": [4]},
    ],
    "kv": {"block": 22},
}


@pytest.mark.parametrize("window", [None, 9])
def test_blocks_through_tritons_attention_equal_the_reference(window: int | None) -> None:
    """Two blocks of keys, one partly in the future, through the interpreter; out and gradients to fp32's accuracy."""
    dims = {"head_dim": (16,), "heads": (2,), "kv_heads": (1,)}
    signature = Signature("attention", "cpu", torch.float32, "cpu", dims=dims)
    chosen = resolve(load_plugins().registry, [signature], {"attention": "triton"}).choices["attention"].kernel
    kernel = tile_kernel(torch.device("cpu"), chosen)
    assert isinstance(kernel, OperatorKernel)
    torch.manual_seed(0)
    q, grad = torch.randn(1, 24, 2, 16), torch.randn(1, 24, 2, 16)
    k, v = torch.randn(1, 24, 1, 16), torch.randn(1, 24, 1, 16)
    queries, blocks = [(4, 12), (20, 36)], [[(0, 12)], [(14, 26)]]
    results = []
    for used in (ReferenceKernel(), kernel):
        attention = BlockAttention(used, KeyHeads(2), window)
        out, lse = accumulators(q)
        grads = tuple(torch.zeros_like(x) for x in (q, k, v))
        found = [[(None, tile) for tile in tiles(queries, block, (0,), window)] for block in blocks]
        for i, mine in enumerate(found):
            attention.forward(q, k[:, 12 * i : 12 * i + 12], v[:, 12 * i : 12 * i + 12], mine, out, lse)
        for i, mine in enumerate(found):
            part = slice(12 * i, 12 * i + 12)
            attention.backward(
                grad, q, k[:, part], v[:, part], out, lse, mine, (grads[0], grads[1][:, part], grads[2][:, part])
            )
        results.append([out, *grads])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled_layers_with_context_groups_equal_one_rank() -> None:
    spec = from_hf_config(MODEL)
    one = make_plan(spec, {"ranks": 0, "layers": [0, 2]})
    compare(one, make_plan(spec, {**CONTEXT, "recompute": "selective"}), spec, backend="aot_eager")
