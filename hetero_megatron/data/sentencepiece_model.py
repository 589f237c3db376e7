"""SentencePiece's model files of Llama 2's kind: byte-pair pieces with scores, made a tokenizer without the library.

A file is a protobuf message: pieces (field 1: text, score, type), how they were trained (2) and how text is normalised
(3). The same pieces are merged as in SentencePiece: of two neighbours the piece with the highest score first.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import read_bytes

SPACE = "\u2581"  # what stands for a blank in pieces
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # types of pieces
_BPE = 2
_MOST_PIECES = 1 << 20
_ACCEPTED = "tokenizer.model of a Llama 2 model; of others, the directory with --tokenizer-type HuggingFaceTokenizer"


@dataclass(frozen=True)
class PieceModel:
    """Attributes:
    pieces: (text, score, type) by id.
    prefix: whether a blank is put before a text.
    digest: of the file.
    """

    pieces: tuple[tuple[str, float, int], ...]
    unknown: int
    bos: int
    eos: int
    prefix: bool
    digest: str


def read_model(path: str, field: str) -> PieceModel:
    """UserError: no such file, damaged, or one whose pieces or normalisation are of another kind."""
    data = read_bytes(path, field)
    try:
        fields = list(_fields(data))
        pieces = tuple(_piece(value) for number, value in fields if number == 1)
        trained, normal = (dict(_fields(b"".join(v for n, v in fields if n == number))) for number in (2, 3))
    except (ValueError, struct.error, IndexError, TypeError):
        problem = "is no SentencePiece model, or damaged"
        raise UserError(problem, field=field, value=path, accepted=_ACCEPTED) from None
    kinds = {kind for _, _, kind in pieces}
    reasons = {
        "holds no pieces": not 0 < len(pieces) <= _MOST_PIECES,
        "has pieces of another kind than byte pairs": trained.get(3, 1) != _BPE,
        "normalises text by a table": bool(normal.get(2)),
        "drops blanks": normal.get(4, 1) != 0 or normal.get(5, 1) != 1,
        "has pieces that users defined, or unused ones": not kinds <= {_NORMAL, _UNKNOWN, _CONTROL, _BYTE},
        "has a piece twice": len({text for text, _, _ in pieces}) < len(pieces),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UserError(f"{reason}, which is not read here", field=field, value=path, accepted=_ACCEPTED)
    unknown, bos, eos = (int(trained.get(number, default)) for number, default in ((40, 0), (41, 1), (42, 2)))
    if not all(0 <= i < len(pieces) for i in (unknown, bos, eos)):
        problem = "has no beginning or end of a sequence"
        raise UserError(problem, field=field, value=path, accepted=_ACCEPTED)
    prefix = normal.get(3, 1) == 1
    return PieceModel(pieces, unknown, bos, eos, prefix, hashlib.sha256(data).hexdigest())


def byte_pairs(model: PieceModel) -> Any:
    """A ``tokenizers.Tokenizer`` with the model's ids; it adds no special tokens, and reads none in text."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {text: i for i, (text, _, _) in enumerate(model.pieces)}
    bytes_too = any(kind == _BYTE for _, _, kind in model.pieces)
    inner = Tokenizer(
        models.BPE(
            vocabulary, merges(model), unk_token=model.pieces[model.unknown][0], fuse_unk=True, byte_fallback=bytes_too
        )
    )
    replace = [normalizers.Replace(" ", SPACE)]
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *replace] if model.prefix else replace)
    strip = [decoders.Strip(" ", 1, 0)] if model.prefix else []
    inner.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return inner


def merges(model: PieceModel) -> list[tuple[str, str]]:
    """Every way to put a piece together from two, by the piece's score, then by the ids of its parts."""
    ids = {text: i for i, (text, _, kind) in enumerate(model.pieces) if kind == _NORMAL}
    scored_pairs = []
    for text, i in ids.items():
        parts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        score = model.pieces[i][1]
        scored_pairs += [(-score, i, ids[a], ids[b], (a, b)) for a, b in parts if a in ids and b in ids]
    return [pair for *_, pair in sorted(scored_pairs)]


def _piece(data: Any) -> tuple[str, float, int]:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", fields[2]) if 2 in fields else (0.0,)
    return bytes(fields[1]).decode("utf-8"), score, int(fields.get(3, _NORMAL))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a message: integers, and bytes of everything else. ValueError, IndexError."""
    offset = 0
    while offset < len(data):
        key, offset = _varint(data, offset)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, offset = _varint(data, offset)
            yield number, value
            continue
        size, offset = _varint(data, offset) if wire == 2 else ({1: 8, 5: 4}.get(wire, -1), offset)
        if size < 0 or offset + size > len(data):
            raise ValueError("no protobuf message")
        yield number, data[offset : offset + size]
        offset += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, position after it)."""
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("an integer without an end")
