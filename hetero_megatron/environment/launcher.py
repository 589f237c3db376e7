"""What its launcher's environment says of this process: its rank, how many there are, and where they meet.

This is the one place that reads and checks these variables; it takes well under a second, and no torch. torchrun sets
them, as do ``hetero-megatron run``, the testbed, and people by hand. A process that another launcher started
(srun, mpirun, …) without them would take itself for a whole job: see ``foreign_launcher``.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hetero_megatron.environment.foreign_launcher import Task, find_task
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import require_regular

MAX_RANKS = 1 << 16
MIN_SECRET = 16  # characters
RESOLVE_SECONDS = 0.7  # that a name server may take; joining waits longer, and says what it waited for
WHERE = "environment"
SECRET = "HETERO_JOB_SECRET"
SUPERVISED = "HETERO_LAUNCHER"  # set by ``hetero-megatron run``, which plans again when told to
JOINS = "HETERO_JOINS"  # set for the processes of a host that joins a running job
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
TESTBED, TESTBED_DIRECTORY = "HETERO_TESTBED", "HETERO_TESTBED_DIR"
DIAGNOSES = "HETERO_DIAGNOSES"


@dataclass(frozen=True)
class LauncherEnvironment:
    """A process of a job; without any of the variables it is a job of its own.

    Attributes:
        local_rank: index on its node; None: not said.
        local_world_size: ranks of its node; None: not said.
        address, port: where the ranks meet (their rendezvous store); empty and 0 for a job of one rank.
        restarts: how often the launcher has started all ranks again.
        agent_store: the launcher has the rendezvous store, which outlives ranks; else rank 0 opens it.
        node: name in the cluster file; None: the host's name.
        supervised: ``hetero-megatron run`` started it.
        secret: of the job; empty: none.
        counted, numbered: whether WORLD_SIZE and RANK were there.
        testbed, testbed_directory: what the testbed emulates (its file), and where it meets its ranks; None: none.
        diagnoses: the directory where the launcher reads what its ranks found; None: it reads nothing.
        joins: it joins a running elastic job, and is in none of its epochs yet.
        started_by: another launcher whose variables were taken, as messages call it; empty: torchrun's were.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    address: str = ""
    port: int = 0
    restarts: int = 0
    agent_store: bool = False
    node: str | None = None
    supervised: bool = False
    secret: bytes = field(default=b"", repr=False)
    counted: bool = False
    numbered: bool = False
    testbed: str | None = None
    testbed_directory: str | None = None
    diagnoses: str | None = None
    joins: bool = False
    started_by: str = ""

    @property
    def device_index(self) -> int:
        """Of this process's device on its node."""
        return self.local_rank or 0

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host, so that nothing needs to be heard beyond it."""
        return is_loopback(self.address) or self.local_world_size == self.world_size

    @property
    def rendezvous_address(self) -> tuple[str, int]:
        """(host, port) of the rendezvous store, as this process dials it."""
        if self.one_host and not self.agent_store and not is_loopback(self.address):
            return "127.0.0.1", self.port
        return self.address, self.port


def read_launcher(environment: Mapping[str, str] = os.environ, joins: bool = True) -> LauncherEnvironment:
    """Read and check everything that a launcher says.

    Args:
        joins: False: a dry run or a plan, which start nothing: what is missing is not missed, only what is there is
            checked.

    Raises:
        UserError: a variable is empty, no number, out of range, missing beside the others, or contradicts them; or the
            process is one of several that another launcher started, and nothing says where they meet.
    """
    world = _integer(environment, "WORLD_SIZE", 1, MAX_RANKS)
    rank = _integer(environment, "RANK", 0, MAX_RANKS - 1)
    local_world = _integer(environment, "LOCAL_WORLD_SIZE", 1, MAX_RANKS)
    local_rank = _integer(environment, "LOCAL_RANK", 0, MAX_RANKS - 1)
    address, port = _address(environment), _integer(environment, "MASTER_PORT", 1, 65535) or 0
    restarts = _integer(environment, "TORCHELASTIC_RESTART_COUNT", 0, 1 << 31) or 0
    agent_store = _choice(environment, "TORCHELASTIC_USE_AGENT_STORE", ("False", "True")) == "True"
    supervised = _choice(environment, SUPERVISED, ("1",)) == "1"
    node, secret = _node(environment), _secret(environment)
    testbed, testbed_directory, diagnoses = _paths(environment)
    task = find_task(environment) if world is None and rank is None else None
    if task is not None and task.complete:
        node = node or task.node or None
        address, port = (address, port) if address or port else (task.address, task.port)
    if task is not None and (joins or task.complete) and address and port and task.complete:
        world, rank, local_rank, local_world = task.size, task.rank, task.local_rank, task.local_size
    elif task is not None and joins:
        raise _alone_among_others(task)
    if joins:
        _check_complete(world, rank, address, port)
    _check_ranges(world, rank, local_world, local_rank)
    if joins and (world or 1) > 1:
        _check_resolves(address)
    started_by = task.launcher if task is not None and world is not None else ""
    return LauncherEnvironment(
        rank or 0, world or 1, local_rank, local_world, address, port, restarts, agent_store, node, supervised, secret,
        world is not None, rank is not None, testbed, testbed_directory, diagnoses,
        _choice(environment, JOINS, ("1",)) == "1", started_by,
    )  # fmt: skip


def is_first(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process speaks for its job, as far as can be told before ``read_launcher`` has checked anything."""
    if "RANK" in environment:
        return environment["RANK"].strip() == "0"
    task = find_task(environment)
    return task is None or not task.rank


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a worker of torchrun's agent, and no launcher of ours is between them."""
    return "TORCHELASTIC_RUN_ID" in environment and SUPERVISED not in environment


