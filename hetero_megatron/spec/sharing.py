"""How the axes of a model are cut over the ranks of one tensor-parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box, cut, cut_in_tiles
from hetero_megatron.spec.model_spec import ModelSpec
from hetero_megatron.spec.tensors import LogicalTensor

Interval = tuple[int, int]


@dataclass(frozen=True)
class Share:
    """One rank's half-open part of each cut axis, in units (heads, feed-forward columns, vocabulary, experts).

    ``expert_ffn``: columns of each of its experts; ``shared_ffn``: of what all tokens share in a mixture of experts.
    """

    q_heads: Interval
    kv_heads: Interval
    ffn: Interval
    vocab: Interval
    experts: Interval = (0, 0)
    expert_ffn: Interval = (0, 0)
    shared_ffn: Interval = (0, 0)


def whole_share(spec: ModelSpec) -> Share:
    """The share of a rank that is alone."""
    return shares(spec, (1,))[0]


def shares(spec: ModelSpec, tp_split: Sequence[int], heads: Interval | None = None) -> tuple[Share, ...]:
    """One share per TP rank, in proportion to ``tp_split``.

    Attention is cut at KV heads while there are at least as many as ranks, else at query heads, and then
    ranks whose query heads use the same KV head hold copies of it. Feed-forward and vocabulary are cut at multiples
    of 128, 64 or 8 columns and rows where they are large enough (:func:`~hetero_megatron.layout.cut_in_tiles`). Shares
    of heads and vocabulary may be empty. Every rank has its columns of all experts, unless a plan divides the experts
    themselves (``plan/experts.py``).

    Args:
        heads: the query heads that the group computes (default all).

    Raises:
        UserError: some rank would get no feed-forward column.
    """
    first, last = heads or (0, spec.num_heads)
    ffn, vocab = (cut_in_tiles(size, tuple(tp_split)) for size in (spec.ffn_hidden_size, spec.vocab_size))
    if any(a == b for a, b in ffn):
        raise UserError(
            f"gives a rank none of the {spec.ffn_hidden_size} feed-forward columns",
            field="tp_split", value=list(tp_split),
            accepted="weights that leave every rank at least one column",
        )  # fmt: skip
    group = spec.queries_per_kv
    aligned = first % group == 0 and last % group == 0
    if aligned and (last - first) // group >= len(tp_split):
        kv = [(a + first // group, b + first // group) for a, b in cut((last - first) // group, tp_split)]
        q = [(a * group, b * group) for a, b in kv]
    else:
        q = [(a + first, b + first) for a, b in cut(last - first, tp_split)]
        kv = [(a // group, -(-b // group)) if b > a else (a // group, a // group) for a, b in q]
    moe = spec.moe
    sizes = (0, 0, 0) if moe is None else (moe.num_experts, moe.ffn_hidden_size, moe.shared_ffn)
    experts = [(0, sizes[0])] * len(tp_split)
    columns, shared = (cut_in_tiles(size, tuple(tp_split)) for size in sizes[1:])
    return tuple(map(Share, q, kv, ffn, vocab, experts, columns, shared))


def tensor_box(tensor: LogicalTensor, share: Share) -> Box:
    """The box of a logical tensor that a rank with this share holds (axes of other roles whole)."""
    lo, hi = [], []
    for axis, size in zip(tensor.axes, tensor.shape, strict=True):
        a, b = getattr(share, axis.role, (0, size // axis.unit))
        lo.append(a * axis.unit)
        hi.append(b * axis.unit)
    return Box(tuple(lo), tuple(hi))
