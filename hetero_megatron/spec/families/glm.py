"""GLM-4 (``glm``) and GLM-4-0414 (``glm4``): interleaved rotary pairs over half of each head, fused gate and up.
GLM-4.5 (``glm4_moe``), and dots.llm1 beside it: experts as DeepSeek-V3 has them, with ordinary attention."""

from __future__ import annotations

from typing import Any

from hetero_megatron.spec.families.deepseek import (
    SHARED_EXPERTS,
    dense_then_experts,
    expert_config,
    with_more_predictions,
)
from hetero_megatron.spec.families.family import (
    DECODER_KEYS,
    FULL,
    SLIDING,
    Defaults,
    Family,
    decoder,
    head_sizes,
    layer_type_config,
    layer_types,
    num_layers,
    silu_config,
)
from hetero_megatron.spec.hf_names import NameTable
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.hf_rope import read_rope
from hetero_megatron.spec.model_spec import LayerKind, ModelSpec

_DENSE = Defaults(
    positions=131072, kv_heads=2, kv_nullable=False, head_dim=128, eps=1.5625e-7, partial_rotary=0.5
)
_DENSE_KEYS = DECODER_KEYS | words("hidden_act attention_bias")
_FUSED = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_GLM4_MOE = Defaults(positions=131072, kv_heads=8, kv_nullable=False, eps=1e-5, partial_rotary=0.5)
_DOTS = Defaults(positions=2048, kv_heads=32)
_MOE_KEYS = DECODER_KEYS | words(
    "hidden_act attention_bias n_routed_experts num_local_experts n_shared_experts num_experts_per_tok"
    " moe_intermediate_size first_k_dense_replace routed_scaling_factor n_group topk_group norm_topk_prob"
    " output_router_logits router_aux_loss_coef"
)


def _read_dense(read: ConfigReader, model_type: str, name: str, **changes: Any) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    bias = read.flag("attention_bias", True)
    return decoder(read, model_type, name, _DENSE, interleaved=True, qkv_bias=bias, **changes)


def _read_glm(read: ConfigReader, name: str) -> ModelSpec:
    return _read_dense(read, "glm", name)


def _read_glm4(read: ConfigReader, name: str) -> ModelSpec:
    return _read_dense(read, "glm4", name, norm_placement="pre_post")


def _write_dense(spec: ModelSpec) -> dict[str, Any]:
    config = silu_config(spec) | {"attention_bias": spec.qkv_bias}
    return {"partial_rotary_factor": 1.0} | config  # absent means one half


def _fixed(read: ConfigReader) -> None:
    read.must_be("hidden_act", "silu", "swish")
    read.must_be("num_local_experts", read.config.get("n_routed_experts"))  # the same by another name


def _experts(read: ConfigReader, spec: ModelSpec, shared: int | None, dense: int, normalize: bool) -> ModelSpec:
    return dense_then_experts(
        read, spec, 1408, shared, dense, score="sigmoid", normalize=read.flag("norm_topk_prob", normalize),
        score_bias=True, scale=read.positive("routed_scaling_factor", 1.0), groups=read.integer("n_group", 1),
        top_groups=read.integer("topk_group", 1), group_size=2,
    )  # fmt: skip


def _read_glm4_moe(read: ConfigReader, name: str) -> ModelSpec:
    _fixed(read)
    spec = decoder(
        read, "glm4_moe", name, _GLM4_MOE, qkv_bias=read.flag("attention_bias"),
        qk_norm="head" if read.flag("use_qk_norm") else None,
    )  # fmt: skip
    return with_more_predictions(read, _experts(read, spec, 1, 1, True))


def _write_glm4_moe(spec: ModelSpec) -> dict[str, Any]:
    assert spec.moe is not None
    config = {"partial_rotary_factor": 1.0} | silu_config(spec) | expert_config(spec)  # absent means one half
    return config | {
        "attention_bias": spec.qkv_bias, "use_qk_norm": spec.qk_norm == "head",
        "num_nextn_predict_layers": spec.mtp_layers,
        "norm_topk_prob": spec.moe.normalize,
    }  # fmt: skip


def _read_dots(read: ConfigReader, name: str) -> ModelSpec:
    _fixed(read)
    layers = num_layers(read)
    window = None if read.value("sliding_window", 4096) is None else read.integer("sliding_window", 4096)
    first = read.integer("max_window_layers", 62, least=0)
    sliding = [window is not None and i >= first for i in range(layers)]
    kinds = layer_types(read, [SLIDING if one else FULL for one in sliding], window)
    head_dim, positions = head_sizes(read, _DOTS)[2], read.integer("max_position_embeddings", _DOTS.positions)
    rope, notices = read_rope(read, head_dim, positions)
    bias = read.flag("attention_bias")
    spec = decoder(
        read, "dots1", name, _DOTS, qkv_bias=bias, out_bias=bias, qk_norm="head", notices=notices,
        layer_kinds=tuple(LayerKind(window if kind == SLIDING else None, rope) for kind in kinds),
    )  # fmt: skip
    return _experts(read, spec, None, 0, False)


def _write_dots(spec: ModelSpec) -> dict[str, Any]:
    assert spec.moe is not None
    return silu_config(spec) | layer_type_config(spec) | expert_config(spec) | {
        "attention_bias": spec.qkv_bias and spec.out_bias, "norm_topk_prob": spec.moe.normalize,
    }  # fmt: skip


GLM = Family(
    "glm", "GlmForCausalLM", _DENSE_KEYS, _read_glm, _write_dense, NameTable(fused=_FUSED), "GLM-4-9B, GLM-Edge"
)
GLM4 = Family(
    "glm4", "Glm4ForCausalLM", _DENSE_KEYS, _read_glm4, _write_dense, examples="GLM-4-9B-0414, GLM-4-32B-0414",
    names=NameTable(
        fused=_FUSED,
        modules={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
    ),
)  # fmt: skip
GLM4_MOE = Family(
    "glm4_moe", "Glm4MoeForCausalLM", _MOE_KEYS | words("use_qk_norm num_nextn_predict_layers num_mtp_layers"),
    _read_glm4_moe, _write_glm4_moe, SHARED_EXPERTS, "GLM-4.5, 4.5-Air, 4.6",
)  # fmt: skip
DOTS1 = Family(
    "dots1", "Dots1ForCausalLM", _MOE_KEYS | words("sliding_window max_window_layers layer_types"), _read_dots,
    _write_dots, SHARED_EXPERTS, "dots.llm1",
)  # fmt: skip
