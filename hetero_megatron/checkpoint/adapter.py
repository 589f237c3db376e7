"""Adapters in PEFT's form: adapter_config.json and adapter_model.safetensors; and their merging into the base."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from hetero_megatron.checkpoint.adapter_config import ACCEPTED, CONFIG, WEIGHTS, adapter_config, gate_and_up_joined
from hetero_megatron.checkpoint.adapter_experts import ExpertSource, expert_source, single_source
from hetero_megatron.checkpoint.export import Export, Owned, make_work, publish_work
from hetero_megatron.checkpoint.export import check_target as check_folder
from hetero_megatron.checkpoint.hf_files import SHARD_BYTES, StoredTensor, lay_out, make_files
from hetero_megatron.checkpoint.names import hf_source, stored_boxes
from hetero_megatron.comm import Group
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.parallel.empty_stage import BaseWeights
from hetero_megatron.parallel.grad_sync.routes import OwnedPiece
from hetero_megatron.spec import LogicalTensor, ModelSpec, logical_tensors, trained_tensors
from hetero_megatron.spec.adapted_model import logical_box
from hetero_megatron.spec.adapter_modules import adapters
from hetero_megatron.spec.families import FAMILIES
from hetero_megatron.spec.hf_names import HFSource
from hetero_megatron.spec.lora import FUSED_TARGETS
from hetero_megatron.utils.files import require_regular
from hetero_megatron.utils.text import plural

SAVE, LOAD = "--save-adapter", "--load-adapter"
_PREFIX = "base_model.model."
_SINGLE = re.compile(r"\.experts\.\d+\.")


def adapter_table(spec: ModelSpec) -> dict[str, HFSource]:
    """Where each adapter tensor is in the adapter_model.safetensors that is written, by the name of ``_stored``.

    Raises:
        UserError: a family whose Hugging Face form has another matrix there (fused or transposed).
    """
    assert spec.lora is not None
    one_of_two = spec.gated and ("gate_proj" in spec.lora.targets) != ("up_proj" in spec.lora.targets)
    if spec.moe is not None and one_of_two and not spec.lora.dora:
        raise UserError(
            "experts have gate_proj and up_proj in one parameter of Hugging Face's form, so that peft knows no adapter "
            "of one of them", field=SAVE, accepted="adapters of both or neither, or --merge-lora and --save-hf",
        )  # fmt: skip
    return {stored.name: _source(spec, stored, SAVE, joined=True) for stored in _stored(spec, spec.lora.dora)}


def _stored(spec: ModelSpec, single: bool) -> Iterator[LogicalTensor]:
    """Tensors as a file has them: with ``single`` those of every expert by itself, as peft has them where experts are
    modules: DoRA it knows of modules alone."""
    for tensor in trained_tensors(spec):
        whole = Box.whole(tensor.shape)
        yield from (stored for stored, _ in stored_boxes(spec, tensor, whole)) if single else (tensor,)


def _source(spec: ModelSpec, tensor: LogicalTensor, field: str, joined: bool) -> HFSource:
    """Where a tensor from ``_stored`` is; ``joined``: see ``expert_source``."""
    if tensor.per_expert:
        return expert_source(spec, tensor, _PREFIX, joined, field)
    module, adapter = tensor.name.split(".lora_")
    adapter = "magnitude_vector" if adapter == "magnitude_vector.weight" else adapter  # peft's name ends there
    if _SINGLE.search(tensor.name):
        return single_source(spec, module, f"lora_{adapter}", _PREFIX, field)
    source, fused = hf_source(spec, f"{module}.weight"), adapters(spec)[module].fused
    if source != HFSource(source.name) and not fused:
        whole = source.name.removesuffix(".weight").rpartition(".")[2]
        named = f"adapters of {whole} (--lora-targets), or " if whole in FUSED_TARGETS else ""
        raise UserError(
            f"Hugging Face's {spec.hf_model_type} has no matrix of its own for {module}", field=field,
            accepted=f"{named}--merge-lora and --save-hf, which need no adapter file",
        )  # fmt: skip
    stored = FAMILIES[spec.hf_model_type].names.in_transformers(source.name).removesuffix("weight")
    name = f"{_PREFIX}{stored}lora_{adapter}"
    # B has the rows that the projection has in the matrix; all of them have one A.
    return replace(source, name=name) if adapter.startswith("B") else HFSource(name)


class AdapterWeights:
    """The tensors of an adapter directory, checked against a model before anything is read.

    Raises:
        UserError: unreadable, or tensors that are missing, unexpected or of other shapes.
    """

    def __init__(self, directory: str, spec: ModelSpec, field: str = LOAD) -> None:
        from safetensors import SafetensorError, safe_open

        assert spec.lora is not None
        self._spec = spec
        path, self._directory, self._field = Path(directory) / WEIGHTS, directory, field
        if not path.exists():
            raise UserError(f"holds no {WEIGHTS}", field=field, value=directory, accepted=ACCEPTED)
        require_regular(path, field)
        try:
            self._file: Any = safe_open(path, "pt")
            stored = list(self._file.keys())
            shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in stored}
        except (SafetensorError, OSError) as error:
            problem = f"is damaged ({' '.join(str(error).split())[:120]})"
            raise UserError(problem, field=field, value=str(path), accepted=ACCEPTED) from None
        # Of modules that transformers calls otherwise than files, a model's own code may have either name.
        names = FAMILIES[spec.hf_model_type].names
        self._stored = {names.in_transformers(name): name for name in stored}
        shapes = {names.in_transformers(name): shape for name, shape in shapes.items()}
        self._sources = self._find(spec, spec.lora.dora or any(_SINGLE.search(name) for name in shapes))
        wanted_shapes = {source.name: shape for source, shape in self._sources.values()}
        problems = [
            f"missing {n}" if n not in shapes else f"{n} is {list(shapes[n])}, not {list(wanted_shapes[n])}"
            for n in wanted_shapes if shapes.get(n) != wanted_shapes[n]
        ]  # fmt: skip
        problems += [f"unexpected {name[:120]}" for name in shapes if name not in wanted_shapes]
        if problems:
            rest_text = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise self._misfit(f"does not fit {spec.name}: {'; '.join(problems[:8])}{rest_text}")
        self._check_joined(spec)

    def _misfit(self, problem: str, accepted: str = "an adapter that was made for this model") -> UserError:
        value = str(Path(self._directory) / WEIGHTS)
        return UserError(problem, field=self._field, value=value, accepted=accepted)

    def _find(self, spec: ModelSpec, single: bool) -> dict[str, tuple[HFSource, tuple[int, ...]]]:
        """By name from ``_stored``: where it is, and the stored tensor's shape."""
        joined = gate_and_up_joined(self._directory, spec)
        parts = [(part, _source(spec, part, self._field, joined)) for part in _stored(spec, single)]
        return {part.name: (source, source.shape(part.shape)) for part, source in parts}

    def _check_joined(self, spec: ModelSpec) -> None:
        """An adapter of gate and up of experts, joined, must be one of each."""
        assert spec.lora is not None
        for source, _ in self._sources.values():
            if isinstance(source, ExpertSource) and source.is_mixed(self._file, spec.lora.rank):
                raise self._misfit(
                    f"{source.name}: ranks of gate_proj count for up_proj, or the other way round",
                    "one adapter of gate_proj and one of up_proj, as --save-adapter writes them",
                )  # fmt: skip

    def read(self, tensor: LogicalTensor, box: Box) -> torch.Tensor:
        if not box.size:
            return torch.empty(box.shape)
        if tensor.name not in self._sources:
            return torch.stack(
                [self.read(expert, stored_box) for expert, stored_box in stored_boxes(self._spec, tensor, box)]
            )
        source, _ = self._sources[tensor.name]
        if isinstance(source, ExpertSource):
            return source.read(self._file, box)
        stored = self._file.get_slice(self._stored[source.name])
        return torch.cat([stored[slices] for _, slices in source.runs(box)])

    def read_masters(self, owned: Iterable[Owned], spec: ModelSpec) -> None:
        """Overwrite master weights, which may be wider than the run's dtype, with what the file says."""
        trained = {t.name: t for t in trained_tensors(spec)}
        for name, box, master in owned:
            master.copy_(self.read(trained[name], box))


