"""Which ranks reach each other through a communication library, and how the other ranks communicate.

A *backend island* is a set of ranks whose platforms have the same vendor and library and declare to reach each other.
Device and library names alone do not decide: ROCm's torch also calls them ``cuda`` and ``nccl``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from hetero_megatron.errors import UserError
from hetero_megatron.platform import Platform
from hetero_megatron.utils.text import plural, rank_ranges

AUTO, BRIDGE = TRANSPORTS = ("auto", "bridge")


@dataclass(frozen=True)
class Endpoint:
    """How one rank communicates; sent to all others at the start.

    Attributes:
        platform, vendor, chip: of its device; chip is the driver's name.
        library: of its backend; reach: a token shared by ranks that reach each other by it.
        backend: string for ``torch.distributed.new_group``.
        direct: backends that reach other vendors' chips, best first.
        torch: version; library_version: of ``library``, empty where it does not say.
        device: torch's name of its kind; identity: of the device, with its host; empty where its driver does not say.
        transport: value of ``--transport`` on that rank.
        aborts: whether groups of ``library`` can be abandoned there while other ranks are lost.
    """

    platform: str
    vendor: str
    chip: str
    library: str
    reach: str
    backend: str
    direct: tuple[str, ...]
    torch: str
    transport: str = AUTO
    library_version: str = ""
    device: str = "cpu"
    identity: str = ""
    aborts: bool = True

    @classmethod
    def of(cls, platform: Platform, torch: str, transport: str = AUTO) -> Endpoint:
        return cls(
            platform.name, platform.vendor, platform.chip(), platform.library, platform.reach(), platform.backend,
            platform.direct, torch, transport, platform.library_version(), platform.device.type,
            platform.identity(), platform.library == "gloo" or platform.aborts,
        )  # fmt: skip


@dataclass(frozen=True)
class Route:
    """How ranks exchange device tensors: by their island's ``library``, by a ``direct`` backend of both sides, or by
    the bridge (both empty)."""

    library: str = ""
    direct: str = ""

    @property
    def bridged(self) -> bool:
        return not self.library and not self.direct

    def __str__(self) -> str:
        if self.library:
            return self.library
        return f"{self.direct}, direct" if self.direct else "bridge (device, host memory, gloo, host memory, device)"


class Islands:
    """All ranks of a job in backend islands, numbered by their lowest rank; equal on all ranks.

    Args:
        endpoints: of ranks 0, 1, 2, ….

    Attributes:
        members: ranks of each island, ascending.

    Raises:
        UserError: ranks have different values of ``--transport``, or those of an island unlike versions of its library,
            or two share a device.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = tuple(endpoints)
        ranks_by_key: dict[tuple[str, str, str], list[int]] = {}
        for rank, endpoint in enumerate(endpoints):
            key = (
                ("", "gloo", "") if endpoint.library == "gloo" else (endpoint.vendor, endpoint.library, endpoint.reach)
            )
            ranks_by_key.setdefault(key, []).append(rank)  # gloo reaches everyone
        self.members = tuple(tuple(ranks) for ranks in ranks_by_key.values())
        self._of = {rank: i for i, ranks in enumerate(self.members) for rank in ranks}
        transports = {endpoint.transport for endpoint in endpoints}
        if len(transports) > 1:
            first = {t: next(r for r, e in enumerate(endpoints) if e.transport == t) for t in sorted(transports)}
            text = ", ".join(f"rank {rank} says {transport}" for transport, rank in first.items())
            raise UserError(f"ranks have different ones: {text}", field="--transport", accepted="one for all ranks")

        self._own_devices()
        for i, ranks in enumerate(self.members):
            if not self.uses_gloo(i):
                self._alike(ranks, f"versions of {self.endpoints[ranks[0]].library}", "library_version",
                            "communication library", "one version on all ranks of a vendor")  # fmt: skip
                self._alike(ranks, "direct backends", "direct", "direct backend",
                            "the same ones installed for all ranks of a vendor, or --transport bridge")  # fmt: skip

    def _own_devices(self) -> None:
        first: dict[str, int] = {}
        for rank, endpoint in enumerate(self.endpoints):
            if endpoint.identity and first.setdefault(endpoint.identity, rank) != rank:
                raise UserError(
                    f"ranks {first[endpoint.identity]} and {rank} would share the device {endpoint.identity}",
                    field="LOCAL_RANK", accepted="a device of its own for each rank", where="environment",
                )  # fmt: skip

    def _alike(self, ranks: Sequence[int], what: str, attribute: str, field: str, accepted: str) -> None:
        """Ranks whose libraries are unlike connect, and then fail or hang in words that name neither; those of which
        some only can go by a direct backend would wait for each other in unlike groups."""
        if attribute == "direct" and (len(self) == 1 or self.endpoints[ranks[0]].transport == BRIDGE):
            return
        ranks_by_value: dict[str, list[int]] = {}
        for rank in ranks:
            value = getattr(self.endpoints[rank], attribute)
            ranks_by_value.setdefault(value if isinstance(value, str) else ", ".join(value) or "none", []).append(rank)
        if len(ranks_by_value) > 1:
            unlike = ", ".join(f"{value or 'unknown'} on ranks {rank_ranges(r)}" for value, r in ranks_by_value.items())
            raise UserError(f"unlike {what}: {unlike}", field=field, accepted=accepted)

    @property
    def has_devices(self) -> bool:
        """Whether some rank computes on another device than its processor."""
        return any(endpoint.device != "cpu" for endpoint in self.endpoints)

    def of(self, rank: int) -> int:
        """Index of a rank's island."""
        return self._of[rank]

    def uses_gloo(self, island: int) -> bool:
        """Whether the island's library is gloo, which connects the whole job."""
        return self.endpoints[self.members[island][0]].library == "gloo"

    def crossed(self, ranks: Iterable[int]) -> bool:
        """Whether ``ranks`` span several islands."""
        return len({self._of[rank] for rank in ranks}) > 1

    def route(self, ranks: Iterable[int]) -> Route:
        """How these ranks exchange device tensors."""
        first, *other_endpoints = {self._of[rank]: self.endpoints[rank] for rank in ranks}.values()
        if not other_endpoints:
            return Route(library=first.library)
        if first.transport == BRIDGE:
            return Route()
        common = [b for b in first.direct if all(b in other.direct for other in other_endpoints)]
        return Route(direct=common[0]) if common else Route()

    def __len__(self) -> int:
        return len(self.members)

    def __str__(self) -> str:
        """A table of the islands, and of the route between each pair."""
        lines = [f"communication: {plural(len(self), 'island')}"]
        for i, ranks in enumerate(self.members):
            endpoint = self.endpoints[ranks[0]]
            chips = ", ".join(dict.fromkeys(self.endpoints[r].chip for r in ranks))
            text = f"ranks {rank_ranges(ranks)}, {endpoint.platform} ({endpoint.vendor}; {chips}), {endpoint.library}"
            lines.append(f"  island {i}: {text}")
        for a, b in combinations(range(len(self)), 2):
            lines.append(f"  island {a} with {b}: {self.route((self.members[a][0], self.members[b][0]))}")
        return "\n".join(lines)
