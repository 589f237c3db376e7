"""What the first rank prints before anything is built: the plan, where it runs, and every choice made for the user."""

from __future__ import annotations

from collections.abc import Iterator

from hetero_megatron.comm import Comm
from hetero_megatron.emulation import Emulation
from hetero_megatron.environment.launcher import SECRET, LauncherEnvironment
from hetero_megatron.errors import printable
from hetero_megatron.plan import format_plan, idle_ranks
from hetero_megatron.plan.islands import format_islands
from hetero_megatron.platform import Platform
from hetero_megatron.platform.plugins import Plugins
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.islands import describe_islands, unlike_cluster
from hetero_megatron.utils.text import notice_line

COMPILED = (
    "--compile: weight gradients pass through autograd, so each needs memory of its own and an addition per "
    "micro-batch, and attention that torch cannot trace is a break in the graph of its layer"
)
COMPILED_MOE = "; routers and routed experts run as they are, for their rows are known only then"


def announce(config: RunConfig, comm: Comm, platform: Platform, plugins: Plugins, emulation: Emulation) -> None:
    """Print what will run, and where. Called on the first rank only; the plan is as the user gave it."""
    for line in (*_choices(config, comm, platform, plugins, emulation), *_connections(config, comm)):
        print(printable(line), flush=True)  # names in it are those of files and plugins


def _choices(
    config: RunConfig, comm: Comm, platform: Platform, plugins: Plugins, emulation: Emulation
) -> Iterator[str]:
    cluster, plan = config.cluster, config.plan
    chips = [cluster.chip_of(r).name for r in range(cluster.world_size)] if cluster is not None else None
    yield format_plan(plan, config.spec, chips)
    if plan.islands:
        yield format_islands(config.compiled)
    yield f"device: {platform.device.type}, backend {platform.backend}, {config.dtype}"
    if platform.settings:
        yield f"settings: {', '.join(platform.settings)}"
    if config.compile is not None:
        yield notice_line(COMPILED + (COMPILED_MOE if config.spec.moe is not None else ""))
    if testbed := emulation.describe():
        yield testbed
    for plugin in plugins.broken():
        yield notice_line(f"plugin {plugin.source.name} ({plugin.source.module}) is broken: {plugin.error}")
    idle = set(range(comm.launcher.world_size)) - set(plan.ranks)
    if cluster is not None:
        idle.update(idle_ranks(plan, cluster))
    if idle:
        yield f"idle ranks: {', '.join(map(str, sorted(idle)))}"
    yield from map(notice_line, config.notices)


def _connections(config: RunConfig, comm: Comm) -> Iterator[str]:
    yield from describe_islands(comm.islands)
    yield from unlike_cluster(comm.islands, config.cluster)
    if comm.launcher.started_by:
        yield f"ranks: the tasks that {comm.launcher.started_by} started, by their numbers"
    if notice := open_to_others(comm.launcher):
        yield notice_line(notice)


def open_to_others(launcher: LauncherEnvironment) -> str:
    """What to say where anybody on the network could claim a rank; empty where nobody can."""
    if launcher.world_size == 1 or launcher.one_host or launcher.secret:
        return ""
    host, port = launcher.meeting_point
    return f"{SECRET} is not set: whoever reaches {host}:{port} can claim a rank (docs/security.md)"
