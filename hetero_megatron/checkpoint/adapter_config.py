"""adapter_config.json, as PEFT has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_megatron.checkpoint.adapter_experts import doubled, parameters, parameters_of, parent, single_keys
from hetero_megatron.checkpoint.adapter_keys import INIT, check_keys, residual
from hetero_megatron.checkpoint.adapter_sites import MIXTRAL, PATTERNS, experts_patterns, is_even, site_keys, with_sites
from hetero_megatron.checkpoint.names import module_names
from hetero_megatron.errors import UserError
from hetero_megatron.spec import Lora, ModelSpec
from hetero_megatron.spec.adapter_modules import all_modules
from hetero_megatron.spec.lora import EVERY_TARGET, MLP_TARGETS, TARGETS
from hetero_megatron.utils.files import read_json_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ACCEPTED = f"a directory with {CONFIG} and {WEIGHTS}, as peft writes it for LoRA"


def adapter_config(spec: ModelSpec, base: str | None) -> dict[str, Any]:
    """The file's content; ``base``: name or directory of the model that it belongs to."""
    lora = spec.lora
    assert lora is not None
    content: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "use_rslora": lora.rslora,
        "target_modules": list(lora.targets), "bias": "none", "fan_in_fan_out": False, "use_dora": lora.dora,
        INIT: lora.residual or True, "modules_to_save": None,
    }  # fmt: skip
    names = module_names(spec)
    plain_names = [names.get(name, name) for name in lora.targets if spec.moe is None or name not in MLP_TARGETS]
    content["target_modules"] = plain_names
    if lora.sites:
        content |= site_keys(spec, lora.sites, plain_names)
    if spec.moe is not None and lora.dora:
        content |= single_keys(spec, content["target_modules"])
    elif spec.moe is not None:
        content["target_parameters"] = parameters_of(spec)
        if "gate_proj" in lora.targets:
            for key, pattern in zip(PATTERNS, doubled(lora), strict=True):
                content[key] = content.get(key, {}) | pattern
    return content


def read_config(directory: str, field: str, spec: ModelSpec) -> Lora:
    """The adapters of a model that a directory holds. UserError: not LoRA, or of a kind that is not supported."""
    path = Path(directory) / CONFIG
    if not path.exists():
        raise UserError(f"holds no {CONFIG}", field=field, value=directory, accepted=ACCEPTED)
    content, path_name = read_json_object(path, field), str(path)
    check_keys(content, path_name)
    rank, alpha = content.get("r"), content.get("lora_alpha")
    scaled, dora = (_switch(content, key, path_name) for key in ("use_rslora", "use_dora"))
    if type(rank) is not int or not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise UserError("has no r or lora_alpha", field=field, value=path_name, accepted=ACCEPTED)
    projections, experts = _target_modules(content, path_name, spec), _target_parameters(content, path_name, spec)
    if dora and experts:
        raise UserError(
            "peft knows no DoRA of parameters", field="target_parameters", value=content["target_parameters"],
            accepted="projections of single experts among target_modules", where=path_name,
        )  # fmt: skip
    residual_kind = residual(content, path_name)
    try:
        dropout = content.get("lora_dropout") or 0.0
        lora = Lora(rank, float(alpha), (*projections, *experts), scaled, dropout, dora=dora, residual=residual_kind)
    except UserError as error:
        name = {"rank": "r", "alpha": "lora_alpha", "targets": "target_modules", "dropout": "lora_dropout"}[error.field]
        raise UserError(
            error.problem, field=name, value=error.value, accepted=error.accepted, where=path_name
        ) from None
    return with_sites(content, lora, path_name, spec)


def gate_and_up_joined(directory: str, spec: ModelSpec) -> bool:
    """Whether the adapter of ``gate_up_proj`` of experts has the ranks of gate's and those of up's."""
    content = read_json_object(Path(directory) / CONFIG, CONFIG)
    return not is_even(experts_patterns(content, "rank_pattern", spec), content.get("r"))


def _switch(config: Mapping[str, Any], key: str, where: str) -> bool:
    value = config.get(key)
    if value not in (None, False, True) or type(value) in (int, float):
        raise UserError("is no switch", field=key, value=value, accepted="true, false", where=where)
    return bool(value)


def _names(config: Mapping[str, Any], key: str, accepted: str, where: str) -> list[str]:
    names = config.get(key)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError("is no list of names", field=key, value=names, accepted=accepted, where=where)
    return names


def _target_modules(config: Mapping[str, Any], where: str, spec: ModelSpec) -> list[str]:
    if config.get("target_modules") == "all-linear":
        return list(all_modules(spec))
    if config.get("target_modules") is None and config.get("target_parameters"):
        return []
    if isinstance(config.get("target_modules"), str):  # a regular expression, which with_sites reads
        return [next(iter(module_names(spec)), TARGETS[0])]
    names = _names(config, "target_modules", f"a regular expression, or a list of {', '.join(EVERY_TARGET)}", where)
    ours = MIXTRAL if spec.moe is not None else {family_name: name for name, family_name in module_names(spec).items()}
    return [ours.get(last, last) for last in (name.rpartition(".")[2] for name in names)]


def _target_parameters(config: Mapping[str, Any], where: str, spec: ModelSpec) -> list[str]:
    """Projections of the experts whose parameters are named."""
    if not config.get("target_parameters"):
        return []
    known = parameters(spec)
    listed = f"a list of {', '.join(f'{parent(spec)}.{name}' for name in known)}"
    accepted = listed if known else "null: the model has no experts"
    out: list[str] = []
    for name in _names(config, "target_parameters", accepted, where):
        module, _, last = name.rpartition(".")
        if last not in known or not f".{parent(spec)}".endswith(f".{module}" if module else ""):
            raise UserError(
                "only experts' parameters may have adapters", field="target_parameters", value=name, accepted=accepted,
                where=where,
            )  # fmt: skip
        out += known[last]
    return out
