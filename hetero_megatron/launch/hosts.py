"""The hosts of a cluster file, and what each of them runs: a torchrun line with its environment."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetero_megatron.cluster import Cluster
from hetero_megatron.cluster.catalogue import INTERFACE_VARIABLES
from hetero_megatron.errors import UserError

OURS = ("HETERO_NODE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Host:
    """One node of the cluster file.

    Attributes:
        index: in file order, which torchrun's ``--node-rank`` is.
        node: name in the cluster file (``HETERO_NODE``).
        address: by which launcher and other hosts reach it.
        chips: ranks that it runs; ``first_rank``: the first of them.
        environment: of its ranks: from the cluster file, with the variables that name its interfaces.
        python: the interpreter there; directory: where commands start, as the cluster file says it; empty: it does not.
    """

    index: int
    node: str
    group: str
    address: str
    chip: str
    chips: int
    first_rank: int
    interface: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    directory: str = ""

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.chips)


def hosts_of(cluster: Cluster) -> tuple[Host, ...]:
    """In file order.

    Raises:
        UserError: a variable is set that launching sets.
    """
    hosts: list[Host] = []
    rank = 0
    for group in cluster.nodes:
        settings = group.settings
        environment = {**cluster.launch.env, **settings.env}
        for name in OURS:
            if name in environment:
                raise UserError(
                    "is set by the launcher, for each rank", field=f"env.{name}", value=environment[name],
                    accepted="other variables", where=cluster.file,
                )  # fmt: skip
        if settings.interface:
            names = {"GLOO_SOCKET_IFNAME", *INTERFACE_VARIABLES.get(cluster.chips[group.chip].vendor, ())}
            environment = {**dict.fromkeys(sorted(names), settings.interface), **environment}
        python = settings.python or cluster.launch.python or sys.executable
        directory = settings.directory or cluster.launch.directory
        for index in range(group.count):
            node = group.node(index)
            address = settings.hosts[index] if settings.hosts else node
            hosts.append(
                Host(len(hosts), node, group.name, address, group.chip, group.chips_per_node, rank,
                     settings.interface, {**environment, "HETERO_NODE": node}, python, directory)
            )  # fmt: skip
            rank += group.chips_per_node
    return tuple(hosts)


def directory_of(host: Host) -> str:
    """Where commands start there."""
    return host.directory or os.getcwd()


def program(command: Sequence[str]) -> list[str]:
    """``command`` as torchrun takes it: a script or ``-m MODULE`` as it is, any other program with ``--no-python``."""
    scripted = command[0] == "-m" or command[0].endswith(".py")
    return [*command] if scripted else ["--no-python", *command]


def torchrun(
    host: Host,
    hosts: Sequence[Host],
    cluster: Cluster,
    command: Sequence[str],
    max_restarts: int = 0,
    more: Sequence[str] = (),
    node_rank: str | None = None,
    master: str | None = None,
) -> list[str]:
    """The torchrun line of a host. All hosts have the same order as in the cluster file, so ranks are the plan's.

    Args:
        more: further options of torchrun.
        node_rank, master: in place of the host's index and the first host's address, where only a shell knows them.
    """
    line = [
        host.python, "-m", "torch.distributed.run", "--nnodes", str(len(hosts)),
        "--node-rank", str(host.index) if node_rank is None else node_rank, "--nproc-per-node", str(host.chips),
        "--master-addr", hosts[0].address if master is None else master,
        "--master-port", str(cluster.launch.master_port),
    ]  # fmt: skip
    restarts = ["--max-restarts", str(max_restarts)] if max_restarts else []
    return [*line, *restarts, *more, *program(command)]


def shell_line(environment: Mapping[str, str], words: Sequence[str]) -> str:
    """``NAME=value … words`` as a shell reads it."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(words)])


def printed(cluster: Cluster, command: Sequence[str], max_restarts: int = 0) -> str:
    """What to run on each host by hand, as a shell script of comments and lines."""
    hosts = hosts_of(cluster)
    lines = []
    for host in hosts:
        ranks = f"rank {host.first_rank}" if host.chips == 1 else f"ranks {host.ranks[0]} to {host.ranks[-1]}"
        lines.append(f"# {host.node} at {host.address}: {ranks}, {host.chips} x {host.chip}")
        line = shell_line(host.environment, torchrun(host, hosts, cluster, command, max_restarts))
        lines.append(f"cd -- {shlex.quote(host.directory)} && {line}" if host.directory else line)
    return "\n".join(lines) + "\n"
