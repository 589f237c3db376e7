"""Megatron's token files: ``prefix.bin`` holds the tokens, ``prefix.idx`` the offsets of documents.

The .idx file, little-endian: magic ``MMIDIDX\\0\\0``; version u64 = 1; token type u8; number of sequences u64; number
of documents + 1 u64; length of each sequence i32[]; its byte offset in .bin i64[]; first sequence of each document
i64[], and the number of sequences at the end.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import open_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")  # "<" has no padding: 34 bytes
_CODES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16,
}  # fmt: skip


@dataclass(frozen=True)
class TokenStore:
    """Tokenised documents.

    Attributes:
        name: for messages; identity: changes when the content does, part of cache keys.
        tokens: all documents one after another, an integer type [total]; a memory map when read from a file.
        offsets: int64 [documents + 1], where each document begins in ``tokens``.
    """

    name: str
    identity: str
    tokens: np.ndarray
    offsets: np.ndarray

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])


def token_dtype(vocab_size: int) -> type[np.generic]:
    """The token type that Megatron writes for a vocabulary of this size."""
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedWriter:
    """Writes ``prefix.bin`` and ``prefix.idx``, one sequence per document; a context manager.

    Both appear under their names only when complete: first .bin, then .idx. Safe with concurrent writers of the same
    content.

    Args:
        field: the flag that says where, for refusals.

    Raises:
        UserError: they cannot be written (a disk that is full); then no file is left of them. Also while entered.
    """

    def __init__(self, prefix: str, dtype: type[np.generic], field: str = "--data-cache-path") -> None:
        self._prefix, self._dtype, self._field = prefix, np.dtype(dtype).newbyteorder("<"), field
        self._code = next(code for code, known_dtype in _CODES.items() if known_dtype is dtype)
        self._lengths: list[int] = []
        self._temporary = f"{prefix}.{os.uname().nodename}.{os.getpid()}.{id(self):x}.tmp"
        try:
            self._bin = open(self._temporary + ".bin", "wb")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise cannot_write(error, field, prefix) from None

    def add(self, tokens: np.ndarray) -> None:
        """Append one document."""
        try:
            self._bin.write(np.ascontiguousarray(tokens, dtype=self._dtype).data)
        except OSError as error:
            raise cannot_write(error, self._field, self._prefix) from None
        self._lengths.append(len(tokens))

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            with self._bin:  # closed, although its last bytes may find no place
                self._bin.flush()
            if kind is None:
                Path(self._temporary + ".idx").write_bytes(self._index())
                os.replace(self._temporary + ".bin", self._prefix + ".bin")
                os.replace(self._temporary + ".idx", self._prefix + ".idx")
        except OSError as error:
            if kind is None:
                raise cannot_write(error, self._field, self._prefix) from None
        finally:
            for suffix in (".bin", ".idx"):
                Path(self._temporary + suffix).unlink(missing_ok=True)

    def _index(self) -> bytes:
        lengths = np.array(self._lengths, dtype="<i4")
        ends = np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize
        pointers = np.concatenate([np.zeros(min(1, len(ends)), "<i8"), ends[:-1]]).astype("<i8")
        documents = np.arange(len(lengths) + 1, dtype="<i8")
        header = _HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(documents))
        return header + lengths.tobytes() + pointers.tobytes() + documents.tobytes()


def cannot_write(error: OSError, field: str, path: str | Path) -> UserError:
    """The refusal of a place that takes no more."""
    return UserError(
        f"cannot be written: {error.strerror or error}", field=field, value=str(path),
        accepted="a folder with enough space",
    )  # fmt: skip


def write_indexed(prefix: str, documents: Iterable[np.ndarray], dtype: type[np.generic]) -> None:
    """Write documents as a .bin/.idx pair."""
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(document)


def open_indexed(prefix: str, field: str = "--data-path") -> TokenStore:
    """Memory-map a .bin/.idx pair; UserError if they are malformed or inconsistent."""
    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    try:
        with open_file(index, field) as file:
            raw = file.read()
        with open_file(data, field) as file:
            status = os.fstat(file.fileno())
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", field=field, value=prefix) from None
    size, stamp = status.st_size, status.st_mtime_ns
    dtype, lengths, pointers, documents = _parse_index(raw, str(index), field)
    ends = np.cumsum(lengths, dtype=np.int64)
    if lengths.size and int(lengths.min()) < 0:
        raise _bad(index, field, f"sequence {int(lengths.argmin())} has length {lengths.min()}")
    if not np.array_equal(pointers, np.concatenate([[0], ends[:-1]])[: len(ends)] * dtype.itemsize):
        raise _bad(index, field, "the sequences are not stored one after another: the offsets are damaged")
    total = int(ends[-1]) if ends.size else 0
    if size != total * dtype.itemsize:
        raise UserError(
            f"{data} has {size:,} bytes, but {index} describes {total * dtype.itemsize:,} "
            f"({total:,} tokens of {dtype.itemsize} bytes): they do not belong together or one is incomplete",
            field=field, value=prefix, accepted="the .bin and .idx of one run of hetero-megatron preprocess",
        )  # fmt: skip
    if total == 0:
        raise UserError("the corpus is empty (no tokens)", field=field, value=prefix, accepted="data with tokens")
    offsets = np.concatenate([[0], ends])[documents].astype(np.int64)
    tokens = np.memmap(data, dtype=dtype, mode="r", shape=(total,))
    return TokenStore(prefix, f"{os.path.abspath(data)} {size} {stamp}", tokens, offsets)


def _parse_index(raw: bytes, index: str, field: str) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """(token type, lengths, byte offsets, first sequence of each document and the end)."""
    if raw[: len(MAGIC)] != MAGIC[: len(raw)] or not raw:
        raise _bad(index, field, f"begins with {raw[:9]!r}, not with {MAGIC!r}: not an index of this format")
    if len(raw) < _HEADER.size:
        raise _bad(index, field, f"truncated: {len(raw)} bytes, the header alone has {_HEADER.size}")
    _, version, code, sequences, documents = _HEADER.unpack_from(raw)
    if version != VERSION:
        raise _bad(index, field, f"version {version}, only {VERSION} is known")
    if code not in _CODES:
        raise _bad(index, field, f"token type code {code}, known are {', '.join(map(str, _CODES))}")
    dtype = np.dtype(_CODES[code]).newbyteorder("<")
    if dtype.kind == "f":
        raise _bad(index, field, f"token type {dtype.name} holds no token ids")
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if len(raw) == expected + sequences and sequences:
        raise _bad(index, field, "has a mode per sequence (multimodal data), which this version does not train on")
    if len(raw) != expected:
        problem = "truncated" if len(raw) < expected else "too long"
        raise _bad(index, field, f"{problem}: {len(raw):,} bytes where the header promises {expected:,}")
    lengths = np.frombuffer(raw, "<i4", sequences, _HEADER.size)
    pointers = np.frombuffer(raw, "<i8", sequences, _HEADER.size + 4 * sequences)
    starts = np.frombuffer(raw, "<i8", documents, _HEADER.size + 12 * sequences)
    in_range = documents >= 1 and int(starts.min()) >= 0 and int(starts.max()) <= sequences  # else differences overflow
    if not in_range or starts[0] != 0 or starts[-1] != sequences or np.any(np.diff(starts) < 0):
        raise _bad(index, field, f"the document boundaries do not run from 0 to {sequences}")
    return dtype, lengths, pointers, starts


def _bad(index: str | Path, field: str, problem: str) -> UserError:
    return UserError(
        problem, field=field, value=str(index), accepted="an .idx written by Megatron or hetero-megatron preprocess"
    )
