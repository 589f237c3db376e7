"""An elastic job under torchrun, whose own agent ends all workers of a host with one: the workers do not train.

The first worker of each host is the host's agent (``launch.joining``), on the first host the launcher; the ranks are
its children. The other workers wait for its end. What hosts must know of each other passes through torchrun's store:
what each of them has, and where the launcher's store is.
"""

from __future__ import annotations

import secrets
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from hetero_megatron.cluster import Cluster
from hetero_megatron.comm.job_store import LastingStore, Records, StoreGone, open_listener, serve
from hetero_megatron.environment.launcher import LauncherEnvironment, is_loopback
from hetero_megatron.environment.network import address_towards, interface_of
from hetero_megatron.errors import UserError
from hetero_megatron.launch.attached import Attached
from hetero_megatron.launch.jobs import Seat
from hetero_megatron.launch.supervise import USER_ERROR
from hetero_megatron.utils.text import plural

MEET_SECONDS = 120.0  # that the hosts may take to start, after torchrun has brought them together
PATIENCE = 20.0  # seconds that torchrun's store may not answer
LOOK_SECONDS = 0.1
OLD_SECONDS = 2.0  # after which a refusal counts that may be of a launcher before this one
SCOPE = "elastic-hosts"


@dataclass(frozen=True)
class HostOffer:
    """What torchrun has started on a host: ``chips`` workers, the first of them is rank ``first``."""

    node: str
    first: int
    chips: int


@dataclass(frozen=True)
class Meeting:
    """Where the launcher's store is; ``refused``: why there is none."""

    host: str
    port: int
    secret: str
    refused: str


@dataclass(frozen=True)
class HostFailure:
    """Why a host cannot take part."""

    node: str
    problem: str


class HostRecords:
    """What hosts leave in torchrun's store, which may outlast its workers: what is said is said to one launcher, by the
    token that it has drawn. (torchrun's number of restarts may be another one on each host.)

    Args:
        launcher: of the first worker of a host; that of rank 0 is the job's launcher.
    """

    def __init__(self, launcher: LauncherEnvironment) -> None:
        self._world, self._token = launcher.world_size, ""
        host, port = launcher.rendezvous_address
        if launcher.rank == 0 and not launcher.agent_store:
            self._served = serve(open_listener(launcher), host, timedelta(seconds=PATIENCE))
        self._records = Records(LastingStore(host, port, PATIENCE, SCOPE), launcher.secret, SCOPE)
        if launcher.rank == 0:
            self._token = secrets.token_hex(8)
            self._records.set("launcher", self._token)

    def offers(self) -> list[HostOffer]:
        """Of all hosts, in the order of their ranks.

        Raises:
            UserError: one does not come.
        """
        offers, end = list[HostOffer](), time.monotonic() + MEET_SECONDS
        while (first := sum(offer.chips for offer in offers)) < self._world:
            if isinstance(offer := self._find(f"host/{first}", HostOffer), HostOffer):
                offers.append(offer)
            elif time.monotonic() > end:
                raise UserError(f"the host of rank {first} does not say what it has within {MEET_SECONDS:g} s",
                                field="torchrun", accepted="the same command on all hosts")  # fmt: skip
            else:
                time.sleep(LOOK_SECONDS)
        return offers

    def publish(self, meeting: Meeting) -> None:
        self._records.set(f"{self._token}/meeting", meeting)

    def offer(self, offer: HostOffer) -> None:
        self._records.set(f"{self._token}/host/{offer.first}", offer)

    def meet(self, offer: HostOffer) -> Meeting:
        """Offer what this host has to the launcher, and find its store.

        Raises:
            UserError: the launcher refused, or says nothing.
        """
        begin = time.monotonic()
        while (seconds := time.monotonic() - begin) < MEET_SECONDS + PATIENCE:
            if self._records.store.check(["launcher"]):
                (token,) = self._records.get(["launcher"], str)
                if token != self._token:
                    self._token = token
                    self.offer(offer)
                meeting = self._find("meeting", Meeting)
                refusal = meeting.refused if isinstance(meeting, Meeting) else ""
                if refusal and seconds > OLD_SECONDS:
                    raise UserError(f"the launcher, on the host of rank 0, refused: {refusal}", field="torchrun")
                if isinstance(meeting, Meeting) and not refusal and _listens(meeting):
                    return meeting
            time.sleep(LOOK_SECONDS)
        raise UserError("the launcher, which is the worker of rank 0, says nothing", field="torchrun",
                        accepted="the same command on all hosts")  # fmt: skip

    def fail(self, node: str, problem: str) -> None:
        """This host cannot take part."""
        self._records.set(f"{self._token}/failed", HostFailure(node, problem))

    def failed(self) -> HostFailure | None:
        """The last one that said so."""
        failure = self._find("failed", HostFailure)
        return failure if isinstance(failure, HostFailure) else None

    def _find(self, key: str, kind: type) -> object | None:
        key = f"{self._token}/{key}"
        return self._records.get([key], kind)[0] if self._records.store.check([key]) else None


def _listens(meeting: Meeting) -> bool:
    """Whether the launcher, or whatever is between it and this host, does not say that nobody listens there: then it
    was one before torchrun started its workers again."""
    try:
        socket.create_connection((meeting.host, meeting.port), timeout=5.0).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True


