"""Plans with activations in host memory: against exhaustive search, where links are known, what is said of them,
and their memory as a dry run counts it."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.cluster.dump import document
from hetero_megatron.dry_run.one_rank import run_rank
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.report.comparison import BRIEF, summarize
from hetero_megatron.planner.report.text import format_summary
from hetero_megatron.planner.search.driver import SearchResult, search
from hetero_megatron.planner.template.plan_template import StageTemplate
from hetero_megatron.plans import Plan, dump_yaml, validate
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import ModelSpec, load_model
from tests.support.planner_reference import Case, Exhaustive, random_case
from tests.support.selection import quick

NODES = (("a", "512 GiB"), ("b", "1 MiB"))


def problem(case: Case, schedules: str = "never", **space: Any) -> PlanningProblem:
    options = SearchOptions(space=SearchSpace(more_schedules=schedules, **space))
    return PlanningProblem(case.model, case.cluster, case.seq_length, case.batch, options)


def with_hosts(case: Case, rate: float, memory: str = "") -> Case:
    """``rate``: bytes/s of all chips' links to their hosts."""
    data = document(case.cluster)
    for chip in data["chips"].values():
        chip["host_bandwidth"] = f"{rate} B/s"
    for node in data["nodes"] if memory else ():
        node["host_memory"] = memory
    return replace(case, cluster=cluster_from_dict(data))


def found(case: Case, **space: Any) -> SearchResult | None:
    try:
        return search(problem(case, offload="never", **space))
    except UserError:
        return None


def away(plan: Plan) -> list[int]:
    return [s.activations.layers for s in plan.stages if s.activations is not None]


@pytest.mark.parametrize("seed", quick(range(10), (8,), (1, 3)))
def test_as_good_as_exhaustive_search(seed: int) -> None:
    """The reference tries the first n layers beside every recompute. Of plans that are within 1 % of each other, one
    that leaves activations on the chips is taken."""
    case = random_case(100 + seed, "open")
    case = with_hosts(case, random.Random(seed).choice([2e9, 2e10, 2e11]))
    mine, without = found(case), found(case, offload_activations="never")
    scorer = make_scorer(problem(case))
    if mine is None:
        assert without is None
        assert Exhaustive(case, scorer, math.inf, away=True).run() == math.inf
        return
    validate(mine.best.plan, case.model, case.cluster, dtype="bf16")
    assert not mine.best.prediction.over
    assert without is None or mine.best.step_seconds <= without.best.step_seconds * 1.01
    score = scorer.score(mine.best.template)
    assert score is not None
    assert score.step_seconds <= 1.01 * Exhaustive(case, scorer, score.step_seconds, away=True).run()


def long(memory: str = "6 GiB", host: str | None = "25 GB/s", tflops: float = 40, **node: str) -> Case:
    """Two chips whose activations are what they have no room for."""
    chip: dict[str, Any] = {"memory": memory, "tflops": {"bf16": tflops, "fp32": tflops}, "memory_bandwidth": "1 TB/s"}
    chip["communicators"] = {"each": "1 B", "peer": "1 B"}
    data = {
        "nodes": [{"name": "n", "chip": "c", "count": 2} | node],
        "chips": {"c": chip | ({} if host is None else {"host_bandwidth": host})},
        "links": {"inter_node": {"bandwidth": "10 GB/s", "latency": "10 us"}},
    }
    model = ModelSpec("small", "llama", 8, 1024, 4096, 8, 8, 128, 8000, 65536)
    return Case(model, cluster_from_dict(data), 16384, 8)


def test_the_report_says_why_and_what_recompute_would_cost() -> None:
    case = long()
    mine, without = found(case), found(case, offload_activations="never")
    assert mine is not None and without is not None
    assert away(mine.best.plan) and mine.best.step_seconds < without.best.step_seconds * 0.97
    text = format_summary(summarize(mine, problem(case), BRIEF))
    (line, *_) = [x for x in text.splitlines() if "offloads the activations of" in x]
    assert "GB/s of 20 of the host link, saves" in line and "host_memory: in the cluster file" in line
    assert "in its place would take" in text and "layers in host memory" in text
    assert not [s for s in without.best.plan.stages if s.activations is not None]


def test_unknown_links_are_left_out_and_named() -> None:
    case = long(host=None)
    mine, always = found(case), found(case, offload_activations="always")
    assert mine is not None and not away(mine.best.plan)
    text = format_summary(summarize(mine, problem(case), BRIEF))
    assert "not tried on c, whose link to the host is unknown: chips: {c: {host_bandwidth: 25 GB/s}}" in text
    assert always is not None and away(always.best.plan), "at the rate that is assumed"
    with pytest.raises(UserError, match=r"--offload-activations.*--recompute"):
        problem(case, offload_activations="always", recompute="full").check()


