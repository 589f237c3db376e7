"""adapter_config.json, as PEFT has it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_megatron.checkpoint.adapter_experts import GATE_UP, PARAMETERS, PARENT, doubled, parameters_of
from hetero_megatron.checkpoint.adapter_keys import INIT, check_keys, residual
from hetero_megatron.checkpoint.names import module_names
from hetero_megatron.errors import UserError
from hetero_megatron.spec import Lora, ModelSpec
from hetero_megatron.spec.lora import EVERY_TARGET, MLP_TARGETS, all_linear
from hetero_megatron.utils.files import read_json_object
from hetero_megatron.utils.foreign_keys import is_one_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ACCEPTED = f"a directory with {CONFIG} and {WEIGHTS}, as peft writes it for LoRA"
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # its experts' modules, as released


def adapter_config(spec: ModelSpec, base: str | None) -> dict[str, Any]:
    """The file's content; ``base``: name or directory of the model that it belongs to."""
    lora = spec.lora
    assert lora is not None
    found: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "use_rslora": lora.rslora,
        "target_modules": list(lora.targets), "bias": "none", "fan_in_fan_out": False, "use_dora": lora.dora,
        INIT: lora.residual or True, "modules_to_save": None,
    }  # fmt: skip
    if spec.moe is None:
        names = module_names(spec)
        found["target_modules"] = [names.get(name, name) for name in lora.targets]
    else:
        found["target_modules"] = [name for name in lora.targets if name not in MLP_TARGETS]
        found["target_parameters"] = parameters_of(lora)
        if "gate_proj" in lora.targets:
            found["rank_pattern"], found["alpha_pattern"] = doubled(lora)
    return found


def read_config(directory: str, field: str, spec: ModelSpec) -> Lora:
    """The adapters of a model that a directory holds. UserError: not LoRA, or of a kind that is not supported."""
    path = Path(directory) / CONFIG
    if not path.exists():
        raise UserError(f"holds no {CONFIG}", field=field, value=directory, accepted=ACCEPTED)
    found, where = read_json_object(path, field), str(path)
    check_keys(found, where)
    rank, alpha = found.get("r"), found.get("lora_alpha")
    scaled, dora = (_switch(found, key, where) for key in ("use_rslora", "use_dora"))
    if type(rank) is not int or not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise UserError("has no r or lora_alpha", field=field, value=where, accepted=ACCEPTED)
    targets = (*_target_modules(found, where, spec), *_target_parameters(found, where))
    left = residual(found, where)
    try:
        dropout = found.get("lora_dropout") or 0.0
        lora = Lora(rank, float(alpha), targets, scaled, dropout, dora=dora, residual=left)
    except UserError as error:
        name = {"rank": "r", "alpha": "lora_alpha", "targets": "target_modules", "dropout": "lora_dropout"}[error.field]
        raise UserError(error.problem, field=name, value=error.value, accepted=error.accepted, where=where) from None
    _check_patterns(found, lora, where)
    return lora


def gate_and_up_joined(directory: str) -> bool:
    """Whether the adapter of ``gate_up_proj`` of experts has the ranks of gate's and those of up's."""
    found = read_json_object(Path(directory) / CONFIG, CONFIG)
    return not _is_even(found.get("rank_pattern"), found.get("r"))


def _switch(found: Mapping[str, Any], key: str, where: str) -> bool:
    value = found.get(key)
    if value not in (None, False, True) or type(value) in (int, float):
        raise UserError("is no switch", field=key, value=value, accepted="true, false", where=where)
    return bool(value)


def _is_even(pattern: Any, value: Any) -> bool:
    """Whether a pattern is absent, or says ``value`` for all that it names."""
    return not pattern or (isinstance(pattern, dict) and all(is_one_of(value, (one,)) for one in pattern.values()))


def _names(found: Mapping[str, Any], key: str, accepted: str, where: str) -> list[str]:
    names = found.get(key)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError("is no list of names", field=key, value=names, accepted=accepted, where=where)
    return names


def _target_modules(found: Mapping[str, Any], where: str, spec: ModelSpec) -> list[str]:
    if found.get("target_modules") == "all-linear":
        return list(all_linear(spec.gated))
    if found.get("target_modules") is None and found.get("target_parameters"):
        return []
    names = _names(found, "target_modules", f"a list of {', '.join(EVERY_TARGET)}", where)
    ours = _MIXTRAL if spec.moe is not None else {theirs: name for name, theirs in module_names(spec).items()}
    return [ours.get(last, last) for last in (name.rpartition(".")[2] for name in names)]


def _target_parameters(found: Mapping[str, Any], where: str) -> list[str]:
    """Projections of the experts whose parameters are named."""
    if not found.get("target_parameters"):
        return []
    accepted = f"a list of {', '.join(f'mlp.experts.{name}' for name in PARAMETERS)}"
    out: list[str] = []
    for name in _names(found, "target_parameters", accepted, where):
        parent, _, last = name.rpartition(".")
        if last not in PARAMETERS or not f".{PARENT}".endswith(f".{parent}" if parent else ""):
            raise UserError(
                "only experts' parameters may have adapters", field="target_parameters", value=name, accepted=accepted,
                where=where,
            )  # fmt: skip
        out += PARAMETERS[last]
    return out


def _check_patterns(found: Mapping[str, Any], lora: Lora, where: str) -> None:
    """Ranks and alphas are the same everywhere, but for experts' gate and up where they are joined to one of twice the
    rank that counts as much."""
    ranks, alphas = doubled(lora)
    if _is_even(found.get("rank_pattern"), lora.rank) and _is_even(found.get("alpha_pattern"), lora.alpha):
        return
    for key, wanted in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        said = found.get(key)
        values = {name.rpartition(".")[2]: value for name, value in said.items()} if isinstance(said, dict) else {}
        value = values.get(GATE_UP) if len(values) == 1 else None
        if not isinstance(value, int | float) or not math.isclose(value, *wanted.values()):
            raise UserError(
                "all adapters have one rank and alpha here", field=key, value=said, where=where,
                accepted=f"none, or of experts rank_pattern {json.dumps(ranks)}, alpha_pattern {json.dumps(alphas)}",
            )  # fmt: skip
