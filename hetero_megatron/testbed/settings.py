"""Settings of a testbed: the best that the machine supports, or what was asked for, or a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement

from hetero_megatron.cluster import Cluster, Link, format_rate
from hetero_megatron.errors import UserError
from hetero_megatron.testbed.machine import Machine

CHIPS = ("clock", "soft", "none")
LINKS = ("namespaces", "paced", "none")
SHARE = 0.8  # of the cores that the chips together may be as fast as: the rest is for launchers, kernel and luck
MAX_RANKS = 128
FAST_LINK = 500e6  # bytes/s; above it the cores, not the shaping, may set the rate


@dataclass(frozen=True)
class Settings:
    """How chips and links are emulated.

    Attributes:
        speeds: per rank; None where the cluster file has none (chips: none).
        cores: the core that each rank is pinned to.
        node_names: in rank order; node_of: node index of each rank.
        reasons: one sentence per choice.
        notes: caveats for readers of the results.
    """

    cluster: Cluster
    chips: str
    links: str
    speeds: tuple[float | None, ...]
    cores: tuple[int, ...]
    node_names: tuple[str, ...]
    node_of: tuple[int, ...]
    memory: tuple[int, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def node_rates(self) -> dict[tuple[int, int], float]:
        """Bytes/s by (source, destination) node, where the cluster file has one."""
        first = {node: rank for rank, node in reversed(list(enumerate(self.node_of)))}
        pairs = ((a, b) for a in first for b in first if a != b)
        rates = {(a, b): rate_of(self.cluster.link(first[a], first[b])) for a, b in pairs}
        return {pair: rate for pair, rate in rates.items() if rate is not None}

    def pace(self) -> dict[str, list[list[float | None]]]:
        """(bytes/s, seconds) by source and destination rank, for links that ranks pace themselves; None: not paced."""
        links = [[self._paced(a, b) for b in range(len(self.node_of))] for a in range(len(self.node_of))]
        return {
            "bandwidth": [[rate_of(link) for link in row] for row in links],
            "latency": [[link.emulated_latency if link else None for link in row] for row in links],
        }

    def _paced(self, a: int, b: int) -> Link | None:
        if a == b:
            return None
        same_node = self.node_of[a] == self.node_of[b]
        return self.cluster.intra_node if same_node else self.cluster.link(a, b)


def rate_of(link: Link | None) -> float | None:
    """The bytes/s that the testbed gives a link: the emulated rate, else the file's bandwidth."""
    if link is None:
        return None
    return link.bandwidth if link.emulated is None else link.emulated


def decide(
    cluster: Cluster, machine: Machine, chips: str | None = None, links: str | None = None, memory_limit: bool = False
) -> Settings:
    """Choose settings that were not asked for and check the others.

    Raises:
        UserError: the cluster or the machine does not allow it; names the field and an alternative.
    """
    if cluster.world_size > MAX_RANKS:
        raise UserError(
            "too many ranks for one machine", field="nodes", value=cluster.world_size,
            accepted=f"at most {MAX_RANKS} chips in all", where=cluster.file,
        )  # fmt: skip
    reasons: dict[str, str] = {}
    speeds = tuple(cluster.chip_of(rank).speed for rank in range(cluster.world_size))
    chips = _choose_chips(cluster, chips, speeds, reasons)
    links = _choose_links(cluster, machine, links, reasons)
    if memory_limit and (why := machine.no_memory_limit()):
        raise UserError(f"memory cannot be limited here: {why}", field="--memory-limit", accepted="a run without it")
    if chips != "none":
        _check_total(cluster, machine, speeds)
    names = tuple(dict.fromkeys(rank.node for rank in cluster.ranks))
    ranks = [cluster.chip_of(rank) for rank in range(cluster.world_size)]
    settings = Settings(
        cluster, chips, links, speeds,
        cores=pin([1.0 if s is None or chips == "none" else s for s in speeds], machine.cores),
        node_names=names,
        node_of=tuple(names.index(rank.node) for rank in cluster.ranks),
        memory=tuple(chip.memory_budget or chip.memory for chip in ranks) if memory_limit else (),
        reasons=reasons,
    )  # fmt: skip
    if chips != "none":
        _check_cores(settings, machine)
    return replace(settings, notes=tuple(_notes(settings)))


def _choose_chips(
    cluster: Cluster, asked: str | None, speeds: Sequence[float | None], reasons: dict[str, str]
) -> str:
    lacking = sorted({cluster.ranks[rank].chip for rank, speed in enumerate(speeds) if speed is None})
    if asked is None:
        if lacking:
            reasons["chips"] = f"by default: no emulate.speed is given for {', '.join(lacking)}"
            return "none"
        reasons["chips"] = "by default: every chip has an emulate.speed, and clock varies least from run to run"
        return "clock"
    if asked != "none" and lacking:
        raise UserError(
            "the cluster file does not say how fast this chip is to be", field=f"chips.{lacking[0]}.emulate.speed",
            accepted="emulate: {speed: 0.5} for every chip (1.0 = one core of this machine), or --chips none",
            where=cluster.file,
        )  # fmt: skip
    reasons["chips"] = "as asked"
    return asked


