"""How routed tokens divide over experts and ranks: expectations, from measured routing or evenly."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hetero_megatron.errors import UserError
from hetero_megatron.layout import cut
from hetero_megatron.plans.canonical import ExpertGroup, Stage
from hetero_megatron.plans.experts import (
    TokenHops,
    destinations,
    expert_groups,
    hit_probability,
    share_of_island,
    shares_of,
    stage_token_hops,
)
from hetero_megatron.plans.made_for import model_hash
from hetero_megatron.plans.shares import Islands, rank_shares, split_by_island
from hetero_megatron.spec import ModelSpec, Share
from hetero_megatron.spec.expert_load import ExpertLoad
from hetero_megatron.utils.files import read_json_object
from hetero_megatron.utils.outputs import write_text
from hetero_megatron.utils.text import plural

if TYPE_CHECKING:
    from hetero_megatron.spec import ModelSpec, MoE

VERSION = 1
FLAG = "--routing-stats"


@dataclass(frozen=True)
class RoutingStats:
    """Attributes:
    tokens: that were routed in each layer; layers: by layer, how many of them chose each expert.
    """

    tokens: int
    layers: Mapping[int, tuple[int, ...]]


def write_routing_stats(path: str, stats: RoutingStats, spec: ModelSpec) -> None:
    """Replace the file as a whole, without modules that predict further tokens; UserError if it cannot be written."""
    main_layers = sorted((layer, counts) for layer, counts in stats.layers.items() if layer < spec.num_layers)
    layers = {str(layer): list(counts) for layer, counts in main_layers}
    document = {"version": VERSION, "model_hash": _hash(spec), "tokens": stats.tokens, "layers": layers}
    write_text(path, FLAG, json.dumps(document) + "\n")


def _hash(spec: ModelSpec) -> str:
    """Of the model without adapters, and without modules that predict further tokens."""
    return model_hash(replace(spec.base, mtp_layers=0))


def read_routing_stats(path: str, spec: ModelSpec) -> RoutingStats:
    """Read and check the file.

    Raises:
        UserError: it is malformed, or of another model than ``spec``.
    """
    document = read_json_object(path, FLAG)
    if document.get("version") != VERSION:
        written = document.get("version")
        raise UserError("unknown version", field="version", value=written, accepted=str(VERSION), where=path)
    if document.get("model_hash") != _hash(spec):
        raise UserError(
            f"is of another model than {spec.name} ({_hash(spec)})", field="model_hash",
            value=document.get("model_hash"), accepted="what a run with this model wrote", where=path,
        )  # fmt: skip
    assert spec.moe is not None, "the hash is of a model with experts"
    tokens: Any = document.get("tokens")
    layers = document.get("layers")
    if not _is_count(tokens) or tokens == 0:
        raise UserError("must be a count", field="tokens", value=tokens, accepted="an integer >= 1", where=path)
    moe_layers = [str(i) for i, kind in enumerate(spec.layers) if kind.mlp == "moe"]
    if not isinstance(layers, dict) or set(layers) != set(moe_layers):
        written = ", ".join(layers) if isinstance(layers, dict) else None
        accepted = ", ".join(moe_layers)
        raise UserError(
            "must name the layers with experts", field="layers", value=written, accepted=accepted, where=path
        )
    for layer, counts in layers.items():
        _check_counts(counts, tokens, spec.moe, f"layers.{layer}", path)
    return RoutingStats(tokens, {int(layer): tuple(layers[layer]) for layer in moe_layers})


def _check_counts(counts: object, tokens: int, moe: MoE, field: str, path: str) -> None:
    """Refuse what no run of a model with these experts can have counted."""
    if not isinstance(counts, list) or len(counts) != moe.num_experts:
        written = plural(len(counts), "count") if isinstance(counts, list) else counts
        accepted = f"a list of one count for each of the model's {moe.num_experts} experts"
        raise UserError("not one count per expert", field=field, value=written, accepted=accepted, where=path)
    for expert, count in enumerate(counts):
        if not _is_count(count) or count > tokens:
            raise UserError(
                f"no count of how many of {plural(tokens, 'token')} chose an expert", field=f"{field}[{expert}]",
                value=count, accepted=f"an integer from 0 to {tokens}", where=path,
            )  # fmt: skip
    if sum(counts) != tokens * moe.top_k:
        raise UserError(
            f"counts sum to {sum(counts)}", field=field, where=path,
            accepted=f"a sum of {tokens * moe.top_k}: {plural(tokens, 'token')}, {plural(moe.top_k, 'expert')} each",
        )  # fmt: skip


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60


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


def routing_of(path: str, spec: ModelSpec) -> Routing:
    """As a run wrote it to a file.

    Raises:
        UserError: a dense model, a malformed file, or one of another model.
    """
    if spec.moe is None:
        raise UserError("the model has no experts", field=FLAG, value=path, accepted="no such file")
    return Routing.of(read_routing_stats(path, spec).layers)


@dataclass(frozen=True)
class TokenHop:
    """One exchange of tokens, on their way to the experts; sums come back the other way.

    Attributes:
        groups: ranks that exchange messages with the first one of them.
        copies: (sender, receiver) -> tokens; of those that stay with a rank both are this one.
    """

    groups: tuple[tuple[int, ...], ...]
    copies: Mapping[tuple[int, int], float]

    @property
    def moves(self) -> dict[tuple[int, int], float]:
        """Without the tokens that stay."""
        return {pair: tokens for pair, tokens in self.copies.items() if pair[0] != pair[1]}


@dataclass(frozen=True)
class LayerLoads:
    """Of one layer of a stage in one micro-batch.

    Attributes:
        of: by rank.
        hops: one, or two where some group of experts takes two (``token_hops``); none in a dense layer.
    """

    of: Mapping[int, ExpertLoad]
    hops: tuple[TokenHop, ...]


def layer_kinds(
    spec: ModelSpec, layers: Iterable[int], routing: Routing = EVEN
) -> list[tuple[bool, Popularity | None, int]]:
    """(mixture of experts?, popularity of its experts, how many) of each kind of layer among ``layers``."""
    popularity_of = dict(routing.layers)
    moes = ((i, spec.layer(i).mlp == "moe") for i in layers)
    layers_of_kind = Counter((moe, popularity_of.get(i) if moe else None) for i, moe in moes)
    return [(*kind, count) for kind, count in layers_of_kind.items()]


def layer_loads(
    spec: ModelSpec, stage: Stage, routed: bool, popularity: Popularity | None = None, islands: Islands = ()
) -> LayerLoads:
    """Loads of a layer that is a mixture of experts (``routed``), or a dense one of a model that has some; ``islands``:
    the plan's."""
    stage_islands = split_by_island(islands, stage.ranks) if islands else ()
    return _layer_loads(spec, replace(stage, layers=(), embed=False, head=False), routed, popularity, stage_islands)


