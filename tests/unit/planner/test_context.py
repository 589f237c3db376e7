"""Context groups in the predictor: bytes and memory against the runtime, time against the scheduler."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.dry_run.one_rank import run_rank
from hetero_megatron.planner.context.cluster import problem_from_cluster
from hetero_megatron.planner.context.problem import ContextOptions, one_stage_plan
from hetero_megatron.planner.context.scheduler import schedule_context
from hetero_megatron.plans import Stage, dump_yaml, plan_from_dict
from hetero_megatron.plans.memory.of_plan import estimate_memory
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.ring_attention import ContextSeconds
from hetero_megatron.predictor.simulate.stage_cost import PreparedPlan
from hetero_megatron.predictor.simulate.step import StepSimulator, predict
from hetero_megatron.spec import load_model
from tests.support.random_plans import random_context
from tests.support.selection import quick

TINY = load_model("tiny")
SEQ = 40
MIXED = {
    "nodes": [
        {"name": "h", "chip": "H100-SXM", "chips_per_node": 4, "count": 2},
        {"name": "a", "chip": "A100-80-SXM", "chips_per_node": 2},
    ],
    "links": {"inter_node": {"bandwidth": "50 GB/s", "latency": "10 us"}},
}


def random_context_plan(seed: int) -> dict[str, Any]:
    """Two pipelines; the first has a context stage of 2 to 6 ranks, before or after a stage of one rank."""
    rng = random.Random(seed)
    size, layers = rng.randint(2, 6), rng.randint(1, 5)
    ranks = list(range(size))
    recompute = rng.choice(["none", "selective", "full", {"first": 1}])
    stage = {"ranks": ranks, "layers": [0, layers], "recompute": recompute}
    stage |= random_context(rng, ranks, SEQ, TINY.num_heads)
    rest = {"ranks": [size], "layers": [layers, TINY.num_layers]}
    if rng.random() < 0.5:
        stage["layers"], rest["layers"] = [TINY.num_layers - layers, TINY.num_layers], [0, TINY.num_layers - layers]
    stages = sorted((stage, rest), key=lambda s: s["layers"][0])
    mbs, count = rng.randint(1, 2), rng.randint(1, 3)
    alone = {"ranks": [size + 1], "layers": [0, TINY.num_layers]}
    return {
        "version": 1, "seq_length": SEQ, "global_batch_size": mbs * count + 1,
        "pipelines": [
            {"micro_batch_size": mbs, "num_micro_batches": count, "stages": stages},
            {"micro_batch_size": 1, "num_micro_batches": 1, "stages": [alone]},
        ],
    }  # fmt: skip


def nodes(count: int, bandwidth: str = "10 GB/s") -> Any:
    return cluster_from_dict(
        {
            "nodes": [{"name": "n", "count": count, "chip": "x"}],
            "chips": {"x": {"memory": "80 GiB", "dtypes": ["fp32", "bf16"], "tflops": {"fp32": 150, "bf16": 300},
                            "memory_bandwidth": "2 TB/s"}},
            "links": {"inter_node": {"bandwidth": bandwidth, "latency": "5 us"}},
        }
    )


def bytes_sent(prices: ContextSeconds, stage: Stage) -> dict[tuple[int, int], int]:
    """Bytes by (source, destination) that the attention of one micro-batch sends in the whole stage. Backward sends the
    gradients of what forward sent in the opposite direction; recomputation stops before the output is sent."""
    item, wide, kind = prices.model.item, prices.model.wide, stage.recompute.kind
    full = {"full": stage.num_layers, "first": stage.recompute.layers}.get(kind, 0)
    total: Counter[tuple[int, int]] = Counter()
    for traffic, rows in zip(prices.traffic(stage), stage.dp_split, strict=True):
        for again, layers in ((True, full), (False, stage.num_layers - full)):
            each = layers * prices.model.model.head_dim * rows
            inward, outward = 1 + (again or kind == "selective"), 1 + again  # times in a forward direction
            for flows, times in ((traffic.enter, inward), (traffic.leave, outward)):
                for (a, b), n in (row for one in flows for row in one.items()):
                    total[a, b] += each * times * n * item
                    total[b, a] += each * n * item
            for t in range(len(traffic.schedule.rounds) if traffic.schedule is not None else 0):
                passages = [(p, (inward + 1) * item) for p in traffic.keys_of(t)]
                passages += [(p, wide) for p in traffic.gradients_of(t)]
                for passage, size in passages:
                    for pair, n in traffic.volumes(passage).items():
                        total[pair] += each * n * size
    return dict(total)


@pytest.mark.parametrize("seed", quick(range(6), [], [0, 3]))
def test_bytes_of_context_stages_are_the_runtimes(seed: int, tmp_path: Path) -> None:
    """What every member sends in a dry run of its step, by destination, is what the predictor prices."""
    spelled = random_context_plan(seed)
    plan = plan_from_dict(spelled, TINY)
    path = tmp_path / "plan.yaml"
    path.write_text(dump_yaml(plan))
    dtype = ("bf16", "fp32")[seed % 2]
    flags = ["--bf16"] if dtype == "bf16" else []
    words = ["--plan", str(path), "--model", "tiny", "--dry-run", *flags]
    ready = configure(words, {"WORLD_SIZE": str(plan.world_size)})
    step = StepSimulator(plan, CostModel(TINY, nodes(plan.world_size), SEQ, dtype), PreparedPlan(ready.compiled))
    assert step.times.end > 0
    pipeline = plan.pipelines[0]
    stage = next(s for s in pipeline.stages if len(s.ranks) > 1)
    found = bytes_sent(step.stages.context, stage)
    found_memory = estimate_memory(plan, TINY, dtype)
    for rank in random.Random(seed).sample(stage.ranks, min(2, len(stage.ranks))):
        mates = next(unit.ranks for unit in stage.units if rank in unit.ranks)
        run = run_rank(ready, rank)
        bytes_of_rank = found_memory[rank].total
        assert 0.7 * run.peak <= bytes_of_rank <= 1.7 * run.peak, (rank, bytes_of_rank / run.peak)
        mine = {b: n * pipeline.num_micro_batches for (a, b), n in found.items() if a == rank and b not in mates and n}
        assert mine == {r: n for r, n in run.sent["context parallel"].items() if n}, (rank, dump_yaml(plan))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("count", "above"), [(4, 1.08), (8, 1.08), (10, 1.4)])
def test_prediction_agrees_with_the_scheduler(recompute: str, tp: int, count: int, above: float) -> None:
    """For layouts that the scheduler chooses, its closed form and the timed rounds give nearly the same seconds on
    equal chips; on unlike ones the rounds are uneven (causal blocks), which only the timed ones see."""
    model = replace(load_model("llama3-8b"), max_position_embeddings=1 << 20, num_layers=2)
    cluster = cluster_from_dict(MIXED)
    options = ContextOptions(recompute=recompute)
    problem = problem_from_cluster(model, cluster, 131072, ranks=range(count), tp=tp, options=options)
    choice = schedule_context(problem)
    found = predict(one_stage_plan(problem, choice.layout, 1), model, cluster)
    assert 0.97 * choice.seconds < found.parts["pipelines"] < above * choice.seconds


def test_uneven_work_is_seen() -> None:
    """Contiguous order gives the last member most of the causal work; zigzag does not."""
    model = replace(load_model("llama3-8b"), max_position_embeddings=1 << 20, num_layers=2)

    def seconds(order: str) -> float:
        spelled = {
            "seq_length": 65536, "global_batch_size": 1,
            "pipelines": [{"micro_batch_size": 1, "num_micro_batches": 1, "stages": [{
                "ranks": [0, 1], "layers": [0, 2], "order": order,
                "context": [{"ranks": [r], "tokens": [32768], "heads": [32]} for r in (0, 1)],
                "kv": {"transport": "ring", "block": 8192},
            }]}],
        }  # fmt: skip
        return predict(plan_from_dict(spelled, model), model, nodes(2)).step_seconds

    assert seconds("contiguous") > 1.1 * seconds("zigzag")


def test_equal_members_halve_the_time() -> None:
    """Two members with half of the tokens and free links take half of one rank's time for a layer."""
    model = replace(load_model("llama3-8b"), max_position_embeddings=1 << 20, num_layers=2)
    base = {"seq_length": 65536, "global_batch_size": 1}
    whole = {"ranks": [0], "layers": [0, 2]}
    cut = {"ranks": [0, 1], "layers": [0, 2], "context": [{"ranks": [0, 1], "tokens": [32768] * 2, "heads": [16] * 2}]}
    one, two = (
        predict(
            plan_from_dict({**base, "pipelines": [{"micro_batch_size": 1, "num_micro_batches": 1, "stages": [s]}]},
                           model), model, nodes(2, "1000 GB/s"))
        for s in (whole, cut)
    )  # fmt: skip
    assert two.parts["pipelines"] == pytest.approx(one.parts["pipelines"] / 2, rel=0.1)


def test_random_plans_have_a_prediction() -> None:
    rng = random.Random(3)
    for _ in range(10):
        ranks = list(range(rng.randint(2, 8)))
        stage = {"ranks": ranks, "layers": [0, TINY.num_layers]} | random_context(rng, ranks, SEQ, TINY.num_heads)
        spelled = {
            "seq_length": SEQ, "global_batch_size": 4,
            "pipelines": [{"micro_batch_size": 2, "num_micro_batches": 2, "stages": [stage]}],
        }  # fmt: skip
        found = predict(plan_from_dict(spelled, TINY), TINY, nodes(len(ranks)))
        assert found.step_seconds > 0
