"""This process in its job: its rank, its platform, and whether there is what the configuration asks for."""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from hetero_megatron.cluster import Cluster
from hetero_megatron.cluster.catalogue import CHIPS
from hetero_megatron.comm import Comm
from hetero_megatron.comm.islands import BRIDGE, Islands
from hetero_megatron.emulation import Emulation
from hetero_megatron.environment.launcher import SECRET, LauncherEnvironment
from hetero_megatron.errors import UserError, printable
from hetero_megatron.plans import Plan, all_ranks, format_plan, idle_ranks
from hetero_megatron.plans.islands import format_islands, over_libraries
from hetero_megatron.platform import Platform, choose_platform
from hetero_megatron.platform.plugins import Plugins
from hetero_megatron.spec import ModelSpec
from hetero_megatron.training.config import RunConfig
from hetero_megatron.utils.text import notice_line, plural, rank_ranges


def describe_islands(islands: Islands | None) -> list[str]:
    """Lines for the log: the table of islands and routes, where there is more than gloo, and unlike versions."""
    if islands is None:
        return []
    lines = [] if len(islands) == 1 and islands.uses_gloo(0) else [str(islands)]
    versions: dict[str, list[int]] = {}
    for rank, endpoint in enumerate(islands.endpoints):
        versions.setdefault(endpoint.torch.partition("+")[0], []).append(rank)  # after it: the vendor of the build
    if len(versions) > 1:
        versions_of_ranks = ", ".join(f"{version} on ranks {rank_ranges(ranks)}" for version, ranks in versions.items())
        lines.append(notice_line(f"ranks have unlike versions of torch: {versions_of_ranks}"))
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
        plans = (plan, *(other for _, other in plan.roles))
        expected = {r: s.chip for p in plans for s in p.stages if s.chip is not None for r in s.ranks}
    for rank, chip in expected.items() if islands is not None else ():
        assert islands is not None
        driver_chip = islands.endpoints[rank].chip if rank < len(islands.endpoints) else ""
        if chip in CHIPS and (chips_of_driver := _known_chips(driver_chip)) and chip not in chips_of_driver:
            raise UserError(
                f"rank {rank} is to be a {chip}, and its driver says {driver_chip}",
                field="--cluster" if cluster else "--plan", value=chip,
                accepted=f"{', '.join(chips_of_driver)} there, or the ranks in another order",
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
    """The plan as it runs over these islands; see :func:`~hetero_megatron.plans.islands.over_libraries`.

    Raises:
        UserError: a TP or context group crosses islands, which the plan does not say may be.
    """
    if islands is None or len(islands) == 1:
        return plan
    return over_libraries(plan, islands.of, lambda rank: islands.endpoints[rank].platform)


def position(cluster: Cluster | None, launcher: LauncherEnvironment) -> int | None:
    """This process's rank by the cluster file: node ($HETERO_NODE, else the host's name) and index of its chip there.

    Returns:
        the rank, from 0; None without a cluster file: the launcher's number counts.

    Raises:
        UserError: the file has no such node or chip, or the job has fewer ranks.
    """
    if cluster is None:
        return None
    node, world = launcher.node or socket.gethostname(), launcher.world_size
    rank = cluster.find(node, launcher.device_index).rank
    if rank >= world:
        raise UserError(
            f"its chip is rank {rank} of the cluster file, but this job has {plural(world, 'rank')}",
            field="HETERO_NODE", value=node, accepted=f"the chips of ranks 0 to {world - 1}, or more ranks",
        )  # fmt: skip
    return rank


def platform_at(
    place: int | None,
    cluster: Cluster | None,
    launcher: LauncherEnvironment,
    plugins: Plugins,
    name: str | None = None,
    backend: str | None = None,
    deterministic: bool = False,
    eager: bool = False,
) -> Platform:
    """This process's platform.

    Args:
        place: what :func:`position` returned; says which chip the testbed emulates, if any.
        name: of the platform; None: that of the vendor of the emulated chip, else the one that is here.
        backend: of torch.distributed; None: the device's own.
        deterministic: have the device's library give the same bits every time.
        eager: have its kernels loaded when its driver starts, see :func:`sizes_follow_data`.

    Raises:
        UserError: there is no such platform, see :func:`~hetero_megatron.platform.choose_platform`.
    """
    vendor = cluster.emulated_vendor(place) if cluster is not None else ""
    platforms, index = plugins.platforms.values(), launcher.device_index
    return choose_platform(platforms, name, backend, index, vendor, deterministic, eager)


def sizes_follow_data(plan: Plan, spec: ModelSpec, documents_apart: bool) -> bool:
    """Whether kernels that no warm-up can know are first used beside waiting messages: stages follow each other, and
    sizes depend on what is trained on (tokens of each expert; attention within each of several documents).

    Libraries choose kernels by sizes, and a driver that loads one when it is first used waits until the device is
    drained: for a receive, perhaps, of what a rank will send that waits for this one.

    Args:
        documents_apart: attention does not cross the ends of documents.
    """
    return (spec.moe is not None or documents_apart) and any(len(p.stages) > 1 for p in plan.pipelines)


def check_world(config: RunConfig, world: int) -> None:
    """UserError where the plan needs more ranks than the ``world`` that this job has."""
    needed = all_ranks(config.plan)[-1] + 1
    if needed > world:
        raise UserError(
            f"the plan uses ranks 0 to {needed - 1}, but this job has {world}",
            field="WORLD_SIZE", value=world, accepted=f"{needed} ranks, e.g. torchrun --nproc-per-node {needed}",
        )  # fmt: skip


def check_device(platform: Platform, launcher: LauncherEnvironment) -> None:
    """UserError where several ranks would share the first device because nothing says which one is whose."""
    if launcher.world_size > 1 and launcher.local_rank is None and platform.device.type != "cpu":
        raise UserError(
            "not set, so this rank does not know its device", field="LOCAL_RANK", where="environment",
            accepted="the rank's index on its node, as torchrun sets it",
        )  # fmt: skip


def check_graphs(config: RunConfig, platform: Platform) -> None:
    """UserError where layers are to run as device graphs, and this rank's device has none."""
    if config.graphs_after is None:
        return
    problem = "no plugin knows it" if platform.accelerator is None else platform.accelerator.no_graphs()
    if problem:
        raise UserError(
            f"{platform.name} captures no graphs: {problem}", field="--cuda-graph-impl", value="local", accepted="none"
        )


COMPILED = (
    "--compile: weight gradients pass through autograd, so each needs memory of its own and an addition per "
    "micro-batch, and attention that torch cannot trace is a break in the graph of its layer"
)
COMPILED_MOE = "; routers and routed experts run as they are, for their rows are known only then"


def announce(config: RunConfig, comm: Comm, platform: Platform, plugins: Plugins, emulation: Emulation) -> None:
    """Print what will run, and where. Called on the first rank only; the plan is as the user gave it."""
    for line in (*_choices(config, comm, platform, plugins, emulation), *_connections(config, comm)):
        print(printable(line), flush=True)  # names in it are those of files and plugins


def _choices(
    config: RunConfig, comm: Comm, platform: Platform, plugins: Plugins, emulation: Emulation
) -> Iterator[str]:
    cluster, plan = config.cluster, config.plan
    chips = [cluster.chip_of(r).name for r in range(cluster.world_size)] if cluster is not None else None
    yield format_plan(plan, config.spec, chips)
    if config.role is not None:
        from hetero_megatron.plans.dump import format_roles

        yield from format_roles(plan, {config.role.name: config.role.spec}, chips)
    if plan.islands:
        yield format_islands(config.compiled)
    if plan.outer is not None:
        from hetero_megatron.plans.outer import format_outer

        yield from format_outer(plan, config.spec, config.dtype)
    yield f"device: {platform.device.type}, backend {platform.backend}, {config.dtype}"
    if platform.settings:
        yield f"settings: {', '.join(platform.settings)}"
    if config.compile is not None:
        yield notice_line(COMPILED + (COMPILED_MOE if config.spec.moe is not None else ""))
    if testbed := emulation.describe():
        yield testbed
    for plugin in plugins.broken():
        yield notice_line(f"plugin {plugin.source.name} ({plugin.source.module}) is broken: {plugin.error}")
    idle = set(range(comm.launcher.world_size)) - set(all_ranks(plan))
    if cluster is not None:
        idle.update(idle_ranks(plan, cluster))
    if idle:
        yield f"idle ranks: {', '.join(map(str, sorted(idle)))}"
    yield from map(notice_line, config.notices)


def _connections(config: RunConfig, comm: Comm) -> Iterator[str]:
    yield from describe_islands(comm.islands)
    yield from unlike_cluster(comm.islands, config.cluster)
    if comm.launcher.started_by:
        yield f"ranks: the tasks that {comm.launcher.started_by} started, by their numbers"
    if notice := open_to_others(comm.launcher):
        yield notice_line(notice)


def open_to_others(launcher: LauncherEnvironment) -> str:
    """What to say where anybody on the network could claim a rank; empty where nobody can."""
    if launcher.world_size == 1 or launcher.one_host or launcher.secret:
        return ""
    host, port = launcher.rendezvous_address
    return f"{SECRET} is not set: whoever reaches {host}:{port} can claim a rank (docs/security.md)"
