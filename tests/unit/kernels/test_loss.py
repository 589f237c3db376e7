"""Triton kernels of cross-entropy against torch in fp64."""

from __future__ import annotations

import pytest
import torch

import hetero_kernels as hk
from tests.support.kernel_cases import (
    BF16,
    DEVICE,
    DTYPES,
    FP32,
    FP64,
    check,
    fenced_memory,
    gradients,
    inputs_fenced,
    randn,
)

NARROW = hk.Limits(arch="interpreter", processors=2, max_grid=3, max_block=32)
OPTIONS = [{}, {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0}]


@pytest.fixture
def fenced(monkeypatch: pytest.MonkeyPatch):
    with fenced_memory(monkeypatch):
        yield


def targets(*shape: int, vocabulary: int, ignored: int = -100) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    target = torch.randint(0, vocabulary, shape, generator=generator)
    target.view(-1)[::5] = ignored
    return target.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limits", [None, NARROW])
@pytest.mark.parametrize("options", OPTIONS)
def test_cross_entropy(dtype: torch.dtype, limits: hk.Limits | None, options: dict[str, float], fenced: None) -> None:
    logits = inputs_fenced(randn(3, 7, 101, dtype=dtype, scale=4))
    target, dloss = targets(3, 7, vocabulary=101), randn(3, 7)
    exact, (dx,) = gradients(lambda x: hk.cross_entropy_reference(x, target, **options), [logits], [dloss], FP64)
    loss, lse = hk.cross_entropy_fwd(logits, target, limits=limits, **options)
    check(loss, exact[0], "loss", dtype)
    check(lse, exact[1], "loss", dtype)
    got = hk.cross_entropy_bwd(dloss, logits, target, lse, limits=limits, **options)
    check(got, dx, "logits", dtype)
    assert not got[target == -100].any()
    copy = logits.clone()
    again = hk.cross_entropy_bwd(dloss, copy, target, lse, inplace=True, limits=limits, **options)
    assert again.data_ptr() == copy.data_ptr() and torch.equal(again, got)


