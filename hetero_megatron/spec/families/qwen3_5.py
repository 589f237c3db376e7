"""Qwen3.5's language models, dense and with experts: the layers of Qwen3-Next, stored otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetero_megatron.spec.families.family import (
    DECODER_KEYS,
    FULL,
    LINEAR,
    Defaults,
    Family,
    Wrapper,
    decoder,
    head_sizes,
    num_layers,
    silu_config,
)
from hetero_megatron.spec.families.mixtral import read_moe, with_experts
from hetero_megatron.spec.families.qwen_next import DELTA_SIZES, read_delta, read_mixers
from hetero_megatron.spec.hf_names import FusedExperts, NameTable
from hetero_megatron.spec.hf_reader import Config, ConfigReader, words
from hetero_megatron.spec.hf_rope import read_rope
from hetero_megatron.spec.model_spec import LayerKind, ModelSpec

_DENSE = Defaults(positions=32768, kv_heads=4, kv_nullable=False, head_dim=256, partial_rotary=0.25, eps=1e-6)
_MOE = replace(_DENSE, kv_heads=2)
_MROPE = ("mrope_section", "mrope_interleaved")  # which positions turn which features: those of text are all the same
_MTP = "mtp_num_hidden_layers"
_EXPERT_SIZES = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}


def _of_text(read: ConfigReader) -> ConfigReader:
    """The configuration without what its rotary embedding says of images."""
    config: dict[str, Any] = dict(read.config)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := config.get(key), dict):
            _check_mrope(rope, read.where, f"{key}.")
            config[key] = {name: value for name, value in rope.items() if name not in _MROPE}
    return ConfigReader(config, read.where, read.prefix)


def _check_mrope(rope: Config, where: str, prefix: str) -> None:
    inner = ConfigReader(rope, where, prefix)
    inner.must_be("mrope_interleaved", True, False, None)
    section = rope.get("mrope_section", [])
    if not isinstance(section, list) or len(section) not in (0, 3) or any(type(n) is not int or n < 0 for n in section):
        raise inner.refuse("must be three numbers of pairs of features", "mrope_section", "such as [11, 11, 10]")


def _read(read: ConfigReader, name: str, model_type: str, defaults: Defaults, **changes: Any) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    read.must_be("attn_output_gate", True)  # of released files; not read by transformers
    read.must_be("mamba_ssm_dtype", "float32", None)
    read.must_be("mlp_only_layers", [], None)
    read = _of_text(read)
    head_dim, positions = head_sizes(read, defaults)[2], read.integer("max_position_embeddings", defaults.positions)
    rope, notices = read_rope(read, head_dim, positions, defaults.theta, defaults.partial_rotary)
    if predicting := read.integer(_MTP, 0, nullable=True, least=0):
        notices += (f"{read.where}: {_MTP} = {predicting}: layers that predict further tokens are left out",)
    kinds = [
        LayerKind(rope=rope) if kind == FULL else LayerKind(rope=None, mixer="gated_delta")
        for kind in read_mixers(read)
    ]
    bias = read.flag("attention_bias")
    return decoder(
        read, model_type, name, defaults, qkv_bias=bias, out_bias=bias, qk_norm="head", norm_offset=1.0,
        attn_gate=True, layer_kinds=tuple(kinds), notices=notices,
        delta=read_delta(read, read.positive("rms_norm_eps", defaults.eps)), **changes,
    )  # fmt: skip


def _read_dense(read: ConfigReader, name: str) -> ModelSpec:
    return _read(read, name, "qwen3_5_text", _DENSE)


def _read_moe(read: ConfigReader, name: str) -> ModelSpec:
    """All layers have experts, so that the width of a dense MLP says nothing."""
    read.must_be("norm_topk_prob", True)
    read.must_be("decoder_sparse_step", 1)
    width, shared = (read.integer(key, default) for key, default in _EXPERT_SIZES.items())
    sized = ConfigReader({**read.config, "intermediate_size": width}, read.where, read.prefix)
    spec = _read(sized, name, "qwen3_5_moe_text", _MOE)
    counts = ConfigReader({"num_experts": 256, "num_experts_per_tok": 8, **read.config}, read.where, read.prefix)
    moe = read_moe(
        counts, "num_experts", ffn_hidden_size=width, normalize=True, shared_gate=True, shared_ffn=shared
    )
    return with_experts(spec, moe, ["moe"] * num_layers(read))


def _write(spec: ModelSpec) -> dict[str, Any]:
    assert spec.delta is not None
    config = silu_config(spec) | {
        "layer_types": [LINEAR if kind.linear else FULL for kind in spec.layers],
        "attention_bias": spec.qkv_bias and spec.out_bias,
        **{key: getattr(spec.delta, field) for key, (field, _) in DELTA_SIZES.items()},
    }
    return {"partial_rotary_factor": 1.0} | config  # absent means a quarter


def _write_moe(spec: ModelSpec) -> dict[str, Any]:
    moe = spec.moe
    assert moe is not None
    config = _write(spec) | {
        "num_experts": moe.num_experts, "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden_size, "shared_expert_intermediate_size": moe.shared_ffn,
    }  # fmt: skip
    config.pop("intermediate_size")
    return config


def _names(stacked: FusedExperts | None = None) -> NameTable:
    return NameTable(
        modules={
            "linear_attn.o_proj": "linear_attn.out_proj",
            **{f"linear_attn.{letter}_proj": f"linear_attn.in_proj_{letter}" for letter in "zba"},
        },
        fused={
            "self_attn.q_proj": ("self_attn.q_proj", "self_attn.g_proj"),
            "linear_attn.in_proj_qkv": tuple(f"linear_attn.{letter}_proj" for letter in "qkv"),
            "linear_attn.conv1d": tuple(f"linear_attn.{letter}_conv" for letter in "qkv"),
        },
        by_group={"self_attn.q_proj": "heads"}, filters=frozenset({"linear_attn.conv1d"}), stacked=stacked,
    )  # fmt: skip


def _inside(model_type: str, causal_lm: str) -> Wrapper:
    return Wrapper(
        model_type, causal_lm.replace("CausalLM", "ConditionalGeneration"), "model.language_model.",
        ("model.visual.",), words(
            "vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id language_model_only"
        ), plain="model.",
    )  # fmt: skip


_KEYS = DECODER_KEYS | frozenset(DELTA_SIZES) | words(
    "hidden_act attention_bias layer_types full_attention_interval attn_output_gate mamba_ssm_dtype mlp_only_layers"
    f" {_MTP} mtp_use_dedicated_embeddings"
)  # fmt: skip
QWEN3_5 = Family(
    "qwen3_5_text", "Qwen3_5ForCausalLM", _KEYS, _read_dense, _write, _names(),
    "the language models of Qwen3.5-0.8B to 27B", _inside("qwen3_5", "Qwen3_5ForCausalLM"), ("mtp.",),
)  # fmt: skip
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _KEYS | _EXPERT_SIZES.keys() | words(
        "num_experts num_experts_per_tok norm_topk_prob decoder_sparse_step router_aux_loss_coef output_router_logits"
    ), _read_moe, _write_moe, _names(FusedExperts(transposed=False)),
    "the language models of Qwen3.5-35B-A3B to 397B-A17B", _inside("qwen3_5_moe", "Qwen3_5MoeForCausalLM"), ("mtp.",),
)  # fmt: skip
