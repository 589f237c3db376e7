"""A file of what a model said of data: a JSON header with what it was made from, then arrays by name, each addressed by
its first index and read where it is asked for.

Bytes: ``MAGIC``, the header's length (8, little endian), the header, and at multiples of ``ALIGNED`` the arrays.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import open_file, parse_json

MAGIC, ALIGNED, ASIDE = b"HMSCORE1", 64, ".incomplete"
MOST_HEADER = 1 << 24
DTYPES = ("<i4", "<i8", "<f4", "<f8")
Shapes = Mapping[str, tuple[str, Sequence[int]]]  # by name: dtype, shape


@dataclass(frozen=True)
class ScoresFile:
    """``header``: what its writer gave; ``arrays``: mapped, of a file that is written writable."""

    path: str
    header: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]

    def require(self, field: str, facts: Mapping[str, str], begins: bool = False) -> None:
        """UserError at the first of the facts, by name, that is not what the file was made with, or with ``begins`` how
        that begins."""
        made_for = self.header["made_for"]
        for name, fact in facts.items():
            stored = made_for.get(name)
            if stored != fact and not (begins and isinstance(stored, str) and stored.startswith(fact)):
                raise UserError(
                    f"was made with another {name} ({str(stored)[:60]}, here {fact[:60]})", field=field,
                    value=self.path, accepted="the file of this model, tokenizer and data, or a new name",
                )  # fmt: skip

    def complete(self) -> None:
        """All is written: the file gets its name."""
        for array in self.arrays.values():
            if isinstance(array, np.memmap):
                array.flush()
        os.replace(self.path + ASIDE, self.path)

    def give_up(self) -> None:
        """Nothing is left of a file that is not complete."""
        with suppress(OSError):
            os.unlink(self.path + ASIDE)


def create_scores(path: str, field: str, header: Mapping[str, Any], shapes: Shapes) -> ScoresFile:
    """A new file beside ``path``, with zeros, to be filled and completed.

    Raises:
        UserError: it cannot be written.
    """
    places, end = dict[str, list[Any]](), 0
    for name, (dtype, shape) in shapes.items():
        places[name] = [dtype, list(shape), end]
        end += -(-math.prod(shape) * np.dtype(dtype).itemsize // ALIGNED) * ALIGNED
    text = json.dumps({**header, "arrays": places}).encode()
    start = _start(len(text))
    try:
        with Path(path + ASIDE).open("wb") as file:
            file.write(MAGIC + len(text).to_bytes(8, "little") + text)
            os.posix_fallocate(file.fileno(), 0, start + max(end, 1))  # a full disk is noticed now
        return ScoresFile(path, header, _mapped(path + ASIDE, places, start, "r+"))
    except OSError as error:
        with suppress(OSError):
            os.unlink(path + ASIDE)
        raise UserError(f"cannot be written: {error.strerror}", field=field, value=path, accepted="a file") from None


def open_scores(path: str, field: str, kind: str) -> ScoresFile:
    """UserError: it is none with a header of this ``kind``, or damaged. What arrays hold is the caller's to check."""
    with open_file(path, field) as file:
        begins, length = file.read(8), int.from_bytes(file.read(8), "little")
        text = file.read(length) if begins == MAGIC and length <= MOST_HEADER else b""
    header: Any = None
    with suppress(UserError):
        header = parse_json(text, path) if text else None
    good = isinstance(header, dict) and isinstance(header.get("made_for"), dict) and header.get("kind") == kind
    try:
        arrays = _mapped(path, header["arrays"], _start(length), "r") if good else {}
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        good = False
    if not good:
        raise UserError(f"is no file of {kind}", field=field, value=path, accepted="one, or a new name")
    return ScoresFile(path, header, arrays)


def _start(length: int) -> int:
    """Of the arrays, behind a header of so many bytes."""
    return -(-(16 + length) // ALIGNED) * ALIGNED


def _mapped(path: str, places: Mapping[str, Sequence[Any]], start: int, mode: Any) -> dict[str, np.ndarray]:
    """ValueError: the file is too short, or the places are none."""
    if not isinstance(places, dict):
        raise ValueError(type(places))
    arrays = dict[str, np.ndarray]()
    size = os.path.getsize(path)
    for name, (dtype, shape, at) in places.items():
        if dtype not in DTYPES or not all(type(n) is int and n >= 0 for n in (*shape, at)):
            raise ValueError(name)
        if start + at + math.prod(shape) * np.dtype(dtype).itemsize > size:
            raise ValueError(name)
        there = math.prod(shape) > 0
        arrays[name] = np.memmap(path, dtype, mode, start + at, tuple(shape)) if there else np.zeros(shape, dtype)
    return arrays
