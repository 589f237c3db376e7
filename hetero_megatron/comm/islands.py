"""Which ranks reach each other through a communication library, and how the others do.

A *backend island* is all ranks whose platforms are of one vendor, speak one library, and say that they reach each other
by it. Two vendors may call their devices and their libraries alike (ROCm's torch says ``cuda`` and ``nccl``), so
neither name alone decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from hetero_megatron.errors import UserError
from hetero_megatron.platform import Platform
from hetero_megatron.words import plural, rank_ranges

AUTO, BRIDGE = TRANSPORTS = ("auto", "bridge")


@dataclass(frozen=True)
class Endpoint:
    """How one rank communicates: what it tells all others at the start.

    Attributes:
        platform, vendor, chip: of its device; chip is the name that the driver gives.
        library: that its backend speaks; reach: what those who reach each other by it have in common.
        backend: string for ``torch.distributed.new_group``.
        direct: backends that reach other vendors' chips, best first.
        torch: its version.
        transport: what ``--transport`` says there.
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

    @classmethod
    def of(cls, platform: Platform, torch: str, transport: str = AUTO) -> Endpoint:
        return cls(
            platform.name, platform.vendor, platform.chip(), platform.library, platform.reach(), platform.backend,
            platform.direct, torch, transport,
        )  # fmt: skip


@dataclass(frozen=True)
class Route:
    """How ranks exchange device tensors: by the library of their island, by a backend of both sides, or by the bridge
    (both empty: ``library`` and ``direct``)."""

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
    """All ranks of a job in backend islands, numbered by their lowest rank; the same on all ranks.

    Args:
        endpoints: of ranks 0, 1, 2, ….

    Attributes:
        members: ranks of each island, ascending.

    Raises:
        UserError: ranks say different transports.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = tuple(endpoints)
        found: dict[tuple[str, str, str], list[int]] = {}
        for rank, one in enumerate(endpoints):
            key = ("", "gloo", "") if one.library == "gloo" else (one.vendor, one.library, one.reach)
            found.setdefault(key, []).append(rank)  # gloo reaches everyone
        self.members = tuple(tuple(ranks) for ranks in found.values())
        self._of = {rank: i for i, ranks in enumerate(self.members) for rank in ranks}
        said = {one.transport for one in endpoints}
        if len(said) > 1:
            first = {t: next(r for r, e in enumerate(endpoints) if e.transport == t) for t in sorted(said)}
            text = ", ".join(f"rank {rank} says {transport}" for transport, rank in first.items())
            raise UserError(f"ranks have different ones: {text}", field="--transport", accepted="one for all ranks")

    def of(self, rank: int) -> int:
        """Number of the island that a rank is in."""
        return self._of[rank]

    def uses_gloo(self, island: int) -> bool:
        """Whether the library of an island is gloo, which the whole job is joined by."""
        return self.endpoints[self.members[island][0]].library == "gloo"

    def crossed(self, ranks: Iterable[int]) -> bool:
        """Whether ``ranks`` are in more than one island."""
        return len({self._of[rank] for rank in ranks}) > 1

    def route(self, ranks: Iterable[int]) -> Route:
        """How these ranks exchange device tensors."""
        first, *others = {self._of[rank]: self.endpoints[rank] for rank in ranks}.values()
        if not others:
            return Route(library=first.library)
        if first.transport == BRIDGE:
            return Route()
        common = [b for b in first.direct if all(b in other.direct for other in others)]
        return Route(direct=common[0]) if common else Route()

    def __len__(self) -> int:
        return len(self.members)

    def __str__(self) -> str:
        """A table: the islands, and how each pair of them communicates."""
        lines = [f"communication: {plural(len(self), 'island')}"]
        for i, ranks in enumerate(self.members):
            one = self.endpoints[ranks[0]]
            chips = ", ".join(dict.fromkeys(self.endpoints[r].chip for r in ranks))
            text = f"ranks {rank_ranges(ranks)}, {one.platform} ({one.vendor}; {chips}), {one.library}"
            lines.append(f"  island {i}: {text}")
        for a, b in combinations(range(len(self)), 2):
            lines.append(f"  island {a} with {b}: {self.route((self.members[a][0], self.members[b][0]))}")
        return "\n".join(lines)