def test_a_slow_link_is_left_alone() -> None:
    mine, without = found(long(host="0.2 GB/s")), found(long(), offload_activations="never")
    assert mine is not None and without is not None and mine.best.step_seconds <= without.best.step_seconds
    assert sum(away(mine.best.plan)) < 8


def test_what_the_host_has_no_memory_for_is_not_planned_and_refused() -> None:
    free, small = long(), long(host_memory="2 GiB")
    mine = found(small)
    assert mine is not None
    for rank, memory in mine.best.prediction.memory.items():
        assert memory.host <= 2 << 30, rank
    chosen = found(free)
    assert chosen is not None and max(m.host for m in chosen.best.prediction.memory.values()) > 2 << 30
    over = predict(chosen.best.plan, small.model, small.cluster)
    with pytest.raises(UserError, match=r"node n-\d needs .* of its 2.* GiB of host memory: over by"):
        over.require_fit()
    assert cluster_from_dict(document(small.cluster)) == small.cluster


def test_memory_of_a_chosen_plan_is_that_of_a_dry_run(tmp_path: Path) -> None:
    """Of device and host; PyTorch's own operators make one more tensor in SwiGLU's backward than fused kernels do."""
    model = replace(load_model("tiny"), hidden_size=256, ffn_hidden_size=768, max_position_embeddings=4096)
    case = replace(long("0.75 GiB", "200 GB/s", 2), model=model, seq_length=2048, batch=4)
    space = SearchSpace((2,), inner_dp=False, more_schedules="never", offload="never")
    best = search(PlanningProblem(model, case.cluster, 2048, 4, SearchOptions("fp32", space=space))).best
    assert away(best.plan)
    (tmp_path / "plan.yaml").write_text(dump_yaml(best.plan))
    words = ["--plan", str(tmp_path / "plan.yaml"), "--model", "tiny", "--dry-run"]
    run = replace(configure([*words, "--max-position-embeddings", "4096"], {}), spec=model)
    dry, known = run_rank(run, 0), best.prediction.memory[0]
    assert dry.activations == known.host > 0
    device = known.total - known.overhead - known.communicators
    product = 2 * 2048 * model.ffn_hidden_size * 4
    assert -0.01 * dry.peak <= dry.peak - device <= product + 0.01 * dry.peak


def test_a_stage_with_modules_keeps_its_activations() -> None:
    """Modules that predict further tokens are not built beside activations in host memory."""
    case = long(host_memory="64 GiB")
    mine = found(replace(case, model=replace(case.model, mtp_layers=1)))
    assert mine is not None and not away(mine.best.plan)
    with pytest.raises(UserError, match=r"--offload-activations.*--mtp-num-layers 0"):
        problem(replace(case, model=replace(case.model, mtp_layers=1)), offload_activations="always").check()


@pytest.mark.slow
def test_a_plan_is_worth_the_host_memory() -> None:
    """By 1 % of a step: else the same with recompute is taken. Links from useless to fast."""
    without = found(long(), offload_activations="never")
    assert without is not None
    for rate in (4, 7, 12):
        mine = found(long(host=f"{rate} GB/s"))
        assert mine is not None and mine.best.step_seconds <= without.best.step_seconds * 1.01
        assert not away(mine.best.plan) or mine.best.step_seconds < without.best.step_seconds, rate


def test_nodes_with_unlike_hosts_are_no_one_group() -> None:
    data = document(long().cluster)
    (node,) = data["nodes"]
    data["nodes"] = [{**node, "name": name, "count": 1, "host_memory": size} for name, size in NODES]
    for order in (data["nodes"], data["nodes"][::-1]):
        pool = make_scorer(problem(replace(long(), cluster=cluster_from_dict({**data, "nodes": order})))).pool
        assert [group.nodes for group in pool.groups] == [1, 1]


def test_activations_get_the_host_memory_that_offloaded_optimizers_leave() -> None:
    """What tables choose fits there together with the states; a node in which there is just room for activations has
    none for them where the states are, too."""
    found: dict[tuple[float, bool], int] = {}
    for gib, offload in itertools.product((1.0, 2.0, 3.0, 3.5, 4.0, 9.0), (True, False)):
        scorer = make_scorer(problem(long(memory="5 GiB", host_memory=f"{gib} GiB"), offload="always"))
        stage = scorer.tables.fastest(StageTemplate(0, 1, 1, 6, "none", offload=offload), 1, False, False, 1, 1.0)
        assert stage is not None
        choice = scorer.tables.choice(stage, False, False)
        kept = sum(scorer.costs.host_layers(choice, 1)) if stage.away else 0
        assert not stage.away or scorer.costs.host_states(choice, 1.0) + kept <= gib * 2**30
        found[gib, offload] = stage.away
    assert found[9.0, True] > 0 and any(found[gib, False] > found[gib, True] for gib, _ in found)
