"""Attention as an operator: its definition, forward and backward apart, delta and the merge of partial results.

``ops/attention.py`` is the CPU implementation that the model has always used; here it becomes a provider.
The log-sum-exp is in natural logarithms; a row that may see no key has out = 0 and lse = -inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from hetero_megatron.ops.attention import attention as cpu_attention
from hetero_megatron.ops.attn_merge import attn_merge_
from hetero_megatron.ops.kernel import ATEN, Kernel, Signature
from hetero_megatron.ops.spec import Bounds, Case, OpSpec, normal, reference_forward, wide

Documents = Sequence[Sequence[int]] | None
Pair = tuple[torch.Tensor, torch.Tensor]


def visible(
    rows: int, length: int, keys: int, documents: Documents, window: int | None, q_start: int, k_start: int,
    device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """[rows or 1, length, keys] bool: which key each query sees."""
    i = torch.arange(q_start, q_start + length, device=device)[:, None]
    j = torch.arange(k_start, k_start + keys, device=device)[None]
    seen = (j <= i) & (i - j < (window if window is not None else 2**62))
    if documents is None:
        return seen[None]
    of = torch.zeros(rows, length, dtype=torch.int64, device=device)
    for row, starts in enumerate(documents):
        for start in starts[1:]:
            of[row, start:] += 1
    return seen[None] & (of[:, :, None] == of[:, None, :])


def _scores(
    q: torch.Tensor, k: torch.Tensor, documents: Documents, window: int | None, q_start: int, k_start: int
) -> torch.Tensor:
    """[b, heads, s, keys], -inf where not seen."""
    kind = wide(q.dtype)
    k = k.repeat_interleave(_repeat(q, k), dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(kind), k.to(kind)) / math.sqrt(q.shape[-1])
    seen = visible(q.shape[0], q.shape[1], k.shape[1], documents, window, q_start, k_start, q.device)
    return scores.masked_fill(~seen[:, None], -math.inf)


def _repeat(q: torch.Tensor, k: torch.Tensor) -> int:
    return q.shape[2] // k.shape[2] if k.shape[2] else 1


def definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents = None, window: int | None = None,
    q_start: int = 0, k_start: int = 0,
) -> Pair:  # fmt: skip
    """Causal attention: query i of a part that begins at ``q_start`` sees key j where k_start + j <= q_start + i.

    Args:
        q: [b, s, heads, d]; k, v: [b, t, kv_heads, d], heads a multiple of kv_heads.
        documents: start offsets per row (only for q_start = k_start = 0 and s = t): tokens see their own document.
        window: a token sees itself and ``window - 1`` tokens before it.

    Returns:
        out [b, s, heads, d] and lse [b, heads, s] in at least fp32.
    """
    scores = _scores(q, k, documents, window, q_start, k_start)
    lse = scores.detach().logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:3], -math.inf)
    alive = lse.isfinite()[..., None]
    # Softmax of dead rows would be NaN, and so would its gradient.
    probs = torch.where(alive, scores, 0.0).softmax(-1) * alive
    values = v.repeat_interleave(_repeat(q, v), dim=2)
    return torch.einsum("bhqk,bkhd->bqhd", probs, values.to(probs.dtype)).to(q.dtype), lse


def reference_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    documents: Documents = None, window: int | None = None, q_start: int = 0, k_start: int = 0,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Dao et al., 2022, unblocked. ``out`` and ``lse`` may be those of all parts together."""
    kind, repeat = wide(q.dtype), _repeat(q, k)
    scores = _scores(q, k, documents, window, q_start, k_start)
    probs = (scores - torch.where(lse.isfinite(), lse, 0.0)[..., None]).exp()  # exp(-inf) = 0 in dead rows
    dout = dout.to(kind)
    dv = torch.einsum("bhqk,bqhd->bkhd", probs, dout)
    dprobs = torch.einsum("bqhd,bkhd->bhqk", dout, v.repeat_interleave(repeat, dim=2).to(kind))
    delta = attn_delta(dout, out)[0]
    dscores = probs * (dprobs - delta[..., None]) / math.sqrt(q.shape[-1])
    dq = torch.einsum("bhqk,bkhd->bqhd", dscores, k.repeat_interleave(repeat, dim=2).to(kind))
    dk = torch.einsum("bhqk,bqhd->bkhd", dscores, q.to(kind))
    dk, dv = (x.unflatten(2, (k.shape[2], repeat)).sum(3) if repeat > 1 else x for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def attn_delta(dout: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor]:
    """Sum over features of dout x out: [b, s, heads, d] twice -> [b, heads, s] in at least fp32."""
    kind = wide(out.dtype)
    return ((dout.to(kind) * out.to(kind)).sum(-1).transpose(1, 2),)


def attn_merge(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> Pair:
    """Attention over two disjoint sets of keys, from the two results; rows dead on both sides stay dead.

    out: [b, s, heads, d]; lse: [b, heads, s]. All but ``out_b`` have at least fp32.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    base = torch.where(lse.isfinite(), lse, 0.0)
    wa, wb = ((x - base).exp().transpose(1, 2)[..., None] for x in (lse_a, lse_b))
    return (wa * out_a + wb * out_b).to(out_a.dtype), lse


def _merge_reference(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[()]:
    """In place of ``out_a`` and ``lse_a``, by the definition."""
    with torch.no_grad():
        out, lse = attn_merge(out_a, lse_a, out_b, lse_b)
        out_a.copy_(out), lse_a.copy_(lse)
    return ()


def _cpu_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents = None, window: int | None = None,
    q_start: int = 0, k_start: int = 0,
) -> Pair:  # fmt: skip
    """aten's flash kernel, document by document, where the parts begin alike, otherwise by scores; differentiable."""
    if q_start != k_start or q.shape[1] != k.shape[1]:
        return definition(q, k, v, documents, window, q_start, k_start)
    return cpu_attention(q, k, v, documents, window)


def _cpu_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    documents: Documents = None, window: int | None = None, q_start: int = 0, k_start: int = 0,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    plain = documents is None and window is None and q_start == k_start and q.shape == k.shape and q.numel() > 0
    if not plain:
        return reference_backward(dout, q, k, v, out, lse, documents, window, q_start, k_start)
    turned = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*turned, lse, 0.0, True)
    return tuple(x.transpose(1, 2) for x in found)


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: object) -> Pair:
    return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide(q.dtype))


