"""A checkpoint's description of itself: ``metadata.json`` and ``SHA256SUMS``. JSON and text only; nothing is unpickled.

``SHA256SUMS`` lists every file (``sha256sum -c SHA256SUMS`` works), and ``latest`` holds the checksum of
``SHA256SUMS``, so any altered byte of any file is detected.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import member, open_file, read_text
from hetero_megatron.utils.text import tracked

FORMAT = 1
METADATA = "metadata.json"
SUMS = "SHA256SUMS"
MAX_BYTES = 512 << 20  # of a file without tensors; a chunk takes about 300 bytes of metadata.json
_BLOCK = 4 << 20


class Damaged(Exception):
    """A checkpoint differs from what was written; ``path``: the file."""

    def __init__(self, path: Path, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}")


@dataclass(frozen=True)
class ChunkLocation:
    """Where a chunk is stored: tensor ``key`` of safetensors file ``file``."""

    file: str
    key: str


def sha256(path: Path, limit: int = MAX_BYTES) -> str:
    """Checksum of a file's content; Damaged if it cannot be read or exceeds ``limit`` bytes (a sparse file could take
    days)."""
    digest = hashlib.sha256()
    try:
        with open_file(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > limit:
                raise Damaged(path, f"holds {size:,} bytes, more than was ever written in it")
            while block := file.read(_BLOCK):
                digest.update(block)
    except UserError as error:
        raise unusable(path, error) from None
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def unusable(path: Path, error: UserError) -> Damaged:
    """A reader's UserError about a file as ``Damaged``."""
    bare_error = UserError(error.problem, field=error.field, accepted=error.accepted) if error.where else error
    return Damaged(path, f"is not what was written: {str(bare_error)[:400]}")


def format_sums(sums: Mapping[str, str]) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def read_sums(directory: Path) -> dict[str, str]:
    """File name -> checksum. Only the exact text that we write is accepted."""
    path = directory / SUMS
    try:
        text = read_text(path)
    except UserError as error:
        raise unusable(path, error) from None
    sums = {}
    for line in text.split("\n")[:-1]:
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or set(digest) - set("0123456789abcdef") or not _is_plain(name):
            raise Damaged(path, "is not a list of checksums")
        sums[name] = digest
    if METADATA not in sums or format_sums(sums) != text:
        raise Damaged(path, "is not a list of checksums")
    return sums


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and name.isprintable() and "/" not in name


def encode_metadata(metadata: Metadata, state: Mapping[str, Any]) -> str:
    """DCP's metadata and our state as JSON."""
    tensors = {}
    for fqn, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), "byte entries are never written"
        chunks = []
        for chunk in tensor.chunks:
            place = metadata.storage_data[MetadataIndex(fqn, chunk.offsets)]
            entry = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": place.file, "key": place.key}
            chunks.append(entry)
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[fqn] = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
    return json.dumps({"format": FORMAT, "state": state, "tensors": tensors}, indent=1, allow_nan=False) + "\n"


def verify(
    directory: Path, sums: Mapping[str, str], limits: Mapping[str, int], part: int = 0, parts: int = 1
) -> None:
    """Check every ``parts``-th file, starting with ``part``, so that ranks share the work.

    Args:
        limits: largest size of files in bytes; default ``MAX_BYTES``.

    Raises:
        Damaged: a file is missing, unreadable, or altered.
    """
    names = sorted(sums)[part::parts]
    sizes = {name: (directory / name).stat().st_size if (directory / name).is_file() else 0 for name in names}
    for name in tracked(names, "checking the checkpoint", sum(sizes.values()), sizes.__getitem__):
        path = directory / name
        if not os.path.lexists(path):
            raise Damaged(path, "is missing")
        try:
            member(directory, name)
        except UserError as error:
            raise unusable(path, error) from None
        if sha256(path, limits.get(name, MAX_BYTES)) != sums[name]:
            raise Damaged(path, "its checksum is wrong")
