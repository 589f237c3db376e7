"""The state-space rule of Mamba-2 is transformers', in fp64: by chunks, with a state from before, and by documents."""

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
from hetero_megatron.ops.state_space import random_case
from hetero_megatron.ops.state_space_chunks import backward
from hetero_megatron.spec.delta_bytes import delta_core_bytes
from hetero_megatron.spec.state_space import StateSpace, beside_rule_bytes
from tests.support.mamba_reference import scan

RULE = bind(SPECS["state_space_rule"], torch_registry().kernel("state_space_rule", "aten"))


def differ(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).detach().norm() / want.detach().norm().clamp_min(1e-12))


def test_results_and_gradients_are_those_of_transformers() -> None:
    for seed, (length, groups, each) in enumerate([(1, 1, 3), (20, 3, 1), (64, 2, 2), (131, 1, 3), (70, 3, 2)]):
        draw = random.Random(seed)
        dims, with_state = (draw.randint(2, 9), draw.randint(2, 9)), seed % 2 == 1
        case = random_case("", 2, length, (groups, groups * each), dims, state=with_state, seed=10 * seed)
        c, b, x, _, dt, state, _ = case.args
        slopes = -torch.rand(groups * each, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        ours, others = ([None if t is None else t.clone().requires_grad_() for t in (c, b, x, dt, state)] for _ in "12")
        q, k, v, write, first = ours
        out, last = RULE(q, k, v, write * slopes, write, first, None)
        c, b, x, dt, state = others
        before = None if state is None else state.transpose(2, 3)  # theirs are [b, heads, dv, dk]
        want, end = scan(x, dt, slopes, b, c, 16, initial_states=before, return_final_states=True)
        assert differ(out, want) < 1e-12 and differ(last, end.transpose(2, 3)) < 1e-12
        weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(seed))
        for result, final in ((out, last), (want, end)):
            ((result * weight).sum() + final.square().sum()).backward()
        for mine, other in zip(ours, others, strict=True):
            assert mine is None or differ(mine.grad, other.grad) < 1e-10


def test_documents_in_a_row_are_what_they_are_in_rows_of_their_own() -> None:
    starts = [0, 1, 63, 64, 100]
    *tensors, state, _ = random_case("", 1, 130, (2, 4), (5, 6), seed=3).args
    out, last = RULE(*tensors, state, [starts])
    for a, b in zip(starts, [*starts[1:], 130], strict=True):
        alone, end = RULE(*(x[:, a:b] for x in tensors), None, None)
        assert differ(out[:, a:b], alone) < 1e-12
    assert differ(last, end) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_works_with_as_many_bytes_as_memory_formulas_say(dtype: torch.dtype) -> None:
    """Against live tensors of backward, with which of its moments is the worst left to the sizes."""
    sizes = [(1, 512, 2, 32, 128, 64), (2, 256, 4, 8, 64, 64), (2, 320, 1, 8, 128, 64), (3, 256, 2, 8, 16, 128),
             (3, 192, 3, 3, 16, 16), (2, 448, 2, 6, 256, 32)]  # fmt: skip
    for rows, length, groups, heads, dk, dv in sizes:
        spec: Any = SimpleNamespace(delta=StateSpace(groups, heads, dk, dv))
        with FakeTensorMode(), MemoryTracker() as memory:
            q, k = (torch.empty(rows, length, groups, dk, dtype=dtype) for _ in "qk")
            v = torch.empty(rows, length, heads, dv, dtype=dtype)
            grad, last = torch.empty_like(v), torch.empty(rows, heads, dk, dv)
            write, decay = torch.empty(rows, length, heads), torch.empty(rows, length, heads)
            before = memory.live
            backward(grad, last, q, k, v, decay, write, None, None)
        expected = delta_core_bytes(spec, "none", dtype.itemsize, rows, rows * length)
        expected -= rows * length * beside_rule_bytes(spec.delta, "none", dtype.itemsize)
        assert expected == pytest.approx(memory.peak - before, rel=0.04), (dk, dv, groups, heads)
