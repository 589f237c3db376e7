"""The launcher's side of joining: which hosts ask, which may come, and which of them are ready."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hetero_megatron.cluster import load_cluster
from hetero_megatron.comm.epochs import EpochStore, JoinAnswer, JoinRequest, Speed
from hetero_megatron.errors import UserError
from hetero_megatron.launch.jobs import Seat
from hetero_megatron.utils.text import plural


@dataclass(frozen=True)
class Newcomer:
    """A host that was admitted, and is in no epoch yet; ``cluster``: the file that it came with, if any."""

    node: str
    members: tuple[int, ...]
    cluster: Path | None


class Admission:
    """
    Args:
        first: number of the next member.
        least_speed: share of what others of its kind compute that a device must reach; 0: whatever.
        scratch: folder for cluster files that hosts bring.
        attached: by node, members of the first epoch that its agent starts.

    Attributes:
        admitted: whether any host ever was.
        awaited: those of ``attached`` that have not asked yet.
        unfit: one of them was refused.
        seats: of all members that came this way.
    """

    def __init__(
        self, store: EpochStore, first: int, least_speed: float, scratch: Path,
        attached: Mapping[str, Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        self._store, self._next, self._least, self._scratch = store, first, least_speed, scratch
        self._asked = 0
        self._waiting: list[Newcomer] = []
        self._program: dict[str, str] | None = None
        self._ranks, self.awaited = first, dict(attached or {})
        self.admitted = self.unfit = False
        self.seats: dict[int, Seat] = {}

    @property
    def waiting(self) -> list[int]:
        """Members that are in no epoch yet."""
        return [member for host in self._waiting for member in host.members]

    def look(self, present: set[str], cluster: Path | None) -> list[str]:
        """Answer hosts that have asked since; what is to be said of it.

        Args:
            present: nodes that are in the job.
            cluster: its cluster file.
        """
        messages = []
        while (request := self._store.join_request(self._asked)) is not None:
            begins = request.node in self.awaited
            present_now = present | {host.node for host in self._waiting}
            refusal, file = self._check_first(request) if begins else self._check(request, present_now, cluster)
            members: list[int] = []
            if not refusal:
                members = [*self.awaited.pop(request.node)] if begins else self._wait(request, file, cluster)
                self.admitted = True
            self.unfit = self.unfit or begins and bool(refusal)
            self._store.answer(self._asked, JoinAnswer(refusal, members, self._ranks if begins else 0))
            self._asked += 1
            decision = f"refused: {refusal}" if refusal else "admitted; it joins after a step, once it is ready"
            if refusal or not begins:
                verb = "begin" if begins else "join"
                messages.append(f"{request.node} ({plural(request.chips, 'chip')}) asks to {verb}: {decision}")
        return messages

    def _wait(self, request: JoinRequest, file: Path | None, cluster: Path | None) -> list[int]:
        """A host that joins once it is ready: its members."""
        members = list(range(self._next, self._next + request.chips))
        self._next += request.chips
        self._waiting.append(Newcomer(request.node, tuple(members), file))
        described = file is not None or cluster is not None
        self.seats |= {m: Seat(request.node, i, None if described else i) for i, m in enumerate(members)}
        return members

    def ready(self) -> list[int]:
        """Members of hosts all of whose processes have loaded what they need."""
        return [m for host in self._waiting if len(self._store.speeds(host.members)) == len(host.members)
                for m in host.members]  # fmt: skip

    def leave_out_slow(self, members: list[int]) -> list[str]:
        """Refuse hosts with a device that is much slower than others of its kind, which is no help and may be sick.

        Args:
            members: of the job.

        Returns:
            what is to be said of it.
        """
        speeds, messages, ready = self._store.speeds(members), [], self.ready()
        for host in [host for host in self._waiting if host.members[0] in ready]:
            reason = _too_slow(self._store.speeds(host.members), speeds, self._least)
            if reason:
                self.drop(*host.members)
                self._store.refuse(host.members[0], reason)
                messages.append(f"{host.node} does not join: {reason}")
        return messages

    def drop(self, *members: int) -> None:
        """Their hosts do not join."""
        self._waiting = [host for host in self._waiting if not set(host.members) & set(members)]

    def take(self, members: list[int]) -> list[str]:
        """They are in an epoch from here on; what is to be said of it."""
        joined_hosts = [host for host in self._waiting if set(host.members) & set(members)]
        self._waiting = [host for host in self._waiting if host not in joined_hosts]
        return [f"{host.node} joined ({plural(len(host.members), 'rank')})" for host in joined_hosts]

    def cluster_with(self, nodes: set[str]) -> Path | None:
        """The newest cluster file that one of these nodes came with."""
        files = [host.cluster for host in self._waiting if host.node in nodes and host.cluster is not None]
        return files[-1] if files else None

    def _check(self, request: JoinRequest, present: set[str], cluster: Path | None) -> tuple[str, Path | None]:
        """(why the host may not join, or an empty string; the cluster file that it came with, if any)."""
        if request.node in present:
            return f"a node of this name is in the job already; accepted: --node other than {_names(present)}", None
        if problem := self._unlike_program(request):
            return problem, None
        file = cluster
        if request.cluster:
            if cluster is None:
                return "the job has no cluster file; accepted: without --cluster", None
            file = self._scratch / f"cluster-with-{self._asked}.yaml"
            file.write_text(request.cluster)
        if file is None:
            return "", None
        try:
            chips = Counter(rank.node for rank in load_cluster(file).ranks)
            ranks_of_node = (
                Counter(rank.node for rank in load_cluster(cluster).ranks) if cluster is not None else Counter()
            )
        except UserError as error:
            return str(error), None
        unlike = sorted(node for node in present if chips[node] != (ranks_of_node[node] or chips[node]))
        if unlike:
            return f"its cluster file does not have the chips of {_names(set(unlike))}, which are in the job", None
        if chips[request.node] != request.chips:
            owner = "its" if request.cluster else "the job's"
            mismatch = f"{owner} cluster file gives {request.node} {plural(chips[request.node], 'chip')}"
            return f"{mismatch}; accepted: --cluster FILE with all nodes, this one with {request.chips}", None
        return "", file if request.cluster else None

    def _check_first(self, request: JoinRequest) -> tuple[str, None]:
        """The same of a host that the first epoch begins with."""
        ranks = len(self.awaited[request.node])
        if ranks != request.chips:
            return f"it has {plural(request.chips, 'chip')}, and is to run {plural(ranks, 'rank')}", None
        return self._unlike_program(request), None

    def _unlike_program(self, request: JoinRequest) -> str:
        for name, job_has in self._mine().items():
            if (host_has := request.program.get(name)) != job_has:
                return f"{name}: this host has {host_has}, the job {job_has}; accepted: the same on every host"
        return ""

    def _mine(self) -> dict[str, str]:
        if self._program is None:
            from hetero_megatron.training.agreement import program_facts

            self._program = program_facts()
        return self._program


def _too_slow(theirs: Mapping[int, Speed], job_speeds: Mapping[int, Speed], least: float) -> str:
    for speed in theirs.values():
        rates_of_kind = [rank_speed.flops for rank_speed in job_speeds.values() if rank_speed.kind == speed.kind]
        if rates_of_kind and speed.flops < least * median(rates_of_kind):
            comparison = f"where {len(rates_of_kind)} of the job compute {median(rates_of_kind):.3g}"
            accepted = f"accepted: at least {least:g} of that (--least-speed of the job)"
            return f"its {speed.kind} computes {speed.flops:.3g} FLOP/s {comparison}; {accepted}"
    return ""


def _names(nodes: set[str]) -> str:
    return ", ".join(sorted(nodes)[:8])
