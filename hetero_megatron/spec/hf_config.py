"""Hugging Face ``config.json`` -> ModelSpec, as transformers reads it. What it obeys and we lack is refused by name."""

from __future__ import annotations

from dataclasses import replace

from hetero_megatron.errors import UserError
from hetero_megatron.spec.dropout import DROPOUT_KEYS, check_rate
from hetero_megatron.spec.families import FAMILIES, Family
from hetero_megatron.spec.families.refused import why
from hetero_megatron.spec.hf_keys import check_keys
from hetero_megatron.spec.hf_reader import Config, ConfigReader
from hetero_megatron.spec.model_spec import ModelSpec


def from_hf_config(config: Config, where: str = "config.json", name: str | None = None) -> ModelSpec:
    """Read the configuration of one of ``FAMILIES``.

    Raises:
        UserError: an unknown family, a missing key, a setting that changes numbers and is not supported, or a key
            that may (``hf_keys``).
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        reason = why(kind) if isinstance(kind, str) else ""
        raise UserError(
            "this model family is not supported" + (reason and f": {reason}"), field="model_type", value=kind,
            accepted=", ".join(FAMILIES), where=where,
        )  # fmt: skip
    check_keys(config, family.model_type, family.keys, where)
    read = ConfigReader(config, where)
    _check_architectures(read, family)
    return replace(family.read(read, name or family.model_type), dropouts=_dropouts(read, family))


def _dropouts(read: ConfigReader, family: Family) -> tuple[tuple[str, float], ...]:
    """Keys and values of the dropout rates that are not 0."""
    found = []
    for key in (key for keys in DROPOUT_KEYS.values() for key in keys if key in family.keys):
        rate = read.value(key, family.absent_dropout, family.null_dropout)
        try:
            check_rate(rate, key)
        except UserError as error:
            raise read.refuse(error.problem, key, error.accepted) from None
        if rate:
            found.append((key, float(rate)))
    return tuple(found)


def _check_architectures(read: ConfigReader, family: Family) -> None:
    """Weights of a classifier, or of another family, are not those of a causal language model of this family."""
    found = read.value("architectures", [], nullable=True)
    known = {name.lower() for name in family.architectures}  # the first Llama's said LLaMAForCausalLM
    if not isinstance(found, list) or any(not isinstance(a, str) or a.lower() not in known for a in found):
        raise read.refuse(
            f"is not the causal language model that model_type {family.model_type} names", "architectures",
            " or ".join(f'["{name}"]' for name in family.architectures),
        )  # fmt: skip
