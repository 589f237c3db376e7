"""Triton kernels of attention against torch in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hetero_kernels as hk
from tests.support.kernel_cases import (
    BF16,
    DEVICE,
    DTYPES,
    FP16,
    FP32,
    FP64,
    check,
    fenced_memory,
    gradients,
    inputs_fenced,
    randn,
)

# Small blocks, so that short sequences have masked, full and skipped blocks, and a grid that needs several launches.
DOCUMENTS = [[0, 5, 6, 40], [0]]
# Matrix units of many chips have no fp64: there fp32, not rounded to tf32, stands in for it.
EXACT, CLOSE = (FP64, 1e-12) if DEVICE.type == "cpu" else (FP32, 2e-5)
DOT_DTYPES = [d for d in DTYPES if DEVICE.type == "cpu" or d != FP64]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> hk.Limits:
    import json

    less = 8 if DEVICE.type == "cpu" else 16  # a matrix unit takes no less than 16
    blocks = {"block_q": 16, "block_k": less, "num_warps": 4, "num_stages": 1}
    flipped = {**blocks, "block_q": less, "block_k": 16}
    ops = {"attention_fwd": blocks, "attention_bwd_q": blocks, "attention_bwd_kv": flipped}
    rows = {"attention_rows": {"tile": 64, "num_warps": 4}}
    table = {"ops": {op: [{"max_size": None, "config": chosen}] for op, chosen in {**ops, **rows}.items()}}
    path = tmp_path_factory.mktemp("tables") / "small.json"
    path.write_text(json.dumps(table))
    return hk.Limits(arch="test", processors=2, max_grid=5, table=str(path))


@pytest.fixture
def fenced(monkeypatch: pytest.MonkeyPatch):
    with fenced_memory(monkeypatch):
        yield


def qkv(b: int, sq: int, sk: int, heads: int, kv_heads: int, d: int, dv: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = [(b, sq, heads, d), (b, sk, kv_heads, d), (b, sk, kv_heads, dv), (b, sq, heads, dv)]
    return [inputs_fenced(randn(*shape, dtype=dtype, seed=i)) for i, shape in enumerate(shapes)]


def compare(
    tensors: list[torch.Tensor], limits: hk.Limits | None, with_eager: bool = False, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, dout = tensors
    dtype = q.dtype

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hk.attention_reference(q, k, v, **kwargs)

    exact, grads = gradients(reference, [q, k, v], [dout], FP64)
    out, lse = hk.attention_fwd(q, k, v, limits=limits, **kwargs)
    got = hk.attention_bwd(dout, q, k, v, out, lse, limits=limits, **kwargs)
    eager, eager_grads = gradients(reference, [q, k, v], [dout], dtype) if with_eager else ([None] * 2, [None] * 3)
    check(out, exact[0], "attention", dtype, eager[0])
    dead = exact[1].isinf()
    assert torch.equal(lse.isinf(), dead) and not out.transpose(1, 2)[dead].any()
    live = (lse.double() - exact[1])[~dead]
    assert not live.numel() or live.abs().max() <= {FP64: 1e-12, FP32: 1e-5}.get(dtype, 1e-2)
    for g, exact_grad, eager_grad in zip(got, grads, eager_grads):
        assert g.dtype == dtype
        # Where every row sees one key the exact gradient of q and k is 0, and fp32 leaves the noise of a difference.
        least = 1.0 if dtype == FP32 else 1e-2
        check(g, exact_grad.nan_to_num(0.0), "attention grad", dtype, eager_grad, 3, least=least)
    return out, lse


@pytest.mark.parametrize("dtype", DOT_DTYPES)
def test_causal_attention_with_shared_kv_heads(dtype: torch.dtype, small: hk.Limits, fenced: None) -> None:
    compare(qkv(1, 40, 40, 4, 2, 16, 16, dtype), None, with_eager=True)
    compare(qkv(1, 37, 37, 2, 1, 24, 8, dtype), small)


MASKS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("full", 21, 43, {"causal": False}),
    ("full, even", 32, 32, {"causal": False}),
    ("causal, even", 48, 48, {}),
    ("queries after the keys", 21, 43, {"q_start": 43}),
    ("queries amid the keys", 20, 43, {"q_start": 15}),
    ("keys after some queries", 43, 21, {"k_start": 19}),
    ("keys after all queries", 20, 20, {"k_start": 20}),
    ("window", 43, 43, {"window": 7}),
    ("window of one", 20, 20, {"window": 1}),
    ("wide window, offset", 33, 50, {"window": 24, "q_start": 30, "k_start": 3}),
    ("window past all keys", 20, 20, {"window": 4, "q_start": 22}),
    ("window alone", 30, 30, {"window": 9, "causal": False}),
    ("soft-capped window", 43, 43, {"window": 9, "softcap": 0.7}),
    ("soft-capped", 32, 32, {"softcap": 1.5, "scale": 0.5}),
]


@pytest.mark.parametrize(("queries", "keys", "kwargs"), [m[1:] for m in MASKS], ids=[m[0] for m in MASKS])
def test_masks(queries: int, keys: int, kwargs: dict[str, Any], small: hk.Limits, fenced: None) -> None:
    compare(qkv(1, queries, keys, 1, 1, 8, 8, EXACT), small, **kwargs)


def test_causal_attention_is_torchs(fenced: None) -> None:
    q, k, v, _ = qkv(2, 33, 33, 4, 4, 16, 16, FP32)
    out, _ = hk.attention_fwd(q, k, v)
    transposed = [x.transpose(1, 2).double() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*transposed, is_causal=True)
    check(out, expected.transpose(1, 2), "attention", FP32)


def test_a_nan_is_not_taken_for_a_row_that_sees_nothing(small: hk.Limits) -> None:
    q, k, v, dout = qkv(1, 20, 20, 1, 1, 8, 8, FP32)
    q[0, 3], v[0, 7] = math.nan, math.inf
    out, lse = hk.attention_fwd(q, k, v, limits=small)
    exact, exact_lse = hk.attention_reference(q, k, v)
    assert torch.equal(out.isfinite(), exact.isfinite()) and torch.equal(lse.isnan(), exact_lse.isnan())
    assert lse[0, 0].isnan().nonzero().flatten().tolist() == [3]
    dq, dk, _ = hk.attention_bwd(dout, q, k, v, out, lse, limits=small)
    assert bool(dq[0, 3].isnan().all()) and bool(dk[0, :4].isnan().all())
    _, merged = hk.attention_merge(out, lse, out, lse, limits=small)
    assert torch.equal(merged.isnan(), lse.isnan())


@pytest.mark.parametrize("kwargs", [{}, {"window": 6}, {"causal": False}])
def test_documents(kwargs: dict[str, Any], small: hk.Limits, fenced: None) -> None:
    tensors = qkv(2, 50, 50, 1, 1, 8, 8, EXACT)
    bounds = hk.document_bounds(DOCUMENTS, 50, DEVICE)
    out, lse = compare(tensors, small, bounds=bounds, **kwargs)
    q, k, v, _ = tensors
    for row, starts in enumerate(DOCUMENTS):  # each document by itself
        for a, b in zip(starts, [*starts[1:], 50]):
            part = slice(row, row + 1), slice(a, b)
            alone, alone_lse = hk.attention_reference(q[part], k[part], v[part], **kwargs)
            assert torch.allclose(out[part], alone, atol=CLOSE)
            assert torch.allclose(lse[row : row + 1, :, a:b], alone_lse, atol=CLOSE)


def test_packed_sequences_of_unlike_length(small: hk.Limits, fenced: None) -> None:
    cu_q, cu_k = [0, 7, 7, 30, 41, 44], [0, 12, 20, 43, 43, 46]  # one without queries, one without keys
    tensors = qkv(1, 44, 46, 1, 1, 8, 8, EXACT)
    q, k, v, _ = tensors
    for causal in (True, False):
        bounds = hk.varlen_bounds(cu_q, cu_k, DEVICE, causal=causal, offsets=[5, 0, 0, 0, 0])
        out, lse = compare(tensors, small, causal=False, bounds=bounds)
        assert bool(lse[..., 30:41].isinf().all())
        for n in (0, 2, 4):
            a, b, c, d = cu_q[n], cu_q[n + 1], cu_k[n], cu_k[n + 1]
            alone, _ = hk.attention_reference(
                q[:, a:b], k[:, c:d], v[:, c:d], causal=causal, q_start=5 if n == 0 else 0
            )
            assert torch.allclose(out[:, a:b], alone, atol=CLOSE)


@pytest.mark.exhaustive  # masks, documents and packed sequences are bounds, too
def test_random_bounds(small: hk.Limits) -> None:
    """Any intervals whose ends do not fall."""
    generator = torch.Generator().manual_seed(3)
    for case in range(3):
        queries, keys = 30 + case, 41 - case
        ends = torch.randint(0, keys + 1, (1, 2, queries), generator=generator).sort(-1).values
        bounds = torch.stack([ends.amin(1), ends.amax(1)], 1).to(DEVICE, torch.int32)
        compare(qkv(1, queries, keys, 2, 1, 8, 8, EXACT), small, causal=case % 2 == 0, q_start=4, bounds=bounds)


def test_views_large_logits_and_gradients_in_fp32(fenced: None) -> None:
    fused = randn(2, 33, 4 + 2 + 2, 16, dtype=BF16)
    q, k, v = fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]
    dout = randn(2, 4, 33, 16, dtype=BF16, seed=1).transpose(1, 2)
    compare([q, k, v, dout], None)
    out, lse = hk.attention_fwd(q, k, v)
    grads = hk.attention_bwd(dout, q, k, v, None, lse, delta=hk.attention_delta(dout, out), grad_dtype=FP32)
    assert all(g.dtype == FP32 for g in grads)
    _, exact = gradients(hk.attention_reference, [q, k, v], [dout], FP64)
    for g, e in zip(grads, exact):
        check(g, e, "attention grad", BF16)
    tensors = qkv(1, 40, 40, 1, 1, 16, 16, FP32)
    tensors[0] *= 300  # the softmax is all but a maximum
    out, _ = hk.attention_fwd(*tensors[:3], scale=1.0)
    check(out, hk.attention_reference(*(x.double() for x in tensors[:3]), scale=1.0)[0], "attention", FP16)


def test_empty_attention() -> None:
    for b, sq, sk, heads in ((0, 4, 4, 2), (1, 0, 4, 2), (1, 4, 0, 2), (1, 4, 4, 0)):
        q, k, v, dout = (randn(b, s, heads, 8) for s in (sq, sk, sk, sq))
        out, lse = hk.attention_fwd(q, k, v)
        assert out.shape == q.shape and not out.any() and bool((lse == -math.inf).all())
        grads = hk.attention_bwd(dout, q, k, v, out, lse)
        assert all(g.shape == x.shape and not g.any() for g, x in zip(grads, (q, k, v)))
    assert hk.varlen_bounds([0], [0], DEVICE, causal=True).shape == (1, 2, 0)


@pytest.mark.parametrize("dtype", [FP64, BF16])
def test_delta_and_merge(dtype: torch.dtype, small: hk.Limits, fenced: None) -> None:
    a, b, dout = (randn(2, 9, 3, 20, dtype=dtype, seed=i) for i in range(3))
    for limits in (None, small):
        check(hk.attention_delta(dout, a, limits=limits), hk.attention_delta_reference(dout.double(), a.double()),
              "attention grad", FP64 if dtype == FP64 else FP32)  # fmt: skip
        stats = FP64 if dtype == FP64 else FP32
        lse_a, lse_b = (randn(2, 3, 9, dtype=stats, seed=i, scale=3) for i in (5, 6))
        lse_a[0, 1], lse_b[1, 2], lse_a[1, 0, :4], lse_b[1, 0, :4] = (-math.inf,) * 4  # one dead, the other, both
        exact, exact_lse = hk.attention_merge_reference(a.double(), lse_a.double(), b.double(), lse_b.double())
        out, lse = hk.attention_merge(a, lse_a, b, lse_b, limits=limits)
        check(out, exact, "attention", dtype)
        assert torch.equal(lse.isinf(), exact_lse.isinf()) and not lse.isnan().any()
        assert torch.allclose(lse.double(), exact_lse, rtol=0, atol=1e-12 if dtype == FP64 else 1e-5)
        assert not out[1, :4, 0].any()
        copy, copy_lse = a.clone(), lse_a.clone()
        hk.attention_merge(copy, copy_lse, b, lse_b, inplace=True, limits=limits)
        assert torch.equal(copy, out) and torch.equal(copy_lse, lse)


def test_blockwise_attention_over_uneven_shards_of_keys(small: hk.Limits) -> None:
    """What context parallelism does: partial results merged, and backward by parts with the merged out and lse."""
    q, k, v, dout = qkv(1, 37, 37, 2, 1, 8, 8, EXACT)
    exact, grads = gradients(hk.attention_reference, [q, k, v], [dout], FP64)
    cuts = [0, 5, 5, 21, 37]  # one shard is empty; later ones are dead for the first queries
    out, lse = torch.zeros_like(q), torch.full((1, 2, 37), -math.inf, dtype=EXACT, device=DEVICE)
    for a, b in zip(cuts, cuts[1:]):
        part = hk.attention_fwd(q, k[:, a:b], v[:, a:b], k_start=a, limits=small)
        hk.attention_merge(out, lse, *part, inplace=True, limits=small)
    check(out, exact[0], "attention", EXACT)
    dq, dk, dv = torch.zeros_like(q), [], []
    for a, b in zip(cuts, cuts[1:]):
        part = hk.attention_bwd(dout, q, k[:, a:b], v[:, a:b], out, lse, k_start=a, limits=small)
        dq += part[0]
        dk.append(part[1])
        dv.append(part[2])
    for got, expected in zip((dq, torch.cat(dk, 1), torch.cat(dv, 1)), grads):
        check(got, expected, "attention grad", EXACT)


@pytest.mark.slow
def test_backward_is_bitwise_repeatable(small: hk.Limits) -> None:
    q, k, v, dout = qkv(1, 40, 40, 4, 2, 8, 8, BF16)
    out, lse = hk.attention_fwd(q, k, v, limits=small)
    first, second = (hk.attention_bwd(dout, q, k, v, out, lse, limits=small) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
