"""Families of transformers that are not supported: what of them is missing here, and the nearest that is supported."""

from __future__ import annotations

_STATE_SPACE = "state-space layers of Mamba-1"
_LINEAR = "layers of linear attention"
_ALIBI = "position biases (ALiBi)"
_TURNED = "norms of queries and keys after their rotation"
_IMAGES = "images beside text: its language model alone is supported where its own model_type is"

# model_type -> (what it needs, the nearest model_type that is supported)
REFUSED: dict[str, tuple[str, str]] = {
    "afmoe": ("gates on the output of attention", "qwen3_moe"),
    "apertus": ("the activation xIELU", "arcee"),
    "bitnet": ("ternary weights", "llama"),
    "bloom": (_ALIBI, "gpt2"),
    "codegen": ("queries, keys and values in one matrix, in four parts", "gptj"),
    "dbrx": ("clamped queries, keys and values", "mixtral"),
    "deepseek_v32": ("attention to tokens that an indexer chooses", "deepseek_v3"),
    "ernie4_5_moe": ("a softmax router with a bias for the choice", "deepseek_v3"),
    "exaone_moe": ("multi-token prediction beside experts", "glm4_moe"),
    "falcon_h1": ("attention and Mamba-2 side by side in a layer", "bamba"),
    "falcon_mamba": (_STATE_SPACE, "llama"),
    "gemma3": (_IMAGES, "gemma3_text"),
    "gemma3n": (_IMAGES, "gemma3_text"),
    "gemma3n_text": ("embeddings per layer, and keys and values that layers share", "gemma3_text"),
    "gemma4": (_IMAGES, "gemma3_text"),
    "gemma4_text": ("keys and values that layers share", "gemma3_text"),
    "glm_moe_dsa": ("attention to tokens that an indexer chooses", "glm4_moe"),
    "gpt_bigcode": ("learned positions with one key-value head", "starcoder2"),
    "gpt_neo": ("windows with learned positions, and unscaled attention", "gpt2"),
    "granitemoe": ("experts stored as GraniteMoE has them", "granite"),
    "hunyuan_v1_dense": (_TURNED, "qwen3"),
    "hunyuan_v1_moe": (_TURNED, "qwen3_moe"),
    "jamba": (_STATE_SPACE, "granitemoehybrid"),
    "jetmoe": ("experts in attention", "mixtral"),
    "lfm2": ("convolutions between tokens", "llama"),
    "lfm2_moe": ("convolutions between tokens", "qwen3_moe"),
    "longcat_flash": ("experts that do nothing, and two attentions per layer", "deepseek_v3"),
    "mamba": (_STATE_SPACE, "llama"),
    "mamba2": ("layers without an MLP", "bamba"),
    "minimax": (_LINEAR, "mixtral"),
    "mistral3": (_IMAGES, "mistral"),
    "mllama": (_IMAGES, "llama"),
    "mpt": (_ALIBI, "gpt2"),
    "nanochat": (_TURNED, "arcee"),
    "olmo": ("LayerNorm without weights", "olmo2"),
    "olmo_hybrid": ("norms before linear attention, and after attention", "olmo3"),
    "opt": ("learned positions with an offset, and ReLU", "gpt2"),
    "persimmon": ("queries, keys and values in one matrix, head by head", "nemotron"),
    "phimoe": ("routers of SparseMixer", "mixtral"),
    "recurrent_gemma": ("recurrent layers", "gemma2"),
    "rwkv": ("recurrent layers", "llama"),
    "xlstm": ("recurrent layers", "llama"),
    "zamba": (_STATE_SPACE, "llama"),
    "zamba2": ("attention that layers share", "bamba"),
}  # fmt: skip


def why(model_type: str) -> str:
    """What a refusal of this family says about it; empty for families that nobody has looked at."""
    if model_type not in REFUSED:
        return ""
    lacks, supported = REFUSED[model_type]
    return f"it needs {lacks}; the nearest that is supported is {supported}"
