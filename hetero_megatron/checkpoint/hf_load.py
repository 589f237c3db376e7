"""Weights from a Hugging Face directory: every rank reads the slices that it holds, from safetensors or ``.bin``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hetero_megatron.checkpoint.hf_bin import BinFile
from hetero_megatron.checkpoint.names import HFSource, hf_source
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.spec import LogicalTensor, ModelSpec, logical_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BIN_INDEX = "pytorch_model.bin.index.json"
BIN = "pytorch_model.bin"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Buffers that old exports contain and that hold no weights.
_BUFFERS = re.compile(r".*(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")


class HFWeights:
    """The tensors of a Hugging Face directory, checked against a model before anything is read.

    Args:
        directory: holds ``model.safetensors``, or several files and ``model.safetensors.index.json``; where
            there are none, the same with ``pytorch_model.bin``.
        field: where the directory was named, for refusals.

    Raises:
        UserError: no weights, an unreadable file, or tensors that are missing, unexpected or misshapen (all of
            them are listed at once).
    """

    def __init__(self, directory: str, spec: ModelSpec, field: str = "--load-hf") -> None:
        from safetensors import SafetensorError, safe_open

        self.directory, self.spec, self._field = Path(directory), spec, field
        self._open: Any = safe_open
        self._error = SafetensorError
        self._handles: dict[str, Any] = {}
        self._file_of = self._read_index()
        self._shapes = dict(self._all_shapes())
        # GPT-2 on the hub has no "transformer." prefix; what transformers itself writes has it.
        self._prefix = "transformer." if any(n.startswith("transformer.") for n in self._shapes) else ""
        self._check()

    def _read_index(self) -> dict[str, str]:
        """Tensor name -> file name."""
        for index, single in ((INDEX, SINGLE), (BIN_INDEX, BIN)):
            if (self.directory / index).is_file():
                return self._files_of(self.directory / index)
            if (self.directory / single).is_file():
                return dict.fromkeys(self._handle(single).keys(), single)
        raise self._refuse(f"holds none of {SINGLE}, {INDEX}, {BIN} and {BIN_INDEX}", self.directory)

    def _files_of(self, index: Path) -> dict[str, str]:
        with suppress(json.JSONDecodeError, UnicodeDecodeError, KeyError, AttributeError, TypeError):
            found = json.loads(index.read_text())["weight_map"]
            return {str(name): str(file) for name, file in found.items()}
        raise self._refuse("is not an index: a JSON object with a weight_map", index)

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            path = self.directory / file
            try:
                binary = path.suffix == ".bin"
                self._handles[file] = BinFile(path) if binary else self._open(path, framework="pt", device="cpu")
            except (OSError, self._error) as error:
                raise self._refuse(f"cannot be read: {error}", path) from error
        return self._handles[file]

    def _all_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for file in sorted(set(self._file_of.values())):
            handle = self._handle(file)
            for name in handle.keys():  # noqa: SIM118  not a dict
                yield name, tuple(handle.get_slice(name).get_shape())

    def _source(self, name: str) -> HFSource:
        """Where a logical tensor is in these files."""
        source = hf_source(self.spec, name)
        if self.spec.naming == "gpt2" and not self._prefix:
            return HFSource(source.name.removeprefix("transformer."), source.start, source.stop, source.transpose)
        return source

    def _check(self) -> None:
        problems, used = [], set()
        for tensor in logical_tensors(self.spec):
            source = self._source(tensor.name)
            used.add(source.name)
            expected = source.shape(tensor.shape)
            got = self._shapes.get(source.name)
            if got is None:
                problems.append(f"missing {source.name} {list(expected)}")
            elif got != expected:
                problems.append(f"{source.name} is {list(got)}, not {list(expected)}")
        tied = {"lm_head.weight"} if self.spec.tied else set()
        spare = sorted(n for n in self._shapes if n not in used | tied and not _BUFFERS.match(n))
        problems += [f"unexpected {name}" for name in spare]
        if problems:
            shown = "; ".join(dict.fromkeys(problems[:12])) + (
                f"; and {len(problems) - 12} more" if len(problems) > 12 else ""
            )
            raise self._refuse(f"does not fit the model {self.spec.name}: {shown}", self.directory)

    def dtype(self, tensor: LogicalTensor) -> torch.dtype:
        """Of a tensor in the files."""
        source = self._source(tensor.name)
        label = str(self._handle(self._file_of[source.name]).get_slice(source.name).get_dtype())
        if label not in _DTYPES:
            raise self._refuse(f"{source.name} has dtype {label}", self.directory / self._file_of[source.name])
        return _DTYPES[label]

    def read(self, tensor: LogicalTensor, box: Box) -> torch.Tensor:
        """The values of one box, in the file's dtype; only these bytes are read."""
        if math.prod(box.shape) == 0:
            return torch.empty(box.shape)
        source = self._source(tensor.name)
        handle, slices = self._handle(self._file_of[source.name]), source.slices(box)
        values: torch.Tensor
        if tuple(s.stop - s.start for s in slices) == self._shapes[source.name]:
            values = handle.get_tensor(source.name)  # mapped, not copied
        else:
            values = handle.get_slice(source.name)[slices]
        return values.T if source.transpose else values

    def _refuse(self, problem: str, path: Path) -> UserError:
        return UserError(problem, field=self._field, value=str(path), accepted="a directory that save_pretrained wrote")
