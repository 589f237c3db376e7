"""Joining and leaving the job that a launcher's environment describes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from hetero_megatron.comm.comm import Comm, first_line
from hetero_megatron.comm.emulation import Emulation
from hetero_megatron.comm.errors import CommError
from hetero_megatron.comm.reach import PATIENCE, UNREACHABLE, Address, Reach, explain, listen
from hetero_megatron.errors import UserError
from hetero_megatron.platform import Platform
from hetero_megatron.platform.host_memory import keep_freed_memory

# Ranks need long and unlike times to start (imports, a busy host), which says nothing about links.
START_UP = timedelta(seconds=60)


def start_comm(platform: Platform, timeout_seconds: float, position: int | None = None) -> Comm:
    """Join the job that torchrun's environment describes (RANK, WORLD_SIZE, …), or be alone without it.

    Args:
        timeout_seconds: of every transfer; for others to start there are at least ``START_UP``.
        position: this process's rank in the plan where a cluster file fixes it: torchrun may number nodes otherwise,
            and does after a restart.

    Raises:
        UserError: two processes claim one position, or the launcher cannot renumber ranks.
        CommError: not all ranks came, or some could not connect.
    """
    if platform.device.type == "cpu":
        keep_freed_memory()
    timeout = timedelta(seconds=timeout_seconds)
    total, launched_as = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    rank = launched_as if position is None else position
    emulation, reach = Emulation.from_environment(rank, timeout=timeout_seconds), Reach(rank)
    if total > 1 and not dist.is_initialized():
        if rank != launched_as and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise UserError(
                f"the cluster file makes this process rank {rank}, and only torchrun can renumber ranks",
                field="RANK", value=launched_as, accepted=f"{rank}, or torchrun",
            )  # fmt: skip
        beacon = listen(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        start, stores = time.perf_counter(), []  # type: float, list[dist.Store]
        try:
            stores.append(_join_store(rank, total, max(timeout, START_UP)))
            _claim(stores[0], rank, launched_as)
            stores[0].set(_beacon_key(rank), beacon.address.encode() if beacon else '["", 0, ""]')
            every = stores[0].multi_get([_beacon_key(r) for r in range(total)])  # waits for everybody
            with emulation.on_other_cores():
                dist.init_process_group(platform.backend, timeout=timeout, store=stores[0], rank=rank, world_size=total)
        except RuntimeError as error:
            raise _not_joined(rank, total, stores, time.perf_counter() - start, error) from error
        reach = Reach(rank, [Address.decode(text) for text in every], beacon, emulation.cut_off)
    comm = Comm(rank, platform.device, timeout, emulation, reach)
    if total > 1 and platform.device.type != "cpu":
        comm.open_ways()
    return comm


def _join_store(rank: int, total: int, timeout: timedelta) -> dist.Store:
    """torchrun's agent keeps one store for all rounds: without a prefix a restarted rank dials dead peers."""
    store, _, _ = next(dist.rendezvous("env://", rank, total, timeout=timeout))
    return dist.PrefixStore(f"round/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _beacon_key(rank: int) -> str:
    return f"hetero_megatron/beacon/{rank}"


def _not_joined(
    rank: int, total: int, stores: Sequence[dist.Store], seconds: float, error: Exception
) -> CommError:
    """Why a rank could not join: who never came, or whom it cannot reach."""
    others = [r for r in range(total) if r != rank]
    came = _within(PATIENCE, lambda: _who_came(stores[0], others)) if stores else None
    reach = Reach(rank, [(came or {}).get(r) for r in range(total)]).look(came or ())
    absent = [r for r in others if came is not None and r not in came]
    peers = [r for r in others if reach.get(r) == UNREACHABLE] or absent or others
    if came is None:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        why = f"the rendezvous store at {where} does not answer, or not all came to it"
    elif absent and UNREACHABLE not in reach.values():
        why = f"rank {', '.join(map(str, absent[:8]))} never came"
    else:
        why = explain(peers, reach)
    return CommError(
        f"rank {rank}, joining the job, waited {seconds:.1f} s for {len(others)} other ranks: "
        f"{why} [{first_line(error)}]",
        rank, peers, seconds, "joining the job", reach,
    )  # fmt: skip


def _who_came(store: dist.Store, ranks: Sequence[int]) -> dict[int, Address | None]:
    """The ranks that have told the store where they listen, and where."""
    came = [r for r in ranks if store.check([_beacon_key(r)])]
    found = store.multi_get([_beacon_key(r) for r in came]) if came else []
    return dict(zip(came, map(Address.decode, found), strict=True))


def _within(seconds: float, ask: Callable[[], dict[int, Address | None]]) -> dict[int, Address | None] | None:
    """Its answer; None if it fails or takes longer: a store that is cut off may not answer for a quarter of an hour."""
    answer: list[dict[int, Address | None]] = []

    def work() -> None:
        with suppress(RuntimeError):
            answer.append(ask())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None


def _claim(store: dist.Store, rank: int, launched_as: int) -> None:
    """Two processes with one rank would wait for a third for ever; the second one to come is refused instead."""
    key = f"hetero_megatron/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/rank/{rank}"
    first = store.compare_set(key, "", str(launched_as)).decode()
    if first != str(launched_as):
        raise UserError(
            f"torchrun's ranks {first} and {launched_as} are both rank {rank} of the cluster file",
            field="HETERO_NODE", value=os.environ.get("HETERO_NODE", "not set"), accepted="one process per chip",
        )  # fmt: skip


def stop_comm() -> None:
    """Leave the job; safe to call when never started."""
    if dist.is_initialized():
        dist.destroy_process_group()
