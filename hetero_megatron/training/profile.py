"""``--profile``: what every rank did in some steps, on one clock, as a trace for ui.perfetto.dev; and torch's profiler.

Ranks have clocks of their own. How they differ is bounded by causality: what one rank receives was sent before. Each
round of an all-gather tells that of all pairs at once; several rounds before and after the profiled steps leave an
interval for each rank's offset, whose middle is used and whose half is the error that the trace states.

``--record-memory-history``: what the allocator of a rank's device did, in the format of torch's own viewer
(https://docs.pytorch.org/memory_viz). Each rank writes its own file when it ends, also where what ends it is a lack of
memory: then the last events say who held what.
"""

from __future__ import annotations

import errno
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero_megatron.comm import Group
from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.log_sinks import tell
from hetero_megatron.pipeline.stage_work import TimedAction
from hetero_megatron.platform import Platform
from hetero_megatron.training.config import ProfileSteps
from hetero_megatron.utils.outputs import write_text

FOLDER, TRACE = "profile", "trace.json"
ROUNDS = 16  # of clock readings, before and after
ROW = tuple[int, str, int, int, float, float, float]  # step, kind, micro-batch, chunk, start, end, computed


@dataclass(frozen=True)
class ClockOffset:
    """``seconds``: to be subtracted from a rank's clock to get that of the first rank; right within ``error``."""

    seconds: float
    error: float


def read_clocks(group: Group, rounds: int = ROUNDS) -> torch.Tensor:
    """[rounds, 2] seconds of this rank's clock: before and after a gathering of all ranks. Called on all ranks."""
    rows = []
    for _ in range(rounds):
        start = time.perf_counter()
        group.gather_vectors(torch.zeros(1, dtype=torch.float64))
        rows.append((start, time.perf_counter()))
    return torch.tensor(rows, dtype=torch.float64)


def offsets(readings: Sequence[torch.Tensor]) -> list[ClockOffset]:
    """By rank, from what ``read_clocks`` gave on each: a gathering ends on no rank before it began on all.

    Args:
        readings: [rounds, 2] of each rank.
    """
    first = readings[0]
    clock_offsets = []
    for rank_readings in readings:
        low = float((rank_readings[:, 0] - first[:, 1]).max())  # it began here before it ended there
        high = float((rank_readings[:, 1] - first[:, 0]).min())
        clock_offsets.append(ClockOffset((low + high) / 2, max(0.0, (high - low) / 2)))
    return [ClockOffset(0.0, 0.0), *clock_offsets[1:]]


