"""Providers of attention over fused kernels: which calls go there, by whom, and what becomes of the others.

The devices are not here: aten's flash kernel for the CPU stands in for theirs, and stubs for the packages of others.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import math
import sys
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero_megatron.errors import UserError
from hetero_megatron.ops import SPECS, Capability, Kernel, KernelPlan, Signature, resolve, torch_registry
from hetero_megatron.ops.attention_cpu import FusedKernel, fused_attention, visible_square
from hetero_megatron.ops.attention_op import AttentionOptions, attn_delta, definition, reference_backward, visible
from hetero_megatron.ops.conformance import FAIL, check_kernel
from hetero_megatron.platform.plugins import load_plugins
from hetero_plugins import ascend, flash_attention, sdpa, triton_package
from hetero_plugins import triton as portable
from tests.support.selection import quick

CPU = torch.device("cpu")
flash_for_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_for_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def test_only_squares_are_taken_for_squares() -> None:
    """Against the mask itself, over all small sizes and positions."""
    seen: Counter[bool | None] = Counter()
    for s, t, q_start, k_start, window in itertools.product((1, 2, 5), (1, 2, 5), (0, 3, 7), (0, 3), (None, 1, 4, 9)):
        options = AttentionOptions(None, window, q_start, k_start)
        mask = visible(torch.zeros(1, s, 1, 1), t, options)[0]
        kind = visible_square(s, t, options)
        seen[kind] += 1
        if kind is None:
            assert not mask.all()
            assert s != t or not torch.equal(mask, torch.ones_like(mask).tril())
        else:
            assert torch.equal(mask, torch.ones_like(mask).tril() if kind else torch.ones_like(mask))
    assert min(seen.values()) >= 10 and set(seen) == {True, False, None}
    assert visible_square(4, 4, AttentionOptions(((0,), (0,)))) is True
    assert visible_square(4, 4, AttentionOptions(((0, 2), (0,)))) is None


def on_cpu(calls: Counter[str]) -> FusedKernel:
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, ...]:
        calls[f"forward {causal}"] += 1
        out, lse = flash_for_cpu(*(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal)
        return out.transpose(1, 2), lse

    def backward(*args: Any) -> tuple[torch.Tensor, ...]:
        *tensors, lse, causal = args
        calls[f"backward {causal}"] += 1
        return tuple(
            x.transpose(1, 2)
            for x in flash_for_cpu_backward(*(x.transpose(1, 2) for x in tensors), lse, 0.0, causal)
        )

    return FusedKernel(forward, backward)


def by_definition() -> Kernel:
    """A provider that serves all calls, and makes gradients of tiles in fp32."""

    def share(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, delta: Any, *options: Any) -> Any:
        dout, q, k, v, out = (x.to(lse.dtype) for x in (dout, q, k, v, out))
        return reference_backward(dout, q, k, v, None, out, lse, None, *options)[:3]

    kernel = torch_registry().kernel("attention", "reference")
    return replace(kernel, parts={"share": share, "delta": lambda dout, out: attn_delta(dout, out)[0]})


@pytest.mark.slow
@pytest.mark.parametrize("rest", quick(["definition", "triton"], ["definition"], []))
def test_a_fused_kernel_with_another_for_the_rest_conforms(rest: str) -> None:
    """The whole kit: squares and others, alone and as tiles of context groups, state of either to the other."""
    calls: Counter[str] = Counter()
    other = portable.attention_kernel() if rest == "triton" else by_definition()
    assert other is not None

    def counted(*args: Any) -> Any:
        calls["rest"] += 1
        return other.forward(*args)

    kernel = fused_attention("fused", on_cpu(calls), replace(other, forward=counted), Capability(), lambda _: [])
    for dtypes in ((torch.float32,), (torch.bfloat16,))[: 1 if rest == "triton" else 2]:  # Triton is interpreted here
        asked = lambda d: Signature("attention", "cpu", d, "cpu")  # noqa: E731
        found = list(check_kernel(SPECS["attention"], kernel, CPU, asked, dtypes, quick=True))
        assert [f for f in found if f.status == FAIL] == [] and len(found) > 100
    assert min(calls[f"{way} {causal}"] for way in ("forward", "backward") for causal in (True, False)) > 5
    assert calls["rest"] > 20


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_the_calls_of_aten_have_the_right_arguments_and_shapes(name: str, heads: tuple[int, int]) -> None:
    kernel = {"cudnn": sdpa.CUDNN, "flash": sdpa.FLASH}[name]
    for causal, t in ((True, 96), (False, 40)):
        q = torch.empty(2, 96, heads[0], 64, dtype=torch.bfloat16, device="meta")
        k = torch.empty(2, t, heads[1], 64, dtype=torch.bfloat16, device="meta")
        out, lse = kernel.forward(q, k, k, causal)
        assert out.shape == q.shape and lse.shape == (2, heads[0], 96) and lse.dtype == torch.float32
        made = kernel.backward(out, q, k, k, out, lse, causal)
        assert [x.shape for x in made] == [q.shape, k.shape, k.shape]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if torch had its fused kernels, and Triton were not interpreted."""
    monkeypatch.setattr(triton_package, "INTERPRETED", False)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91_000)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    yield


