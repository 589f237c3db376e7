"""SLURM: a heterogeneous job with one component per node group, and what one of its tasks does on its host."""

from __future__ import annotations

import ipaddress
import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hetero_megatron.cluster import Cluster
from hetero_megatron.cluster.cluster import NodeGroup
from hetero_megatron.cluster.units import SLURM
from hetero_megatron.environment.slurm_names import expand
from hetero_megatron.errors import UserError
from hetero_megatron.launch.hosts import Host, hosts_of, torchrun

# Before the time limit and at scancel the ranks get SIGTERM, save, and end; then torchrun may take so long.
NOTICE_SECONDS, SAVE_SECONDS = 120, 100


def batch_script(
    cluster: Cluster, command: Sequence[str], name: str, launch: Sequence[str], max_restarts: int = 0
) -> str:
    """For sbatch: one component per node group, one task per node, all in one step.

    Args:
        launch: what starts ``hetero-megatron launch``, after the interpreter.
    """
    SLURM.check(name, "--job-name")
    lines = ["#!/bin/bash"]
    for index, group in enumerate(cluster.nodes):
        lines += ["#SBATCH hetjob"] if index else []
        common = [f"--job-name={name}", "--requeue", "--open-mode=append", f"--signal=TERM@{NOTICE_SECONDS}"]
        common += [f"--{key}={value}" for key in ("account", "time") if (value := getattr(cluster.launch, key))]
        lines += [f"#SBATCH {option}" for option in [*(common if not index else ()), *_component(group)]]
    restarts = ["--max-restarts", str(max_restarts)] if max_restarts else []
    task = [
        *launch, "--via", "srun", "--cluster", str(Path(cluster.file).absolute()), *restarts, "--", *command,
    ]  # fmt: skip
    lines += [
        "set -e",
        f"cd -- {shlex.quote(cluster.launch.directory or os.getcwd())}",
        "# Of this job: nobody else on the network can claim a rank.",
        "export HETERO_JOB_SECRET=${HETERO_JOB_SECRET:-$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n')}",
        f"exec srun {_components(cluster, task)}",
    ]
    return "\n".join(lines) + "\n"


def _components(cluster: Cluster, task: Sequence[str]) -> str:
    """What srun is given: one command for all components, or, where their interpreters or directories differ, one for
    each."""
    first = {host.group: host for host in reversed(hosts_of(cluster))}
    hosts = [first[group.name] for group in cluster.nodes]
    alike = len({(host.python, host.directory) for host in hosts}) == 1
    parts = [(",".join(map(str, range(len(hosts)))), hosts[0])] if alike else [*zip(map(str, range(len(hosts))), hosts)]
    components: list[str] = []
    for number, host in parts:
        options = [f"--het-group={number}"] if len(hosts) > 1 else []
        options += ["--kill-on-bad-exit=1"] if not components else []
        options += [f"--chdir={host.directory}"] if host.directory != cluster.launch.directory else []
        components.append(shlex.join([*options, host.python, *task]))
    return " : ".join(components)


