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
from hetero_megatron.ops.gated_delta_channels import backward as by_features
from hetero_megatron.ops.gated_delta_chunks import backward
from hetero_megatron.spec.delta_bytes import delta_core_bytes
from hetero_megatron.spec.gated_delta import GatedDelta
from tests.support.qwen_next_reference import chunked, kimi_chunked, kimi_recurrent, recurrent

RULE = bind(SPECS["gated_delta_rule"], torch_registry().kernel("gated_delta_rule", "aten"))
EPS = 1e-6  # transformers' own


def differ(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).detach().norm() / want.detach().norm().clamp_min(1e-12))


THEIRS = {"chunked": chunked, "recurrent": recurrent, "kimi_chunked": kimi_chunked, "kimi_recurrent": kimi_recurrent}


@pytest.mark.parametrize("name", THEIRS)
def test_results_and_gradients_are_those_of_transformers(name: str) -> None:
    theirs, kimi = THEIRS[name], name.startswith("kimi")
    for seed in range(2 if kimi else 4):
        draw = random.Random(seed)
        key_heads, each = draw.randint(1, 3), 1 if kimi else draw.randint(1, 3)
        dims, length = (draw.randint(2, 9), draw.randint(2, 9)), draw.choice([1, 20, 64, 131])
        heads = key_heads, key_heads * each
        case = random_case("", 2, length, heads, dims, state=seed % 2 == 1, seed=10 * seed, channels=kimi)
        ours, others = ([None if x is None else x.clone().requires_grad_() for x in case.args[:6]] for _ in range(2))
        out, last = RULE(*ours, None, EPS)
        q, k, v, g, beta, state = others
        want, want_last = theirs(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert differ(out, want) < 1e-12 and differ(last, want_last) < 1e-12
        weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(seed))
        for result, end in ((out, last), (want, want_last)):
            ((result * weight).sum() + end.square().sum()).backward()
        for mine, other in zip(ours, others, strict=True):
            assert mine is None or differ(mine.grad, other.grad) < 1e-10


@pytest.mark.parametrize("channels", [False, True])
def test_documents_in_a_row_are_what_they_are_in_rows_of_their_own(channels: bool) -> None:
    starts = [0, 1, 63, 64, 100]
    case = random_case("", 1, 130, (2, 4), (5, 6), seed=3, channels=channels)
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
    by_feature = [(1, 128, 8, 8, 128, 128), (1, 128, 2, 6, 32, 128)]
    for (rows, length, key_heads, heads, dk, dv), kimi in [(x, False) for x in sizes] + [(x, True) for x in by_feature]:
        spec: Any = SimpleNamespace(delta=GatedDelta(key_heads, heads, dk, dv, by_feature=kimi))
        with FakeTensorMode(), MemoryTracker() as memory:
            q, k = (torch.empty(rows, length, key_heads, dk, dtype=dtype) for _ in "qk")
            v, beta = (torch.empty(rows, length, heads, *more, dtype=dtype) for more in ((dv,), ()))
            decay = torch.empty(rows, length, heads, *[dk] * kimi)
            grad, last = torch.empty_like(v), torch.empty(rows, heads, dk, dv)
            before = memory.live
            (by_features if kimi else backward)(grad, last, q, k, v, decay, beta, None, None, EPS)
        expected = delta_core_bytes(spec, "none", dtype.itemsize, rows, rows * length)
        assert expected == pytest.approx(memory.peak - before, rel=0.02), (dk, dv, key_heads, heads)


def test_features_that_decay_at_once_overflow_nothing() -> None:
    """exp(G_i - G_j) of tokens far apart is 0, though exp(-G_j) would be infinite."""
    case = random_case("", 1, 64, (1, 1), (4, 4), seed=5, channels=True)
    q, k, v, g, beta, _, documents, eps = case.args
    args = [x.float().requires_grad_() for x in (q, k, v, g * 20, beta)]
    out, last = RULE(*args, None, documents, eps)
    (out.sum() + last.sum()).backward()
    exact, _ = RULE(*(x.detach().double() for x in args), None, documents, eps)
    assert differ(out.double(), exact) < 1e-3 and all(x.grad.isfinite().all() for x in args)
