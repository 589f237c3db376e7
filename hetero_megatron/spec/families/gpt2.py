"""GPT-2: layer norms, learned positions, biases everywhere, weights stored transposed."""

from __future__ import annotations

from typing import Any

from hetero_megatron.spec.families.family import Family, activation_name, read_activation
from hetero_megatron.spec.hf_names import NameTable
from hetero_megatron.spec.hf_reader import Config, ConfigReader, words
from hetero_megatron.spec.model_spec import MAX_LAYERS, ModelSpec

DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
GPT2_ALIASES = {  # transformers' attribute_map of GPT-2: other name -> own name
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}  # fmt: skip


def _read(read: ConfigReader, name: str) -> ModelSpec:
    read = ConfigReader(own_names(read), read.where)
    read.must_be("scale_attn_weights", True)
    read.must_be("scale_attn_by_inverse_layer_idx", False)
    read.must_be("reorder_and_upcast_attn", False)
    read.must_be("add_cross_attention", False)
    return ModelSpec(
        name=name,
        hf_model_type="gpt2",
        **own_sizes(read),
        max_position_embeddings=read.integer("n_positions", 1024),
        qkv_bias=True,
        out_bias=True,
        tied=read.flag("tie_word_embeddings", True),
        position="learned",
    )


def own_sizes(read: ConfigReader) -> dict[str, Any]:
    """What GPT-2 and GPT-J say alike, by fields of ``ModelSpec``."""
    activation = read_activation(read, "activation_function", "gelu_new")
    hidden, heads = read.integer("n_embd"), read.integer("n_head")
    if hidden % heads:
        raise read.refuse(f"does not divide n_embd {hidden}", "n_head", f"a divisor of {hidden}")
    return {
        "num_layers": read.integer("n_layer", most=MAX_LAYERS), "hidden_size": hidden,
        "ffn_hidden_size": read.integer("n_inner", 4 * hidden, nullable=True), "num_heads": heads,
        "num_kv_heads": heads, "head_dim": hidden // heads, "vocab_size": read.integer("vocab_size"), "norm": "layer",
        "norm_eps": read.positive("layer_norm_epsilon", 1e-5), "activation": activation, "mlp_bias": True,
        "init_std": read.positive("initializer_range", 0.02),
    }  # fmt: skip


def own_names(read: ConfigReader) -> Config:
    """GPT-2's keys, and GPT-J's, under their own names. Under both names with two values, transformers takes the other
    name's."""
    config = dict(read.config)
    for alias, main_key in GPT2_ALIASES.items():
        if alias in config and config.setdefault(main_key, config[alias]) != config[alias]:
            raise read.refuse(f"the same setting is {main_key} = {config[main_key]}", alias, "one of the two names")
    return config


def _write(spec: ModelSpec) -> dict[str, Any]:
    return {
        "n_layer": spec.num_layers,
        "n_embd": spec.hidden_size,
        "n_head": spec.num_heads,
        "n_inner": spec.ffn_hidden_size,
        "vocab_size": spec.vocab_size,
        "n_positions": spec.max_position_embeddings,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": activation_name(spec),
        "tie_word_embeddings": spec.tied,
        "initializer_range": spec.init_std,
        **dict.fromkeys(DROPOUTS, 0.0),
    }


FAMILY = Family(
    "gpt2", "GPT2LMHeadModel", read=_read, write=_write, examples="GPT-2",
    keys=words(
        "architectures n_embd n_layer n_head n_positions n_inner vocab_size activation_function layer_norm_epsilon"
        " initializer_range tie_word_embeddings scale_attn_weights scale_attn_by_inverse_layer_idx"
        " reorder_and_upcast_attn add_cross_attention"
    ) | {*DROPOUTS, *GPT2_ALIASES},
    absent_dropout=0.1,
    names=NameTable(
        layer="transformer.h.{}",
        modules={
            "input_layernorm": "ln_1", "self_attn.o_proj": "attn.c_proj", "post_attention_layernorm": "ln_2",
            "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj",
        },
        fused={"attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
        transposed=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
        outside={
            "model.embed_tokens.weight": "transformer.wte.weight",
            "model.embed_positions.weight": "transformer.wpe.weight",
            "model.norm.weight": "transformer.ln_f.weight", "model.norm.bias": "transformer.ln_f.bias",
        },
    ),
)  # fmt: skip
