"""The adapters that a model has, and what projections of a model may have some."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from hetero_megatron.spec.adapter_choice import Adapter, adapters_among, choices
from hetero_megatron.spec.lora import EVERY_TARGET, all_linear
from hetero_megatron.spec.model_spec import ModelSpec
from hetero_megatron.spec.tensors import logical_tensors


@lru_cache(maxsize=64)
def adapters(spec: ModelSpec) -> Mapping[str, Adapter]:
    """By logical module."""
    return {} if spec.lora is None else adapters_among(logical_tensors(spec.base), spec, spec.lora)


def all_modules(spec: ModelSpec) -> tuple[str, ...]:
    """Every projection that may have an adapter, as peft would call them: what files keep together is one."""
    names = {name for tensor in logical_tensors(spec.base) for name, _ in choices(spec.base, tensor)[:1]}
    return tuple(name for name in EVERY_TARGET if name in names)


def default_targets(spec: ModelSpec) -> tuple[str, ...]:
    """Every projection of a model: by their own names, but of a hybrid, in whose layers they differ, as peft calls
    them."""
    return all_modules(spec) if spec.hybrid else all_linear(spec.gated)
