"""The model that a checkpoint's metadata describes, also as versions before per-layer data wrote it."""

from __future__ import annotations

from typing import Any

from hetero_megatron.checkpoint.typed import typed
from hetero_megatron.spec import ModelSpec

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
