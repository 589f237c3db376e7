"""Before anything is started: every host answers, is another one than the rest, and has the same software."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import UserError
from hetero_megatron.launch.connection import Connection
from hetero_megatron.utils.text import notice_line

CONNECT_SECONDS = 30.0
_SHOWN = 5  # hosts named in one message


def connect_all(
    connect: Callable[[], Sequence[Connection]], cluster: Cluster, seconds: float = CONNECT_SECONDS
) -> list[Connection]:
    """Connections to all hosts, checked.

    Raises:
        UserError: a host does not answer or does not fit; all connections are closed.
    """
    connections: list[Connection] = []
    try:
        connections = list(connect())
        wait_for_facts(connections, cluster, seconds)
        check_facts({c.host.node: c.facts or {} for c in connections}, connections, cluster)
    except BaseException:
        for connection in connections:
            connection.close()
        for connection in connections:
            connection.join(2)
        raise
    return connections


def wait_for_facts(connections: Sequence[Connection], cluster: Cluster, seconds: float) -> None:
    """Until all hosts have said what they are.

    Raises:
        UserError: one has not, and will not.
    """
    if silent := silent_hosts(connections, seconds, patient=False):
        raise _no_answer(silent, cluster, seconds)


def silent_hosts(connections: Sequence[Connection], seconds: float, patient: bool) -> list[Connection]:
    """Those that have not said what they are: at the first that is lost, or, where ``patient``, when all others have
    had their time."""
    end = time.monotonic() + seconds
    while silent := [c for c in connections if c.facts is None]:
        lost_hosts = [c for c in silent if c.lost]
        if len(lost_hosts) == len(silent) or (lost_hosts and not patient):
            return lost_hosts
        if time.monotonic() > end:
            return silent
        time.sleep(0.02)
    return []


def _no_answer(connections: Sequence[Connection], cluster: Cluster, seconds: float) -> UserError:
    first = connections[0]
    reason = first.lost or f"no answer in {seconds:g} s"
    other_nodes = ", ".join(c.host.node for c in connections[1:_SHOWN])
    others = f" (nor do {other_nodes}{', …' if len(connections) > _SHOWN else ''})" if other_nodes else ""
    accepted = "a host that answers `ssh HOST true` without a password"
    if "No module named" in reason or "not found" in reason or "No such file" in reason:
        accepted = f"Hetero-Megatron in {first.host.python} there, or launch: {{python: …}} in the cluster file, or "
        accepted += "python: of its node group"
    return UserError(
        f"cannot be started on: {reason}{others}", field=first.host.node, value=first.host.address, accepted=accepted,
        where=cluster.file,
    )  # fmt: skip


def check_facts(facts: Mapping[str, Mapping[str, Any]], connections: Sequence[Connection], cluster: Cluster) -> None:
    """The versions agree, no host is there twice, and its interfaces are there.

    Chips of unlike vendors may need other releases of torch and Python: between them a difference is a notice, as it is
    between ranks (``training.same_program``).

    Args:
        facts: of ``launch.remote.facts``, by node.
    """
    vendors = {c.host.node: cluster.chips[c.host.chip].vendor for c in connections}
    for key, name in (("version", "Hetero-Megatron"), ("torch", "torch"), ("python", "Python")):
        nodes_by_version: dict[str, list[str]] = {}
        for node, values in facts.items():
            nodes_by_version.setdefault(_compared(key, str(values.get(key, ""))), []).append(node)
        if key == "torch" and "" in nodes_by_version:
            raise UserError("is not installed", field="torch", value=_some(nodes_by_version[""]), where=cluster.file,
                            accepted=f"torch in {_python(connections, nodes_by_version[''])}")  # fmt: skip
        if len(nodes_by_version) == 1:
            continue
        versions = "; ".join(f"{version or 'none'} on {_some(nodes)}" for version, nodes in nodes_by_version.items())
        by_version = [{vendors[node] for node in nodes} for nodes in nodes_by_version.values()]
        if key == "version" or sum(map(len, by_version)) > len(set().union(*by_version)):
            accepted = "one version on all hosts" + (" with chips of one vendor" if key != "version" else "")
            raise UserError(f"versions differ: {versions}", field=name, accepted=accepted, where=cluster.file)
        print(notice_line(f"launcher: {name}: {versions}"), flush=True)
    node_of: dict[str, str] = {}
    for node, values in facts.items():
        identity = str(values.get("identity", ""))
        if identity and identity in node_of:
            raise UserError(
                f"is the same host as {node_of[identity]} ({values.get('hostname', '?')})", field="nodes", value=node,
                accepted="each host once; several labels on one host: hetero-megatron run", where=cluster.file,
            )  # fmt: skip
        node_of[identity] = node
    for connection in connections:
        interfaces = facts[connection.host.node].get("interfaces", [])
        for name in filter(None, connection.host.interface.split(",")):
            if name not in interfaces:
                raise UserError(
                    f"{connection.host.node} has no such network interface", field="interface", value=name,
                    accepted=", ".join(map(str, interfaces)), where=cluster.file,
                )  # fmt: skip


def _compared(key: str, version: str) -> str:
    """Of Python the language's, of torch what is before ``+``: after it stands the vendor that a build is for."""
    return ".".join(version.split(".")[:2]) if key == "python" else version.partition("+")[0]


def _python(connections: Sequence[Connection], nodes: Sequence[str]) -> str:
    """The interpreters of these nodes."""
    return ", ".join(dict.fromkeys(c.host.python for c in connections if c.host.node in nodes))


def _some(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:_SHOWN]) + (", …" if len(nodes) > _SHOWN else "")


def log_files(directory: str | None, names: Sequence[str]) -> dict[str, Path]:
    """``DIRECTORY/NAME.log`` by name; empty without a directory."""
    if directory is None:
        return {}
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot be made: {error.strerror}", field="--log-dir", value=directory) from None
    return {name: folder / f"{name}.log" for name in names}
