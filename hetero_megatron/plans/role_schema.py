"""How a plan file spells roles: by name, the pipelines of a model that only runs forward. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hetero_megatron.plans.canonical import Pipeline, Plan
from hetero_megatron.plans.experts import without_plain_experts
from hetero_megatron.plans.fields import Source, stages
from hetero_megatron.plans.roles import GENERATOR, ROLES
from hetero_megatron.plans.validate import validate
from hetero_megatron.utils.yaml_document import Entry

if TYPE_CHECKING:
    from hetero_megatron.cluster import Cluster
    from hetero_megatron.spec import ModelSpec

PIPELINE_KEYS = ("micro_batch_size", "num_micro_batches", "repeat", "stages")
OF_TRAINING = ("recompute", "optimizer", "weights", "activations", "dtype")  # keys of stages
# (entry of a plan's pipelines, tokens of a sequence, heads) -> pipelines, and of which entry each is
Expand = Callable[[Entry, int, int], tuple[Sequence[Pipeline], Sequence[int]]]


def with_roles(
    plan: Plan, entry: Entry, specs: Mapping[str, ModelSpec], cluster: Cluster | None, dtype: str | None,
    source: Source, expand: Expand,
) -> Plan:  # fmt: skip
    """``plan`` with the roles of its file, each valid for its model.

    Args:
        entry: the key ``roles``; specs: the model of each role, as far as flags name one.
        expand: of spelled pipelines.

    Raises:
        UserError: a role is unknown, has no model or no ranks, or breaks a law of plans.
    """
    role_plans = []
    for name, role in entry.mapping(ROLES).items():
        pipelines = role.mapping(("pipelines",), required=("pipelines",))["pipelines"]
        if name not in specs:
            flag = "--grpo" if name == GENERATOR else f"--{name}-hf DIR"
            accepted = f"{flag}, of commands that know it, or a plan without roles"
            problem = "nothing is sampled" if name == GENERATOR else f"nothing says which model the {name} is"
            role.fail(problem, accepted=accepted)
        _refuse_training(pipelines, name)
        expanded, origin = expand(pipelines, plan.seq_length, specs[name].num_heads)
        role_plan = Plan(
            plan.seq_length, plan.global_batch_size, "1f1b", tuple(expanded), allow_bridge=plan.allow_bridge
        )
        role_plan = without_plain_experts(role_plan, specs[name])
        place = Source(source.file, source.lines, tuple(origin), f"roles.{name}.")
        validate(role_plan, specs[name], cluster, dtype=dtype, source=place, role=True)
        if name == GENERATOR:
            _generator_fits(role_plan, place)
        role_plans.append((name, role_plan))
    return replace(plan, roles=tuple(sorted(role_plans)))


def _generator_fits(plan: Plan, source: Source) -> None:
    """All ranks of a stage generate together, each with columns of all experts."""
    for path, _, stage in stages(plan):
        if len(stage.units) > 1:
            problem = f"the stage has {len(stage.units)} TP groups, of which one would generate"
            accepted = f"tp: {len(stage.ranks)}, or more pipelines"
            raise source.error(problem, f"{path}.ranks", list(stage.ranks), accepted)
        if stage.experts:
            problem = "experts are not divided where tokens come one by one"
            raise source.error(problem, f"{path}.experts", "given", "no such key: each rank has columns of all experts")


def _refuse_training(pipelines: Entry, name: str) -> None:
    for pipeline in pipelines.items():
        for stage in pipeline.mapping(PIPELINE_KEYS, required=PIPELINE_KEYS[:2]).get("stages", pipelines).items():
            for key, value in stage.any_mapping().items():
                if key in OF_TRAINING:
                    value.fail(f"the {name} only runs forward, which this changes nothing of", accepted="no such key")
