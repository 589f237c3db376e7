"""Costs of mixtures of experts: expected loads against counting, memory against autograd, prices of divided experts."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.model import GPTStage
from hetero_megatron.parallel.grad_sync.routes import HopRoutes, local_pieces
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.buckets import make_buckets
from hetero_megatron.plans.memory.uniform_stages import UniformStageMemory
from hetero_megatron.plans.routing import Routing, hit_probability, layer_loads, mean_loads
from hetero_megatron.plans.shares import rank_shares
from hetero_megatron.predictor.cost.cost_options import CostOptions, StageChoice
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.bucket_flows import bucket_flows
from hetero_megatron.predictor.simulate.stage_cost import StageCosts
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import logical_tensors, tensor_box, whole_share
from hetero_megatron.spec.activation_bytes import layer_activation_bytes
from hetero_megatron.spec.expert_load import expert_flops, plain_load
from hetero_megatron.spec.flops import head_flops, layer_matmul_flops
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.hf_reference import make_hf
from tests.support.moe_models import MAMBAS, MOE_FAMILIES
from tests.support.small_plans import pipe, plan, stage

ALONE = MAMBAS["nemotron_h_experts"] | {"layers_block_type": ["moe"] * 2}
SPECS = {name: from_hf_config(config) for name, config in (MOE_FAMILIES | {"without_gates": ALONE}).items()}
MIXTRAL = SPECS["mixtral"]  # 4 experts of 20 columns, 2 per token


def cluster(chips: tuple[str, ...] = ("big", "big"), speeds: dict[str, float] | None = None) -> Cluster:
    speeds = speeds or {"big": 1.0}
    return cluster_from_dict({
        "nodes": [{"name": f"n{i}", "chip": c, "count": 1, "chips_per_node": 1} for i, c in enumerate(chips)],
        "chips": {c: {"memory": "8 GiB", "emulate": {"speed": s}} for c, s in speeds.items()},
        "links": {"inter_node": {"bandwidth": "10 GB/s", "latency": "1 us"}},
    })  # fmt: skip


def spelled(experts: Any = None, **more: Any) -> dict[str, Any]:
    given = {} if experts is None else {"experts": experts}
    return plan([pipe(4, 2, stage([0, 1], [0, 2], **({"tp": 1} | more), **given))])


@pytest.mark.parametrize(("count", "mine", "top_k"), [(4, 1, 2), (6, 2, 3), (8, 8, 2), (5, 0, 2), (7, 3, 7)])
def test_the_share_of_tokens_that_come_is_that_of_all_choices(count: int, mine: int, top_k: int) -> None:
    choices = list(combinations(range(count), top_k))
    hit = sum(any(e < mine for e in choice) for choice in choices) / len(choices)
    assert hit_probability(mine / count, count, top_k) == pytest.approx(hit)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_stage_that_divides_no_experts_has_plain_loads(tp: int) -> None:
    made = plan_from_dict(spelled(tp=tp), MIXTRAL)
    (one,) = made.pipelines[0].stages
    loads = layer_loads(MIXTRAL, one, True)
    tokens = one.units[0].micro_batch_tokens
    assert all(load == plain_load(MIXTRAL, tokens, 1 / tp, tp) for load in loads.of.values())
    assert [bool(hop.moves) for hop in loads.hops] == [tp > 1]


def test_every_token_reaches_each_of_its_experts_once() -> None:
    made = plan_from_dict(spelled([{"ranks": [0, 1], "experts": [[0, 3], [2, 4]]}]), MIXTRAL)
    (one,) = made.pipelines[0].stages
    tokens = sum(u.micro_batch_tokens for u in one.units)
    for popular in (None, (0.4, 0.3, 0.2, 0.1)):
        loads = layer_loads(MIXTRAL, one, True, popular).of
        assert sum(load.rows for load in loads.values()) == pytest.approx(tokens * 2)
        assert sum(load.sent for load in loads.values()) == pytest.approx(sum(x.arriving for x in loads.values()))
    # Expert 2 is on both ranks, each of which keeps its tokens; rank 0 also gets those of 0 and 1, rank 1 those of 3.
    assert loads[0].rows == pytest.approx(tokens * 2 * (0.4 + 0.3 + 0.2 / 2))


def test_measured_routing_is_averaged_over_the_layers_of_a_stage() -> None:
    spec = SPECS["qwen2_moe_dense_layers"]  # layer 1 alone is a mixture of experts
    moe = [i for i in range(spec.num_layers) if spec.layer(i).mlp == "moe"]
    made = plan_from_dict(plan([pipe(2, 1, stage([0], [0, 4]))]), spec)
    (one,) = made.pipelines[0].stages
    load = mean_loads(spec, one, one.layer_indices(), Routing(((moe[0], (1.0, 0.0, 0.0, 0.0, 0.0)),)))[0]
    assert load is not None and load.layers == len(moe) / 4
    dense = mean_loads(spec, one, [0], Routing())[0]
    assert dense is not None and dense.layers == 0.0


@pytest.mark.parametrize("name", SPECS)
def test_what_an_average_layer_holds_is_what_the_tensors_say(name: str) -> None:
    spec = SPECS[name]
    share = whole_share(spec)
    whole = sum(tensor_box(t, share).size for t in logical_tensors(spec) if isinstance(t.layer, int))
    assert UniformStageMemory(spec, 2).held(1, spec.num_layers, False, False) == whole


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "without_gates"])
def test_activation_bytes_are_those_that_autograd_keeps(name: str) -> None:
    spec = SPECS[name]
    assert spec.moe is not None
    spec = replace(spec, moe=replace(spec.moe, top_k=spec.moe.num_experts))  # every expert gets every token
    built = GPTStage(spec, whole_share(spec), [0], False, False)
    for p in built.parameters():
        torch.nn.init.normal_(p, std=0.1)
    skip, saved = {p.untyped_storage().data_ptr() for p in built.parameters()}, dict[int, int]()

    def pack(t: Any) -> Any:
        storage = t.untyped_storage()
        # Norms keep a number or two per row, rotary tables are shared by all layers: neither counts.
        if storage.data_ptr() not in skip and storage.nbytes() > 64 * 4 and not (t.dim() == 4 and t.shape[2] == 1):
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    x = torch.randn(2, 32, spec.hidden_size, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        built(x, SimpleNamespace(positions=torch.arange(32).expand(2, 32), documents=None, loss_mask=None, draws=None))
    want = layer_activation_bytes(spec, 64, itemsize=4)
    assert sum(saved.values()) == pytest.approx(want, rel=0.01)


def test_flops_without_gates_are_those_that_torch_counts() -> None:
    """Of transformers' model, whose layers are experts alone."""
    hf, spec = make_hf(ALONE, 3, torch.float32)
    hf.config._experts_implementation = "eager"
    with FlopCounterMode(display=False) as counted:
        hf(input_ids=torch.arange(12)[None], use_cache=False)
    layers, load = spec.num_layers * 12 * layer_matmul_flops(spec), plain_load(spec, 12)
    assert counted.get_total_flops() == layers + head_flops(spec, 12)
    assert load is not None and spec.moe is not None
    shared = 12 * 2 * 2 * spec.hidden_size * spec.moe.shared_ffn
    assert layers == spec.num_layers * (expert_flops(spec, load) + shared)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_template_and_a_plan_have_the_same_price(name: str, tp: int) -> None:
    spec, where = SPECS[name], cluster()
    made = plan_from_dict(plan([pipe(4, 2, stage([0, 1] if tp == 2 else [0], [0, spec.num_layers], tp=tp))]), spec)
    costs = CostModel(spec, where, made.seq_length, "fp32")
    choice = StageChoice("big", tp, 1, spec.num_layers, True, True, home="n0")
    found = StageCosts(made, costs).of(made.pipelines[0]).costs
    wanted = costs.forward_seconds(choice, 4), costs.backward_seconds(choice, 4)
    assert (found.forward[0], found.backward[0]) == pytest.approx(wanted, rel=0.05 if tp == 2 else 1e-9)


