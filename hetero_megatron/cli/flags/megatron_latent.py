"""Multi-head latent attention (DeepSeek-V2 and V3) as a Megatron checkpoint's arguments describe it.

Megatron Core lays its tensors out as Hugging Face does: a head's features without positions come before those that
turn, which do so in neighbouring pairs. Other than there, the latents' norms have the epsilon of all norms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.spec import LayerKind, ModelSpec, Rope, RopeScaling
from hetero_megatron.spec.mla import MLA, score_scale
from hetero_megatron.spec.rope import yarn_growth

# Argument -> field of MLA, and the value of Megatron Core where it is not stored.
_SIZES = {
    "q_lora_rank": ("q_rank", None), "kv_lora_rank": ("kv_rank", 512), "qk_head_dim": ("nope_dim", 128),
    "qk_pos_emb_head_dim": ("rope_dim", 64), "v_head_dim": ("v_dim", 128),
}  # fmt: skip
_NUMBERS = {
    "rotary_scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.0, "original_max_position_embeddings": 4096,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip


def is_latent(stored: Mapping[str, Any]) -> bool:
    return stored.get("multi_latent_attention") is True


def with_latents(spec: ModelSpec, stored: Mapping[str, Any]) -> ModelSpec:
    """``spec``, which the other arguments describe, with this attention. UserError: it is one that is not supported."""
    _check_kind(stored)
    mla, rope = _latents(spec, stored)
    kinds = tuple(LayerKind(kind.window, rope, kind.mlp) for kind in spec.layer_kinds)
    moved = spec.moe is None or spec.moe.score == "sigmoid"  # the family by whose names the tensors go
    return replace(
        spec, mla=mla, head_dim=mla.head_dim, num_kv_heads=spec.num_heads, qkv_bias=False, layer_kinds=kinds,
        attn_scale=score_scale(mla, _number(stored, "rotary_scaling_factor")),
        hf_model_type="deepseek_v3" if moved else "deepseek_v2",
    )  # fmt: skip


def check_latents(spec: ModelSpec, stored: Mapping[str, Any], model: str) -> None:
    """UserError where the arguments contradict ``spec``, the model that --model names."""
    _check_kind(stored)
    mla = spec.mla
    if mla is None:
        raise _error("multi_latent_attention", True, f"--model {model} has another attention")
    latents, rope = _latents(spec, stored)
    for key, (name, _) in _SIZES.items():
        if getattr(latents, name) != getattr(mla, name):
            raise _error(key, getattr(latents, name), f"--model {model} says {getattr(mla, name) or 'none'}")
    epsilon = stored.get("norm_epsilon", mla.norm_eps)
    if epsilon != mla.norm_eps:
        raise _error("norm_epsilon", epsilon, f"the latents' norms of --model {model} have {mla.norm_eps}")
    if not all(rope.interleaved for rope in spec.ropes):
        raise _error("multi_latent_attention", True, f"--model {model} does not turn neighbouring features together")
    factor = _number(stored, "rotary_scaling_factor")
    spec_scaling, rope_scaling = spec.ropes[0].scaling if spec.ropes else None, rope.scaling
    scales = [spec.attn_scale or mla.qk_dim**-0.5, score_scale(latents, factor) or mla.qk_dim**-0.5]
    if not _same(spec_scaling, rope_scaling) or not math.isclose(*scales):
        raise _error("rotary_scaling_factor", factor, f"--model {model} stretches its rotary frequencies otherwise")


def _check_kind(stored: Mapping[str, Any]) -> None:
    if stored.get("qk_layernorm") is not True:
        raise _error("qk_layernorm", stored.get("qk_layernorm"), "latents without norms are not supported")
    if stored.get("rope_type", "yarn") not in ("rope", "yarn", None):
        raise _error("rope_type", stored["rope_type"], "unknown value", "rope or yarn")


def _latents(spec: ModelSpec, stored: Mapping[str, Any]) -> tuple[MLA, Rope]:
    sizes = {name: stored.get(key, default) for key, (name, default) in _SIZES.items()}
    try:
        mla = MLA(**sizes, norm_eps=spec.norm_eps, mscale_all_dim=_number(stored, "mscale_all_dim"))
    except UserError as error:
        key = next(key for key, (name, _) in _SIZES.items() if name == error.field)
        raise _error(key, error.value, error.problem, error.accepted) from None
    factor, base = _number(stored, "rotary_scaling_factor"), stored.get("rotary_base", 10000)
    scaling = None
    if stored.get("rope_type") != "rope" and factor != 1:
        original = stored.get("original_max_position_embeddings", _NUMBERS["original_max_position_embeddings"])
        if type(original) is not int or original < 1:
            raise _error("original_max_position_embeddings", original, "must be a positive integer", "1 or more")
        scaling = RopeScaling(
            "yarn", factor, original_max_position_embeddings=original, beta_fast=_number(stored, "beta_fast"),
            beta_slow=_number(stored, "beta_slow"),
            attention_factor=yarn_growth(factor, _number(stored, "mscale")) / yarn_growth(factor, mla.mscale_all_dim),
        )  # fmt: skip
    if scaling is None and score_scale(mla, factor) is None:
        mla = replace(mla, mscale_all_dim=0.0)  # it says nothing
    return mla, Rope(float(base), scaling, mla.rope_dim, interleaved=True)


def _same(a: RopeScaling | None, b: RopeScaling | None) -> bool:
    if a is None or b is None:
        return a is b
    return replace(a, attention_factor=1.0) == replace(b, attention_factor=1.0) and math.isclose(
        a.attention_factor, b.attention_factor
    )


def _number(stored: Mapping[str, Any], key: str) -> float:
    value = stored.get(key, _NUMBERS[key])
    least_ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not least_ok or value < 0 or (value == 0 and not key.startswith("mscale")):
        raise _error(key, value, "must be a positive number", "a number above 0")
    return float(value)


def _error(key: str, value: object, problem: str, accepted: str = "another checkpoint") -> UserError:
    return UserError(problem, field="--" + key.replace("_", "-"), value=value, accepted=accepted)
