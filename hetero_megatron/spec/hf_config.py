"""Hugging Face ``config.json`` -> ModelSpec, as transformers reads it. What it obeys and we lack is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.spec.hf_keys import DROPOUTS, FAMILIES, GPT2_ALIASES, check_keys, require_one_of
from hetero_megatron.spec.model_spec import MAX_LAYERS, MAX_SIZE, ModelSpec, RopeScaling

Config = Mapping[str, Any]

# What transformers assumes where a config.json lacks a key; None: as many KV heads as heads, hidden / heads.
_LLAMA_LIKE: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": None, "head_dim": None, "positions": 2048},
    "mistral": {"kv_heads": 8, "head_dim": None, "positions": 131072},
    "qwen2": {"kv_heads": 32, "head_dim": None, "positions": 32768},
    "qwen3": {"kv_heads": 32, "head_dim": 128, "positions": 32768},
}
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "squared_relu",
}
ROPE_KEYS = {
    "default": ("rope_theta", "rope_type", "type", "partial_rotary_factor"),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_MISSING = object()
_MAX_NUMBER = 1e30


def from_hf_config(config: Config, where: str = "config.json", name: str | None = None) -> ModelSpec:
    """Read a Llama, Mistral, Qwen2/2.5, Qwen3 or GPT-2 configuration.

    GPT-2's default dropout of 0.1 counts as 0 and is mentioned in ``spec.notices``.

    Raises:
        UserError: an unknown family, a missing key, a setting that changes numbers and is not supported, or a key
            that may (``hf_keys``).
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(
            "this model family is not supported", field="model_type", value=family,
            accepted=", ".join(FAMILIES), where=where,
        )  # fmt: skip
    check_keys(config, family, where)
    read = _ConfigReader(config, where)
    _check_architectures(read, family)
    return _gpt2(read, name or "gpt2") if family == "gpt2" else _llama_like(read, family, name or family)


