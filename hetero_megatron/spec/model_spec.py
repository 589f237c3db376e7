"""The configuration of a GPT-family decoder: everything that changes its numbers, nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetero_megatron.errors import UserError

# Beyond these, sizes overflow (int64 bytes) or exhaust memory before anything can be said about them.
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 100_000
MAX_ELEMENTS = 2**48  # of one matrix


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched: ``linear`` (by ``factor``) or ``llama3`` (by wavelength)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only model; ``naming`` picks the Hugging Face name table (``llama`` covers Mistral and Qwen).

    ``num_kv_heads`` < ``num_heads`` is grouped-query attention. ``sliding_window``: a token sees itself and
    the ``sliding_window - 1`` tokens before it. ``tied``: the output head is the embedding matrix. ``notices``:
    what reading the configuration changed, for the user to see; no part of the model's identity.
    """

    name: str
    naming: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm: str = "rms"  # rms | layer
    norm_eps: float = 1e-5
    activation: str = "swiglu"  # swiglu | gelu | gelu_tanh | squared_relu
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    position: str = "rope"  # rope | learned
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    init_std: float = 0.02
    hf_model_type: str = "llama"
    notices: tuple[str, ...] = field(default=(), compare=False)

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
        if self.position == "rope" and self.head_dim % 2:
            raise UserError(
                "rotary embedding turns pairs of features",
                field="head_dim",
                value=self.head_dim,
                accepted="an even number",
            )
        choices = {
            "naming": ("llama", "gpt2"), "norm": ("rms", "layer"), "position": ("rope", "learned"),
            "activation": ("swiglu", "gelu", "gelu_tanh", "squared_relu"),
        }  # fmt: skip
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise UserError("unknown value", field=name, value=getattr(self, name), accepted=" | ".join(known))

    def _check_bounds(self) -> None:
        wide = {"ffn_hidden_size": 1, "vocab_size": 1, "num_heads": self.head_dim, "max_position_embeddings": 1}
        for name in (*wide, "num_layers", "hidden_size", "head_dim"):
            value, most = getattr(self, name), MAX_LAYERS if name == "num_layers" else MAX_SIZE
            if value > most:
                raise UserError("too large", field=name, value=value, accepted=f"at most {most}")
        for name, factor in wide.items():
            if getattr(self, name) * factor * self.hidden_size > MAX_ELEMENTS:
                raise UserError(
                    f"makes a matrix of more than 2^48 elements with hidden_size {self.hidden_size}", field=name,
                    value=getattr(self, name), accepted="sizes that fit some memory",
                )  # fmt: skip

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads
