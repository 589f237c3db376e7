"""Adapters in PEFT's form: adapter_config.json and adapter_model.safetensors; and their merging into the base."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hetero_megatron.checkpoint.export import Export, Owned
from hetero_megatron.checkpoint.export_folder import check_work, make_work, publish_work
from hetero_megatron.checkpoint.hf_files import SHARD_BYTES, StoredTensor, lay_out, make_files
from hetero_megatron.checkpoint.names import hf_source
from hetero_megatron.comm import Group
from hetero_megatron.errors import UserError
from hetero_megatron.files import read_json_object, require_regular
from hetero_megatron.layout import Box
from hetero_megatron.spec import LogicalTensor, Lora, ModelSpec, trained_tensors
from hetero_megatron.spec.hf_names import HFSource
from hetero_megatron.spec.lora import EVERY_TARGET, TARGETS
from hetero_megatron.words import plural

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SAVE, LOAD = "--save-adapter", "--load-adapter"
_PREFIX = "base_model.model."
_ACCEPTED = f"a directory with {CONFIG} and {WEIGHTS}, as peft writes it for LoRA"
# Keys of PEFT that would change numbers, and the values with which they do not.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "use_dora": (False, None), "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []), "layers_to_transform": (None, []), "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}), "exclude_modules": (None, []), "target_parameters": (None, []),
    "lora_bias": (False, None), "use_qalora": (False, None), "layer_replication": (None, []),
    "trainable_token_indices": (None, {}), "alora_invocation_tokens": (None, []),
}  # fmt: skip


def adapter_table(spec: ModelSpec) -> dict[str, HFSource]:
    """Where each adapter tensor is in adapter_model.safetensors.

    Raises:
        UserError: a family whose Hugging Face form has another matrix there (fused, transposed, or by another name).
    """
    table = {}
    for tensor in trained_tensors(spec):
        module, adapter = tensor.name.split(".lora_")
        source = hf_source(spec, f"{module}.weight")
        if source != HFSource(source.name) or source.name.split(".")[-2] != module.rpartition(".")[2]:
            raise UserError(
                f"Hugging Face's {spec.hf_model_type} has no matrix of its own for {module}", field=SAVE,
                accepted="--merge-lora and --save-hf, which need no adapter file",
            )  # fmt: skip
        table[tensor.name] = HFSource(f"{_PREFIX}{source.name.removesuffix('weight')}lora_{adapter}")
    return table


def adapter_config(lora: Lora, base: str | None) -> dict[str, Any]:
    """adapter_config.json; ``base``: name or directory of the model that it belongs to."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0, "use_rslora": lora.rslora,
        "target_modules": list(lora.targets), "bias": "none", "fan_in_fan_out": False, "use_dora": False,
        "init_lora_weights": True, "modules_to_save": None,
    }  # fmt: skip


def read_config(directory: str, field: str = LOAD) -> Lora:
    """The adapters that a directory holds. UserError: not LoRA, or of a kind that is not supported."""
    path = Path(directory)
    if not (path / CONFIG).exists():
        raise UserError(f"holds no {CONFIG}", field=field, value=directory, accepted=_ACCEPTED)
    found = read_json_object(path / CONFIG, field)
    for key, plain in _PLAIN.items():
        if key in found and found[key] not in plain:
            raise UserError(
                "adapters of this kind are not supported", field=key, value=found[key], where=str(path / CONFIG),
                accepted=", ".join(json.dumps(value) for value in plain),
            )  # fmt: skip
    targets = found.get("target_modules")
    if targets == "all-linear":
        targets = list(TARGETS)
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        accepted = f"a list of {', '.join(EVERY_TARGET)}"
        where = str(path / CONFIG)
        raise UserError("is no list of names", field="target_modules", value=targets, accepted=accepted, where=where)
    rank, alpha, scaled = found.get("r"), found.get("lora_alpha"), found.get("use_rslora", False)
    if type(rank) is not int or not isinstance(alpha, int | float) or not isinstance(scaled, bool):
        raise UserError("has no r, lora_alpha or use_rslora", field=field, value=str(path / CONFIG), accepted=_ACCEPTED)
    try:
        return Lora(rank, float(alpha), tuple(name.rpartition(".")[2] for name in targets), scaled)
    except UserError as error:
        name = {"rank": "r", "alpha": "lora_alpha", "targets": "target_modules"}[error.field]
        where = str(path / CONFIG)
        raise UserError(error.problem, field=name, value=error.value, accepted=error.accepted, where=where) from None


