"""Context groups in the search: never worse, within the bound, executable, and said why."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.cli import main
from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.cluster.subset import shrink
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.lower_bounds import work_bound
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import LONG, PlanningProblem, SearchOptions, SearchSpace, why_no_context
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.whatif.replan import WarmPlanner
from hetero_megatron.plans import load_plan, plan_from_dict
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import load_model
from tests.support.random_plans import random_context

MODEL = replace(load_model("llama3-8b"), max_position_embeddings=1 << 20, num_layers=3)


def cluster(fast: int, slow: int, per_node: int = 1, memory: str = "80 GiB", bandwidth: str = "25 GB/s") -> Cluster:
    chips = {
        name: {"memory": memory, "dtypes": ["bf16"], "tflops": {"bf16": speed}, "memory_bandwidth": "2 TB/s"}
        for name, speed in (("fast", 400), ("slow", 150))
    }
    nodes = [
        {"name": name, "chip": name, "count": count, "chips_per_node": per_node}
        for name, count in (("fast", fast), ("slow", slow))
        if count
    ]
    links = {"inter_node": {"bandwidth": bandwidth, "latency": "5 us"}}
    used = {n["chip"] for n in nodes}
    return cluster_from_dict({"nodes": nodes, "chips": {k: v for k, v in chips.items() if k in used}, "links": links})


def options(context: str) -> SearchOptions:
    return SearchOptions(space=SearchSpace(context=context, more_schedules="never"), top=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fast", "slow", "length", "batch"), [(2, 0, 65536, 1), (1, 1, 65536, 2), (2, 1, 16384, 3), (1, 1, 4096, 4)]
)
def test_context_never_makes_the_best_plan_worse(fast: int, slow: int, length: int, batch: int) -> None:
    """Beside the plans without, and beside every grouping of all ranks into one stage with equal or fair shares."""
    where = cluster(fast, slow)
    without, with_ = (search(PlanningProblem(MODEL, where, length, batch, options(c))) for c in ("never", "always"))
    assert with_.best.step_seconds <= without.best.step_seconds
    assert with_.best.step_seconds >= work_bound(with_.scorer, MODEL, batch)
    for seconds in _one_stage_plans(where, fast, slow, length, batch):
        # The scheduler's units and the block sizes tried are coarser than nothing at all.
        assert with_.best.step_seconds <= 1.02 * seconds
    assert without.context == "not tried: --context never" and "structures tried" in with_.context


def _one_stage_plans(where: Cluster, fast: int, slow: int, length: int, batch: int) -> list[float]:
    world, heads, found = fast + slow, MODEL.num_heads, []
    speeds = [400] * fast + [150] * slow
    for sizes in ([world], [1] * world):
        for weights, recompute, parts in itertools.product(([1] * world, speeds), ("none", "full"), (1, 4)):
            tokens = [length * w // sum(weights) for w in weights]
            tokens[0] += length - sum(tokens)
            groups, at = [], 0
            for size in sizes:
                mine = list(range(at, at + size))
                share = [heads * weights[r] // sum(weights[r] for r in mine) for r in mine]
                share[0] += heads - sum(share)
                groups.append({"ranks": mine, "tokens": [tokens[r] for r in mine], "heads": share})
                at += size
            stage: dict[str, Any] = {
                "ranks": list(range(world)), "layers": [0, MODEL.num_layers], "context": groups, "recompute": recompute,
            }  # fmt: skip
            if len(sizes) > 1:
                stage["kv"] = {"transport": "ring", "block": min(tokens) // parts}
            data = {
                "seq_length": length, "global_batch_size": batch,
                "pipelines": [{"micro_batch_size": 1, "num_micro_batches": batch, "stages": [stage]}],
            }  # fmt: skip
            one = predict(plan_from_dict(data, MODEL), MODEL, where)
            if not one.over:
                found.append(one.step_seconds)
    return found


def test_no_random_context_plan_is_below_the_bound() -> None:
    where = cluster(3, 3)
    rng = random.Random(5)
    scorer = make_scorer(PlanningProblem(MODEL, where, 4096, 1, options("always")))
    for _ in range(12):
        ranks = list(range(rng.randint(2, 6)))
        stage = {"ranks": ranks, "layers": [0, MODEL.num_layers]} | random_context(rng, ranks, 4096, MODEL.num_heads)
        stage.pop("kv", None)
        data = {
            "seq_length": 4096, "global_batch_size": 4,
            "pipelines": [{"micro_batch_size": 2, "num_micro_batches": 2, "stages": [stage]}],
        }  # fmt: skip
        plan = plan_from_dict(data, MODEL)
        assert predict(plan, MODEL, where).step_seconds >= work_bound(scorer, MODEL, 4)


def test_a_sequence_that_is_slow_on_one_chip_gets_context_groups() -> None:
    """Where TP may not cross nodes, context groups divide what one chip would compute alone."""
    where = cluster(4, 0)
    tight = SearchOptions(space=SearchSpace(max_tp=1, more_schedules="never"))
    found = search(PlanningProblem(MODEL, where, 131072, 2, tight))
    assert "context" in found.best.text and "; chosen" in found.context
    for rank, memory in found.best.prediction.memory.items():
        assert memory.total <= found.best.prediction.limits[rank]
    assert found.best.plan.global_batch_size == 2 and not math.isinf(found.best.step_seconds)


def test_short_sequences_are_left_alone() -> None:
    assert why_no_context(SearchSpace(), LONG - 1, True).startswith("not tried: a sequence of 32767 tokens")
    assert (
        why_no_context(SearchSpace(), LONG, True)
        == why_no_context(SearchSpace(), 128, False)
        == why_no_context(SearchSpace(context="always"), 1, True)
        == ""
    )
    assert search(PlanningProblem(MODEL, cluster(1, 1), 2048, 4)).context.startswith("not tried")


def test_the_command_reports_context_and_its_plan_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where, out = tmp_path / "cluster.yaml", tmp_path / "plan.yaml"
    where.write_text(
        json.dumps({"nodes": [{"name": "h", "chip": "H100-SXM", "count": 2, "chips_per_node": 2}],
                    "links": {"inter_node": {"bandwidth": "50 GB/s"}}})
    )  # fmt: skip
    words = ["plan", "--model", "llama3-8b", "--cluster", str(where), "--seq-length", "32768", "--optimizer", "sgd"]
    words += ["--global-batch-size", "1", "--context", "always", "--more-schedules", "never"]
    words += ["--no-baselines", "--quiet"]
    assert main.main([*words, "--out", str(out), "--json"]) == 0
    shown = capsys.readouterr()
    data = json.loads(shown.out)
    assert "tried" in data["context"] and data["bound"]["step_seconds"] <= data["step_seconds"]
    assert "--max-position-embeddings 32768" in shown.err
    model = replace(load_model("llama3-8b"), max_position_embeddings=32768)
    assert load_plan(out, model).fingerprint() == data["fingerprint"]


def test_what_fits_nowhere_else_gets_context_groups_whatever_its_length() -> None:
    where, model = cluster(4, 0, memory="7 GiB"), replace(MODEL, num_layers=1, vocab_size=256)
    space = SearchSpace(max_tp=1, recompute="none", micro_batch_sizes=(1,), context="never", more_schedules="never")
    with pytest.raises(UserError, match="fits in no plan"):
        search(PlanningProblem(model, where, 30000, 1, SearchOptions(space=space)))
    found = search(PlanningProblem(model, where, 30000, 1, SearchOptions(space=replace(space, context="auto"))))
    assert found.context.endswith("because nothing fits without") and "context" in found.best.text


@pytest.mark.slow
def test_planning_again_after_a_loss_knows_context_groups() -> None:
    """Whichever node goes, prepared or not: a valid plan, hardly slower than what a new search finds."""
    where, length, batch = cluster(2, 2), 1 << 17, 2
    planner = WarmPlanner(PlanningProblem(MODEL, where, length, batch, options("always")))
    assert planner.result.best.text
    found = {}
    for prepared in (False, True):
        for node in ("fast-0", "fast-1", "slow-1"):
            plan, own, seconds = planner.without([node])
            assert seconds == pytest.approx(predict(plan, MODEL, own).step_seconds, rel=1e-9)
            assert found.setdefault(node, seconds) == seconds
        planner.prepare() if not prepared else None
    assert found["fast-0"] == found["fast-1"] > found["slow-1"]
    again = search(PlanningProblem(MODEL, shrink(where, [0, 2, 3]), length, batch, options("always")))
    assert found["fast-1"] <= 1.02 * again.best.step_seconds
