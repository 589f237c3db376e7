"""Models of papers that planners are compared on. Named by paper, because their sizes are round only in print.

Sources: Narayanan et al. 2021 (SC'21), table 1 (``megatron-*``); Korthikanti et al. 2022 (arXiv 2205.05198), table 3
(22B and 175B; its 530B and 1T are Narayanan's too); Sailor's training configurations (OPT-350M, GPT-Neo-2.7B). HETHUB's
35B and 140B are *assumed* to be Llama2-70B with 40 and 160 layers (34.8 and 137.4 billion parameters), H2's 100B is
*assumed* to be the same with 116 layers: neither paper publishes them.
"""

from __future__ import annotations

from hetero_megatron.spec.model_spec import ModelSpec


def gpt(
    name: str, layers: int, hidden: int, heads: int, vocab: int = 51200, positions: int = 2048, notice: str = ""
) -> ModelSpec:
    """A GPT-2-like decoder: layer norm, GELU, biases, learned positions, tied embedding."""
    return ModelSpec(
        name, "gpt2", layers, hidden, 4 * hidden, heads, heads, hidden // heads, vocab, positions, norm="layer",
        activation="gelu_tanh", qkv_bias=True, out_bias=True, mlp_bias=True, tied=True, position="learned",
        notices=(notice,) if notice else (),
    )  # fmt: skip


def _deep_llama(name: str, layers: int) -> ModelSpec:
    """Llama2-70B with another depth."""
    notice = f"{name} is assumed to be Llama2-70B with {layers} layers: the paper does not publish its shape"
    return ModelSpec(name, "llama", layers, 8192, 28672, 64, 8, 128, 32000, 4096, notices=(notice,))


PAPER_MODELS = (
    gpt("megatron-1.7b", 24, 2304, 24),
    gpt("megatron-3.6b", 30, 3072, 32),
    gpt("megatron-7.5b", 36, 4096, 32),
    gpt("megatron-18b", 40, 6144, 48),
    gpt("megatron-22b", 48, 6144, 64),
    gpt("megatron-39b", 48, 8192, 64),
    gpt("megatron-76b", 60, 10240, 80),
    gpt("megatron-145b", 80, 12288, 96),
    gpt("gpt3-175b", 96, 12288, 96),
    gpt("megatron-310b", 96, 16384, 128),
    gpt("megatron-530b", 105, 20480, 128),
    gpt("megatron-1t", 128, 25600, 160),
    gpt("opt-350m", 24, 1024, 16, 50272, notice="opt-350m is taken as a pre-norm GELU decoder with tied embedding"),
    gpt("gpt-neo-2.7b", 32, 2560, 20, 50257, notice="gpt-neo-2.7b is taken with full attention in all layers"),
    _deep_llama("hethub-35b", 40),
    _deep_llama("hethub-140b", 160),
    _deep_llama("h2-100b", 116),
)