def save_adapter(
    directory: str, spec: ModelSpec, owned: Iterable[Owned], dtype: torch.dtype, world: Group, base: str | None
) -> str:
    """Write a directory that ``PeftModel.from_pretrained`` loads. Called on all ranks; see ``save_hf``.

    Args:
        base: the model that the adapters belong to, as the user named it.
    """
    assert spec.lora is not None
    final, table = Path(directory), adapter_table(spec)
    stored = _stored(spec, spec.lora.dora)
    plan = lay_out(stored, table, dict.fromkeys(table, dtype), SHARD_BYTES, "adapter_model")
    export, config = Export(SAVE, final, world, table, plan), adapter_config(spec, base)
    pieces = _pieces(spec, owned, table)
    return export.run(lambda: _create(final, export.work, plan, config), pieces, lambda: _publish(final, plan))


def _pieces(spec: ModelSpec, owned: Iterable[Owned], table: Mapping[str, HFSource]) -> Iterator[Owned]:
    """The same values by the names and boxes of ``_stored``."""
    tensors = {tensor.name: tensor for tensor in trained_tensors(spec)}
    for name, box, values in owned:
        if name in table:
            yield name, box, values
            continue
        for (stored, stored_box), part in zip(stored_boxes(spec, tensors[name], box), values, strict=True):
            yield stored.name, stored_box, part


