"""Whether a plan fits its model and its cluster: the laws of :mod:`~hetero_megatron.plans.validate` that need these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hetero_megatron.errors import UserError
from hetero_megatron.layout import cut_in_tiles
from hetero_megatron.plans.canonical import Pipeline, Plan, Stage
from hetero_megatron.plans.fields import Source
from hetero_megatron.utils.text import plural

if TYPE_CHECKING:
    from hetero_megatron.cluster import Cluster
    from hetero_megatron.spec import ModelSpec


def stages(plan: Plan) -> Iterator[tuple[str, Pipeline, Stage]]:
    """(path, pipeline, stage) of all stages."""
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            yield f"pipelines[{p}].stages[{s}]", pipeline, stage


def sequence_fits_the_model(plan: Plan, spec: ModelSpec, source: Source) -> None:
    if plan.seq_length > spec.max_position_embeddings:
        raise source.error(
            f"the model has {plural(spec.max_position_embeddings, 'position')}",
            "seq_length",
            plan.seq_length,
            f"at most {spec.max_position_embeddings}",
        )


def weights_can_be_split(plan: Plan, spec: ModelSpec, source: Source) -> None:
    """``spec.shares`` knows how heads, ffn columns and vocabulary rows are cut, and what cannot be."""
    from hetero_megatron.spec import shares

    checked = set()
    for path, _, stage in stages(plan):
        for unit in stage.units:
            if unit.tp_split in checked:
                continue
            checked.add(unit.tp_split)
            try:
                shares(spec, unit.tp_split)
            except UserError as error:
                key = "tp" if len(set(unit.tp_split)) == 1 else "tp_split"
                value = unit.tp if key == "tp" else list(unit.tp_split)
                raise source.error(error.problem, f"{path}.{key}", value, error.accepted) from None


def experts_are_held(plan: Plan, spec: ModelSpec, source: Source) -> None:
    for path, _, stage in stages(plan):
        if not stage.experts:
            continue
        field, moe = f"{path}.experts", spec.moe
        if moe is None:
            value = [list(group.ranks) for group in stage.experts]
            raise source.error("the model has no mixture-of-experts layers", field, value, "a plan without experts")
        ranks = [rank for group in stage.experts for rank in group.ranks]
        if sorted(ranks) != sorted(stage.ranks):
            raise source.error(
                "the groups do not contain each rank of the stage once", field, sorted(ranks),
                f"the ranks {sorted(stage.ranks)}; a rank without experts has []",
            )  # fmt: skip
        for g, group in enumerate(stage.experts):
            held = sorted(member.experts for member in group.members)
            end = 0
            for a, b in held:
                if b > moe.num_experts:
                    there = plural(moe.num_experts, "expert")
                    raise source.error(f"the model has {there}", f"{field}[{g}].experts", [a, b])
                if a > end:
                    break
                end = max(end, b)
            if end < moe.num_experts:
                raise source.error(
                    f"no rank of the group holds expert {end}", f"{field}[{g}].experts", [list(e) for e in held],
                    f"intervals that cover [0, {moe.num_experts}]; they may overlap",
                )  # fmt: skip
            for member in group.members:
                if any(a == b for a, b in cut_in_tiles(moe.ffn_hidden_size, member.split)):
                    raise source.error(
                        f"gives a rank none of the {moe.ffn_hidden_size} columns of each expert",
                        f"{field}[{g}].split", list(member.split), "weights that leave every rank at least one column",
                    )  # fmt: skip


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
            there = cluster.ranks[rank]
            if stage.chip is not None and stage.chip != there.chip:
                raise source.error(
                    f"rank {rank} is a {there.chip} (node {there.node})",
                    f"{path}.chip",
                    stage.chip,
                    there.chip,
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
