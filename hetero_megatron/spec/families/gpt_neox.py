"""LayerNorm, an MLP without a gate, and attention and MLP on one input: GPT-NeoX (Pythia), GPT-J, Phi-1 to Phi-2."""

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
    some_features_turn,
)
from hetero_megatron.spec.families.gpt2 import DROPOUTS, GPT2_ALIASES, own_names, own_sizes
from hetero_megatron.spec.hf_names import NameTable
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.model_spec import LayerKind, ModelSpec
from hetero_megatron.spec.rope import Rope

_NEOX = Defaults(positions=2048, partial_rotary=0.25)
_PHI = Defaults(positions=2048, partial_rotary=0.5)
_UNREAD_DROPOUTS = ("attention_probs_dropout_prob", "hidden_dropout_prob")  # in GPT-NeoX-20B's configuration
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _read_neox(read: ConfigReader, name: str) -> ModelSpec:
    read.must_be("num_key_value_heads", read.integer("num_attention_heads"), None)
    refuse_other_head_dim(read)
    for key in _UNREAD_DROPOUTS:
        read.must_be(key, 0, 0.0)
    theta, share = read.positive("rotary_emb_base", 10000.0), read.positive("rotary_pct", 0.25)
    for key, counts in (("rope_theta", theta), ("partial_rotary_factor", share)):
        if key in read.config and read.config[key] != counts:  # transformers writes it beside its own, and reads that
            own_key = "rotary_emb_base" if key == "rope_theta" else "rotary_pct"
            raise read.refuse(f"transformers reads {own_key} ({counts:g}) instead", key, f"{counts:g}, or {own_key}")
    rope_keys = {"rope_theta": theta, "partial_rotary_factor": share}
    bias = read.flag("attention_bias", True)
    return decoder(
        ConfigReader({**read.config, **rope_keys}, read.where), "gpt_neox", name, _NEOX, norm="layer",
        norm_eps=read.positive("layer_norm_eps", 1e-5), activation=read_activation(read, "hidden_act", "gelu"),
        parallel_block="two_norms" if read.flag("use_parallel_residual", True) else None,
        qkv_bias=bias, out_bias=bias, mlp_bias=True,
    )  # fmt: skip


def _write_neox(spec: ModelSpec) -> dict[str, Any]:
    config = {"partial_rotary_factor": 1.0} | layer_norm_config(spec, "layer_norm_eps")
    del config["num_key_value_heads"]
    return config | {
        "rotary_emb_base": config.pop("rope_theta"), "rotary_pct": config.pop("partial_rotary_factor"),
        "use_parallel_residual": spec.parallel_block is not None, "hidden_act": activation_name(spec),
        "attention_bias": spec.qkv_bias and spec.out_bias, "hidden_dropout": 0.0,
    }  # fmt: skip


def _read_gptj(read: ConfigReader, name: str) -> ModelSpec:
    read = ConfigReader(own_names(read), read.where)
    read.must_be("scale_attn_weights", True)
    read.must_be("rotary", True)
    sizes = own_sizes(read)
    width, turned = sizes["head_dim"], read.integer("rotary_dim", 64)
    if turned % 2 or turned > width:
        raise read.refuse("turns pairs of a head's features", "rotary_dim", f"an even number up to {width}")
    return ModelSpec(
        name=name,
        hf_model_type="gptj",
        **sizes,
        max_position_embeddings=read.integer("n_positions", 2048),
        parallel_block="one_norm",
        tied=read.flag("tie_word_embeddings"),
        head_bias=True,
        layer_kinds=(LayerKind(rope=Rope(dims=None if turned == width else turned, interleaved=True)),),
    )


def _write_gptj(spec: ModelSpec) -> dict[str, Any]:
    return {
        "n_layer": spec.num_layers, "n_embd": spec.hidden_size, "n_head": spec.num_heads,
        "n_inner": spec.ffn_hidden_size, "vocab_size": spec.vocab_size, "n_positions": spec.max_position_embeddings,
        "rotary_dim": spec.ropes[0].turned(spec.head_dim) if spec.ropes else 0,
        "layer_norm_epsilon": spec.norm_eps, "activation_function": activation_name(spec),
        "tie_word_embeddings": spec.tied, "initializer_range": spec.init_std, **dict.fromkeys(DROPOUTS, 0.0),
    }  # fmt: skip


