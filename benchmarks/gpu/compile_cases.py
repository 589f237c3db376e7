"""The calls whose kernels ``compile_kernels.py`` compiles: one operator, shape and variant each, on tensors without
memory. To have a kernel watched, add its call here and run ``compile_kernels.py --update``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import hetero_kernels as hk

BF16, FP32 = torch.bfloat16, torch.float32
DROPOUT = hk.AttentionDropout(6554, 1)  # one tenth
Call = tuple[str, Callable[..., Any]]  # (name, function of limits=)


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def norms() -> Iterator[Call]:
    for hidden in (64, 1024, 4096, 8192, 16384, 65536):
        x, w, rstd = empty(8192, hidden), empty(hidden), empty(8192, dtype=FP32)
        yield f"rms_norm_fwd {hidden}", partial(hk.rms_norm_fwd, x, w, 1e-5)
        yield f"rms_norm_bwd {hidden}", partial(hk.rms_norm_bwd, x, x, w, rstd)
        yield f"add_rms_norm_fwd {hidden}", partial(hk.add_rms_norm_fwd, x, x, w, 1e-5)
        yield f"add_rms_norm_bwd {hidden}", partial(hk.add_rms_norm_bwd, x, x, x, w, rstd)
        yield f"layer_norm_fwd {hidden}", partial(hk.layer_norm_fwd, x, w, w, 1e-5)
        yield f"layer_norm_bwd {hidden}", partial(hk.layer_norm_bwd, x, x, w, rstd, rstd)


def elementwise() -> Iterator[Call]:
    both, gate, up = empty(8192, 2 * 14336), empty(8192, 14336), empty(8192, 14336)
    for name, (a, b) in (("", (gate, up)), (", halves of one buffer", both.chunk(2, -1))):
        yield f"swiglu_fwd 14336{name}", partial(hk.swiglu_fwd, a, b)
        yield f"swiglu_bwd 14336{name}", partial(hk.swiglu_bwd, gate, a, b)
    yield "swiglu_fwd 14336, limit", partial(hk.swiglu_fwd, gate, up, limit=7.0)
    yield "swiglu_bwd 14336, limit, packed", partial(hk.swiglu_bwd, gate, gate, up, limit=7.0, packed=True)
    clamped: dict[str, Any] = {"limit": 7.0, "alpha": 1.702, "shift": 1.0}
    yield "swiglu_fwd 14336, clamped", partial(hk.swiglu_fwd, gate, up, **clamped)
    yield "swiglu_bwd 14336, clamped, packed", partial(hk.swiglu_bwd, gate, gate, up, **clamped, packed=True)
    for approximate in (False, True):
        name = f"14336{', tanh' * approximate}"
        yield f"gelu_fwd {name}", partial(hk.gelu_fwd, gate, approximate=approximate)
        yield f"gelu_bwd {name}", partial(hk.gelu_bwd, gate, gate, approximate=approximate)
    positions = empty(8192, dtype=torch.int64)
    yield "dropout 4096", partial(hk.dropout, empty(1, 8192, 4096), positions, dropped=6554, key=1)
    key, sample = empty(2, dtype=torch.int64).unbind()
    dropout = partial(hk.dropout, empty(1, 8192, 4096), positions, dropped=6554)
    yield "dropout 4096, numbers on the device", partial(dropout, key=key, sample=sample)
    q, k, table = empty(1, 8192, 32, 128), empty(1, 8192, 8, 128), empty(8192, 64, dtype=FP32)
    yield "rope_fwd 32+8x128", partial(hk.rope_fwd, q, k, table, table)
    yield "rope_fwd 32+8x128, interleaved", partial(hk.rope_fwd, q, k, table, table, interleaved=True)
    part = table[:, :32]
    yield "rope_bwd 32+8x128, half, positions", partial(hk.rope_bwd, q, k, part, part, positions=positions)


def softmaxes() -> Iterator[Call]:
    for width in (1024, 8192, 131072):
        x = empty(8192, width)
        yield f"softmax_fwd {width}, causal", partial(hk.softmax_fwd, x, causal=True)
        yield f"softmax_fwd {width}, mask", partial(hk.softmax_fwd, x, mask=empty(8192, width, dtype=torch.bool))
        yield f"softmax_bwd {width}", partial(hk.softmax_bwd, x, x)


def losses() -> Iterator[Call]:
    target, stats = empty(8192, dtype=torch.int64), empty(8192, dtype=FP32)
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0}
    for vocabulary in (4096, 50257, 131072):
        logits = empty(8192, vocabulary)
        for name, more in (("", dict[str, Any]()), (", all options", options)):
            yield f"cross_entropy_fwd {vocabulary}{name}", partial(hk.cross_entropy_fwd, logits, target, **more)
            backward = partial(hk.cross_entropy_bwd, stats, logits, target, stats, **more)
            yield f"cross_entropy_bwd {vocabulary}{name}", backward
        yield f"vocab_stats {vocabulary}", partial(hk.vocab_stats, logits, target, 1000)
    logits, target, stats = empty(1024, 128256, dtype=FP32), target[:1024], stats[:1024]
    yield "cross_entropy_fwd 128256, fp32", partial(hk.cross_entropy_fwd, logits, target)
    yield "cross_entropy_bwd 128256, fp32", partial(hk.cross_entropy_bwd, stats, logits, target, stats)


def attentions() -> Iterator[Call]:
    bounds = empty(1, 2, 16384, dtype=torch.int32)
    masks: dict[str, dict[str, Any]] = {
        "causal": {}, "full": {"causal": False}, "window": {"window": 4096}, "documents": {"bounds": bounds},
    }  # fmt: skip
    for dim, dtype in ((128, BF16), (64, BF16), (80, BF16), (256, BF16), (128, FP32)):
        q, k = empty(1, 16384, 32, dim, dtype=dtype), empty(1, 16384, 8, dim, dtype=dtype)
        lse = empty(1, 32, 16384, dtype=FP32)
        name = f"{dim}{', fp32' * (dtype == FP32)}"
        for mask, options in masks.items():
            yield f"attention_fwd {name}, {mask}", partial(hk.attention_fwd, q, k, k, **options)
            backward = partial(hk.attention_bwd, q, q, k, k, None, lse, delta=lse, **options)
            yield f"attention_bwd {name}, {mask}", backward
        key, sample = empty(2, dtype=torch.int64).unbind()
        on_device = hk.AttentionDropout(6554, key, sample)
        for drop, dropped in (("dropout", DROPOUT), ("dropout, numbers on the device", on_device)):
            if dtype == BF16 and dim in (64, 128):
                yield f"attention_fwd {name}, {drop}", partial(hk.attention_fwd, q, k, k, dropout=dropped)
                backward = partial(hk.attention_bwd, q, q, k, k, None, lse, delta=lse, dropout=dropped)
                yield f"attention_bwd {name}, {drop}", backward
        yield f"attention_delta {name}", partial(hk.attention_delta, q, q)
        yield f"attention_merge {name}", partial(hk.attention_merge, q, lse, q, lse)


def optimizers() -> Iterator[Call]:
    state, grads = [empty(1 << 20, dtype=FP32)], [empty(1 << 20)]
    call: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 2}
    step = partial(hk.adamw_step, state, exp_avg=state, exp_avg_sq=state, **call)
    yield "adamw", partial(step, grads=state)
    yield "adamw, bf16 copies", partial(step, grads=state, copies=grads, grad_scale=0.5)
    yield "adamw, bf16 gradients and copies", partial(step, grads=grads, copies=grads)
    scalar = empty(1, dtype=FP32)
    yield "adamw, scaled, may skip", partial(step, grads=state, found_inf=scalar, grad_scale=scalar)
    yield "l2norm", partial(hk.l2norm, state)
    yield "l2norm, bf16", partial(hk.l2norm, grads)


def grouped() -> Iterator[Call]:
    """Experts of Qwen3-30B-A3B (128, 768 wide) and of Mixtral-8x7B (8, 14336 wide)."""
    for dtype, (groups, n, k) in itertools.product((BF16, FP32), ((128, 768, 2048), (8, 14336, 4096))):
        name = f"{groups}x{n}x{k}{', fp32' * (dtype == FP32)}"
        x, dy, w = empty(8192, k, dtype=dtype), empty(8192, n, dtype=dtype), empty(groups, n, k, dtype=dtype)
        ends, bias, into = empty(groups, dtype=torch.int64), empty(groups, n, dtype=dtype), empty(*w.shape, dtype=FP32)
        yield f"grouped_gemm_fwd {name}", partial(hk.grouped_gemm_fwd, x, w, ends)
        yield f"grouped_gemm_fwd {name}, bias", partial(hk.grouped_gemm_fwd, x, w, ends, bias)
        yield f"grouped_gemm_dx {name}", partial(hk.grouped_gemm_dx, dy, w, ends)
        yield f"grouped_gemm_dw {name}", partial(hk.grouped_gemm_dw, dy, x, ends)
        yield f"grouped_gemm_dw {name}, into", partial(hk.grouped_gemm_dw, dy, x, ends, into=into)


def delta_rules() -> Iterator[Call]:
    """Qwen3-Next's layer: 16 key and 32 value heads of 128; in context groups values have 256 features."""
    shapes = [(128, 128, BF16), (128, 256, BF16), (64, 64, BF16), (128, 128, torch.float16), (128, 128, FP32)]
    for dim, dim_v, dtype in shapes:
        q, v = empty(1, 16384, 16, dim, dtype=dtype), empty(1, 16384, 32, dim_v, dtype=dtype)
        g, beta = empty(1, 16384, 32, dtype=FP32), empty(1, 16384, 32, dtype=dtype)
        state, documents = empty(1, 32, dim, dim_v, dtype=FP32), empty(1, 16384, dtype=torch.int32)
        kind = {BF16: "", FP32: ", fp32"}.get(dtype, ", fp16")
        for name, more in (("", dict[str, Any]()), (", documents", {"state": state, "documents": documents})):
            if name and (dim_v, dtype) != (128, BF16):
                continue
            call = f"{dim}x{dim_v}{kind}{name}"
            yield f"gated_delta_fwd {call}", partial(hk.gated_delta_fwd, q, q, v, g, beta, **more)
            yield f"gated_delta_bwd {call}", partial(hk.gated_delta_bwd, v, state, q, q, v, g, beta, **more)


