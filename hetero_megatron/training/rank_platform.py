"""This process in its job: its rank, its platform, and whether there is what the configuration asks for."""

from __future__ import annotations

import socket

from hetero_megatron.cluster import Cluster
from hetero_megatron.environment.launcher import LauncherEnvironment
from hetero_megatron.errors import UserError
from hetero_megatron.plan import Plan
from hetero_megatron.platform import Platform, choose_platform
from hetero_megatron.platform.plugins import Plugins
from hetero_megatron.spec import ModelSpec
from hetero_megatron.training.config import RunConfig
from hetero_megatron.utils.text import plural


def position(cluster: Cluster | None, launcher: LauncherEnvironment) -> int | None:
    """This process's rank by the cluster file: node ($HETERO_NODE, else the host's name) and index of its chip there.

    Returns:
        the rank, from 0; None without a cluster file: the launcher's number counts.

    Raises:
        UserError: the file has no such node or chip, or the job has fewer ranks.
    """
    if cluster is None:
        return None
    node, world = launcher.node or socket.gethostname(), launcher.world_size
    rank = cluster.find(node, launcher.device_index).rank
    if rank >= world:
        raise UserError(
            f"its chip is rank {rank} of the cluster file, but this job has {plural(world, 'rank')}",
            field="HETERO_NODE", value=node, accepted=f"the chips of ranks 0 to {world - 1}, or more ranks",
        )  # fmt: skip
    return rank


def platform_at(
    place: int | None,
    cluster: Cluster | None,
    launcher: LauncherEnvironment,
    plugins: Plugins,
    name: str | None = None,
    backend: str | None = None,
    deterministic: bool = False,
    eager: bool = False,
) -> Platform:
    """This process's platform.

    Args:
        place: what :func:`position` returned; says which chip the testbed emulates, if any.
        name: of the platform; None: that of the vendor of the emulated chip, else the one that is here.
        backend: of torch.distributed; None: the device's own.
        deterministic: have the device's library give the same bits every time.
        eager: have its kernels loaded when its driver starts, see :func:`sizes_follow_data`.

    Raises:
        UserError: there is no such platform, see :func:`~hetero_megatron.platform.choose_platform`.
    """
    vendor = cluster.emulated_vendor(place) if cluster is not None else ""
    known, index = plugins.platforms.values(), launcher.device_index
    return choose_platform(known, name, backend, index, vendor, deterministic, eager)


def sizes_follow_data(plan: Plan, spec: ModelSpec, documents_apart: bool) -> bool:
    """Whether kernels that no warm-up can know are first used beside waiting messages: stages follow each other, and
    sizes depend on what is trained on (tokens of each expert; attention within each of several documents).

    Libraries choose kernels by sizes, and a driver that loads one when it is first used waits until the device is
    drained: for a receive, perhaps, of what a rank will send that waits for this one.

    Args:
        documents_apart: attention does not cross the ends of documents.
    """
    return (spec.moe is not None or documents_apart) and any(len(p.stages) > 1 for p in plan.pipelines)


def check_world(config: RunConfig, world: int) -> None:
    """UserError where the plan needs more ranks than the ``world`` that this job has."""
    needed = max(config.plan.ranks) + 1
    if needed > world:
        raise UserError(
            f"the plan uses ranks 0 to {needed - 1}, but this job has {world}",
            field="WORLD_SIZE", value=world, accepted=f"{needed} ranks, e.g. torchrun --nproc-per-node {needed}",
        )  # fmt: skip


def check_device(platform: Platform, launcher: LauncherEnvironment) -> None:
    """UserError where several ranks would share the first device because nothing says which one is whose."""
    if launcher.world_size > 1 and launcher.local_rank is None and platform.device.type != "cpu":
        raise UserError(
            "not set, so this rank does not know its device", field="LOCAL_RANK", where="environment",
            accepted="the rank's index on its node, as torchrun sets it",
        )  # fmt: skip


def check_graphs(config: RunConfig, platform: Platform) -> None:
    """UserError where layers are to run as device graphs, and this rank's device has none."""
    if config.graphs_after is None:
        return
    problem = "no plugin knows it" if platform.accelerator is None else platform.accelerator.no_graphs()
    if problem:
        raise UserError(
            f"{platform.name} captures no graphs: {problem}", field="--cuda-graph-impl", value="local", accepted="none"
        )
