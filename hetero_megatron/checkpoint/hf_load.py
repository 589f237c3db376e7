"""Weights from a Hugging Face directory: every rank reads the slices that it holds, from safetensors or ``.bin``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hetero_megatron.checkpoint.hf_directory import WeightFiles, shown
from hetero_megatron.checkpoint.hf_files import DTYPES
from hetero_megatron.checkpoint.hf_quantised import dequantise
from hetero_megatron.checkpoint.names import (
    Names,
    hf_source,
    plain_names,
    repeated_tensors,
    stored_boxes,
    stored_tensors,
    unmerged,
)
from hetero_megatron.checkpoint.typed import is_finite
from hetero_megatron.layout import Box
from hetero_megatron.spec import LogicalTensor, ModelSpec, logical_tensors
from hetero_megatron.spec.adapter_choice import Adapter
from hetero_megatron.spec.adapter_modules import adapters
from hetero_megatron.spec.families import FAMILIES
from hetero_megatron.spec.families.family import Wrapper
from hetero_megatron.spec.hf_names import HFSource

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"  # logical names
_DTYPE_OF = {label: dtype for dtype, (label, _) in DTYPES.items()}
# Buffers that old exports contain and that hold no weights.
_BUFFERS = re.compile(r".*\.(rotary_emb\.inv_freq|(attn|attention)\.(bias|masked_bias))")
# Of weights in fewer bits: their tensors beside, or instead of, the weight (GPTQ, AWQ, bitsandbytes, fp8, MXFP4).
_QUANTISED = re.compile(
    r".*[._](qweight|qzeros|g_idx|scales|absmax|quant_map|SCB|weight_packed|weight_scale|weight_scale_inv|blocks)"
)
_NARROW = ("F4", "F6", "F8", "I8", "I32", "U8", "float8", "int8", "int32", "uint8")  # begin their dtypes' names
_SHOWN = 12  # problems of one directory in its refusal
_COMPARED = 1 << 20  # elements at a time


class HFWeights:
    """The tensors of a Hugging Face directory, checked against a model before anything is read.

    Args:
        directory: the weights that ``AutoModelForCausalLM.from_pretrained`` would read, see ``WeightFiles``.
        field: the flag that named the directory, for errors.

    Attributes:
        notices: what the user should know about the files.
        nonfinite: tensors with NaN or Inf among the values read so far.

    Raises:
        UserError: no weights, an unreadable file, tensors that are missing, unexpected, of wrong shape or not floating
            point (all are listed), or duplicates with different values.
    """

    def __init__(self, directory: str, spec: ModelSpec, field: str = "--load-hf") -> None:
        self.directory, self.spec = Path(directory), spec
        self._files = WeightFiles(self.directory, field)
        self.notices = self._files.notices
        self.nonfinite: dict[str, None] = {}
        outer = FAMILIES[spec.hf_model_type].inside
        self._renamed = self._unwrap(outer)
        dequantise(self._files)
        self._shapes = self._files.shapes()
        # What the names have before them, and those beside, in the files of a model of more than language.
        self._prefix, self._apart = "", tuple[str, ...]()
        if outer is not None and (outer.plain or any(n.startswith(outer.prefix) for n in self._shapes)):
            self._prefix, self._apart = "" if outer.plain else outer.prefix, outer.apart
        if outside := sum(n.startswith(self._apart) for n in self._shapes):
            self.notices.append(f"{directory}: {outside} tensors of other parts than the language model are not read")
        self._apart += self._predictions()
        self._sources = {t.name: self._source(t.name) for t, _ in stored_tensors(spec)}
        self._check()
        self._check_copies()

    def _predictions(self) -> tuple[str, ...]:
        """How the tensors of layers after the last one begin that predict further tokens (DeepSeek-V3, GLM-4.5,
        Qwen3-Next), and that the model has not."""
        layer = self._prefix + FAMILIES[self.spec.hf_model_type].names.layer.format(r"(\d+)").replace(".", r"\.")
        matches = [re.fullmatch(rf"({layer}\.)eh_proj\.weight", name) for name in self._shapes]
        first_layer = self.spec.predictions.stop
        starts = tuple(match[1] for match in matches if match is not None and int(match[2]) >= first_layer)
        unread = FAMILIES[self.spec.hf_model_type].unread
        starts += tuple(start for start in unread if any(name.startswith(start) for name in self._shapes))
        if starts:
            tensors, layers = sum(n.startswith(starts) for n in self._shapes), ", ".join(sorted(starts))
            unread_text = f"{tensors} tensors of layers that predict further tokens ({layers}) are not read"
            self.notices.append(f"{self.directory}: {unread_text}")
        return starts

    def _unwrap(self, outer: Wrapper | None) -> Names:
        """Take wrappers off the tensors' names."""
        layer, head = FAMILIES[self.spec.hf_model_type].names.layer, hf_source(self.spec, HEAD).name
        names = plain_names(self._files.files_of, layer, head, outer)
        if names.adapters:
            accepted = "what merge_and_unload() and save_pretrained write, or the base with --load-adapter"
            raise self._files.refuse(unmerged(names), self.directory, accepted)
        if names.clash:
            first, second = map(shown, names.clash)
            raise self._files.refuse(f"holds {first} and {second}, which are one tensor", self.directory)
        self._files.rename(names.plain)
        if names.changed:
            self.notices.append(f"{self.directory}: names of tensors are read {names.changed}")
        return names

    def _source(self, name: str) -> HFSource:
        """Where a logical tensor is in these files."""
        source, table = hf_source(self.spec, name), FAMILIES[self.spec.hf_model_type].names
        if table.stacked is not None and source.name not in self._shapes:
            stacked = replace(table, experts=table.stacked).source(self.spec, name)
            source = stacked if stacked.name in self._shapes else source
        for part, other in table.otherwise.items():
            if source.name not in self._shapes and (other_name := source.name.replace(part, other)) in self._shapes:
                source = replace(source, name=other_name)
        source = replace(source, name=self._prefix + source.name)
        if name == HEAD and source.name not in self._shapes and self._prefix + HEAD in self._shapes:
            source = replace(source, name=self._prefix + HEAD)  # as transformers calls it in memory
        if self.spec.tied and name == EMBEDDING and source.name not in self._shapes and self._head in self._shapes:
            return HFSource(self._head)  # of a tied pair, either may be in the files
        return source

    @property
    def _head(self) -> str:
        return self._prefix + hf_source(self.spec, HEAD).name

    def _check(self) -> None:
        problems, source_names = [], set()
        for tensor, _ in stored_tensors(self.spec):
            source = self._sources[tensor.name]
            source_names.add(source.name)
            expected, stored_shape = source.shape(tensor.shape), self._shapes.get(source.name)
            if stored_shape is None:
                problems.append(f"missing {source.name} {list(expected)}{self._why_missing(source.name)}")
            elif stored_shape != expected:
                problems.append(f"{source.name} is {list(stored_shape)}, not {list(expected)}")
            elif (label := self._label(source.name)) not in _DTYPE_OF:
                problems.append(f"{source.name} has dtype {label}, not one of {', '.join(_DTYPE_OF)}")
        read_names = source_names | ({self._head} if self.spec.tied else set()) | self._repeated().keys()
        known_names = (n for n in self._shapes if n in read_names or _BUFFERS.fullmatch(n) or n.startswith(self._apart))
        spare_names = sorted(self._shapes.keys() - set(known_names))
        if problems or spare_names:
            problems, unexpected = list(dict.fromkeys(problems)), [f"unexpected {shown(name)}" for name in spare_names]
            limit = max(_SHOWN - 4, _SHOWN - len(unexpected))  # some of both: a tensor may be there under another name
            faults = [*_first(problems, limit), *_first(unexpected, _SHOWN - min(limit, len(problems)))]
            renaming = f" (names are read {self._renamed.changed})" if self._renamed.changed else ""
            misfit = f"does not fit the model {self.spec.name}{renaming}: {'; '.join(faults)}"
            narrow_dtypes = (self._label(n).startswith(_NARROW) for n in source_names & self._shapes.keys())
            if any(map(_QUANTISED.fullmatch, spare_names)) or any(narrow_dtypes):
                misfit += "; the weights are quantised, and nothing is trained in such a format"
                raise self._files.refuse(misfit, self.directory, "the model's directory from before the quantisation")
            raise self._files.refuse(misfit, self.directory)

    def _why_missing(self, name: str) -> str:
        if name in self._files.indexed:
            return f" ({self._files.form} says it is in {shown(self._files.indexed[name])})"
        if name != self._head:
            return ""
        base = "; the files hold a base model without a head" if self._renamed.added else ""
        return f" (config.json says that it is not tied to the embedding{base})"

    def _repeated(self) -> dict[str, str]:
        """What layers that predict further tokens repeat in the files, where they do -> what it is a copy of."""
        copies = repeated_tensors(self.spec)
        return {
            name: self._sources[copied].name
            for copy, copied in copies.items()
            if (name := self._prefix + copy) in self._shapes
        }

    def _check_copies(self) -> None:
        """Tensors that occur several times must be equal."""
        for name, copied in self._repeated().items():
            if not _equal(self._files.tensor(name), self._files.tensor(copied)):
                problem = (
                    f"holds {name} with other values than {copied}, and layers that predict further tokens share it"
                )
                raise self._files.refuse(problem, self.directory, "equal values, or --mtp-num-layers 0")
        for name in dict.fromkeys(source.name for source in self._sources.values()):
            files = self._files.files_of[name]
            for file in files[:-1]:
                if not _equal(self._files.tensor(name, file), self._files.tensor(name)):
                    problem = f"holds two different tensors {name}, in {shown(file)} and in {shown(files[-1])}"
                    raise self._files.refuse(problem, self.directory)
        embedding = self._sources[EMBEDDING].name
        head = self._head
        twice = self.spec.tied and head in self._shapes and embedding != head
        if twice and not _equal(self._files.tensor(embedding), self._files.tensor(head)):
            problem = f"holds {head} beside {embedding} with other values, and config.json says that they are tied"
            raise self._files.refuse(f'{problem} (untied: "tie_word_embeddings": false)', self.directory)

    def _label(self, name: str) -> str:
        return str(self._files.tensor(name).get_dtype())

    def name(self, tensor: LogicalTensor) -> str:
        """The Hugging Face tensor that holds it; of several, the first one."""
        stored, _ = next(stored_boxes(self.spec, tensor, Box.whole(tensor.shape)))
        return self._sources[stored.name].name

    def dtype(self, tensor: LogicalTensor) -> torch.dtype:
        """Of a tensor in the files."""
        return _DTYPE_OF[self._label(self.name(tensor))]

    def dtypes(self) -> dict[str, torch.dtype]:
        """Of all tensors, by logical name."""
        return {tensor.name: self.dtype(tensor) for tensor in logical_tensors(self.spec)}

    def read(self, tensor: LogicalTensor, box: Box) -> torch.Tensor:
        """The values of one box in the file's dtype; only these bytes are read. What is dequantised to be stored in 4
        bits again is in fp32."""
        if math.prod(box.shape) == 0:
            return torch.empty(box.shape)
        if tensor.name not in self._sources:
            pieces = [self.read(stored, part_box) for stored, part_box in stored_boxes(self.spec, tensor, box)]
            return torch.stack(pieces) if tensor.per_expert else torch.cat(pieces)
        source = self._sources[tensor.name]
        if (dequantised := self._files.replacement(source.name)) is not None:
            dequantised.rounded = not tensor.nf4
        runs = [self._part(source, slices) for _, slices in source.runs(box)]
        values = runs[0] if len(runs) == 1 else torch.cat(runs)
        if not is_finite(values):
            self.nonfinite[source.name] = None
        return values.T if source.transpose else values

    def _part(self, source: HFSource, slices: tuple[slice, ...]) -> torch.Tensor:
        """What ``slices`` are of a stored tensor."""
        values: torch.Tensor
        if source.width or source.filters or any(source.within):
            stored = self._files.whole(source.name)
            return stored.view(source.view(tuple(stored.shape)))[slices]
        if source.step == 1 and tuple(s.stop - s.start for s in slices) == self._shapes[source.name]:
            values = self._files.whole(source.name)  # mapped, not copied
        else:  # safetensors takes no steps
            values = self._files.tensor(source.name)[tuple(slice(s.start, s.stop) for s in slices)]
            values = values[tuple(slice(None, None, s.step) for s in slices)]
        return values if source.expert is None else values[0]

    def read_masters(self, owned: Iterable[tuple[str, Box, torch.Tensor]], dtype: torch.dtype) -> None:
        """Overwrite master weights whose values would have been rounded to the run's ``dtype``.

        Args:
            owned: (logical name, box, master values), as from ``ShardedOptimizer.owned``.
        """
        tensor_of = {t.name: t for t in logical_tensors(self.spec)}
        for name, box, master in owned:
            rounded = torch.promote_types(self.dtype(tensor_of[name]), dtype) != dtype
            if rounded and master.dtype != dtype:
                master.copy_(self.read(tensor_of[name], box))


