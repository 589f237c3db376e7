"""One host of ``hetero-megatron run --via ssh``: torchrun's elastic agent, whose store is the launcher's.

The agent starts and watches this host's ranks; who is rank 0 and where all meet is said by the launcher instead of a
vote of the hosts, so no host is special and any may be lost. It makes no restart of its own: after a failure it ends,
and the launcher decides what runs next. Lines for the launcher: exit codes by rank, and what ranks that lost a peer
wrote (``training.diagnosis``), for hosts without a common file system.

    python -m hetero_megatron.launch.elastic '{"node": 0, "nodes": 2, …}'
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from hetero_megatron.comm.job_store import connect_store
from hetero_megatron.environment.launcher import DIAGNOSES
from hetero_megatron.launch.remote import ENDED_BY_AGENT, say

START_SECONDS = 300.0  # that the other hosts may take to start
_LOOK_SECONDS = 0.2


class LauncherRendezvous(RendezvousHandler):
    """The launcher has decided: node ``node`` of ``nodes``, and a store at its own address.

    Args:
        settings: the object that the launcher sends.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "hetero-megatron"

    def next_rendezvous(self) -> RendezvousInfo:
        host, port = self._settings["host"], self._settings["port"]
        store = connect_store(host, port, timedelta(seconds=START_SECONDS), "agents")
        return RendezvousInfo(store, self._settings["node"], self._settings["nodes"], RendezvousStoreInfo(host, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return str(self._settings["run"])

    def shutdown(self) -> bool:
        return True


class Agent(LocalElasticAgent):  # type: ignore[misc]
    """Of one round, whose number the ranks see as the number of restarts."""

    def __init__(self, settings: dict[str, Any], logs: str) -> None:
        command = settings["command"]
        spec = WorkerSpec(
            role="default", local_world_size=settings["chips"], rdzv_handler=LauncherRendezvous(settings),
            entrypoint=command[0], args=tuple(command[1:]), max_restarts=settings["round"], monitor_interval=0.1,
        )  # fmt: skip
        # No waiting for other agents at the end: where they failed, this would wait for nothing.
        super().__init__(
            spec, DefaultLogsSpecs(log_dir=logs, tee=Std.ALL), start_method="spawn", exit_barrier_timeout=0.05,
            log_line_prefix_template="[rank ${rank}] ",
        )  # fmt: skip
        self._remaining_restarts = 0

    def exit_codes(self, first: dict[int, Any]) -> dict[int, int]:
        """By rank, after ``run``; ``first``: the failures that it returned."""
        codes: dict[int, int] = {}
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        for worker in self.get_worker_group().workers:
            rank, handler = worker.global_rank, handlers.get(worker.local_rank)
            code = handler.proc.poll() if handler is not None else None
            if rank in first:
                codes[rank] = int(first[rank].exitcode)
            elif first and (code is None or code < 0):
                codes[rank] = ENDED_BY_AGENT
            else:
                codes[rank] = int(code or 0)
        return codes


def forward(directory: Path, ended: threading.Event) -> None:
    """Pass on every file that a rank leaves there, once, until ``ended`` is set and nothing new is there."""
    sent: set[str] = set()
    while True:
        last = ended.is_set()
        for path in sorted(directory.glob("[!.]*")):
            if path.name not in sent:
                with suppress(OSError):
                    say(file=path.name, text=path.read_text(encoding="utf-8", errors="replace"))
                    sent.add(path.name)
        if last:
            return
        time.sleep(_LOOK_SECONDS)


def main(argument: str) -> int:
    settings = json.loads(argument)
    with tempfile.TemporaryDirectory(prefix="hetero-megatron-") as folder:
        diagnoses, ended = Path(folder) / "diagnoses", threading.Event()
        diagnoses.mkdir()
        os.environ[DIAGNOSES] = str(diagnoses)
        sender = threading.Thread(target=forward, args=(diagnoses, ended), daemon=True)
        sender.start()
        try:
            agent = Agent(settings, f"{folder}/logs")
            run_result = agent.run()
            failures = run_result.failures if run_result is not None and run_result.is_failed() else {}
            codes = agent.exit_codes(failures)
        finally:
            ended.set()
            sender.join(timeout=5)
        say(ranks={str(rank): code for rank, code in codes.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