@lru_cache(maxsize=4096)
def _layer_loads(
    spec: ModelSpec, stage: Stage, routed: bool, popularity: Popularity | None, islands: Islands
) -> LayerLoads:
    moe = spec.moe
    assert moe is not None, "a dense model routes nothing"
    tokens_of = own_tokens(stage)
    if not routed:
        return LayerLoads({rank: ExpertLoad(0.0, n, 0.0, 0.0, 0.0, 0, 0.0, 1) for rank, n in tokens_of.items()}, ())
    shares, count = rank_shares(spec, stage), moe.num_experts
    popular = popularity or (1 / count,) * count
    rows = dict.fromkeys(stage.ranks, 0.0)
    groups, twice = expert_groups(stage, count), stage_token_hops(spec, stage, islands)
    first: dict[tuple[int, int], float] = defaultdict(float)
    second: dict[tuple[int, int], float] = defaultdict(float)
    members = dict[int, int]()
    for group in groups:
        hops = twice.get(group)
        for source in group.ranks:
            members[source] = len(hops.island(source)) + len(hops.islands) - 1 if hops else len(group.ranks)
            to = destinations(group, source, count, islands)
            for relay, island in hops.relays(source).items() if hops else ():
                share = share_of_island(popular, to, island)
                first[source, relay] += tokens_of[source] * hit_probability(share, count, moe.top_k)
            for rank, share in shares_of(popular, to, group.ranks).items():
                rows[rank] += tokens_of[source] * moe.top_k * share
                tokens = tokens_of[source] * hit_probability(share, count, moe.top_k)
                if hops:
                    second[hops.relay(source, hops.island(rank)), rank] += tokens
                else:
                    first[source, rank] += tokens
    return LayerLoads(
        _loads(tokens_of, rows, shares, members, first, second, {r for g in twice for r in g.ranks}),
        _hops(groups, twice, first, second),
    )


