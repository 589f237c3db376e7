"""Parsed JSON as typed values: a checkpoint's metadata may have been altered together with its checksums. Among them is
the model that it describes, also as versions before per-layer data wrote it."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from typing import Any

import torch

from hetero_megatron.errors import UserError
from hetero_megatron.spec import ModelSpec

MAX_INTEGER = 1 << 62  # beyond it sizes and counts do not fit int64


def typed(value: Any, kind: Any, field: str) -> Any:
    """``value`` as ``kind``: ``Any``, ``None``, bool, int, float (finite), str, ``list[K]``, ``tuple[K, ...]``,
    ``tuple[K, L]``, ``dict[str, K]``, ``K | None``, or a dataclass, whose keys are its fields (those with a default are
    optional); of several dataclasses the first that has a field for every key.

    Raises:
        UserError: naming the path below ``field``.
    """
    if dataclasses.is_dataclass(kind):
        return _record(value, typing.cast(type, kind), field)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        kinds = [k for k in arguments if k is not type(None)]
        assert len(kinds) == 1 or all(map(dataclasses.is_dataclass, kinds)), f"{kind}: one kind, or dataclasses"
        fitting = (k for k in kinds[:-1] if isinstance(value, dict) and value.keys() <= _hints(k).keys())
        return typed(value, next(fitting, kinds[-1]), field)
    if origin is tuple and Ellipsis not in arguments and isinstance(value, list) and len(value) == len(arguments):
        return tuple(typed(item, k, f"{field}[{i}]") for i, (item, k) in enumerate(zip(value, arguments, strict=True)))
    if origin in (list, tuple) and isinstance(value, list) and (origin is list or Ellipsis in arguments):
        return origin(typed(item, arguments[0], f"{field}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: typed(item, arguments[1], f"{field}.{key}") for key, item in value.items()}
    if kind is Any:
        return _finite(value, field)
    if kind is float and type(value) is int and abs(value) < MAX_INTEGER:
        return float(value)
    if kind in (bool, int, float, str) and type(value) is kind:
        if kind is int and abs(value) >= MAX_INTEGER:
            raise UserError("is too large", field=field, value=value)
        return _finite(value, field)
    raise UserError("has another type", field=field, value=value, accepted=_name(origin or kind))


def _record(value: Any, kind: type, field: str) -> Any:
    if not isinstance(value, dict):
        raise UserError("has another type", field=field, value=value, accepted="an object")
    hints, record_fields = _hints(kind), dataclasses.fields(kind)
    if unknown := sorted(value.keys() - hints.keys()):
        raise UserError("is not known to this version", field=f"{field}.{unknown[0]}", accepted="the one that wrote it")
    given_fields = {
        f.name: typed(value[f.name], hints[f.name], f"{field}.{f.name}") for f in record_fields if f.name in value
    }
    for f in record_fields:
        if f.name not in given_fields and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise UserError("is missing", field=f"{field}.{f.name}")
    return kind(**given_fields)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _finite(value: Any, field: str) -> Any:
    """JSON without NaN and infinities, which no file of ours contains."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError("is not finite", field=field, value=value)
    if isinstance(value, dict):
        for key, item in value.items():
            _finite(item, f"{field}.{key}")
    elif isinstance(value, list):
        for item in value:
            _finite(item, field)
    return value


def _name(kind: Any) -> str:
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", dict: "an object"}
    return names.get(kind, "a list" if kind in (list, tuple) else "null")


def is_finite(values: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether no value is NaN or infinite, here or as ``dtype``; one pass, no extra memory."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values.detach())  # NaN is the smallest and the largest
    dtype = dtype or values.dtype
    return bool(torch.isfinite(low.to(dtype)) & torch.isfinite(high.to(dtype)))


# What one value for all layers was called, until every layer had its kind.
_GLOBAL = ("naming", "sliding_window", "rope_theta", "rope_scaling")


def stored_spec(model: Any) -> ModelSpec:
    """From ``state["model"]``; UserError where it is not a model."""
    spec = typed(_with_layer_kinds(model), ModelSpec, "state.model")
    assert isinstance(spec, ModelSpec)
    return spec


def _with_layer_kinds(model: Any) -> Any:
    if not isinstance(model, dict) or "naming" not in model or "layer_kinds" in model:
        return model
    rope = {"theta": model.get("rope_theta", 10000.0), "scaling": model.get("rope_scaling")}
    new = {key: value for key, value in model.items() if key not in _GLOBAL}
    new["layer_kinds"] = [{"window": model.get("sliding_window"), "rope": rope}]
    if isinstance(new.get("qk_norm"), bool):
        new["qk_norm"] = "head" if new["qk_norm"] else None
    return new
