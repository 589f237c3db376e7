"""Context layouts as stages of plans, and as plans of one stage."""

from __future__ import annotations

from collections.abc import Mapping

from hetero_megatron.errors import UserError
from hetero_megatron.planner.context.problem import ContextLayout, ContextProblem
from hetero_megatron.plans import Pipeline, Plan, Stage
from hetero_megatron.plans.canonical import KeyValues, Recompute, Unit
from hetero_megatron.plans.shares import nested_zigzag


def plan_stage(
    problem: ContextProblem, layout: ContextLayout, first_layer: int = 0, ranks: Mapping[int, int] | None = None
) -> Stage:
    """The stage of a plan, for micro-batches of one size; ``ranks``: which take the place of the problem's."""
    units, size = [], problem.options.micro_batch
    tokens = nested_zigzag([group.tokens for group in layout.groups])
    for g, group in enumerate(layout.groups):
        first = 0
        for m, ranges, heads in zip(group.members, tokens[g], group.heads, strict=True):
            of_member = problem.members[m].ranks
            ranks_of_unit = of_member if ranks is None else tuple(ranks[r] for r in of_member)
            units.append(
                Unit(ranks_of_unit, (1,) * len(ranks_of_unit), (0, size), ranges, (first, first + heads), group=g)
            )
            first += heads
    kv = KeyValues(layout.transport, layout.block) if len(layout.groups) > 1 else None
    layers, options = (first_layer, first_layer + problem.layers), problem.options
    return Stage((layers,), tuple(units), options.embed, options.head, Recompute(options.recompute), kv=kv)


def one_stage_plan(problem: ContextProblem, layout: ContextLayout, global_batch_size: int) -> Plan:
    """The plan of a single stage that holds the whole model.

    Raises:
        UserError: the stage is not the whole model, or the batch is not a multiple of the micro-batch.
    """
    size = problem.options.micro_batch
    if problem.layers != problem.model.num_layers:
        raise UserError(
            "a plan of one stage holds all layers", field="layers", value=problem.layers,
            accepted=str(problem.model.num_layers),
        )  # fmt: skip
    if global_batch_size < 1 or global_batch_size % size:
        raise UserError(
            f"not a multiple of the micro-batch of {size}", field="--global-batch-size", value=global_batch_size,
            accepted=f"a multiple of {size}",
        )  # fmt: skip
    pipeline = Pipeline(size, global_batch_size // size, (plan_stage(problem, layout),))
    return Plan(problem.seq_length, global_batch_size, "1f1b", (pipeline,))