def feature_rules() -> Iterator[Call]:
    """Kimi Linear's layer: 32 heads of 128, each feature of a key with a decay of its own."""
    shapes = [(128, 128, BF16), (128, 256, BF16), (64, 64, BF16), (128, 128, torch.float16), (128, 128, FP32)]
    for dim, dim_v, dtype in shapes:
        q, v = empty(1, 16384, 32, dim, dtype=dtype), empty(1, 16384, 32, dim_v, dtype=dtype)
        g, beta = empty(1, 16384, 32, dim, dtype=FP32), empty(1, 16384, 32, dtype=dtype)
        state = empty(1, 32, dim, dim_v, dtype=FP32)
        more = {"state": state, "documents": empty(1, 16384, dtype=torch.int32)}
        kind = {BF16: "", FP32: ", fp32"}.get(dtype, ", fp16")
        for name, options in (("", dict[str, Any]()), (", documents", more)):
            if name and (dim_v, dtype) != (128, BF16):
                continue
            call = f"by feature {dim}x{dim_v}{kind}{name}"
            yield f"gated_delta_fwd {call}", partial(hk.gated_delta_fwd, q, q, v, g, beta, **options)
            yield f"gated_delta_bwd {call}", partial(hk.gated_delta_bwd, v, state, q, q, v, g, beta, **options)


