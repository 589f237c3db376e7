"""Every key of PEFT's adapter_config.json, and which first values of adapters change the base beside which they count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.spec.lora import RESIDUALS
from hetero_megatron.utils.foreign_keys import KeyTable, by_reason

INIT = "init_lora_weights"
_NONE: tuple[Any, ...] = (None, [], {})
_OFF = (False, None)

KEYS = KeyTable(
    honoured=frozenset(
        (
            "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules", "target_parameters",
            "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "exclude_modules", INIT,
        )
    ),
    fixed={
        "peft_type": ("LORA",), "bias": ("none", None), "fan_in_fan_out": _OFF, "modules_to_save": _NONE,
        "lora_bias": _OFF, "layer_replication": _NONE, "trainable_token_indices": _NONE, "megatron_config": _NONE,
        "enable_lora": _NONE,
        "use_qalora": _OFF, "use_bdlora": (*_OFF, {}), "alora_invocation_tokens": _NONE, "arrow_config": _NONE,
        "kasa_config": _NONE, "velora_config": _NONE, "monteclora_config": _NONE,
    },
    harmless=by_reason(
        {
            "who wrote the file, for which model and task: the names and shapes of the tensors are checked": (
                "base_model_name_or_path revision task_type auto_mapping peft_version inference_mode"
            ),
            "of first values, which the file of weights replaces": (
                "loftq_config eva_config corda_config lora_ga_config"
            ),
            "says something only beside another key, which is refused": (
                "qalora_group_size megatron_core ensure_weight_tying"
            ),
            "of the run that trained it": "runtime_config merge_weights lora_dtype lorap_lr_ratio lorap_emb_lr",
        }
    ),
    problem="adapters of this kind are not supported",
)  # fmt: skip

# First values that leave the base as it is: the file of weights replaces them.
_BESIDE = (True, False, None, "gaussian", "eva", "orthogonal")
_CHANGED = "the base with these first values taken out cannot be computed again"
_AS_PLAIN = (
    "an adapter beside the unchanged base: peft writes one with "
    "save_pretrained(..., path_initial_model_for_weight_conversion=FIRST_ADAPTER)"
)
_WHY = {
    "pissa_niter": f"{_CHANGED}: peft draws a random matrix for them whenever it loads the adapter",
    "corda": f"{_CHANGED}: they are of samples that the adapter does not have",
    "lora_ga": f"{_CHANGED}: they are of gradients that the adapter does not have",
    "loftq": "the base is the quantised one that peft makes of it",
    "mica": "B of such adapters is frozen, which is not supported",
}


def check_keys(config: Mapping[str, Any], where: str) -> None:
    """UserError: a key says that the adapters are of another kind, or nobody knows what it says."""
    KEYS.check_fixed(config, where)
    if unknown := KEYS.unknown(config):
        raise UserError(
            f"not known to be without effect on an adapter (in no table: {KEYS.named(unknown)})", field=unknown[0],
            value=config[unknown[0]], where=where,
            accepted="the keys of peft's LoraConfig; remove others if they say nothing about the adapter",
        )  # fmt: skip


def residual(config: Mapping[str, Any], where: str) -> str | None:
    """The decomposition whose first part the base counts without (``Lora.residual``); None: the base counts whole.

    Raises:
        UserError: first values that change the base in a way which cannot be repeated, or unknown ones.
    """
    init = config.get(INIT, True)
    name = init.lower() if isinstance(init, str) else init
    if any(name is literal for literal in (True, False, None)) or (isinstance(name, str) and name in _BESIDE):
        return None
    if init == "pissa" or name == "olora":
        return str(name)
    reason = next((reason for key, reason in _WHY.items() if isinstance(name, str) and name.startswith(key)), None)
    words = ", ".join((*map(str, RESIDUALS), *(word for word in _BESIDE if isinstance(word, str)), "true", "false"))
    raise UserError(
        reason or "no such first values", field=INIT, value=init, where=where,
        accepted=_AS_PLAIN if reason and name != "mica" else words,
    )  # fmt: skip
