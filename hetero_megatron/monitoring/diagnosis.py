"""What ranks that lost a peer tell their launcher, and what it concludes: which nodes are cut off from which. No torch.

Each rank that ends because a peer does not answer leaves a file where the launcher looks: whom it waited for, in what,
and which ranks it could still reach. Nodes between which nothing comes through cannot train together; the launcher
drops as few ranks as it can so that all who are left reach each other.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.log_fields import array, integer, number, record, require, text
from hetero_megatron.utils.files import read_json_object

if TYPE_CHECKING:  # a launcher starts without torch
    from hetero_megatron.comm import CommError

EXACT = 20  # nodes with trouble: beyond so many the fewest are no longer searched for, but dropped one by one
Pair = frozenset[str]
_RANK = integer(0, 1 << 20)
_DIAGNOSIS = record(
    {"rank": _RANK, "peers": array(_RANK), "seconds": number(0), "activity": text, "unreachable": array(_RANK)}
)


@dataclass(frozen=True)
class Diagnosis:
    """What one rank saw when it gave up; see ``CommError``. ``unreachable``: ranks that it cannot reach at all."""

    rank: int
    peers: tuple[int, ...]
    seconds: float
    activity: str
    unreachable: tuple[int, ...] = ()

    def __str__(self) -> str:
        peers = ", ".join(map(str, self.peers[:8]))
        return f"rank {self.rank}, in {self.activity}, waited {self.seconds:.1f} s for rank {peers}"


def diagnoses_at(scratch: Path, number: int) -> Path:
    """Where the ranks of round ``number`` leave theirs."""
    return scratch / f"diagnoses-round-{number}"


def leave_diagnosis(error: CommError, where: str | None) -> None:
    """For the launcher; a disk that is full must not hide the error itself.

    Args:
        where: ``LauncherEnvironment.diagnoses``.
    """
    if where is None or error.rank is None:
        return
    from hetero_megatron.comm.connectivity import UNREACHABLE

    cut_off = tuple(sorted(rank for rank, word in error.reach.items() if word == UNREACHABLE))
    found = Diagnosis(error.rank, error.peers, error.seconds, error.activity, cut_off)
    with suppress(OSError):
        Path(where).mkdir(parents=True, exist_ok=True)
        part = Path(where) / f".rank-{error.rank}"
        part.write_text(json.dumps(asdict(found)), encoding="utf-8")
        part.replace(Path(where) / f"rank-{error.rank}.json")


def say_joined(rank: int, where: str | None) -> None:
    """To the launcher, once this rank has met all others: from now on it notices when one of them is gone.

    Args:
        where: ``LauncherEnvironment.diagnoses``.
    """
    if where is not None:
        with suppress(OSError):
            Path(where).mkdir(parents=True, exist_ok=True)
            (Path(where) / f"joined-{rank}").touch()


def take_joined(directory: Path) -> set[int]:
    """The ranks that said so, once; nothing of it stays behind."""
    found = list(directory.glob("joined-*"))
    for path in found:
        path.unlink(missing_ok=True)
    with suppress(OSError):  # diagnoses stay
        directory.rmdir()
    return {int(name) for path in found if (name := path.name.removeprefix("joined-")).isdecimal()}


def read_diagnoses(directory: Path) -> list[Diagnosis]:
    """By rank; those that cannot be read are left out."""
    found = []
    for path in directory.glob("rank-*.json"):
        with suppress(UserError):
            data = read_json_object(path)
            require(data, _DIAGNOSIS, "what a rank that lost a peer writes", str(path))
            peers, unreachable = tuple(data["peers"]), tuple(data["unreachable"])
            found.append(Diagnosis(data["rank"], peers, data["seconds"], data["activity"], unreachable))
    return sorted(found, key=lambda d: d.rank)


def cut_pairs(diagnoses: Sequence[Diagnosis], nodes: Sequence[str], lost: Collection[str] = ()) -> set[Pair]:
    """Pairs of nodes of which one said that it cannot reach the other.

    Args:
        nodes: of each rank.
        lost: nodes that count no more.
    """
    pairs = set()
    for found in diagnoses:
        for other in found.unreachable:
            if max(found.rank, other) < len(nodes):
                pair = frozenset((nodes[found.rank], nodes[other]))
                if len(pair) == 2 and not pair & set(lost):
                    pairs.add(pair)
    return pairs


def to_drop(pairs: Collection[Pair], nodes: Sequence[str]) -> set[str]:
    """The nodes without which everybody reaches everybody: as few ranks as possible, and late ones rather than early.

    Args:
        nodes: of each rank.
    """
    place = {node: index for index, node in enumerate(dict.fromkeys(nodes))}
    troubled = {node for pair in pairs for node in pair}

    def cost(dropped: set[str]) -> tuple[int, list[int]]:
        return sum(node in dropped for node in nodes), sorted(-place[n] for n in dropped)

    def search(left: frozenset[Pair], exact: bool) -> set[str]:
        if not left:
            return set()
        partners = {n: {m for pair in left if n in pair for m in pair - {n}} for n in troubled}
        worst = max(partners, key=lambda n: (len(partners[n]), place[n]))
        without = {worst} | search(frozenset(p for p in left if worst not in p), exact)
        if not exact:
            return without
        gone = partners[worst]  # if the worst one stays, all its partners go
        return min(without, gone | search(frozenset(p for p in left if not p & gone), exact), key=cost)

    return search(frozenset(pairs), len(troubled) <= EXACT)
