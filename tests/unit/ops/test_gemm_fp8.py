"""Products in fp8: rounding against a definition by loops, who serves them, and what a stage refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.errors import UserError
from hetero_megatron.ops import Signature, default_kernels, resolve, torch_registry
from hetero_megatron.ops.gemm_fp8 import (
    BLOCK,
    E4M3,
    E5M2,
    NAMES,
    Quantised,
    largest_of,
    quantise_blocks,
    quantise_tensor,
    quantise_whole,
)
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.dump import to_dict
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.fp8_checks import fp8_fits, stage_fp8
from hetero_megatron.platform.plugins import load_plugins
from hetero_megatron.spec import load_model, shares
from hetero_plugins import fp8 as vendor
from hetero_plugins import triton_package
from tests.support.small_plans import pipe, plan, stage


def rounded(value: float, largest: float, kind: torch.dtype) -> float:
    """By the format's bits: 3 (e4m3) or 2 (e5m2) of mantissa, normal numbers from 2^-6 or 2^-14, halves to even."""
    bits, least, most = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}[kind]
    scale = 2.0 ** math.floor(math.log2(most / largest))
    step = 2.0 ** (max(math.frexp(abs(value * scale))[1] - 1, least) - bits)
    return round(value * scale / step) * step / scale


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("blocks", ["tensor", "1x128", "128x128", "128x1"])
def test_values_are_rounded_as_the_format_says(kind: torch.dtype, blocks: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(130, 140, generator=generator).bfloat16() * torch.logspace(-9, 3, 140, base=2.0)
    x[3, 5], x[7] = 3e4, 0.0
    if blocks == "tensor":
        found, (height, width) = quantise_tensor(x, kind, largest_of(x)), x.shape
    else:
        found = quantise_blocks(x, kind, blocks)
        height, width = map(int, blocks.split("x"))
    back = found.values(torch.float64)
    back = back.t() if blocks == "128x1" else back
    assert torch.equal(found.scale, torch.exp2(found.scale.log2().round())), "powers of two"
    for i in range(0, 130, 7):
        for j in range(0, 140, 11):
            top, left = i // height * height, j // width * width
            largest = float(x[top : top + height, left : left + width].abs().max())
            assert float(back[i, j]) == (rounded(float(x[i, j]), largest, kind) if largest else 0.0)


@pytest.mark.parametrize("blocks", ["1x128", "128x128", "128x1"])
def test_what_is_not_finite_stays_so_and_zero_is_zero(blocks: str) -> None:
    for value in (math.inf, -math.inf, math.nan):
        x = torch.zeros(4, 8)
        x[1, 2] = value
        found = quantise_blocks(x, E4M3, blocks).values(torch.float32)
        assert not (found.t() if blocks == "128x1" else found)[1, 2].isfinite()
        assert not quantise_tensor(x, E5M2, largest_of(x)).values(torch.float32)[1, 2].isfinite()
    assert not quantise_blocks(torch.zeros(3, 5), E4M3, blocks).values(torch.float32).any()


@pytest.mark.parametrize("op", NAMES)
def test_rows_of_a_batch_are_rounded_alone(op: str) -> None:
    """Of a micro-batch of three sequences each result is that of the sequence alone, and weight gradients add up."""
    kernel = torch_registry().kernel(op, "reference")
    generator = torch.Generator().manual_seed(1)
    x, w, dy = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((3, 70, 40), (24, 40), (3, 70, 24)))
    x[1] *= 100
    dy[2] *= 1e-3
    parts: Any = kernel.parts
    whole = kernel.forward(x, w, None, True)[0], parts["input"](dy, w, True), parts["weight"](dy, x, True)
    alone = [(kernel.forward(a, w, None, True)[0], parts["input"](b, w, True), parts["weight"](b, a, True))
             for a, b in zip(x.split(1), dy.split(1), strict=True)]  # fmt: skip
    for i in (0, 1):
        assert torch.equal(whole[i], torch.cat([row[i] for row in alone]))
    torch.testing.assert_close(whole[2], sum(row[2] for row in alone), rtol=1e-12, atol=1e-12)
    exact = dy.flatten(0, 1).t() @ x.flatten(0, 1)
    assert 0.005 < float((whole[2] - exact).norm() / exact.norm()) < 0.1, "an fp8 product, no better and no worse"


