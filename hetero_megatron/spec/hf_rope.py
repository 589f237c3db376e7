"""Rotary embeddings of a Hugging Face configuration, by transformers' precedence (``modeling_rope_utils``), and back.

transformers < 5 writes rope_theta and rope_scaling, >= 5 one object rope_parameters. A rope_scaling that is not empty
takes the whole place of rope_parameters, its rope_theta included; the rope_theta inside either counts before the one
outside; rope_type counts before type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_megatron.spec.hf_reader import Config, ConfigReader
from hetero_megatron.spec.model_spec import ModelSpec
from hetero_megatron.spec.rope import (
    Rope,
    RopeScaling,
    longrope_attention_factor,
    parameters,
    yarn_attention_factor,
)

ROPE_KEYS = (
    "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings", "partial_rotary_factor",
)  # fmt: skip
_EVERY = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
_KNOWN = {
    "default": set[str](),
    "linear": {"factor"},
    "proportional": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor",
        "mscale", "mscale_all_dim",
    },
    "longrope": {"factor", "original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"},
}  # fmt: skip
KINDS = "default, linear, llama3, yarn, longrope or proportional"


def read_rope(
    read: ConfigReader, head_dim: int, positions: int, theta: float = 10000.0, partial: float | None = None,
    original: int | None = None, interleaved: bool = False,
) -> tuple[Rope, tuple[str, ...]]:  # fmt: skip
    """(rotary embedding, notices) of all layers.

    Args:
        positions: max_position_embeddings; theta: the family's default.
        partial: the family's default share of features that turn; None: all of them, and no other share is read.
        original: the family's default for ``original_max_position_embeddings``, which counts before the one inside.
    """
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(read.value(key, {}, nullable=True), dict):
            raise read.refuse(
                "must be an object", key, 'null, or an object such as {"rope_type": "linear", "factor": 2}'
            )
    key = "rope_scaling" if read.config.get("rope_scaling") else "rope_parameters"
    inner = ConfigReader(read.value(key, {}, nullable=True), read.where, f"{key}.")
    rope = one_rope(read, inner, head_dim, positions, theta, partial, original, interleaved)
    return rope, _unread(read, inner.config, rope.theta)


def one_rope(
    read: ConfigReader, inner: ConfigReader, head_dim: int, positions: int, theta: float, partial: float | None = None,
    original: int | None = None, interleaved: bool = False,
) -> Rope:  # fmt: skip
    """The rotary embedding that ``inner``, an object of the configuration ``read``, says; see :func:`read_rope`."""
    rope = inner.config
    theta = inner.positive("rope_theta") if "rope_theta" in rope else read.positive("rope_theta", theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KNOWN:
        raise inner.refuse(
            "this way of stretching rotary frequencies is not supported (dynamic depends on the longest sequence of a"
            " batch, so that the loss would depend on the plan)",
            "rope_type" if "rope_type" in rope else "type", KINDS,
        )  # fmt: skip
    if partial is None:
        read.must_be("partial_rotary_factor", 1, None)
        inner.must_be("partial_rotary_factor", 1)
        share = 1.0
    else:
        share = read.positive("partial_rotary_factor", partial)
        share = inner.positive("partial_rotary_factor") if "partial_rotary_factor" in rope else share
    known_keys = _EVERY | _KNOWN[kind]
    for unknown in sorted(rope.keys() - known_keys):
        if rope[unknown] is not None:
            raise inner.refuse(f"unknown with rope_type {kind}", unknown, ", ".join(sorted(known_keys)))
    if share > 1 or int(head_dim * share) < 2:
        raise inner.refuse("turns no pair of features, or more than there are", "partial_rotary_factor", "up to 1")
    dims = 2 * int(share * head_dim // 2) if kind == "proportional" else int(head_dim * share)
    scaling = _scaling(read, inner, kind, positions, original)
    return Rope(theta, scaling, None if dims == head_dim else dims, interleaved)


def _scaling(
    read: ConfigReader, inner: ConfigReader, kind: str, positions: int, original: int | None
) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", inner.positive("factor"))
    if kind == "proportional":
        return RopeScaling("proportional", inner.positive("factor", 1.0))
    key = "original_max_position_embeddings"  # outside the object it counts before the one inside
    if key in read.config or original is not None:
        length = read.integer(key, original)
    else:
        length = inner.integer(key, positions)
    if kind == "llama3":
        factor, low, high = (inner.positive(k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
        return RopeScaling("llama3", factor, low, high, length)
    attention = inner.optional("attention_factor")
    if kind == "yarn":
        factor = inner.positive("factor", positions / length, nullable=True)
        if attention is None:
            attention = yarn_attention_factor(factor, inner.optional("mscale"), inner.optional("mscale_all_dim"))
        fast, slow = inner.positive("beta_fast", 32.0, nullable=True), inner.positive("beta_slow", 1.0, nullable=True)
        return RopeScaling(
            "yarn", factor, original_max_position_embeddings=length, beta_fast=fast, beta_slow=slow,
            truncate=inner.flag("truncate", True), attention_factor=attention,
        )  # fmt: skip
    factor = inner.positive("factor", positions / length, nullable=True)
    if attention is None:
        attention = longrope_attention_factor(factor, length)
    return RopeScaling(
        "longrope", original_max_position_embeddings=length, attention_factor=attention,
        short_factor=inner.numbers("short_factor"), long_factor=inner.numbers("long_factor"),
    )  # fmt: skip


def _unread(read: ConfigReader, rope: Config, theta: float) -> tuple[str, ...]:
    """What the user may take to count, and does not count for transformers either."""
    stored_rope = read.config.get("rope_parameters") or {}
    if rope is stored_rope or stored_rope.get("rope_theta", theta) == theta:
        return ()
    unread = f"rope_parameters.rope_theta = {stored_rope['rope_theta']}"
    return (f"{read.where}: rope_theta is {theta:g}: {unread} is not read beside rope_scaling, by transformers either",)


def write_rope(spec: ModelSpec) -> dict[str, Any]:
    """``rope_theta`` and, where needed, ``rope_scaling`` and ``partial_rotary_factor``, of a model with one rotary
    embedding."""
    if not spec.ropes:
        return {}
    rope = spec.ropes[0]
    config: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.scaling is not None:
        config["rope_scaling"] = {"rope_type": rope.scaling.kind} | parameters(rope.scaling)
    if rope.dims is not None:
        config["partial_rotary_factor"] = _share(rope.dims, spec.head_dim)
    return config


def _share(dims: int, head_dim: int) -> float:
    """A number of which readers, who round down, make ``dims``."""
    share = dims / head_dim
    return share if int(head_dim * share) == dims else (dims + 0.5) / head_dim


def rope_object(rope: Rope) -> dict[str, Any]:
    """The entry of one kind of layer in ``rope_parameters``."""
    kind = "default" if rope.scaling is None else rope.scaling.kind
    return {"rope_type": kind, "rope_theta": rope.theta} | (parameters(rope.scaling) if rope.scaling else {})


def ropes_by_kind(
    read: ConfigReader, head_dim: int, positions: int, theta: Mapping[str, float]
) -> dict[str, Rope]:  # fmt: skip
    """The rotary embeddings of layers with full and with sliding attention (Gemma 3, OLMo 3): ``rope_parameters`` has
    an object for each; a ``rope_scaling``, as older files have it, adds to that of full attention.

    Args:
        theta: of objects that do not say it, by kind of layer.
    """
    read.must_be("partial_rotary_factor", 1, None)
    read.must_be("original_max_position_embeddings", None)
    by_kind = read.value("rope_parameters", {}, nullable=True)
    scaling = read.value("rope_scaling", {}, nullable=True)
    accepted = "null, or objects for " + " and ".join(theta)
    if not isinstance(by_kind, dict) or by_kind.keys() - theta.keys():
        raise read.refuse("has other keys than the kinds of layers", "rope_parameters", accepted)
    scaled = None not in (read.config.get("rope_scaling"), read.config.get("rope_parameters"))
    if not isinstance(scaling, dict) or (scaled and not by_kind.get("full_attention")):
        example = 'null, or e.g. {"rope_type": "linear", "factor": 8}'
        raise read.refuse("must be an object, and beside rope_parameters one that it adds to", "rope_scaling", example)
    ropes = {}
    for kind, base in theta.items():
        entry_of_kind = by_kind.get(kind) or {}
        if not isinstance(entry_of_kind, dict):
            raise read.refuse("must hold an object per kind of layer", "rope_parameters", accepted)
        entry = entry_of_kind | scaling if kind == "full_attention" else entry_of_kind
        prefix = "rope_scaling." if entry is not entry_of_kind and scaling else f"rope_parameters.{kind}."
        inner = ConfigReader(entry, read.where, prefix)
        ropes[kind] = one_rope(ConfigReader({}, read.where), inner, head_dim, positions, base)
    return ropes


def write_ropes_by_kind(spec: ModelSpec, theta: Mapping[str, float]) -> dict[str, Any]:
    """``rope_parameters`` with an entry for layers with and without windows; ``theta``: of kinds that no layer is."""
    ropes = {kind: Rope(theta[kind]) for kind in theta}
    for kind in spec.layer_kinds:
        ropes["full_attention" if kind.window is None else "sliding_attention"] = kind.rope or Rope()
    return {"rope_parameters": {kind: rope_object(rope) for kind, rope in ropes.items()}}
