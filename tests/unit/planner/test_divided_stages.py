"""Plans that divide weights: found where nothing else fits; state goes by memory, tokens by speed."""

from __future__ import annotations

import math

import pytest

from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.search.divided_stages import DividedStages, _DividedSearch
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.search.incumbent import Incumbent
from hetero_megatron.spec import Lora, adapted
from hetero_megatron.spec.hf_config import from_hf_config

WIDE = from_hf_config({  # a layer has 202 million weights
    "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 1000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
})  # fmt: skip
WITHOUT_TP = SearchSpace(max_tp=1, offload="never", more_schedules="never")


def cards(big: float, small: float, slow: float = 1.0, links: float = 1.0) -> Cluster:
    """Two cards of each kind in one box, the big ones ``slow`` times as fast as the small ones."""
    rates = {"memory_bandwidth": "1 TB/s"}
    return cluster_from_dict({
        "version": 1,
        "nodes": [{"name": n, "chip": n, "chips_per_node": 2} for n in ("big", "small")],
        "chips": {
            "big": {"memory": f"{big} GiB", "tflops": {"bf16": 100}, **rates},
            "small": {"memory": f"{small} GiB", "tflops": {"bf16": 100 / slow}, **rates},
        },
        "links": {
            "intra_node": {"bandwidth": f"{100 * links} GB/s", "latency": "10 us"},
            "inter_node": {"bandwidth": f"{50 * links} GB/s", "latency": "20 us"},
        },
    })  # fmt: skip


def problem(cluster: Cluster, space: SearchSpace = WITHOUT_TP, lora: Lora | None = None) -> PlanningProblem:
    model = WIDE if lora is None else adapted(WIDE, lora)
    return PlanningProblem(model, cluster, 1024, 4, SearchOptions(space=space))


def test_found_where_nothing_else_fits() -> None:
    """Four layers and half the embedding and head are too much for two cards of a kind in a row. Of more memory a card
    keeps more of the state; of equal speed as many tokens."""
    cluster = cards(12, 8)
    with pytest.raises(UserError, match="fits in no plan"):
        search(problem(cluster, SearchSpace(inner_dp=False, max_tp=1, offload="never", more_schedules="never")))
    result = search(problem(cluster))
    best = result.best
    for words in ("nothing fits without; ", " big hold ", "of the state and 50% of the tokens"):
        assert words in result.divided
    assert not best.prediction.over
    for stage in (s for s in best.plan.stages if len(s.units) > 1):
        assert stage.weights is not None
        keeps = [(cluster.ranks[r].chip, share) for r, share in zip(stage.ranks, stage.weights.shard, strict=True)]
        assert min(n for chip, n in keeps if chip == "big") > 1.4 * max(n for chip, n in keeps if chip == "small") > 0
        assert len({u.sequences[1] - u.sequences[0] for u in stage.units}) == 1


def test_chosen_where_it_is_faster() -> None:
    """The frozen base of adapters, on cards of unlike speed, where every layer is computed again (elementwise, two
    stages fit without)."""
    asked = problem(cards(4.2, 3.2, slow=3.0, links=4.0), lora=Lora(4, 8.0)).with_space(recompute="full")
    result, plain = search(asked), search(asked.with_space(inner_dp=False))
    assert "x as fast as the best without" in result.divided
    assert any(stage.weights is not None for stage in result.best.plan.stages)
    assert result.best.step_seconds < plain.best.step_seconds


def test_not_tried_where_memory_is_plenty_or_far_too_small() -> None:
    """Nor of what cannot be divided."""
    result = search(problem(cards(40, 30)))
    assert result.divided == "" and all(stage.weights is None for stage in result.best.plan.stages)
    assert search(problem(cards(4, 3, slow=3.0), lora=Lora(4, 8.0, dora=True))).divided == ""
    with pytest.raises(UserError, match="too little even without activations"):
        search(problem(cards(5, 4)))


def test_micro_batches_by_speed_and_restricted_shares() -> None:
    """Cards of unlike speed find micro-batches of 6 (2, 2, 1 and 1 rows), which no power of two gives."""
    asked = problem(cards(24, 12, slow=0.5)).with_batch(12)
    search_for = _DividedSearch(asked, make_scorer(asked))
    sizes = {x.size for x in search_for.structures()}
    assert sizes == {2, 3, 4, 6, 12}
    structure = next(x for x in search_for.structures() if x.size == 6 and x.stages == 1 and len(x.ranks[0][0]) == 4)
    assert search_for.bound(structure) < math.inf
    found = search_for.best_plan(structure, math.inf)
    assert found is not None and not found.prediction.over
    (stage,) = found.plan.stages
    assert [u.sequences[1] - u.sequences[0] for u in stage.units] == [1, 1, 2, 2]
    assert stage.weights is not None and stage.weights.shard[0] > stage.weights.shard[-1]
    equal = asked.with_space(weights="equal")
    found = _DividedSearch(equal, make_scorer(equal)).best_plan(structure, math.inf)
    assert found is not None and set(found.plan.stages[0].weights.shard) == {1}  # type: ignore[union-attr]
    never, divided = asked.with_space(weights="never"), DividedStages()
    assert divided.propose(never, Incumbent(never, make_scorer(never))) and divided.why == ""


def one_card(memory: float, host: float = 0.0) -> Cluster:
    rates = {"memory": f"{memory} GiB", "tflops": {"bf16": 100}, "memory_bandwidth": "1 TB/s"}
    node = {"name": "desk", "chip": "card", "chips_per_node": 1}
    more = {"host_memory": f"{host} GiB"} if host else {}
    return cluster_from_dict({"version": 1, "nodes": [{**node, **more}], "chips": {"card": rates}})


def test_one_card_streams_its_weights_from_host_memory() -> None:
    """1.6 billion weights and sums of their gradients take 9.4 GiB of a card; a layer or two of them do not."""
    space = SearchSpace(more_schedules="never")
    best = search(problem(one_card(6), space)).best
    (stage,) = best.plan.stages
    assert stage.weights is not None and stage.optimizer.offload and not best.prediction.over
    host = best.prediction.memory[0].host
    assert host > 1.6e9 * (12 + 2 + 4)  # masters, moments, rows and sums
    for too_small in (one_card(6, host * 0.9 / 2**30), one_card(1.5)):
        with pytest.raises(UserError, match="fits in no plan") as refusal:
            search(problem(too_small, space))
        assert "links.inter_node" in refusal.value.accepted
    aside = search(problem(one_card(6, host * 1.1 / 2**30), space)).best
    assert aside.plan == best.plan
