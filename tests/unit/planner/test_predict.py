"""Predictions: hand-computed steps, bytes against the runtime's dry run, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.errors import UserError
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.predictor.cost.layer_cost import CostModel, CostOptions
from hetero_megatron.predictor.simulate.step import Prediction, StepSimulator, predict
from hetero_megatron.schedule import Costs, generate, lower, simulate
from hetero_megatron.spec import load_model
from hetero_megatron.spec.flops import parameter_count
from hetero_megatron.utils.text import format_bytes
from tests.support.planner_cases import MODEL, SEQ, cluster, plan, stages

ACTIVATION = SEQ * MODEL.hidden_size * 4  # bytes of one micro-batch at a boundary, fp32


def run(spelled: dict, where=None, model=MODEL, dtype: str = "fp32") -> Prediction:  # type: ignore[no-untyped-def]
    where = where or cluster(len({r for p in spelled["pipelines"] for s in p["stages"] for r in s["ranks"]}))
    return predict(plan_from_dict(spelled, model), model, where, dtype)


@pytest.mark.parametrize(
    "layers, step",
    [((10, 1), 480), ((1, 10), 483), ((10, 1, 1, 1), 480), ((1, 1, 1, 10), 489), ((1, 10, 1, 1), 483), ((2,) * 4, 114)],
)
def test_step_times_without_links(layers: tuple[int, ...], step: float) -> None:
    model = replace(MODEL, num_layers=sum(layers))
    found = run(plan((16, stages(*layers))), model=model)
    assert found.step_seconds == pytest.approx(step, rel=1e-9)
    assert found.parts["pipelines"] == pytest.approx(step, rel=1e-9)


def test_two_chips_of_unlike_speed() -> None:
    # 9 layers at 1 s and 2 at 4.5 s: both stages take 9 s forward, so 16 micro-batches take (16 + 1) x 27 s.
    found = run(plan((16, stages(9, 2))), cluster(speeds=(1.0, 4.5)))
    assert found.step_seconds == pytest.approx(17 * 27)
    assert found.busy == pytest.approx({0: 16 * 27, 1: 16 * 27})


def test_the_reference_of_pairs_is_a_forward_more() -> None:
    # 9 s a stage and micro-batch forward: 16 of them pass two stages in 17 x 9 s, before the 17 x 27 s of the step.
    where, spelled = cluster(speeds=(1.0, 4.5)), plan_from_dict(plan((16, stages(9, 2))), MODEL)
    costs = CostModel(MODEL, where, SEQ, "fp32", CostOptions(reference=True))
    simulated = StepSimulator(spelled, costs)
    found = simulated.prediction()
    assert found.step_seconds == pytest.approx(17 * (9 + 27))
    assert found.parts["reference"] == pytest.approx(17 * 9) and found.parts["pipelines"] == pytest.approx(17 * 27)
    assert simulated.computing == pytest.approx({0: 16 * 36, 1: 16 * 36})


def test_a_boundary_costs_its_bytes_in_each_direction() -> None:
    beta, alpha = 1.0 / ACTIVATION, 0.25  # one activation takes 1 s and arrives 0.25 s later
    found = run(plan((1, stages(6, 5))), cluster(2, beta=beta, alpha=alpha))
    # F 6, transfer 1.25, F 5, B 10, transfer 1.25, B 12; then the barrier's latency.
    assert found.parts["pipelines"] == pytest.approx(6 + 1.25 + 5 + 10 + 1.25 + 12)
    assert found.step_seconds == pytest.approx(35.5 + alpha)


def test_messages_cost_their_rank() -> None:
    quiet = run(plan((8, stages(6, 5))), cluster(2))
    noisy = run(plan((8, stages(6, 5))), cluster(2, message_seconds=0.5))
    # The slow first stage sends and receives one message per micro-batch; it never waits in the steady state.
    assert noisy.parts["pipelines"] == pytest.approx(quiet.parts["pipelines"] + 8 * 2 * 0.5 + 2 * 0.5)


def test_recompute_adds_forwards() -> None:
    whole = run(plan((4, stages(11))), cluster(1))
    assert whole.step_seconds == pytest.approx(4 * 33)
    for kind, again in (("full", 11), ({"first": 3}, 3), ("none", 0)):
        found = run(plan((4, stages(11, recompute=kind))), cluster(1))
        assert found.step_seconds == pytest.approx(4 * (33 + again))


def test_unequal_pipelines_wait_for_the_slowest() -> None:
    where = cluster(speeds=(1.0, 3.0))
    fair = plan((3, stages(11)), (1, stages(11, first_rank=1)))
    assert run(fair, where).parts["pipelines"] == pytest.approx(99)
    even = plan((2, stages(11)), (2, stages(11, first_rank=1)))
    assert run(even, where).parts["pipelines"] == pytest.approx(198)


def test_inner_replicas_divide_the_rows() -> None:
    # Rows that were not measured are scaled by the operators: half the rows take half the time.
    spelled = plan((4, [{"ranks": [0, 1], "layers": [0, 11], "dp_split": [2, 2]}]), mbs=4)
    two = run(spelled, cluster(2)).parts["pipelines"]
    one = run(plan((4, stages(11)), mbs=4), cluster(1)).parts["pipelines"]
    assert two == pytest.approx(one / 2, rel=1e-6)


def test_gradients_travel_behind_the_last_backward_and_parameters_after_it() -> None:
    # Two replicas: each gives half of its gradients away and takes half; one bucket, as the model is small.
    half = parameter_count(MODEL) / 2 * 4
    beta = 5.0 / half
    found = run(plan((2, stages(11)), (2, stages(11, first_rank=1))), cluster(2, beta=beta))
    assert found.parts["pipelines"] == pytest.approx(66)
    assert found.parts["gradients"] == pytest.approx(5.0, rel=2e-3)  # its embedding is ready at the end of backward
    assert found.parts["parameters"] == pytest.approx(5.0, rel=2e-3)
    assert len(found.reduces) == len(found.all_gathers) == 1


def test_large_models_hide_gradients_behind_backward() -> None:
    model = replace(MODEL, hidden_size=1024, ffn_hidden_size=4096, head_dim=128)
    where = cluster(2, beta=1e-9, model=model)
    found = run(plan((2, stages(11)), (2, stages(11, first_rank=1))), where, model)
    assert len(found.reduces) > 11
    assert found.reduces[0].end < found.parts["pipelines"]  # the head's bucket left first
    whole = sum(s.end - s.start for s in found.reduces)
    assert found.parts["gradients"] < whole / 5


def test_tensor_parallel_exchanges_use_the_slow_link() -> None:
    spelled = plan((2, stages(11, tp=2)))
    free = run(spelled, cluster(1, per_node=2))
    beta = 1.0 / (ACTIVATION / 2)  # a gather or scatter: each rank sends half of the activation in 1 s
    slow = run(spelled, cluster(1, per_node=2, beta=beta))
    # 4 per layer and direction, and one each of embedding and head.
    swaps = 2 * (2 * 4 * 11 + 2 * 2)
    assert slow.parts["pipelines"] - free.parts["pipelines"] == pytest.approx(swaps)


def test_what_a_rank_computes_is_without_its_exchanges() -> None:
    """By hand: of 2 layers full recompute runs both again; a rank of a TP group computes half of each, on its own
    chip; the link, by which the stage's actions take far longer, does not count."""
    tail = stages(2, tp=2, recompute="full")[0] | {"ranks": [1, 2], "layers": [9, 11]}
    spelled = plan((3, [*stages(9), tail]))
    where = cluster(speeds=(1.0, 2.0, 5.0), beta=1.0 / ACTIVATION)
    canonical = plan_from_dict(spelled, MODEL)
    computed = StepSimulator(canonical, CostModel(MODEL, where, SEQ, "fp32")).computing
    assert computed == pytest.approx({0: 3 * 9 * 3, 1: 3 * 2 * (3 + 1) * 2 / 2, 2: 3 * 2 * (3 + 1) * 5 / 2})
    busy = run(spelled, where).busy
    assert busy[0] == pytest.approx(computed[0]) and busy[1] == busy[2] > computed[2] + 3 * 2 * 3 * 4 * 0.5


