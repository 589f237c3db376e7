"""How the hosts of a cluster are reached and what their processes are given: keys of the cluster file for launchers.

Per node group: ``hosts``, ``interface``, ``env``, ``python``, ``directory``, ``image``, ``partition``, ``gres``,
``node_selector``, ``resource``. For all: the section ``launch``. None of them changes what a plan is or predicts. What
each may hold is in ``word_kinds``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hetero_megatron.cluster import units as kinds
from hetero_megatron.cluster.units import WordKind, quantity
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import read_text
from hetero_megatron.utils.yaml_document import Entry, from_data, read_document

# Keys that are one word each.
HOST_WORDS: dict[str, WordKind] = {
    "interface": kinds.INTERFACES, "python": kinds.PATH, "directory": kinds.PATH, "image": kinds.IMAGE,
    "partition": kinds.SLURM, "gres": kinds.SLURM, "resource": kinds.RESOURCE,
}  # fmt: skip
LAUNCH_WORDS: dict[str, WordKind] = {
    "user": kinds.USER, "python": kinds.PATH, "directory": kinds.PATH, "image": kinds.IMAGE,
    "namespace": kinds.NAMESPACE, "account": kinds.SLURM, "time": kinds.SLURM_TIME,
}  # fmt: skip
HOST_KEYS = ("hosts", "env", "node_selector", *HOST_WORDS)
LAUNCH_KEYS = ("port", "master_port", "env", "shm", "volumes", *LAUNCH_WORDS)
VOLUME_SOURCES: dict[str, WordKind] = {"claim": kinds.CLAIM, "host": kinds.ABSOLUTE, "nfs": kinds.NFS}
MASTER_PORT = 29500


@dataclass(frozen=True)
class HostSettings:
    """Of one node group.

    Attributes:
        hosts: addresses by which a launcher and the other hosts reach its nodes, in order; empty: the nodes' names.
        interface: network interfaces for the traffic between hosts, comma-separated; empty: the libraries choose.
        env: environment variables of its ranks.
        python, directory, image: of its hosts, in place of those in ``launch``; empty: those.
        partition, gres: SLURM's.
        node_selector, resource: Kubernetes: labels of its nodes; the name of the resource that a chip is (empty: the
            one of its vendor's device plugin).
    """

    hosts: tuple[str, ...] = ()
    interface: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    directory: str = ""
    image: str = ""
    partition: str = ""
    gres: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    resource: str = ""


@dataclass(frozen=True)
class Volume:
    """A folder that all pods share.

    Attributes:
        path: where pods find it.
        claim, host, nfs: one of them: a PersistentVolumeClaim's name, a folder of the node, or ``SERVER:/PATH``.
    """

    path: str
    claim: str = ""
    host: str = ""
    nfs: str = ""
    read_only: bool = False


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
        shm, volumes: Kubernetes: bytes of /dev/shm in a pod at most (0: half of the node's memory), shared folders.
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
    shm: int = 0
    volumes: tuple[Volume, ...] = ()
    account: str = ""
    time: str = ""


def read_host_settings(keys: Mapping[str, Entry], count: int) -> HostSettings:
    """Of a node group with ``count`` nodes; ``keys``: of its entry in the cluster file."""
    hosts: tuple[str, ...] = ()
    if "hosts" in keys:
        entries = keys["hosts"].items()
        hosts = tuple(kinds.HOST.read(entry) for entry in entries)
        if len(hosts) != count:
            keys["hosts"].fail(f"{len(hosts)} for a group of {count}", accepted="one address for each of its nodes")
    words = {name: kind.read(keys[name]) for name, kind in HOST_WORDS.items() if name in keys}
    selector = _texts(keys["node_selector"]) if "node_selector" in keys else {}
    for name, value in selector.items():
        kinds.LABEL_NAME.check(name, keys["node_selector"].path, keys["node_selector"].where)
        kinds.LABEL_VALUE.check(value, f"{keys['node_selector'].path}.{name}", keys["node_selector"].where)
    return HostSettings(hosts, env=_variables(keys), node_selector=selector, **words)


def read_launch_settings(entry: Entry) -> LaunchSettings:
    keys = entry.mapping(LAUNCH_KEYS)
    values: dict[str, Any] = {name: kind.read(keys[name]) for name, kind in LAUNCH_WORDS.items() if name in keys}
    for name in ("port", "master_port"):
        if name in keys:
            values[name] = keys[name].integer(1, 65535)
    if "shm" in keys:
        values["shm"] = int(quantity(keys["shm"], "bytes"))
    if "volumes" in keys:
        values["volumes"] = _volumes(keys["volumes"])
    return LaunchSettings(**values, env=_variables(keys))


def _volumes(entry: Entry) -> tuple[Volume, ...]:
    volumes: list[Volume] = []
    for item in entry.items():
        keys = item.mapping(("path", *VOLUME_SOURCES, "read_only"), required=("path",))
        path = kinds.ABSOLUTE.read(keys["path"])
        sources = {name: kind.read(keys[name]) for name, kind in VOLUME_SOURCES.items() if name in keys}
        if len(sources) != 1:
            item.fail("a volume is from one place", accepted=f"one of {', '.join(VOLUME_SOURCES)} beside path")
        if any(volume.path == path for volume in volumes):
            keys["path"].fail("two volumes are there", accepted="a path of its own for each")
        volumes.append(Volume(path, **sources, read_only="read_only" in keys and keys["read_only"].flag()))
    return tuple(volumes)


def check_hosts_once(entries: Mapping[str, Entry], settings: Mapping[str, HostSettings]) -> None:
    """Refuse an address that two nodes have.

    Args:
        entries: ``hosts`` of the file, by node group.
    """
    group_of: dict[str, str] = {}
    for group, entry in entries.items():
        for item, host in zip(entry.items(), settings[group].hosts, strict=True):
            if host in group_of:
                item.fail(
                    f"a node of {group_of[host]} has this address, too", accepted="an address of its own for each"
                )
            group_of[host] = group


def host_keys(settings: HostSettings) -> dict[str, Any]:
    """The keys of a node group in a cluster file."""
    return _filled(settings)


def launch_keys(settings: LaunchSettings) -> dict[str, Any]:
    """The section ``launch`` of a cluster file."""
    section = _filled(settings)
    if settings.shm:
        section["shm"] = f"{settings.shm} B"
    if settings.volumes:
        section["volumes"] = [_filled(volume) for volume in settings.volumes]
    return section


def _filled(settings: HostSettings | LaunchSettings | Volume) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for key in fields(settings):
        value = getattr(settings, key.name)
        if value and value != key.default:
            filled[key.name] = list(value) if isinstance(value, tuple) else value
    return filled


def _variables(keys: Mapping[str, Entry]) -> dict[str, str]:
    variables = _texts(keys["env"]) if "env" in keys else {}
    for name in variables:
        if not kinds.VARIABLE.fits(name):
            keys["env"].fail(f"{name!r} is not {kinds.VARIABLE.what}", accepted=kinds.VARIABLE.accepted)
    return variables


def _texts(entry: Entry) -> dict[str, str]:
    """Of a mapping whose values are words or numbers."""
    texts = {}
    for name, item in entry.any_mapping().items():
        if isinstance(item.value, bool) or not isinstance(item.value, str | int | float):
            item.fail("a word or a number was expected", accepted="true and false in quotes")
        texts[name] = str(item.value)
    return texts


ACCEPTED = "HOST slots=8 type=A100-80-SXM (a chip of docs/chips.md)"
_FIRST = re.compile(r"\s*(#[^\n]*\n\s*)*[^\s:{\[#]+[ \t]+(slots|type)=")


def read_cluster_document(path: str | os.PathLike[str]) -> Entry:
    """The document of a cluster file or of a host file."""
    text = read_text(path)
    return parse_host_file(text, str(path)) if is_host_file(text) else read_document(path)


def is_host_file(text: str) -> bool:
    """Whether its first line is ``HOST slots=… type=…``."""
    return _FIRST.match(text) is not None


def parse_host_file(text: str, file: str = "") -> Entry:
    """The cluster file that says the same.

    Raises:
        UserError: a line is none of a host file, or a host is there twice.
    """
    nodes: list[dict[str, Any]] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        line_place = f"{file}:{number}" if file else f"line {number}"
        host, slots, chip = _host(words, line_place)
        if host in line_of:
            problem = f"two hosts have this name (line {line_of[host]} is the other)"
            raise UserError(problem, field="host", value=host, accepted="each host once", where=line_place)
        line_of[host] = number
        last = nodes[-1] if nodes else None
        if last is not None and (last["chip"], last["chips_per_node"]) == (chip, slots):
            last["hosts"].append(host)
        else:
            nodes.append({"name": "", "chip": chip, "chips_per_node": slots, "hosts": [host]})
    for index, node in enumerate(nodes):
        node["count"] = len(node["hosts"])
        node["name"] = _name(node, [earlier["name"] for earlier in nodes[:index]])
    return from_data({"version": 1, "nodes": nodes}, "", file)


def _host(words: list[str], where: str) -> tuple[str, int, str]:
    """(host, slots, chip) of a line."""
    host, options = words[0], dict(option.partition("=")[::2] for option in words[1:])
    for name in options:
        if name not in ("slots", "type"):
            problem = "unknown key of a host file"
            raise UserError(problem, field=name, value=options[name], accepted=ACCEPTED, where=where)
    for name in ("slots", "type"):
        if not options.get(name):
            raise UserError(f"{name}= is missing", field="host", value=host, accepted=ACCEPTED, where=where)
    slots = options["slots"]
    if not re.fullmatch(r"[0-9]{1,6}", slots) or int(slots) < 1:
        raise UserError("is not a number of chips", field="slots", value=slots, accepted="1 or more", where=where)
    return host, int(slots), options["type"]


def _name(node: dict[str, Any], taken: list[str]) -> str:
    """Of a group: its host's, if it has one; else its chip's in small letters."""
    stem = str(node["hosts"][0] if node["count"] == 1 else node["chip"].lower())
    return next(name for name in (stem, *(f"{stem}.{i}" for i in range(2, 1 << 20))) if name not in taken)
