"""The testbed as one rank sees it: what the file of HETERO_TESTBED says about its chip's speed and its links.

``hetero-megatron testbed run`` writes the file that HETERO_TESTBED names; ``clock``, ``soft`` and ``paced`` happen in
the rank (here), ``namespaces`` outside it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_megatron.comm.hooks import Clock, Hooks, start_now
from hetero_megatron.environment.launcher import TESTBED, LauncherEnvironment
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import read_json_object

if TYPE_CHECKING:
    from hetero_megatron.emulation.core_lock import CoreLock
    from hetero_megatron.emulation.pacing import NodeLanes, Pacer

FAULTS_EVERY = 1.0  # seconds between two looks at the control file


class Emulation:
    """Clock and pacer of one rank; without a testbed, a clock of the chip at hand and no pacer.

    Attributes:
        chips, links: the modes, as reported; ``none`` where nothing is emulated.
    """

    def __init__(
        self,
        rank: int = 0,
        described: Mapping[str, Any] | None = None,
        directory: Path | None = None,
        timeout: float | None = None,
    ) -> None:
        described = described or {}
        self.rank, self.directory, self._timeout = rank, directory, timeout
        self.chips = str(described.get("chips", "none"))
        self.links = str(described.get("links", "none"))
        self._speed = float(described["speeds"][rank] or 1.0) if self.chips != "none" else 1.0
        rates = described.get("host_rates") if self.chips != "none" else None
        self._host_rate = None if rates is None or rates[rank] is None else float(rates[rank])
        self._control = Path(described["control"]) if described.get("control") else None
        self._looked, self._faults = 0.0, {}  # type: float, dict[str, Any]
        self._cores = list(described.get("cores", ()))
        self._node_of = list(described.get("node_of", ()))
        self.clock, self.pacer = self._make_clock(), self._make_pacer(described.get("pace"))

    @staticmethod
    def of(launcher: LauncherEnvironment, position: int | None = None, timeout: float | None = None) -> Emulation:
        """What the testbed that launched this process says; without one nothing is emulated.

        Args:
            position: rank in the plan, as ``start_comm`` is told; None: the launcher's.
            timeout: seconds that a message may wait for an emulated link.

        Raises:
            UserError: the file is not one that a testbed wrote.
        """
        rank = launcher.rank if position is None else position
        file, directory = launcher.testbed, launcher.testbed_directory
        if file is None:
            return Emulation(rank)
        described = read_json_object(file, TESTBED)
        try:
            return Emulation(rank, described, Path(directory) if directory else None, timeout)
        except (LookupError, TypeError, ValueError) as error:
            problem = f"does not describe a testbed with a rank {rank} ({type(error).__name__})"
            raise UserError(problem, field=TESTBED, value=file, accepted="as the testbed sets it") from None

    def hooks(self) -> Hooks:
        """For ``start_comm``."""
        submit = start_now if self.pacer is None else self.pacer.submit
        return Hooks(self.clock, submit, self.on_other_cores, self.cut_ranks, self._host_rate)

    def started(self) -> None:
        """Tell the launcher that start-up is over, and what follows is emulated."""
        if self.directory is not None:
            from hetero_megatron.testbed.state import READY

            (self.directory / READY.format(self.rank)).touch()

    @contextlib.contextmanager
    def on_other_cores(self) -> Iterator[None]:
        """Threads that start in here, gloo's, do without the rank's core: a slow chip does not slow its network card.
        And gloo's thread spins while the rank's holds the lock of a connection; on one core the rank then waits for
        the end of that thread's time slice to give it back, 2 to 4 ms."""
        if not self._cores or not hasattr(os, "sched_setaffinity"):
            yield
            return
        own_cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, set(self._cores) - own_cores or own_cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, own_cores)

    def describe(self) -> str:
        """One line for the console; empty without emulation."""
        if self.chips == self.links == "none":
            return ""
        from hetero_megatron.testbed.report import MEANING

        return f"testbed: chips {self.chips} ({MEANING[self.chips]}), links {self.links}"

    def facts(self) -> dict[str, Any]:
        """For whoever reports results: ``chips``, ``links``, and ``foreign_cores`` and ``disturbed`` as far as the
        launcher knows them by now. Empty without emulation."""
        if self.chips == self.links == "none":
            return {}
        from hetero_megatron.testbed.state import LOAD

        load = self.directory / LOAD if self.directory is not None else None
        load_facts = read_json_object(load) if load is not None and load.exists() else {}
        return {"chips": self.chips, "links": self.links, **load_facts}

    def _make_clock(self) -> Clock:
        if self.chips == "none":
            return Clock()
        from hetero_megatron.emulation.clock import EmulatedClock, OperatorSeconds

        if self.chips == "clock":
            return EmulatedClock(self._speed_now, OperatorSeconds(), tell=self._make_tell())
        if self.chips != "soft":
            raise ValueError(self.chips)
        return EmulatedClock(self._speed_now, core=self._make_core_lock(), tell=self._make_tell())

    def _make_tell(self) -> Callable[[float, float, float], object]:
        """Writes the clock's figures where the launcher reads them, also of a rank that dies later."""
        if self.directory is None:
            return lambda *_: None
        from hetero_megatron.testbed.state import CLOCK, CLOCKS

        file = os.open(self.directory / CLOCKS, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return lambda *seconds: os.pwrite(file, CLOCK.pack(*seconds), self.rank * CLOCK.size)

    def _make_core_lock(self) -> CoreLock | None:
        core = self._cores[self.rank] if self._cores else -1
        if self.directory is None or self._cores.count(core) < 2:
            return None
        from hetero_megatron.emulation.core_lock import CoreLock

        return CoreLock(self.directory / f"core-{core}")

    def _make_pacer(self, pace: Mapping[str, Any] | None) -> Pacer | None:
        if self.links != "paced" or pace is None:
            return None
        from hetero_megatron.emulation.pacing import Pacer

        rates = {i: float(rate) for i, rate in enumerate(pace["bandwidth"][self.rank]) if rate is not None}
        latency = {i: float(s) for i, s in enumerate((pace.get("latency") or {self.rank: ()})[self.rank]) if s}

        def now() -> Mapping[int, float]:
            changed = {d: float(rate) for s, d, rate in self._fault("rate", []) if s == self.rank}
            return {**rates, **changed} if changed else rates

        return Pacer(now, latency, self._timeout, self._make_lanes(rates))

    def _make_lanes(self, rates: Mapping[int, float]) -> NodeLanes | None:
        from hetero_megatron.emulation.pacing import NodeLanes

        if not self._node_of or self.directory is None:
            return None
        node = self._node_of[self.rank]
        outward = [rate for peer, rate in rates.items() if self._node_of[peer] != node]
        return NodeLanes(self.directory / f"lanes-{node}", node, self._node_of, max(outward)) if outward else None

    def cut_ranks(self) -> frozenset[int]:
        """Ranks that a cut link of the testbed's (``paced``) keeps from this one now."""
        if self.pacer is None:
            return frozenset()
        return frozenset(peer for peer, rate in self.pacer.rate().items() if rate == 0)

    def _speed_now(self) -> float:
        return float(self._fault("speed", {}).get(str(self.rank), self._speed))

    def _fault(self, key: str, default: Any) -> Any:
        """What the control file says now; it is written whole (by rename), and read at most once a second."""
        now = time.monotonic()
        if self._control is not None and now - self._looked > FAULTS_EVERY:
            self._looked = now
            if self._control.exists():
                self._faults = read_json_object(self._control)
        return self._faults.get(key, default)
