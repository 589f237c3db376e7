"""Older Hugging Face checkpoints (``.bin``, pickle): read with torch's ``weights_only`` loader, or refused."""

from __future__ import annotations

import pickle  # lint: allow pickle (the name of an exception)
from collections.abc import Iterable
from pathlib import Path

import torch

LABELS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class BinSlice:
    """One tensor, with the methods of a safetensors slice."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return LABELS.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor:
        return self._tensor[slices].clone()  # the file stays mapped; only these bytes are read


class BinFile:
    """The tensors of one ``.bin`` file, mapped into memory, with the methods of a safetensors file.

    Raises:
        OSError: it cannot be read, or holds more than tensors (nothing in it is executed).
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise OSError("no such file")
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # written before torch 1.6: it cannot be mapped
            content = self._load_whole(path)
        except pickle.UnpicklingError as error:
            raise OSError(f"not a file of tensors ({str(error).splitlines()[0]})") from error
        if not isinstance(content, dict) or not all(isinstance(t, torch.Tensor) for t in content.values()):
            raise OSError("not a dictionary of tensors")
        self._tensors: dict[str, torch.Tensor] = content

    @staticmethod
    def _load_whole(path: Path) -> object:
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise OSError(f"not a file of tensors ({first})") from error

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def get_slice(self, name: str) -> BinSlice:
        return BinSlice(self._tensors[name])