def _loads(
    tokens_of_rank: Mapping[int, float], rows: Mapping[int, float], shares: Mapping[int, Share],
    members: Mapping[int, int], first: Mapping[tuple[int, int], float], second: Mapping[tuple[int, int], float],
    twice: Container[int],
) -> dict[int, ExpertLoad]:  # fmt: skip
    """By rank. ``twice``: ranks whose tokens go in two hops, of which the second one is to the experts."""

    def sums(copies: Mapping[tuple[int, int], float], end: int) -> dict[int, float]:
        tokens_at_rank: dict[int, float] = defaultdict(float)
        for pair, tokens in copies.items():
            tokens_at_rank[pair[end]] += tokens
        return tokens_at_rank

    (out, into), (out2, into2) = ([sums(copies, end) for end in (0, 1)] for copies in (first, second))
    loads = {}
    for rank, tokens in tokens_of_rank.items():
        (a, b), (c, d) = shares[rank].experts, shares[rank].expert_ffn
        amounts = (out2[rank], into2[rank]) if rank in twice else (out[rank], into[rank])
        relayed = (out[rank], into[rank]) if rank in twice else (0.0, 0.0)
        loads[rank] = ExpertLoad(1.0, tokens, *amounts, rows[rank], b - a, d - c, members[rank], *relayed)
    return loads


def _hops(
    groups: Sequence[ExpertGroup], twice: Mapping[ExpertGroup, TokenHops], first: Mapping[tuple[int, int], float],
    second: Mapping[tuple[int, int], float],
) -> tuple[TokenHop, ...]:  # fmt: skip
    straight = [tuple(sorted(group.ranks)) for group in groups if group not in twice]
    relayed = [tuple(dict.fromkeys((r, *hops.relays(r)))) for group, hops in twice.items() for r in group.ranks]
    first_hop = TokenHop((*straight, *relayed), dict(first))
    inside = tuple(island for hops in twice.values() for island in hops.islands)
    return (first_hop, TokenHop(inside, dict(second))) if inside else (first_hop,)


def own_tokens(stage: Stage) -> dict[int, int]:
    """Tokens of a micro-batch that each rank has after attention, and routes."""
    return {
        rank: (unit.sequences[1] - unit.sequences[0]) * (b - a)
        for unit in stage.units
        for rank, (a, b) in zip(unit.ranks, cut(unit.num_tokens, (1,) * unit.tp), strict=True)
    }


def mean_loads(
    spec: ModelSpec, stage: Stage, layers: Iterable[int], routing: Routing = EVEN, islands: Islands = ()
) -> Mapping[int, ExpertLoad | None]:
    """By rank, the load of an average one of ``layers`` of the stage; None for a dense model."""
    if spec.moe is None:
        return dict.fromkeys(stage.ranks)
    kinds = layer_kinds(spec, layers, routing)
    loads = [(layer_loads(spec, stage, moe, popular, islands).of, count) for moe, popular, count in kinds if moe]
    total, several = sum(count for *_, count in kinds), sum(count for _, count in loads)
    if not loads:
        return layer_loads(spec, stage, False).of
    means = {}
    for rank in stage.ranks:
        load = loads[0][0][rank]
        sums = {
            name: sum(getattr(load_of[rank], name) * count for load_of, count in loads) / several
            for name in ("sent", "arriving", "rows", "passed_on", "taken_on")
        }
        means[rank] = replace(load, layers=several / total, **sums)
    return means
