"""Boxes in the interface of torch's distributed checkpoint (DCP); the only module that knows its planner protocol.

DCP asks an object in a state dict for its chunks through three double-underscore methods
(``torch.distributed._checkpointable._Checkpointable``, private, equal in torch 2.5 to 2.13). Its default planners look
up only tensors by chunk, so two small planners of our own do the lookup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hetero_megatron.layout import Box


class BoxedTensor:
    """Boxes of one logical tensor, with their values.

    Args:
        shape: of the whole tensor.
        parts: (box, values of its shape). When saving, each element is in one box of one rank; when loading, the values
            are overwritten.
    """

    def __init__(self, shape: tuple[int, ...], parts: Iterable[tuple[Box, torch.Tensor]]) -> None:
        self.shape = shape
        self.parts = {torch.Size(box.lo): (box, values) for box, values in parts}

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), TensorProperties(dtype=values.dtype), self.size()),
            )
            for offset, (box, values) in self.parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box, _ in self.parts.values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.parts[index.offset][1]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.lo), torch.Size(box.shape))


class BoxSavePlanner(DefaultSavePlanner):
    """DCP's planner (which rejects overlapping chunks and holes) over a flat dict of ``BoxedTensor``."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        boxed: BoxedTensor = self.state_dict[index.fqn]
        return boxed.__get_tensor_shard__(index)


class BoxLoadPlanner(DefaultLoadPlanner):
    """DCP's planner: intersects the chunks in the files with ours, whatever plan wrote them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Mapping[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict = self.original_state_dict = dict(state_dict)
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        boxed: BoxedTensor = self.state_dict[index.fqn]
        return boxed.__get_tensor_shard__(index)