class _ConfigReader:
    """Typed access that names key, value and file in every refusal.

    ``null`` is not the same as absent: transformers refuses it for most keys. Those for which it means something
    say so (``nullable``).
    """

    def __init__(self, config: Config, where: str, prefix: str = "") -> None:
        self.config, self.where, self.prefix = config, where, prefix

    def refuse(self, problem: str, key: str, accepted: str) -> UserError:
        value = self.config.get(key)
        return UserError(problem, field=self.prefix + key, value=value, accepted=accepted, where=self.where)

    def value(self, key: str, default: Any, nullable: bool = False) -> Any:
        value = self.config.get(key, _MISSING)
        return default if value is _MISSING or (nullable and value is None) else value

    def integer(
        self, key: str, default: int | None = None, nullable: bool = False, least: int = 1, most: int = MAX_SIZE
    ) -> int:
        value = self.value(key, default, nullable)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            problem = "must be a positive integer" if least else "must be an integer"
            raise self.refuse(problem, key, f"{least} to {most}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < _MAX_NUMBER:
            raise self.refuse("must be a positive number", key, f"a number above 0 and below {_MAX_NUMBER:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.refuse("must be true or false", key, "true or false")
        return value

    def must_be(self, key: str, *accepted: Any) -> None:
        """Refuse any value of ``key`` but these (or absence)."""
        if key in self.config:
            require_one_of(self.config[key], accepted, self.prefix + key, self.where)


def _check_architectures(read: _ConfigReader, family: str) -> None:
    """Weights of a classifier, or of another family, are not those of a causal language model of this family."""
    found = read.value("architectures", [], nullable=True)
    stem = "GPT2" if family == "gpt2" else family.capitalize()
    accepted = [f"{stem}LMHeadModel" if family == "gpt2" else f"{stem}ForCausalLM", f"{stem}Model"]
    known = {name.lower() for name in accepted}  # the first Llama's said LLaMAForCausalLM
    if not isinstance(found, list) or any(not isinstance(a, str) or a.lower() not in known for a in found):
        raise read.refuse(
            f"is not the causal language model that model_type {family} names", "architectures",
            " or ".join(f'["{name}"]' for name in accepted),
        )  # fmt: skip


def _llama_like(read: _ConfigReader, family: str, name: str) -> ModelSpec:
    defaults = _LLAMA_LIKE[family]
    read.must_be("hidden_act", "silu", "swish")
    read.must_be("attention_dropout", 0, *([None] if family == "llama" else []))
    if family == "mistral":
        read.must_be("attention_bias", False, None)
    if family != "llama":
        read.must_be("mlp_bias", False, None)
    heads, kv_heads, head_dim = _heads(read, family)
    bias = family != "mistral" and read.flag("attention_bias")
    init_std = read.positive("initializer_range", 0.02)
    if family == "llama" and init_std > 1:
        raise read.refuse("must be at most 1 for transformers", "initializer_range", "0 to 1")
    positions = read.integer("max_position_embeddings", defaults["positions"])
    theta, scaling, notices = _rope(read, positions)
    return ModelSpec(
        name=name,
        naming="llama",
        num_layers=read.integer("num_hidden_layers", most=MAX_LAYERS),
        hidden_size=read.integer("hidden_size"),
        ffn_hidden_size=read.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=read.integer("vocab_size"),
        max_position_embeddings=positions,
        norm_eps=read.positive("rms_norm_eps", 1e-6),
        qkv_bias=True if family == "qwen2" else bias,
        out_bias=False if family == "qwen2" else bias,
        mlp_bias=family == "llama" and read.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        tied=read.flag("tie_word_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=_window(read, family),
        init_std=init_std,
        hf_model_type=family,
        notices=notices,
    )


def _heads(read: _ConfigReader, family: str) -> tuple[int, int, int]:
    """(query heads, key-value heads, features of a head)."""
    defaults = _LLAMA_LIKE[family]
    heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
    absent = heads if "num_key_value_heads" in read.config else defaults["kv_heads"] or heads
    kv_heads = read.integer("num_key_value_heads", absent, nullable=family != "mistral")
    if heads % kv_heads:
        raise read.refuse(
            f"{heads} query heads cannot share them evenly", "num_key_value_heads", f"a divisor of {heads}"
        )
    nullable = family in ("llama", "mistral")
    head_dim = read.integer("head_dim", defaults["head_dim"] or max(hidden // heads, 1), nullable)
    given = defaults["head_dim"] is not None or read.config.get("head_dim") is not None
    if hidden % heads and (not given or family == "llama"):  # transformers asks for it of a Llama in either case
        accepted = f"a divisor of {hidden}" + ("" if family == "llama" else ", or a head_dim")
        raise read.refuse(f"does not divide hidden_size {hidden}", "num_attention_heads", accepted)
    return heads, kv_heads, head_dim


def _window(read: _ConfigReader, family: str) -> int | None:
    layers = read.integer("num_hidden_layers", most=MAX_LAYERS)
    if family in ("llama", "mistral"):  # transformers reads no layer_types here
        window = None
        if family == "llama":
            read.must_be("sliding_window", None)
        elif read.value("sliding_window", 0) is not None:
            window = read.integer("sliding_window", 4096)
        read.must_be("use_sliding_window", window is not None, None)
        kind = "full_attention" if window is None else "sliding_attention"
        if read.value("layer_types", None) not in (None, [kind] * layers):
            raise read.refuse("is not read by transformers for this family", "layer_types", f"{kind} in every layer")
        return window
    return _qwen_window(read, layers)


def _qwen_window(read: _ConfigReader, layers: int) -> int | None:
    window, kinds = None, read.value("layer_types", None, nullable=True)
    used = read.flag("use_sliding_window")
    if read.value("sliding_window", 0) is not None:
        given = read.integer("sliding_window", 4096, least=1 if used else 0)
        window = given if used else None
    full, sliding = ["full_attention"] * layers, ["sliding_attention"] * layers
    if kinds is None:
        first = layers if window is None else read.integer("max_window_layers", 28, least=0)
        kinds = full[:first] + sliding[first:]
    if kinds == full:
        return None
    if kinds == sliding and window is not None:
        return window
    if window is None or not isinstance(kinds, list) or len(kinds) != layers:
        raise read.refuse(
            f"does not name the attention of {layers} layers, all without a window", "layer_types",
            'null, or "full_attention" for every layer',
        )  # fmt: skip
    raise read.refuse(
        "layers with and without a sliding window cannot be mixed", "use_sliding_window",
        "false, or a window in all layers (max_window_layers 0)",
    )  # fmt: skip


def _rope(read: _ConfigReader, positions: int) -> tuple[float, RopeScaling | None, tuple[str, ...]]:
    """(theta, scaling, notices) by transformers' precedence (``modeling_rope_utils``).

    transformers < 5 writes rope_theta and rope_scaling, >= 5 one object rope_parameters. A rope_scaling that is not
    empty takes the whole place of rope_parameters, its rope_theta included; the rope_theta inside either counts
    before the one outside; rope_type counts before type.
    """
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(read.value(key, {}, nullable=True), dict):
            raise read.refuse(
                "must be an object", key, 'null, or an object such as {"rope_type": "linear", "factor": 2}'
            )
    key = "rope_scaling" if read.config.get("rope_scaling") else "rope_parameters"
    rope = read.value(key, {}, nullable=True)
    inner = _ConfigReader(rope, read.where, f"{key}.")
    theta = inner.positive("rope_theta") if "rope_theta" in rope else read.positive("rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise inner.refuse(
            "this way of stretching rotary frequencies is not supported",
            "rope_type" if "rope_type" in rope else "type", "default, linear or llama3",
        )  # fmt: skip
    read.must_be("partial_rotary_factor", 1, None)
    inner.must_be("partial_rotary_factor", 1)
    known = {*ROPE_KEYS["default"], *ROPE_KEYS[kind]}
    for unknown in sorted(rope.keys() - known):
        if rope[unknown] is not None:
            raise inner.refuse(f"unknown with rope_type {kind}", unknown, ", ".join(sorted(known)))
    return theta, _scaling(read, inner, kind, positions), _unread(read, rope, theta)


def _scaling(read: _ConfigReader, inner: _ConfigReader, kind: str, positions: int) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", inner.positive("factor"))
    key = "original_max_position_embeddings"  # outside the object it counts before the one inside
    original = read.integer(key) if key in read.config else inner.integer(key, positions)
    factor, low, high = (inner.positive(k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    return RopeScaling("llama3", factor, low, high, original)


def _unread(read: _ConfigReader, rope: Config, theta: float) -> tuple[str, ...]:
    """What the user may take to count, and does not count for transformers either."""
    beside = read.config.get("rope_parameters") or {}
    if rope is beside or beside.get("rope_theta", theta) == theta:
        return ()
    unread = f"rope_parameters.rope_theta = {beside['rope_theta']}"
    return (f"{read.where}: rope_theta is {theta:g}: {unread} is not read beside rope_scaling, by transformers either",)


def _gpt2(read: _ConfigReader, name: str) -> ModelSpec:
    read = _ConfigReader(_own_names(read), read.where)
    read.must_be("scale_attn_weights", True)
    read.must_be("scale_attn_by_inverse_layer_idx", False)
    read.must_be("reorder_and_upcast_attn", False)
    read.must_be("add_cross_attention", False)
    for key in DROPOUTS:
        read.must_be(key, 0, 0.1)
    dropped = [key for key in DROPOUTS if read.config.get(key, 0.1)]
    activation = read.config.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise read.refuse("this activation is not supported", "activation_function", ", ".join(ACTIVATIONS))
    hidden, heads = read.integer("n_embd"), read.integer("n_head")
    if hidden % heads:
        raise read.refuse(f"does not divide n_embd {hidden}", "n_head", f"a divisor of {hidden}")
    return ModelSpec(
        name=name,
        naming="gpt2",
        num_layers=read.integer("n_layer", most=MAX_LAYERS),
        hidden_size=hidden,
        ffn_hidden_size=read.integer("n_inner", 4 * hidden, nullable=True),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=read.integer("vocab_size"),
        max_position_embeddings=read.integer("n_positions", 1024),
        norm="layer",
        norm_eps=read.positive("layer_norm_epsilon", 1e-5),
        activation=ACTIVATIONS[activation],
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=read.flag("tie_word_embeddings", True),
        position="learned",
        init_std=read.positive("initializer_range", 0.02),
        hf_model_type="gpt2",
        notices=(f"{read.where}: trained without dropout ({', '.join(dropped)} = 0.1 ignored)",) if dropped else (),
    )


def _own_names(read: _ConfigReader) -> Config:
    """GPT-2's keys under their own names. Under both names with two values, transformers takes the other name's."""
    config = dict(read.config)
    for other, own in GPT2_ALIASES.items():
        if other in config and config.setdefault(own, config[other]) != config[other]:
            raise read.refuse(f"the same setting is {own} = {config[own]}", other, "one of the two names")
    return config
