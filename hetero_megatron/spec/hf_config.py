"""Hugging Face ``config.json`` -> ModelSpec, as transformers reads it. What it obeys and we lack is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.spec.dropout import DROPOUT_KEYS, check_rate
from hetero_megatron.spec.families import FAMILIES, Family, wrapped_family
from hetero_megatron.spec.families.refused import why
from hetero_megatron.spec.hf_reader import HARMLESS, Config, ConfigReader, check_keys
from hetero_megatron.spec.model_spec import ModelSpec
from hetero_megatron.spec.quantised import without_quantisation


def from_hf_config(config: Config, where: str = "config.json", name: str | None = None) -> ModelSpec:
    """Read the configuration of one of ``FAMILIES``.

    Raises:
        UserError: an unknown family, a missing key, a setting that changes numbers and is not supported, or a key
            that may (``hf_keys``).
    """
    wrapped = wrapped_family(config)
    if wrapped is not None:
        return _from_wrapper(config, wrapped, where, name)
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        reason = why(kind) if isinstance(kind, str) else ""
        raise UserError(
            "this model family is not supported" + (reason and f": {reason}"), field="model_type", value=kind,
            accepted=", ".join(FAMILIES), where=where,
        )  # fmt: skip
    config, notices = without_quantisation(config, where)
    check_keys(config, family.model_type, family.keys, where)
    reader = ConfigReader(config, where)
    _check_architectures(reader, family)
    spec = family.read(reader, name or family.model_type)
    return replace(spec, dropouts=_dropouts(reader, family), notices=(*notices, *spec.notices))


def _from_wrapper(config: Config, family: Family, where: str, name: str | None) -> ModelSpec:
    """The language model of a configuration with a ``text_config``."""
    outer = family.inside
    assert outer is not None
    check_keys(config, outer.model_type, outer.keys | {"text_config", "architectures", "tie_word_embeddings"}, where)
    reader = ConfigReader(config, where)
    reader.must_be("architectures", [outer.architecture], None)
    inner = reader.value("text_config", None)
    if not isinstance(inner, Mapping) or inner.get("model_type", family.model_type) != family.model_type:
        raise reader.refuse("is no configuration of a language model", "text_config", f"one of {family.model_type}")
    spec = from_hf_config(
        {**inner, "model_type": family.model_type}, f"{where} (text_config)", name or family.model_type
    )
    reader.must_be("tie_word_embeddings", False, spec.tied)  # that of text_config counts
    left_out = f"{where}: of this {outer.model_type} model the language model is read, and no other part of it"
    return replace(spec, notices=(left_out, *spec.notices))


def language_config(config: Config) -> dict[str, Any]:
    """The configuration of the language model that ``config`` is of, or is of a model with."""
    family = wrapped_family(config)
    inner = None if family is None else config.get("text_config")
    if family is None or not isinstance(inner, Mapping):
        return dict(config)
    common = {key: value for key, value in config.items() if key in HARMLESS}
    return common | dict(inner) | {"model_type": family.model_type}


def _dropouts(read: ConfigReader, family: Family) -> tuple[tuple[str, float], ...]:
    """Keys and values of the dropout rates that are not 0."""
    rates = []
    for key in (key for keys in DROPOUT_KEYS.values() for key in keys if key in family.keys):
        rate = read.value(key, family.absent_dropout, family.null_dropout)
        try:
            check_rate(rate, key)
        except UserError as error:
            raise read.refuse(error.problem, key, error.accepted) from None
        if rate:
            rates.append((key, float(rate)))
    return tuple(rates)


def _check_architectures(read: ConfigReader, family: Family) -> None:
    """Weights of a classifier, or of another family, are not those of a causal language model of this family."""
    architectures = read.value("architectures", [], nullable=True)
    family_names = {name.lower() for name in family.architectures}  # the first Llama's said LLaMAForCausalLM
    if not isinstance(architectures, list) or any(
        not isinstance(a, str) or a.lower() not in family_names for a in architectures
    ):
        raise read.refuse(
            f"is not the causal language model that model_type {family.model_type} names", "architectures",
            " or ".join(f'["{name}"]' for name in family.architectures),
        )  # fmt: skip
