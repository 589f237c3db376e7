"""``hetero-megatron comm check``: whether all ranks of a job reach each other in every way training uses, and how fast.

torchrun --nproc-per-node 4 -m hetero_megatron.cli.main comm check
hetero-megatron testbed run --cluster cluster.yaml -- hetero-megatron comm check
srun hetero-megatron comm check --cluster cluster.yaml --plan plan.yaml --model tiny --json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from hetero_megatron.cli.arguments import ArgumentParser, count, seconds
from hetero_megatron.cli.output import print_json
from hetero_megatron.cluster import Cluster, load_cluster
from hetero_megatron.environment.launcher import LauncherEnvironment, read_launcher
from hetero_megatron.errors import UserError
from hetero_megatron.training.exit import import_torch
from hetero_megatron.utils.text import format_bytes, format_rate, format_seconds, plural

if TYPE_CHECKING:
    from hetero_megatron.comm import Comm
    from hetero_megatron.comm.check import Fault, LinkSpeed

SLOW = 0.5  # of the bandwidth that the cluster file promises: less is a fault
MOST_BYTES = 1 << 30


def parser() -> argparse.ArgumentParser:
    p = ArgumentParser("comm check", __doc__ or "")
    p.formatter_class = argparse.RawTextHelpFormatter
    p.add_argument("--cluster", help="cluster file: its links are measured, and compared with what it says\n"
                   "(default: the testbed's)")  # fmt: skip
    p.add_argument("--plan", help="plan file whose groups are checked (needs --model)")
    p.add_argument("--model", help="preset, config.json or directory of the plan's model")
    p.add_argument("--platform", help="of this rank (default: the accelerator that is here, or cpu)")
    p.add_argument("--transport", choices=("auto", "bridge"), default="auto", help="between islands (default auto)")
    p.add_argument("--bytes", type=count(1, MOST_BYTES), default=8 << 20,
        help="size of the large messages (default 8 MiB)")  # fmt: skip
    p.add_argument("--timeout", type=seconds(), default=60.0, help="seconds for any transfer (default 60)")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


def main(argv: Sequence[str]) -> int:
    """Returns 0: no problem; 1: problems, which were printed; 3: lost ranks."""
    words = list(argv)
    if words[:1] != ["check"]:
        if words and words[0] not in ("-h", "--help"):
            raise UserError("unknown command", field="comm", value=words[0], accepted="check")
        parser().print_help()
        return 0 if words else 2
    options = parser().parse_args(words[1:])
    if (options.plan is None) != (options.model is None):
        raise UserError("go together", field="--plan and --model", accepted="both or none")
    launcher = read_launcher()
    if launcher.world_size == 1:
        raise UserError(
            "there is nobody to reach", field="WORLD_SIZE", value=1, accepted="2 ranks or more (torchrun, srun, or "
            "hetero-megatron testbed run)",
        )  # fmt: skip
    cluster = _cluster(options.cluster, launcher)
    import_torch()
    return _check(options, launcher, cluster)


def _cluster(file: str | None, launcher: LauncherEnvironment) -> Cluster | None:
    from hetero_megatron.cli.calibrate import testbed_cluster

    file = file or testbed_cluster()
    cluster = load_cluster(file) if file is not None else None
    if cluster is not None and cluster.world_size != launcher.world_size:
        raise UserError(
            f"the cluster has {plural(cluster.world_size, 'chip')}, one per rank", field="WORLD_SIZE",
            value=launcher.world_size, accepted=plural(cluster.world_size, "rank"),
        )  # fmt: skip
    return cluster


def _check(options: argparse.Namespace, launcher: LauncherEnvironment, cluster: Cluster | None) -> int:
    from hetero_megatron.comm import start_comm, stop_comm
    from hetero_megatron.emulation import Emulation
    from hetero_megatron.platform.plugins import load_plugins
    from hetero_megatron.training.rank_platform import check_device, platform_at, position, transport_of

    rank = position(cluster, launcher)
    platform = platform_at(rank, cluster, launcher, load_plugins(), options.platform)
    check_device(platform, launcher)
    emulation = Emulation.of(launcher, rank, options.timeout)
    transport = transport_of(options.transport, cluster)
    comm = start_comm(platform, options.timeout, rank, launcher, emulation.hooks(), transport)
    emulation.started()
    if platform.device.type != "cpu":
        comm.clock.synchronize = platform.synchronize
    faults, speeds = _run(comm, options, launcher.world_size, cluster)
    if comm.rank == 0:
        _print(comm, faults, speeds, cluster, options)
    stop_comm(platform)
    return 1 if faults else 0


def _run(
    comm: Comm, options: argparse.Namespace, world: int, cluster: Cluster | None
) -> tuple[list[Fault], list[LinkSpeed]]:
    """(faults, speeds) of all ranks, on all ranks."""
    from hetero_megatron.cluster.subset import link_pairs
    from hetero_megatron.comm import check

    assert comm.islands is not None
    all_ranks = tuple(range(world))
    groups = [all_ranks, *(m for m in comm.islands.members if 1 < len(m) < world)]
    if options.plan is not None:
        from hetero_megatron.plans import load_plan
        from hetero_megatron.plans.compile import CompiledPlan
        from hetero_megatron.spec import load_model
        from hetero_megatron.training.rank_platform import plan_for

        spec = load_model(options.model)
        plan = load_plan(options.plan, spec, cluster)
        if plan.ranks[-1] >= world:
            raise UserError("has more ranks than the job", field="--plan", value=options.plan, accepted=f"{world}")
        groups += CompiledPlan(plan_for(plan, comm.islands), spec).groups
    groups = list(dict.fromkeys(groups))
    comm.create_groups(groups)
    control = comm.group(all_ranks)

    def tell(local_faults: list[Fault]) -> list[Fault]:
        return [fault for of_rank in control.gather_objects(local_faults, list[check.Fault]) for fault in of_rank]

    if faults := tell(check.check_pairs(comm, world, min(options.bytes, 1 << 16))):
        return faults, []
    if faults := tell(check.check_groups(comm, groups, min(options.bytes, 1 << 20))):
        return faults, []
    pairs = link_pairs(cluster) if cluster is not None else _pairs(comm)
    both_ways = list(dict.fromkeys(p for a, b in pairs for p in ((a, b), (b, a))))
    own_speeds = check.measure(comm, control, both_ways, options.bytes)
    speeds = [s for speeds_of_rank in control.gather_objects(own_speeds, list[check.LinkSpeed]) for s in speeds_of_rank]
    return [f for s in speeds if (f := _slow(s, cluster)) is not None], speeds


def _pairs(comm: Comm) -> list[tuple[int, int]]:
    """A pair of ranks of every island, and of each two islands."""
    assert comm.islands is not None
    members = comm.islands.members
    within = [(m[0], m[1]) for m in members if len(m) > 1]
    return within + [(a[0], b[0]) for i, a in enumerate(members) for b in members[i + 1 :]]


def _promised(speed: LinkSpeed, cluster: Cluster | None) -> float | None:
    """Bytes/s by the cluster file, or as emulated by the testbed; None: unknown."""
    link = cluster.link(speed.source, speed.target) if cluster is not None else None
    if link is None:
        return None
    assert cluster is not None
    source_group, target_group = cluster.group_of(speed.source), cluster.group_of(speed.target)
    return 1 / cluster.seconds_per_byte(link, source_group, target_group, shared=False, rate=link.emulated)


def _slow(speed: LinkSpeed, cluster: Cluster | None) -> Fault | None:
    from hetero_megatron.comm.check import Fault

    promised = _promised(speed, cluster)
    if promised is None or speed.bandwidth >= SLOW * promised:
        return None
    assert cluster is not None
    problem = f"{format_rate(speed.bandwidth)} measured, where {cluster.file} says {format_rate(promised)}"
    return Fault(speed.source, speed.target, problem)


def _print(
    comm: Comm, faults: list[Fault], speeds: list[LinkSpeed], cluster: Cluster | None, options: argparse.Namespace
) -> None:
    if options.json:
        summary = {"faults": [asdict(f) for f in faults], "speeds": [asdict(s) for s in speeds], "ok": not faults}
        print_json(summary)
        return
    print(comm.islands)
    for s in speeds:
        promised = _promised(s, cluster)
        promise = f", {format_rate(promised)} promised" if promised is not None else ""
        print(
            f"  rank {s.source} to {s.target}: {s.route}; latency {format_seconds(s.latency)}, "
            f"{format_rate(s.bandwidth)} at {format_bytes(options.bytes)} (spread {s.spread:.0%}){promise}"
        )
    for fault in faults:
        print(f"FAULT {fault}")
    print("communication is not in order" if faults else "every byte arrived, on every pair and in every group")
