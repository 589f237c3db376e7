"""Operators against their references in fp64, forward and backward, within the bounds of each dtype."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hetero_megatron.data.batch import Batch
from hetero_megatron.model import GPTStage
from hetero_megatron.ops import (
    KernelWarning,
    apply_rope,
    attention,
    cross_entropy,
    gelu,
    layer_norm,
    rms_norm,
    rope_frequencies,
    rope_tables,
    squared_relu,
    swiglu,
)
from hetero_megatron.ops.activation import swiglu_reference
from hetero_megatron.ops.attention_op import definition as attention_definition
from hetero_megatron.ops.cross_entropy import cross_entropy_reference
from hetero_megatron.ops.norm import layer_norm_reference, rms_norm_reference
from hetero_megatron.ops.rope import rope_reference
from hetero_megatron.spec import Rope, RopeScaling, load_model, shares

Op = Callable[..., torch.Tensor]
# Relative Frobenius error against fp64: forward, gradients.
BOUNDS = {
    torch.float64: (1e-14, 1e-13), torch.float32: (2e-6, 5e-6), torch.float16: (1e-3, 2e-3),
    torch.bfloat16: (8e-3, 1.2e-2),
}  # fmt: skip
ALL = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape and got.isfinite().all()
    got, want = got.detach().double(), want.detach()
    return float((got - want).norm() / want.norm().clamp_min(1.0))  # some gradients are truly zero


def compare(op: Op, reference: Op, inputs: list[torch.Tensor], dtype: torch.dtype) -> None:
    """``op`` on ``dtype`` inputs against ``reference`` on the same values in fp64."""
    mine = [x.to(dtype).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in mine]
    got, want = op(*mine), reference(*exact)
    forward, backward = BOUNDS[dtype]
    assert relative(got, want) <= forward
    seed = rand(*want.shape, seed=99).to(got.dtype)
    grads = torch.autograd.grad(got, mine, seed)
    wants = torch.autograd.grad(want, exact, seed.double())
    for i, (g, w, x) in enumerate(zip(grads, wants, mine, strict=True)):
        assert g.dtype == x.dtype
        assert relative(g, w) <= backward, f"gradient {i}"


@ALL
@pytest.mark.parametrize("shape", [(3, 5, 16), (1, 1), (7, 33), (2, 0, 3, 8), (4096, 64)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = 1 + rand(shape[-1], scale=0.1)
    compare(
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda x, w: rms_norm_reference(x, w, 1e-5),
        [rand(*shape), weight],
        dtype,
    )


@ALL
@pytest.mark.parametrize("shape", [(3, 5, 16), (7, 33), (2, 0, 8), (4096, 64)])
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """(4096, 64) in bf16: aten alone would add the weight gradients up in bf16."""
    inputs = [rand(*shape), 1 + rand(shape[-1], scale=0.1), rand(shape[-1], seed=3)]
    compare(lambda *a: layer_norm(*a, 1e-5), lambda *a: layer_norm_reference(*a, 1e-5), inputs, dtype)


def test_norms_of_large_and_equal_rows() -> None:
    for x in (torch.full((2, 8), 1e4, dtype=torch.float16), torch.zeros(2, 8), torch.full((2, 8), 1e15)):
        one = torch.ones(8, dtype=x.dtype)
        assert torch.allclose(rms_norm(x, one, 1e-5).float(), rms_norm_reference(x, one, 1e-5).float(), rtol=2e-3)
        assert layer_norm(x, one, one, 1e-5).isfinite().all()


@ALL
def test_activations(dtype: torch.dtype) -> None:
    gate, up = rand(4, 9, 10, scale=3), rand(4, 9, 10, seed=1)
    compare(swiglu, swiglu_reference, [gate, up], dtype)
    compare(swiglu, swiglu_reference, [gate[:, :0], up[:, :0]], dtype)
    compare(
        lambda x: gelu(x, True),
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        [gate],
        dtype,
    )
    compare(lambda x: gelu(x, False), lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), [gate], dtype)
    compare(squared_relu, lambda x: x.clamp_min(0) ** 2, [gate], dtype)


@ALL
@pytest.mark.parametrize("heads", [0, 1, 3])
def test_rope(heads: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [100_000, 7, 8, 9, 10]])
    freqs = rope_frequencies(Rope(5e5, RopeScaling("llama3", 8.0)), 8)
    cos, sin = rope_tables(positions, freqs, dtype)
    assert cos.dtype == torch.promote_types(dtype, torch.float32) and cos.shape == (2, 5, 1, 4)
    exact = rope_tables(positions, freqs, torch.float64)
    q, k = rand(2, 5, heads, 8), rand(2, 5, (heads + 1) // 2, 8, seed=1)

    def both(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.cat(pair, 2)

    def want(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return both((rope_reference(q, *exact), rope_reference(k, *exact)))

    compare(lambda q, k: both(apply_rope(q.clone(), k.clone(), cos, sin)), want, [q, k], dtype)
    turned = lambda x: x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)  # noqa: E731
    compare(lambda q, k: both(apply_rope(turned(q), turned(k), cos, sin)), want, [q, k], dtype)


def test_rope_turns_pairs_in_half_layout() -> None:
    """Feature 0 of head_dim 4 turns with feature 2 by position x 1 radian."""
    cos, sin = rope_tables(torch.tensor([[3]]), rope_frequencies(Rope(100.0), 4), torch.float64)
    x = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64).view(1, 1, 1, 4)
    want = torch.tensor([math.cos(3), 0.0, math.sin(3), 0.0], dtype=torch.float64).view(1, 1, 1, 4)
    torch.testing.assert_close(apply_rope(x, 2 * x, cos, sin), (want, 2 * want))
    assert rope_frequencies(Rope(100.0, RopeScaling("linear", 2.0)), 4).tolist() == [0.5, 0.05]


@ALL
@pytest.mark.parametrize("shape", [(2, 5, 11), (1, 1, 1), (3, 257), (0, 4, 9)])
def test_cross_entropy(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    labels = torch.randint(0, shape[-1], shape[:-1], generator=torch.Generator().manual_seed(0))
    logits = rand(*shape, scale=4).to(dtype)
    mine, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss = cross_entropy(mine * 1, labels)  # a copy: the operator may write over its input
    want = cross_entropy_reference(exact, labels)
    assert loss.dtype == torch.promote_types(dtype, torch.float32) and loss.shape == labels.shape
    assert relative(loss, want) <= (1e-14 if dtype == torch.float64 else 1e-6)
    weights = rand(*shape[:-1], seed=1).abs()
    (loss * weights.to(loss.dtype)).sum().backward()
    (want * weights).sum().backward()
    assert mine.grad is not None and exact.grad is not None and mine.grad.dtype == dtype
    assert relative(mine.grad, exact.grad) <= {
        torch.float64: 1e-14,
        torch.float32: 1e-6,
        torch.float16: 1e-3,
    }.get(dtype, 5e-3)


def test_cross_entropy_of_huge_and_infinite_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [1e4, 1e4, 1e4], [0.0, -math.inf, 0.0]])
    labels = torch.tensor([0, 1, 2])
    torch.testing.assert_close(cross_entropy(logits.clone(), labels), torch.tensor([0.0, math.log(3), math.log(2)]))


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Any, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with an explicit mask, written independently of the operator."""
    b, s, heads, d = q.shape
    allowed = torch.zeros(b, 1, s, s, dtype=torch.bool)
    for row in range(b):
        starts = documents[row] if documents else [0]
        for i in range(s):
            first = max(t for t in starts if t <= i)
            allowed[row, 0, i, max(first, i + 1 - window if window else 0) : i + 1] = True
    group = heads // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = (torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(d)).masked_fill(~allowed, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


