"""Whether a candidate fits exactly, with the optimizer states where the plan puts them, at the cost of a small plan.

Ranks of equal pipelines (and of inner replicas) hold the same and own, but for rounding, equally much. So one of each
kind stands for all: it takes part in the division of ownership with as much weight as there are of them.
"""

from __future__ import annotations

from hetero_megatron.plan import Pipeline, Plan, Recompute, Stage, Unit
from hetero_megatron.plan.buckets import WHOLE_BYTES, Bucket, make_buckets
from hetero_megatron.plan.canonical import Optimizer
from hetero_megatron.plan.memory import buffer_bytes, most_buffered, state_bytes
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.template.plan_template import PlanTemplate, in_flight

WHOLE = WHOLE_BYTES // 4  # elements of a cell that has one owner


def most_over(scorer: TemplateScorer, candidate: PlanTemplate) -> int:
    """Upper bound on the bytes by which a rank exceeds its chip: 0 or less where every rank fits, wherever it lies."""
    costs = scorer.costs
    plan, weight = _small(candidate, costs.seq_length, costs.model.num_heads)
    rows: dict[int, tuple[int, float, list[tuple[float, float]]]] = {r: (0, 0.0, []) for r in weight}
    for bucket in make_buckets(plan, costs.model):
        sizes = {r: _owned(bucket, r, weight[r]) for r in bucket.ranks}
        total = sum(layout.elements(r) for layout in bucket.owners.values() for r in bucket.ranks)
        copies = sum(weight[r] * whole for r, (whole, _) in sizes.items()) / total
        for rank, (whole, mine) in sizes.items():
            held, owned, moving = rows[rank]
            if copies > 1:
                moving.append(buffer_bytes(whole, mine, copies, costs.item, dense=False))  # no less than if it is
            rows[rank] = held + whole, owned + mine, moving
    worst = -(1 << 62)
    for part, pipeline in zip(candidate.parts, plan.pipelines, strict=True):
        stages = part.shape.stages
        alive = in_flight(candidate.schedule, len(stages), part.num_micro_batches)
        for s, (stage, made) in enumerate(zip(stages, pipeline.stages, strict=True)):
            choice = scorer.tables.choice(stage, s == 0, s == len(stages) - 1)
            rest = costs.memory_bytes(choice, part.shape.micro_batch_size, alive[s], candidate.pipelines)
            for rank in made.ranks:
                held, owned, moving = rows[rank]
                state: float = sum(state_bytes(held, 0, costs.item)[:2])
                if not stage.offload:
                    state += state_bytes(held, owned, costs.item, costs.options.moments)[2]
                need = rest.overhead + state + max(rest.activations, most_buffered(moving))
                worst = max(worst, int(need) + 1 - costs.memory_limit(choice.chip))
    return worst


def _owned(bucket: Bucket, rank: int, weight: int) -> tuple[int, float]:
    """(elements that one of ``weight`` equal ranks holds, at most owns) of a bucket; ownership is rounded to rows
    elsewhere, and what is not split goes to any of them."""
    whole, mine = 0, 0.0
    for name, layout in bucket.holders.items():
        held, owned = layout.elements(rank), bucket.owners[name].elements(rank) / weight
        if held:
            box = layout.of(rank)[0]
            owned = min(held, owned + 2 * (box.size // box.shape[0]) + WHOLE)
        whole, mine = whole + held, mine + owned
    return whole, mine


def _small(candidate: PlanTemplate, seq_length: int, num_heads: int) -> tuple[Plan, dict[int, int]]:
    """(a plan with one pipeline per part and one unit per stage, for how many ranks each of its ranks stands)."""
    weight: dict[int, int] = {}
    pipelines = []
    for part in candidate.parts:
        start, stages = 0, []
        for s, stage in enumerate(part.shape.stages):
            ranks = tuple(range(len(weight), len(weight) + stage.tp))
            weight |= dict.fromkeys(ranks, part.copies * stage.dp)
            unit = Unit(ranks, (1,) * stage.tp, (0, part.shape.micro_batch_size), ((0, seq_length),), (0, num_heads))
            layers = ((start, start + stage.layers),) if stage.layers else ()
            start += stage.layers
            last = s == len(part.shape.stages) - 1
            optimizer = Optimizer(stage.offload, share=part.copies * stage.dp * stage.share)
            stages.append(Stage(layers, (unit,), s == 0, last, Recompute(), None, optimizer))
        pipelines.append(Pipeline(part.shape.micro_batch_size, part.num_micro_batches, tuple(stages)))
    return Plan(seq_length, candidate.sequences, candidate.schedule, tuple(pipelines)), weight
