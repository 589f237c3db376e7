"""Plans with linear modules in fp8: prices are of what runs, and a stage is in fp8 only where that pays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.main import main as hetero_megatron
from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.dry_run.allocator import MemoryTracker
from hetero_megatron.dry_run.products import _product as chip_product
from hetero_megatron.dry_run.products import _quantise as chip_quantise
from hetero_megatron.dry_run.products import _quantise_whole as chip_quantise_whole
from hetero_megatron.errors import UserError
from hetero_megatron.ops.gemm_fp8 import Blockwise, Fp8Gemm, Quantised, Tensorwise, largest_of
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.search.incumbent import simulate_template
from hetero_megatron.plans import load_plan
from hetero_megatron.plans.fp8 import Fp8, backward_bytes
from hetero_megatron.plans.fp8_checks import fp8_fits
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.product_cost import quantised_bytes
from hetero_megatron.predictor.cost.rates import model_fingerprint
from hetero_megatron.predictor.simulate.stage_cost import StageCosts
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import load_model
from tests.support.selection import quick

MODEL = load_model("llama2-7b")
SMALL = replace(MODEL, num_layers=6)
BLOCKWISE, TENSORWISE = Fp8("hybrid", "blockwise"), Fp8("hybrid", "tensorwise")


def mixed(fast: int = 1, slow: int = 1, rates: dict[str, Any] | None = None, **h100: Any) -> Cluster:
    """Nodes of two H100 and of two A100, which lack fp8."""
    return cluster_from_dict({
        "nodes": [
            *([{"name": "h", "count": fast, "chip": "H100-SXM", "chips_per_node": 2}] if fast else []),
            *([{"name": "a", "count": slow, "chip": "A100-80-SXM", "chips_per_node": 2}] if slow else []),
        ],
        **({"chips": {"H100-SXM": h100}} if h100 else {}),
        "links": {"inter_node": {"bandwidth": "25 GB/s", "latency": "10 us"}},
        **({"rates": rates} if rates else {}),
    })  # fmt: skip


def costs_of(cluster: Cluster, fp8: Fp8 | None = BLOCKWISE, length: int = 2048) -> CostModel:
    return CostModel(MODEL, cluster, length, "bf16", CostOptions(fp8=fp8))


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write; views move none."""

    moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made, given = ([t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in (out, args))
        known = {t.untyped_storage()._cdata for t in given}
        if any(t.untyped_storage()._cdata not in known for t in made) or func._schema.name.endswith("_"):
            self.moved += sum(t.nbytes for t in made + given)
        return out


def kernels(recipe: str, traffic: Traffic | None = None) -> Fp8Gemm:
    """As a chip has them: the product's own operands are not counted, turning one that is not adjacent is."""

    def product(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
        for x in (a.data, b.data):
            if traffic is not None and not x.is_contiguous():
                traffic.moved += 2 * x.nbytes
        before = traffic.moved if traffic is not None else 0
        made = chip_product(a, b, dtype)
        if traffic is not None:
            traffic.moved = before
        return made

    def quantise(x: torch.Tensor, kind: torch.dtype, blocks: str) -> Quantised:
        before = traffic.moved if traffic is not None else 0
        found = chip_quantise(x, kind, blocks)
        if traffic is not None:
            traffic.moved = before + x.nbytes + found.data.nbytes + found.scale.nbytes * (blocks != "128x128")
        return found

    def quantise_whole(
        x: torch.Tensor, kind: torch.dtype, largest: torch.Tensor, turned: bool
    ) -> list[Quantised]:
        before = traffic.moved if traffic is not None else 0
        found = chip_quantise_whole(x, kind, largest, turned)
        if traffic is not None:
            traffic.moved = before + x.nbytes + sum(each.data.nbytes for each in found)
        return found

    return Fp8Gemm(Tensorwise(product, quantise_whole) if recipe == "tensorwise" else Blockwise(product, quantise))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_the_bytes_that_quantising_moves_are_those_of_the_operators(recipe: str, dtype: torch.dtype) -> None:
    m, n, k = 2048, 4096, 1024
    with FakeTensorMode():
        x, w, dy = (torch.empty(s, dtype=dtype) for s in ((1, m, k), (n, k), (1, m, n)))
        into, found = torch.empty(n, k), []
        for part in range(3):
            with Traffic() as traffic:
                gemm = kernels(recipe, traffic)
                most = [largest_of(t) if recipe == "tensorwise" else None for t in ((x, w), (dy,), ())[part]]
                if part == 0:
                    gemm.forward(x, w, None, True, *most)
                elif part == 1:
                    gemm.input(dy, w, True, *most, torch.empty(()) if recipe == "tensorwise" else None)
                else:
                    largest = (torch.empty(1), torch.empty(1)) if recipe == "tensorwise" else (None, None)
                    gemm.weight(dy, x, True, into, 1.0, *largest)
                    traffic.moved -= 2 * into.nbytes  # the sum is read and written in any dtype
            found.append(traffic.moved)
    assert found == pytest.approx(list(quantised_bytes(recipe, m, n, k, dtype.itemsize)), rel=1e-3)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize(("n", "k"), [(512, 2048), (2048, 512), (128, 4096)])
def test_what_backward_needs_for_a_while_is_what_it_allocates(
    recipe: str, dtype: torch.dtype, rows: int, n: int, k: int
) -> None:
    length, gemm = 256, kernels(recipe)
    tensorwise = recipe == "tensorwise"
    with FakeTensorMode(), MemoryTracker() as memory:
        x, w, dy = (torch.empty(s, dtype=dtype) for s in ((rows, length, k), (n, k), (rows, length, n)))
        into, largest = torch.empty(n, k), (torch.empty(rows), torch.empty(rows), torch.empty(()))
        there = memory.live
        if tensorwise:
            largest_of(dy)
        x_max, dy_max, w_max = largest if tensorwise else (None, None, None)
        dx = gemm.input(dy, w, True, dy_max, w_max)
        gemm.weight(dy, x, True, into, 1.0, dy_max, x_max)
        del dx
    expected = backward_bytes(recipe, rows, length, n, k, dtype.itemsize)
    assert memory.peak - there == pytest.approx(expected, rel=2e-3)


def test_only_linear_modules_cost_something_else_in_fp8() -> None:
    costs = costs_of(mixed())
    plain, quantised = (costs.operators("H100-SXM", fp8) for fp8 in (False, True))
    size = (0.5, 2, 2048)
    for part in ("embed", "head", "attention"):
        assert getattr(plain, part)(*size) == getattr(quantised, part)(*size)
    assert plain.exchange(*size, 1e-3) == quantised.exchange(*size, 1e-3)
    before, after = plain.layer(*size), quantised.layer(*size)
    assert all(b / 2 < a < b for a, b in zip(after, before, strict=True))  # twice the rate, quantising is not free
    assert sum(quantised.split_layer(*size)) == pytest.approx(after[1])


def test_what_was_measured_counts() -> None:
    rates = {"chips": {"H100-SXM": {"fp8_blockwise": {"gemm": [[4096, 4096, 4096, 1e-3], [4096, 8192, 4096, 3e-3]]}}}}
    products = costs_of(mixed(rates=rates)).operators("H100-SXM", True).fp8
    assert products is not None
    assert products.seconds(4096, 4096, 4096).forward == pytest.approx(1e-3)
    assert products.seconds(4096, 8192, 4096).forward == pytest.approx(3e-3)
    given = {"H100-SXM": {"fp8_blockwise": {"gemm_flops": 3e14}}}
    slow, fast = (costs_of(mixed(rates=r)) for r in ({"chips": given}, None))
    assert slow.operators("H100-SXM", True).layer(1, 1, 2048) > fast.operators("H100-SXM", True).layer(1, 1, 2048)
    with pytest.raises(UserError, match="fp8_blockwise"):
        costs_of(mixed(rates={"chips": {"H100-SXM": {"fp8_blockwise": {"gem": []}}}}))


def test_layers_that_were_measured_without_fp8_shrink_by_what_products_save() -> None:
    print_ = model_fingerprint(MODEL)
    rows = {"bf16": {"layers": [[print_, 1, 1, 2048, 0.01, 0.02]], "embed": [[print_, 1, 1, 2048, 1e-4, 1e-4]]}}
    costs, cold = (costs_of(mixed(rates=r)) for r in ({"chips": {"H100-SXM": rows}}, None))
    plain, quantised = (costs.operators("H100-SXM", fp8).layer(1, 1, 2048) for fp8 in (False, True))
    ratios = [costs_of_layer(cold, True)[i] / costs_of_layer(cold, False)[i] for i in (0, 1)]
    assert plain == (0.01, 0.02)
    assert quantised == pytest.approx((0.01 * ratios[0], 0.02 * ratios[1]))
    rows["fp8_blockwise"] = {"layers": [[print_, 1, 1, 2048, 0.004, 0.009]]}
    measured = costs_of(mixed(rates={"chips": {"H100-SXM": rows}}))
    assert costs_of_layer(measured, True) == (0.004, 0.009) and costs_of_layer(measured, False) == (0.01, 0.02)


def costs_of_layer(costs: CostModel, fp8: bool) -> tuple[float, float]:
    return costs.operators("H100-SXM", fp8).layer(1, 1, 2048)


SPACE = SearchSpace(micro_batch_sizes=(1, 2), more_schedules="never")


def problem(cluster: Cluster, fp8: Fp8 | None, batch: int = 8, space: SearchSpace = SPACE) -> PlanningProblem:
    return PlanningProblem(SMALL, cluster, 2048, batch, SearchOptions(costs=CostOptions(fp8=fp8), space=space))


@pytest.mark.parametrize("fp8", quick([BLOCKWISE, TENSORWISE], []), ids=str)
def test_a_plan_that_may_use_fp8_is_never_slower_and_says_who_does(fp8: Fp8) -> None:
    space = replace(SPACE, recompute="none")
    for fast, slow, batch in ((1, 1, 8), (2, 0, 16), (0, 1, 4)):
        cluster = mixed(fast, slow)
        plain, found = (search(problem(cluster, each, batch, space)).best for each in (None, fp8))
        assert found.step_seconds <= plain.step_seconds * (1 + 1e-9)
        stages = [stage for pipeline in found.plan.pipelines for stage in pipeline.stages if stage.num_layers]
        assert {stage.dtype for stage in stages} <= {"fp8", "bf16"}
        assert all(stage.dtype == "bf16" for stage in stages if stage.chip == "A100-80-SXM")
        fp8_fits(found.plan, SMALL, fp8, "bf16", cluster)
        if fast:
            assert found.step_seconds < 0.95 * plain.step_seconds
            assert set(found.prediction.dtypes.values()) >= {str(fp8)}
        assert predict(found.plan, SMALL, cluster, "bf16", options=CostOptions(fp8=fp8)).step_seconds == pytest.approx(
            found.step_seconds
        )


def test_estimates_of_templates_and_predictions_of_their_plans_take_the_same_seconds() -> None:
    """Of four layers, among the best are pipelines that differ in nothing but their micro-batches."""
    asked = problem(mixed(), BLOCKWISE, space=replace(SPACE, recompute="none"))
    asked = replace(asked, model=replace(MODEL, num_layers=4))
    scorer = make_scorer(asked)
    for template in search(asked, scorer=scorer).ranked[:6]:
        simulated = simulate_template(template, asked, scorer)
        assert simulated is not None
        known = StageCosts(simulated.plan, scorer.costs)
        shapes = {
            (shape.micro_batch_size, *((scorer.pool.groups[s.group].chip, s.layers, s.tp, s.dp) for s in shape.stages)):
            shape for shape in (part.shape for part in template.parts)
        }  # fmt: skip
        for pipeline in simulated.plan.pipelines:
            costs, stages = known.of(pipeline).costs, pipeline.stages
            kinds = [(s.chip, s.num_layers, len(s.units[0].ranks), len(s.units)) for s in stages]
            forward, backward = scorer.stage_seconds(shapes[pipeline.micro_batch_size, *kinds])
            messages = [
                scorer.costs.chip_rates(stage.chip).message_seconds * ((s > 0) + (s < len(stages) - 1))
                for s, stage in enumerate(stages)
            ]
            assert [a - m for a, m in zip(forward, messages, strict=True)] == pytest.approx(list(costs.forward))
            assert [a - m for a, m in zip(backward, messages, strict=True)] == pytest.approx(list(costs.backward))


@pytest.mark.slow
def test_where_what_fp8_needs_for_a_while_does_not_fit_there_is_a_plan_without() -> None:
    """The memory is just enough for the best plan without fp8, whose largest rank it leaves nothing."""
    roomy = search(problem(mixed(1, 0), None)).best.prediction
    least = max(m.total for m in roomy.memory.values())
    for part in (1.0, 1.002, 1.05):
        cluster = mixed(1, 0, memory=f"{int(least * part / 0.94) + 1} B")
        plain, found = (search(problem(cluster, each)).best for each in (None, BLOCKWISE))
        assert found.step_seconds <= plain.step_seconds * (1 + 1e-9)


def test_a_plan_keeps_what_fp8_it_was_made_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, out = tmp_path / "cluster.yaml", str(tmp_path / "plan.yaml")
    cluster.write_text(
        "nodes: [{name: h, count: 1, chip: H100-SXM, chips_per_node: 1}, {name: a, count: 1, chip: A100-80-SXM, "
        "chips_per_node: 1}]\nlinks: {inter_node: {bandwidth: 25 GB/s, latency: 10 us}}\n"
    )
    flags = ["--fp8-format", "hybrid", "--fp8-recipe", "blockwise"]
    line = ["--model", "tiny", "--cluster", str(cluster)]
    sizes = ["--seq-length", "64", "--global-batch-size", "4"]
    assert hetero_megatron(["plan", *line, *sizes, "--out", out, "--quiet", "--no-baselines", *flags]) == 0
    assert "linear modules in" in capsys.readouterr().out
    plan = load_plan(out, load_model("tiny"))
    assert plan.made_for is not None and plan.made_for.fp8 == BLOCKWISE
    run = configure(["--dry-run", "--plan", out], {})
    assert run.fp8 == BLOCKWISE and any("fp8 (hybrid, blockwise)" in notice for notice in run.notices)
    assert hetero_megatron(["predict", "--plan", out, "--cluster", str(cluster)]) == 0
    assert "linear modules in" in capsys.readouterr().out
    with pytest.raises(UserError, match="made for fp8"):
        configure(["--dry-run", "--plan", out, "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"], {})
    for wrong in (["--fp8-format", "e4m3"], ["--fp8-recipe", "blockwise"]):
        assert hetero_megatron(["plan", *line, *sizes, "--quiet", *wrong]) == 2
