"""Cohere's Command-R and Command-R7B: SwiGLU and attention on one input, LayerNorm without bias, scaled logits."""

from __future__ import annotations

from typing import Any

from hetero_megatron.spec.families.family import (
    DECODER_KEYS,
    FULL,
    SLIDING,
    Defaults,
    Family,
    decoder,
    head_sizes,
    layer_norm_config,
    layer_type_config,
    layer_types,
    num_layers,
)
from hetero_megatron.spec.hf_names import NameTable
from hetero_megatron.spec.hf_reader import ConfigReader, words
from hetero_megatron.spec.hf_rope import read_rope
from hetero_megatron.spec.model_spec import LayerKind, ModelSpec

_COHERE = Defaults(positions=8192, tied=True, theta=500000.0)
_COHERE2 = Defaults(positions=8192, tied=True)
_KEYS = DECODER_KEYS | words("hidden_act layer_norm_eps attention_bias logit_scale")


def _read_both(read: ConfigReader, model_type: str, name: str, defaults: Defaults, **changes: Any) -> ModelSpec:
    read.must_be("hidden_act", "silu", "swish")
    bias = read.flag("attention_bias")
    return decoder(
        read, model_type, name, defaults, norm="layer", norm_bias=False, parallel_block="one_norm",
        norm_eps=read.positive("layer_norm_eps", 1e-5), logit_scale=read.positive("logit_scale", 0.0625),
        qkv_bias=bias, out_bias=bias, **changes,
    )  # fmt: skip


def _write_both(spec: ModelSpec) -> dict[str, Any]:
    return layer_norm_config(spec, "layer_norm_eps") | {
        "head_dim": spec.head_dim, "hidden_act": "silu", "attention_bias": spec.qkv_bias and spec.out_bias,
        "logit_scale": spec.logit_scale,
    }  # fmt: skip


def _read_cohere(read: ConfigReader, name: str) -> ModelSpec:
    normed = read.value("use_qk_norm", None) is not None and read.flag("use_qk_norm")
    return _read_both(read, "cohere", name, _COHERE, interleaved=True, qk_norm="each_head" if normed else None)


def _read_cohere2(read: ConfigReader, name: str) -> ModelSpec:
    for key, allowed_values in _COHERE2_FIXED.items():
        read.must_be(key, *allowed_values)
    read.must_be("use_embedding_sharing", read.flag("tie_word_embeddings", True))
    window = None if read.value("sliding_window", 4096) is None else read.integer("sliding_window", 4096)
    period = read.integer("sliding_window_pattern", 4)
    if read.config.get("layer_types") is None:
        read.must_be("layer_switch", period)  # the same by the name in Cohere's own code
    pattern = [FULL if (i + 1) % period == 0 else SLIDING for i in range(num_layers(read))]
    kinds = layer_types(read, pattern, window)
    head_dim, positions = head_sizes(read, _COHERE2)[2], read.integer("max_position_embeddings", _COHERE2.positions)
    rope, notices = read_rope(read, head_dim, positions, _COHERE2.theta, interleaved=True)
    sliding_kind, full_kind = LayerKind(window, rope), LayerKind(rope=None)
    return _read_both(
        read, "cohere2", name, _COHERE2, notices=notices,
        layer_kinds=tuple(sliding_kind if kind == SLIDING else full_kind for kind in kinds),
    )  # fmt: skip


def _write_cohere2(spec: ModelSpec) -> dict[str, Any]:
    return _write_both(spec) | layer_type_config(spec)


# What Command-R7B's configuration says beside what transformers reads, with the values of the model that it builds.
_COHERE2_FIXED: dict[str, tuple[Any, ...]] = {
    "order_of_interleaved_layers": ("local_attn_first",), "position_embedding_type": ("rope_gptj",),
    "rotary_pct": (1.0, 1), "use_gated_activation": (True,), "use_parallel_block": (True,),
    "use_parallel_embedding": (False,),
}  # fmt: skip
COHERE = Family(
    "cohere", "CohereForCausalLM", read=_read_cohere, examples="Command-R, Command-R+, Aya-23, Aya Expanse",
    keys=_KEYS | words("use_qk_norm"),
    write=lambda spec: _write_both(spec) | {"use_qk_norm": spec.qk_norm is not None},
    names=NameTable(head_rows=frozenset({"self_attn.q_norm", "self_attn.k_norm"})),
)  # fmt: skip
COHERE2 = Family(
    "cohere2", "Cohere2ForCausalLM", read=_read_cohere2, write=_write_cohere2, examples="Command-R7B, Command-A",
    keys=_KEYS | _COHERE2_FIXED.keys() | words(
        "sliding_window sliding_window_pattern layer_types layer_switch use_embedding_sharing"
    ),
)  # fmt: skip
