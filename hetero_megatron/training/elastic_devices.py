"""Elastic runs on devices whose library connects ranks: whether its groups can be abandoned while ranks are lost, and
what a device has to go through then."""

from __future__ import annotations

import os
from itertools import combinations

from hetero_megatron.comm import Comm, CommError
from hetero_megatron.comm.islands import Islands
from hetero_megatron.comm.work import first_line, with_timeout
from hetero_megatron.errors import UserError
from hetero_megatron.platform import Platform
from hetero_megatron.utils.text import rank_ranges

MOST_ERRORS = 100  # of one device: each of its streams may say once that a transfer was aborted
SETTLE_SECONDS = 60.0  # for what a device computes that waits for no peer


def prepare(platform: Platform) -> None:
    """Called before the first group: the library must not end this process where a peer is lost.

    Raises:
        UserError: the environment says that it is to.
    """
    settings = platform.accelerator.abort_settings if platform.accelerator is not None else {}
    for name, value in settings.items():
        if (found := os.environ.setdefault(name, value)) != value:
            raise UserError(
                "the library would handle lost ranks itself, and end this one", field=name, value=found,
                accepted=f"{value} with --elastic", where="environment",
            )  # fmt: skip


def check_abandonable(islands: Islands | None) -> None:
    """UserError, on all ranks alike, where groups of devices cannot be abandoned."""
    if islands is None:
        return
    for island, ranks in enumerate(islands.members):
        unable = [rank for rank in ranks if not islands.endpoints[rank].aborts]
        if unable and len(ranks) > 1 and not islands.uses_gloo(island):
            endpoint = islands.endpoints[unable[0]]
            raise UserError(
                f"groups of {endpoint.library}, by which ranks {rank_ranges(ranks)} ({endpoint.platform}) reach each "
                "other, cannot be abandoned when a rank is lost", field="--elastic",
                accepted="ranks that communicate by gloo, or by a library whose platform has abort "
                "(docs/vendor_plugin.md); or --on-failure replan alone",
            )  # fmt: skip
    for a, b in combinations((ranks[0] for ranks in islands.members), 2):
        if direct := islands.route((a, b)).direct:
            raise UserError(
                f"groups of {direct}, by which ranks {a} and {b} reach each other, cannot be abandoned when a rank is "
                "lost", field="--elastic", accepted="--transport bridge; or --on-failure replan alone",
            )  # fmt: skip


def settle(comm: Comm) -> None:
    """Leave a device's groups: returns when it has done, or given up, all that it was given, so that what it computed
    itself can be read.

    Raises:
        CommError: it does not end, or cannot be used any more: this rank is lost as well.
    """
    accelerator = comm.accelerator
    if accelerator is None:
        return
    if comm.watch is not None:
        comm.watch.stop()
    comm.abandon()

    def wait() -> None:
        accelerator.use(comm.device.index or 0)
        for i in range(MOST_ERRORS):
            try:
                return accelerator.synchronize()
            except RuntimeError:  # of a transfer that was aborted; no other is left in a device that works
                if i == MOST_ERRORS - 1:
                    raise

    try:
        with_timeout(SETTLE_SECONDS, wait)
    except RuntimeError as error:
        problem = f"its device does not come to rest after a rank was lost: {first_line(error)}"
        raise CommError(f"rank {comm.rank} ends: {problem}", comm.rank) from error