def _component(group: NodeGroup) -> list[str]:
    settings = group.settings
    options = [f"--partition={settings.partition}"] if settings.partition else []
    options += [f"--nodes={group.count}", "--ntasks-per-node=1"]
    options += [f"--gres={settings.gres}"] if settings.gres else ["--exclusive"]
    if settings.hosts and not any(map(_is_ip, settings.hosts)):
        options.append(f"--nodelist={','.join(settings.hosts)}")
    return options


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def submit(script: str, out: str | None) -> int:
    """Give the script to sbatch.

    Args:
        out: where to keep it, too.

    Raises:
        UserError: there is no sbatch, or it refuses, with its words.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(out or f"{folder}/job.sh")
        try:
            path.write_text(script)
            completed = subprocess.run(["sbatch", str(path)], capture_output=True, text=True)
        except OSError as error:
            name = out if error.filename == out else "sbatch"
            raise UserError(f"{name}: {error.strerror}", field="--submit",
                            accepted="a host where jobs are submitted, and a writable --out") from None  # fmt: skip
    if completed.returncode:
        message = " ".join(completed.stderr.split()).removeprefix("sbatch: error: ")
        raise UserError(f"sbatch refused: {message}", field="--submit",
                        accepted="partitions that have these nodes and chips (sinfo -o '%P %D %G')")  # fmt: skip
    print(completed.stdout.strip())
    return 0


def run_task(
    cluster: Cluster, command: Sequence[str], max_restarts: int = 0, environment: Mapping[str, str] = os.environ
) -> int:
    """Become the torchrun of this task's host. Does not return.

    Raises:
        UserError: the step is not one task per node of the cluster file.
    """
    host, hosts = place_of_task(cluster, environment)
    words = torchrun(host, hosts, cluster, command, max_restarts)
    variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVE_SECONDS)}
    try:
        os.execvpe(words[0], words, {**environment, **variables, **host.environment})
    except OSError as error:
        raise UserError(f"cannot be started: {error.strerror}", field=f"nodes: {host.group}: python", value=words[0],
                        accepted="an interpreter with Hetero-Megatron", where=cluster.file) from None  # fmt: skip


def place_of_task(cluster: Cluster, environment: Mapping[str, str]) -> tuple[Host, tuple[Host, ...]]:
    """(the host that this task of a step is on, all hosts), with addresses that SLURM knows.

    Nodes are matched by name (that of the cluster file, or its address); where none has a name of the file, by their
    order in the components of a heterogeneous job, or in the step for a cluster of one node group.
    """
    hosts = hosts_of(cluster)
    names = expand(environment.get("SLURM_STEP_NODELIST", ""))
    if not names:
        raise UserError("not set, so this is no task of srun", field="SLURM_STEP_NODELIST", where="environment",
                        accepted="srun --ntasks-per-node=1 hetero-megatron launch ...")  # fmt: skip
    tasks, node = environment.get("SLURM_STEP_NUM_TASKS", ""), environment.get("SLURM_NODEID", "")
    if tasks != str(len(hosts)) or len(names) != len(hosts):
        raise UserError(
            f"the cluster has {len(hosts)} nodes, and this step {tasks or '?'} tasks on {len(names)}",
            field="SLURM_STEP_NUM_TASKS", value=tasks, accepted="one task per node: srun --ntasks-per-node=1",
            where=cluster.file,
        )  # fmt: skip
    if not node.isdigit() or int(node) >= len(names):
        raise UserError("is no number of a node", field="SLURM_NODEID", value=node, accepted="as srun sets it")
    order = _match(cluster, hosts, names, environment)
    placed = tuple(
        host if cluster.nodes[_group(cluster, host)].settings.hosts else replace(host, address=name)
        for host, name in zip(hosts, order, strict=True)
    )
    return placed[order.index(names[int(node)])], placed


def _group(cluster: Cluster, host: Host) -> int:
    return [group.name for group in cluster.nodes].index(host.group)


def _match(
    cluster: Cluster, hosts: Sequence[Host], names: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """SLURM's name of each host."""
    index_of_name = {name: host.index for host in hosts for name in (host.node, host.address)}
    strangers = [name for name in names if name not in index_of_name]
    if not strangers:
        by_index = {index_of_name[name]: name for name in names}
        return [by_index[host.index] for host in hosts]
    if len(strangers) == len(names):
        lists = [expand(environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}", "")) for i in range(len(cluster.nodes))]
        lists = [list(names)] if len(cluster.nodes) == 1 else lists
        if [len(group_names) for group_names in lists] == [group.count for group in cluster.nodes]:
            return [name for group_names in lists for name in group_names]
    raise UserError(
        "the cluster file has no such node", field="SLURM_STEP_NODELIST", value=strangers[0], where=cluster.file,
        accepted=", ".join(host.node for host in hosts[:8]) + ", or hosts: with SLURM's names",
    )  # fmt: skip