def test_a_nodes_cards_are_shared() -> None:
    # Two stages of two chips each: inside one node both senders use their own links, between nodes they share one.
    beta = 1.0 / ACTIVATION
    spelled = plan(
        (
            1,
            [
                {"ranks": [0, 1], "layers": [0, 6], "dp_split": [1, 1]},
                {"ranks": [2, 3], "layers": [6, 11], "dp_split": [1, 1]},
            ],
        ),
        mbs=2,
    )
    inside = run(spelled, cluster(1, per_node=4, beta=beta)).parts["pipelines"]
    between = run(spelled, cluster(2, per_node=2, beta=beta)).parts["pipelines"]
    assert between - inside == pytest.approx(2.0)  # 2 s instead of 1 s, there and back


@pytest.mark.slow
def test_bytes_are_the_runtimes(tmp_path: Path) -> None:
    """Boundaries, gradients and parameters: the same bytes between the same ranks as in a dry run of each rank."""
    from hetero_megatron.dry_run.one_rank import run_rank
    from hetero_megatron.predictor.simulate.stage_cost import PreparedPlan
    from tests.distributed.training.test_dry_run import config

    ready = config("bf16", tmp_path)
    where = cluster_from_dict(
        {
            "nodes": [{"name": "n", "count": ready.plan.world_size, "chip": "A100-80-SXM"}],
            "links": {"inter_node": {"bandwidth": "1 GB/s"}},
        }
    )
    costs = CostModel(ready.spec, where, ready.plan.seq_length, "bf16")
    step = StepSimulator(ready.plan, costs, PreparedPlan(ready.compiled))
    for rank in (0, 2, 3):  # of an uneven TP pair, of a second stage, of inner replicas
        sent = run_rank(ready, rank).sent
        want = {"pipeline": sent["pipeline"], "gradients": sent["gradients"], "weights": sent["weights"]}
        assert _sent_by(step, rank) == {k: {r: n for r, n in v.items() if n} for k, v in want.items()}


