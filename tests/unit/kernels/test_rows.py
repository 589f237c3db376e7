"""Triton kernels of norms, activations, rope and softmax against torch in fp64."""

from __future__ import annotations

import pytest
import torch

import hetero_kernels as hk
from hetero_kernels.limits import as_flat_rows
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
from tests.support.selection import quick

NARROW = hk.Limits(arch="interpreter", processors=2, max_grid=3, max_block=64)  # rows wider than a tile, few programs
SHAPES = [((5, 7, 33), None), ((1, 1), None), ((37, 64), None), ((9, 100), NARROW), ((2, 3, 130), NARROW)]


@pytest.fixture
def fenced(monkeypatch: pytest.MonkeyPatch):
    with fenced_memory(monkeypatch):
        yield


@pytest.mark.parametrize("dtype", quick(DTYPES, [FP64, BF16], []))
@pytest.mark.parametrize(("shape", "limits"), SHAPES)
def test_rms_norm(shape: tuple[int, ...], limits: hk.Limits | None, dtype: torch.dtype, fenced: None) -> None:
    x, dy = inputs_fenced(randn(*shape, dtype=dtype)), inputs_fenced(randn(*shape, dtype=dtype, seed=1))
    w = inputs_fenced(randn(shape[-1], dtype=dtype, seed=2) + 0.5)
    eps = 1e-5 if shape[-1] > 1 else 0.5  # in one column, dx is eps times something
    for centred in (False, True):

        def reference(x: torch.Tensor, w: torch.Tensor, centred: bool = centred) -> torch.Tensor:
            return hk.rms_norm_reference(x, w, eps, zero_centered=centred)

        (y,), (dx, dw) = gradients(reference, [x, w], [dy], FP64)
        (ye,), (dxe, dwe) = gradients(reference, [x, w], [dy], dtype)
        got, rstd = hk.rms_norm_fwd(x, w, eps, zero_centered=centred, limits=limits)
        gx, gw = hk.rms_norm_bwd(dy, x, w, rstd, zero_centered=centred, limits=limits)
        assert gw is not None and got.dtype == gx.dtype == gw.dtype == dtype
        check(got, y, "norm", dtype, ye)
        check(gx, dx, "norm", dtype, dxe, 3)
        check(gw, dw, "norm weight", dtype, dwe, 3)


@pytest.mark.parametrize("dtype", [FP64, BF16])
@pytest.mark.parametrize("limits", [None, NARROW])
def test_add_rms_norm(limits: hk.Limits | None, dtype: torch.dtype, fenced: None) -> None:
    x, r, dy, ds = (inputs_fenced(randn(6, 70, dtype=dtype, seed=i)) for i in range(4))
    w = randn(70, dtype=dtype, seed=5)
    y, total, rstd = hk.add_rms_norm_fwd(x, r, w, 1e-6, limits=limits)
    assert torch.equal(total, x + r)
    for seed_sum in (ds, None):
        gx, gw = hk.add_rms_norm_bwd(dy, seed_sum, total, w, rstd, limits=limits)
        seeds = [dy, ds if seed_sum is not None else torch.zeros_like(ds)]
        exact, (dx, dw) = gradients(lambda s, w: (hk.rms_norm_reference(s, w, 1e-6), s * 1), [total, w], seeds, FP64)
        assert gw is not None
        check(y, exact[0], "norm", dtype)
        check(gx, dx, "norm", dtype)
        check(gw, dw, "norm weight", dtype)


@pytest.mark.parametrize("dtype", quick(DTYPES, [FP64, BF16], []))
@pytest.mark.parametrize(("shape", "limits"), SHAPES[2:])
def test_layer_norm(shape: tuple[int, ...], limits: hk.Limits | None, dtype: torch.dtype, fenced: None) -> None:
    x, dy = inputs_fenced(randn(*shape, dtype=dtype) + 3), inputs_fenced(randn(*shape, dtype=dtype, seed=1))
    w, b = randn(shape[-1], dtype=dtype, seed=2), randn(shape[-1], dtype=dtype, seed=3)
    (y,), (dx, dw, db) = gradients(
        lambda x, w, b: torch.nn.functional.layer_norm(x, x.shape[-1:], w, b, 1e-5), [x, w, b], [dy], FP64
    )
    got, mean, rstd = hk.layer_norm_fwd(x, w, b, 1e-5, limits=limits)
    gx, gw, gb = hk.layer_norm_bwd(dy, x, w, mean, rstd, limits=limits)
    assert gw is not None and gb is not None
    check(got, y, "norm", dtype)
    check(gx, dx, "norm", dtype)
    check(gw, dw, "norm weight", dtype)
    check(gb, db, "norm weight", dtype)


