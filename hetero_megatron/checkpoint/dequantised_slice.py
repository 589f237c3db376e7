"""A tensor that is dequantised as it is read, in the place of those that are stored."""

from __future__ import annotations

from pathlib import Path

import torch

from hetero_megatron.checkpoint.hf_directory import WeightFiles, shown
from hetero_megatron.checkpoint.hf_files import DTYPES


class DequantisedSlice:
    """As a slice object of safetensors: shape, dtype, and any part of the values.

    Attributes:
        rounded: values are of that dtype; False: bitsandbytes' are as they were computed, in fp32, for whoever stores
            them in 4 bits again, which then are the same 4 bits.
    """

    shape: tuple[int, ...]
    dtype = torch.bfloat16
    rounded = True

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return DTYPES[self.dtype][0]

    @property
    def value_dtype(self) -> torch.dtype:
        return self.dtype if self.rounded else torch.float32

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        indices = index if isinstance(index, tuple) else (index,)
        parts = (*indices, *[slice(None)] * (len(self.shape) - len(indices)))
        return self._part(*(range(*part.indices(size)) for part, size in zip(parts, self.shape, strict=True)))

    def _part(self, *axes: range) -> torch.Tensor:
        raise NotImplementedError


# By name of a tensor: what is read in its place, and the names of the stored tensors that this stands for.
Replaced = dict[str, tuple[DequantisedSlice, tuple[str, ...]]]


def misfit(files: WeightFiles, name: str, accepted: str) -> Exception:
    """The error for a stored tensor that does not fit the others."""
    stored = files.tensor(name)
    problem = f"{shown(name)} is {stored.get_dtype()} {list(stored.get_shape())}"
    return files.refuse(problem, Path(files.directory), accepted)
