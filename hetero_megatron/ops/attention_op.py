"""Attention as an operator: its options, its definition, forward and backward apart, delta and the merge of partial
results.

The model (``model/layers.py``) fills in the options; providers (``ops/attention_cpu.py``, plugins) and the definition
here read them; tiles of distributed attention use the mask (``ops/tile_kernels.py``). They are a named tuple, because
kernels of plugins are given plain positional arguments: ``kernel(q, k, v, sinks, *options)``.
The log-sum-exp is in natural logarithms; a row that may see no key has out = 0 and lse = -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from hetero_megatron.ops.block_attention import attn_merge_
from hetero_megatron.ops.dropout import ScoreDropout, score_factors
from hetero_megatron.ops.spec import ATEN, Bounds, Case, Kernel, OpSpec, normal, reference_forward, wide

Pair = tuple[torch.Tensor, torch.Tensor]
Documents = Sequence[Sequence[int]] | None  # per batch row, ascending start offsets, the first is 0


class AttentionOptions(NamedTuple):
    """Causal attention of a part of the queries to a part of the keys: query i of a part that begins at ``q_start``
    sees key j where k_start + j <= q_start + i.

    Attributes:
        documents: start offsets per row (only for q_start = k_start = 0 and s = t): tokens see their own document.
        window: a token sees itself and ``window - 1`` tokens before it; None: all.
        softcap: scores, already scaled, become softcap x tanh(score / softcap).
        dropout: probabilities that are dropped become 0 after the softmax, the others are divided by 1 - rate; which,
            see ``ops/dropout.py``. The log-sum-exp and a sink's probability know nothing of it.
    """

    documents: Documents = None
    window: int | None = None
    q_start: int = 0
    k_start: int = 0
    softcap: float | None = None
    dropout: ScoreDropout | None = None

    @property
    def distance(self) -> int:
        """From the first key to the first query, in tokens."""
        return self.q_start - self.k_start


def visible_keys(
    start: int, stop: int, keys: int, distance: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """[stop - start, keys] bool: key j is seen by query i of ``[start, stop)`` where 0 <= distance + i - j < window."""
    rows = torch.arange(start, stop, device=device)[:, None] + distance
    key_distance = rows - torch.arange(keys, device=device)[None]
    return key_distance >= 0 if window is None else (key_distance >= 0) & (key_distance < window)


def visible(q: torch.Tensor, keys: int, options: AttentionOptions) -> torch.Tensor:
    """[b or 1, s, keys] bool: which key each query of ``q`` [b, s, heads, d] sees."""
    rows, length = q.shape[0], q.shape[1]
    visible_mask = visible_keys(0, length, keys, options.distance, options.window, q.device)[None]
    if options.documents is None:
        return visible_mask
    number = torch.zeros(rows, length, dtype=torch.int64, device=q.device)  # of each token's document
    for row, starts in enumerate(options.documents):
        for start in starts[1:]:
            number[row, start:] += 1
    return visible_mask & (number[:, :, None] == number[:, None, :])


def _scores(q: torch.Tensor, k: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """[b, heads, s, keys] in at least fp32, -inf where not seen."""
    kind = wide(q.dtype)
    k = k.repeat_interleave(_repeat(q, k), dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(kind), k.to(kind)) / math.sqrt(q.shape[-1])
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    return scores.masked_fill(~visible(q, k.shape[1], options)[:, None], -math.inf)


def _repeat(q: torch.Tensor, k: torch.Tensor) -> int:
    return q.shape[2] // k.shape[2] if k.shape[2] else 1


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) with the sinks among the keys, from those without.

    out: [b, s, heads, d]; lse: [b, heads, s] in at least fp32; sinks: [heads]. A row that saw no key has only its sink.
    """
    wide_sinks = sinks.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - wide_sinks)  # of all keys that are no sink
    return (out * share.transpose(1, 2)[..., None]).to(out.dtype), torch.logaddexp(lse, wide_sinks)


