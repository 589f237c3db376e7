"""The laws that a canonical plan obeys, one function each.

Every law raises UserError at the first offence, with the path and line of the spelling when the plan
came from a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_megatron.plans.canonical import Interval, Pipeline, Plan, Stage, Unit
from hetero_megatron.plans.capabilities import features_are_supported
from hetero_megatron.plans.experts import experts_are_held
from hetero_megatron.plans.fields import Source, stages
from hetero_megatron.plans.shares import all_ranks, weights_can_be_split
from hetero_megatron.plans.weights import weights_can_be_sharded
from hetero_megatron.schedule.generators import CHUNKED
from hetero_megatron.utils.text import plural

if TYPE_CHECKING:
    from hetero_megatron.cluster import Cluster
    from hetero_megatron.spec import ModelSpec

CHUNKED_SCHEDULES = (*CHUNKED, "adaptive")  # that run several ranges of layers per stage
MAX_ACTIONS = 1 << 22  # of a pipeline's step; 4,096 micro-batches through 128 stages have 2 million


def validate(
    plan: Plan,
    spec: ModelSpec,
    cluster: Cluster | None = None,
    *,
    dtype: str | None = None,
    source: Source | None = None,
    role: bool = False,
) -> None:
    """Refuse a plan that is not consistent in itself, with the model, or with the cluster.

    Args:
        cluster: also check size, chip names and, with ``dtype`` (``bf16``, …), that the chips have it.
        source: where the plan was read; without it, paths are those of the canonical plan.
        role: it is that of a role in another plan.

    Raises:
        UserError: at the first law that is broken.
    """
    source = source or Source()
    ranks_are_used_once(plan, source)
    if plan.roles:
        from hetero_megatron.plans.roles import roles_are_apart

        roles_are_apart(plan, source)
    if cluster is None and not role:  # with one, a rank is a chip of it, and chips that no stage names are idle
        ranks_have_no_gaps(plan, source)
    islands_are_apart(plan, source)
    if plan.outer is not None:
        from hetero_megatron.plans.outer import outer_steps_fit

        outer_steps_fit(plan, spec, source)
    for p, pipeline in enumerate(plan.pipelines):
        layers_are_covered_once(pipeline, f"pipelines[{p}]", spec.num_layers, source)
        stages_follow_the_layers(pipeline, f"pipelines[{p}]", source)
        chunks_follow_the_layers(pipeline, f"pipelines[{p}]", source)
        ends_are_held_once(pipeline, f"pipelines[{p}]", source)
    for path, pipeline, stage in stages(plan):
        stage_holds_something(stage, path, source)
        sequences_are_divided(stage, path, pipeline.micro_batch_size, source)
        tokens_and_heads_are_divided(stage, path, plan.seq_length, spec.num_heads, source)
        recompute_fits(stage, path, source)
        tokens_suffice_for_tp(stage, path, source)
    schedule_runs_the_chunks(plan, source)
    stored_schedules_are_adaptive(plan, source)
    caps_are_of_zero_bubble(plan, source)
    batch_adds_up(plan, source)
    step_is_short_enough(plan, source)
    sequence_fits_the_model(plan, spec, source)
    weights_can_be_split(plan, spec, source)
    if spec.moe is not None or any(stage.experts for stage in plan.stages):
        experts_are_held(plan, spec, source)
    if spec.mtp_layers:
        from hetero_megatron.plans.capabilities import predictions_fit

        predictions_fit(plan, spec, source)
    for path, _, stage in stages(plan):
        if stage.weights is not None:
            weights_can_be_sharded(plan, stage, path, spec, source)
    features_are_supported(plan, source)
    if cluster is not None:
        ranks_fit_the_cluster(plan, cluster, source)
        chips_match_the_cluster(plan, cluster, source)
        chips_have_the_dtype(plan, cluster, dtype, source)


def ranks_are_used_once(plan: Plan, source: Source) -> None:
    path_of_rank: dict[int, str] = {}
    for path, _, stage in stages(plan):
        for rank in stage.ranks:
            if rank in path_of_rank:
                first_use = "this stage" if path_of_rank[rank] == path else source.spelled(path_of_rank[rank])
                problem = f"rank {rank} is used twice, already in {first_use}"
                raise source.error(problem, f"{path}.ranks", rank, "each rank once in a plan")
            path_of_rank[rank] = path


def islands_are_apart(plan: Plan, source: Source) -> None:
    in_islands: set[int] = set()
    for i, island in enumerate(plan.islands):
        for rank in island:
            if rank in in_islands or rank not in plan.ranks:
                problem = "is in two islands" if rank in in_islands else "is in no stage"
                accepted = "each rank of the plan at most once"
                raise source.error(f"rank {rank} {problem}", f"islands[{i}]", rank, accepted)
            in_islands.add(rank)


def ranks_have_no_gaps(plan: Plan, source: Source) -> None:
    ranks = all_ranks(plan)
    for expected, rank in enumerate(ranks):
        if rank != expected:
            path = next((f"{path}.ranks" for path, _, stage in stages(plan) if rank in stage.ranks), "roles")
            raise source.error(
                f"ranks are positions in the plan and have no gaps, but rank {expected} is not used",
                path,
                rank,
                f"ranks 0 to {len(ranks) - 1}, or --cluster with a cluster file whose chips may be idle",
            )


def layers_are_covered_once(pipeline: Pipeline, path: str, num_layers: int, source: Source) -> None:
    ranges = sorted((a, b, s) for s, stage in enumerate(pipeline.stages) for a, b in stage.layers)
    accepted = f"ranges that cover layers [0, {num_layers}] once in each pipeline"
    end = 0
    for a, b, s in ranges:
        field = f"{path}.stages[{s}].layers"
        if a < end:
            raise source.error(f"layer {a} is held twice in this pipeline", field, [a, b], accepted)
        if a > end:
            raise source.error(f"{_layers_are(end, a)} missing before it", field, [a, b], accepted)
        if b > num_layers:
            raise source.error(f"the model has {plural(num_layers, 'layer')}", field, [a, b], accepted)
        end = b
    if end < num_layers:
        s = ranges[-1][2] if ranges else 0
        value = list(ranges[-1][:2]) if ranges else []
        field = f"{path}.stages[{s}].layers"
        raise source.error(f"{_layers_are(end, num_layers)} missing after it", field, value, accepted)


def stages_follow_the_layers(pipeline: Pipeline, path: str, source: Source) -> None:
    """With one range per stage, stages are listed in the order in which activations pass them."""
    if any(len(stage.layers) > 1 for stage in pipeline.stages):
        return
    last = -1
    for s, stage in enumerate(pipeline.stages):
        if stage.layers and stage.layers[0][0] < last:
            field = f"{path}.stages[{s}].layers"
            raise source.error(
                "it comes after a stage with later layers",
                field,
                list(stage.layers[0]),
                "stages in order of layers",
            )
        last = max([last, *(b for _, b in stage.layers)])


def chunks_follow_the_layers(pipeline: Pipeline, path: str, source: Source) -> None:
    """With several ranges per stage, a micro-batch passes the first ranges of all stages in order, then the second
    ones, and so on."""
    most_ranges = max(len(stage.layers) for stage in pipeline.stages)
    if most_ranges < 2:
        return
    for s, stage in enumerate(pipeline.stages):
        if len(stage.layers) != most_ranges:
            problem = f"{plural(len(stage.layers), 'range')} of layers beside a stage with {most_ranges}"
            value, accepted = [list(r) for r in stage.layers], f"{most_ranges} ranges; [a, a] for one without layers"
            raise source.error(problem, f"{path}.stages[{s}].layers", value, accepted)
    end = 0
    for chunk in range(most_ranges):
        for s, stage in enumerate(pipeline.stages):
            a, b = stage.layers[chunk]
            if a != end:
                problem = f"range {chunk} of stage {s} begins at layer {a}, the one before it ends at {end}"
                accepted = "the first ranges of all stages in order, then the second ones, and so on"
                raise source.error(problem, f"{path}.stages[{s}].layers", [a, b], accepted)
            end = b


def schedule_runs_the_chunks(plan: Plan, source: Source) -> None:
    for path, pipeline, stage in stages(plan):
        if pipeline.chunks > 1 and plan.schedule not in CHUNKED_SCHEDULES:
            raise source.error(
                f"the {plan.schedule} schedule runs one range of layers per stage",
                f"{path}.layers",
                [list(r) for r in stage.layers],
                f"one range or [], or schedule: {', '.join(CHUNKED)} or adaptive",
            )


def stored_schedules_are_adaptive(plan: Plan, source: Source) -> None:
    if plan.schedule == "adaptive" and not any(pipeline.orders for pipeline in plan.pipelines):
        accepted = "a plan that hetero-megatron plan wrote, or another schedule"
        raise source.error("no pipeline stores its schedule", "schedule", plan.schedule, accepted)
    for p, pipeline in enumerate(plan.pipelines):
        if pipeline.orders and plan.schedule != "adaptive":
            accepted = "schedule: adaptive at the top of the plan, or no stored schedule"
            raise source.error(f"the plan says {plan.schedule}", f"pipelines[{p}].schedule", "adaptive", accepted)


def caps_are_of_zero_bubble(plan: Plan, source: Source) -> None:
    for p, pipeline in enumerate(plan.pipelines):
        if pipeline.in_flight and plan.schedule != "zero-bubble":
            problem, accepted = f"the {plan.schedule} schedule has no caps", "schedule: zero-bubble, or leave it out"
            raise source.error(problem, f"pipelines[{p}].in_flight", list(pipeline.in_flight), accepted)


def ends_are_held_once(pipeline: Pipeline, path: str, source: Source) -> None:
    """One stage holds the embedding, before all layers, and one the head, after all layers."""
    busy = [s for s, stage in enumerate(pipeline.stages) if stage.layers]
    one_range_each = all(len(stage.layers) <= 1 for stage in pipeline.stages)
    for key, name in (("embed", "embedding"), ("head", "output head")):
        holders = [s for s, stage in enumerate(pipeline.stages) if getattr(stage, key)]
        if len(holders) != 1:
            s = holders[1] if holders else (0 if key == "embed" else len(pipeline.stages) - 1)
            raise source.error(
                f"{len(holders)} stages of this pipeline hold the {name}",
                f"{path}.stages[{s}].{key}",
                bool(holders),
                f"{key}: true on exactly one stage",
            )
        misplaced = holders[0] > busy[0] if key == "embed" else holders[0] < busy[-1]
        end = 0 if key == "embed" else len(pipeline.stages) - 1
        if not one_range_each and holders[0] != end:
            order = "first" if key == "embed" else "last"
            field = f"{path}.stages[{holders[0]}].{key}"
            raise source.error(
                f"with several ranges of layers per stage the {name} is on the {order} one", field, True, f"stage {end}"
            )
        if one_range_each and misplaced:
            side = "at or before the first" if key == "embed" else "at or after the last"
            field = f"{path}.stages[{holders[0]}].{key}"
            raise source.error(
                f"the {name} is on the wrong side of the layers", field, True, f"{side} stage with layers"
            )


def stage_holds_something(stage: Stage, path: str, source: Source) -> None:
    if not (stage.num_layers or stage.embed or stage.head):
        raise source.error(
            "the stage holds no layers, no embedding and no head", f"{path}.layers", [], "leave the stage out"
        )


def sequences_are_divided(stage: Stage, path: str, size: int, source: Source) -> None:
    """The inner replicas tile the micro-batch, each with at least one sequence."""
    if not _tiles(stage.replicas, size):
        split = list(stage.dp_split)
        raise source.error(
            f"the split sums to {plural(sum(split), 'sequence')}, micro_batch_size is {size}",
            f"{path}.dp_split",
            split,
            f"positive numbers that sum to {size}",
        )


def tokens_and_heads_are_divided(
    stage: Stage, path: str, seq_length: int, num_heads: int, source: Source
) -> None:
    """In each inner replica, units tile the sequence; in each context group, they tile the query heads."""
    replicas: dict[Interval, list[Unit]] = {}
    for unit in stage.units:
        replicas.setdefault(unit.sequences, []).append(unit)
    for units in replicas.values():
        if not _tiles(sorted(i for unit in units for i in unit.tokens), seq_length):
            owned = [list(map(list, unit.tokens)) for unit in units]
            raise source.error(
                "the members do not own every token of a sequence exactly once",
                f"{path}.context",
                owned,
                f"intervals that cover [0, {seq_length}] once",
            )
        for group in {unit.group for unit in units}:
            heads = [unit.heads for unit in units if unit.group == group and unit.heads[0] < unit.heads[1]]
            if not _tiles(heads, num_heads):
                raise source.error(
                    f"the heads of a context group do not cover {plural(num_heads, 'query head')} once",
                    f"{path}.context[{group}].heads",
                    heads,
                )


def recompute_fits(stage: Stage, path: str, source: Source) -> None:
    kinds = ("none", "selective", "elementwise", "full", "first")
    if stage.recompute.kind not in kinds:
        raise source.error("unknown recompute", f"{path}.recompute", stage.recompute.kind, ", ".join(kinds))
    if stage.recompute.layers > stage.num_layers:
        raise source.error(
            f"the stage has only {plural(stage.num_layers, 'layer')}",
            f"{path}.recompute.first",
            stage.recompute.layers,
            f"0 to {stage.num_layers}",
        )


def tokens_suffice_for_tp(stage: Stage, path: str, source: Source) -> None:
    for unit in stage.units:
        if unit.tp > 1 and unit.tp > unit.num_tokens:
            raise source.error(
                f"sequence parallelism needs a token per rank, a sequence has {unit.num_tokens} here",
                f"{path}.tp",
                unit.tp,
                f"at most {unit.num_tokens}",
            )


def batch_adds_up(plan: Plan, source: Source) -> None:
    total = sum(pipeline.batch_size for pipeline in plan.pipelines)
    if total != plan.global_batch_size:
        raise source.error(
            f"the pipelines compute {plural(total, 'sequence')} per step (sum of micro_batch_size x num_micro_batches)",
            "global_batch_size",
            plan.global_batch_size,
            str(total),
        )


def step_is_short_enough(plan: Plan, source: Source) -> None:
    """A step is a list of actions, about four for each micro-batch, stage and chunk."""
    for p, pipeline in enumerate(plan.pipelines):
        most_micro_batches = MAX_ACTIONS // 4 // len(pipeline.stages) // pipeline.chunks
        if pipeline.num_micro_batches > most_micro_batches:
            raise source.error(
                f"too many micro-batches for a step of {plural(len(pipeline.stages), 'stage')}",
                f"pipelines[{p}].num_micro_batches",
                pipeline.num_micro_batches,
                f"at most {most_micro_batches:,}; a larger micro_batch_size, or more pipelines",
            )


def sequence_fits_the_model(plan: Plan, spec: ModelSpec, source: Source) -> None:
    if plan.seq_length > spec.max_position_embeddings:
        raise source.error(
            f"the model has {plural(spec.max_position_embeddings, 'position')}",
            "seq_length",
            plan.seq_length,
            f"at most {spec.max_position_embeddings}",
        )


def ranks_fit_the_cluster(plan: Plan, cluster: Cluster, source: Source) -> None:
    if plan.ranks[-1] >= cluster.world_size:
        path = next(path for path, _, stage in stages(plan) if plan.ranks[-1] in stage.ranks)
        raise source.error(
            f"the cluster {cluster.file or ''} has {plural(cluster.world_size, 'rank')}".replace("  ", " "),
            f"{path}.ranks",
            plan.ranks[-1],
            f"ranks 0 to {cluster.world_size - 1}",
        )


def chips_match_the_cluster(plan: Plan, cluster: Cluster, source: Source) -> None:
    for path, _, stage in stages(plan):
        for rank in stage.ranks:
            cluster_rank = cluster.ranks[rank]
            if stage.chip is not None and stage.chip != cluster_rank.chip:
                raise source.error(
                    f"rank {rank} is a {cluster_rank.chip} (node {cluster_rank.node})",
                    f"{path}.chip",
                    stage.chip,
                    cluster_rank.chip,
                )


def chips_have_the_dtype(plan: Plan, cluster: Cluster, dtype: str | None, source: Source) -> None:
    for path, _, stage in stages(plan):
        for rank in stage.ranks:
            chip = cluster.chips[cluster.ranks[rank].chip]
            if dtype is not None and dtype not in chip.dtypes:
                raise source.error(
                    f"rank {rank} is a {chip.name}, which has no {dtype}",
                    f"{path}.ranks",
                    rank,
                    f"one of {', '.join(chip.dtypes)}",
                )


def _layers_are(first: int, end: int) -> str:
    """``layer 3 is`` or ``layers 3 to 5 are``, of layers [first, end)."""
    return f"layer {first} is" if end - first == 1 else f"layers {first} to {end - 1} are"


def _tiles(intervals: list[Interval] | tuple[Interval, ...], total: int) -> bool:
    """Whether non-empty intervals in this order cover [0, total) once."""
    end = 0
    for a, b in intervals:
        if a != end or b <= a:
            return False
        end = b
    return end == total
