"""Saving and loading by all ranks of a group. DCP's planners decide, ``storage`` reads and writes, and ranks exchange
typed values in between (DCP's own functions would exchange pickled objects)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from hetero_megatron.checkpoint.boxes import BoxedTensor, BoxLoadPlanner, BoxSavePlanner
from hetero_megatron.checkpoint.manifest import Damaged
from hetero_megatron.checkpoint.storage import BoxReader, BoxWriter, Written
from hetero_megatron.comm import CommError, Group
from hetero_megatron.comm.group import Refusal
from hetero_megatron.errors import UserError


class RankFailed(Exception):
    """Raised on all ranks: ``rank``'s part of a save or load failed with ``cause``."""

    def __init__(self, rank: int, cause: Exception) -> None:
        super().__init__(f"rank {rank}: {type(cause).__name__}: {cause}")
        self.rank, self.cause = rank, cause


@dataclass(frozen=True)
class RemoteError:
    """A serialisable exception: the details of an OSError or ``Damaged``, text of others."""

    kind: str  # "system" | "damaged" | "refused" | another class's name
    text: str
    path: str = ""
    number: int = 0
    refusal: Refusal | None = None

    @staticmethod
    def of(error: Exception) -> RemoteError:
        if isinstance(error, Damaged):
            return RemoteError("damaged", error.problem, str(error.path))
        if isinstance(error, OSError):
            return RemoteError("system", error.strerror or str(error), str(error.filename or ""), error.errno or 0)
        if isinstance(error, UserError):
            return RemoteError("refused", "", refusal=Refusal.of(error))
        return RemoteError(type(error).__name__, str(error))

    def error(self) -> Exception:
        if self.kind == "damaged":
            return Damaged(Path(self.path), self.text)
        if self.kind == "system":
            return OSError(self.number, self.text, self.path or None)
        if self.refusal is not None:
            return self.refusal.error()
        return RuntimeError(f"{self.kind}: {self.text}")


@dataclass(frozen=True)
class PlannedBox:
    """A box that a rank is going to write; ``shape``: of the whole tensor."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(item: WriteItem) -> PlannedBox:
        data = item.tensor_data
        assert data is not None and item.type is WriteItemType.SHARD, "only boxes are written"
        dtype = str(data.properties.dtype).removeprefix("torch.")
        return PlannedBox(item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size), dtype)

    def item(self) -> WriteItem:
        dtype = getattr(torch, self.dtype, None)
        assert isinstance(dtype, torch.dtype), f"{self.name} has the dtype {self.dtype}"
        offsets = torch.Size(self.offsets)
        chunk = ChunkStorageMetadata(offsets, torch.Size(self.sizes))
        data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(self.shape))
        return WriteItem(MetadataIndex(self.name, offsets), WriteItemType.SHARD, tensor_data=data)


@dataclass(frozen=True)
class WrittenBox:
    """A box that a rank has written."""

    name: str
    offsets: tuple[int, ...]
    bytes: int
    written: Written


def save_boxes(tensors: Mapping[str, BoxedTensor], writer: BoxWriter, group: Group) -> None:
    """Write all ranks' boxes as one checkpoint. Called on all ranks of ``group``.

    Raises:
        RankFailed: on all ranks, when something failed on one.
        CommError: a peer died.
    """
    first, planner = group.index == 0, BoxSavePlanner()

    def plan() -> list[PlannedBox]:
        planner.set_up_planner(dict(tensors), is_coordinator=first)
        return [PlannedBox.of(item) for item in planner.create_local_plan().items]

    chunks = _run_together(group, plan, list[PlannedBox])

    def begin() -> None:
        if first:  # DCP's planner refuses boxes that overlap, and holes
            plans, _ = planner.create_global_plan([SavePlan([chunk.item() for chunk in rank]) for rank in chunks])
            writer.prepare_global_plan(plans)

    _run_together(group, begin)

    def write() -> list[WrittenBox]:
        items = [chunk.item() for chunk in chunks[group.index]]
        results = writer.write_data(planner.finish_plan(SavePlan(items)), planner).value()
        return [WrittenBox(w.index.fqn, tuple(w.index.offset or ()), w.size_in_bytes, w.storage_data) for w in results]

    results = _run_together(group, write, list[WrittenBox])

    def finish() -> None:
        if first:
            written = [
                [WriteResult(MetadataIndex(r.name, torch.Size(r.offsets)), r.bytes, r.written) for r in rank]
                for rank in results
            ]
            writer.finish(planner.metadata, written)

    _run_together(group, finish)


def load_boxes(tensors: Mapping[str, BoxedTensor], reader: BoxReader, group: Group) -> None:
    """Overwrite the values of all boxes; every rank reads its own. Raises like :func:`save_boxes`."""

    def read() -> None:
        planner = BoxLoadPlanner()
        planner.set_up_planner(tensors, reader.read_metadata(), is_coordinator=group.index == 0)
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()

    _run_together(group, read)


def _run_together(group: Group, action: Callable[[], Any], kind: Any = NoneType) -> list[Any]:
    """Run ``action`` here and wait for the others: the results of all ranks, or the first failure."""
    trouble, own_result = None, None
    try:
        own_result = action()
    except CommError:
        raise
    except Exception as error:
        trouble = RemoteError.of(error)
    outcomes = group.gather_objects((trouble, own_result), tuple[RemoteError | None, kind | None])
    for rank, (failed, _) in zip(group.ranks, outcomes, strict=True):
        if failed is not None:
            raise RankFailed(rank, failed.error())
    return [outcome for _, outcome in outcomes]
