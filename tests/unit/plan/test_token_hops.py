"""Routed tokens over islands in two hops: when, by whom, how many (against counting all choices), what it is worth."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.experts import TokenHops, destinations, stage_token_hops
from hetero_megatron.plans.islands import add_islands
from hetero_megatron.plans.routing import layer_loads
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.moe_models import MOE_FAMILIES
from tests.support.small_plans import pipe, plan, stage

MIXTRAL = replace(from_hf_config(MOE_FAMILIES["mixtral"]), max_position_embeddings=1024)  # 4 experts, 2 per token
RANKS = [0, 1, 2, 3, 4]
UNEVEN = [{"ranks": [3, 0, 1, 2, 4], "experts": [[0, 1], [1, 2], [], [2, 3], [2, 4]]}]


def made(islands: Any = None, experts: Any = UNEVEN, spec: ModelSpec = MIXTRAL, **more: Any) -> Plan:
    one = stage(RANKS, [0, 2], **({"tp": 1, "dp_split": [1, 2, 1, 1, 1], "experts": experts} | more))
    return plan_from_dict(plan([pipe(6, 2, one)], 20) | ({"islands": islands} if islands else {}), spec)


def hops_of(one: Plan, spec: ModelSpec = MIXTRAL) -> list[TokenHops]:
    return [*stage_token_hops(spec, one.pipelines[0].stages[0], one.islands).values()]


def test_where_it_saves_nothing_tokens_go_straight() -> None:
    assert MIXTRAL.moe is not None
    two = [[0, 1, 2], [3, 4]]
    assert [hops.islands for hops in hops_of(made(two))] == [((0, 1, 2), (3, 4))]
    assert not hops_of(made())
    assert not hops_of(made([RANKS]))
    assert not hops_of(made([[rank] for rank in RANKS]))
    one = replace(MIXTRAL, moe=replace(MIXTRAL.moe, top_k=1))  # a token has no second expert in an island
    assert not hops_of(made(two, spec=one), one)


def test_equal_nodes_exchange_between_ranks_of_equal_number() -> None:
    """And unequal ones load their ranks alike, each rank being asked by senders outside."""
    nodes = TokenHops(((0, 1, 2), (3, 4, 5), (6, 7, 8)))
    for sender in range(9):
        assert {relay % 3 for relay in nodes.relays(sender)} == {sender % 3}
        assert nodes.relay(sender, nodes.island(sender)) == sender
    uneven = TokenHops(((0, 1, 2, 3), (4,), (5,), (6,), (7,)))
    assert [uneven.relay(sender, (0, 1, 2, 3)) for sender in (4, 5, 6, 7)] == [0, 1, 2, 3]


@pytest.mark.parametrize("islands", [[[0, 1, 2], [3, 4]], [[0, 3], [1], [2, 4]], [[4, 0]]])
def test_expected_tokens_are_those_of_all_choices(islands: list[list[int]]) -> None:
    """Against enumeration: once from each sender to each island with an expert of the token, by the rank that passes
    it on; and to the experts come as many as straight."""
    one = made(islands)
    (found,) = one.pipelines[0].stages
    (hops,) = hops_of(one)
    (group,) = found.experts
    loads = layer_loads(MIXTRAL, found, True, islands=one.islands)
    own = {unit.ranks[0]: unit.micro_batch_tokens for unit in found.units}
    choices = list(combinations(range(4), 2))
    first, second = np.zeros((5, 5)), np.zeros((5, 5))
    for rank in RANKS:
        to = destinations(group, rank, 4, one.islands)
        for choice in choices:
            receivers = {r for e in choice for r in to[e]}
            for island in {hops.island(r) for r in receivers}:
                relay = hops.relay(rank, island)
                first[rank, relay] += own[rank] / len(choices)
                for r in receivers.intersection(island):
                    second[relay, r] += own[rank] / len(choices)
    for hop, counted in zip(loads.hops, (first, second), strict=True):
        expected = np.zeros((5, 5))
        for pair, tokens in hop.copies.items():
            expected[pair] = tokens
        np.testing.assert_allclose(expected, counted, atol=1e-12)
    for rank in RANKS:
        load = loads.of[rank]
        want = first[rank].sum(), first[:, rank].sum(), second[rank].sum(), second[:, rank].sum()
        assert (load.passed_on, load.taken_on, load.sent, load.arriving) == pytest.approx(want)
    assert sum(load.rows for load in loads.of.values()) == pytest.approx(2 * sum(own.values()))


def nodes(inter: str) -> Cluster:
    return cluster_from_dict({
        "nodes": [{"name": "a", "chip": "big", "count": 2, "chips_per_node": 2}],
        "chips": {"big": {"memory": "8 GiB", "emulate": {"speed": 1.0}}},
        "links": {"intra_node": {"bandwidth": "2 GB/s", "latency": "5 us"},
                  "inter_node": {"bandwidth": inter, "latency": "20 us"}},
    })  # fmt: skip


def test_a_cluster_with_slow_links_adds_islands_for_tokens_alone() -> None:
    """Under TP no gradient gains by them, and without experts over nodes no plan has them; the predicted step is
    shorter."""
    groups = [{"ranks": [0, 1, 2, 3], "experts": [[0, 1], [1, 2], [2, 3], [3, 4]]}]
    plain, divided = (
        plan_from_dict(plan([pipe(4, 2, stage([0, 1, 2, 3], [0, 2], tp=2, **more))], 1024), MIXTRAL)
        for more in ({}, {"experts": groups})
    )
    assert add_islands(plain, MIXTRAL, nodes("50 MB/s")) is plain
    assert add_islands(divided, MIXTRAL, nodes("2 GB/s")) is divided  # no link is slower than another
    added = add_islands(divided, MIXTRAL, nodes("50 MB/s"))
    assert added.islands == ((0, 1), (2, 3))
    straight, twice = (predict(p, MIXTRAL, nodes("50 MB/s"), "fp32").step_seconds for p in (divided, added))
    assert twice < straight