def test_norm_without_weight_or_bias(fenced: None) -> None:
    x, dy = randn(5, 40), randn(5, 40, seed=1)
    (y,), (dx,) = gradients(lambda x: hk.rms_norm_reference(x, None, 1e-6), [x], [dy], FP64)
    got, rstd = hk.rms_norm_fwd(x, None, 1e-6)
    gx, gw = hk.rms_norm_bwd(dy, x, None, rstd)
    check(got, y, "norm", FP32)
    check(gx, dx, "norm", FP32)
    assert gw is None
    got, mean, rstd = hk.layer_norm_fwd(x, None, None, 1e-6)
    gx, gw, gb = hk.layer_norm_bwd(dy, x, None, mean, rstd)
    (y,), (dx,) = gradients(lambda x: hk.layer_norm_reference(x, None, None, 1e-6), [x], [dy], FP64)
    check(got, y, "norm", FP32)
    check(gx, dx, "norm", FP32)
    assert gw is None and gb is None


def test_norm_views_and_gradients_in_fp32(fenced: None) -> None:
    whole = randn(6, 3, 80, dtype=BF16)
    x, dy, w = whole[:, 1, 8:56], whole[:, 2, :48], randn(48, dtype=BF16, seed=1)
    assert not x.is_contiguous()
    got, rstd = hk.rms_norm_fwd(x, w, 1e-5)
    check(got, hk.rms_norm_reference(x.double(), w.double(), 1e-5), "norm", BF16)
    _, gw = hk.rms_norm_bwd(dy, x, w, rstd, grad_dtype=FP32)
    _, (_, dw) = gradients(lambda x, w: hk.rms_norm_reference(x, w, 1e-5), [x, w], [dy], FP64)
    assert gw is not None and gw.dtype == FP32
    check(gw, dw, "norm weight", FP32)
    transposed = randn(16, 5).t()
    got, _ = hk.rms_norm_fwd(transposed, None, 1e-5)
    check(got, hk.rms_norm_reference(transposed.double(), None, 1e-5), "norm", FP32)


def test_more_rows_than_a_grid_dimension_holds(fenced: None) -> None:
    x = randn(70_001, 3)
    w = randn(3, seed=1)
    limits = hk.Limits(arch="interpreter", processors=2, max_grid=2)
    got, rstd = hk.rms_norm_fwd(x, w, 1e-5, limits=limits)
    gx, gw = hk.rms_norm_bwd(x, x, w, rstd, limits=limits)
    (y,), (dx, dw) = gradients(lambda x, w: hk.rms_norm_reference(x, w, 1e-5), [x, w], [x], FP64)
    check(got, y, "norm", FP32)
    check(gx, dx, "norm", FP32)
    assert gw is not None
    check(gw, dw, "norm weight", FP32)


def test_norms_are_bitwise_repeatable() -> None:
    x, dy, w = randn(64, 96, dtype=BF16), randn(64, 96, dtype=BF16, seed=1), randn(96, dtype=BF16, seed=2)
    _, rstd = hk.rms_norm_fwd(x, w, 1e-5)
    first, second = (hk.rms_norm_bwd(dy, x, w, rstd)[1] for _ in range(2))
    assert first is not None and second is not None and torch.equal(first, second)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [{}, {"limit": 0.7}, {"limit": 0.7, "alpha": 1.702, "shift": 1.0}], ids=str)
