"""What a model family is: how its config.json is read and written, and how it calls its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hetero_megatron.spec.hf_names import NameTable
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.hf_rope import ROPE_KEYS, read_rope, write_rope
from hetero_megatron.spec.model_spec import MAX_LAYERS, LayerKind, ModelSpec

FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "relu2": "squared_relu",
}
# Of every decoder with rotary positions.
DECODER_KEYS = frozenset(ROPE_KEYS) | words(
    "architectures hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size"
    " vocab_size max_position_embeddings rms_norm_eps initializer_range tie_word_embeddings attention_dropout"
)


@dataclass(frozen=True)
class Wrapper:
    """A ``model_type`` of more than language, whose language model is of a family: that is read of it, and no more.

    Args:
        architecture: transformers' class of the whole.
        prefix: of the names of the language model's tensors; apart: of those of the others, which are not read.
        keys: of its config.json beside ``text_config``, which say nothing about the language model.
        plain: what the names of the language model by itself begin with instead of ``prefix``; "": with nothing, and
            all names of the whole that are of the language model begin with ``prefix``.
    """

    model_type: str
    architecture: str
    prefix: str
    apart: tuple[str, ...]
    keys: frozenset[str]
    plain: str = ""


@dataclass(frozen=True)
class Family:
    """One Hugging Face ``model_type``.

    Args:
        causal_lm: transformers' class of the causal language model.
        keys: of config.json that are read.
        read: the configuration and a name -> the model; raises ``UserError``.
        write: the inverse; what it cannot say is found by reading the result again.
        names: how it calls the logical tensors.
        examples: released models, for the documentation.
        inside: what its models may be a part of.
        unread: how names in released files begin of layers that predict further tokens, where none is read.
        dense_form: of a mixture of experts: some of its models are none.
        absent_dropout: what transformers takes for dropout rates that are absent; null_dropout: ``null`` is one for it.
    """

    model_type: str
    causal_lm: str
    keys: frozenset[str]
    read: Callable[[ConfigReader, str], ModelSpec]
    write: Callable[[ModelSpec], dict[str, Any]]
    names: NameTable = field(default_factory=NameTable)
    examples: str = ""
    inside: Wrapper | None = None
    unread: tuple[str, ...] = ()
    dense_form: bool = False
    absent_dropout: float = 0.0
    null_dropout: bool = False

    @property
    def mixture(self) -> bool:
        """A mixture of experts."""
        return "num_experts_per_tok" in self.keys

    @property
    def latent(self) -> bool:
        """With multi-head latent attention."""
        return "kv_lora_rank" in self.keys

    @property
    def linear(self) -> bool:
        """With linear attention in some layers."""
        return bool(self.keys & {"linear_num_key_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads"})

    @property
    def architectures(self) -> tuple[str, ...]:
        """The first is what an export says."""
        return self.causal_lm, self.causal_lm.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Model"


@dataclass(frozen=True)
class Defaults:
    """What transformers assumes where a config.json lacks a key.

    ``kv_heads``: None: as many as heads; ``kv_nullable``: ``null`` means that too. ``head_dim``: None: hidden / heads.
    ``partial_rotary``: None: no share is read. ``original``: of ``original_max_position_embeddings``.
    """

    positions: int
    kv_heads: int | None = None
    kv_nullable: bool = True
    head_dim: int | None = None
    head_dim_nullable: bool = False
    eps: float = 1e-6
    tied: bool = False
    theta: float = 10000.0
    partial_rotary: float | None = None
    original: int | None = None


def decoder(read: ConfigReader, model_type: str, name: str, defaults: Defaults, **changes: Any) -> ModelSpec:
    """What all decoders with rotary positions and RMS norms say alike: SwiGLU, one kind of layer.

    Args:
        changes: fields of ModelSpec that the family says otherwise. With ``layer_kinds`` among them, the rotary keys
            are left to the caller.
    """
    heads, kv_heads, head_dim = head_sizes(read, defaults)
    positions = read.integer("max_position_embeddings", defaults.positions)
    notices: tuple[str, ...] = ()
    if "layer_kinds" not in changes:
        rope, notices = read_rope(
            read, head_dim, positions, defaults.theta, defaults.partial_rotary, defaults.original,
            changes.pop("interleaved", False),
        )  # fmt: skip
        windows = changes.pop("windows", (None,))
        changes["layer_kinds"] = tuple(LayerKind(window, rope) for window in windows)
    return replace(
        ModelSpec(
            name=name,
            hf_model_type=model_type,
            num_layers=num_layers(read),
            hidden_size=read.integer("hidden_size"),
            ffn_hidden_size=read.integer("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=read.integer("vocab_size"),
            max_position_embeddings=positions,
            norm_eps=read.positive("rms_norm_eps", defaults.eps),
            tied=read.flag("tie_word_embeddings", defaults.tied),
            init_std=read.positive("initializer_range", 0.02),
            notices=notices,
        ),
        **changes,
    )


def read_activation(read: ConfigReader, key: str, default: str) -> str:
    """Of an MLP without a gate."""
    name = read.value(key, default)
    activation = ACTIVATIONS.get(name) if isinstance(name, str) else None
    if activation is None:
        raise read.refuse("this activation is not supported", key, ", ".join(ACTIVATIONS))
    return activation


def activation_name(spec: ModelSpec) -> str:
    """The inverse."""
    return {"gelu_tanh": "gelu_new", "gelu": "gelu", "squared_relu": "relu2"}.get(spec.activation, spec.activation)


def refuse_other_head_dim(read: ConfigReader) -> None:
    """Of families whose heads divide hidden_size."""
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    if hidden % heads:
        raise read.refuse(f"does not divide hidden_size {hidden}", "num_attention_heads", f"a divisor of {hidden}")
    read.must_be("head_dim", hidden // heads, None)


def some_features_turn(read: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """``spec``, of a family that transformers cannot run with a share of features and ``proportional`` frequencies."""
    for rope in spec.ropes:
        proportional = rope.scaling is not None and rope.scaling.kind == "proportional"
        if proportional and rope.turned(spec.head_dim) < spec.head_dim:
            raise read.refuse("not known where a share of the features turns", "rope_scaling", "another rope_type")
    return spec


def num_layers(read: ConfigReader) -> int:
    return read.integer("num_hidden_layers", most=MAX_LAYERS)


def head_sizes(read: ConfigReader, defaults: Defaults, divides: bool = False) -> tuple[int, int, int]:
    """(query heads, key-value heads, features of a head).

    Args:
        divides: hidden_size has to be a multiple of the heads also where there is a head_dim.
    """
    heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
    absent = heads if "num_key_value_heads" in read.config else defaults.kv_heads or heads
    kv_heads = read.integer("num_key_value_heads", absent, nullable=defaults.kv_nullable)
    if heads % kv_heads:
        raise read.refuse(
            f"{heads} query heads cannot share them evenly", "num_key_value_heads", f"a divisor of {heads}"
        )
    fallback = defaults.head_dim or max(hidden // heads, 1)
    head_dim = read.integer("head_dim", fallback, defaults.head_dim_nullable)
    has_head_dim = defaults.head_dim is not None or read.config.get("head_dim") is not None
    if hidden % heads and (not has_head_dim or divides):
        accepted = f"a divisor of {hidden}" + ("" if divides else ", or a head_dim")
        raise read.refuse(f"does not divide hidden_size {hidden}", "num_attention_heads", accepted)
    return heads, kv_heads, head_dim


def layer_types(
    read: ConfigReader, default: list[str], limit: int | None, limited: str = SLIDING
) -> tuple[str, ...]:
    """``layer_types``, one of FULL and ``limited`` per layer; the latter only where there is a ``limit``."""
    types = read.value("layer_types", default, nullable=True)
    layers = num_layers(read)
    accepted = {FULL, limited} if limit is not None else {FULL}
    ok = isinstance(types, list) and len(types) == layers and all(isinstance(x, str) and x in accepted for x in types)
    if not ok:
        raise read.refuse(
            f"does not name the attention of {layers} layers", "layer_types",
            " or ".join(f'"{k}"' for k in sorted(accepted)) + " for every layer, or null",
        )  # fmt: skip
    return tuple(types)


def decoder_config(spec: ModelSpec) -> dict[str, Any]:
    """config.json keys that all decoders with rotary positions have."""
    return {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "initializer_range": spec.init_std,
        "attention_dropout": 0.0,
    }


def layer_norm_config(spec: ModelSpec, eps: str) -> dict[str, Any]:
    """The same, with one rotary embedding, of a family with LayerNorm, whose epsilon it calls ``eps``."""
    config = decoder_config(spec) | write_rope(spec)
    return config | {eps: config.pop("rms_norm_eps")}


def silu_config(spec: ModelSpec) -> dict[str, Any]:
    """The same with SwiGLU, a head_dim, and one rotary embedding."""
    return decoder_config(spec) | {"head_dim": spec.head_dim, "hidden_act": "silu"} | write_rope(spec)


def layer_type_config(spec: ModelSpec, unused: int | None = None) -> dict[str, Any]:
    """``layer_types`` and the one window of those that slide; ``unused``: what to say where none does."""
    window = next((w for w in spec.windows if w is not None), unused)
    kinds = [FULL if kind.window is None else SLIDING for kind in spec.layers]
    return {"layer_types": kinds, "sliding_window": window}
