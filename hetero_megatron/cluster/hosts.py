"""How the hosts of a cluster are reached and what their processes are given: keys of the cluster file for launchers.

Per node group: ``hosts``, ``interface``, ``env``, ``partition``, ``gres``, ``node_selector``, ``resource``. For all:
the section ``launch``. None of them changes what a plan is or predicts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hetero_megatron.utils.yaml_document import Entry

HOST_KEYS = ("hosts", "interface", "env", "partition", "gres", "node_selector", "resource")
LAUNCH_KEYS = ("user", "port", "python", "directory", "master_port", "env", "image", "namespace", "account", "time")
MASTER_PORT = 29500
_ADDRESS = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.:%-]{0,251}[A-Za-z0-9_])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INTERFACE = re.compile(r"[^\s/,]{1,15}(,[^\s/,]{1,15})*")


@dataclass(frozen=True)
class HostSettings:
    """Of one node group.

    Attributes:
        hosts: addresses by which a launcher and the other hosts reach its nodes, in order; empty: the nodes' names.
        interface: network interfaces for the traffic between hosts, comma-separated; empty: the libraries choose.
        env: environment variables of its ranks.
        partition, gres: SLURM's.
        node_selector, resource: Kubernetes: labels of its nodes; the name of the resource that a chip is.
    """

    hosts: tuple[str, ...] = ()
    interface: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    partition: str = ""
    gres: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    resource: str = ""


@dataclass(frozen=True)
class LaunchSettings:
    """Of all hosts.

    Attributes:
        user, port: of ssh; empty and 0: ssh's own configuration decides.
        python: the interpreter in whose environment Hetero-Megatron is installed.
        directory: where commands start; empty: the home directory, or the launcher's where it is the same host.
        master_port: of the rendezvous store on the first host.
        env: environment variables of all ranks.
        image, namespace: Kubernetes'.
        account, time: SLURM's.
    """

    user: str = ""
    port: int = 0
    python: str = ""
    directory: str = ""
    master_port: int = MASTER_PORT
    env: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    namespace: str = ""
    account: str = ""
    time: str = ""


def read_host_settings(keys: Mapping[str, Entry], count: int) -> HostSettings:
    """Of a node group with ``count`` nodes; ``keys``: of its entry in the cluster file."""
    hosts: tuple[str, ...] = ()
    if "hosts" in keys:
        entries = keys["hosts"].items()
        hosts = tuple(_address(entry) for entry in entries)
        if len(hosts) != count:
            keys["hosts"].fail(f"{len(hosts)} for a group of {count}", accepted="one address for each of its nodes")
    interface = keys["interface"].text() if "interface" in keys else ""
    if interface and not _INTERFACE.fullmatch(interface):
        keys["interface"].fail("is not the name of a network interface", accepted="e.g. eth0, or eth0,eth1")
    words = {name: keys[name].text() for name in ("partition", "gres", "resource") if name in keys}
    selector = _texts(keys["node_selector"]) if "node_selector" in keys else {}
    return HostSettings(hosts, interface, _variables(keys), node_selector=selector, **words)


def read_launch_settings(entry: Entry) -> LaunchSettings:
    keys = entry.mapping(LAUNCH_KEYS)
    words = ("user", "python", "directory", "image", "namespace", "account", "time")
    values: dict[str, Any] = {name: keys[name].text() for name in words if name in keys}
    for name in ("port", "master_port"):
        if name in keys:
            values[name] = keys[name].integer(1, 65535)
    return LaunchSettings(**values, env=_variables(keys))


def check_hosts_once(entries: Mapping[str, Entry], settings: Mapping[str, HostSettings]) -> None:
    """Refuse an address that two nodes have.

    Args:
        entries: ``hosts`` of the file, by node group.
    """
    seen: dict[str, str] = {}
    for group, entry in entries.items():
        for item, host in zip(entry.items(), settings[group].hosts, strict=True):
            if host in seen:
                item.fail(f"a node of {seen[host]} has this address, too", accepted="an address of its own for each")
            seen[host] = group


def host_keys(settings: HostSettings) -> dict[str, Any]:
    """The keys of a node group in a cluster file."""
    return _filled(settings)


def launch_keys(settings: LaunchSettings) -> dict[str, Any]:
    """The section ``launch`` of a cluster file."""
    return _filled(settings)


def _filled(settings: HostSettings | LaunchSettings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in fields(settings):
        value = getattr(settings, key.name)
        if value and value != key.default:
            found[key.name] = list(value) if isinstance(value, tuple) else value
    return found


def _address(entry: Entry) -> str:
    text = entry.text()
    if not _ADDRESS.fullmatch(text):
        entry.fail("is not a name or address of a host", accepted="e.g. node-0, or 10.0.0.1")
    return text


def _variables(keys: Mapping[str, Entry]) -> dict[str, str]:
    found = _texts(keys["env"]) if "env" in keys else {}
    for name in found:
        if not _VARIABLE.fullmatch(name):
            keys["env"].fail(f"{name!r} is not the name of a variable", accepted="letters, digits and _")
    return found


def _texts(entry: Entry) -> dict[str, str]:
    """Of a mapping whose values are words or numbers."""
    found = {}
    for name, item in entry.any_mapping().items():
        if isinstance(item.value, bool) or not isinstance(item.value, str | int | float):
            item.fail("a word or a number was expected", accepted="true and false in quotes")
        found[name] = str(item.value)
    return found
