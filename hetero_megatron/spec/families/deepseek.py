"""DeepSeek-V2 (Lite too) and V3 (R1, V3.1): multi-head latent attention, shared experts, group-limited routers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetero_megatron.spec.families.family import (
    DECODER_KEYS,
    Defaults,
    Family,
    decoder,
    decoder_config,
    num_layers,
)
from hetero_megatron.spec.families.mixtral import read_moe, with_experts
from hetero_megatron.spec.hf_names import NameTable
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.hf_rope import read_rope, write_rope
from hetero_megatron.spec.mla import MLA, score_scale
from hetero_megatron.spec.model_spec import LayerKind, ModelSpec

_V2 = Defaults(positions=2048)
_V3 = Defaults(positions=4096)
PREDICTION_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
_KEYS = DECODER_KEYS | words(
    "hidden_act attention_bias q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim qk_head_dim"
    " n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size first_k_dense_replace moe_layer_freq"
    " routed_scaling_factor n_group topk_group topk_method scoring_func norm_topk_prob aux_loss_alpha seq_aux ep_size"
    " router_aux_loss_coef output_router_logits num_nextn_predict_layers"
)


def _fixed(read: ConfigReader) -> None:
    read.must_be("hidden_act", "silu", "swish")
    read.must_be("moe_layer_freq", 1)  # not read by transformers


def with_more_predictions(read: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """``spec`` with how many layers that predict further tokens the configuration has. A run has them if it asks for
    them: what transformers computes, which does not build them, is the same without."""
    for key in PREDICTION_KEYS:
        if layers := read.integer(key, 0, nullable=True, least=0):
            left_out = f"{read.where}: {key} = {layers}: layers that predict further tokens are left out"
            asking = f"{left_out} (--mtp-num-layers {layers} has them)"
            spec = replace(spec, mtp_said=layers, notices=(*spec.notices, asking))
    return spec


def _read_latent(read: ConfigReader, kv_heads: int | None) -> MLA:
    """``kv_heads``: where the configuration does not say how many there are; None: as many as heads."""
    heads = read.integer("num_attention_heads")
    default_heads = heads if "num_key_value_heads" in read.config else kv_heads or heads
    if read.integer("num_key_value_heads", default_heads, nullable=True) != heads:
        raise read.refuse("latent attention has keys of every head", "num_key_value_heads", str(heads))
    scaling = read.config.get("rope_scaling") or read.config.get("rope_parameters") or {}
    mscale = scaling.get("mscale_all_dim") if isinstance(scaling, dict) else None
    sizes = {
        "kv_rank": read.integer("kv_lora_rank", 512), "nope_dim": read.integer("qk_nope_head_dim", 128),
        "rope_dim": read.integer("qk_rope_head_dim", 64), "v_dim": read.integer("v_head_dim", 128),
    }  # fmt: skip
    q_rank = None if read.value("q_lora_rank", 1536) is None else read.integer("q_lora_rank", 1536)
    if isinstance(mscale, int | float) and not isinstance(mscale, bool):
        mscale = float(mscale)  # anything else is refused with the other keys of the rotary embedding
    else:
        mscale = 0.0
    return MLA(**sizes, q_rank=q_rank, bias=read.flag("attention_bias"), mscale_all_dim=mscale)


def _read(
    read: ConfigReader, model_type: str, name: str, defaults: Defaults, mla: MLA, interleaved: bool,
    **changes: Any,
) -> ModelSpec:  # fmt: skip
    read.must_be("qk_head_dim", mla.qk_dim)
    positions = read.integer("max_position_embeddings", defaults.positions)
    rope, notices = read_rope(read, mla.rope_dim, positions, defaults.theta, interleaved=interleaved)
    if rope.scaling is not None and rope.scaling.kind == "proportional":
        raise read.refuse("not known with latent attention", "rope_scaling", "another rope_type")
    sizes = {"head_dim": mla.rope_dim, "num_key_value_heads": read.integer("num_attention_heads")}
    plain_read = ConfigReader({**read.config, **sizes}, read.where, read.prefix)
    return decoder(
        plain_read, model_type, name, defaults, mla=mla, head_dim=mla.head_dim, out_bias=mla.bias, notices=notices,
        layer_kinds=(LayerKind(rope=replace(rope, dims=mla.rope_dim)),), **changes,
        attn_scale=score_scale(mla, rope.scaling.factor) if rope.scaling is not None else None,
    )  # fmt: skip


def dense_then_experts(
    read: ConfigReader, spec: ModelSpec, width: int, shared: int | None, dense: int, **changes: Any
) -> ModelSpec:
    """``spec`` with experts in all layers but the first ones; ``width``, ``shared`` and ``dense``: the family's
    defaults."""
    columns = read.integer("moe_intermediate_size", width)
    moe = read_moe(
        read, "n_routed_experts", ffn_hidden_size=columns,
        shared_ffn=columns * read.integer("n_shared_experts", shared), **changes,
    )  # fmt: skip
    first = read.integer("first_k_dense_replace", dense, least=0)
    return with_experts(spec, moe, ["dense" if i < first else "moe" for i in range(num_layers(read))])


def _read_v2(read: ConfigReader, name: str) -> ModelSpec:
    _fixed(read)
    read.must_be("scoring_func", "softmax")
    if type(read.value("attention_dropout", 0.0)) is int:
        raise read.refuse("transformers wants a float", "attention_dropout", "0.0")
    read.must_be("norm_topk_prob", False, None)  # not read by transformers
    read.must_be("num_experts", read.config.get("n_routed_experts"))  # the same by another name
    heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
    if hidden % heads:
        raise read.refuse(f"does not divide hidden_size {hidden}", "num_attention_heads", f"a divisor of {hidden}")
    for key in PREDICTION_KEYS:
        read.must_be(key, 0, None)
    mla = _read_latent(read, None)
    read.must_be("head_dim", mla.rope_dim, None)
    spec = _read(read, "deepseek_v2", name, _V2, mla, True, mlp_bias=read.flag("mlp_bias"))
    method = read.value("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise read.refuse("this way of choosing is not supported", "topk_method", "greedy or group_limited_greedy")
    limits = {} if method == "greedy" else {
        "groups": read.integer("n_group"), "top_groups": read.integer("topk_group"),
    }  # fmt: skip
    return dense_then_experts(read, spec, 1407, 2, 0, scale=read.positive("routed_scaling_factor", 1.0), **limits)


def _read_v3(read: ConfigReader, name: str) -> ModelSpec:
    _fixed(read)
    read.must_be("scoring_func", "sigmoid")
    read.must_be("topk_method", "noaux_tc")
    read.must_be("num_local_experts", read.config.get("n_routed_experts"))  # the same by another name
    mla = _read_latent(read, 128)
    read.must_be("head_dim", mla.rope_dim)
    spec = _read(read, "deepseek_v3", name, _V3, mla, read.flag("rope_interleave", True))
    spec = dense_then_experts(
        read, spec, 2048, 1, 3, score="sigmoid", normalize=read.flag("norm_topk_prob", True), score_bias=True,
        scale=read.positive("routed_scaling_factor", 2.5), groups=read.integer("n_group", 8),
        top_groups=read.integer("topk_group", 4), group_size=2,
    )  # fmt: skip
    return with_more_predictions(read, spec)


def expert_config(spec: ModelSpec) -> dict[str, Any]:
    """What these families call the experts of ``spec``."""
    moe = spec.moe
    assert moe is not None
    dense = next((i for i, kind in enumerate(spec.layers) if kind.mlp == "moe"), spec.num_layers)
    return {
        "n_routed_experts": moe.num_experts, "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden_size, "n_shared_experts": moe.shared_ffn // moe.ffn_hidden_size,
        "first_k_dense_replace": dense, "routed_scaling_factor": moe.scale, "n_group": moe.groups,
        "topk_group": moe.top_groups,
    }  # fmt: skip


def _write(spec: ModelSpec) -> dict[str, Any]:
    mla = spec.mla
    assert mla is not None
    config = decoder_config(spec) | write_rope(spec) | expert_config(spec) | {
        "hidden_act": "silu", "attention_bias": mla.bias and spec.out_bias, "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank, "qk_nope_head_dim": mla.nope_dim, "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim,
    }  # fmt: skip
    config.pop("partial_rotary_factor")  # of the features that turn, all do
    if mla.mscale_all_dim and "rope_scaling" in config:
        config["rope_scaling"]["mscale_all_dim"] = mla.mscale_all_dim
    return config


def _write_v2(spec: ModelSpec) -> dict[str, Any]:
    assert spec.moe is not None
    method = "greedy" if spec.moe.groups == 1 else "group_limited_greedy"
    return _write(spec) | {"topk_method": method, "mlp_bias": spec.mlp_bias}


def _write_v3(spec: ModelSpec) -> dict[str, Any]:
    assert spec.moe is not None
    return _write(spec) | {
        "norm_topk_prob": spec.moe.normalize, "rope_interleave": spec.ropes[0].interleaved,
        "num_nextn_predict_layers": spec.mtp_layers,
    }  # fmt: skip


SHARED_EXPERTS = NameTable(modules={
    f"mlp.shared_expert.{one}": f"mlp.shared_experts.{one}" for one in ("gate_proj", "up_proj", "down_proj")
})  # fmt: skip
DEEPSEEK_V2 = Family(
    "deepseek_v2", "DeepseekV2ForCausalLM", _KEYS | words("mlp_bias num_experts"), _read_v2, _write_v2, SHARED_EXPERTS,
    "DeepSeek-V2-Lite, V2, Coder-V2",
)  # fmt: skip
DEEPSEEK_V3 = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM", _KEYS | words("num_local_experts num_mtp_layers rope_interleave"),
    _read_v3, _write_v3, SHARED_EXPERTS, "DeepSeek-V3, V3.1 and R1",
)  # fmt: skip
