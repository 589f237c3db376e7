"""The gated delta rule is transformers', in fp64: by chunks, token by token, and with a state from before."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hetero_megatron.dry_run.allocator import MemoryTracker
from hetero_megatron.ops import SPECS, torch_registry
from hetero_megatron.ops.bind import bind
from hetero_megatron.ops.gated_delta import random_case
from hetero_megatron.ops.gated_delta_chunks import backward
from hetero_megatron.spec.delta_bytes import delta_core_bytes
from hetero_megatron.spec.gated_delta import GatedDelta
from tests.support.qwen_next_reference import chunked, recurrent

RULE = bind(SPECS["gated_delta_rule"], torch_registry().kernel("gated_delta_rule", "aten"))
EPS = 1e-6  # transformers' own


def differ(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).detach().norm() / want.detach().norm().clamp_min(1e-12))


@pytest.mark.parametrize("theirs", [chunked, recurrent], ids=["chunked", "recurrent"])
def test_results_and_gradients_are_those_of_transformers(theirs: object) -> None:
    for seed in range(4):
        draw = random.Random(seed)
        key_heads, each = draw.randint(1, 3), draw.randint(1, 3)
        dims, length = (draw.randint(2, 9), draw.randint(2, 9)), draw.choice([1, 20, 64, 131])
        case = random_case("", 2, length, (key_heads, key_heads * each), dims, state=seed % 2 == 1, seed=10 * seed)
        ours, others = ([None if x is None else x.clone().requires_grad_() for x in case.args[:6]] for _ in range(2))
        out, last = RULE(*ours, None, EPS)
        q, k, v, g, beta, state = others
        want, want_last = theirs(  # type: ignore[operator]
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert differ(out, want) < 1e-12 and differ(last, want_last) < 1e-12
        weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(seed))
        for result, end in ((out, last), (want, want_last)):
            ((result * weight).sum() + end.square().sum()).backward()
        for mine, other in zip(ours, others, strict=True):
            assert mine is None or differ(mine.grad, other.grad) < 1e-10


def test_documents_in_a_row_are_what_they_are_in_rows_of_their_own() -> None:
    starts = [0, 1, 63, 64, 100]
    case = random_case("", 1, 130, (2, 4), (5, 6), seed=3)
    *tensors, state, _, _ = case.args
    out, last = RULE(*tensors, state, [starts], EPS)
    for a, b in zip(starts, [*starts[1:], 130], strict=True):
        alone, end = RULE(*(x[:, a:b] for x in tensors), None, None, EPS)
        assert differ(out[:, a:b], alone) < 1e-12
    assert differ(last, end) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_works_with_as_many_bytes_as_memory_formulas_say(dtype: torch.dtype) -> None:
    """Against live tensors of backward, with which of its moments is the worst left to the sizes."""
    sizes = [(1, 512, 16, 32, 128, 128), (2, 256, 4, 8, 64, 64), (1, 320, 8, 8, 128, 64), (1, 256, 2, 8, 32, 128),
             (3, 192, 3, 3, 16, 16), (1, 448, 2, 6, 256, 32)]  # fmt: skip
    for rows, length, key_heads, heads, dk, dv in sizes:
        spec: Any = SimpleNamespace(delta=GatedDelta(key_heads, heads, dk, dv))
        with FakeTensorMode(), MemoryTracker() as memory:
            q, k = (torch.empty(rows, length, key_heads, dk, dtype=dtype) for _ in "qk")
            v, beta = (torch.empty(rows, length, heads, *more, dtype=dtype) for more in ((dv,), ()))
            decay, grad, last = torch.empty(rows, length, heads), torch.empty_like(v), torch.empty(rows, heads, dk, dv)
            before = memory.live
            backward(grad, last, q, k, v, decay, beta, None, None, EPS)
        expected = delta_core_bytes(spec, "none", dtype.itemsize, rows, rows * length)
        assert expected == pytest.approx(memory.peak - before, rel=0.02), (dk, dv, key_heads, heads)