def refuse_copies(command: str, reason: str, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to be one of several tasks, for a command that is started once per job."""
    task = find_task(environment)
    if task is not None and "RANK" not in environment:
        raise UserError(
            f"{task.launcher} started it as one of several tasks ({', '.join(task.signs)}), but it {reason}",
            field=command, accepted="one task",
        )  # fmt: skip


def is_loopback(address: str) -> bool:
    """Whether an address or name is this host's own for sure; "localhost" is, other names are not looked up."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.lower() in ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")


def loopback_interface() -> str:
    """The name of this host's loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def _text(environment: Mapping[str, str], name: str, accepted: str) -> str | None:
    text = environment.get(name)
    if text is not None and not text.strip():
        raise UserError("is empty", field=name, value=text, accepted=accepted, where=WHERE)
    return text


def _integer(environment: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    accepted = f"an integer from {low} to {high}"
    text = _text(environment, name, accepted)
    if text is None:
        return None
    digits = text.strip()
    if not re.fullmatch(r"-?[0-9]{1,18}", digits):
        raise UserError("is not a number", field=name, value=text, accepted=accepted, where=WHERE)
    if not low <= int(digits) <= high:
        raise UserError("is out of range", field=name, value=text, accepted=accepted, where=WHERE)
    return int(digits)


def _choice(environment: Mapping[str, str], name: str, values: tuple[str, ...]) -> str | None:
    accepted = " or ".join(values) + ", or not set"
    text = _text(environment, name, accepted)
    if text is not None and text not in values:
        raise UserError("is not a value of it", field=name, value=text, accepted=accepted, where=WHERE)
    return text


def _address(environment: Mapping[str, str]) -> str:
    accepted = "a host name or an IP address, without a port"
    text = (_text(environment, "MASTER_ADDR", accepted) or "").strip()
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        if text and not _HOST.fullmatch(text):
            problem = "is not a name or address of a host"
            raise UserError(problem, field="MASTER_ADDR", value=text, accepted=accepted, where=WHERE) from None
    return text


def _node(environment: Mapping[str, str]) -> str | None:
    accepted = "the name of a node in the cluster file, or not set (the host's name)"
    text = _text(environment, "HETERO_NODE", accepted)
    if text is not None and (not text.isprintable() or len(text) > 255):
        raise UserError("is not a name", field="HETERO_NODE", value=ascii(text), accepted=accepted, where=WHERE)
    return text


def _secret(environment: Mapping[str, str]) -> bytes:
    text = environment.get(SECRET)
    if text is not None and len(text) < MIN_SECRET:  # its value is not shown
        accepted = f"at least {MIN_SECRET} characters, the same on all ranks, e.g. of: openssl rand -hex 32"
        raise UserError(f"has {len(text)} characters", field=SECRET, accepted=accepted, where=WHERE)
    return (text or "").encode("utf-8", "surrogateescape")


def _paths(environment: Mapping[str, str]) -> tuple[str | None, str | None, str | None]:
    """(file of the testbed, directory of the testbed, directory for diagnoses)."""
    names = (TESTBED, TESTBED_DIRECTORY, DIAGNOSES)
    file, directory, diagnoses = (_text(environment, name, "a path, or not set") for name in names)
    if file is not None:
        require_regular(file, TESTBED)
    if directory is not None and not Path(directory).is_dir():
        accepted = "as the testbed sets it, or not set"
        problem = "no such directory"
        raise UserError(problem, field=TESTBED_DIRECTORY, value=directory, accepted=accepted, where=WHERE)
    return file, directory, diagnoses


def _check_complete(world: int | None, rank: int | None, address: str, port: int) -> None:
    """Half of a launch is none: nobody would be met, or the wrong ones."""
    values = {"WORLD_SIZE": world, "RANK": rank, "MASTER_ADDR": address or None, "MASTER_PORT": port or None}
    if world in (None, 1) and rank is None:
        return
    needed = ("WORLD_SIZE", "RANK") if world in (None, 1) else tuple(values)
    missing = [name for name in needed if values[name] is None]
    if missing:
        set_values = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        raise UserError(
            f"not set, beside {set_values}", field=" and ".join(missing), where=WHERE,
            accepted="torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; none of them, to run alone",
        )  # fmt: skip


def _check_ranges(world: int | None, rank: int | None, local_world: int | None, local_rank: int | None) -> None:
    def below(name: str, value: int | None, limit_name: str, limit: int | None, least: int = 0) -> None:
        if value is not None and limit is not None and value >= limit + least:
            raise UserError(
                f"is too large for {limit_name}={limit}", field=name, value=value,
                accepted=f"{least} to {limit - 1 + least}", where=WHERE,
            )  # fmt: skip

    below("RANK", rank, "WORLD_SIZE", world)
    below("LOCAL_WORLD_SIZE", local_world, "WORLD_SIZE", world, least=1)
    below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world)
    if (world or 1) > 1:
        below("LOCAL_RANK", local_rank, "WORLD_SIZE", world)


def _check_resolves(address: str) -> None:
    """Refuse a name that means nothing here; where no name server answers in time, joining the job decides."""
    problem: list[str] = []

    def look() -> None:
        try:
            socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            problem.append(getattr(error, "strerror", None) or "no such name")

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(RESOLVE_SECONDS)
    if problem:
        raise UserError(
            f"this host cannot resolve it ({problem[0]})", field="MASTER_ADDR", value=address,
            accepted="the name or address of the host of rank 0, as all hosts know it", where=WHERE,
        )  # fmt: skip


def _alone_among_others(task: Task) -> UserError:
    count = f"of {task.size}" if task.size is not None else "of a number that it does not say"
    return UserError(
        f"{task.launcher} started this process as task {task.rank if task.rank is not None else '?'} {count} "
        f"({', '.join(task.signs)}), but nothing says that it is a rank of a job, and each task would train alone",
        field="RANK and WORLD_SIZE", value="not set", where=WHERE,
        accepted=f"{task.advice}; or MASTER_ADDR and MASTER_PORT (the host of task 0 and a free port) beside, to take "
        "the tasks for the ranks; or RANK=0 WORLD_SIZE=1, to train alone",
    )  # fmt: skip