def check_target(directory: str, spec: ModelSpec) -> None:
    """Refuse before training what ``save_adapter`` would refuse."""
    adapter_table(spec)
    check_folder(Path(directory), SAVE)


def _create(final: Path, work: Path, plan: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> None:
    make_work(final, SAVE)
    (work / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    make_files(work, plan)


def _publish(final: Path, plan: Mapping[str, StoredTensor]) -> str:
    publish_work(final)
    return f"saved an adapter of {plural(sum(t.nbytes for t in plan.values()), 'byte')} to {final}"


def merged(
    spec: ModelSpec, params: BaseWeights, boxes: Mapping[str, Box], owners: Mapping[str, Iterable[Box]],
    gains: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Iterator[Owned]:  # fmt: skip
    """What this rank owns of the base with its adapters merged, W + scale B A, in at least fp32, as peft computes it.

    Args:
        params, boxes: what this rank holds, by logical name, of the base as products have it. An adapter is cut where
            its matrix is, so a rank merges its part alone.
        gains: with DoRA, what rows [..., outputs] of adapted matrices are multiplied with, by logical name.
        owners: of each tensor of the base, the boxes that this rank writes, inside what it holds.
    """
    adapter_of = adapters(spec)
    for name, parts in owners.items():
        weight, module = params[name], name.removesuffix(".weight")
        if (adapter := adapter_of.get(module)) is not None:
            wide_dtype = torch.promote_types(weight.dtype, torch.float32)
            a, b = params[f"{adapter.first}.lora_A.weight"], params[f"{module}.lora_B.weight"]
            weight = weight.to(wide_dtype).add(b.to(wide_dtype) @ a.to(wide_dtype), alpha=adapter.scale)
            weight = weight if name not in gains else weight * gains[name][..., None]
        held_box = boxes[name]
        for box in parts:
            index = tuple(slice(lo - offset, hi - offset) for lo, hi, offset in zip(box.lo, box.hi, held_box.lo))
            yield name, box, weight[index]


def merged_pieces(
    spec: ModelSpec, params: BaseWeights, pieces: Iterable[tuple[OwnedPiece, torch.Tensor]]
) -> Iterator[Owned]:
    """The same of what a rank owns of matrices that its stage divides: pieces, and their values as they are stored."""
    adapter_of, tensors = adapters(spec), {t.name: t for t in logical_tensors(spec)}
    for piece, values in pieces:
        rows, columns = piece.slices[0], piece.slices[-1]
        weight, module = params.part(piece.name, values, rows, columns), piece.name.removesuffix(".weight")
        box = logical_box(tensors[piece.name], piece.box)
        if (adapter := adapter_of.get(module)) is not None:
            a, wide_dtype = params[f"{adapter.first}.lora_A.weight"], torch.promote_types(weight.dtype, torch.float32)
            held_columns = logical_box(tensors[piece.name], Box((rows.start, columns.start), (rows.stop, columns.stop)))
            a = a[:, held_columns.slices()[1]].to(wide_dtype)
            b = params[f"{module}.lora_B.weight"][rows].to(wide_dtype)
            weight = weight.to(wide_dtype).add(b @ a, alpha=adapter.scale)
        yield piece.name, box, weight
