"""``--record-memory-history``: what the allocator of a rank's device did, in the format of torch's own viewer
(https://docs.pytorch.org/memory_viz).

Each rank writes its own file when it ends, also where what ends it is a lack of memory: then the last events say who
held what.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetero_megatron.monitoring.log_sinks import tell
from hetero_megatron.platform import Platform

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
