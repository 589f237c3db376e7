"""Uniform plans, as Megatron's flags describe them: the baseline, and seeds of the search.

Every stage has the same TP degree and (as evenly as possible) the same layers, every replica the same share of the
batch, and recompute is the same everywhere. Ranks are numbered in the order of the cluster file: tensor parallel
fastest, then data parallel, then pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from hetero_megatron.planner.estimate.pipeline_time import closed_form
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.incumbent import Incumbent
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import (
    PipelineReplicas,
    PipelineTemplate,
    PlanTemplate,
    StageTemplate,
    in_flight,
)
from hetero_megatron.plans.importers.megatron_stages import MegatronParallel
from hetero_megatron.spec import ModelSpec

SIZES = (1, 2, 4, 8)
SEEDS = 4
RECOMPUTES = ("none", "selective", "full")


@dataclass(frozen=True)
class UniformPlan:
    """Degrees of a uniform plan."""

    tp: int
    pp: int
    dp: int
    micro_batch_size: int
    recompute: str

    def flags(self, seq_length: int, batch: int) -> MegatronParallel:
        return MegatronParallel(
            world_size=self.tp * self.pp * self.dp, seq_length=seq_length, micro_batch_size=self.micro_batch_size,
            global_batch_size=batch, tensor_model_parallel_size=self.tp, pipeline_model_parallel_size=self.pp,
            recompute_granularity=None if self.recompute == "none" else self.recompute,
            recompute_method="uniform" if self.recompute == "full" else None,
            recompute_num_layers=1 if self.recompute == "full" else None,
        )  # fmt: skip

    def text(self) -> str:
        return (
            f"tp {self.tp}, pp {self.pp}, dp {self.dp}, micro-batch {self.micro_batch_size}, recompute {self.recompute}"
        )


def uniform_plans(
    pool: DevicePool,
    model: ModelSpec,
    batch: int,
    recomputes: tuple[str, ...] = RECOMPUTES,
    sizes: tuple[int, ...] = SIZES,
) -> Iterator[tuple[UniformPlan, PlanTemplate]]:
    """Every uniform plan over all chips of the pool whose TP groups lie inside nodes."""
    chips = pool.chips
    ranks = sorted((r, g, n) for g, group in enumerate(pool.groups) for n, node in enumerate(group.ranks) for r in node)
    node_of = [(g, n) for _, g, n in ranks]
    for tp in range(1, chips + 1):
        if chips % tp or tp > model.num_heads:
            continue
        blocks = [node_of[i : i + tp] for i in range(0, chips, tp)]
        if any(len(set(block)) > 1 for block in blocks):
            continue
        groups = [block[0][0] for block in blocks]
        for pp in range(1, min(len(blocks), model.num_layers) + 1):
            if len(blocks) % pp:
                continue
            dp = len(blocks) // pp
            if batch % dp:
                continue
            per_stage, remainder = divmod(model.num_layers, pp)
            counts = Counter(zip(*(groups[p * dp : (p + 1) * dp] for p in range(pp))))
            for size in sizes:
                if batch % (dp * size):
                    continue
                for recompute in recomputes:
                    parts = tuple(
                        PipelineReplicas(
                            PipelineTemplate(
                                size,
                                tuple(
                                    StageTemplate(g, tp, 1, per_stage + (p < remainder), recompute)
                                    for p, g in enumerate(key)
                                ),
                            ),
                            copies,
                            batch // (dp * size),
                        )
                        for key, copies in counts.items()
                    )
                    yield UniformPlan(tp, pp, dp, size, recompute), PlanTemplate(parts)


class UniformSeeds:
    """Proposes the best few uniform plans, if the search space allows all of them; they stay in the incumbent as seeds.
    ``counts``: chips per group, of whole nodes; None: all."""

    def __init__(self, counts: tuple[int, ...] | None = None) -> None:
        self.counts = counts

    def propose(self, problem: PlanningProblem, incumbent: Incumbent) -> bool:
        space = problem.space
        if space.micro_batch_sizes is not None or space.recompute is not None or space.max_pipelines is not None:
            return True
        for _, template in top_uniform_plans(problem, incumbent.scorer, SEEDS, self.counts)[0]:
            incumbent.offer(template)
            if incumbent.should_stop():
                break
        incumbent.seeds[:] = incumbent.rows
        return not incumbent.should_stop()


def top_uniform_plans(
    problem: PlanningProblem, scorer: TemplateScorer, most: int, counts: tuple[int, ...] | None = None
) -> tuple[list[tuple[UniformPlan, PlanTemplate]], list[tuple[UniformPlan, PlanTemplate]]]:
    """(the ``most`` fastest uniform plans by closed form; those passed over because they do not fit). Only plans with
    good slowest-stage times are scored. ``counts``: chips per group; None: all."""
    rough: list[tuple[float, int, UniformPlan, PlanTemplate]] = []
    pool = scorer.pool if counts is None else scorer.pool.part(counts)
    for i, (uniform, template) in enumerate(uniform_plans(pool, problem.model, problem.global_batch_size)):
        seconds = max(_bottleneck_seconds(scorer, part) for part in template.parts[:8])
        rough.append((seconds, i, uniform, template))
    rough.sort(key=lambda row: row[:2])
    rows: list[tuple[float, int, UniformPlan, PlanTemplate]] = []
    over: list[tuple[UniformPlan, PlanTemplate]] = []
    for _, i, shape, template in rough:
        if len(rows) >= 3 * most:
            break
        if any(bytes_over > 0 for bytes_over in _bytes_over_by_stage(scorer, template)):
            over.append((shape, template))
        else:
            rows.append((closed_seconds(scorer, template), i, shape, template))
    rows.sort(key=lambda row: row[:2])
    return [(shape, template) for _, _, shape, template in rows[:most]], over


def closed_seconds(scorer: TemplateScorer, template: PlanTemplate) -> float:
    """Closed-form seconds of the pipelines of a uniform plan."""
    return max(
        closed_form(*scorer.stage_seconds(part.shape), scorer.links(part.shape), part.num_micro_batches)
        for part in template.parts[:8]
    )


def bytes_over(scorer: TemplateScorer, template: PlanTemplate) -> float:
    """Bytes by which the worst stage of a uniform plan exceeds its chips; 0 or less where it fits."""
    return max(_bytes_over_by_stage(scorer, template))


def _bottleneck_seconds(scorer: TemplateScorer, part: PipelineReplicas) -> float:
    """Seconds of a uniform pipeline from its slowest stage alone, including the pipeline's fill; without links,
    embedding and head."""
    size, stages = part.shape.micro_batch_size, part.shape.stages
    first = {stage.group: stage for stage in reversed(stages)}  # the first stage of a group has the most layers
    stage_costs = [scorer.stage(stage, size, False, False) for stage in first.values()]
    return (part.num_micro_batches + len(stages) - 1) * max(x.forward + x.backward for x in stage_costs)


def _bytes_over_by_stage(scorer: TemplateScorer, template: PlanTemplate) -> Iterator[float]:
    for part in template.parts[:4]:
        size, last = part.shape.micro_batch_size, len(part.shape.stages) - 1
        alive = in_flight("1f1b", last + 1, part.num_micro_batches)
        for s, stage in enumerate(part.shape.stages):
            yield scorer.needs(stage, size, s == 0, s == last, alive[s], template.pipelines)[1]