@ALL
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
def test_attention(heads: tuple[int, int], packed: bool, window: int | None, dtype: torch.dtype) -> None:
    documents = [[0, 1, 7], [0]] if packed else None
    inputs = [rand(2, 13, heads[0], 8), rand(2, 13, heads[1], 8, seed=1), rand(2, 13, heads[1], 8, seed=2)]
    compare(
        lambda *x: attention(*x, documents, window)[0],
        lambda *x: dense(*x, documents, window)[0],
        inputs,
        dtype,
    )
    lse = attention(*(x.to(dtype) for x in inputs), documents, window)[1]
    want = dense(*(x.to(dtype).double() for x in inputs), documents, window)[1]
    assert lse.dtype == torch.promote_types(dtype, torch.float32) and lse.shape == (2, heads[0], 13)
    assert float((lse - want).detach().abs().max()) <= {
        torch.float64: 1e-13,
        torch.float32: 1e-5,
        torch.float16: 1e-3,
    }.get(dtype, 1e-2)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_by_definition(window: int | None) -> None:
    """The definition itself, which every provider is checked against."""
    inputs = [rand(2, 9, 4, 8), rand(2, 9, 2, 8, seed=1), rand(2, 9, 2, 8, seed=2)]
    for got, want in zip(attention_definition(*inputs, None, None, window), dense(*inputs, None, window), strict=True):
        assert relative(got, want) < 1e-14


@pytest.mark.parametrize("shape", [(2, 5, 0, 8), (2, 0, 4, 8), (0, 5, 4, 8), (2, 1, 4, 8)])
@pytest.mark.parametrize("documents", [None, [[0, 2], [0]]])
def test_attention_of_nothing(shape: tuple[int, ...], documents: Any) -> None:
    """aten divides by the number of heads: without a guard the process dies with SIGFPE."""
    if documents and shape != (2, 5, 0, 8):
        return
    q, k, v = (rand(*shape, seed=i).requires_grad_() for i in range(3))
    out, lse = attention(q, k, v, documents)
    assert out.shape == shape and lse.shape == (shape[0], shape[2], shape[1])
    out.sum().backward()


def test_attention_matches_torch_on_a_long_sequence() -> None:
    q, k, v = (rand(1, 700, 2, 16, seed=i).float() for i in range(3))
    want = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    torch.testing.assert_close(attention(q, k, v)[0], want)


def test_the_model_keeps_its_frequencies_on_its_device() -> None:
    """No copy between devices in a forward, and no entry in a checkpoint; the same values as ever."""
    spec = load_model("tiny")
    copies: list[Any] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if function is torch.ops.aten._to_copy.default and out.device != args[0].device:
                copies.append(args[0])
            return out

    with warnings.catch_warnings():  # attention runs on the reference there
        warnings.simplefilter("ignore", KernelWarning)
        stage = GPTStage(spec, shares(spec, (1,))[0], [0], True, False, device="meta")
    tokens = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    with Copies():
        out = stage(tokens, Batch(tokens, tokens, torch.zeros(1, 4, dtype=torch.int64, device="meta")))
    assert out.device.type == "meta" and not copies
    assert set(stage.state_dict()) == {name for name, _ in stage.named_parameters()}
    whole = GPTStage(spec, shares(spec, (1,))[0], [0], False, False, dtype=torch.bfloat16)
    assert whole._freqs is not None
    (rope,) = spec.ropes
    assert torch.equal(whole._freqs[rope], rope_frequencies(rope, spec.head_dim))
