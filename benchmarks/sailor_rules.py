"""Our planner under Sailor's cost rules: a cost model and an scorer that stand in for ours.

What changes is only what a stage costs and what a plan may look like (everything that its format can say: equal layer
splits and one micro-batch size in all pipelines, degrees and sizes that were profiled). The search is the planner's.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from benchmarks.sailor_judge import BYTES_PER_PARAMETER, FLOAT, FRAMEWORK_BYTES, Judge, Replica
from hetero_megatron.cluster import Cluster
from hetero_megatron.planner.estimate.pipeline_score import TemplateBounds
from hetero_megatron.planner.estimate.stage_tables import StageTables
from hetero_megatron.planner.estimate.template_score import TemplateScore, TemplateScorer
from hetero_megatron.planner.problem import SearchSpace
from hetero_megatron.planner.template.device_pool import make_pool
from hetero_megatron.planner.template.plan_template import PipelineTemplate, PlanTemplate, in_flight
from hetero_megatron.predictor.cost.cost_options import CostOptions, StageChoice
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.link_model import LinkPrice
from hetero_megatron.predictor.cost.rates import ChipRates, LayerRow, LinkRates, Rates, model_fingerprint
from hetero_megatron.spec import ModelSpec

GPUS = {"A100-40-SXM": "A100-40", "V100-16": "V100-16"}  # our names -> Sailor's
SIZES = (1, 2, 4, 8)
NOWHERE = 1 << 50  # bytes of what was not profiled
SPACE = SearchSpace(SIZES, "none", inner_dp=False, max_tp=4, over_nodes=False)


class SailorCosts(CostModel):
    """Profiled seconds, Sailor's memory rule and network table."""

    def __init__(self, judge: Judge, model: ModelSpec, cluster: Cluster) -> None:
        self.judge = judge
        super().__init__(model, cluster, 2048, "fp32", CostOptions(margin=0.0), profiled_rates(judge, model, cluster))

    def states(self, stage: StageChoice, replicas: float) -> tuple[int, int, int]:
        """24 bytes per parameter, unsharded."""
        if str(stage.tp) not in self.judge.info:
            return NOWHERE, 0, 0
        return int(BYTES_PER_PARAMETER * self._total(stage, "params_floats")), 0, 0

    def activation_bytes(self, stage: StageChoice, micro_batch_size: int) -> tuple[int, int]:
        """What was profiled per layer, for each micro-batch in flight."""
        tp, size = str(stage.tp), str(micro_batch_size)
        if tp not in self.judge.profile[GPUS[stage.chip]].get(size, {}):
            return NOWHERE, 0
        return int(self._total(stage, "act_mem_floats") * FLOAT * micro_batch_size), 0

    def _total(self, stage: StageChoice, key: str) -> float:
        info, last = self.judge.info[str(stage.tp)], str(self.model.num_layers + 1)
        total: float = stage.layers * info["1"][key] + stage.embed * info["0"][key] + stage.head * info[last][key]
        return total

    def overhead(self, chip: str) -> int:
        return int(FRAMEWORK_BYTES)

    def buffering(self, stage: StageChoice, replicas: float) -> tuple[float, float, int, int]:
        return 0.0, 0.0, 0, 0

    def memory_limit(self, chip: str) -> int:
        return int(self.judge.gpus[GPUS[chip]]["mem_per_gpu"])

    def boundary_seconds(
        self, a: StageChoice, b: StageChoice, micro_batch_size: int, link: LinkPrice, sharing: int = 1,
        same_node: bool = False,
    ) -> float:  # fmt: skip
        data = self.judge.info["1"]["1"]["act_output_floats"] * FLOAT * micro_batch_size
        first, second = self._replica(a.chip, a.tp), self._replica(b.chip, b.tp)
        return self.judge.seconds(data, first, second, a.tp, b.tp)

    def _replica(self, chip: str, tp: int) -> Replica:
        return Replica(GPUS[chip], tp, self.judge.zone)


class _NoBounds(TemplateBounds):
    def lower_bound(self, template: PlanTemplate) -> float:
        return 0.0  # ours would bound other rules