def state_space_rules() -> Iterator[Call]:
    """Nemotron-H 8B's layer: 8 groups with 16 heads of 64 each, states of 128; and small states."""
    for dim, dim_v, dtype in ((128, 64, BF16), (16, 64, BF16), (128, 64, torch.float16), (128, 64, FP32)):
        q, v = empty(1, 16384, 8, dim, dtype=dtype), empty(1, 16384, 128, dim_v, dtype=dtype)
        g, state = empty(1, 16384, 128, dtype=FP32), empty(1, 128, dim, dim_v, dtype=FP32)
        more = {"state": state, "documents": empty(1, 16384, dtype=torch.int32)}
        kind = {BF16: "", FP32: ", fp32"}.get(dtype, ", fp16")
        for name, options in (("", dict[str, Any]()), (", documents", more)):
            if name and (dim, dtype) != (128, BF16):
                continue
            call = f"{dim}x{dim_v}{kind}{name}"
            yield f"state_space_fwd {call}", partial(hk.state_space_fwd, q, q, v, g, g, **options)
            yield f"state_space_bwd {call}", partial(hk.state_space_bwd, v, state, q, q, v, g, g, **options)


def products_in_fp8() -> Iterator[Call]:
    """A layer's product: 8,192 tokens, 4,096 x 4,096, and its weight's gradient."""
    n, fp8 = 4096, torch.float8_e4m3fn
    x, w, by_row = empty(8192, n, dtype=fp8), empty(n, n, dtype=fp8), empty(8192, n // 128, dtype=FP32)
    square = empty(n // 128, n // 128, dtype=FP32)
    yield "gemm_fp8 forward", partial(hk.gemm_fp8_blocks, x, by_row, w, square, BF16)
    dy, turned, by_token = empty(8192, n, dtype=torch.float8_e5m2), empty(n, 8192, dtype=fp8), empty(n, 64, dtype=FP32)
    yield "gemm_fp8 input, e5m2", partial(hk.gemm_fp8_blocks, dy, by_row, w, square, BF16)
    dy = empty(n, 8192, dtype=torch.float8_e5m2)
    yield "gemm_fp8 weight, e5m2", partial(hk.gemm_fp8_blocks, dy, by_token, turned, by_token, FP32)
    for blocks in ("1x128", "128x128", "128x1"):
        yield f"quantise_fp8 {blocks}", partial(hk.quantise_fp8_blocks, empty(8192, n), fp8, blocks)
    whole = partial(hk.quantise_fp8, empty(2, 4096, n), fp8, empty(2, dtype=FP32))
    yield "quantise_fp8 whole", whole
    yield "quantise_fp8 whole, turned", partial(whole, turned=True)


def narrow_weights() -> Iterator[Call]:
    """The projections of Llama 3 70B's MLP, whole, and cut inside a block."""
    tables = empty(28672 * 128 // 256, dtype=FP32), empty(1, dtype=FP32), empty(16, dtype=FP32), empty(256, dtype=FP32)
    packed = empty(28672, 33 * 128, dtype=torch.uint8)
    for dtype, kind in ((BF16, ""), (FP32, ", fp32")):
        whole = partial(hk.nf4_dequantize, packed, *tables, empty(28672, 8192, dtype=dtype), across=128)
        yield f"nf4_dequantize 28672x8192{kind}", whole
    part = empty(28672, 33 * 44, dtype=torch.uint8), *tables, empty(28672, 2731)
    yield "nf4_dequantize 28672x2731, cut", partial(hk.nf4_dequantize, *part, first=42, across=128, skip=43)


CASES = (
    norms, elementwise, softmaxes, losses, attentions, grouped, delta_rules, feature_rules, state_space_rules,
    products_in_fp8, narrow_weights, optimizers,
)  # fmt: skip