class TorchrunAgents:
    """See :class:`~hetero_megatron.launch.attached.Agents`."""

    def __init__(self, records: HostRecords) -> None:
        self._records, self._told = records, False
        self.address: str | None = None
        self._look_until = self._looked = 0.0

    def offers(self) -> list[HostOffer]:
        return self._records.offers()

    def open(self, host: str, port: int, secret: str) -> None:
        self._told, self._look_until = True, time.monotonic() + MEET_SECONDS
        self._records.publish(Meeting(host, port, secret, ""))

    def lost(self) -> dict[str, int]:
        """An agent that fails to begin says so; one that is gone later is noticed by the ranks that miss its own, and
        torchrun's store, which may be on another host, is not asked any more."""
        now = time.monotonic()
        if not self._looked + LOOK_SECONDS < now < self._look_until:
            return {}
        self._looked = now
        try:
            failure = self._records.failed()
        except StoreGone:
            self._look_until = 0.0
            return {}
        if failure is None:
            return {}
        self._look_until = 0.0
        print(f"launcher: {failure.node} cannot begin: {failure.problem}", file=sys.stderr, flush=True)
        return {failure.node: USER_ERROR}

    def close(self, problem: str = "") -> None:
        if not self._told:
            self._told = True
            with suppress(StoreGone):
                self._records.publish(Meeting("", 0, "", problem or "the job did not begin"))


def node_of(launcher: LauncherEnvironment, cluster: bool) -> str:
    """What a host is called: in the cluster file, else by its name and first rank."""
    return launcher.node or socket.gethostname() + ("" if cluster else f"-{launcher.rank}")


def attach(
    launcher: LauncherEnvironment, agents: TorchrunAgents, cluster: Cluster | None, ranks: int, address: str | None
) -> Attached:
    """All hosts that torchrun has started, for the launcher, which is one of them.

    Args:
        ranks: of the plan.
        address: of this host, as others reach it; None: as the hosts reach torchrun's store, or as it reaches that.

    Raises:
        UserError: they do not fit the cluster file, or the plan.
    """
    offers = agents.offers()
    chips = {offer.node: offer.chips for offer in offers}
    twice = next((offer.node for offer in offers if sum(other.node == offer.node for other in offers) > 1), None)
    if twice is not None:
        raise UserError("two hosts of torchrun have this name", field="HETERO_NODE", value=twice,
                        accepted="another one on each host")  # fmt: skip
    own_node = node_of(launcher, cluster is not None)
    if cluster is not None:
        seats = tuple(Seat(r.node, r.local) for r in cluster.ranks)
        _check_nodes(chips, cluster)
    elif len(offers) == 1:  # a node each, as with hetero-megatron run
        seats = tuple(Seat(f"rank{rank}", 0, rank) for rank in range(launcher.world_size))
    else:
        seats = tuple(Seat(offer.node, local, local) for offer in offers for local in range(offer.chips))
    if len(seats) < ranks:
        problem = f"the plan is for {plural(ranks, 'rank')}, and torchrun has started {len(seats)}"
        raise UserError(problem, field="--nproc-per-node", accepted=f"{ranks} workers on all hosts together")
    here = [member for member, seat in enumerate(seats) if seat.node == own_node or len(offers) == 1]
    agents.address = address or (own_address(launcher.address) if len(offers) > 1 else None)
    return Attached(seats, range(here[0], here[-1] + 1), agents)


def _check_nodes(chips: dict[str, int], cluster: Cluster) -> None:
    """The hosts of torchrun are the nodes of the cluster file, with their chips."""
    expected: dict[str, int] = {}
    for rank in cluster.ranks:
        expected[rank.node] = expected.get(rank.node, 0) + 1
    for node, count in chips.items():
        if node not in expected:
            problem = "the cluster file has no such node, and torchrun has started workers on it"
            raise UserError(problem, field="HETERO_NODE", value=node, accepted=", ".join(list(expected)[:8]),
                            where=cluster.file)  # fmt: skip
        if count != expected[node]:
            problem = f"the cluster file gives {node} {plural(expected[node], 'chip')}, and torchrun has started"
            raise UserError(f"{problem} {plural(count, 'worker')} there", field="--nproc-per-node", value=count,
                            accepted=f"{expected[node]} on that host", where=cluster.file)  # fmt: skip
    if missing := [node for node in expected if node not in chips]:
        raise UserError(
            f"torchrun has started no workers on {', '.join(missing[:8])}", field="--nnodes", value=len(chips),
            accepted=f"all {len(expected)} nodes of the cluster file; for those that come later: run --join",
            where=cluster.file,
        )  # fmt: skip


def own_address(store: str) -> str:
    """By which other hosts reach this one: the address of torchrun's store where that is this host, else the one on the
    way to it.

    Raises:
        UserError: there is no way.
    """
    try:
        address = socket.getaddrinfo(store, None, type=socket.SOCK_STREAM)[0][4][0]
        if is_loopback(str(address)) or interface_of(str(address)) is not None:
            return str(address)
        return address_towards(store)
    except OSError as error:
        problem, accepted = f"no way to it: {error.strerror or error}", "an address that this host reaches"
        raise UserError(problem, field="MASTER_ADDR", value=store, accepted=accepted) from None
