"""The rendezvous store of a launcher: it outlives the ranks, whatever nodes are lost."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


class JobStore:
    """A TCP store on this host; ranks of round r use keys under ``round/r`` (see ``start_comm``)."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
        self.host, self.port = host, self._store.port
