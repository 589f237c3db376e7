"""The configuration of a GPT-family decoder: everything that changes its numbers, nothing else.

What differs between layers is data of each layer (:class:`LayerKind`); what differs between families is data too. There
is no class per family.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.spec.gated_delta import GatedDelta
from hetero_megatron.spec.lora import Lora
from hetero_megatron.spec.mla import MLA
from hetero_megatron.spec.moe import MoE
from hetero_megatron.spec.rope import Rope
from hetero_megatron.spec.state_space import StateSpace

# Beyond these, sizes overflow (int64 bytes) or exhaust memory before anything can be said about them.
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 100_000
MAX_ELEMENTS = 2**48  # of one matrix

GATED = ("swiglu", "clamped_swiglu", "geglu", "geglu_tanh")  # activations that multiply two projections
EXPERT_ACTIVATIONS = ("swiglu", "clamped_swiglu", "squared_relu")
CHOICES = {
    "norm": ("rms", "layer"), "norm_placement": ("pre", "pre_post", "post"), "position": ("rope", "learned"),
    "activation": (*GATED, "gelu", "gelu_tanh", "squared_relu"), "parallel_block": (None, "one_norm", "two_norms"),
    "qk_norm": (None, "head", "projection", "l2", "head_layer", "each_head"),
}  # fmt: skip


@dataclass(frozen=True)
class LayerKind:
    """What one decoder layer may have otherwise than its neighbours.

    Args:
        window: a token sees itself and the ``window - 1`` tokens before it; None: all.
        rope: None for a layer without rotary positions.
        mlp: ``dense`` or ``moe``; ``none``: the layer is its mixer alone, behind one norm (Nemotron-H).
        chunk: a document is cut into chunks of so many tokens from its start, and a token sees those of its own chunk
            (Llama 4); None: all.
        query_growth: queries grow with the position, if those of the model do (``ModelSpec.query_growth``).
        mixer: ``attention``, or what ``ModelSpec.delta`` says: ``gated_delta`` (linear attention) or ``mamba2``;
            ``none``: the layer is its MLP alone, behind one norm.
    """

    window: int | None = None
    rope: Rope | None = Rope()
    mlp: str = "dense"
    chunk: int | None = None
    query_growth: bool = True
    mixer: str = "attention"

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UserError("must be a positive integer", field=name, value=value, accepted="1 or more, none")
        for name, accepted in (("mlp", MLP_KINDS), ("mixer", MIXERS)):
            if getattr(self, name) not in accepted:
                raise UserError("unknown value", field=name, value=getattr(self, name), accepted=" | ".join(accepted))
        if self.mixer == self.mlp == "none":
            raise UserError("a layer has neither mixer nor MLP", field="mlp", value="none", accepted="one of the two")

    @property
    def linear(self) -> bool:
        """Its tokens meet in a state, not pair by pair."""
        return self.mixer in ("gated_delta", "mamba2")

    @property
    def single(self) -> bool:
        """It is a mixer or an MLP alone, behind one norm."""
        return "none" in (self.mixer, self.mlp)

    def shape(self, head_dim: int) -> tuple[Any, ...]:
        """What counts for memory and time."""
        width = self.rope and self.rope.turned(head_dim)
        chunk = () if self.chunk is None else (self.chunk,)
        return self.window, self.mlp, width, *chunk, *(() if self.mixer == "attention" else (self.mixer,))

    @property
    def reach(self) -> int | None:
        """The most tokens that a token sees; None: all."""
        return min((limit for limit in (self.window, self.chunk) if limit is not None), default=None)


MLP_KINDS = ("dense", "moe", "none")
MIXERS = ("attention", "gated_delta", "mamba2", "none")


# Fields that change numbers, but neither memory nor time.
_CONSTANTS = (
    "name", "hf_model_type", "max_position_embeddings", "norm_eps", "norm_offset", "embed_scale", "residual_scale",
    "logit_scale", "attn_scale", "query_growth", "query_growth_length", "query_growth_offset", "swiglu_alpha",
    "swiglu_limit", "init_std", "notices", "dropouts", "mtp_loss_factor", "mtp_said",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only model; ``hf_model_type`` is the Hugging Face family whose config and names say it.

    ``num_kv_heads`` < ``num_heads`` is grouped-query attention. ``tied``: the output head is the embedding matrix.
    ``notices``: what reading the configuration changed, for the user to see; no part of the model's identity. Nor are
    ``dropouts``: keys and rates that the configuration says for training; a run has those of its flags.

    Args:
        layer_kinds: of layer i, entry i modulo their number; stored as the shortest such period.
        norm_placement: ``pre``: before attention and MLP; ``post``: after them, before the residual sum (OLMo 2);
            ``pre_post``: both (Gemma 2).
        norm_offset: added to a norm's weight (Gemma's 1 + w).
        norm_bias: norms of kind ``layer`` have a bias (Cohere's have none).
        parallel_block: attention and MLP take the residual stream of the layer's input, not one after the other:
            through ``one_norm`` (Phi, GPT-J, Cohere), or each through its own (``two_norms``: GPT-NeoX, Falcon 40B).
        qk_norm: of queries and keys: per ``head``, or over the whole ``projection`` (OLMo 2); ``l2``: per head after
            the rotary embedding, without weights, in layers that have one (Llama 4); ``head_layer``: LayerNorm per
            head (Phi), ``each_head``: without a bias, and with weights for each head (Cohere).
        swiglu_alpha, swiglu_limit: of ``clamped_swiglu``, (up + 1) gate sigmoid(alpha gate), where the gate is at most
            the limit and up between it and its negative (gpt-oss).
        embed_scale, residual_scale, logit_scale: factors of the embedding's rows, of what attention and MLP add to the
            residual stream, and of the logits.
        head_bias: the output head has a bias.
        attn_scale: of the scores; None: 1 / sqrt(head_dim).
        attn_softcap, logit_softcap: x becomes c tanh(x / c), of scores and of logits.
        query_growth, query_growth_length, query_growth_offset: queries are multiplied by
            1 + growth x ln(1 + floor((position + offset) / length)) (Llama 4, Ministral 3).
        moe: what the MLP of a layer of kind ``moe`` is.
        sinks: every query head has a learned logit that takes part in the softmax, with no value (gpt-oss).
        mla: attention is multi-head latent attention; ``head_dim`` is what the attention operator sees, and there are
            as many key-value heads as heads.
        attn_gate: what attention puts out is multiplied by the sigmoid of a projection of the token (Qwen3-Next).
        delta: what the mixer of a layer of another kind than ``attention`` is.
        lora: adapters; all that is not of them is frozen.
        mtp_layers: modules after the last layer that predict tokens further ahead (``model/prediction.py``), each with
            a layer of the last one's kind; their numbers follow those of the layers.
        mtp_loss_factor: of the mean over them of their losses, in what is trained; a run may change it.
        mtp_said: how many of them the configuration has, of which a run has those of its flags.
    """

    name: str
    hf_model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm: str = "rms"
    norm_eps: float = 1e-5
    norm_placement: str = "pre"
    norm_offset: float = 0.0
    norm_bias: bool = True
    parallel_block: str | None = None
    activation: str = "swiglu"
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None
    tied: bool = False
    head_bias: bool = False
    position: str = "rope"
    layer_kinds: tuple[LayerKind, ...] = (LayerKind(),)
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attn_scale: float | None = None
    query_growth: float = 0.0
    query_growth_length: int = 1
    query_growth_offset: int = 0
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    sinks: bool = False
    attn_gate: bool = False
    mla: MLA | None = None
    delta: GatedDelta | StateSpace | None = None
    moe: MoE | None = None
    lora: Lora | None = None
    mtp_layers: int = 0
    mtp_loss_factor: float = field(default=0.1, compare=False)
    mtp_said: int = field(default=0, compare=False)
    init_std: float = 0.02
    notices: tuple[str, ...] = field(default=(), compare=False)
    dropouts: tuple[tuple[str, float], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        sizes = (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
        )
        for name in (*sizes, "max_position_embeddings"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise UserError(
                    "must be a positive integer", field=name, value=getattr(self, name), accepted="1 or more"
                )
        self._check_bounds()
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads evenly",
                field="num_kv_heads", value=self.num_kv_heads, accepted=f"a divisor of {self.num_heads}",
            )  # fmt: skip
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(
                    "unknown value", field=name, value=getattr(self, name), accepted=" | ".join(map(str, choices))
                )
        self._check_layers()
        if self.mtp_layers or self.mtp_loss_factor != 0.1:
            self._check_predictions()

    def _check_predictions(self) -> None:
        layers, factor = self.mtp_layers, self.mtp_loss_factor
        if type(layers) is not int or not 0 <= layers <= MAX_LAYERS:
            raise UserError("not a number of modules", field="mtp_layers", value=layers, accepted="0 or more")
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            accepted = "0 or more, finite"
            raise UserError("not a weight of a loss", field="mtp_loss_factor", value=factor, accepted=accepted)
        if layers and self.position == "learned":
            raise UserError(
                "modules that predict further tokens share the embedding of tokens, and learned positions are added to "
                "it on the first stage alone", field="mtp_layers", value=layers, accepted="0, or rotary positions",
            )  # fmt: skip
        if layers and self.lora is not None:
            raise UserError(
                "adapters know no modules that predict further tokens, which neither transformers nor peft has",
                field="--mtp-num-layers", value=layers, accepted="0, or no adapters",
            )  # fmt: skip

    def _check_layers(self) -> None:
        kinds = self.layer_kinds
        if self.parallel_block is not None and self.norm_placement != "pre":
            raise UserError(
                "attention and MLP on one input have their norms before them", field="norm_placement",
                value=self.norm_placement, accepted="pre, or no parallel_block",
            )  # fmt: skip
        if not kinds:
            raise UserError("no layer has a kind", field="layer_kinds", value=[], accepted="at least one")
        if self.position != "rope":
            kinds = tuple(replace(kind, rope=None) for kind in kinds)
        object.__setattr__(self, "layer_kinds", _shortest(kinds, self.num_layers))
        if self.moe is None and any(kind.mlp == "moe" for kind in self.layer_kinds):
            raise UserError("some layer is a mixture of experts", field="moe", value=None, accepted="what its MLP is")
        if self.moe is not None and self.activation not in EXPERT_ACTIVATIONS:
            raise UserError(
                "not an activation of experts", field="activation", value=self.activation,
                accepted=" | ".join(EXPERT_ACTIVATIONS),
            )  # fmt: skip
        if self.delta is None and any(kind.linear for kind in self.layer_kinds):
            raise UserError("some layer has linear attention", field="delta", value=None, accepted="what it is")
        mixer = "attention" if self.delta is None else self.delta.mixer
        if any(kind.linear and kind.mixer != mixer for kind in self.layer_kinds):
            raise UserError("is another mixer than its layers have", field="delta", value=mixer, accepted="one of them")
        single = any(kind.single for kind in self.layer_kinds)
        if single and (self.norm_placement, self.parallel_block) != ("pre", None):
            raise UserError(
                "layers of a mixer or an MLP alone have one norm, before it", field="norm_placement, parallel_block",
                value=[self.norm_placement, self.parallel_block], accepted="pre, none",
            )  # fmt: skip
        if self.mla is not None and (self.head_dim, self.num_kv_heads) != (self.mla.head_dim, self.num_heads):
            raise UserError(
                "does not fit its latent attention", field="head_dim, num_kv_heads",
                value=[self.head_dim, self.num_kv_heads], accepted=f"{self.mla.head_dim}, {self.num_heads}",
            )  # fmt: skip
        for rope in self.ropes:
            rope.check(self.head_dim)

    def _check_bounds(self) -> None:
        factors = {"ffn_hidden_size": 1, "vocab_size": 1, "num_heads": self.head_dim, "max_position_embeddings": 1}
        for name in (*factors, "num_layers", "hidden_size", "head_dim"):
            value, limit = getattr(self, name), MAX_LAYERS if name == "num_layers" else MAX_SIZE
            if value > limit:
                raise UserError("too large", field=name, value=value, accepted=f"at most {limit}")
        for name, factor in factors.items():
            if getattr(self, name) * factor * self.hidden_size > MAX_ELEMENTS:
                raise UserError(
                    f"makes a matrix of more than 2^48 elements with hidden_size {self.hidden_size}", field=name,
                    value=getattr(self, name), accepted="sizes that fit some memory",
                )  # fmt: skip

    @property
    def base(self) -> ModelSpec:
        """The model without adapters."""
        return self if self.lora is None else replace(self, lora=None)

    @property
    def in_few_bits(self) -> bool:
        """The frozen projections of its layers are stored in 8 bits or less."""
        return self.lora is not None and self.lora.base_dtype is not None

    @property
    def in_nf4(self) -> bool:
        """In 4 bits."""
        return self.lora is not None and self.lora.base_dtype == "nf4"

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def plain_head(self) -> bool:
        """Logits are one product and nothing else."""
        return self.logit_softcap is None and not self.head_bias

    @property
    def gated(self) -> bool:
        """MLPs and experts multiply two projections."""
        return self.activation in GATED

    @property
    def mlp_projections(self) -> tuple[str, ...]:
        """Matrices of an MLP, or of each expert, in forward order; those before the last read what goes in."""
        return ("gate_proj", "up_proj", "down_proj") if self.gated else ("up_proj", "down_proj")

    def layer(self, i: int) -> LayerKind:
        """The kind of decoder layer ``i``; of a module that predicts further tokens, that of the last layer."""
        return self.layer_kinds[min(i, self.num_layers - 1) % len(self.layer_kinds)]

    @property
    def predictions(self) -> range:
        """Numbers of the layers of the modules that predict further tokens."""
        return range(self.num_layers, self.num_layers + self.mtp_layers)

    @property
    def embeds_last(self) -> bool:
        """The stage with the head has the embedding's matrix, too: as its own, or for what its modules predict from."""
        return self.tied or self.mtp_layers > 0

    @cached_property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        return tuple(map(self.layer, range(self.num_layers)))

    @cached_property
    def single_blocks(self) -> bool:
        """Some layers are a mixer or an MLP alone."""
        return any(kind.single for kind in self.layer_kinds)

    @property
    def hybrid(self) -> bool:
        """Some layers have linear attention, or are of one block: layers have projections of other names."""
        return self.delta is not None or self.single_blocks

    @property
    def moe_share(self) -> float:
        """Of the layers, those that are mixtures of experts."""
        return sum(kind.mlp == "moe" for kind in self.layers) / self.num_layers if self.moe is not None else 0.0

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different rotary embeddings of its layers, in order of first use."""
        return tuple(dict.fromkeys(kind.rope for kind in self.layer_kinds if kind.rope is not None))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of its layers, in order of first use."""
        return tuple(dict.fromkeys(kind.window for kind in self.layer_kinds))

    def shape(self) -> dict[str, Any]:
        """What counts for memory and time, as JSON: what the optional fields say only where it is not their default, so
        that a field that a later version adds changes nothing for models without it."""
        values: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in _CONSTANTS and f.name != "layer_kinds" and (f.default is MISSING or value != f.default):
                values[f.name] = value.shape() if isinstance(value, MoE | MLA | GatedDelta) else value
        if self.lora is not None:
            values["lora"] = self.lora.shape()
        kinds = [kind.shape(self.head_dim) for kind in self.layer_kinds]
        plain_kind = (None, "dense", self.head_dim if self.position == "rope" else None)
        return values if set(kinds) == {plain_kind} else values | {"layer_kinds": kinds}

    @property
    def widest_window(self) -> int | None:
        """The most tokens that a token sees in some layer; None where it sees all."""
        windows = [kind.reach for kind in self.layer_kinds]
        return None if None in windows else max(reach for reach in windows if reach is not None)


def _shortest(kinds: tuple[LayerKind, ...], layers: int) -> tuple[LayerKind, ...]:
    """The shortest period that repeated gives the same ``layers`` kinds."""
    kinds = tuple(kinds[i % len(kinds)] for i in range(min(layers, len(kinds))))
    all_kinds = [kinds[i % len(kinds)] for i in range(layers)]
    for n in range(1, len(kinds)):
        if all(all_kinds[i] == all_kinds[i - n] for i in range(n, layers)):
            return kinds[:n]
    return kinds
