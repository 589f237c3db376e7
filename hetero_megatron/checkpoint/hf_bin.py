"""Older Hugging Face checkpoints (``.bin``, pickle): read with torch's ``weights_only`` loader, or refused.

Nothing in such a file is executed: it is scanned first (``pickles``), and only names that plain tensors need may occur.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from hetero_megatron.checkpoint.hf_files import DTYPES
from hetero_megatron.checkpoint.pickles import TENSOR_NAMES, refers, scan_archive, scan_pickles
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import open_file, require_text

_LEGACY_PICKLES = 5  # before torch 1.6: magic number, version, system, tensors, keys of the storages


class BinSlice:
    """One tensor, with the methods of a safetensors slice."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        dtype = self._tensor.dtype
        return DTYPES[dtype][0] if dtype in DTYPES else str(dtype).removeprefix("torch.")

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor:
        return self._tensor[slices].clone()  # the file stays mapped; only these bytes are read


class BinFile:
    """The tensors of one ``.bin`` file, memory-mapped, with the methods of a safetensors file.

    Raises:
        UserError: it cannot be read, or is not a flat dictionary of plain tensors.
    """

    def __init__(self, path: Path) -> None:
        with open_file(path) as file:
            archive = file.read(4) == b"PK\3\4"  # as torch tells them apart
            file.seek(0)
            problem, names = scan_archive(file) if archive else scan_pickles(file, _LEGACY_PICKLES)
        foreign = [name for name in names if not TENSOR_NAMES.fullmatch(name)]
        if problem or foreign:
            accepted = "" if problem else "what model.save_pretrained(NEW) writes in the program that pickled it"
            raise UserError(f"not a file of tensors ({problem or refers(foreign[0])})", accepted=accepted)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
        except Exception as error:  # whatever torch makes of a damaged file; its words are not for our users
            raise UserError("not a file of tensors (it is damaged)") from error
        self._tensors = _plain_tensors(content)

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def get_slice(self, name: str) -> BinSlice:
        return BinSlice(self._tensors[name])


def _plain_tensors(content: Any) -> dict[str, torch.Tensor]:
    if not isinstance(content, dict):
        raise UserError("not a file of tensors (no dictionary)")
    for name, tensor in content.items():
        if not isinstance(name, str):
            raise UserError(f"not a dictionary of tensors by name: it has the key {ascii(name)[:40]}")
        require_text(name)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            inner = isinstance(tensor, dict) and any(isinstance(value, torch.Tensor) for value in tensor.values())
            accepted = f"a file by torch.save of what is under {name[:40]!r} alone" if inner else ""
            raise UserError(f"not a flat dictionary of tensors: {name} is no tensor", accepted=accepted)
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
            raise UserError(f"{name} has no plain values (sparse, quantized, nested or meta)")
    return {name: tensor.detach() for name, tensor in content.items()}