def _qkv(b: int, s: int, t: int, heads: int, kv: int, d: int) -> tuple[torch.Tensor, ...]:
    return normal(b, s, heads, d, seed=1), normal(b, t, kv, d, seed=2), normal(b, t, kv, d, seed=3)


def _cases() -> Iterable[Case]:
    yield Case("plain", (*_qkv(2, 13, 13, 4, 4, 16), None, None, 0, 0))
    yield Case("grouped queries", (*_qkv(2, 13, 13, 6, 2, 16), None, None, 0, 0))
    yield Case("one", (*_qkv(1, 1, 1, 1, 1, 8), None, None, 0, 0))
    yield Case("longer than a block", (*_qkv(1, 150, 150, 2, 1, 16), None, None, 0, 0))
    yield Case("window", (*_qkv(1, 40, 40, 2, 2, 16), None, 7, 0, 0))
    yield Case("documents", (*_qkv(2, 13, 13, 2, 1, 16), ((0, 1, 7), (0,)), None, 0, 0))
    yield Case("keys before", (*_qkv(1, 5, 11, 2, 2, 16), None, None, 11, 0))
    yield Case("keys across", (*_qkv(1, 9, 12, 2, 2, 16), None, None, 6, 3))
    yield Case("rows that see nothing", (*_qkv(1, 9, 9, 2, 2, 16), None, None, 0, 5))
    yield Case("nothing is seen", (*_qkv(1, 4, 6, 2, 1, 16), None, None, 0, 10))
    yield Case("no tokens", (*_qkv(2, 0, 0, 2, 2, 16), None, None, 0, 0))
    yield Case("no heads", (*_qkv(2, 5, 5, 0, 0, 16), None, None, 0, 0))
    q, k, v = _qkv(1, 12, 12, 2, 2, 16)
    yield Case("transposed", (*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), None, None, 0, 0))
    yield Case("large scores", (5 * q, k, v, None, None, 0, 0))


def _flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: object) -> int:
    return 2 * q.numel() * k.shape[1]  # 4 d per pair, half of the pairs are seen


