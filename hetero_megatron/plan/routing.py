"""How routed tokens divide over experts and ranks: expectations, from measured routing or evenly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hetero_megatron.errors import UserError
from hetero_megatron.layout import cut
from hetero_megatron.plan.canonical import Stage
from hetero_megatron.plan.experts import destinations, expert_groups, rank_shares
from hetero_megatron.plan.routing_stats import FLAG, read_routing_stats
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.expert_load import ExpertLoad

Popularity = tuple[float, ...]  # share of routed tokens that goes to each expert; sums to 1


@dataclass(frozen=True)
class Routing:
    """Measured routing. ``layers``: (layer, share of its routed tokens that each expert gets), ascending."""

    layers: tuple[tuple[int, Popularity], ...] = ()

    @classmethod
    def of(cls, counts: Mapping[int, Sequence[int]]) -> Routing:
        """From how often each expert was chosen, by layer; layers that routed nothing are left out."""
        rows = ((layer, sum(row), row) for layer, row in sorted(counts.items()))
        return cls(tuple((layer, tuple(n / total for n in row)) for layer, total, row in rows if total))


EVEN = Routing()


def routing_of(path: str | None, spec: ModelSpec) -> Routing:
    """As a run wrote it to a file; without one all experts are alike.

    Raises:
        UserError: a dense model, a malformed file, or one of another model.
    """
    if path is None:
        return EVEN
    if spec.moe is None:
        raise UserError("the model has no experts", field=FLAG, value=path, accepted="no such file")
    return Routing.of(read_routing_stats(path, spec).layers)


@dataclass(frozen=True)
class LayerLoads:
    """Of one layer of a stage in one micro-batch.

    Attributes:
        of: by rank.
        copies: (sender, receiver) -> tokens that go from one rank to another.
    """

    of: Mapping[int, ExpertLoad]
    copies: Mapping[tuple[int, int], float]


def layer_kinds(
    spec: ModelSpec, layers: Iterable[int], routing: Routing = EVEN
) -> list[tuple[bool, Popularity | None, int]]:
    """(mixture of experts?, popularity of its experts, how many) of each kind of layer among ``layers``."""
    known = dict(routing.layers)
    moes = ((i, spec.layer(i).mlp == "moe") for i in layers)
    found = Counter((moe, known.get(i) if moe else None) for i, moe in moes)
    return [(*kind, count) for kind, count in found.items()]


def layer_loads(spec: ModelSpec, stage: Stage, routed: bool, popularity: Popularity | None = None) -> LayerLoads:
    """Loads of a layer that is a mixture of experts (``routed``), or a dense one of a model that has some."""
    return _layer_loads(spec, replace(stage, layers=(), embed=False, head=False), routed, popularity)


@lru_cache(maxsize=4096)
def _layer_loads(spec: ModelSpec, stage: Stage, routed: bool, popularity: Popularity | None) -> LayerLoads:
    moe = spec.moe
    assert moe is not None, "a dense model routes nothing"
    own = own_tokens(stage)
    if not routed:
        return LayerLoads({rank: ExpertLoad(0.0, n, 0.0, 0.0, 0.0, 0, 0.0, 1) for rank, n in own.items()}, {})
    shares, count = rank_shares(spec, stage), moe.num_experts
    popular = popularity or (1 / count,) * count
    loads: dict[int, ExpertLoad] = {}
    copies: dict[tuple[int, int], float] = {}
    for group in expert_groups(stage, count):
        taken = {rank: [0.0, 0.0] for rank in group.ranks}  # arriving tokens, rows
        sent = dict.fromkeys(group.ranks, 0.0)
        for source in group.ranks:
            to: dict[int, float] = dict.fromkeys(group.ranks, 0.0)
            for share, ranks in zip(popular, destinations(group, source, count), strict=True):
                for rank in ranks:
                    to[rank] += share
            for rank, share in to.items():
                tokens = own[source] * hit_probability(share, count, moe.top_k)
                taken[rank][0] += tokens
                taken[rank][1] += own[source] * moe.top_k * share
                sent[source] += tokens
                if rank != source and tokens:
                    copies[source, rank] = tokens
        for rank in group.ranks:
            (a, b), (c, d) = shares[rank].experts, shares[rank].expert_ffn
            arriving, rows = taken[rank]
            loads[rank] = ExpertLoad(1.0, own[rank], sent[rank], arriving, rows, b - a, d - c, len(group.ranks))
    return LayerLoads(loads, copies)


def own_tokens(stage: Stage) -> dict[int, int]:
    """Tokens of a micro-batch that each rank has after attention, and routes."""
    return {
        rank: (unit.sequences[1] - unit.sequences[0]) * (b - a)
        for unit in stage.units
        for rank, (a, b) in zip(unit.ranks, cut(unit.num_tokens, (1,) * unit.tp), strict=True)
    }


def hit_probability(share: float, experts: int, top_k: int) -> float:
    """That at least one of a token's ``top_k`` different experts is among some that get ``share`` of all routed tokens:
    as if they were ``share * experts`` equally popular ones."""
    miss = 1.0
    for i in range(top_k):
        miss *= max(0.0, 1.0 - share * experts / (experts - i)) if share < 1.0 else 0.0
    return 1.0 - miss


def mean_loads(
    spec: ModelSpec, stage: Stage, layers: Iterable[int], routing: Routing = EVEN
) -> Mapping[int, ExpertLoad | None]:
    """By rank, the load of an average one of ``layers`` of the stage; None for a dense model."""
    if spec.moe is None:
        return dict.fromkeys(stage.ranks)
    kinds = layer_kinds(spec, layers, routing)
    found = [(layer_loads(spec, stage, moe, popular).of, count) for moe, popular, count in kinds if moe]
    total, several = sum(count for *_, count in kinds), sum(count for _, count in found)
    if not found:
        return layer_loads(spec, stage, False).of
    means = {}
    for rank in stage.ranks:
        one = found[0][0][rank]
        sums = {
            name: sum(getattr(of[rank], name) * count for of, count in found) / several
            for name in ("sent", "arriving", "rows")
        }
        means[rank] = replace(one, layers=several / total, **sums)
    return means
