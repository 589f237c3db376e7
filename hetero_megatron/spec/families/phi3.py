"""Phi-3, Phi-4 and their mini models: fused projections, LongRoPE, in Phi-4-mini over a part of each head."""

from __future__ import annotations

from typing import Any

from hetero_megatron.spec.families.family import DECODER_KEYS, Defaults, Family, decoder, head_sizes, silu_config
from hetero_megatron.spec.hf_names import NameTable
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.model_spec import ModelSpec

_DEFAULTS = Defaults(positions=4096, eps=1e-5, partial_rotary=1.0, original=4096)


def _read(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    heads, _, head_dim = head_sizes(read, _DEFAULTS, divides=True)
    if head_dim * heads != read.integer("hidden_size"):
        raise read.refuse("transformers reads it in some places only", "head_dim", "hidden_size / num_attention_heads")
    window = None if read.value("sliding_window", None) is None else read.integer("sliding_window")
    spec = decoder(read, "phi3", name, _DEFAULTS, windows=(window,))
    scaling = spec.ropes[0].scaling
    if scaling is not None and scaling.kind != "longrope":
        raise read.refuse("transformers knows one way of stretching for this family", "rope_scaling", "longrope")
    return spec


def _write(spec: ModelSpec) -> dict[str, Any]:
    config = silu_config(spec) | {"sliding_window": spec.windows[0], "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    scaling = spec.ropes[0].scaling if spec.ropes else None
    if scaling is not None:
        config["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    return config


FAMILY = Family(
    "phi3", "Phi3ForCausalLM", read=_read, write=_write,
    examples="Phi-3 mini and medium, Phi-3.5-mini, Phi-4, Phi-4-mini",
    keys=DECODER_KEYS | words("hidden_act resid_pdrop embd_pdrop sliding_window"),
    names=NameTable(
        fused={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        },
    ),
)  # fmt: skip