@pytest.mark.parametrize(("op", "provider"), [(NAMES[0], "scaled_mm"), (NAMES[0], "triton"), (NAMES[1], "triton")])
def test_providers_give_the_product_of_what_was_rounded(op: str, provider: str) -> None:
    registry, generator = load_plugins().registry, torch.Generator().manual_seed(1)
    shapes = ((2, 70, 150), (130, 150), (2, 70, 130))
    x, w, dy = (torch.randn(*s, generator=generator).bfloat16() for s in shapes)
    found = []
    for kernel in (registry.kernel(op, provider), registry.kernel(op, "reference")):
        parts: Any = kernel.parts
        into = torch.full((130, 150), torch.nan)
        parts["weight"](dy, x, True, into, 0.0)
        found.append((kernel.forward(x, w, None, False)[0], parts["input"](dy, w, True), into))
    for got, same in zip(*found, strict=True):
        torch.testing.assert_close(got, same, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("provider", ["scaled_mm", "triton"])
def test_scales_lie_where_cublas_takes_them(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses, on an H200 with CUDA 13, a scale that is at no multiple of 16 bytes."""
    product, seen = torch._scaled_mm, list[int]()

    def picky(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.extend(scale.data_ptr() % 16 for scale in scales)
        return product(a, b, *scales, **options)

    monkeypatch.setattr(torch, "_scaled_mm", picky)
    kernel = load_plugins().registry.kernel(NAMES[0], provider)
    x, w, dy = (torch.randn(*s).bfloat16() for s in ((3, 32, 32), (48, 32), (3, 32, 48)))
    kernel.forward(x, w, None, False)
    kernel.parts["input"](dy, w, True)
    kernel.parts["weight"](dy, x, True, torch.zeros(48, 32), 0.0)
    row = torch.ones(2)  # of a caller's own
    vendor.scaled_mm(*(Quantised(m.to(E4M3), row[1]) for m in (x[0], w)), torch.float32)
    assert len(seen) == 2 * 3 * 3 + 2 and not any(seen)


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("blocks", ["1x128", "128x128", "128x1"])
def test_triton_quantises_to_the_same_values(kind: torch.dtype, blocks: str) -> None:
    import hetero_kernels

    x = torch.randn(130, 140, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[2], x[3, 4], x[60:66, 7] = 0.0, 1.75, torch.tensor([448.0, 449.0, 1e-30, 3e38, math.inf, math.nan])
    got, want = hetero_kernels.quantise_fp8_blocks(x, kind, blocks), quantise_blocks(x, kind, blocks)
    torch.testing.assert_close(got[1], want.scale, rtol=0, atol=0, equal_nan=True)
    finite = want.values(torch.float32).isfinite()
    assert torch.equal(got[0].float()[finite], want.data.float()[finite])


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("turned", [False, True])
def test_triton_quantises_whole_matrices_to_the_same_values(kind: torch.dtype, turned: bool) -> None:
    import hetero_kernels

    x = torch.randn(4, 130, 140, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[0, 3:5, 4], x[1], x[2] = torch.tensor([448.0, 449.0]), 0.0, x[2] * 1e-30
    x[3, 60:63, 7] = torch.tensor([3e38, math.inf, math.nan])
    for some in (x, x.transpose(1, 2), x[:, ::2, 3:]):
        data, scale = hetero_kernels.quantise_fp8(some, kind, largest_of(some), turned)
        want = quantise_whole(some, kind, largest_of(some), turned)
        torch.testing.assert_close(scale, torch.stack([each.scale for each in want]), rtol=0, atol=0, equal_nan=True)
        assert data.is_contiguous() and scale[3].isnan()
        for got, each in zip(data[:3], want, strict=False):
            assert torch.equal(got.float(), each.data.float())


@pytest.mark.parametrize("op", NAMES)
def test_only_linear_modules_of_layers_take_it(op: str) -> None:
    spec = load_model("tiny")
    share = shares(spec, (1,))[0]
    fp8 = Fp8("hybrid", op.rpartition("_")[2])
    with pytest.warns(UserWarning, match="slow reference"):
        kernels = default_kernels(spec, share, True, torch.bfloat16, fp8=fp8)
    assert kernels.fp8 == op and kernels.provider("gemm") == "aten" and "fp8 (hybrid" in kernels.summary()
    assert default_kernels(spec, share, True, torch.bfloat16).fp8 is None


def test_no_device_gets_the_reference_unasked() -> None:
    for op in NAMES:
        with pytest.raises(UserError, match="only by request"):
            resolve(torch_registry(), [Signature(op, "acme", torch.bfloat16, "other")])


def test_the_kernel_that_quantises_in_one_pass_is_chosen_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_package, "INTERPRETED", False)
    registry = load_plugins().registry
    hopper = Signature(NAMES[0], "cuda", torch.bfloat16, "nvidia", (9, 0))
    assert resolve(registry, [hopper]).provider(NAMES[0]) == "triton"
    monkeypatch.setattr(vendor, "triton_supports", lambda _: ["triton is not installed"])
    assert resolve(registry, [hopper]).provider(NAMES[0]) == "scaled_mm"


TP = plan([pipe(1, 2, stage([0, 1], [0, 6], tp=2))], seq_length=256)
CONTEXT = plan([pipe(1, 2, stage([0, 1], [0, 6], order="contiguous", context=[
    {"ranks": [0], "tokens": [100], "heads": [8]}, {"ranks": [1], "tokens": [156], "heads": [8]}
]))], seq_length=256)  # fmt: skip


@pytest.mark.parametrize(
    ("data", "fp8", "changes", "field"),
    [
        (TP, Fp8("e4m3", "blockwise"), {}, "tp"),  # head size 32: 64 columns of queries on each rank
        (CONTEXT, Fp8("e4m3", "blockwise"), {}, "context"),
        (CONTEXT, Fp8("e4m3", "tensorwise"), {}, "context"),
        (TP, Fp8("e4m3", "tensorwise"), {"num_kv_heads": 1}, "tp"),
        (TP, None, {"dtype": "fp8"}, "dtype"),
        (TP, Fp8("e4m3", "tensorwise"), {"dtype": "fp16"}, "dtype"),
    ],
)
def test_what_would_depend_on_the_plan_is_refused(
    data: dict[str, Any], fp8: Fp8 | None, changes: dict[str, Any], field: str
) -> None:
    spec = load_model("tiny")
    found = plan_from_dict(data, spec)
    if "num_kv_heads" in changes:
        spec = replace(spec, **changes)
    else:
        first = found.pipelines[0]
        found = replace(found, pipelines=(replace(first, stages=(replace(first.stages[0], **changes),)),))
    with pytest.raises(UserError) as refused:
        fp8_fits(found, spec, fp8, "bf16", None)
    assert str(refused.value.field) == f"pipelines[0].stages[0].{field}" and "bf16" in refused.value.accepted
    if fp8 is not None:
        first = found.pipelines[0]
        kept = replace(first, stages=(replace(first.stages[0], dtype="bf16"),))
        fp8_fits(replace(found, pipelines=(kept,)), spec, fp8, "bf16", None)


def test_a_chip_without_fp8_needs_a_stage_that_says_so() -> None:
    """The stage, the chip and the field are named; where the plan says so, the stage stays in the weights' dtype."""
    cluster = cluster_from_dict({
        "version": 1, "nodes": [{"name": "new", "chip": "H100-SXM"}, {"name": "old", "chip": "A100-80-SXM"}],
        "links": {"inter_node": {"bandwidth": "1 GB/s", "latency": "10 us"}},
    })  # fmt: skip
    spec, fp8 = load_model("tiny"), Fp8("hybrid", "blockwise")
    plain = plan([pipe(1, 2, stage([0], [0, 3]), stage([1], [3, 6]))], seq_length=64)
    said = plan([pipe(1, 2, stage([0], [0, 3]), stage([1], [3, 6], dtype="bf16"))], seq_length=64)
    with pytest.raises(UserError, match="A100-80-SXM") as refused:
        fp8_fits(plan_from_dict(plain, spec), spec, fp8, "bf16", cluster)
    assert refused.value.field == "pipelines[0].stages[1].dtype" and "bf16" in refused.value.accepted
    found = plan_from_dict(said, spec)
    fp8_fits(found, spec, fp8, "bf16", cluster)
    assert found.fingerprint() != plan_from_dict(plain, spec).fingerprint()
    assert plan_from_dict(to_dict(found), spec) == found
    assert [stage_fp8(s, fp8) for s in found.pipelines[0].stages] == [fp8, None]


def test_blocks_are_the_plans() -> None:
    from hetero_megatron.plans import fp8

    assert fp8.BLOCK == BLOCK and {Fp8("e4m3", recipe).operator for recipe in fp8.RECIPES} == set(NAMES)