SPEC = OpSpec(
    name="attention", tensors=("q", "k", "v"), options=("documents", "window", "q_start", "k_start"), schema=None,
    results=("out", "lse"), fixed=("lse",), saves=("q", "k", "v", "out", "lse"), gradients=("q", "k", "v"),
    definition=definition, forward=reference_forward(definition), backward=reference_backward, fake=_fake,
    flops=_flops, cases=_cases, backward_flops=2.5, bounds=Bounds((2e-6, 5e-6), (1e-3, 2e-3), (8e-3, 1.2e-2)),
    speed=lambda: Case("512 tokens, 8 heads of 64", (*_qkv(1, 512, 512, 8, 8, 64), None, None, 0, 0)),
)  # fmt: skip


def _parts(seed: int) -> Pair:
    lse = normal(2, 3, 7, seed=seed)
    return normal(2, 7, 3, 8, seed=seed), lse


def _merge_cases() -> Iterable[Case]:
    (a, la), (b, lb) = _parts(1), _parts(2)
    yield Case("plain", (a, la, b, lb))
    dead = torch.full_like(la, -math.inf)
    first = dead.clone()
    first[..., 3:] = la[..., 3:]
    yield Case("one side dead", (torch.zeros_like(a), dead, b, lb))
    yield Case("both dead", (torch.zeros_like(a), dead, torch.zeros_like(b), dead))
    mask = first.isfinite().transpose(1, 2)[..., None]
    yield Case("some rows dead", (a * mask, first, b, lb))
    yield Case("no tokens", (a[:, :0], la[..., :0], b[:, :0], lb[..., :0]))
    yield Case("some tokens of more", (a[:, 2:5], la[..., 2:5], b[:, 2:5], lb[..., 2:5]))
    yield Case("far apart", (a, la + 500, b, lb))
    rows = [x for seed in (3, 4) for x in (normal(1, 65_537, 1, 4, seed=seed), normal(1, 1, 65_537, seed=seed))]
    yield Case("many rows", tuple(rows))


DELTA_SPEC = OpSpec(
    name="attn_delta", tensors=("dout", "out"), options=(), results=("delta",), schema=None, definition=attn_delta,
    forward=reference_forward(attn_delta), backward=None, flops=lambda dout, out: 2 * out.numel(),
    fake=lambda dout, out: (out.new_empty(out.shape[0], out.shape[2], out.shape[1], dtype=wide(out.dtype)),),
    cases=lambda: (
        Case(name, (normal(*shape, seed=1), normal(*shape, seed=2)))
        for name, shape in (
            ("plain", (2, 7, 3, 16)), ("one", (1,) * 4), ("none", (2, 0, 3, 8)), ("odd", (1, 5, 3, 13)),
            ("many rows", (1, 65_537, 1, 4)),
        )  # fmt: skip
    ),
    speed=lambda: Case("1024 tokens", (normal(1, 1024, 8, 64, seed=1), normal(1, 1024, 8, 64, seed=2))),
    bounds=Bounds((1e-6, 0), (1e-4, 0), (1e-4, 0)),
)  # fmt: skip
MERGE_SPEC = OpSpec(
    name="attn_merge", version=2, tensors=("out_a", "lse_a", "out_b", "lse_b"), options=(), results=(), schema=None,
    in_place=("out_a", "lse_a"), definition=attn_merge, forward=_merge_reference, backward=None,
    wide=("out_a", "lse_a", "lse_b"), fake=lambda *args: (), flops=lambda oa, la, ob, lb: 3 * oa.numel(),
    cases=_merge_cases, bounds=Bounds((1e-6, 0), (1e-6, 0), (1e-6, 0)),
    speed=lambda: Case("1024 tokens", (*_big(1), *_big(2))),
)  # fmt: skip


def _big(seed: int) -> Pair:
    return normal(1, 1024, 8, 64, seed=seed), normal(1, 8, 1024, seed=seed)


SPECS = (SPEC, DELTA_SPEC, MERGE_SPEC)


def _on_cpu(signature: Signature) -> list[str]:
    return [] if signature.device == "cpu" else [f"only on the CPU, not {signature.device}"]


KERNELS = (
    Kernel(
        "attention", "aten", ATEN, _cpu_attention, _cpu_backward, supports=_on_cpu, apply=_cpu_attention, traceable=True
    ),
    Kernel("attn_delta", "aten", ATEN, attn_delta, None, traceable=True),
    Kernel("attn_merge", "aten", ATEN, attn_merge_, None, version=2),
)
