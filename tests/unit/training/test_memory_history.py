"""``--record-memory-history``: files of ranks, whatever ends the run, and devices that keep no history."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_megatron.platform import Platform
from hetero_megatron.platform.accelerator import Accelerator
from hetero_megatron.training.profile import ENTRIES, recorded_memory, snapshot_path


@dataclass
class Recorder:
    """As ``torch.cuda.memory``."""

    calls: list[tuple[str, Any]] = field(default_factory=list)
    fails: bool = False

    def _record_memory_history(self, enabled: str | None = "all", max_entries: int = 0) -> None:
        self.calls.append(("record", (enabled, max_entries)))

    def _dump_snapshot(self, filename: str) -> None:
        if self.fails:
            raise OSError(28, "No space left on device")
        Path(filename).write_bytes(pickle.dumps({"segments": []}))


def device(recorder: Any) -> Platform:
    class Stub(Accelerator):
        name = "stub"

        def module(self) -> Any:
            return SimpleNamespace(**({"memory": recorder} if recorder is not None else {}))

    return Platform(torch.device("cpu"), "gloo", Stub())


@pytest.mark.parametrize("name", ["cuda", "xpu"])
def test_torch_has_what_is_called(name: str) -> None:
    memory = getattr(torch, name).memory
    inspect.signature(memory._record_memory_history).bind(max_entries=ENTRIES)
    inspect.signature(memory._record_memory_history).bind(enabled=None)
    inspect.signature(memory._dump_snapshot).bind("x.pickle")


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
def test_it_is_written_whatever_ends_the_run(tmp_path: Path, error: BaseException | None) -> None:
    recorder, path = Recorder(), tmp_path / "memory.pickle"

    def run() -> None:
        with recorded_memory(str(path), device(recorder), 3):
            assert recorder.calls == [("record", ("all", ENTRIES))]
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    assert pickle.loads((tmp_path / "memory-rank-3.pickle").read_bytes()) == {"segments": []}
    assert recorder.calls[-1] == ("record", (None, 0))
    assert [p.name for p in tmp_path.iterdir()] == ["memory-rank-3.pickle"]


def test_what_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = snapshot_path(str(tmp_path / "memory.pickle"), 0)
    old.write_text("of an earlier run")
    with recorded_memory(str(tmp_path / "memory.pickle"), device(Recorder(fails=True)), 0):
        pass
    assert "memory-rank-0.pickle of rank 0 is not written: No space left on device" in capsys.readouterr().out
    assert old.read_text() == "of an earlier run" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("platform", [device(None), Platform(torch.device("cpu"), "gloo")], ids=["stub", "cpu"])
def test_a_device_without_a_history_is_said(
    tmp_path: Path, platform: Platform, capsys: pytest.CaptureFixture[str]
) -> None:
    with recorded_memory(str(tmp_path / "memory.pickle"), platform, 1):
        pass
    assert "keeps no history" in capsys.readouterr().out and not list(tmp_path.iterdir())