def test_cross_entropy_is_torchs() -> None:
    """The reference itself, against torch's own."""
    logits, target = randn(40, 33, dtype=FP64, scale=3), targets(40, vocabulary=33)
    for smoothing in (0.0, 0.2):
        expected = torch.nn.functional.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
        got, _ = hk.cross_entropy_reference(logits, target, label_smoothing=smoothing)
        assert torch.allclose(got, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("limits", [None, NARROW])
def test_cross_entropy_at_the_edges(limits: hk.Limits | None) -> None:
    large = randn(4, 40, scale=1e4)
    same = torch.full((2, 40), 3.5, device=DEVICE)
    holes = randn(2, 40)
    holes[:, :35] = float("-inf")  # a masked vocabulary: a whole tile of -inf first
    logits = torch.cat([large, same, holes])
    target = torch.tensor([0, 1, 39, 5, 7, 8, 36, 39], device=DEVICE)
    loss, lse = hk.cross_entropy_fwd(logits, target, limits=limits)
    check(loss, hk.cross_entropy_reference(logits.double(), target)[0], "loss", FP32)
    grad = hk.cross_entropy_bwd(torch.ones(1, device=DEVICE).expand(8), logits, target, lse, limits=limits)
    assert bool(grad.isfinite().all()) and not grad[6:, :35].any()
    ignored = torch.full_like(target, 3)
    loss, lse = hk.cross_entropy_fwd(logits, ignored, ignore_index=3, limits=limits)
    assert not loss.any()
    assert not hk.cross_entropy_bwd(loss + 1, logits, ignored, lse, ignore_index=3, limits=limits).any()
    wrong, _ = hk.cross_entropy_fwd(logits, target + 1, limits=limits)  # 40 is no class
    assert wrong.isnan().tolist() == [False, False, True, False, False, False, False, True]


def test_cross_entropy_of_nothing() -> None:
    loss, lse = hk.cross_entropy_fwd(randn(0, 9), torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert loss.shape == lse.shape == (0,)
    assert hk.cross_entropy_bwd(loss, randn(0, 9), loss.long(), lse).shape == (0, 9)


def test_cross_entropy_of_many_rows_and_strided_logits() -> None:
    whole = randn(66_000, 8, dtype=BF16)
    logits, target = whole[:, 1:6], targets(66_000, vocabulary=5)
    loss, lse = hk.cross_entropy_fwd(logits, target)
    exact, (dx,) = gradients(lambda x: hk.cross_entropy_reference(x, target), [logits], [torch.ones_like(loss)], FP64)
    check(loss, exact[0], "loss", BF16)
    copy = whole.clone()
    got = hk.cross_entropy_bwd(torch.ones_like(loss), copy[:, 1:6], target, lse, inplace=True)
    check(got, dx, "logits", BF16)
    assert torch.equal(copy[:, 0], whole[:, 0]) and torch.equal(copy[:, 6:], whole[:, 6:])


@pytest.mark.parametrize("dtype", [FP64, BF16])
@pytest.mark.parametrize("limits", [None, NARROW])
def test_vocab_parallel_with_uneven_shards(dtype: torch.dtype, limits: hk.Limits | None, fenced: None) -> None:
    logits, target, dloss = randn(2, 9, 101, dtype=dtype, scale=4), targets(2, 9, vocabulary=101), randn(2, 9)
    exact, (dx,) = gradients(lambda x: hk.cross_entropy_reference(x, target), [logits], [dloss], FP64)
    cuts = [0, 40, 41, 41, 90, 101]  # one rank holds one column, one holds none
    shards = [(a, inputs_fenced(logits[..., a:b])) for a, b in zip(cuts, cuts[1:])]
    parts = [hk.vocab_stats(shard, target, a, limits=limits) for a, shard in shards]
    for (a, shard), part in zip(shards, parts):
        for got, expected in zip(part, hk.vocab_stats_reference(shard.double(), target, a)):
            check(got, expected, "loss", dtype)
    loss, lse = hk.merge_stats(parts)
    check(loss.where(target != -100, 0.0), exact[0], "loss", dtype)
    check(lse, exact[1], "loss", dtype)
    grads = [hk.vocab_stats_bwd(dloss, shard, target, a, lse, limits=limits) for a, shard in shards]
    check(torch.cat(grads, -1), dx, "logits", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [None, 4])
def test_linear_cross_entropy(dtype: torch.dtype, chunk: int | None, fenced: None) -> None:
    x, w = inputs_fenced(randn(2, 9, 24, dtype=dtype)), inputs_fenced(randn(101, 24, dtype=dtype, seed=1))
    target, dloss = targets(2, 9, vocabulary=101), randn(2, 9)
    exact, (dx, dw) = gradients(lambda x, w: hk.linear_cross_entropy_reference(x, w, target), [x, w], [dloss], FP64)
    loss, lse = hk.linear_cross_entropy_fwd(x, w, target, chunk=chunk)
    gx, gw = hk.linear_cross_entropy_bwd(dloss, x, w, target, lse, chunk=chunk)
    check(loss, exact[0], "linear loss", dtype)
    check(gx, dx, "linear grad", dtype)
    check(gw, dw, "linear grad", dtype)
    assert gx.dtype == dtype and gw.dtype == torch.promote_types(dtype, FP32)
    before = randn(101, 24, dtype=gw.dtype, seed=2)
    buffer = before.clone()
    at_once = hk.linear_cross_entropy_fwd_bwd(x, w, target, dloss, chunk=chunk, grad_weight=buffer)
    assert at_once[3] is buffer and torch.equal(at_once[0], loss) and torch.equal(at_once[1], lse)
    assert torch.equal(at_once[2], gx)
    check(buffer - before, dw, "linear grad", FP32 if dtype == FP64 else dtype)


def test_linear_cross_entropy_of_a_cut_vocabulary(fenced: None) -> None:
    x, w = randn(13, 24, dtype=FP64), randn(101, 24, dtype=FP64, seed=1)
    target, dloss = targets(13, vocabulary=101), randn(13, dtype=FP64)
    exact, (dx, dw) = gradients(lambda x, w: hk.linear_cross_entropy_reference(x, w, target), [x, w], [dloss], FP64)
    cuts = [0, 40, 40, 101]
    parts = [hk.linear_vocab_stats(x, w[a:b], target, a, chunk=5) for a, b in zip(cuts, cuts[1:])]
    loss, lse = hk.merge_stats(parts)
    check(loss.where(target != -100, 0.0), exact[0], "linear loss", FP64)
    grads = [
        hk.linear_cross_entropy_bwd(dloss, x, w[a:b], target, lse, vocab_start=a, chunk=5)
        for a, b in zip(cuts, cuts[1:])
    ]
    check(sum(g for g, _ in grads), dx, "linear grad", FP64)  # type: ignore[arg-type]
    check(torch.cat([g for _, g in grads]), dw, "linear grad", FP64)


def test_linear_cross_entropy_of_nothing() -> None:
    x, w, target = randn(0, 8), randn(5, 8), torch.empty(0, dtype=torch.int64, device=DEVICE)
    loss, lse = hk.linear_cross_entropy_fwd(x, w, target)
    dx, dw = hk.linear_cross_entropy_bwd(loss, x, w, target, lse)
    assert loss.shape == (0,) and dx.shape == (0, 8) and not dw.any()
