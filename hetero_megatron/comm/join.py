"""Joining and leaving the job that a launcher's environment describes."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from hetero_megatron.comm.comm import Comm
from hetero_megatron.comm.connectivity import Reach, listen
from hetero_megatron.comm.device_copies import copies_of
from hetero_megatron.comm.group import Group
from hetero_megatron.comm.hooks import Hooks
from hetero_megatron.comm.islands import AUTO, Endpoint, Islands
from hetero_megatron.comm.rendezvous import Rendezvous
from hetero_megatron.environment.launcher import LauncherEnvironment, loopback_interface, read_launcher
from hetero_megatron.errors import UserError
from hetero_megatron.platform import Platform
from hetero_megatron.platform.host_memory import keep_freed_memory

# Ranks take long and varying times to start (imports, a busy host), whatever the timeout of transfers.
START_UP = timedelta(seconds=60)


def start_comm(
    platform: Platform,
    timeout_seconds: float,
    position: int | None = None,
    launcher: LauncherEnvironment | None = None,
    hooks: Hooks | None = None,
    transport: str = AUTO,
    lost: Callable[[Exception], None] | None = None,
) -> Comm:
    """Join the job described by the launcher's environment (RANK, WORLD_SIZE, …), or run alone without it.

    Args:
        timeout_seconds: of every transfer; waiting for other ranks to start takes at least ``START_UP``.
        position: this process's rank in the plan, if fixed by a cluster file; torchrun may number nodes differently,
            e.g. after a restart.
        launcher: None: from this process's environment.
        hooks: None: no emulation.
        transport: ``auto``, or ``bridge``: islands only communicate by the bridge.
        lost: called in a thread when a device waits for a transfer that does not end; the host may hang anywhere.

    Raises:
        UserError: two processes claim one position, or the launcher cannot renumber ranks (torchrun and srun can).
        CommError: not all ranks joined, or some could not connect.
    """
    if platform.device.type == "cpu":
        keep_freed_memory()
    launcher = launcher or read_launcher()
    timeout, total = timedelta(seconds=timeout_seconds), launcher.world_size
    rank = launcher.rank if position is None else position
    hooks, reach, store = hooks or Hooks(), Reach(rank), None
    if total > 1 and not dist.is_initialized():
        if rank != launcher.rank and not (launcher.agent_store or launcher.started_by):
            raise UserError(
                f"the cluster file makes this process rank {rank}, and only torchrun and srun can renumber ranks",
                field="RANK", value=launcher.rank, accepted=f"{rank}, or torchrun",
            )  # fmt: skip
        if launcher.one_host:
            _gloo_on_loopback()
        beacon = listen(launcher.address, launcher.one_host)
        meeting = Rendezvous(launcher, rank, max(timeout, START_UP))
        store, members = meeting.join(beacon.address if beacon is not None else None)
        reach = Reach(rank, [member.address for member in members], beacon, hooks.cut_ranks)
    comm = Comm(rank, platform.device, timeout, hooks, reach, launcher)
    if store is not None:
        comm.join(store, total, max(timeout, START_UP))
    copies = copies_of(platform)
    comm.accelerator = copies.accelerator if copies is not None else None
    if platform.accelerator is not None:
        comm.load_direct = platform.accelerator.load_direct
    if total > 1:
        if copies is not None and lost is not None:
            comm.watch_devices(copies.aside, lost)
        everyone = Group(comm, tuple(range(total)), dist.group.WORLD)
        mine = Endpoint.of(platform, torch.__version__, transport)
        islands = Islands(everyone.gather_objects(mine, Endpoint))
        comm.create_message_groups(islands, copies)
    return comm


def _gloo_on_loopback() -> None:
    """Make gloo listen on the loopback interface, which is only possible by the environment."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())


def stop_comm(platform: Platform | None = None) -> None:
    """Leave the job; safe to call when never started."""
    if dist.is_initialized():
        dist.destroy_process_group()
        if platform is not None and platform.accelerator is not None:
            platform.accelerator.stop()
