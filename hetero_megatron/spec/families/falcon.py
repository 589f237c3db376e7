"""Falcon: attention and MLP on one input through one norm (7B, 11B) or two (40B, 180B), or one after the other (RW)."""

from __future__ import annotations

from typing import Any

from hetero_megatron.spec.families.family import (
    DECODER_KEYS,
    Defaults,
    Family,
    activation_name,
    decoder,
    layer_norm_config,
    read_activation,
    refuse_other_head_dim,
)
from hetero_megatron.spec.hf_names import NameTable
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.model_spec import ModelSpec

_DEFAULTS = Defaults(positions=2048, tied=True)


def _read(read: ConfigReader, name: str) -> ModelSpec:
    if read.value("alibi", False, nullable=True) is not False:
        raise read.refuse("position biases (ALiBi) are not supported", "alibi", "false")
    read.must_be("apply_residual_connection_post_layernorm", False)
    refuse_other_head_dim(read)
    hidden = read.integer("hidden_size")
    read.must_be("n_embed", hidden, None)  # the same by another name
    ffn = read.integer("ffn_hidden_size", 4 * hidden, nullable=True)
    read.must_be("ff_factor", *(x for x in (ffn // hidden, ffn / hidden) if x * hidden == ffn), None)
    sizes = {"num_key_value_heads": _kv_heads(read), "intermediate_size": ffn}
    bias = read.flag("bias")
    return decoder(
        ConfigReader({**read.config, **sizes}, read.where), "falcon", name, _DEFAULTS, norm="layer",
        norm_eps=read.positive("layer_norm_epsilon", 1e-5), parallel_block=_parallel_block(read),
        activation=read_activation(read, "activation", "gelu"), qkv_bias=bias, out_bias=bias, mlp_bias=bias,
    )  # fmt: skip


def _kv_heads(read: ConfigReader) -> int:
    heads = read.integer("num_attention_heads")
    if read.flag("new_decoder_architecture"):
        return read.integer("num_kv_heads", heads, nullable=True)
    if read.flag("multi_query", True):
        return 1  # num_kv_heads is not read
    if read.integer("num_kv_heads", heads, nullable=True) != heads:
        raise read.refuse("without multi_query every head has keys of its own", "num_kv_heads", f"{heads} or null")
    return heads


def _parallel_block(read: ConfigReader) -> str | None:
    """Combinations that transformers cannot run are refused."""
    new, norms = read.flag("new_decoder_architecture"), read.value("num_ln_in_parallel_attn", None)
    if not read.flag("parallel_attn", True):
        if new:
            raise read.refuse("new_decoder_architecture has both in parallel", "parallel_attn", "true")
        return None
    accepted = (None, 1, 2) if new else (None, 1)
    if norms not in accepted or isinstance(norms, bool):
        raise read.refuse(
            f"not with new_decoder_architecture {str(new).lower()}", "num_ln_in_parallel_attn",
            ", ".join("null" if n is None else str(n) for n in accepted),
        )  # fmt: skip
    return "two_norms" if new and norms != 1 else "one_norm"


def _write(spec: ModelSpec) -> dict[str, Any]:
    config = layer_norm_config(spec, "layer_norm_epsilon")
    new = spec.num_kv_heads not in (1, spec.num_heads) or spec.parallel_block == "two_norms"
    norms = {None: None, "one_norm": 1, "two_norms": 2}[spec.parallel_block]
    return config | {
        "num_kv_heads": config.pop("num_key_value_heads"), "ffn_hidden_size": config.pop("intermediate_size"),
        "activation": activation_name(spec), "bias": spec.qkv_bias and spec.out_bias and spec.mlp_bias,
        "new_decoder_architecture": new, "multi_query": spec.num_kv_heads == 1, "num_ln_in_parallel_attn": norms,
        "parallel_attn": spec.parallel_block is not None, "alibi": False, "hidden_dropout": 0.0,
    }  # fmt: skip


FAMILY = Family(
    "falcon", "FalconForCausalLM", read=_read, write=_write, examples="Falcon 7B, 11B, 40B, 180B",
    keys=DECODER_KEYS - words("num_key_value_heads intermediate_size") | words(
        "num_kv_heads ffn_hidden_size ff_factor n_embed activation layer_norm_epsilon bias alibi multi_query"
        " new_decoder_architecture parallel_attn num_ln_in_parallel_attn hidden_dropout"
        " apply_residual_connection_post_layernorm"
        " auto_map"  # code from before transformers had the family
    ),
    names=NameTable(
        layer="transformer.h.{}",
        modules={
            "self_attn.o_proj": "self_attention.dense", "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        two_norms={"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"},
        fused={"self_attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
        by_group={"self_attention.query_key_value": "kv_heads"},
        outside={
            "model.embed_tokens.weight": "transformer.word_embeddings.weight",
            "model.norm.weight": "transformer.ln_f.weight", "model.norm.bias": "transformer.ln_f.bias",
        },
    ),
)  # fmt: skip
