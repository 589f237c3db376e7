"""What a checkpoint says about itself: ``metadata.json`` and ``SHA256SUMS``. JSON and text only, nothing is unpickled.

``SHA256SUMS`` lists every file (``sha256sum -c SHA256SUMS`` checks it too), and the directory's ``latest`` holds
the checksum of ``SHA256SUMS``; so any altered byte of any file is noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

FORMAT = 1
METADATA = "metadata.json"
SUMS = "SHA256SUMS"
_BLOCK = 4 << 20


class Damaged(Exception):
    """A checkpoint is not what was written. ``path``: of the file; the message says what is wrong with it."""

    def __init__(self, path: Path, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path}: {problem}")


@dataclass(frozen=True)
class Place:
    """Where a chunk is: tensor ``key`` of safetensors file ``file``."""

    file: str
    key: str


def sha256(path: Path) -> str:
    """Of a file's content; Damaged if it cannot be read."""
    digest, block = hashlib.sha256(), bytearray(_BLOCK)
    view = memoryview(block)
    try:
        with path.open("rb", buffering=0) as file:
            while n := file.readinto(block):
                digest.update(view[:n])
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def format_sums(sums: Mapping[str, str]) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def read_sums(directory: Path) -> dict[str, str]:
    """File name -> checksum. Only the exact text that we write is accepted."""
    path = directory / SUMS
    try:
        text = path.read_bytes().decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(path, f"cannot be read: {getattr(error, 'strerror', None) or 'not text'}") from error
    sums = {}
    for line in text.splitlines():
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or set(digest) - set("0123456789abcdef") or not name or Path(name).name != name:
            raise Damaged(path, "is not a list of checksums")
        sums[name] = digest
    if METADATA not in sums or format_sums(sums) != text:
        raise Damaged(path, "is not a list of checksums")
    return sums


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
    return json.dumps({"format": FORMAT, "state": state, "tensors": tensors}, indent=1) + "\n"


def read_metadata(directory: Path, sums: Mapping[str, str]) -> tuple[Metadata, dict[str, Any]]:
    """(DCP's metadata with a ``Place`` per chunk as storage data, our state), after the checksum was right."""
    path = directory / METADATA
    if sha256(path) != sums[METADATA]:
        raise Damaged(path, "its checksum is wrong")
    try:
        document = json.loads(path.read_text())
        if document["format"] != FORMAT:
            raise Damaged(path, f"has format {document['format']}; this version reads format {FORMAT}")
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places = {}
        for fqn, entry in document["tensors"].items():
            chunks = []
            for chunk in entry["chunks"]:
                offsets = torch.Size(chunk["offsets"])
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk["sizes"])))
                places[MetadataIndex(fqn, offsets)] = Place(chunk["file"], chunk["key"])
            properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            tensors[fqn] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(tensors, storage_data=places), document["state"]
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise Damaged(path, f"is not the metadata of a checkpoint ({type(error).__name__}: {error})") from error


def verify(directory: Path, sums: Mapping[str, str], part: int = 0, parts: int = 1) -> None:
    """Check every ``parts``-th file, beginning with number ``part``, so that ranks share the reading.

    Raises:
        Damaged: a file is missing, unreadable, or not the one that was written.
    """
    for name in sorted(sums)[part::parts]:
        path = directory / name
        if not path.is_file():
            raise Damaged(path, "is missing")
        if sha256(path) != sums[name]:
            raise Damaged(path, "its checksum is wrong")
