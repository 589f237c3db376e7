"""Context groups with the kernels of a plan: tiles through Triton's attention, and compiled layers around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hetero_plugins.triton_sequences as triton_plugin
from hetero_megatron.comm import Comm
from hetero_megatron.layout.mask import tiles
from hetero_megatron.ops import Kernel, Signature, resolve, torch_registry
from hetero_megatron.ops.attention_op import definition, reference_backward
from hetero_megatron.ops.block_attention import BlockAttention, KeyHeads, accumulators, attn_merge_
from hetero_megatron.ops.spec import VENDOR
from hetero_megatron.ops.tile_kernels import OperatorKernel, ReferenceKernel, tile_kernel
from hetero_megatron.plans.kernels import with_kernels
from hetero_megatron.platform.plugins import load_plugins
from hetero_megatron.spec.hf_config import from_hf_config
from tests.distributed.training.test_kernel_training import LENGTH, MODEL, STEPS, compare, kernels_of, make_plan, train
from tests.support.pool import shared_pool

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
    merge = load_plugins().registry.kernel("attn_merge", "triton").forward
    for attention in (
        BlockAttention(ReferenceKernel(), KeyHeads(2), window), BlockAttention(kernel, KeyHeads(2), window, merge)
    ):  # fmt: skip
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_tritons_tiles_are_not_rounded(dtype: torch.dtype) -> None:
    """They are added up in fp32; delta is made once, of the whole rows, and then the output is not read again."""
    chosen = load_plugins().registry.kernel("attention", "triton")
    kernel, exact = tile_kernel(torch.device("cpu"), chosen), ReferenceKernel()
    torch.manual_seed(0)
    q, grad = (torch.randn(1, 12, 2, 16).to(dtype) for _ in range(2))
    k, v = (torch.randn(1, 12, 1, 16).to(dtype) for _ in range(2))
    out, lse = kernel.forward(q, k, v, 3, None)
    delta = kernel.delta(grad, out)
    assert delta is not None
    torch.testing.assert_close(delta, exact.delta(grad, out), rtol=1e-5, atol=1e-5)
    found = kernel.backward(grad, q, k, v, torch.full_like(out, torch.nan), lse, 3, None, delta)
    assert [x.dtype for x in found] == [torch.float32] * 3
    wide = exact.backward(*(x.double() for x in (grad, q, k, v, out, lse)), 3, None)
    for got, want in zip(found, wide, strict=True):  # P and dS are rounded for their products, the sums are not
        assert (got - want).norm() <= 1e-4 * want.norm()
        assert not torch.equal(got, got.to(dtype).float())


def test_documents_are_prepared_once_for_all_layers() -> None:
    """Two layers, forward and backward: one search for the stretches of the key blocks."""
    kernel = load_plugins().registry.kernel("attention", "triton")
    assert kernel.backward is not None
    triton_plugin._intervals.cache_clear()
    searches: list[Any] = []

    class Searches(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in (torch.ops.aten.searchsorted.Tensor, torch.ops.aten.maximum.default):
                searches.append(function)
            return function(*args, **(kwargs or {}))

    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 41, 2, 16) for _ in range(4))
    with Searches():
        for _ in range(2):
            documents = [[0, 7, 29]]  # equal, but another object
            out, lse = kernel.forward(q, k, v, None, documents, 11, 0, 0)
            found = kernel.backward(grad, q, k, v, None, out, lse, documents, 11, 0, 0)[:3]
    made = definition(q, k, v, None, documents, 11)
    want = reference_backward(grad, q, k, v, None, *made, documents, 11)[:3]
    for got, right in zip(found, want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)
    assert searches.count(torch.ops.aten.searchsorted.Tensor) == 4
    assert searches.count(torch.ops.aten.maximum.default) == 2  # causal and window


def count_merges(comm: Comm) -> tuple[int, str]:
    """Calls of a vendor's ``attn_merge`` in a short run, and the kernel plan."""
    calls, registry = list[torch.Size](), torch_registry()

    def forward(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> tuple[()]:
        calls.append(out.shape)
        return attn_merge_(out, lse, other, other_lse)

    registry.register(Kernel("attn_merge", "acme", VENDOR, forward, None, version=2))
    spec = from_hf_config(MODEL)
    _, _, summary = train(comm, make_plan(spec, CONTEXT), spec, registry=registry)
    return len(calls), summary


@pytest.mark.slow
def test_context_groups_merge_by_the_operator_of_their_kernel_plan() -> None:
    for calls, summary in shared_pool().run(count_merges)[: len(CONTEXT["ranks"])]:
        assert calls >= 2 * 2 * STEPS, "at least once per layer, micro-batch and step"
        assert "acme: attn_merge" in summary
    spec = from_hf_config(MODEL)
    plan = make_plan(spec, CONTEXT)
    summaries = compare(plan, with_kernels(plan, ["attn_merge=triton"]), spec)
    assert all("triton: attn_merge" in summary for summary in summaries)
    assert "attn_merge" not in kernels_of(make_plan(spec, {"ranks": 0, "layers": [0, 2]}), spec, 0).choices


@pytest.mark.slow
def test_compiled_layers_with_context_groups_equal_one_rank() -> None:
    spec = from_hf_config(MODEL)
    one = make_plan(spec, {"ranks": 0, "layers": [0, 2]})
    compare(one, make_plan(spec, {**CONTEXT, "recompute": "selective"}), spec, backend="aot_eager")
