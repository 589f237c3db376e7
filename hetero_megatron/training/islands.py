"""What backend islands mean for a plan: which of its groups may cross them, and how gradients do; and whether the chips
are those that it was made for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

from hetero_megatron.cluster import Cluster
from hetero_megatron.cluster.catalogue import CHIPS
from hetero_megatron.comm.islands import BRIDGE, Islands
from hetero_megatron.errors import UserError
from hetero_megatron.plan import Plan
from hetero_megatron.plan.islands import over_libraries
from hetero_megatron.utils.text import notice_line, rank_ranges


def describe_islands(islands: Islands | None) -> list[str]:
    """Lines for the log: the table of islands and routes, where there is more than gloo, and unlike versions."""
    if islands is None:
        return []
    lines = [] if len(islands) == 1 and islands.uses_gloo(0) else [str(islands)]
    versions: dict[str, list[int]] = {}
    for rank, endpoint in enumerate(islands.endpoints):
        versions.setdefault(endpoint.torch.partition("+")[0], []).append(rank)  # after it: the vendor of the build
    if len(versions) > 1:
        said = ", ".join(f"{version} on ranks {rank_ranges(ranks)}" for version, ranks in versions.items())
        lines.append(notice_line(f"ranks have unlike versions of torch: {said}"))
    return lines


def transport_of(said: str, cluster: Cluster | None) -> str:
    """What ``--transport`` says, or the bridge where a link of the cluster is written to use it."""
    return BRIDGE if cluster is not None and cluster.forces_bridge else said


def unlike_cluster(islands: Islands | None, cluster: Cluster | None) -> list[str]:
    """A notice for each pair of islands that bridge where the cluster file says that they are joined directly."""
    if islands is None or cluster is None or len(islands.endpoints) > cluster.world_size:
        return []
    firsts = [ranks[0] for ranks in islands.members]
    return [
        notice_line(
            f"{cluster.file or 'the cluster'} says that ranks {a} and {b} reach each other directly, and they use the "
            "bridge: what was predicted is too fast"
        )
        for a, b in combinations(firsts, 2)
        if islands.route((a, b)).bridged and cluster.library_of(a) == cluster.library_of(b)
    ]


def check_chips(plan: Plan, cluster: Cluster | None, islands: Islands | None) -> None:
    """The chips of a plan, or of a cluster file, are those that the drivers name, as far as both are known by name.

    Raises:
        UserError: a rank has another chip.
    """
    expected = {} if cluster is None else {r.rank: r.chip for r in cluster.ranks if cluster.chips[r.chip].speed is None}
    if cluster is None:  # an emulated chip has a name of the plan as well
        expected = {r: s.chip for p in plan.pipelines for s in p.stages if s.chip is not None for r in s.ranks}
    for rank, chip in expected.items() if islands is not None else ():
        assert islands is not None
        said = islands.endpoints[rank].chip if rank < len(islands.endpoints) else ""
        if chip in CHIPS and (known := _known_chips(said)) and chip not in known:
            raise UserError(
                f"rank {rank} is to be a {chip}, and its driver says {said}",
                field="--cluster" if cluster else "--plan", value=chip,
                accepted=f"{', '.join(known)} there, or the ranks in another order",
            )  # fmt: skip


def _known_chips(said: str) -> list[str]:
    """The chips of the catalogue that a driver may mean: their model (A100, MI300X, …) is a word of what it says."""
    words = set(re.split(r"[^A-Z0-9]+", said.upper()))
    return [name for name in CHIPS if (set(re.split(r"[^A-Z0-9]+", name.upper())) & words) - _COMMON]


_COMMON = {"SXM", "SXM2", "PCIE", "80", "40", "16", "32", "96", "141", "AI", "BI"}  # no models
MOST_COMMUNICATORS = 32  # libraries keep buffers of some MiB for each


def communicators(islands: Islands | None, groups: Sequence[tuple[int, ...]]) -> list[str]:
    """A notice, where a rank has many communicators of its island's library."""
    if islands is None:
        return []
    counts = Counter(
        rank for ranks in groups if len(ranks) > 1 and not islands.crossed(ranks) for rank in ranks
        if not islands.uses_gloo(islands.of(rank))
    )  # fmt: skip
    rank, count = max(counts.items(), key=lambda item: (item[1], -item[0]), default=(0, 0))
    if count <= MOST_COMMUNICATORS:
        return []
    return [notice_line(f"rank {rank} has {count} communicators, and its library keeps memory for each")]


def plan_for(plan: Plan, islands: Islands | None) -> Plan:
    """The plan as it runs over these islands; see :func:`~hetero_megatron.plan.islands.over_libraries`.

    Raises:
        UserError: a TP or context group crosses islands, which the plan does not say may be.
    """
    if islands is None:
        return plan
    return over_libraries(plan, islands.of, lambda rank: islands.endpoints[rank].platform)