def sink_gradient(delta: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Gradient of the sinks.

    Args:
        delta: [b, heads, s], sum over features of the output's gradient and the output; lse: the merged one.
    """
    probability = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(probability * delta).sum((0, 2)).to(sinks.dtype)


def definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None, *options: Any
) -> Pair:
    """Attention by its definition: all scores at once.

    Args:
        q: [b, s, heads, d]; k, v: [b, t, kv_heads, d], heads a multiple of kv_heads.
        sinks: [heads], a logit per head that takes part in the softmax and has no value.
        options: :class:`AttentionOptions`, as far as they are not the defaults.

    Returns:
        out [b, s, heads, d] and lse [b, heads, s] in at least fp32, which has the sink in it.
    """
    attn_options = AttentionOptions(*options)
    scores = _scores(q, k, attn_options)
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    lse = scores.detach().logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:3], -math.inf)
    alive = lse.isfinite()[..., None]
    # Softmax of dead rows would be NaN, and so would its gradient.
    probs = torch.where(alive, scores, 0.0).softmax(-1) * alive
    values = v.repeat_interleave(_repeat(q, v), dim=2)
    probs = probs[..., : k.shape[1]]
    if attn_options.dropout is not None:
        probs = probs * score_factors(attn_options.dropout, probs)
    return torch.einsum("bhqk,bkhd->bqhd", probs, values.to(probs.dtype)).to(q.dtype), lse


def reference_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, *options: Any,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Dao et al., 2022, unblocked: gradients of q, k, v and sinks, in their dtypes.

    Args:
        dout, q, out: [b, s, heads, d]; k, v: [b, t, kv_heads, d]; ``out`` and ``lse`` [b, heads, s] may be those of
            all parts together.
    """
    delta = attn_delta(dout, out)[0]
    dq, dk, dv = backward_sums(dout, q, k, v, lse, delta, AttentionOptions(*options))
    dsinks = None if sinks is None else sink_gradient(delta, lse, sinks)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def backward_sums(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv) in at least fp32, because parts are added up; ``delta``: [b, heads, s], :func:`attn_delta`."""
    kind, repeat = wide(q.dtype), _repeat(q, k)
    scores = _scores(q, k, options)
    probs = (scores - torch.where(lse.isfinite(), lse, 0.0)[..., None]).exp()  # exp(-inf) = 0 in dead rows
    dout = dout.to(kind)
    dprobs = torch.einsum("bqhd,bkhd->bhqk", dout, v.repeat_interleave(repeat, dim=2).to(kind))
    kept_probs = probs
    if options.dropout is not None:  # delta, the sum over keys of probs x dprobs, is that of dout x out all the same
        stays = score_factors(options.dropout, probs)
        kept_probs, dprobs = probs * stays, dprobs * stays
    dv = torch.einsum("bhqk,bqhd->bkhd", kept_probs, dout)
    dscores = probs * (dprobs - delta[..., None]) / math.sqrt(q.shape[-1])
    if options.softcap is not None:  # the derivative of c tanh(x / c) is 1 - tanh^2; of an unseen key probs are 0
        dscores = dscores * (1 - (scores.masked_fill(scores == -math.inf, 0.0) / options.softcap).square())
    dq = torch.einsum("bhqk,bkhd->bqhd", dscores, k.repeat_interleave(repeat, dim=2).to(kind))
    dk = torch.einsum("bhqk,bqhd->bkhd", dscores, q.to(kind))
    dk, dv = (x.unflatten(2, (k.shape[2], repeat)).sum(3) if repeat > 1 else x for x in (dk, dv))
    return dq, dk, dv


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


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: object) -> Pair:
    return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide(q.dtype))


def _qkv(b: int, s: int, t: int, heads: int, kv: int, d: int) -> tuple[torch.Tensor, ...]:
    return normal(b, s, heads, d, seed=1), normal(b, t, kv, d, seed=2), normal(b, t, kv, d, seed=3)


def _inputs(qkv: Iterable[torch.Tensor], sinks: torch.Tensor | None = None, **options: Any) -> tuple[Any, ...]:
    return (*qkv, sinks, *AttentionOptions(**options))


def _cases() -> Iterable[Case]:
    yield Case("plain", _inputs(_qkv(2, 13, 13, 4, 4, 16)))
    yield Case("grouped queries", _inputs(_qkv(2, 13, 13, 6, 2, 16)))
    yield Case("one", _inputs(_qkv(1, 1, 1, 1, 1, 8)))
    yield Case("longer than a block", _inputs(_qkv(1, 150, 150, 2, 1, 16)))
    yield Case("window", _inputs(_qkv(1, 40, 40, 2, 2, 16), window=7))
    yield Case("documents", _inputs(_qkv(2, 13, 13, 2, 1, 16), documents=((0, 1, 7), (0,))))
    yield Case("keys before", _inputs(_qkv(1, 5, 11, 2, 2, 16), q_start=11))
    yield Case("keys across", _inputs(_qkv(1, 9, 12, 2, 2, 16), q_start=6, k_start=3))
    yield Case("rows that see nothing", _inputs(_qkv(1, 9, 9, 2, 2, 16), k_start=5))
    yield Case("nothing is seen", _inputs(_qkv(1, 4, 6, 2, 1, 16), k_start=10))
    yield Case("no tokens", _inputs(_qkv(2, 0, 0, 2, 2, 16)))
    yield Case("no heads", _inputs(_qkv(2, 5, 5, 0, 0, 16)))
    strided = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in _qkv(1, 12, 12, 2, 2, 16))
    yield Case("transposed", _inputs(strided))
    q, k, v = _qkv(1, 12, 12, 2, 2, 16)
    yield Case("large scores", _inputs((5 * q, k, v)))
    sinks = normal(6, seed=4)
    grouped = _qkv(2, 13, 13, 6, 2, 16)
    capped = {"features": ("softcap",)}
    yield Case("soft-capped", _inputs(grouped, softcap=1.5), **capped)
    yield Case("soft-capped window", _inputs(_qkv(1, 150, 150, 2, 1, 16), window=70, softcap=0.8), **capped)
    packed = _inputs(_qkv(2, 13, 13, 2, 1, 16), documents=((0, 1, 7), (0,)), window=3, softcap=2.0)
    yield Case("soft-capped documents", packed, **capped)
    shifted = _inputs(_qkv(1, 9, 12, 2, 2, 16), q_start=6, k_start=3, softcap=1.0)
    yield Case("soft-capped keys across", shifted, **capped)
    yield Case("sinks", _inputs(grouped, sinks), features=("sinks",))
    yield Case("sinks, window", _inputs(grouped, sinks, documents=((0, 4), (0, 9)), window=5), features=("sinks",))
    unseen = _inputs(_qkv(1, 9, 9, 2, 2, 16), sinks[:2], k_start=5)
    yield Case("sinks alone", unseen, features=("sinks",))
    sinks_and_cap = _inputs(grouped, sinks, softcap=1.5)
    yield Case("sinks and soft-capped", sinks_and_cap, features=("sinks", "softcap"))
    yield from _dropout_cases()


def _dropout_cases() -> Iterable[Case]:
    use, key = {"features": ("dropout",)}, 2**63 + 12345
    sinks = normal(6, seed=4)
    for_whole = ScoreDropout(0.3, key, 3, 2)
    grouped = _qkv(2, 13, 13, 6, 2, 16)
    yield Case("dropout", _inputs(grouped, dropout=for_whole), **use)
    yield Case("dropout, blocks", _inputs(_qkv(1, 150, 150, 2, 1, 16), dropout=for_whole), **use)
    yield Case("dropout, window", _inputs(_qkv(1, 150, 150, 2, 2, 16), window=70, dropout=for_whole), **use)
    packed = _inputs(_qkv(2, 13, 13, 2, 1, 16), documents=((0, 1, 7), (0,)), dropout=for_whole)
    yield Case("dropout, documents", packed, **use)
    for name, q_start, k_start in (("aligned", 40, 32), ("unaligned", 38, 35)):
        part = ScoreDropout(0.1, key, 2**32 - 1, 0, q_start, k_start)
        shifted = _inputs(_qkv(2, 17, 20, 2, 2, 16), q_start=q_start, k_start=k_start, dropout=part)
        yield Case(f"dropout, keys across, {name}", shifted, **use)
    on_device = ScoreDropout(0.3, torch.tensor(key - 2**64), torch.tensor(3), 2)
    yield Case("dropout, numbers on the device", _inputs(grouped, dropout=on_device), **use)
    feature_names = {"features": ("sinks", "softcap", "dropout")}
    yield Case(
        "dropout, sinks and soft-capped", _inputs(grouped, sinks, softcap=1.5, dropout=for_whole), **feature_names
    )
    unseen = _inputs(_qkv(1, 9, 9, 2, 2, 16), k_start=5, dropout=ScoreDropout(0.5, 7, 0, 0, 0, 5))
    yield Case("dropout, rows that see nothing", unseen, **use)


def _flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: object) -> int:
    return 2 * q.numel() * k.shape[1]  # 4 d per pair, half of the pairs are seen


def _upgrade(kernel: Kernel) -> Kernel | None:
    """Version 2 is version 3 without the last option, ``dropout``: such a kernel serves the calls without it."""
    if kernel.version != 2:
        return None

    def without(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            *inputs, dropout = args
            assert dropout is None, f"{kernel} knows no dropout, and does not say that it does"
            return function(*inputs)

        return call

    parts = {name: without(part) if name == "share" else part for name, part in kernel.parts.items()}
    return replace(
        kernel, version=3, forward=without(kernel.forward), parts=parts,
        backward=None if kernel.backward is None else without(kernel.backward),
        apply=None if kernel.apply is None else without(kernel.apply),
    )  # fmt: skip


SPEC = OpSpec(
    name="attention", version=3, tensors=("q", "k", "v", "sinks"), optional=("sinks",), upgrade=_upgrade,
    features=("softcap", "sinks", "dropout"),
    options=AttentionOptions._fields, schema=None, results=("out", "lse"),
    fixed=("lse",), saves=("q", "k", "v", "sinks", "out", "lse"), gradients=("q", "k", "v", "sinks"),
    definition=definition, forward=reference_forward(definition), backward=reference_backward, fake=_fake,
    flops=_flops, cases=_cases, backward_flops=2.5, bounds=Bounds((2e-6, 5e-6), (1e-3, 2e-3), (8e-3, 1.2e-2)),
    speed=lambda: Case("512 tokens, 8 heads of 64", _inputs(_qkv(1, 512, 512, 8, 8, 64))),
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


KERNELS = (
    Kernel("attn_delta", "aten", ATEN, attn_delta, None, traceable=True),
    Kernel("attn_merge", "aten", ATEN, attn_merge_, None, version=2),
)