def test_swiglu(dtype: torch.dtype, form: dict[str, float], fenced: None) -> None:
    both = inputs_fenced(randn(9, 2 * 35, dtype=dtype))
    dy = randn(9, 35, dtype=dtype, seed=1)
    for gate, up in (both.chunk(2, -1), [half.contiguous() for half in both.chunk(2, -1)]):
        exact, grads = gradients(lambda g, u: hk.swiglu_reference(g, u, **form), [gate, up], [dy], FP64)
        eager, eager_grads = gradients(lambda g, u: hk.swiglu_reference(g, u, **form), [gate, up], [dy], dtype)
        check(hk.swiglu_fwd(gate, up, **form), exact[0], "elementwise", dtype, eager[0])
        for packed in (False, True):
            got = hk.swiglu_bwd(dy, gate, up, **form, packed=packed)
            assert (got[0].data_ptr() + 35 * got[0].element_size() == got[1].data_ptr()) or not packed
            for g, exact_grad, eager_grad in zip(got, grads, eager_grads):
                check(g, exact_grad, "elementwise", dtype, eager_grad, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", [False, True])
def test_gelu(dtype: torch.dtype, approximate: bool, fenced: None) -> None:
    x, dy = inputs_fenced(randn(3, 5, 37, dtype=dtype, scale=3)), randn(3, 5, 37, dtype=dtype, seed=1)
    (y,), (dx,) = gradients(lambda x: hk.gelu_reference(x, approximate=approximate), [x], [dy], FP64)
    check(hk.gelu_fwd(x, approximate=approximate), y, "elementwise", dtype)
    check(hk.gelu_bwd(dy, x, approximate=approximate), dx, "elementwise", dtype)
    check(hk.gelu_bwd(dy[:, 1], x[:, 1], approximate=approximate), dx[:, 1], "elementwise", dtype)


def test_activations_far_from_zero() -> None:
    x = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4], device=DEVICE)
    for approximate in (False, True):
        check(hk.gelu_fwd(x, approximate=approximate), hk.gelu_reference(x.double(), approximate=approximate),
              "elementwise", FP32)  # fmt: skip
        assert bool(hk.gelu_bwd(torch.ones_like(x), x, approximate=approximate).isfinite().all())
    assert bool(torch.stack(hk.swiglu_bwd(torch.ones_like(x), x, x)).isfinite().all())


@pytest.mark.parametrize("dtype", quick(DTYPES, [FP64, BF16], []))
@pytest.mark.parametrize("limits", [None, NARROW])
def test_softmax(dtype: torch.dtype, limits: hk.Limits | None, fenced: None) -> None:
    x, dy = inputs_fenced(randn(1, 3, 7, 75, dtype=dtype, scale=4)), randn(1, 3, 7, 75, dtype=dtype, seed=1)
    mask = randn(7, 75, seed=2) > 0
    mask[3] = False  # this row sees nothing
    for kwargs in ({}, {"scale": 0.3, "causal": True, "diagonal": -1}, {"mask": mask}):
        exact, (dx,) = gradients(lambda x, kw=kwargs: hk.softmax_reference(x, **kw), [x], [dy], FP64)
        y = hk.softmax_fwd(x, limits=limits, **kwargs)
        check(y, exact[0], "norm", dtype)
        got = hk.softmax_bwd(dy, y, scale=kwargs.get("scale", 1.0), limits=limits)
        check(got, dx.nan_to_num(0.0), "elementwise", dtype)
    with pytest.raises(ValueError, match="mask"):
        hk.softmax_fwd(x, mask=mask[:, :4])