def _read_phi(read: ConfigReader, name: str) -> ModelSpec:
    normed = read.flag("qk_layernorm")
    if normed:  # whose width is hidden_size / heads
        refuse_other_head_dim(read)
    spec = decoder(
        read, "phi", name, _PHI, norm="layer", norm_eps=read.positive("layer_norm_eps", 1e-5),
        activation=read_activation(read, "hidden_act", "gelu_new"), parallel_block="one_norm",
        qk_norm="head_layer" if normed else None, qkv_bias=True, out_bias=True, mlp_bias=True, head_bias=True,
    )  # fmt: skip
    return some_features_turn(read, spec)


def _write_phi(spec: ModelSpec) -> dict[str, Any]:
    config = {"partial_rotary_factor": 1.0} | layer_norm_config(spec, "layer_norm_eps")  # absent means one half
    if spec.head_dim * spec.num_heads != spec.hidden_size:
        config["head_dim"] = spec.head_dim
    return config | {
        "hidden_act": activation_name(spec), "qk_layernorm": spec.qk_norm is not None, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    }  # fmt: skip


GPT_NEOX = Family(
    "gpt_neox", "GPTNeoXForCausalLM", read=_read_neox, write=_write_neox, examples="GPT-NeoX-20B, Pythia 14M to 12B",
    keys=DECODER_KEYS | words(
        "hidden_act layer_norm_eps use_parallel_residual attention_bias rotary_pct rotary_emb_base hidden_dropout"
    ) | {*_UNREAD_DROPOUTS},
    names=NameTable(
        layer="gpt_neox.layers.{}",
        modules={
            "self_attn.o_proj": "attention.dense", "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        fused={"attention.query_key_value": _QKV}, by_group={"attention.query_key_value": "kv_heads"},
        outside={
            "model.embed_tokens.weight": "gpt_neox.embed_in.weight", "lm_head.weight": "embed_out.weight",
            "model.norm.weight": "gpt_neox.final_layer_norm.weight",
            "model.norm.bias": "gpt_neox.final_layer_norm.bias",
        },
    ),
)  # fmt: skip
GPTJ = Family(
    "gptj", "GPTJForCausalLM", read=_read_gptj, write=_write_gptj, examples="GPT-J-6B",
    keys=words(
        "architectures n_embd n_layer n_head n_positions n_inner vocab_size rotary_dim rotary activation_function"
        " layer_norm_epsilon initializer_range tie_word_embeddings scale_attn_weights"
    ) | {*DROPOUTS, *GPT2_ALIASES},
    names=NameTable(
        layer="transformer.h.{}",
        modules={
            "input_layernorm": "ln_1", "self_attn.q_proj": "attn.q_proj", "self_attn.k_proj": "attn.k_proj",
            "self_attn.v_proj": "attn.v_proj", "self_attn.o_proj": "attn.out_proj", "mlp.up_proj": "mlp.fc_in",
            "mlp.down_proj": "mlp.fc_out",
        },
        outside={
            "model.embed_tokens.weight": "transformer.wte.weight", "model.norm.weight": "transformer.ln_f.weight",
            "model.norm.bias": "transformer.ln_f.bias",
        },
    ),
)  # fmt: skip
PHI = Family(
    "phi", "PhiForCausalLM", read=_read_phi, write=_write_phi, examples="Phi-1, Phi-1.5, Phi-2",
    keys=DECODER_KEYS | words("hidden_act layer_norm_eps qk_layernorm resid_pdrop embd_pdrop"),
    names=NameTable(
        modules={
            "self_attn.o_proj": "self_attn.dense", "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2",
        },
        outside={
            "model.norm.weight": "model.final_layernorm.weight", "model.norm.bias": "model.final_layernorm.bias",
        },
    ),
)  # fmt: skip