def plan(platform: str, device: str, arch: tuple[int, ...], head_dim: int = 128, dtype: torch.dtype = torch.bfloat16,
         wanted: str | None = None, **more: Any) -> KernelPlan:  # fmt: skip
    dims = {"head_dim": (head_dim,), "heads": (32,), "kv_heads": (8,)}
    signature = Signature("attention", device, dtype, platform, arch, dims, **more)
    return resolve(load_plugins().registry, [signature], {"attention": wanted} if wanted else None)


def test_the_fastest_that_serves_is_chosen_and_the_log_says_why_not_another(
    devices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, provider in (
        (("nvidia", "cuda", (9, 0)), "cudnn"), (("nvidia", "cuda", (8, 0)), "flash"),
        (("nvidia", "cuda", (9, 0), 256), "flash"), (("nvidia", "cuda", (8, 6), 256), "triton"),
        (("nvidia", "cuda", (9, 0), 100), "triton"), (("nvidia", "cuda", (7, 0)), "triton"),
        (("nvidia", "cuda", (9, 0), 128, torch.float32), "triton"), (("amd", "cuda", (9, 4, 2)), "flash"),
        (("intel", "xpu", ()), "triton"),
    ):  # fmt: skip
        assert plan(*arguments).provider("attention") == provider, arguments
    assert plan("nvidia", "cuda", (9, 0)).why() == []
    found = plan("nvidia", "cuda", (9, 0), deterministic=True)
    assert found.provider("attention") == "triton"
    assert any("not cudnn for attention" in line and "not deterministic" in line for line in found.why())
    assert "chip 8.0 is older than 9.0" in "\n".join(plan("nvidia", "cuda", (8, 0)).why())
    monkeypatch.setitem(sys.modules, "torch_npu", module("torch_npu"))
    assert plan("ascend", "npu", (910, 3)).provider("attention") == "npu_fusion"


def test_a_build_for_rocm_is_asked_whether_it_has_flash_attention(
    devices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Radeon's may not, and would raise at the first call."""
    monkeypatch.setattr(sdpa, "_probe", lambda head_dim, dtype: head_dim <= 64)
    assert plan("amd", "cuda", (11, 0, 0), 64).provider("attention") == "flash"
    found = plan("amd", "cuda", (11, 0, 0), 128)
    assert found.provider("attention") == "triton"
    assert any("no flash attention for head_dim 128 on this chip" in line for line in found.why())


def test_an_npu_without_triton_serves_whole_sequences_and_refuses_the_rest(
    devices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    without = lambda name, *more: None if name == "triton" else find(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setitem(sys.modules, "torch_npu", module("torch_npu"))
    found = plan("ascend", "npu", (910, 3))
    assert found.provider("attention") == "npu_fusion"
    kernel = load_plugins().registry.kernel("attention", "npu_fusion")
    q = torch.zeros(1, 4, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(UserError, match="windows, documents and parts of sequences are triton's, which cannot serve"):
        kernel.forward(q, q, q, None, [[0, 2]])


def test_an_npu_gets_no_triton_kernel_unasked(devices: None) -> None:
    registry = load_plugins().registry
    for op in ("rms_norm", "rope", "swiglu", "cross_entropy", "adamw", "l2norm"):
        signature = Signature(op, "npu", torch.float32, "ascend", (910, 3), {})
        assert resolve(registry, [signature], None).provider(op) == "aten", op
        assert resolve(registry, [signature], {op: "triton"}).provider(op) == "triton", op


def test_no_device_gets_quadratic_attention_unasked(devices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    without = lambda name, *more: None if name == "triton" else find(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setitem(sys.modules, "torch_npu", module("torch_npu"))
    for chip in (("nvidia", "cuda", (9, 0)), ("amd", "cuda", (9, 4, 2)), ("other", "acme", ())):
        with pytest.raises(UserError) as refusal:
            plan(*chip)
        said = str(refusal.value)
        assert "triton is not installed" in said and "attention=PROVIDER): reference" in said
        assert plan(*chip, wanted="reference").provider("attention") == "reference"


def module(name: str, **members: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for key, value in members.items():
        setattr(made, key, value)
    return made


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, ...]:
    return definition(q, k, v, None, None, None, 0 if causal else k.shape[1], 0)


def attend_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    dout, q, k, v, out, lse, causal = args
    start = 0 if causal else k.shape[1]
    return reference_backward(dout, q, k, v, None, out, lse, None, None, start, 0)[:3]


def check_stubbed(kernel: FusedKernel) -> None:
    generator = torch.Generator().manual_seed(5)
    for causal, t in ((True, 24), (False, 17)):
        q, k, v = (
            torch.randn(2, n, h, 16, generator=generator).bfloat16() for n, h in ((24, 4), (t, 2), (t, 2))
        )
        out, lse = kernel.forward(q, k, v, causal)
        want = attend(q, k, v, causal)
        torch.testing.assert_close(out, want[0])
        torch.testing.assert_close(lse, want[1], rtol=1e-5, atol=1e-5)
        dout = torch.randn(q.shape, generator=generator).bfloat16()
        found = kernel.backward(dout, q, k, v, out, lse, causal)
        for got, exact in zip(found, attend_backward(dout, q, k, v, out, lse, causal), strict=True):
            torch.testing.assert_close(got, exact, rtol=2e-2, atol=2e-2)


def test_an_npus_kernel_gets_its_own_maximum_and_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub has the interface of torch_npu: row statistics in 8 lanes, a compressed mask, scaled scores."""

    def causal_of(mask: torch.Tensor | None, mode: int) -> bool:
        assert (mode, mask is None) in ((2, False), (0, True))
        if mask is not None:
            assert mask.shape == (2048, 2048) and mask.dtype == torch.bool and not mask[5, 5] and mask[5, 6]
        return mode == 2

    def forward(q: Any, k: Any, v: Any, heads: int, layout: str, *, scale: float, sparse_mode: int,
                atten_mask: Any = None) -> tuple[Any, ...]:  # fmt: skip
        assert layout == "BSND" and heads == q.shape[2] and scale == 1 / math.sqrt(q.shape[3])
        out, lse = attend(q, k, v, causal_of(atten_mask, sparse_mode))
        top = lse - 0.75
        return out, *(x[..., None].expand(*x.shape, 8) for x in (top, (lse - top).exp())), torch.empty(0), 0, 0, 0

    def backward(q: Any, k: Any, v: Any, dy: Any, heads: int, layout: str, *, softmax_max: Any, softmax_sum: Any,
                 attention_in: Any, scale_value: float, sparse_mode: int, atten_mask: Any = None) -> Any:  # fmt: skip
        assert softmax_max.shape[-1] == softmax_sum.shape[-1] == 8 and scale_value == 1 / math.sqrt(q.shape[3])
        lse = softmax_max[..., 3] + softmax_sum[..., 3].log()
        return *attend_backward(dy, q, k, v, attention_in, lse, causal_of(atten_mask, sparse_mode)), None

    stub = module("torch_npu", npu_fusion_attention=forward, npu_fusion_attention_grad=backward)
    monkeypatch.setitem(sys.modules, "torch_npu", stub)
    check_stubbed(FusedKernel(ascend.fusion_forward, ascend.fusion_backward))


def test_flash_attn_by_request(devices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    chip = ("nvidia", "cuda", (9, 0))
    with pytest.raises(UserError, match="flash-attn is not installed"):
        plan(*chip, wanted="flash_attn")

    def forward(q: Any, k: Any, v: Any, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
                window_size_right: int, softcap: float, alibi_slopes: Any, return_softmax: bool) -> Any:  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap, return_softmax) == (0.0, -1, -1, 0.0, False)
        return *attend(q, k, v, causal), None, None

    def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, dropout_p: float,
                 softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
                 alibi_slopes: Any, deterministic: bool) -> None:  # fmt: skip
        assert deterministic
        for into, made in zip((dq, dk, dv), attend_backward(dout, q, k, v, out, lse, causal), strict=True):
            into.copy_(made)

    interface = module("flash_attn.flash_attn_interface", _flash_attn_forward=forward, _flash_attn_backward=backward)
    monkeypatch.setitem(sys.modules, "flash_attn", module("flash_attn", flash_attn_interface=interface))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    assert plan(*chip).provider("attention") == "cudnn"
    assert plan(*chip, wanted="flash_attn").provider("attention") == "flash_attn"
    check_stubbed(FusedKernel(flash_attention.forward, flash_attention.backward))


def test_liger_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn import functional as F

    def function(call: Any) -> Any:
        return types.SimpleNamespace(apply=call)

    def rms(x: Any, w: Any, eps: float, offset: float, mode: str, in_place: bool) -> Any:
        assert (offset, mode, in_place) == (0.0, "gemma", False)
        return F.rms_norm(x.float(), x.shape[-1:], w.float(), eps).to(x.dtype)

    def layer(x: Any, w: Any, b: Any, eps: float) -> Any:
        return F.layer_norm(x.float(), x.shape[-1:], w.float(), b.float(), eps).to(x.dtype)

    ops = {
        "rms_norm": {"LigerRMSNormFunction": function(rms)}, "layer_norm": {"LigerLayerNormFunction": function(layer)},
        "swiglu": {"LigerSiLUMulFunction": function(lambda a, b: (F.silu(a.float()) * b.float()).to(a.dtype))},
    }  # fmt: skip
    monkeypatch.setitem(sys.modules, "liger_kernel", module("liger_kernel"))
    for name, members in ops.items():
        monkeypatch.setitem(sys.modules, f"liger_kernel.ops.{name}", module(f"liger_kernel.ops.{name}", **members))
    registry = load_plugins().registry
    asked = lambda d: Signature(op, "cpu", d, "cpu")  # noqa: E731
    for op in ops:
        kernel = registry.kernel(op, "liger")
        on_gpu = Signature(op, "cuda", torch.bfloat16, "nvidia", (9, 0))
        assert kernel.reasons(on_gpu) == [] and not kernel.chosen_unasked(on_gpu)
        anywhere = replace(kernel, capability=Capability())
        found = list(check_kernel(SPECS[op], anywhere, CPU, asked, (torch.float32, torch.bfloat16), quick=True))
        assert [f for f in found if f.status == FAIL] == []
    monkeypatch.delitem(sys.modules, "liger_kernel")
    assert registry.kernel("swiglu", "liger").reasons(on_gpu) == ["liger-kernel is not installed"]
