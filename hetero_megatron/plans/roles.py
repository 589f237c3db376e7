"""Roles in a plan: models beside the one that is trained that only run forward, each on ranks of its own, cut as the
plan has it for that role. No torch."""

from __future__ import annotations

from hetero_megatron.plans.canonical import Plan
from hetero_megatron.plans.fields import Source, stages

ROLES = ("reference", "teacher")


def role_plan(plan: Plan, role: str) -> Plan | None:
    """The plan of a role; None: it has no ranks of its own."""
    return dict(plan.roles).get(role)


def roles_are_apart(plan: Plan, source: Source) -> None:
    """Every rank has one role."""
    place_of_rank = {rank: source.spelled(path) for path, _, stage in stages(plan) for rank in stage.ranks}
    for name, other in plan.roles:
        for path, _, stage in stages(other):
            for rank in stage.ranks:
                if rank in place_of_rank:
                    problem = f"rank {rank} has a role already, in {place_of_rank[rank]}"
                    accepted = "ranks that train nothing, and have no other role"
                    raise source.error(problem, f"roles.{name}.{path}.ranks", rank, accepted)
        place_of_rank |= dict.fromkeys(other.ranks, f"roles.{name}")
