"""Hugging Face models as the independent reference, made exact in fp64.

transformers computes RMS norms and rotary tables in fp32 whatever the dtype; for proofs in fp64 those two are
replaced by torch's own ``rms_norm`` and by tables computed in fp64. Everything else is transformers' code.
"""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import eager_mask
from transformers.models.cohere import modeling_cohere
from transformers.models.cohere2 import modeling_cohere2
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.ernie4_5 import modeling_ernie4_5
from transformers.models.llama4 import modeling_llama4
from transformers.models.ministral3 import modeling_ministral3

from hetero_megatron.checkpoint.names import name_table, stored_boxes
from hetero_megatron.layout import Box
from hetero_megatron.spec import ModelSpec, logical_tensors
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.mamba_reference import MIXERS, NORMS, make_exact_mamba
from tests.support.qwen_next_reference import by_document, has_delta, kimi_values, make_exact_delta

OFFSET_FAMILIES = ("gemma", "qwen3_next", "qwen3_5")  # norms multiply with 1 + w
_OFFSET_CLASSES = ("Gemma", "Qwen3Next", "Qwen3_5")
_V3_ROUTERS = (
    "DeepseekV3TopkRouter", "Glm4MoeTopkRouter", "Dots1TopkRouter", "KimiLinearTopkRouter", "NemotronHTopkRouter",
)  # fmt: skip


