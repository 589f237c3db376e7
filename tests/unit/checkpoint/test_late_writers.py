"""A process that hung while the job went on without it: when it wakes up, it writes nothing more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hetero_megatron.checkpoint.hf_save import save_hf
from hetero_megatron.comm import CommError
from hetero_megatron.comm.epochs import SCOPE, Epoch, EpochStore, Fence
from hetero_megatron.comm.job_store import JobStore
from hetero_megatron.layout import Box
from hetero_megatron.monitoring.metrics import MetricsWriter, Resumed, StepMetrics
from hetero_megatron.spec import ModelSpec, logical_tensors
from tests.support.tiny_checkpoint import alone, load, save, values

LATE = "writes nothing more: epoch 1 of the job is over"


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


class HungWriter:
    """One whose only writer hangs as it asks for the ``at``-th time whether it may write, until others have gone on,
    and saved ``steps``."""

    def __init__(self, directory: Path, at: int, steps: list[int]) -> None:
        directory.mkdir()
        self.directory, self.asked, self.at, self.steps = directory, 0, at, steps
        self._store = EpochStore(JobStore().keys(SCOPE), b"")
        self.late = Fence(self._store, 1, 0)
        self.left: dict[str, bytes] = {}
        self.found: tuple[int, int, dict[str, torch.Tensor]] | None = None

    def check(self) -> None:
        self.asked += 1
        if self.asked == self.at:
            self._store.publish(Epoch(2, [1], "", "", [], "lost rank 0", 0.0, 0.0))
            for step in self.steps:
                save(self.directory, step, seed=10 + step, check=Fence(self._store, 2, 0).check)
            self.left, self.found = content(self.directory), load(self.directory)
        self.late.check()


@pytest.mark.parametrize("steps", [[], [2], [2, 3]])
def test_what_hung_writes_nothing_when_it_wakes_up(steps: list[int], tmp_path: Path) -> None:
    """At whatever moment of its save of step 2 it hung. The metrics, too."""
    for at in range(1, 100):
        job = HungWriter(tmp_path / str(at), at, steps)
        save(job.directory, 1, seed=1, check=job.late.check)
        metrics = MetricsWriter(str(job.directory), resumed=Resumed(0), allowed=job.late.check)
        metrics.step(StepMetrics(1, 4, 2.0, 1.0, 1e-3, 100, 0.5))
        try:
            save(job.directory, 2, seed=2, check=job.check)
        except RuntimeError as error:
            assert LATE in str(error), error
        if job.asked < at:
            break  # it did not hang
        with pytest.raises(CommError, match=LATE):
            metrics.step(StepMetrics(2, 8, 2.0, 1.0, 1e-3, 100, 0.5))
        now, found = content(job.directory), load(job.directory)
        assert {name: now[name] for name in job.left} == job.left, at
        assert all(".incomplete/" in name for name in now.keys() - job.left.keys()), at
        assert found is not None and job.found is not None and found[0] == job.found[0]
        seed = 10 + steps[-1] if steps else found[0]
        assert all(torch.equal(found[2][name], tensor) for name, tensor in values(seed).items())
    assert at >= 5


def export(directory: Path, weight: float, fence: Callable[[], None]) -> None:
    """One layer of Llama, all of whose numbers are ``weight``."""
    spec = ModelSpec("one", "llama", 1, 8, 16, 2, 2, 4, 16, 8)
    world = alone()
    world.comm.fence = fence
    owned = ((t.name, Box.whole(t.shape), torch.full(t.shape, weight)) for t in logical_tensors(spec))
    save_hf(str(directory), spec, owned, torch.float32, world)


def test_an_export_that_hung_writes_nothing_when_it_wakes_up(tmp_path: Path) -> None:
    """At whatever moment of it: others have exported meanwhile, through the same folder beside."""
    for at in range(1, 100):
        store, asked, left = EpochStore(JobStore().keys(SCOPE), b""), 0, dict[str, bytes]()
        late, directory = Fence(store, 1, 0), tmp_path / str(at)

        def hang(late: Fence = late, directory: Path = directory, at: int = at, store: EpochStore = store) -> None:
            nonlocal asked, left
            asked += 1
            if asked == at:
                store.publish(Epoch(2, [1], "", "", [], "lost rank 0", 0.0, 0.0))
                export(directory, 2.0, Fence(store, 2, 0).check)
                left = content(tmp_path)
            late.check()

        try:
            export(directory, 1.0, hang)
        except CommError as error:
            assert LATE in str(error), error
        if asked < at:
            break
        assert content(tmp_path) == left, at
    assert at >= 10
