"""Explain why no plan exists, and find the smallest change that would help."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace

from hetero_megatron.cluster import Link, format_bytes
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.template_score import TemplateScorer, no_room
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.graph_partition import MOST_GROUPS
from hetero_megatron.planner.search.layers_program import LayersProgram, grid
from hetero_megatron.planner.search.materialize import ProgramInputs
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.utils.text import plural

MOST_NODES = 4096


def fits(problem: PlanningProblem, scorer: TemplateScorer) -> bool:
    """Whether some single pipeline over all chips holds the model, however slow."""
    return most_layers(problem, scorer) >= problem.model.num_layers


def most_layers(problem: PlanningProblem, scorer: TemplateScorer) -> int:
    """The most layers that a single pipeline over all chips holds, beside embedding and head; 0 where not even these
    fit."""
    pool = scorer.pool
    if len(pool.groups) > MOST_GROUPS:  # those with the most memory per chip
        order = sorted(range(len(pool.groups)), key=lambda g: -scorer.costs.memory_limit(pool.groups[g].chip))
        return most_layers(problem, scorer.restricted(sorted(order[:MOST_GROUPS])))
    inputs = ProgramInputs(problem.with_batch(1), scorer)
    program = LayersProgram(inputs, pool.counts, min(problem.space.micro_batch_sizes or (1,)), 1)
    start = grid(1e12).start
    tables, _ = program.solve(range(start, start + 1))
    return max(0, *(int(layers[1].max()) for layers in tables.values()))


def refuse(problem: PlanningProblem, scorer: TemplateScorer) -> UserError:
    """The error for a model that fits in no plan: what is missing, and on which chips."""
    model, away = problem.model, problem.space.offload == "always"
    if away:
        scorer = scorer.for_pool(scorer.pool, offload=frozenset(g.chip for g in scorer.pool.groups))
    missing = no_room(scorer)
    if missing:
        changes = ["chips with more memory, or a smaller `communicators:` of these chips in the cluster file"]
    else:
        missing = f"{_short_of(problem, scorer, away)}{_more_memory(problem, scorer)}"
        changes = [*_nodes(problem, scorer), *_length(problem, scorer)]
    return UserError(
        f"{model.name} fits in no plan of this cluster: {missing}", field="--model", value=model.name,
        accepted=" or ".join(changes) or "a smaller model or larger chips", where=problem.cluster.file,
    )  # fmt: skip


def _short_of(problem: PlanningProblem, scorer: TemplateScorer, away: bool) -> str:
    """Whether states or activations are too large, and by how much."""
    costs, model = scorer.costs, problem.model
    rooms = ((costs.memory_limit(g.chip) - costs.overhead(g.chip)) * g.chips for g in scorer.pool.groups)
    usable = sum(room for room in rooms if room > 0)
    weights, gradients, optimizer = costs.memory.whole
    parts = {"weights": weights, "gradients": gradients} | ({} if away else {"optimizer": optimizer})
    states = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    placed = " (the optimizer in host memory)" if away else ""
    total = sum(parts.values())
    if total > usable:
        return (
            f"{states}{placed}: {format_bytes(total)} of states, and all chips together have {format_bytes(usable)} to "
            f"use, {format_bytes(total - usable)} too little even without activations"
        )
    if fits(problem, scorer):
        return f"{states}{placed} and activations would fit on the chips, but what is put into host memory not there"
    layers = min(most_layers(problem, scorer), model.num_layers - 1)
    size = min(problem.space.micro_batch_sizes or (1,))
    one_token = replace(problem, seq_length=1)
    obstacle = "activations are what is missing" if fits(one_token, _with_length(one_token, scorer)) else (
        "whole layers, embedding and head, which are placed at once, are too large for single chips"
    )
    return (
        f"{states}{placed} would fit into the {format_bytes(usable)} that all chips together have to use, but beside "
        f"activations of micro-batches of {size} x {problem.seq_length} tokens at most {layers} of {model.num_layers} "
        f"layers do: {obstacle}"
    )


def _more_memory(problem: PlanningProblem, scorer: TemplateScorer) -> str:
    """How much more memory every chip would need, to a percent; empty where that is not the question."""

    def enough(percent: int) -> bool:
        chips = {
            name: replace(chip, memory=chip.memory * percent // 100, memory_budget=None)
            for name, chip in problem.cluster.chips.items()
        }
        costs = CostModel(
            problem.model, replace(problem.cluster, chips=chips), problem.seq_length, problem.dtype,
            scorer.costs.options,
        )  # fmt: skip
        return fits(problem, TemplateScorer(scorer.tables.for_pool(scorer.pool, costs), scorer.pool))

    upper = next((percent for percent in (200, 400, 800, 1600, 3200, 6400) if enough(percent)), None)
    if upper is None:
        return ""
    low = 101 if upper == 200 else upper // 2 + 1
    percent = low + bisect_left(range(low, upper), True, key=enough)
    needs = []
    for name in dict.fromkeys(group.chip for group in scorer.pool.groups):
        chip_memory = problem.cluster.chips[name].memory
        added = chip_memory * percent // 100 - chip_memory
        needs.append(f"{format_bytes(added)} more than its {format_bytes(chip_memory)} on each {name}")
    return f"; it would fit with {' and '.join(needs)}"


def _with_length(problem: PlanningProblem, scorer: TemplateScorer) -> TemplateScorer:
    """The scorer for another sequence length."""
    costs = CostModel(problem.model, problem.cluster, problem.seq_length, problem.dtype, scorer.costs.options)
    return TemplateScorer(scorer.tables.for_pool(scorer.pool, costs), scorer.pool)


def _nodes(problem: PlanningProblem, scorer: TemplateScorer) -> list[str]:
    """The smallest number of additional nodes of one kind that would make the model fit, as text; empty if none does.
    Where one node is all there is, and nothing is said of links between nodes, no number is known."""
    if len(problem.cluster.ranks) == scorer.pool.groups[0].per_node and problem.cluster.inter_node is None:
        return ["more nodes, with links.inter_node in the cluster file"]
    options = []
    for g, group in enumerate(scorer.pool.groups):

        def enough(more: int, g: int = g) -> bool:
            return fits(problem, _grown(scorer, g, more))

        doubled = next((2**i for i in range(MOST_NODES.bit_length()) if enough(2**i)), None)
        if doubled is None:
            continue
        low = doubled // 2 + 1
        count = low + bisect_left(range(low, doubled), True, key=enough)
        options.append((count * group.per_node, f"{plural(count, 'more node')} of {group.per_node} x {group.chip}"))
    return [text for _, text in sorted(options)[:1]]


def _grown(scorer: TemplateScorer, g: int, more: int) -> TemplateScorer:
    pool = scorer.pool
    start = 1 + max(r for group in pool.groups for node in group.ranks for r in node)
    group = pool.groups[g]
    extra = tuple(tuple(range(start + i * group.per_node, start + (i + 1) * group.per_node)) for i in range(more))
    groups = tuple(replace(x, ranks=x.ranks + extra) if i == g else x for i, x in enumerate(pool.groups))
    some_link = next((x for row in pool.inter for x in row if x is not None), None) or next(
        (x for x in pool.intra if x is not None), Link(math.inf)
    )
    inter = tuple(tuple(x or some_link for x in row) for row in pool.inter)
    return scorer.for_pool(DevicePool(groups, pool.intra, inter))


def _length(problem: PlanningProblem, scorer: TemplateScorer) -> list[str]:
    """A shorter sequence length that would make the model fit, as text; empty if none does."""
    length = problem.seq_length // 2
    while length >= 64:
        shorter = replace(problem, seq_length=length)
        if fits(shorter, _with_length(shorter, scorer)):
            return [f"--seq-length {length}"]
        length //= 2
    return []