def _sent_by(step, rank: int) -> dict[str, dict[int, float]]:  # type: ignore[no-untyped-def]
    out: dict[str, dict[int, float]] = {"pipeline": {}, "gradients": {}, "weights": {}}

    def add(kind: str, dst: int, count: float) -> None:
        if count:
            out[kind][dst] = out[kind].get(dst, 0) + count

    for pipeline in step.plan.pipelines:
        for up, down in zip(pipeline.stages, pipeline.stages[1:]):
            for a, b, size in step.stages.boundary(up, down, pipeline.micro_batch_size):
                if a == rank:
                    add("pipeline", b, size * pipeline.num_micro_batches)
                if b == rank:
                    add("pipeline", a, size * pipeline.num_micro_batches)
    for bucket in step.sync.buckets:
        exchanges = (action.content.elements() for row in step.sync.structure.actions(bucket, False) for action in row)
        for (holder, owner), count in (pair for elements in exchanges for pair in elements.items()):
            if holder == rank != owner:
                add("gradients", owner, count * step.costs.wide)
            if owner == rank != holder:
                add("weights", holder, count * step.costs.item)
    return out


def test_memory_over_the_limit_names_the_rank_and_the_bytes() -> None:
    found = run(plan((4, stages(6, 5))), cluster(2, memory="4 MiB"))
    worst = found.over[0]
    assert worst.over == found.memory[worst.rank].total - found.limits[worst.rank] > 0
    with pytest.raises(UserError, match=rf"rank {worst.rank} \(c0\) needs .* over by {format_bytes(worst.over)}"):
        found.require_fit()
    assert run(plan((4, stages(6, 5))), cluster(2)).require_fit().over == ()


def test_bad_input_is_refused() -> None:
    bare = {"nodes": [{"name": "n", "count": 2, "chip": "x"}], "chips": {"x": {"memory": "8 GiB", "dtypes": ["fp32"]}}}
    spelled = plan((4, stages(6, 5)))
    with pytest.raises(UserError, match=r"chips.x.tflops.*how fast this chip is in fp32"):
        run(spelled, cluster_from_dict(bare))
    bare["chips"]["x"]["tflops"] = {"fp32": 10}  # type: ignore[index]
    with pytest.raises(UserError, match=r"chips.x.memory_bandwidth"):
        run(spelled, cluster_from_dict(bare))
    bare["chips"]["x"]["memory_bandwidth"] = "1 TB/s"  # type: ignore[index]
    with pytest.raises(UserError, match=r"links.inter_node.*nothing is known about the link between nodes of n and n"):
        run(spelled, cluster_from_dict(bare))
    with pytest.raises(UserError, match=r"has 1 rank\b"):
        run(spelled, cluster(1))
    with pytest.raises(UserError, match="has no bf16"):
        run(spelled, cluster(2), dtype="bf16")


def test_the_data_sheets_give_a_sane_step() -> None:
    where = cluster_from_dict(
        {
            "nodes": [{"name": "n", "count": 4, "chip": "A100-80-SXM", "chips_per_node": 8}],
            "links": {"inter_node": {"bandwidth": "200 GB/s", "latency": "10 us"}},
        }
    )
    model = load_model("llama2-7b")
    spelled = {
        "seq_length": 4096, "global_batch_size": 256,
        "pipelines": [
            {"micro_batch_size": 1, "num_micro_batches": 64, "repeat": 4, "stages": stages(16, 16, tp=4)},
        ],
    }  # fmt: skip
    found = predict(plan_from_dict(spelled, model), model, where).require_fit()
    assert found.mfu is not None and 0.35 < found.mfu < 0.65
    assert found.assumed == {"A100-80-SXM": "ml-engineering; fp32 and fp64 recalled"}
    assert len({id(t) for t in found.timelines}) == 1  # four equal pipelines are simulated once


def test_host_seconds_and_directions_of_the_simulator() -> None:
    schedule = lower(generate("gpipe", 2, 1))
    costs = Costs([1, 1], [2, 2], [5], link_back=[7], latency=[0.5], host=[{"SEND_F": 0.1}, {"RECV_F": 0.2}])
    assert simulate(schedule, costs).step_seconds == pytest.approx(1 + 0.1 + 5.5 + 0.2 + 1 + 2 + 7.5 + 2)
    with pytest.raises(UserError, match="latency"):
        simulate(schedule, Costs([1, 1], [2, 2], latency=[1, 1]))