class Profiler:
    """Of one rank; every method is called on all ranks of the plan.

    Args:
        config: which steps are profiled.
        directory: of --save; the trace goes into ``FOLDER`` in it.
    """

    def __init__(self, config: ProfileSteps, group: Group, platform: Platform, directory: str, rank: int) -> None:
        self.config, self.group, self.platform, self.rank = config, group, platform, rank
        self.folder = Path(directory) / FOLDER
        self._rows: list[ROW] = []
        self._clocks: list[torch.Tensor] = []
        self._torch: Any = None
        self._seconds: dict[bool, list[float]] = {True: [], False: []}  # of steps: profiled, others
        self._began = 0.0

    def step(self, step: int) -> AbstractContextManager[Any]:
        """In which step ``step``, counted from 1, runs."""
        if not self.config.covers(step):
            return nullcontext()
        if not self._clocks:
            self._clocks.append(read_clocks(self.group))
            if self.rank in self.config.torch_ranks:
                self._torch = torch.profiler.profile()
                self._torch.start()
        if self.platform.device.type != "cpu":
            self.platform.synchronize()  # so that the device's first moment is now
        self._began = time.perf_counter()
        return torch.profiler.record_function(f"step {step}") if self._torch is not None else nullcontext()

    def after(self, step: int, actions: Sequence[TimedAction], seconds: float, last: bool) -> str:
        """After the step; what to say of the profile, on the first rank, once it is written.

        Args:
            last: no step follows.
        """
        profiled = self.config.covers(step)
        self._seconds[profiled].append(seconds)
        if profiled:
            # Moments of a device count from its first one of the step, those of a host are its clock's.
            shift = self._began if actions and actions[0].start < self._began - 1 else 0.0
            self._rows += [
                (step, a.action.kind, a.action.micro_batch, a.action.chunk, a.start + shift, a.end + shift, a.computed)
                for a in actions
            ]
            self._rows.append((step, "STEP", -1, 0, self._began, self._began + seconds, seconds))
        return self._finish() if self._rows and (last or step == self.config.end) else ""

    def _finish(self) -> str:
        if self._torch is not None:
            self._torch.stop()
        self._clocks.append(read_clocks(self.group))
        profile = (torch.cat(self._clocks).tolist(), self._rows)
        profiles = self.group.gather_objects(profile, tuple[list[list[float]], list[ROW]])
        self._rows = []
        clock_error_us = self._write(profiles)
        if clock_error_us is None or self.group.ranks[0] != self.rank:
            return ""
        return f"profile: {self.folder / TRACE}; clocks of ranks agree within {clock_error_us:.0f} us{self._overhead()}"

    def _write(self, every: Sequence[tuple[list[list[float]], list[ROW]]]) -> float | None:
        """This rank's files; by how many us the clocks of ranks may differ. None, and a notice, where they cannot be
        written: the training is worth more."""
        clock_offsets = offsets([torch.tensor(rows, dtype=torch.float64) for rows, _ in every])
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._torch is not None:
                self._write_torch(self.folder / f"torch-rank-{self.rank}.json")
            if self.group.ranks[0] == self.rank:
                rows = {rank: rank_rows for rank, (_, rank_rows) in zip(self.group.ranks, every, strict=True)}
                clocks = dict(zip(self.group.ranks, clock_offsets, strict=True))
                write_text(self.folder / TRACE, "--profile", json.dumps(trace(rows, clocks)))
        except (OSError, RuntimeError, UserError) as error:  # RuntimeError: of torch's profiler
            reason = error.problem if isinstance(error, UserError) else f"{getattr(error, 'strerror', None) or error}"
            tell(f"{self.folder} on rank {self.rank}: {reason}: a profile is missing in it, and training goes on")
            return None
        return 1e6 * max(offset.error for offset in clock_offsets)

    def _write_torch(self, path: Path) -> None:
        """In a folder aside first: torch does not say that a disk is full. OSError: it is."""
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".torch-") as folder:
            written = Path(folder) / path.name
            self._torch.export_chrome_trace(str(written))
            if not _is_whole(written):
                raise OSError(errno.ENOSPC, "is not written to its end (a full disk?)")
            written.replace(path)

    def _overhead(self) -> str:
        """What profiled steps took beyond the others, of which the first two count for neither."""
        unprofiled = sorted(self._seconds[False][2:])
        profiled = sorted(self._seconds[True])
        if not unprofiled:
            return ""
        typical = unprofiled[len(unprofiled) // 2]
        return f"; profiled steps took {profiled[len(profiled) // 2] / typical - 1:+.1%} of the others' time"


def _is_whole(path: Path) -> bool:
    """Whether a file of JSON is there and goes on to its last bracket."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return file.read().rstrip()[-1:] == b"}"


def trace(rows: dict[int, list[ROW]], clocks: dict[int, ClockOffset]) -> dict[str, Any]:
    """Trace events (JSON object format): a process per rank with its steps, compute and transfers as threads.

    Times are microseconds of the first rank's clock from the first event on. ``args.error_us`` of a process's name is
    by how much its events may be off
    """
    origin = min((row[4] - clocks[rank].seconds for rank, rank_rows in rows.items() for row in rank_rows), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, rank_rows in rows.items():
        offset = clocks[rank]
        events.append(_named("process_name", rank, 0, f"rank {rank}", error_us=1e6 * offset.error))
        for thread, name in enumerate(("steps", "compute", "transfers")):
            events.append(_named("thread_name", rank, thread, name))
        for step, kind, micro_batch, chunk, start, end, computed in rank_rows:
            thread = 0 if kind == "STEP" else 1 if kind in ("F", "B", "B_INPUT", "W") else 2
            name = f"step {step}" if kind == "STEP" else f"{kind}{micro_batch}" + (f".{chunk}" if chunk else "")
            events.append({
                "name": name, "cat": kind, "ph": "X", "pid": rank, "tid": thread,
                "ts": 1e6 * (start - offset.seconds - origin), "dur": 1e6 * max(end - start, 0.0),
                "args": {"step": step, "micro_batch": micro_batch, "chunk": chunk, "computed_us": 1e6 * computed},
            })  # fmt: skip
    return {
        "traceEvents": events, "displayTimeUnit": "ms",
        "otherData": {"clock_error_us": {str(rank): 1e6 * offset.error for rank, offset in clocks.items()}},
    }  # fmt: skip


def _named(what: str, process: int, thread: int, name: str, **more: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name, **more}}


ENTRIES = 100_000  # events that are kept, the latest ones, as in Megatron


def snapshot_path(path: str, rank: int) -> Path:
    """``dir/snapshot.pickle`` -> ``dir/snapshot-rank-3.pickle``."""
    name = Path(path)
    return name.with_name(f"{name.stem}-rank-{rank}{name.suffix}")


@contextmanager
def recorded_memory(path: str, platform: Platform, rank: int) -> Iterator[None]:
    """The allocator's history inside is written at the end, whatever that is. A device without one is said, as is a
    file that cannot be written: training is worth more."""
    recorder = platform.memory_recorder()
    if recorder is None:
        tell(f"rank {rank}: the allocator of its device ({platform.name}) keeps no history: no {path} of it")
        yield
        return
    recorder._record_memory_history(max_entries=ENTRIES)
    try:
        yield
    finally:
        _write(recorder, snapshot_path(path, rank), rank)
        recorder._record_memory_history(enabled=None)


def _write(recorder: Any, path: Path, rank: int) -> None:
    """Aside first: what was there before stays until the new one is whole."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".memory-") as folder:
            written = Path(folder) / path.name
            recorder._dump_snapshot(str(written))
            written.replace(path)
    except (OSError, RuntimeError) as error:
        tell(f"{path} of rank {rank} is not written: {getattr(error, 'strerror', None) or error}")
