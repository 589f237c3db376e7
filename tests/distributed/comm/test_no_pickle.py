"""Agreement and checkpoints of eight ranks, with Python's pickle taken away from torch.distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d as c10d

from hetero_megatron.checkpoint.boxes import BoxedTensor
from hetero_megatron.checkpoint.native import CheckpointSaver, open_checkpoint
from hetero_megatron.checkpoint.storage import BoxWriter
from hetero_megatron.comm import Comm
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.training.agreement import check_agreement
from tests.support.pool import shared_pool

RANKS = tuple(range(8))
SHAPE = (19, 3)


def rows(rank: int) -> tuple[int, int]:
    """An uneven share; rank 7 owns nothing."""
    return (rank * 3, min(rank * 3 + 3, 19)) if rank < 7 else (19, 19)


def _owned(rank: int, fill: float | None = None) -> dict[str, BoxedTensor]:
    a, b = rows(rank)
    values = torch.arange(57, dtype=torch.float64).reshape(SHAPE)[a:b].clone()
    if fill is not None:
        values.fill_(fill)
    return {"weight": BoxedTensor(SHAPE, [(Box((a, 0), (b, 3)), values)])} if b > a else {}


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("pickle between ranks")


def _save_and_load(comm: Comm, path: str, fault: str) -> Any:
    comm.create_groups([RANKS])
    group = comm.group(RANKS)
    kept = c10d._object_to_tensor, c10d._tensor_to_object, BoxWriter.write_data
    c10d._object_to_tensor, c10d._tensor_to_object = _refuse, _refuse  # type: ignore[assignment]
    if fault and comm.rank == 3:

        def full(self: BoxWriter, *_: object) -> Any:
            raise OSError(28, "No space left on device", f"{path}/iter")

        BoxWriter.write_data = full  # type: ignore[method-assign]
    try:
        check_agreement(group, {"seed": 1})
        saver = CheckpointSaver(path, group, asynchronous=False)
        saver.save(5, _owned(comm.rank), {"step": 5}, {"rank": comm.rank}, lambda all_: {"ranks": len(all_)})
        found = open_checkpoint(path, group)
        assert found is not None and found.step == 5 and found.state == {"step": 5, "ranks": 8}
        mine = _owned(comm.rank, -1.0)
        found.read_into(mine, group)
        same = [torch.equal(got[1], was[1]) for name in mine for got, was in
                zip(mine[name].parts.values(), _owned(comm.rank)[name].parts.values())]  # fmt: skip
        return same
    finally:
        c10d._object_to_tensor, c10d._tensor_to_object, BoxWriter.write_data = kept  # type: ignore[method-assign]


def test_checkpoints_are_saved_and_read_without_pickle(tmp_path: Path) -> None:
    assert shared_pool().run(_save_and_load, str(tmp_path / "c"), "") == [[True]] * 7 + [[]]


def test_what_fails_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written .No space left on device.*older ones are untouched"):
        shared_pool().run(_save_and_load, str(tmp_path / "c"), "full")
    assert not list((tmp_path / "c").glob("iter_*"))