def make_hf(
    config: dict[str, Any], seed: int, dtype: torch.dtype = torch.float64, attention: str | None = None
) -> tuple[torch.nn.Module, ModelSpec]:
    """A random Hugging Face model, its weights large enough that every term matters, and its spec."""
    torch.manual_seed(seed)
    hf_config = AutoConfig.for_model(**config)
    hf_config._experts_implementation = "eager"
    attention = attention or attention_of(config)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, dtype=torch.float32)
            is_norm = "norm" in name or ".ln_" in name
            scale = 0.02 if is_norm or name.endswith("bias") else 0.15
            offset = config["model_type"].startswith(OFFSET_FAMILIES) and "linear_attn" not in name
            param.copy_(noise * scale + (1.0 if is_norm and name.endswith("weight") and not offset else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # large enough to change choices
                buffer.copy_(torch.randn(buffer.shape) * 0.2)
    model.eval()
    make_exact(model, dtype)
    return model, from_hf_config(config)


def attention_of(config: dict[str, Any]) -> str:
    """transformers' sdpa, where it knows what the family needs; its eager attention is in fp32."""
    return {"gemma2": "exact", "gpt_oss": "exact", "gptj": "eager"}.get(config["model_type"], "sdpa")


def _exact_attention(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: torch.Tensor,
    scaling: float | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' eager attention of Gemma 2 and gpt-oss, without its casts; probabilities times what the module's
    ``score_factors`` makes of them, where it has such."""
    repeat = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(repeat, 1).transpose(2, 3) * (scaling or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    probs = scores.softmax(-1)[..., : k.shape[2]]
    if hasattr(module, "score_factors"):
        probs = probs * module.score_factors(probs)
    return (probs @ v.repeat_interleave(repeat, 1)).transpose(1, 2).contiguous(), None


AttentionInterface.register("exact", _exact_attention)
AttentionMaskInterface.register("exact", eager_mask)


def make_exact(model: torch.nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = _exact_rms_norm(module)  # type: ignore[method-assign]
        elif has_delta(module):
            make_exact_delta(module, dtype)
        elif kind in (*MIXERS, *NORMS):
            make_exact_mamba(module, dtype)
        elif kind in ("CohereLayerNorm", "Cohere2LayerNorm"):
            module.forward = _exact_cohere_norm(module)  # type: ignore[method-assign]
        elif kind == "NemotronHForCausalLM":
            module.forward = _exact_nemotron_h(module)  # type: ignore[method-assign]
        elif kind == "GPTJAttention":
            _exact_gptj(module)
        elif kind.endswith("RotaryEmbedding"):
            module.forward = _exact_rotary(module, dtype)  # type: ignore[method-assign]
        elif kind.lower().endswith("topkrouter") and kind != "GptOssTopKRouter":
            module.forward = _exact_router(module)  # type: ignore[method-assign]
        elif kind in _LLAMA4:
            _LLAMA4[kind](module)
        elif "ScaledWordEmbedding" in kind:
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=dtype)


def _exact_rms_norm(module: Any) -> Any:
    """Gemma's, Qwen3-Next's and Qwen3.5's multiply with 1 + w."""
    gemma, eps = type(module).__name__.startswith(_OFFSET_CLASSES), getattr(module, "variance_epsilon", None)
    eps = module.eps if eps is None else eps
    return lambda x: F.rms_norm(x, (x.shape[-1],), 1.0 + module.weight if gemma else module.weight, eps)


def _exact_cohere_norm(module: Any) -> Any:
    """LayerNorm without bias; of queries and keys with weights for each head."""
    width, eps = module.weight.shape[-1:], module.variance_epsilon
    return lambda x: F.layer_norm(x, width, eps=eps) * module.weight


def _exact_nemotron_h(model: Any) -> Any:
    """Without its cast of the logits to fp32."""
    return lambda **inputs: SimpleNamespace(logits=model.lm_head(model.model(**inputs).last_hidden_state))


def _exact_gptj(module: Any) -> None:
    """GPT-J's attention and its table of angles without casts."""
    half = module.pos_embd_dim // 2
    angles = torch.arange(module.max_positions).double()[:, None] * 10000.0 ** -(torch.arange(half).double() / half)
    table = torch.cat([angles.sin(), angles.cos()], 1)
    torch.testing.assert_close(table.float(), module.embed_positions.float(), rtol=1e-4, atol=1e-4)
    module.embed_positions = table

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        scores = q @ k.transpose(-1, -2) / module.head_dim**0.5
        scores = scores if mask is None else scores + mask
        return scores.softmax(-1) @ v, None

    module._attn = attend


def _exact_router(module: Any) -> Any:
    """transformers' rules for routers, which it computes in fp32."""
    if type(module).__name__ in _V3_ROUTERS:
        return lambda x: _deepseek_v3_router(module, x)
    if type(module).__name__ == "DeepseekV2TopkRouter":
        return lambda x: _deepseek_v2_router(module, x)
    normalize = getattr(module, "norm_topk_prob", True)  # Mixtral's always does

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = F.linear(x.reshape(-1, module.weight.shape[1]), module.weight)
        weights, experts = logits.softmax(-1).topk(module.top_k, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True) if normalize else weights, experts

    return forward


def _only_groups(scores: torch.Tensor, module: Any, best: int, otherwise: float) -> torch.Tensor:
    """``scores`` outside of a token's best groups, by the sum of their ``best`` best experts, become ``otherwise``."""
    parts = scores.unflatten(-1, (module.num_group, -1))
    groups = parts.topk(best, dim=-1).values.sum(-1).topk(module.topk_group, dim=-1).indices
    kept = torch.zeros(parts.shape[:2], dtype=torch.bool).scatter_(1, groups, True)
    return parts.masked_fill(~kept[..., None], otherwise).flatten(1)


def _deepseek_v2_router(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = F.linear(x.reshape(-1, module.weight.shape[1]), module.weight)
    scores = logits.softmax(-1)
    if module.topk_method == "group_limited_greedy":
        scores = _only_groups(scores, module, 1, 0.0)
    weights, experts = scores.topk(module.top_k, dim=-1)
    return logits, weights * module.routed_scaling_factor, experts


def _deepseek_v3_router(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = F.linear(x.reshape(-1, module.weight.shape[1]), module.weight)
    scores = logits.sigmoid()
    choice = _only_groups(scores + module.e_score_correction_bias, module, 2, float("-inf"))
    experts = choice.topk(module.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if module.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return logits, weights * module.routed_scaling_factor, experts


def _exact_complex_rope(q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V2's rotation without its casts."""
    pairs = (torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous()) for x in (q, k))
    q, k = (torch.view_as_real(x * turns.unsqueeze(1)).flatten(3) for x in pairs)
    return q, k


def _exact_interleaved_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """ERNIE 4.5's rotation, and Cohere's with tables in halves, without their casts."""
    half = cos.shape[-1] // 2
    cos, sin = (x[..., :half].unsqueeze(1).repeat_interleave(2, dim=-1) for x in (cos, sin))
    q, k = (x * cos + modeling_ernie4_5.rotate_half(x) * sin for x in (q, k))
    return q, k


def _exact_llama4_rope(q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Llama 4's, whose heads are the axis before the last."""
    return tuple(x.transpose(1, 2) for x in _exact_complex_rope(q.transpose(1, 2), k.transpose(1, 2), turns))  # type: ignore[return-value]


def _exact_llama4_router(module: Any) -> None:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.linear(x, module.weight)
        best, experts = logits.topk(module.top_k, dim=1)
        return torch.zeros_like(logits).scatter(1, experts, best.sigmoid()), logits

    module.forward = forward


def _exact_llama4_norm(module: Any) -> None:
    module.forward = lambda x: F.rms_norm(x, x.shape[-1:], None, module.eps)


def _exact_llama4_growth(module: Any) -> None:
    """Queries without positions grow in fp64, and with the position in their document: transformers counts along the
    row also where it has several. What lies between projection and attention in such layers is this factor alone."""
    attention = module.self_attn
    if not attention.attn_temperature_tuning or attention.use_rope:
        return
    attention.attn_temperature_tuning, layer, project = False, module.forward, attention.q_proj.forward
    positions: list[torch.Tensor] = []

    def forward(*args: Any, position_ids: torch.Tensor, **options: Any) -> Any:
        positions[:] = [position_ids]
        return layer(*args, position_ids=position_ids, **options)

    def grown(x: torch.Tensor) -> torch.Tensor:
        passed = torch.floor((positions[0].double() + 1) / attention.floor_scale)
        return project(x) * (torch.log1p(passed) * attention.attn_scale + 1)[..., None]  # type: ignore[no-any-return]

    module.forward, attention.q_proj.forward = forward, grown


_LLAMA4 = {
    "Llama4Router": _exact_llama4_router, "Llama4TextL2Norm": _exact_llama4_norm,
    "Llama4TextDecoderLayer": _exact_llama4_growth,
}  # fmt: skip
modeling_deepseek_v2.apply_rotary_emb = _exact_complex_rope
modeling_llama4.apply_rotary_emb = _exact_llama4_rope


def _exact_growth(positions: torch.Tensor, beta: float, length: int) -> torch.Tensor:
    """Ministral 3's factor of queries in fp64."""
    return (1 + beta * torch.log(1 + torch.floor(positions.double() / length)))[:, None, :, None]


modeling_ministral3.get_llama_4_attn_scale = _exact_growth
modeling_ernie4_5.apply_rotary_pos_emb = _exact_interleaved_rope


def _rope_of_cohere(theirs: Any) -> Any:
    """Exact where the tables are in halves (:func:`_exact_rotary`); transformers' own, of pairs, for other models."""

    def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any) -> Any:
        pairs = torch.equal(cos[..., ::2], cos[..., 1::2]) and torch.equal(sin[..., ::2], sin[..., 1::2])
        return theirs(q, k, cos, sin, *more) if pairs else _exact_interleaved_rope(q, k, cos, sin)

    return rope


for _cohere in (modeling_cohere, modeling_cohere2):
    _cohere.apply_rotary_pos_emb = _rope_of_cohere(_cohere.apply_rotary_pos_emb)


def _exact_rotary(module: Any, dtype: torch.dtype) -> Any:
    """Of a module with one rotary embedding, or one per kind of layer."""
    once = type(module).__name__.startswith("GptOss")  # a number per pair of features

    def tables(position_ids: torch.Tensor, kind: str | None) -> Any:
        rope = module.config.rope_parameters if kind is None else module.config.rope_parameters[kind]
        prefix = "" if kind is None else f"{kind}_"
        position_ids = position_ids[0] if position_ids.dim() == 3 else position_ids  # of text, all three are the same
        inv_freq = exact_frequencies(module.config, rope, int(position_ids.max()) + 1)
        if rope["rope_type"] != "longrope":
            # transformers computes the same numbers in fp32: so the rules below are not wrong in the same way as ours.
            theirs = getattr(module, f"{prefix}inv_freq").float()
            torch.testing.assert_close(inv_freq.float(), theirs, rtol=2e-6, atol=1e-10)
        angles = position_ids[..., None].double() * inv_freq
        if type(module).__name__ in ("DeepseekV2RotaryEmbedding", "Llama4TextRotaryEmbedding"):
            return torch.polar(torch.full_like(angles, module.attention_scaling), angles)
        both = angles if once else torch.cat([angles, angles], dim=-1)
        factor = getattr(module, f"{prefix}attention_scaling")
        return (both.cos() * factor).to(dtype), (both.sin() * factor).to(dtype)

    def forward(x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        return tables(position_ids, layer_type)

    return forward


def exact_frequencies(config: Any, rope: dict[str, Any], length: int = 0) -> torch.Tensor:
    """fp64: the rules of transformers/modeling_rope_utils.py, pair by pair, for positions up to ``length``."""
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kind, share = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
    if kind == "proportional":
        turned = int(share * d // 2)
        plain = [rope["rope_theta"] ** (-2 * i / d) / rope.get("factor", 1.0) for i in range(turned)]
        return torch.tensor(plain + [0.0] * (d // 2 - turned), dtype=torch.float64)
    d = int(d * share)
    plain = [rope["rope_theta"] ** (-2 * i / d) for i in range(d // 2)]
    if kind == "linear":
        plain = [f / rope["factor"] for f in plain]
    elif kind == "llama3":
        plain = [_llama3_frequency(f, rope) for f in plain]
    elif kind == "yarn":
        plain = [_yarn_frequency(i, f, d, rope) for i, f in enumerate(plain)]
    elif kind == "longrope":
        long = length > rope["original_max_position_embeddings"]
        plain = [f / x for f, x in zip(plain, rope["long_factor" if long else "short_factor"], strict=True)]
    return torch.tensor(plain, dtype=torch.float64)


def _yarn_frequency(i: int, frequency: float, d: int, rope: dict[str, Any]) -> float:
    def pair(rotations: float) -> float:
        full = rope["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return d * math.log(full) / (2 * math.log(rope["rope_theta"]))

    low, high = pair(rope.get("beta_fast") or 32), pair(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    ramp = min(max((i - low) / ((high - low) or 0.001), 0), 1)
    return frequency / rope["factor"] * ramp + frequency * (1 - ramp)


def _llama3_frequency(frequency: float, rope: dict[str, Any]) -> float:
    context, wavelength = rope["original_max_position_embeddings"], 2 * math.pi / frequency
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if wavelength < context / high:
        return frequency
    if wavelength > context / low:
        return frequency / rope["factor"]
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / rope["factor"] + smooth * frequency


def _logical(values: dict[str, torch.Tensor], spec: ModelSpec) -> dict[str, torch.Tensor]:
    table, found = name_table(spec), dict[str, torch.Tensor]()
    values = kimi_values(values) if spec.hf_model_type == "kimi_linear" else values
    if spec.hf_model_type == "nemotron_h":  # transformers writes files with the other name
        values = {re.sub(r"^model\.", "backbone.", name): value for name, value in values.items()}
    values = {name.replace("moe.router.weight", "moe.router.layer.weight"): value for name, value in values.items()}
    for tensor in logical_tensors(spec):
        if ".experts." in tensor.name:
            found[tensor.name] = _of_experts(values, tensor.name, spec.hf_model_type).contiguous()
            continue
        parts = list[torch.Tensor]()
        for one, box in stored_boxes(spec, tensor, Box.whole(tensor.shape)):
            source = table[one.name]
            stored = values[source.name if source.name in values else one.name]
            stored = stored.view(source.view(tuple(stored.shape)))
            parts += [stored[slices] for _, slices in source.runs(box)]
        value = torch.cat(parts)
        found[tensor.name] = (value.T if source.transpose else value).contiguous()
    return found


def _of_experts(values: dict[str, torch.Tensor], name: str, family: str) -> torch.Tensor:
    """transformers keeps all experts, gate and up, in one tensor; gpt-oss' are transposed and interleaved, Llama 4's
    transposed."""
    prefix, column, kind = name.rsplit(".", 2)
    if family == "nemotron_h":  # without gates
        return values[f"{prefix.replace('model.', 'backbone.').replace('.mlp.', '.mixer.')}.{column}"]
    places = {"llama4_text": ".feed_forward.", "granitemoehybrid": ".block_sparse_moe."}
    prefix = prefix.replace(".mlp.", places.get(family, ".mlp."))
    fused = values[f"{prefix}.{'down_proj' if column == 'down_proj' else 'gate_up_proj'}{'_bias' * (kind == 'bias')}"]
    if family in ("gpt_oss", "llama4_text") and kind == "weight":
        fused = fused.transpose(1, 2)
    if column == "down_proj":
        return fused
    second = column == "up_proj"
    return fused[:, int(second) :: 2] if family == "gpt_oss" else fused.chunk(2, dim=1)[second]


def hf_to_logical(model: torch.nn.Module, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Views of the model's parameters by logical name (contiguous copies where transposed)."""
    return _logical({n: p.detach() for n, p in [*model.named_parameters(), *model.named_buffers()]}, spec)


def hf_grads(model: torch.nn.Module, spec: ModelSpec) -> dict[str, torch.Tensor]:
    return _logical(
        {n: torch.zeros_like(b) for n, b in model.named_buffers()}  # a router's bias has no gradient
        | {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}, spec
    )


def hf_logits(
    model: torch.nn.Module, tokens: torch.Tensor, positions: torch.Tensor, documents: list[list[int]] | None
) -> torch.Tensor:
    """Logits [b, s, V]; packed documents through an explicit block-diagonal causal mask."""
    if documents is not None and "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
        return by_document(lambda x, at: hf_logits(model, x, at, None), tokens, positions, documents)
    b, s = tokens.shape
    dtype, window = next(model.parameters()).dtype, getattr(model.config, "sliding_window", None)
    allowed = torch.ones(s, s, dtype=torch.bool).tril().expand(b, 1, s, s).clone()
    for row, starts in enumerate(documents or []):
        for start in starts:
            allowed[row, :, start:, :start] = False
    near = allowed if window is None else allowed & torch.ones(s, s, dtype=torch.bool).triu(1 - window)
    chunk = getattr(model.config, "attention_chunk_size", None) or s
    number = positions[:, None] // chunk
    alone = allowed & (number[..., None] == number[..., None, :])
    full, sliding, chunked = (
        torch.zeros(b, 1, s, s, dtype=dtype).masked_fill(~x, float("-inf")) for x in (allowed, near, alone)
    )
    kinds = getattr(model.config, "layer_types", None)
    mask: Any = sliding if kinds is None else {
        "full_attention": full, "sliding_attention": sliding, "chunked_attention": chunked,
        "linear_attention": None,
    }  # fmt: skip
    return model(input_ids=tokens, position_ids=positions, use_cache=False, attention_mask=mask).logits  # type: ignore[no-any-return]


def hf_loss_sum(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    positions: torch.Tensor,
    documents: list[list[int]] | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Sum of the token losses that ``mask`` lets count, in the model's dtype."""
    b, s = tokens.shape
    logits = hf_logits(model, tokens, positions, documents)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(b, s)
    return losses.sum() if mask is None else (losses * mask).sum()