@pytest.mark.parametrize("dtype", quick(DTYPES, [FP64, BF16], []))
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [24, 16])
def test_rope(dtype: torch.dtype, interleaved: bool, rotated: int, fenced: None) -> None:
    table = FP64 if dtype == FP64 else FP32
    angle = randn(5, rotated // 2, dtype=FP64, scale=10)
    cos, sin = angle.cos().to(table), angle.sin().to(table)
    fused = inputs_fenced(randn(2, 5, 3 + 1 + 1, 24, dtype=dtype))
    q, k = fused[:, :, :3], fused[:, :, 3:4]  # views of one projection
    positions = torch.tensor([4, 0, 2, 2, 1, 3, 3, 0, 4, 1], device=DEVICE)
    for chosen in (None, positions):
        kwargs = {"positions": chosen, "interleaved": interleaved}
        got = hk.rope_fwd(q, k, cos, sin, **kwargs)
        for x, y in zip((q, k), got):
            assert y is not None
            check(y, hk.rope_reference(x.double(), cos.double(), sin.double(), **kwargs), "elementwise", dtype)
        back = hk.rope_bwd(*got, cos, sin, **kwargs)
        _, (dq,) = gradients(
            lambda x, kw=kwargs: hk.rope_reference(x, cos.double(), sin.double(), **kw), [q], [got[0]], FP64
        )
        check(back[0], dq, "elementwise", dtype)
    before = q.clone(), fused.clone()
    turned, none = hk.rope_fwd(q, None, cos, sin, interleaved=interleaved, inplace=True)
    assert turned.data_ptr() == q.data_ptr() and none is None and torch.equal(fused[:, :, 3:], before[1][:, :, 3:])
    again = hk.rope_reference(before[0].double(), cos.double(), sin.double(), interleaved=interleaved)
    check(turned, again, "elementwise", dtype)


def test_empty_tensors() -> None:
    x, w = randn(0, 8), randn(8)
    y, rstd = hk.rms_norm_fwd(x, w, 1e-5)
    dx, dw = hk.rms_norm_bwd(x, x, w, rstd)
    assert y.shape == dx.shape == (0, 8) and dw is not None and torch.equal(dw, torch.zeros_like(w))
    y, mean, rstd = hk.layer_norm_fwd(x, w, w, 1e-5)
    dx, dw, db = hk.layer_norm_bwd(x, x, w, mean, rstd)
    assert dw is not None and db is not None and not dw.any() and not db.any()
    total = hk.add_rms_norm_fwd(x, x, w, 1e-5)[1]
    assert total.shape == (0, 8)
    assert hk.swiglu_fwd(x, x).shape == hk.swiglu_bwd(x, x, x)[1].shape == hk.gelu_bwd(x, x).shape == (0, 8)
    assert hk.softmax_fwd(x).shape == hk.softmax_bwd(x, x).shape == (0, 8)
    q = randn(2, 3, 0, 8)
    cos = randn(3, 4)
    assert hk.rope_fwd(q, None, cos, cos)[0].shape == q.shape
    k = randn(2, 3, 1, 8)
    turned = hk.rope_fwd(q, k, cos, cos)[1]
    assert turned is not None
    check(turned, hk.rope_reference(k.double(), cos.double(), cos.double()), "elementwise", FP32)


def test_device_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import hetero_kernels.limits as limits

    monkeypatch.setattr(limits, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        limits.limits_of(torch.device("cpu"))


def test_one_long_row_only_where_its_width_fits_32_bits() -> None:
    small, large = (torch.empty(n, 1 << 20, device="meta") for n in (1024, 2048))
    assert [t.shape for t in as_flat_rows(small, small)] == [(1, 1 << 30)] * 2
    assert [t.shape for t in as_flat_rows(large, large)] == [large.shape] * 2  # one row of 2**31 elements wraps


@pytest.mark.parametrize("limits", [None, NARROW])
def test_norms_of_strided_weights_and_statistics(limits: hk.Limits | None) -> None:
    """Every second element of a wider vector, and saved statistics that lie apart."""
    x, dy = randn(6, 130, dtype=FP64), randn(6, 130, dtype=FP64, seed=1)
    w, b = (randn(260, dtype=FP64, seed=s)[::2] for s in (2, 3))
    assert not w.is_contiguous()
    function = lambda x, w, b: torch.nn.functional.layer_norm(x, (130,), w, b, 1e-5)  # noqa: E731
    (exact,), wanted = gradients(function, [x, w, b], [dy], FP64)
    y, mean, rstd = hk.layer_norm_fwd(x, w, b, 1e-5, limits=limits)
    apart = [torch.stack([s, torch.full_like(s, torch.nan)], -1)[..., 0] for s in (mean, rstd)]
    assert not apart[0].is_contiguous()
    found = hk.layer_norm_bwd(dy, x, w, *apart, limits=limits)
    for got, right in zip((y, *found), (exact, *wanted), strict=True):
        check(got, right, "norm weight", FP64)
    y, rstd = hk.rms_norm_fwd(x, w, 1e-5, limits=limits)
    (exact,), wanted = gradients(lambda x, w: hk.rms_norm_reference(x, w, 1e-5), [x, w], [dy], FP64)
    for got, right in zip((y, *hk.rms_norm_bwd(dy, x, w, rstd, limits=limits)), (exact, *wanted), strict=True):
        check(got, right, "norm weight", FP64)