def _first(problems: list[str], most: int) -> list[str]:
    return problems[:most] + ([f"and {len(problems) - most} more"] if len(problems) > most else [])


def _equal(a: Any, b: Any) -> bool:
    """Whether two tensors in files have the same shape and numbers, whatever their dtypes."""
    shape: list[int] = a.get_shape()
    if shape != b.get_shape() or not {a.get_dtype(), b.get_dtype()} <= _DTYPE_OF.keys():
        return False
    step = max(1, _COMPARED * shape[0] // max(math.prod(shape), 1))
    blocks = ((slice(start, start + step),) for start in range(0, shape[0], step))
    return all(torch.equal(a[rows].double(), b[rows].double()) for rows in blocks)


def base_weights(directory: str, spec: ModelSpec) -> HFWeights:
    """--load-hf, as the base of the adapters that ``spec`` has, if any. UserError as of :class:`HFWeights`."""
    if spec.lora is None or spec.lora.residual is None:
        return HFWeights(directory, spec.base)
    return ResidualBase(directory, spec)


class ResidualBase(HFWeights):
    """The base of PiSSA and OLoRA adapters: what is left of a matrix once the adapters' first values are taken out.

    PEFT stores A and B alone, and computes the first ones anew whenever it loads them: W + scale (B A - B0 A0). Both
    decompositions are of whole matrices, so each rank that has a part of one reads and decomposes all of it.
    """

    def __init__(self, directory: str, spec: ModelSpec) -> None:
        super().__init__(directory, spec.base)
        assert spec.lora is not None
        self._kind = spec.lora.residual
        self._adapted = {f"{module}.weight": adapter for module, adapter in adapters(spec).items()}
        self._last: tuple[str, torch.Tensor] = ("", torch.empty(0))  # a rank may read a matrix in several boxes

    def read(self, tensor: LogicalTensor, box: Box) -> torch.Tensor:
        if tensor.name not in self._adapted or not box.size:
            return super().read(tensor, box)
        if self._last[0] != tensor.name:
            base_weight = super().read(tensor, Box.whole(tensor.shape))
            self._last = tensor.name, residual(base_weight, self._kind, self._adapted[tensor.name])
        return self._last[1][box.slices()]


def residual(weight: torch.Tensor, kind: str | None, adapter: Adapter) -> torch.Tensor:
    """W [outputs, inputs] of a module without the first parts of its decomposition, as many as its adapter has ranks,
    in at least fp32. The adapters' scale cancels in PiSSA, and counts in OLoRA."""
    wide_weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if not wide_weight.isfinite().all():  # neither decomposition exists: whoever reads the weights says so
        return weight
    rank = adapter.rank
    if kind == "pissa":
        u, s, vh = torch.linalg.svd(wide_weight, full_matrices=False)
        return wide_weight - (u[:, :rank] * s[:rank]) @ vh[:rank]
    q, r = torch.linalg.qr(wide_weight)
    return torch.sub(wide_weight, q[:, :rank] @ r[:rank], alpha=adapter.scale)