def test_experts_by_speed_are_predicted_to_be_faster_than_equal_ones() -> None:
    where = cluster(("fast", "slow"), {"fast": 3.0, "slow": 1.0})
    spec = replace(MIXTRAL, hidden_size=256, ffn_hidden_size=2048, num_heads=8, num_kv_heads=2, head_dim=32)
    assert spec.moe is not None
    spec = replace(spec, moe=replace(spec.moe, ffn_hidden_size=2048), max_position_embeddings=1024)

    def seconds(first: int, options: CostOptions | None = None) -> float:
        """Of a step if rank 1, the slow one, has the first experts."""
        groups = [{"ranks": [1, 0], "experts": [[0, first], [first, 4]]}]
        made = plan([pipe(4, 2, stage([0, 1], [0, 2], tp=1, dp_split=[3, 1], experts=groups))], 1024)
        return predict(plan_from_dict(made, spec), spec, where, "fp32", options=options).step_seconds

    assert min((1, 2, 3), key=seconds) == 1
    # If the last expert gets most tokens, the slow rank can have all others.
    hot = CostOptions(routing=Routing(tuple((i, (0.07, 0.07, 0.07, 0.79)) for i in range(2))))
    assert min((1, 2, 3), key=lambda first: seconds(first, hot)) == 3


@pytest.mark.parametrize("experts", [None, [[0, 3], [3, 4]], [[0, 3], [2, 4]]])
def test_sums_that_begin_with_the_own_part_are_the_runtimes(experts: list[list[int]] | None) -> None:
    """Of whose elements no other rank sends all: of experts that only one rank has, alone or among others'."""
    made = plan_from_dict(spelled(experts and [{"ranks": [0, 1], "experts": experts}]), MIXTRAL)
    shares = rank_shares(MIXTRAL, made.pipelines[0].stages[0])
    boxes = {rank: {t.name: tensor_box(t, share) for t in logical_tensors(MIXTRAL)} for rank, share in shares.items()}
    seen = set()
    for bucket in make_buckets(made, MIXTRAL):
        flows, (hop,) = bucket_flows(bucket, np.arange(2)), bucket.hops
        for rank in bucket.ranks:
            pieces = [local_pieces(layouts, rank, boxes[rank]) for layouts in (hop.sources, hop.targets)]
            routes = HopRoutes(hop, bucket.ranks, rank, *pieces, bucket.dense)
            own = routes.size > 0 and not routes.sends_all - {rank}
            assert flows.from_own[rank] == own and (not own or rank in routes.sends_all)
            seen.add(own)
    assert (True in seen) == (experts is not None)