class AdapterWeights:
    """The tensors of an adapter directory, checked against a model before anything is read.

    Raises:
        UserError: unreadable, or tensors that are missing, unexpected or of other shapes.
    """

    def __init__(self, directory: str, spec: ModelSpec, field: str = LOAD) -> None:
        from safetensors import SafetensorError, safe_open

        self._table = adapter_table(spec)
        path = Path(directory) / WEIGHTS
        if not path.exists():
            raise UserError(f"holds no {WEIGHTS}", field=field, value=directory, accepted=_ACCEPTED)
        require_regular(path, field)
        try:
            self._file: Any = safe_open(path, "pt")
            shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            problem = f"is damaged ({' '.join(str(error).split())[:120]})"
            raise UserError(problem, field=field, value=str(path), accepted=_ACCEPTED) from None
        wanted = {self._table[t.name].name: t.shape for t in trained_tensors(spec)}
        wrong = [
            f"missing {n}" if n not in shapes else f"{n} is {list(shapes[n])}, not {list(wanted[n])}"
            for n in wanted if shapes.get(n) != wanted[n]
        ]  # fmt: skip
        wrong += [f"unexpected {name[:120]}" for name in shapes if name not in wanted]
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise UserError(
                f"does not fit {spec.name}: {'; '.join(wrong[:8])}{more}", field=field, value=str(path),
                accepted="an adapter that was made for this model",
            )  # fmt: skip

    def read(self, tensor: LogicalTensor, box: Box) -> torch.Tensor:
        values: torch.Tensor = self._file.get_slice(self._table[tensor.name].name)[box.slices()]
        return values

    def read_masters(self, owned: Iterable[Owned], spec: ModelSpec) -> None:
        """Overwrite master weights, which may be wider than the run's dtype, with what the file says."""
        known = {t.name: t for t in trained_tensors(spec)}
        for name, box, master in owned:
            master.copy_(self.read(known[name], box))


def save_adapter(
    directory: str, spec: ModelSpec, owned: Iterable[Owned], dtype: torch.dtype, world: Group, base: str | None
) -> str:
    """Write a directory that ``PeftModel.from_pretrained`` loads. Called on all ranks; see ``save_hf``.

    Args:
        base: the model that the adapters belong to, as the user named it.
    """
    assert spec.lora is not None
    final, table = Path(directory), adapter_table(spec)
    plan = lay_out(trained_tensors(spec), table, dict.fromkeys(table, dtype), SHARD_BYTES, "adapter_model")
    export, config = Export(SAVE, final, world, table, plan), adapter_config(spec.lora, base)
    return export.run(lambda: _create(final, export.work, plan, config), owned, lambda: _publish(final, plan))


def check_target(directory: str, spec: ModelSpec) -> None:
    """Refuse before training what ``save_adapter`` would refuse."""
    path = Path(directory)
    adapter_table(spec)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError("exists and is not an empty directory", field=SAVE, value=directory, accepted="a new directory")
    check_work(path, SAVE)


def _create(final: Path, work: Path, plan: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> None:
    make_work(final, SAVE)
    (work / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    make_files(work, plan)
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists():
        final.rmdir()


def _publish(final: Path, plan: Mapping[str, StoredTensor]) -> str:
    publish_work(final)
    return f"saved an adapter of {plural(sum(t.nbytes for t in plan.values()), 'byte')} to {final}"


def merged(
    spec: ModelSpec, params: Mapping[str, torch.Tensor], boxes: Mapping[str, Box], owners: Mapping[str, Iterable[Box]]
) -> Iterator[Owned]:
    """What this rank owns of the base with its adapters merged, W + scale B A, in at least fp32, as peft computes it.

    Args:
        params, boxes: what this rank holds, by logical name. An adapter is cut where its matrix is, so a rank merges
            its part alone.
        owners: of each tensor of the base, the boxes that this rank writes, inside what it holds.
    """
    assert spec.lora is not None
    for name, parts in owners.items():
        found, module = params[name].detach(), name.removesuffix(".weight")
        if (a := params.get(f"{module}.lora_A.weight")) is not None:
            wide = torch.promote_types(found.dtype, torch.float32)
            b = params[f"{module}.lora_B.weight"]
            found = found.to(wide).addmm(b.detach().to(wide), a.detach().to(wide), alpha=spec.lora.scale)
        held = boxes[name]
        for box in parts:
            inside = tuple(slice(lo - at, hi - at) for lo, hi, at in zip(box.lo, box.hi, held.lo))
            yield name, box, found[inside]
