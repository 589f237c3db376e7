"""What backend islands mean for a plan: which of its groups may cross them, and how gradients do."""

from __future__ import annotations

from dataclasses import replace

from hetero_megatron.comm.islands import Islands
from hetero_megatron.errors import UserError
from hetero_megatron.plan import Plan
from hetero_megatron.plan.buckets import islands_of, layer_groups
from hetero_megatron.words import notice_line, rank_ranges


def describe_islands(islands: Islands | None) -> list[str]:
    """Lines for the log: the table of islands and routes, where there is more than gloo, and unlike versions."""
    if islands is None:
        return []
    lines = [] if len(islands) == 1 and islands.uses_gloo(0) else [str(islands)]
    versions: dict[str, list[int]] = {}
    for rank, endpoint in enumerate(islands.endpoints):
        versions.setdefault(endpoint.torch, []).append(rank)
    if len(versions) > 1:
        said = ", ".join(f"{version} on ranks {rank_ranges(ranks)}" for version, ranks in versions.items())
        lines.append(notice_line(f"ranks have unlike versions of torch: {said}"))
    return lines


def plan_for(plan: Plan, islands: Islands | None) -> Plan:
    """The plan as it runs over these islands: gradients that cross them are summed inside each island first.

    Raises:
        UserError: a TP or context group crosses islands, which the plan does not say may be.
    """
    if islands is None or not islands.crossed(plan.ranks):
        return plan
    for group in sorted(layer_groups(plan)):
        if not plan.allow_bridge and islands.crossed(group):
            parts = {islands.endpoints[rank].platform: rank for rank in reversed(group)}
            ends = " and ".join(f"rank {rank} ({name})" for name, rank in sorted(parts.items(), key=lambda p: p[1]))
            raise UserError(
                f"ranks {rank_ranges(group)} are one tensor-parallel or context group, and {ends} have no "
                "communication library in common: every layer would wait for the bridge", field="plan",
                accepted="such groups inside one island, or allow_bridge: true in the plan",
            )  # fmt: skip
    found: dict[tuple[int, int], list[int]] = {}
    for i, near in enumerate(islands_of(plan, plan.ranks) if plan.islands else [plan.ranks]):
        for rank in near:
            found.setdefault((i, islands.of(rank)), []).append(rank)
    return replace(plan, islands=tuple(sorted(tuple(ranks) for ranks in found.values())))