def _choose_links(cluster: Cluster, machine: Machine, asked: str | None, reasons: dict[str, str]) -> str:
    why_not = machine.no_namespaces()
    latency = _emulated_latency(cluster)
    if asked is None:
        if cluster.inter_node is None and not cluster.pairs or len({rank.node for rank in cluster.ranks}) == 1:
            reasons["links"] = "by default: the cluster file gives no rate between nodes"
            return "none"
        if latency:
            reasons["links"] = f"by default: {latency} has an emulated latency, which only paced links have"
        elif why_not:
            reasons["links"] = f"by default: namespaces are not possible here ({why_not})"
        else:
            reasons["links"] = "by default: root, ip and tc are here, and the kernel shapes better than ranks do"
        return "paced" if latency or why_not else "namespaces"
    if asked == "namespaces":
        if why_not:
            accepted = "--links paced, which needs no root; or run as root on Linux with iproute2"
            raise UserError(f"links cannot be shaped here: {why_not}", field="--links", value=asked, accepted=accepted)
        if latency:
            raise UserError(
                "latency is not emulated by namespaces (the kernel has no netem)", field=f"{latency}.emulate.latency",
                accepted="a file without it (the measured latency is reported), or --links paced", where=cluster.file,
            )  # fmt: skip
    reasons["links"] = "as asked"
    return asked


def _all_links(cluster: Cluster) -> dict[str, Link]:
    """The links of the file by their path in it."""
    links = {"links.intra_node": cluster.intra_node, "links.inter_node": cluster.inter_node}
    links |= {f"links.pairs[{i}]": link for i, link in enumerate(cluster.pairs.values())}
    return {path: link for path, link in links.items() if link is not None}


def _emulated_latency(cluster: Cluster) -> str:
    """Path of the first link with an emulated latency; empty if there is none."""
    return next((path for path, link in _all_links(cluster).items() if link.emulated_latency is not None), "")


def _check_total(cluster: Cluster, machine: Machine, speeds: Sequence[float | None]) -> None:
    total, limit = sum(speed or 0.0 for speed in speeds), SHARE * len(machine.cores)
    if total > limit + 1e-9:
        parts = []
        for name, chip in cluster.chips.items():
            count = sum(rank.chip == name for rank in cluster.ranks)
            parts.append(f"{count} x {name} at {chip.speed}")
        raise UserError(
            f"the chips together are as fast as {total:.4g} cores: {', '.join(parts)}", field="emulate.speed",
            accepted=f"a total of at most {limit:.4g} on the {len(machine.cores)} cores of this machine",
            where=cluster.file,
        )  # fmt: skip


def _check_cores(settings: Settings, machine: Machine) -> None:
    for core in machine.cores:
        ranks_on_core = _on_core(settings, core)
        total = sum(speed for _, speed in ranks_on_core)
        if total > 1 + 1e-9:
            ranks = ", ".join(f"rank {rank} at {speed}" for rank, speed in ranks_on_core)
            raise UserError(
                f"the ranks cannot be spread over the cores: {ranks} would share one", field="emulate.speed",
                value=total, accepted="speeds of which every core gets at most 1.0", where=settings.cluster.file,
            )  # fmt: skip


def _on_core(settings: Settings, core: int) -> list[tuple[int, float]]:
    """(rank, speed) of the ranks on a core."""
    return [(rank, speed or 0.0) for rank, speed in enumerate(settings.speeds) if settings.cores[rank] == core]


def pin(speeds: Sequence[float], cores: Sequence[int]) -> tuple[int, ...]:
    """A core for every rank: fastest ranks first, each to the least loaded core."""
    load = dict.fromkeys(cores, 0.0)
    core_of_rank = [0] * len(speeds)
    for rank in sorted(range(len(speeds)), key=lambda r: (-speeds[r], r)):
        core = min(load, key=lambda c: (round(load[c], 9), c))
        load[core] += speeds[rank]
        core_of_rank[rank] = core
    return tuple(core_of_rank)


def _notes(settings: Settings) -> list[str]:
    notes = []
    if settings.chips == "clock":
        notes.append("chips: an emulated clock; errors of predictions under it are schedule + communication errors")
    if settings.chips == "soft":
        notes.append("chips: the CPU time of this machine's cores, which varies from run to run: see the spread")
        for core in sorted(set(settings.cores)):
            load = sum(speed for _, speed in _on_core(settings, core))
            if load > SHARE + 1e-9:
                notes.append(f"chips: those on core {core} are as fast as {load:.4g} of it together, and fall behind "
                             f"where others use it; up to {SHARE} is safer")  # fmt: skip
    if settings.chips == "none":
        notes.append("chips: every rank is as fast as its share of a core")
    if settings.links != "none":
        rates = set(settings.node_rates.values())
        if rates and max(rates) > FAST_LINK:
            notes.append(f"links: {format_rate(max(rates))} may be more than the cores of this machine can move")
    if settings.links == "namespaces" and settings.cluster.intra_node is not None:
        notes.append("links: those inside a node are not shaped")
    return notes


def describe_links(settings: Settings) -> list[tuple[str, int, int, float | None]]:
    """One (name, node, node, bytes/s) per pair of node groups with two nodes."""
    groups: dict[str, list[int]] = {}
    for rank, node in enumerate(settings.node_of):
        nodes = groups.setdefault(settings.cluster.ranks[rank].group, [])
        if node not in nodes:
            nodes.append(node)
    rates = settings.node_rates
    links = []
    for first, second in combinations_with_replacement(groups, 2):
        a, b = groups[first][0], groups[second][-1]
        if a != b:
            links.append((f"{first}-{second}", a, b, rates.get((a, b))))
    return links
