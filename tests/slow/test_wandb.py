"""What W&B itself wrote of a run without a network. Skipped where it is not installed (``pip install wandb``)."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from hetero_megatron.monitoring.metrics import MetricsWriter, Resumed, StepMetrics

pytestmark = pytest.mark.slow
BLOCK, HEADER = 1 << 15, 7


def records(path: Path) -> list[bytes]:
    """Of LevelDB's log format, after the file's own header of 7 bytes: checksum, length, kind (1 whole, 4 a last part),
    and bytes; none begins in the last 6 bytes of a block."""
    data, at, part, found = path.read_bytes(), 7, b"", list[bytes]()
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):
            found.append(part)
            part = b""
    return found


def test_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on is the same one; every step has the values that were told."""
    wandb = pytest.importorskip("wandb")
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    for first, last, resumed in ((1, 6, None), (7, 8, Resumed(6))):
        writer = MetricsWriter(str(tmp_path / "run"), wandb={"project": "p", "name": "n"}, resumed=resumed)
        for number in range(first, last + 1):
            writer.step(StepMetrics(number, number, 10.0 + number, 1.0, 1e-3, 8, 0.5))
        writer.close()
    wandb.teardown()
    runs, losses = set[tuple[str, str, str]](), dict[int, float]()
    for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb"):
        for data in records(path):
            record = messages.Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                runs.add((record.run.run_id, record.run.project, record.run.display_name))
            if record.WhichOneof("record_type") == "history":
                values = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                losses[int(values["_step"])] = float(values["lm loss"])
    assert losses == {number: 10.0 + number for number in range(1, 9)}
    assert [run[1:] for run in runs] == [("p", "n")]
