"""Older Hugging Face checkpoints (``.bin``, pickle): read with torch's ``weights_only`` loader, or refused.

Nothing in such a file is executed. Archive and pickle are scanned before torch reads them: only names that plain
tensors need may occur, and nothing may be compressed, so that a small file cannot expand into a large object.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hetero_megatron.checkpoint.hf_files import DTYPES
from hetero_megatron.errors import UserError
from hetero_megatron.files import open_file, require_text

MAX_PICKLE_BYTES = 64 << 20  # the descriptions of tensors, some 200 bytes each; their values are beside them
_LEGACY_PICKLES = 5  # before torch 1.6: magic number, version, system, tensors, keys of the storages
# What a dictionary of plain tensors refers to, written by any version of torch ("module name").
_NAMES = re.compile(
    r"collections OrderedDict"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state)"
    r"|torch\.nn\.parameter Parameter"
    r"|torch(\.cuda)? [A-Z][A-Za-z0-9]*Storage|torch\.storage (Typed|Untyped)Storage"
    r"|torch (b?float|complex|u?int|bool)[0-9a-z_]*"
)


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
            problem = _scan_archive(file) if archive else _scan_pickles(file, _LEGACY_PICKLES)
        if problem:
            raise UserError(f"not a file of tensors ({problem})")
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
            raise UserError(f"not a flat dictionary of tensors: {name} is no tensor")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
            raise UserError(f"{name} has no plain values (sparse, quantized, nested or meta)")
    return {name: tensor.detach() for name, tensor in content.items()}


def _scan_archive(file: BinaryIO) -> str:
    """What is wrong with a torch zip file; empty if nothing."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            pickles = [e for e in entries if e.filename.endswith("/data.pkl")]
            if len({e.filename for e in entries}) < len(entries) or len(pickles) != 1:
                return "its archive is damaged"
            if any(e.compress_type != zipfile.ZIP_STORED or e.flag_bits & 1 for e in entries):
                return "its archive is compressed, which torch never writes"
            if pickles[0].file_size > MAX_PICKLE_BYTES:
                return "it describes too many tensors"
            with archive.open(pickles[0]) as stream:
                return _scan_pickles(stream, 1)
    except Exception:  # zipfile raises what the damage leads to: BadZipFile, struct.error, EOFError, ValueError, ...
        return "its archive is damaged"


def _scan_pickles(stream: Any, count: int) -> str:
    """What is wrong with ``count`` consecutive pickles; empty if nothing."""
    try:
        for _ in range(count):
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL") and not _NAMES.fullmatch(str(argument)):
                    named = str(argument or "a computed name").replace(" ", ".")
                    return f"it holds {ascii(named)[1:-1][:80]}, and only plain tensors are read"
    except Exception:  # pickletools, likewise
        return "it is damaged"
    return ""
