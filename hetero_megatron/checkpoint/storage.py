"""DCP's storage interface over JSON, safetensors and checksums, in place of its own pickled one."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from hetero_megatron.checkpoint.directory import CheckpointDirectory, write_synced
from hetero_megatron.checkpoint.manifest import METADATA, SUMS, ChunkLocation, encode_metadata, format_sums, sha256
from hetero_megatron.checkpoint.safefile import Files, write_file
from hetero_megatron.checkpoint.typed import is_finite
from hetero_megatron.errors import UserError
from hetero_megatron.utils.text import listed

WEIGHTS = "model."  # how their names begin


@dataclass(frozen=True)
class Written:
    """Location and checksum of a rank's file, as reported to the coordinator."""

    place: ChunkLocation
    digest: str


class BoxWriter(StorageWriter):
    """Writes one safetensors file per rank; the coordinator adds metadata and checksums, and publishes.

    Args:
        state: for ``metadata.json``, besides the tensors.
        extra: small files to store along (tokenizer, generation config): name -> content.
        after: called by the coordinator when the checkpoint is complete.
        dtype: in which weights are used; they must be finite in it, too. None: their own.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        step: int,
        rank: int,
        state: Mapping[str, Any],
        extra: Mapping[str, bytes],
        after: Callable[[], None],
        dtype: torch.dtype | None = None,
    ) -> None:
        self.directory, self.step, self.rank = directory, step, rank
        self.state, self.extra, self.after, self.dtype = state, extra, after, dtype

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.directory.begin(self.step)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        tensors: dict[str, torch.Tensor] = {}
        for item in plan.items:
            assert item.type is WriteItemType.SHARD and item.index.offset is not None, "only boxes are written"
            tensors[_key(item.index)] = planner.resolve_data(item)  # type: ignore[assignment]
        results = []
        self._require_finite(plan, tensors)
        if tensors:
            self.directory.allowed()  # else the folder of this name may be that of those who went on
            name = f"rank_{self.rank:05d}.safetensors"
            entries = {key: (t.dtype, tuple(t.shape)) for key, t in tensors.items()}
            digest, _ = write_file(self.directory.work(self.step) / name, entries, tensors.__getitem__)
            for item in plan.items:
                key = _key(item.index)
                size = tensors[key].nbytes
                results.append(WriteResult(item.index, size, Written(ChunkLocation(name, key), digest)))
        future.set_result(results)
        return future

    def _require_finite(self, plan: SavePlan, tensors: Mapping[str, torch.Tensor]) -> None:
        """Nothing that is not finite gets into a file: whoever goes on from there could only compute NaN."""
        nonfinite = []
        for item in plan.items:
            name = item.index.fqn
            used_as = self.dtype if name.startswith(WEIGHTS) else None
            if not is_finite(tensors[_key(item.index)], used_as):
                nonfinite.append(name)
        if nonfinite:
            raise UserError(
                f"the checkpoint of step {self.step} is not saved: NaN or Inf in {listed(nonfinite)}"
                f" on rank {self.rank}; older ones are untouched", field="--save", value=str(self.directory.path),
                accepted="values that are finite: a smaller --lr or --weight-decay, from a checkpoint before; or other "
                "hardware or --kernels for that rank",
            )  # fmt: skip

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        work, sums = self.directory.work(self.step), {}
        metadata.storage_data = {}
        for written in (r for per_rank in results for r in per_rank):
            metadata.storage_data[written.index] = written.storage_data.place
            sums[written.storage_data.place.file] = written.storage_data.digest
        for name, content in {METADATA: encode_metadata(metadata, self.state).encode(), **self.extra}.items():
            write_synced(work / name, content)
            sums[name] = sha256(work / name)
        write_synced(work / SUMS, format_sums(sums).encode())
        self.directory.publish(self.step)
        self.after()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _key(index: MetadataIndex) -> str:
    assert index.offset is not None
    return f"{index.fqn}@{','.join(map(str, index.offset))}"


class BoxReader(StorageReader):
    """Reads the slices that the planner asks for, from a directory with verified checksums."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        self.directory, self.metadata = directory, metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self) -> Metadata:  # type: ignore[override]  # without kwargs DCP tries no other metadata
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # type: ignore[override]
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files = Files(self.directory)
        by_file: dict[str, list[tuple[str, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            place = self.metadata.storage_data[item.storage_index]
            by_file[place.file].append((place.key, item))
        for file, items in by_file.items():
            for key, item in sorted(items, key=lambda pair: pair[0]):
                slices = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                target = planner.resolve_tensor(item).detach()
                target.copy_(files.read(file, key, slices))
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def empty_like_box(values: torch.Tensor) -> torch.Tensor:
    """A host buffer for staging a box, pinned where that makes the copy asynchronous."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type != "cpu")
