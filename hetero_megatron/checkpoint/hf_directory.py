"""Which files of a Hugging Face directory hold its weights, and where each tensor is; the same choice as transformers.

``from_pretrained`` takes the first of ``model.safetensors``, ``model.safetensors.index.json``, ``pytorch_model.bin``
and ``pytorch_model.bin.index.json``. It only uses the file names of an index: a tensor is read from the last of these
files that contains it, whatever the index says. Other forms, selected by a key of ``config.json`` or further files
(adapters, shards of a distributed save), are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hetero_megatron.checkpoint.hf_bin import BinFile
from hetero_megatron.checkpoint.hf_files import DTYPES
from hetero_megatron.errors import UserError, printable
from hetero_megatron.spec.mistaken import WRITTEN
from hetero_megatron.utils.files import (
    MAX_TEXT_BYTES,
    POINTER,
    is_pointer,
    member,
    open_file,
    parse_json,
    read_json_object,
    require_regular,
)
from hetero_megatron.utils.text import listed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BIN = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
FORMS = (SINGLE, INDEX, BIN, BIN_INDEX)
_SHARD = re.compile(r"(model|pytorch_model)[-.].*\.(safetensors|bin)")  # a shard or a variant; told if it is not read
_NUMBERED = re.compile(r"(model|pytorch_model)-\d{5}-of-\d{5}\.(safetensors|bin)")
_OTHERS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".onnx", ".h5", ".msgpack")
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


class WeightFiles:
    """The open weight files of a directory, and their tensors.

    Attributes:
        files_of: tensor name -> names of the files that hold it; the last one counts.
        indexed: the index, tensor name -> file name; empty for a single file.
        form: the chosen file, one of ``FORMS``.
        notices: what the user should know about the choice.

    Raises:
        UserError: no weights, weights in an unsupported form, or an unreadable file.
    """

    def __init__(self, directory: Path, field: str) -> None:
        self.directory, self._field = directory, field
        self._handles: dict[str, Any] = {}
        self._put: dict[str, Any] = {}  # slice objects in the place of stored tensors
        self._stored: dict[str, str] = {}  # the name in the files, where it is another one
        self.notices: list[str] = []
        names = self._names()
        self.form = self._choose(names)
        self.indexed = self._read_index() if self.form in (INDEX, BIN_INDEX) else {}
        self.files = sorted(set(self.indexed.values())) or [self.form]
        self.files_of: dict[str, list[str]] = {}
        for file in self.files:
            for name in self.handle(file).keys():  # noqa: SIM118  not a dict
                self.files_of.setdefault(name, []).append(file)
        self._note_unread_files(names)
        self._note_index_errors()

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.directory))
        except OSError as error:
            raise self.refuse(f"cannot be read: {error.strerror}", self.directory) from error

    def _choose(self, names: list[str]) -> str:
        foreign = next((n for n in names if n == "adapter_config.json" or _DISTRIBUTED.fullmatch(n)), None)
        form = next((f for f in FORMS if f in names), None)
        if foreign is not None:
            kind = "an adapter" if foreign == "adapter_config.json" else "shards of a distributed save"
            beside_form = f" beside {form}" if form else ""
            accepted = "the model without it, and the adapter as --load-adapter" if kind == "an adapter" else WRITTEN
            raise self.refuse(f"holds {kind} ({foreign}){beside_form}, which is not read", self.directory, accepted)
        if form is None:
            other_formats = [n for n in names if n.endswith(_OTHERS)]
            contents = f" (it holds {listed(map(shown, other_formats))})" if other_formats else ""
            problem = f"holds none of {SINGLE}, {INDEX}, {BIN} and {BIN_INDEX}{contents}"
            raise self.refuse(problem, self.directory, WRITTEN + _remedy(other_formats))
        return form

    def _read_index(self) -> dict[str, str]:
        path = member(self.directory, self.form, field=self._field)
        weight_map = read_json_object(path, self._field).get("weight_map")
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(file, str) for file in weight_map.values())
        ):
            raise self.refuse("is not an index: a JSON object with a weight_map of tensors' files", path)
        return weight_map

    def handle(self, file: str) -> Any:
        """An open safetensors file, or a ``BinFile``."""
        if file not in self._handles:
            index = self.directory / self.form if self.indexed else None
            path = member(self.directory, file, where=str(index or ""), field=self._field)
            try:
                require_regular(path)
                if is_pointer(path):
                    raise UserError(POINTER)
                self._handles[file] = _open_safetensors(path) if path.suffix == ".safetensors" else BinFile(path)
            except UserError as error:
                index_text = f", which {self.form} names" if index else ""
                problem = error.problem.removeprefix("cannot read the file: ")
                accepted = f"{WRITTEN}; {error.accepted}" if error.accepted else WRITTEN
                raise self.refuse(f"cannot be read{index_text}: {problem}", path, accepted) from error
        return self._handles[file]

    def _note_unread_files(self, names: list[str]) -> None:
        files_read = {self.form, *self.files}
        unread = [n for n in names if n not in files_read and (n in FORMS or _SHARD.fullmatch(n))]
        if unread:
            self.notices.append(f"{self.directory / self.form} is read, and not {listed(map(shown, unread))}")

    def _note_index_errors(self) -> None:
        misplaced = [n for n, file in self.indexed.items() if n in self.files_of and file not in self.files_of[n]]
        omitted = [n for n in self.files_of if self.indexed and n not in self.indexed]
        for problem, tensors in (("names other files for", misplaced), ("does not name", omitted)):
            if tensors:
                source = f"they are read from {listed(self.files_of[n][-1] for n in tensors)}"
                self.notices.append(f"{self.directory / self.form} {problem} {listed(map(shown, tensors))}: {source}")

    def rename(self, names: Mapping[str, str]) -> None:
        """From here on call the tensors otherwise: name in the files -> new name, all of them different."""
        self._stored = {new: stored for stored, new in names.items() if new != stored}
        self.files_of = {names[name]: files for name, files in self.files_of.items()}
        self.indexed = {names.get(name, name): file for name, file in self.indexed.items()}

    def put(self, name: str, tensor_slice: Any, parts: tuple[str, ...]) -> None:
        """From here on ``tensor_slice``, a slice object as of safetensors, is tensor ``name`` instead of ``parts``."""
        files = self.files_of[parts[0]][-1:]
        for part in parts:
            del self.files_of[part]
        self.files_of[name], self._put[name] = files, tensor_slice

    def replacement(self, name: str) -> Any:
        """What was :meth:`put` in a tensor's place; None: it is as stored."""
        return self._put.get(name)

    def tensor(self, name: str, file: str | None = None) -> Any:
        """A slice object of safetensors or a ``BinSlice``: shape, dtype, and any part of the values; from the last file
        that holds it, or from ``file``."""
        if name in self._put:
            return self._put[name]
        return self.handle(file or self.files_of[name][-1]).get_slice(self._stored.get(name, name))

    def whole(self, name: str) -> torch.Tensor:
        """All values of a tensor, memory-mapped where they are as stored."""
        if name in self._put:
            return self._put[name][:]  # type: ignore[no-any-return]
        values: torch.Tensor = self.handle(self.files_of[name][-1]).get_tensor(self._stored.get(name, name))
        return values

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, by name."""
        return {name: tuple(self.tensor(name).get_shape()) for name in self.files_of}

    def refuse(self, problem: str, path: Path, accepted: str = WRITTEN) -> UserError:
        return UserError(problem, field=self._field, value=str(path), accepted=accepted)


def _remedy(others: list[str]) -> str:
    """What can be done with other files of weights than those that are read."""
    if any(n.endswith(".gguf") for n in others):
        return "; of GGUF, transformers' from_pretrained(DIR, gguf_file=FILE) and save_pretrained make one"
    if any(_NUMBERED.fullmatch(n) for n in others):
        return f": shards are read with their {INDEX} (or {BIN_INDEX})"
    if len(others) == 1 and others[0].endswith(".safetensors"):
        return f": a single file of all weights is called {SINGLE}"
    return ""


def _open_safetensors(path: Path) -> Any:
    """Open a safetensors file; its errors are translated.

    Raises:
        UserError: not a safetensors file, or truncated.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise UserError(_damage(path)) from error


def _damage(path: Path) -> str:
    """What is wrong with a file that safetensors rejected."""
    size = path.stat().st_size
    with open_file(path) as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > size - 8:
            return "not a safetensors file, or not a whole one (it ends inside its header)"
        with suppress(ValueError, TypeError, KeyError, IndexError, AttributeError):  # no header that we can read
            header = parse_json(file.read(min(length, MAX_TEXT_BYTES)), str(path))
            end = 8 + length + max(e["data_offsets"][1] for name, e in header.items() if name != "__metadata__")
            if end > size:
                return f"not a whole safetensors file ({size:,} of {end:,} bytes)"
    return "not a safetensors file (its header is damaged)"


def shown(name: str) -> str:
    """A name from a file for a message: without control characters, shortened."""
    text = printable(name)
    return text if len(text) <= 120 else text[:117] + "..."


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