class SailorScorer(TemplateScorer):
    """Step times by Sailor's closed form."""

    costs: SailorCosts

    def __init__(self, costs: SailorCosts) -> None:
        known = costs.rates
        pool = make_pool(costs.cluster, lambda a, b: known.link(a, b).as_link(), "fp32")
        layers = costs.model.num_layers
        super().__init__(StageTables(costs, pool, layers, min(layers + 2, pool.chips)), pool)
        self.bounds = _NoBounds(self, self.link_table)
        self._sync: dict[tuple[object, ...], float] = {}
        self._sums: dict[tuple[str, int, int], list[float]] = {}

    def score(self, candidate: PlanTemplate, limit: float = math.inf) -> TemplateScore | None:
        """None for what Sailor's format cannot say."""
        self.evaluated += 1
        parts = candidate.parts
        first = parts[0].shape
        layers = [s.layers for s in first.stages]
        if any(p.shape.micro_batch_size != first.micro_batch_size for p in parts):
            return None
        if any([s.layers for s in p.shape.stages] != layers for p in parts):
            return None
        if any(n > limit for n, limit in zip(candidate.usage(len(self.pool.groups)), self.pool.counts, strict=True)):
            return None
        count = max(p.num_micro_batches for p in parts)
        if count > -(-candidate.sequences // (candidate.pipelines * first.micro_batch_size)):
            return None  # its micro-batches are those of an equal division
        over = self._over(candidate)
        seconds = max(self.pipeline_seconds(p.shape, count, "1f1b") for p in parts)
        update = max(self._update(p.shape, s) for p in parts for s in range(len(layers)))
        sync = max(self._stage_sync(candidate, s) for s in range(len(layers)))
        return TemplateScore(seconds + update + sync, (seconds,) * len(parts), over)

    def pipeline_seconds(
        self,
        shape: PipelineTemplate,
        micro_batches: int,
        schedule: str,
        sharing: Sequence[int] | None = None,
    ) -> float:
        pairs = list(zip(shape.stages, shape.stages[1:]))
        both = [self.tables.boundary(a, b, shape.micro_batch_size, False) for a, b in pairs]
        link, back = [there for there, _ in both], [back for _, back in both]
        last = len(shape.stages) - 1
        sending = [(link[s] if s < last else 0.0) + (back[s - 1] if s else 0.0) for s in range(last + 1)]
        if last:
            sending[last] = 2 * back[-1]
            sending[0] = link[0] * (2 if last >= 3 else 1)
        compute = [self._compute(shape, s) for s in range(last + 1)]
        slowest = max(a + b for a, b in zip(compute, sending))
        return (micro_batches - 1) * slowest + sum(compute) + sum(sending)

    def _compute(self, shape: PipelineTemplate, stage: int) -> float:
        """Seconds of a micro-batch, layer by layer (the tables, which the search ranks by, have a median layer)."""
        found = shape.stages[stage]
        gpu, size, last = GPUS[self.pool.groups[found.group].chip], shape.micro_batch_size, len(shape.stages) - 1
        key = (gpu, found.tp, size)
        if key not in self._sums:
            rows = [sum(self.costs.judge.entry(gpu, found.tp, size, i)[:2]) for i in range(self.costs.judge.layers)]
            self._sums[key] = [0.0, *itertools.accumulate(rows)]
        start = sum(s.layers for s in shape.stages[:stage]) + 1
        end = start + found.layers
        return self._sums[key][end + (stage == last)] - self._sums[key][start - (stage == 0)]

    def _over(self, candidate: PlanTemplate) -> int:
        worst = 0
        for part in candidate.parts:
            last = len(part.shape.stages) - 1
            alive = in_flight("1f1b", last + 1, 1 << 30)  # Sailor's rule knows no number of micro-batches
            for s, stage in enumerate(part.shape.stages):
                choice = self.tables.choice(stage, s == 0, s == last)
                needs = self.costs.memory_bytes(choice, part.shape.micro_batch_size, alive[s], 1).total
                worst = max(worst, needs - self.costs.memory_limit(choice.chip))
        return worst

    def _update(self, shape: PipelineTemplate, stage: int) -> float:
        """Of the stage's first layer: all that Sailor counts."""
        found = shape.stages[stage]
        layer = int(stage > 0) + sum(s.layers for s in shape.stages[:stage])
        gpu = GPUS[self.pool.groups[found.group].chip]
        return self.costs.judge.entry(gpu, found.tp, shape.micro_batch_size, layer)[2]

    def _stage_sync(self, candidate: PlanTemplate, stage: int) -> float:
        """Replicas in the order of the parts."""
        rows = [(p.shape.stages[stage], p.copies) for p in candidate.parts]
        first = 1 + sum(s.layers for s in candidate.parts[0].shape.stages[:stage])
        ids = list(range(first, first + rows[0][0].layers))
        ids = [0] * (stage == 0) + ids
        if stage == len(candidate.parts[0].shape.stages) - 1:
            ids.append(self.costs.model.num_layers + 1)
        key = tuple((s.group, s.tp, n) for s, n in rows) + tuple(ids)
        if key not in self._sync:
            zone = self.costs.judge.zone
            replicas = [Replica(GPUS[self.pool.groups[s.group].chip], s.tp, zone) for s, n in rows for _ in range(n)]
            self._sync[key] = self.costs.judge.sync(replicas, ids)
        return self._sync[key]


def profiled_rates(judge: Judge, model: ModelSpec, cluster: Cluster) -> Rates:
    """The profile as whole-layer rows (the median of the equal layers), the table's bandwidth as links."""
    mark, chips = model_fingerprint(model), {}
    for chip, gpu in GPUS.items():
        tables: dict[str, list[LayerRow]] = {"layers": [], "embed": [], "head": []}
        for size in SIZES:
            for tp, entries in judge.profile[gpu].get(str(size), {}).items():
                inner = [entries[str(i)][:2] for i in range(1, model.num_layers + 1)]
                median = [statistics.median(column) for column in zip(*inner)]
                last = entries[str(model.num_layers + 1)]
                for name, (forward, backward) in (
                    ("embed", entries["0"][:2]), ("layers", median), ("head", last[:2]),
                ):  # fmt: skip
                    tables[name].append(LayerRow(mark, int(tp), size, 2048, forward, backward))
        rows = {name: tuple(found) for name, found in tables.items()}
        chips[chip] = ChipRates(
            chip, "fp32", 1e14, 1e14, 1e12, layers=rows["layers"], embed=rows["embed"], head=rows["head"],
            overhead_bytes=FRAMEWORK_BYTES, calibrated=True,
        )  # fmt: skip
    links: dict[tuple[str, str, bool], LinkRates] = {}
    groups = [(g.name, GPUS[g.chip]) for g in cluster.nodes]
    for name, gpu in groups:
        links[name, name, True] = LinkRates(0.0, 1e-30, same_node=True)  # TP is part of the profile
        for other, to in groups:
            row = judge.network[judge.zone][gpu]["4"][judge.zone][to]["4"]
            links[name, other, False] = LinkRates(0.0, 1 / row[1])
    return Rates(cluster, "fp32", chips, links)
