"""The ranks of an elastic run on a testbed of this host: they stay while others of them are killed or leave."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from hetero_megatron.comm.job_store import JobStore
from hetero_megatron.environment.launcher import DIAGNOSES, SUPERVISED
from hetero_megatron.errors import UserError
from hetero_megatron.testbed.launch import Launcher
from hetero_megatron.testbed.process import inside, signal_all
from hetero_megatron.testbed.settings import Settings


@dataclass
class TestbedRanks:
    """See :class:`~hetero_megatron.launch.in_place.ElasticJob`; member i is rank i of the testbed.

    Args:
        testbed: opened.
        diagnoses: where ranks that lose a peer say so.
    """

    __test__ = False  # not a test, whatever pytest thinks of its name

    testbed: Launcher
    diagnoses: Path

    def __post_init__(self) -> None:
        self.secret = self.testbed.secret.encode()

    def serve(self) -> JobStore:
        """The job's store, which no node's loss harms: at the switch, where nodes are namespaces."""
        network = self.testbed.network
        if network is None:
            return JobStore()
        address = network.open_to_launcher()
        with inside(network.switch):  # what listens, and the store's own connection to it, stay there
            return JobStore(address)

    def start(self, host: str, port: int) -> TestbedRanks:
        self.testbed.start_ranks({
            "MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0", SUPERVISED: "1", DIAGNOSES: str(self.diagnoses.absolute()),
        })  # fmt: skip
        return self

    def poll(self) -> dict[int, int]:
        self.testbed.look(0.0)
        codes = {rank: self.testbed.child(rank).returncode for rank in self.testbed.codes}
        return {rank: code for rank, code in codes.items() if code is not None}

    def end(self, rank: int) -> None:
        child = self.testbed.child(rank)
        if child.poll() is None:
            signal_all([child.pid], signal.SIGKILL, group=True)

    def kill(self) -> None:
        self.testbed.measure()  # its end removes what is left of the ranks


@contextmanager
def testbed_ranks(testbed: Launcher | None, diagnoses: Path) -> Iterator[TestbedRanks | None]:
    """Those of a testbed, which lasts as long; None: the run is on none."""
    with testbed.opened() if testbed is not None else nullcontext():
        yield TestbedRanks(testbed, diagnoses) if testbed is not None else None


def refuse_paced(settings: Settings) -> None:
    """UserError: links are paced by the ranks, which know each other by numbers that change with every epoch."""
    if settings.links == "paced":
        raise UserError(
            f"with --elastic links cannot be paced by the ranks ({settings.reasons['links']})", field="--links",
            value="paced", accepted="namespaces, or none",
        )  # fmt: skip
